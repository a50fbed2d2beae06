"""SGLang's loader of weights in a node's memory: it copies from the mapped file to the device.

SGLang 0.5.21 imports `sglang.private.private_model_loader` for the load format `private`, a module
that its distribution does not have. `install` provides it. A request to update contains the path of
the folder and this format, and no pickle. The model's own `load_weights` selects the slices of this
rank and their targets. Its copies from the file are intercepted and done by `Transfers`.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from relax_hpc.training.weights.transfers import Transfers

FORMAT = "private"
"""SGLang's load format of a loader that is imported."""
_MODULE = "sglang.private.private_model_loader"


def install() -> None:
    """Make the loader importable for SGLang in this process. It is created at the first update."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Creates the module and its package."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`."""
        if fullname in (_MODULE, _MODULE.rpartition(".")[0]):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=fullname != _MODULE)
        return None

    def exec_module(self, module: ModuleType) -> None:
        """See `importlib.abc.Loader`."""
        if module.__name__ == _MODULE:
            vars(module)["PrivateModelLoader"] = _loader_class()


def _loader_class() -> type:
    from sglang.srt.model_loader.loader import DefaultModelLoader

    from relax_hpc.training.weights.slab import open_slab
    from relax_hpc.training.weights.transfers import Transfers

    transfers: dict[torch.device, Transfers] = {}

    class SlabLoader(DefaultModelLoader):
        """Loads updates. A server starts from its model directory with SGLang's own loader."""

        def _get_weights_iterator(
            self, source: Any, **_: Any
        ) -> Generator[tuple[str, torch.Tensor], None, None] | Iterator[tuple[str, torch.Tensor]]:
            # Not a generator function: errors in the folder must be raised before the first weight
            # is overwritten.
            return iter(open_slab(Path(source.model_or_path)).items())

        @staticmethod
        def load_weights_and_postprocess(
            model: Any, weights: Any, target_device: torch.device
        ) -> None:
            if target_device not in transfers:
                transfers[target_device] = Transfers(target_device)
            device_transfers = transfers[target_device]
            tensors = list(weights)
            with copying(device_transfers, [tensor for _, tensor in tensors]):
                DefaultModelLoader.load_weights_only(model, tensors, target_device)
            DefaultModelLoader.postprocess_weights(model, target_device)

    return SlabLoader


@contextmanager
def copying(transfers: Transfers, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Inside the block, ``transfers`` does each `target.copy_(source)` whose source is a part of
    ``tensors``, which are in mapped memory.

    The copies are deferred, so that small tensors share a buffer, and all threads copy them. They
    are made before any other operation on a tensor.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    if transfers.device.type == "cuda":
        # SGLang 0.5.21 answers `pause_generation` in mode `in_place` while the last batch still
        # runs on its forward stream. Copies on another stream would let it read half of the new
        # weights.
        torch.cuda.synchronize(transfers.device)
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}

    class CopyInterceptor(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.ops.aten.copy_.default:
                target, source = args[:2]
                is_mapped = (
                    source.device.type == "cpu" and source.untyped_storage().data_ptr() in storages
                )
                if is_mapped and target.shape == source.shape:
                    transfers.defer(source, target)
                    return target
            # The operation may read a target. A view does not read it.
            if not getattr(func, "is_view", False):
                transfers.flush()
            return func(*args, **(kwargs or {}))

    try:
        with CopyInterceptor():
            yield
    finally:
        transfers.wait()
