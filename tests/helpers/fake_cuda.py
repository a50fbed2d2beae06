"""A CUDA device without a GPU and without a driver: its tensors have no values, and everything that
a run does with them is recorded.

Tensors on the device are FakeTensors of torch. Tensors on the host are real, so that sizes and
names that the host computes are right. Triton kernels are not launched; their arguments are checked.

Call `install` once, in a separate process: it replaces functions of torch.cuda. It needs the
environment of `start_environment`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

ALLOCATION_BYTES = 512
"""torch's CUDA allocator rounds sizes up to a multiple of it (torch 2.13, c10/cuda)."""
DEVICE = torch.device("cuda", 0)
_aten = torch.ops.aten
# Their results have a size that the host has to read from the device.
_SIZED_BY_VALUES = {
    _aten.nonzero.default,
    _aten.masked_select.default,
    _aten._unique2.default,
    _aten.unique_dim.default,
    _aten.repeat_interleave.Tensor,
    _aten.bincount.default,
    _aten.equal.default,
    _aten.is_nonzero.default,
}
_INDEXING = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default}
_SCALARS = {_aten._local_scalar_dense.default, _aten.item.default}


@dataclass
class Record:
    """What a run did on the device since the record began."""

    waits: Counter[str] = field(default_factory=Counter)
    """Calls with which the host waits for the device, by kind and location."""
    copies: Counter[str] = field(default_factory=Counter)
    """Copies between host and device for which the host waits, or for which it needs pageable
    memory."""
    host_operands: Counter[str] = field(default_factory=Counter)
    """Operations of the device that take a tensor of the host, except pinned copies."""
    launches: Counter[str] = field(default_factory=Counter)
    """Launches of Triton kernels by name."""
    operations: int = 0
    start_bytes: int = 0
    """Bytes on the device when the record began."""
    peak_bytes: int = 0
    """Most bytes on the device at once."""

    def as_json(self) -> dict[str, Any]:
        """The fields as JSON has them."""
        return {
            name: dict(value) if isinstance(value, Counter) else value
            for name, value in vars(self).items()
        }


