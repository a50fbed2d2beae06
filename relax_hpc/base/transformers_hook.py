"""Hook for importing transformers' model classes with a torchvision for another torch build.

It also makes the import faster.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from pathlib import Path
from typing import Any

_TORCHVISION_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_declaring = threading.Lock()
_declared: list[Any] = []


def install_transformers_hook() -> None:
    """Let transformers' model classes be imported if torchvision was built for another torch.

    An example is a CUDA build of torchvision with a CPU build of torch. Idempotent and thread-safe.
    """
    # At import, torchvision registers shapes of two of its operators with the compiler. If its
    # library could not be loaded, this fails with "operator torchvision::nms does not exist". After
    # they are declared here, the import succeeds.
    #
    # transformers imports sklearn and scipy only for assisted generation and for losses of
    # detectors. Without them a start is half a second faster.
    from transformers import utils

    with _declaring:
        _declare_operators()
        for name in ("is_sklearn_available", "is_scipy_available"):
            setattr(utils, name, lambda: False)


def _declare_operators() -> None:
    if _declared or "torchvision" in sys.modules:
        return
    spec = importlib.util.find_spec("torchvision")
    if spec is None or not spec.origin:
        return
    import torch

    # `_C.so` until torchvision 0.28, `_C_stable.so` from 0.29 on, which ends the process if its
    # operators are declared already.
    libraries = Path(spec.origin).parent.glob("_C*.so")
    if torch.cuda.is_available() or any(_loads(library) for library in libraries):
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in _TORCHVISION_SCHEMAS:
        library.define(schema)
    _declared.append(library)


def _loads(path: Path) -> bool:
    import torch

    try:
        torch.ops.load_library(path)
    except OSError:
        return False
    return True
