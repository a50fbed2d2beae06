"""SGLang's loader of the weights that a node has in memory: straight from the mapped file to the
device.

SGLang takes it for its `private` format, by the module name under which `install` makes it known:
the request to update has the folder's path and that word, and nothing is pickled. The model's own
`load_weights` says which slices belong to this rank, and where: what it copies from the file is
caught, and goes by `Transfers`.
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
"""SGLang's word for a loader that it gets by import."""
_MODULE = "sglang.private.private_model_loader"


def install() -> None:
    """Have SGLang find the loader in this process. What it costs is spent at the first update."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes the module, and the package around it, which SGLang's distribution lacks."""

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
            module.PrivateModelLoader = _loader()


def _loader() -> type:
    from sglang.srt.model_loader.loader import DefaultModelLoader

    from relax_hpc.training.weights.slab import open_slab
    from relax_hpc.training.weights.transfers import Transfers

    transfers: dict[torch.device, Transfers] = {}

    class SlabLoader(DefaultModelLoader):
        """Updates alone: a model starts from its directory, by SGLang's own loader."""

        def _get_weights_iterator(
            self, source: Any, **_: Any
        ) -> Generator[tuple[str, torch.Tensor], None, None] | Iterator[tuple[str, torch.Tensor]]:
            # Not in the generator: what is wrong with the folder is to be known before anything is
            # overwritten.
            return iter(open_slab(Path(source.model_or_path)).items())

        @staticmethod
        def load_weights_and_postprocess(
            model: Any, weights: Any, target_device: torch.device
        ) -> None:
            own = transfers.setdefault(target_device, Transfers(target_device))
            tensors = list(weights)
            with copying(own, [tensor for _, tensor in tensors]):
                DefaultModelLoader.load_weights_only(model, tensors, target_device)
            DefaultModelLoader.postprocess_weights(model, target_device)

    return SlabLoader


@contextmanager
def copying(transfers: Transfers, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Inside, `target.copy_(source)` of any part of ``tensors``, of mapped memory, goes by
    ``transfers``."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    storages = {one.untyped_storage().data_ptr() for one in tensors}

    class Caught(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.ops.aten.copy_.default:
                target, source = args[:2]
                mine = (
                    source.device.type == "cpu" and source.untyped_storage().data_ptr() in storages
                )
                if mine and target.shape == source.shape:
                    transfers.send([(source, target)])
                    return target
            return func(*args, **(kwargs or {}))

    try:
        with Caught():
            yield
    finally:
        transfers.wait()
