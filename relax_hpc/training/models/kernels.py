"""Implementations of layers by the name that `actor.kernels` has: never by what happens to be
installed."""

from __future__ import annotations

import importlib
from typing import Any

from relax_hpc.base.errors import ConfigError
from relax_hpc.config.schema import Kernels

_MODULES = {
    "fused": ("triton", "relax_hpc.training.models.triton_layers"),
    "te": ("transformer_engine.pytorch",),
}


def prepare(kernels: Kernels, device: str) -> None:
    """Import what ``kernels`` need, before megatron-core's configuration is made.

    ConfigError: a module of theirs is missing or broken, or they do not run on ``device``, "cpu" or
    "cuda".
    """
    for name in _MODULES.get(kernels, ()):
        # A package built for another torch fails with whatever its loader raises.
        try:
            importlib.import_module(name)
        except Exception as error:
            raise ConfigError(
                f"actor.kernels: found {kernels}, but {name} cannot be imported ({error}); install "
                "it, or set plain"
            ) from error
    if device == "cpu" and kernels != "plain" and not (kernels == "fused" and interprets()):
        raise ConfigError(
            f"actor.kernels: found {kernels} on a CPU, allowed: plain; it is compiled for GPUs "
            "alone"
        )
    if kernels == "fused":
        from relax_hpc.training.models import triton_layers

        triton_layers.install()


def interprets() -> bool:
    """Whether Triton kernels run in its interpreter, on a CPU."""
    from triton import knobs

    return knobs.runtime.interpret


def transformer_settings(kernels: Kernels, experts: bool) -> dict[str, Any]:
    """Settings of megatron-core's transformer configuration that ``kernels`` decide. ``experts``:
    whether layers have experts, whose activation is weighted by token, as "fused" cannot do."""
    fused = kernels == "fused"
    return {"apply_rope_fusion": fused, "bias_activation_fusion": fused and not experts}
