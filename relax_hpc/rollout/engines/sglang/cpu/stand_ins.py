"""Stand-ins for modules that SGLang needs and that do not work without a GPU. They are installed
before SGLang is imported, and only on nodes without a GPU.

Written for SGLang 0.5.21 with the `torch_native` attention and `pytorch` sampling backends.
Installed packages take precedence over the stand-ins, except kernels for GPUs.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from relax_hpc.base.transformers_hook import install_transformers_hook
from relax_hpc.rollout.engines.sglang.import_patches import patch_on_import


def install() -> None:
    """Make `import sglang` and its CPU engine work in this process. Call it before the first import
    of sglang."""
    import torch

    if torch.cuda.is_available() or installed():
        return
    # Without it, SGLang 0.5.21 takes the CUDA code paths and imports vllm's rotary embedding.
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    # Vision towers of SGLang 0.5.21 compile their rotary embedding, and the compiler of torch 2.13
    # inspects triton, for which there is only a stand-in.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    # SGLang's model classes import transformers' image processors.
    install_transformers_hook()
    # SGLang 0.5.21 imports triton (on a CPU its kernels are defined and never compiled) and
    # sgl_kernel, which have no CPU packages. Last in the list, so that installed packages are found
    # first.
    stand_ins = _StandIns()
    sys.meta_path.append(stand_ins)
    if _has_cuda_kernels():
        sys.meta_path.insert(0, _KernelStandIn(stand_ins))
    patch_on_import(
        {
            "sglang.srt.mem_cache.pool_host.common": _disable_host_registration,
            "sglang.srt.distributed.device_communicators.pynccl": _disable_nccl,
        }
    )


def installed() -> bool:
    """Whether `install` has installed the stand-ins in this process."""
    return any(isinstance(finder, _StandIns) for finder in sys.meta_path)


def _has_cuda_kernels() -> bool:
    """Whether the installed sgl_kernel has code for GPUs only, as the wheels of the GPU lock."""
    spec = importlib.util.find_spec("sgl_kernel")
    if spec is None or spec.origin is None:
        return False
    # sglang-kernel 0.4.7 has a folder of libraries for each generation of GPUs (load_utils.py).
    return any(Path(spec.origin).parent.glob("sm[0-9]*"))


def _disable_host_registration(module: ModuleType) -> None:
    # SGLang 0.5.21 registers the host memory of expert routes with CUDA: "Torch not compiled with
    # CUDA enabled".
    patched: Any = module
    patched._cuda_host_register = lambda *_, **__: None


def _disable_nccl(module: ModuleType) -> None:
    # SGLang 0.5.21 creates an NCCL communicator if it can load libnccl, which torch's CUDA build
    # has on machines without a GPU too: "Expected a cuda device, but got: cpu". If the load fails,
    # its ranks use gloo.
    def refuse(*_: Any) -> NoReturn:
        raise OSError("NCCL is not used on CPUs")

    patched: Any = module
    patched.NCCLLibrary = refuse


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `sgl_kernel` and every `triton.*` module that is not installed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`."""
        if fullname == "sgl_kernel":
            return importlib.util.spec_from_file_location(
                fullname, Path(__file__).with_name("kernel.py")
            )
        if fullname.partition(".")[0] == "triton":
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """See `importlib.abc.Loader`."""
        return _Triton(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: a stand-in has no code."""


class _KernelStandIn(importlib.abc.MetaPathFinder):
    """Finds the stand-in for `sgl_kernel` before the installed package. The libraries of that are
    linked with libcuda.so.1, which a machine without the CUDA driver does not have, and have no
    code for CPUs."""

    def __init__(self, stand_ins: _StandIns) -> None:
        self._stand_ins = stand_ins

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`."""
        return self._stand_ins.find_spec(fullname) if fullname == "sgl_kernel" else None


class _StubClass:
    """Base of stand-ins for classes: modules of kernels derive from them, create instances as
    settings, or use them in isinstance."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


class _Constexpr:
    """Stand-in for `tl.constexpr`, whose value is read at module level."""

    def __init__(self, value: Any = None) -> None:
        self.value = value


class _Triton(ModuleType):
    """A module of `triton`. Its capitalised attributes are classes, the others are submodules. A
    submodule can be called as a decorator."""

    __version__ = "0.0.0"
    constexpr = _Constexpr
    cdiv = staticmethod(lambda n, d: -(n // -d))
    next_power_of_2 = staticmethod(lambda n: 1 << (n - 1).bit_length())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value: Any
        if name[0].isupper():
            value = type(name, (_StubClass,), {})
        else:
            value = importlib.import_module(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """`@triton.jit` returns the function unchanged; `@triton.jit(...)` returns a decorator that
        does so."""
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]
        return lambda function: function
