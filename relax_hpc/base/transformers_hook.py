"""Lets transformers' model classes be imported beside a torchvision that was built for another
torch, and sooner."""

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
    """Let transformers' model classes be imported where torchvision was built for another torch
    (CUDA beside CPU).

    torchvision describes two of its operators to the compiler as it is imported, and fails on
    "operator torchvision::nms does not exist" when its library could not be loaded; declared, they
    exist. And without sklearn and scipy, which assisted generation and losses of detectors alone
    need: half a second of a start. Idempotent; safe from several threads.
    """
    from transformers import utils

    with _declaring:
        _declare_operators()
        utils.is_sklearn_available = utils.is_scipy_available = lambda: False


def _declare_operators() -> None:
    if (
        _declared
        or "torchvision" in sys.modules
        or not (spec := importlib.util.find_spec("torchvision"))
    ):
        return
    import torch

    if torch.cuda.is_available() or _loads(Path(spec.origin or "").with_name("_C.so")):
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
