"""Redirections of the CUDA calls of megatron-core 0.16.1, so that it runs on the CPU.

They are for processes whose setting is the CPU, even if they could see a GPU. A process on a GPU
never uses them. Call `install` before the first import of megatron-core.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch

# torch without types, because this module replaces its functions by others.
_torch: Any = torch
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
    # Without it: if a GPU is visible, megatron-core and other libraries allocate tensors on it.
    _torch.cuda.is_available = lambda: False
    _torch.cuda.device_count = lambda: 0


def _import_without_compiler() -> None:
    # Without it: megatron-core wraps functions in torch.compile during its import, which loads the
    # compiler (1.3 s).
    original = torch.compile
    _torch.compile = lambda model=None, **_: model or (lambda function: function)
    try:
        importlib.import_module("megatron.core")
    finally:
        _torch.compile = original


def _optimize_without_compiler() -> None:
    # Without it: the first optimizer and its first step load the compiler, only to exclude their
    # methods from compilation (0.5 s of every start; torch 2.13).
    for method in ("add_param_group", "state_dict", "load_state_dict", "zero_grad"):
        original = inspect.unwrap(getattr(torch.optim.Optimizer, method))
        original.__dict__.setdefault("__dynamo_disable", original)
    for optimizer in (_torch.optim.Adam, _torch.optim.SGD):
        unwrapped = torch.no_grad()(inspect.unwrap(optimizer.step))
        optimizer.step = unwrapped


def _redirect_current_device() -> None:
    # Without it: rotary embeddings, gradient buffers and tensor-parallel gathers allocate on CUDA.
    _torch.cuda.current_device = lambda: _CPU


def _redirect_random_state() -> None:
    # Without it: the random-state tracker that attention dropout forks cannot be seeded ("rng state
    # is not added").
    from megatron.core.tensor_parallel import random

    _torch.cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    _torch.cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    _torch.cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(seed)
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


class _NullStream:
    """Stream or event of a device that executes all work in order."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., Any]:
        # The result of `record_event` must have methods too.
        return lambda *_, **__: self


def _redirect_streams() -> None:
    # Without it: pipeline exchange and checkpointing synchronize a missing device.
    _torch.cuda.synchronize = lambda *_, **__: None
    _torch.cuda.current_stream = _torch.cuda.default_stream = lambda *_, **__: _NullStream()
    _torch.cuda.Stream = _torch.cuda.Event = _NullStream
    _torch.cuda.stream = lambda _: contextlib.nullcontext()


def _redirect_moves() -> None:
    # Without it: the distributed optimizer cannot gather its state for a checkpoint.
    _torch.Tensor.cuda = lambda self, *_, **__: self


def _redirect_expert_splits() -> None:
    # Without it: the exchange between expert-parallel ranks gets its sizes as a tensor, which it
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

    _torch.Tensor.type = type_name


class _TorchOnCpu:
    """Replacement of `torch` inside one module. Its factories ignore device="cuda" and pinned
    memory."""

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
    # Without it: schedules, loss scale and found-inf tensors are created with the literal
    # device="cuda".
    for name in _MODULES_WITH_CUDA_LITERALS:
        importlib.import_module(name).torch = _TorchOnCpu()  # type: ignore[attr-defined]
