"""Lets megatron-core run on the CPU: device calls that it makes unconditionally are redirected.

For processes that were asked to compute on the CPU, whatever GPUs they could see; one that computes
on a GPU is never touched. `install` comes before anything else imports megatron-core, and once is
enough.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch

_CPU = torch.device("cpu")
_FACTORIES = frozenset(
    (
        "tensor",
        "zeros",
        "ones",
        "empty",
        "full",
        "arange",
        "zeros_like",
        "ones_like",
        "empty_like",
        "rand",
        "randn",
    )
)
_MODULES_WITH_CUDA_LITERALS = (
    "megatron.core.utils",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.optimizer.optimizer",
    "megatron.core.optimizer.clip_grads",
    "megatron.core.optimizer.grad_scaler",
    "megatron.core.tensor_parallel.data",
    "megatron.core.transformer.utils",
    "megatron.core.models.common.embeddings.rope_utils",
    "megatron.core.models.common.embeddings.rotary_pos_embedding",
    "megatron.core.dist_checkpointing.exchange_utils",
)
_installed = False


def install() -> None:
    """Apply every redirection once."""
    global _installed
    if _installed:
        return
    _hide_devices()
    _import_without_compiler()
    _optimize_without_compiler()
    _redirect_current_device()
    _redirect_random_state()
    _redirect_streams()
    _redirect_moves()
    _redirect_expert_splits()
    _redirect_type_names()
    _redirect_device_literals()
    _installed = True


def _hide_devices() -> None:
    # Without it: where a GPU can be seen, megatron-core and whatever asks "is there one?" put
    # tensors on it.
    torch.cuda.is_available = lambda: False
    torch.cuda.device_count = lambda: 0


def _import_without_compiler() -> None:
    # Without it: megatron-core wraps functions in torch.compile as it is imported, which loads the
    # compiler (1.3 s).
    original = torch.compile
    torch.compile = lambda model=None, **_: model or (lambda function: function)  # type: ignore[assignment]
    try:
        importlib.import_module("megatron.core")
    finally:
        torch.compile = original


def _optimize_without_compiler() -> None:
    # Without it: the first optimizer, and its first step, load the compiler, only to say what is
    # not to be compiled (0.5 s of every start).
    for method in ("add_param_group", "state_dict", "load_state_dict", "zero_grad"):
        original = inspect.unwrap(getattr(torch.optim.Optimizer, method))
        original.__dict__.setdefault("__dynamo_disable", original)
    for optimizer in (torch.optim.Adam, torch.optim.SGD):
        optimizer.step = torch.no_grad()(inspect.unwrap(optimizer.step))  # type: ignore[method-assign]


def _redirect_current_device() -> None:
    # Without it: rotary embeddings, gradient buffers and tensor-parallel gathers allocate on CUDA.
    torch.cuda.current_device = lambda: _CPU  # type: ignore[assignment,return-value]


def _redirect_random_state() -> None:
    # Without it: the random-state tracker that attention dropout forks cannot be seeded ("rng state
    # is not added").
    from megatron.core.tensor_parallel import random

    torch.cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()  # type: ignore[assignment]
    torch.cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)  # type: ignore[assignment]
    torch.cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(seed)  # type: ignore[assignment]
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


class _NullStream:
    """A stream or event on a device where everything is already in order."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., Any]:
        # A stream's `record_event` gives something to wait for.
        return lambda *_, **__: self


def _redirect_streams() -> None:
    # Without it: pipeline exchange and checkpointing synchronise a device that is not there.
    torch.cuda.synchronize = lambda *_, **__: None  # type: ignore[assignment]
    torch.cuda.current_stream = torch.cuda.default_stream = lambda *_, **__: _NullStream()  # type: ignore[assignment]
    torch.cuda.Stream = torch.cuda.Event = _NullStream  # type: ignore[assignment,misc]
    torch.cuda.stream = lambda _: contextlib.nullcontext()  # type: ignore[assignment]


def _redirect_moves() -> None:
    # Without it: the distributed optimizer cannot gather its state for a checkpoint.
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[assignment]


def _redirect_expert_splits() -> None:
    # Without it: the exchange between expert-parallel ranks is told its sizes by a tensor, which it
    # cannot iterate.
    from megatron.core.transformer.moe import token_dispatcher

    def on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = on_host


def _redirect_type_names() -> None:
    # Without it: gradient clipping and the bf16 optimizer refuse tensors whose type name is not
    # torch.cuda.FloatTensor.
    original = torch.Tensor.type

    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if args or kwargs or result.startswith("torch.cuda."):
            return result
        return result.replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = type_name  # type: ignore[assignment]


class _TorchOnCpu:
    """Stands for `torch` inside one module: factories ignore device="cuda" and pinned memory."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        return _on_cpu(value) if name in _FACTORIES else value


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make


def _redirect_device_literals() -> None:
    # Without it: schedules, loss scale and found-inf tensors are made with device="cuda" written
    # out.
    for name in _MODULES_WITH_CUDA_LITERALS:
        importlib.import_module(name).torch = _TorchOnCpu()  # type: ignore[attr-defined]
