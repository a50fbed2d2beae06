"""Implementations of layers. Only the setting `actor.kernels` selects them, not the installed
packages."""

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
    """Import the modules of ``kernels``, before megatron-core's configuration is built.

    ConfigError: a module is missing or broken, or the kernels do not run on ``device``, "cpu" or
    "cuda".
    """
    # An import error must appear here with the name of the setting, not later in megatron-core.
    for name in _MODULES.get(kernels, ()):
        # A package that was built for another torch can fail with any exception of its loader.
        try:
            importlib.import_module(name)
        except Exception as error:
            raise ConfigError(
                f"actor.kernels: found {kernels}, but {name} cannot be imported ({error}); install "
                "it, or set plain"
            ) from error
    if device == "cpu" and kernels != "plain" and not (kernels == "fused" and interprets()):
        raise ConfigError(
            f"actor.kernels: found {kernels} on a CPU, allowed: plain; it is compiled only for GPUs"
        )
    if kernels == "fused":
        from relax_hpc.training.models import triton_layers

        triton_layers.install()
        if device == "cuda":
            compile_first(device)


def compile_first(device: str) -> None:
    """Compile one kernel of `fused` and run it on ``device``.

    Triton 3.7 needs a C compiler at run time, which some nodes lack. ConfigError: it fails, except
    for faults of the device.
    """
    import torch

    from relax_hpc.training.models import triton_layers

    try:
        triton_layers.run_small_norm(device)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:
        raise ConfigError(
            f"actor.kernels: found fused, but Triton cannot compile a kernel here ({error}); "
            "install a C compiler, or set plain"
        ) from error


def interprets() -> bool:
    """Whether Triton kernels run in Triton's interpreter, on a CPU."""
    from triton import knobs

    return knobs.runtime.interpret


def transformer_settings(kernels: Kernels, experts: bool) -> dict[str, Any]:
    """Settings of megatron-core's transformer configuration that ``kernels`` decide.

    ``experts``: whether layers have experts. Their activation is weighted by token, which "fused"
    does not support.
    """
    fused = kernels == "fused"
    return {"apply_rope_fusion": fused, "bias_activation_fusion": fused and not experts}
