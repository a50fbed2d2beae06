"""Stand-ins that SGLang needs in order to run without a GPU, installed before it is imported.
Nothing is done beside a GPU.

Written for SGLang 0.5.21 with the `torch_native` attention and `pytorch` sampling backends.
Packages that are installed for real always win over the stand-ins here.
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
from relax_hpc.rollout.engines.sglang.after_import import change


def install() -> None:
    """Make `import sglang` and its CPU engine work in this process; call it before anything imports
    sglang."""
    import torch

    if torch.cuda.is_available() or installed():
        return
    # Without it SGLang takes the CUDA code paths and asks for vllm's rotary embedding.
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    # Vision towers compile their rotary embedding, and the compiler asks the stand-in for triton
    # what it has.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    # SGLang's model classes come through transformers' image processors.
    install_transformers_hook()
    # `import triton` (kernels that are defined, never compiled, here) and `import sgl_kernel` have
    # no CPU packages. Last in the list, so that installed packages are found first.
    sys.meta_path.append(_StandIns())
    change(
        {
            "sglang.srt.mem_cache.pool_host.common": _register_nothing,
            "sglang.srt.distributed.device_communicators.pynccl": _load_no_nccl,
        }
    )


def installed() -> bool:
    """Whether `install` has found that this is needed."""
    return any(isinstance(finder, _StandIns) for finder in sys.meta_path)


def _register_nothing(module: ModuleType) -> None:
    # With CUDA, of the host memory in which it keeps routes.
    module._cuda_host_register = lambda *_, **__: None


def _load_no_nccl(module: ModuleType) -> None:
    # SGLang 0.5.21 makes a communicator of NCCL wherever it can load libnccl, which torch's CUDA
    # build brings to machines without a GPU: "Expected a cuda device, but got: cpu". Where it
    # cannot, its ranks take gloo.
    def refuse(*_: Any) -> NoReturn:
        raise OSError("NCCL is not used on CPUs")

    module.NCCLLibrary = refuse


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
        """Run nothing: a stand-in has no code."""


class _StubClass:
    """Base of the classes that kernels' modules derive from, make settings of, or test instances
    against."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


class _Constexpr:
    """Stand-in of `tl.constexpr`, which keeps its value at module level."""

    def __init__(self, value: Any = None) -> None:
        self.value = value


class _Triton(ModuleType):
    """A module of `triton` whose attributes are classes (capitalised), submodules (else), or
    decorators if called."""

    __version__ = "0.0.0"
    constexpr = _Constexpr
    cdiv = staticmethod(lambda n, d: -(n // -d))
    next_power_of_2 = staticmethod(lambda n: 1 << (n - 1).bit_length())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        value = (
            type(name, (_StubClass,), {}) if name[0].isupper() else importlib.import_module(full)
        )
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """`@triton.jit` gives the function back, `@triton.jit(...)` a decorator that does."""
        return (
            args[0]
            if len(args) == 1 and callable(args[0]) and not kwargs
            else lambda function: function
        )