class FakeDevice(TorchDispatchMode):
    """Context in which tensors may be on the device. It counts the bytes of their storages, each as
    long as it exists."""

    def __init__(self) -> None:
        super().__init__()
        self.fake = _FakeMode(allow_non_fake_inputs=True)
        self.record = Record()
        self._sizes: dict[int, int] = {}
        self._bytes = 0
        # Storages of pinned host memory, by address of torch's object, which they keep alive.
        self._pinned: dict[int, Any] = {}
        self._collectives = count(1)

    def __enter__(self) -> FakeDevice:
        self.fake.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.fake.__exit__(*error)

    @contextlib.contextmanager
    def recording(self) -> Iterator[Record]:
        """Context with a new record."""
        previous, self.record = self.record, Record(start_bytes=self._bytes, peak_bytes=self._bytes)
        try:
            yield self.record
        finally:
            self.record = previous

    # -- host memory -------------------------------------------------------------------------------

    def pin(self, tensor: Tensor) -> Tensor:
        """Mark the memory of a tensor on the host as pinned."""
        storage = tensor.untyped_storage()
        self._pinned[storage._cdata] = storage
        return tensor

    def allocate_host_memory(self, size: int, pinned: bool, purpose: str) -> Tensor:
        """Replacement of `host_memory.allocate_host_memory` that needs no memory."""
        with _disable_current_modes():
            values = FakeTensor(
                self.fake,
                torch.empty(size, dtype=torch.uint8, device="meta"),
                torch.device("cpu"),
            )
        return self.pin(values) if pinned else values

    def _is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._pinned

    # -- operations --------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, operation: Any, _: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        if operation.namespace == "prim":
            # Reading the device or the layout of a tensor is no work of the device.
            return operation(*args, **kwargs)
        if operation.namespace == "c10d":
            return self._run_collective(operation, args, tensors)
        if not _concerns_device(tensors, kwargs):
            # The host computes with real values.
            with _disable_current_modes():
                return operation(*args, **kwargs)
        self.record.operations += 1
        if operation in _SCALARS:
            return self._read_scalar(tensors[0])
        self._find_waits(operation, args, tensors)
        if operation in (_aten._to_copy.default, _aten.copy_.default):
            self._find_blocking_copy(operation, args, kwargs)
        else:
            self._find_host_operands(operation, tensors)
        workspace = _workspace_bytes(operation, args)
        self.record.peak_bytes = max(self.record.peak_bytes, self._bytes + workspace)
        results = operation(*args, **kwargs)
        for result in tree_leaves(results):
            if isinstance(result, Tensor):
                self._count(result)
        return results

    def _run_collective(self, operation: Any, args: tuple[Any, ...], tensors: list[Tensor]) -> Any:
        """Result of a collective of torch.distributed. Its tensors keep their unknown values."""
        self._find_host_operands(operation, tensors)
        work = FakeWork()
        work.seq_id = next(self._collectives)
        results = len(operation._schema.returns)
        return (args[0], work.boxed()) if results == 2 else work.boxed()

    def _read_scalar(self, tensor: Tensor) -> float | bool:
        if tensor.device.type == "cuda":
            self.record.waits[f"item at {_location()}"] += 1
        if tensor.dtype is torch.bool:
            return True
        return 1.0 if tensor.dtype.is_floating_point else 1

    def _find_waits(self, operation: Any, args: tuple[Any, ...], tensors: list[Tensor]) -> None:
        if operation in _SIZED_BY_VALUES:
            self.record.waits[f"{operation} at {_location()}"] += 1
        if operation in _INDEXING:
            indices = [value for value in tree_leaves(args[1]) if isinstance(value, Tensor)]
            if any(value.dtype in (torch.bool, torch.uint8) for value in indices):
                self.record.waits[f"index by a mask at {_location()}"] += 1

    def _find_blocking_copy(
        self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if operation is _aten.copy_.default:
            target, source = args[:2]
            is_asynchronous = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
            is_pinned = self._is_pinned(target if target.device.type == "cpu" else source)
            devices = source.device.type, target.device.type
        else:
            source = args[0]
            is_asynchronous = kwargs.get("non_blocking")
            # torch pins the memory of an asynchronous copy to the host.
            is_pinned = source.device.type == "cuda" or self._is_pinned(source)
            devices = source.device.type, torch.device(kwargs.get("device") or source.device).type
        if devices[0] == devices[1] or (is_asynchronous and is_pinned):
            return
        text = f"{tuple(source.shape)} {source.dtype} from {devices[0]} to {devices[1]}"
        self.record.copies[f"{text} at {_location()}"] += 1

    def _find_host_operands(self, operation: Any, tensors: list[Tensor]) -> None:
        if all(tensor.device.type == "cpu" for tensor in tensors):
            return
        for tensor in tensors:
            # The value of a tensor without dimensions is an argument of the kernel.
            if tensor.device.type == "cpu" and tensor.dim():
                self.record.host_operands[f"{operation} at {_location()}"] += 1

    def launch(self, kernel: Any, *args: Any) -> None:
        """Check the arguments of a Triton kernel that is not launched."""
        name = kernel.fn.__name__
        self.record.launches[name] += 1
        for value in args:
            if isinstance(value, Tensor) and value.device.type != "cuda":
                self.record.host_operands[f"{name} at {_location()}"] += 1

    # -- memory ------------------------------------------------------------------------------------

    def _count(self, tensor: Tensor) -> None:
        if tensor.device.type != "cuda":
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = 0
            weakref.finalize(storage, self._resize, key, None)
        self._resize(key, storage.nbytes())

    def _resize(self, key: int, size: int | None) -> None:
        """Set the bytes of a storage; None: it no longer exists."""
        rounded = -(-(size or 0) // ALLOCATION_BYTES) * ALLOCATION_BYTES
        self._bytes += rounded - self._sizes.get(key, 0)
        if size is None:
            self._sizes.pop(key, None)
        else:
            self._sizes[key] = rounded
        self.record.peak_bytes = max(self.record.peak_bytes, self._bytes)

    def resize_storage(self, storage: Any, size: int) -> None:
        """Replacement of `UntypedStorage.resize_`."""
        _resize_storage(storage, size)
        if storage._cdata in self._sizes:
            self._resize(storage._cdata, size)


class _FakeMode(FakeTensorMode):
    # torch.cuda.is_available says that there is a device, so that all libraries use it.
    avoid_device_init = property(lambda self: True)


def _concerns_device(tensors: list[Tensor], kwargs: dict[str, Any]) -> bool:
    """Whether an operation has a tensor without values, or makes one on the device."""
    device = kwargs.get("device")
    if device is not None and torch.device(device).type == "cuda":
        return True
    return any(isinstance(tensor, FakeTensor) for tensor in tensors)


def _workspace_bytes(operation: Any, args: tuple[Any, ...]) -> int:
    """Memory that a kernel takes while it runs.

    The backward pass of FlashAttention 2 sums the gradient of the queries in float32, and has those
    of keys and values for each head of the queries (torch 2.13, `mha_varlen_bwd` in
    aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp).
    """
    if operation.name() != "torch_attn::_varlen_attn_backward":
        return 0
    _, query, key = args[:3]
    size = 4 * query.numel()
    if key.shape[1] != query.shape[1]:
        size += 2 * query.element_size() * key.shape[0] * query.shape[1] * query.shape[2]
    return size


_SKIPPED = ("/torch/", "fake_cuda.py", "contextlib.py", "/triton/")


def _location(frames: int = 2) -> str:
    """The innermost calls outside of torch, "file:line function", joined by "<"."""
    found: list[str] = []
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and len(found) < frames:
        path = frame.f_code.co_filename
        if not any(part in path for part in _SKIPPED):
            name = "/".join(path.split("/")[-2:])
            found.append(f"{name}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(found)


# -- replacements ----------------------------------------------------------------------------------

_SOURCE = Path(__file__).with_suffix(".cpp")
_resize_storage = torch.UntypedStorage.resize_


def compile_library(folder: Path) -> Path:
    """The library that stands for a CUDA device in torch's C++ code, in ``folder``."""
    root = Path(torch.__file__).parent
    library, torch_libraries = folder / "libfake_cuda.so", root / "lib"
    command = ["g++", "-std=c++20", "-O0", "-w", "-shared", "-fPIC", "-I", str(root / "include")]
    command += [
        str(_SOURCE),
        "-o",
        str(library),
        "-L",
        str(torch_libraries),
        "-ltorch_cpu",
        "-lc10",
    ]
    command += [f"-Wl,-rpath,{torch_libraries}"]
    subprocess.run(command, check=True, timeout=300)
    return library


def start_environment(library: Path) -> dict[str, str]:
    """Environment of a process that calls `install`."""
    # Kernels are functions of Triton's compiler there, not of its interpreter.
    return os.environ | {"LD_PRELOAD": str(library), "TRITON_INTERPRET": "0"}


class _Properties:
    """Those of an H100, as far as kernels ask for them."""

    name = "NVIDIA H100 80GB HBM3"
    major, minor, multi_processor_count, warp_size = 9, 0, 132, 32
    total_memory = 80 << 30


def install() -> FakeDevice:
    """Replace the functions of torch.cuda in this process."""
    ctypes.CDLL(os.environ["LD_PRELOAD"]).use_fake_device()
    device = FakeDevice()
    _replace_device_functions(device)
    _replace_tensor_methods(device)
    from triton.runtime.jit import JITFunction

    def run(self: Any, *args: Any, **_: Any) -> None:
        device.launch(self, *args)

    JITFunction.run = run
    return device


def _replace_device_functions(device: FakeDevice) -> None:
    cuda: Any = torch.cuda
    _torch: Any = torch

    class NullStream:
        """Stream or event of the device."""

        cuda_stream = device_index = 0

        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def __getattr__(self, name: str) -> Callable[..., Any]:
            return lambda *_, **__: self

        def synchronize(self) -> None:
            device.record.waits[f"synchronize at {_location()}"] += 1

        def query(self) -> bool:
            return True

    def synchronize(*_: Any, **__: Any) -> None:
        device.record.waits[f"synchronize at {_location()}"] += 1

    cuda.is_available = cuda.is_initialized = lambda: True
    cuda.init = cuda._lazy_init = cuda.empty_cache = lambda: None
    cuda.device_count = lambda: 1
    cuda.current_device = lambda: 0
    cuda.set_device = lambda *_: None
    cuda.get_device_properties = lambda *_: _Properties()
    cuda.get_device_name = lambda *_: _Properties.name
    cuda.get_device_capability = lambda *_: (_Properties.major, _Properties.minor)
    cuda.is_bf16_supported = lambda *_, **__: True
    cuda.is_current_stream_capturing = lambda: False
    cuda.mem_get_info = lambda *_: (_Properties.total_memory, _Properties.total_memory)
    cuda.synchronize = synchronize
    cuda.Stream = cuda.Event = NullStream
    stream = NullStream()
    cuda.current_stream = cuda.default_stream = lambda *_, **__: stream
    cuda.stream = cuda.device = lambda *_: contextlib.nullcontext()
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda *_, **__: None
    cuda.manual_seed = cuda.manual_seed_all = lambda *_: None
    from megatron.core.tensor_parallel import random
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    random._get_cuda_rng_state, random._set_cuda_rng_state = cuda.get_rng_state, cuda.set_rng_state
    # torch's optimizers update all parameters of these types together.
    for supported in (optimizer, _foreach_utils):
        supported._foreach_supported_types.append(FakeTensor)


def _replace_tensor_methods(device: FakeDevice) -> None:
    plain_type = torch.Tensor.type

    def type_name(self: Tensor, *args: Any, **named: Any) -> Any:
        result = plain_type(self, *args, **named)
        is_name = isinstance(result, str) and self.device.type == "cuda"
        if is_name and not result.startswith("torch.cuda."):
            return result.replace("torch.", "torch.cuda.", 1)
        return result

    def to_list(self: Tensor) -> Any:
        if self.device.type == "cuda":
            device.record.waits[f"tolist at {_location()}"] += 1
        return np.ones(tuple(self.shape)).tolist()

    def to_numpy(self: Tensor, **_: Any) -> np.ndarray:
        empty = torch.empty((), dtype=self.dtype, device="meta").dtype
        kind = str(empty).removeprefix("torch.")
        return np.zeros(tuple(self.shape), "float32" if kind == "bfloat16" else kind)

    replaced: Any = torch.Tensor
    replaced.type = type_name
    replaced.pin_memory = lambda self, *_: device.pin(self)
    plain_data: Any = torch.Tensor.data

    def set_data(self: Any, value: Tensor) -> None:
        plain_data.__set__(self, value)
        # torch 2.13 keeps the previous device, also if the memory is on another one.
        if isinstance(value, FakeTensor):
            self.fake_device = value.fake_device

    fake: Any = FakeTensor
    fake.tolist, fake.numpy = to_list, to_numpy
    fake.data = property(plain_data.__get__, set_data)
    storage: Any = torch.UntypedStorage
    storage.resize_ = lambda self, size: device.resize_storage(self, size)
    module: Any = torch.nn.Module
    module.to = lambda self, *_, **__: _move(self)


def _move(module: torch.nn.Module) -> torch.nn.Module:
    """Replacement of `Module.to`: tensors of the host get a copy on the device.

    torch 2.13 would drop the attributes of parameters that become FakeTensors.
    """
    for child in module.modules():
        for name, value in list(child._parameters.items()):
            if value is not None and value.device.type != "cuda":
                moved = torch.nn.Parameter(
                    torch.empty(value.shape, dtype=value.dtype, device=DEVICE), value.requires_grad
                )
                vars(moved).update(
                    {key: held for key, held in vars(value).items() if key not in vars(moved)}
                )
                child._parameters[name] = moved
        for name, buffer in list(child._buffers.items()):
            if buffer is not None and buffer.device.type != "cuda":
                child._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=DEVICE)
    return module
