"""Imports of torch, megatron-core and similar packages, which take most of the time of a start."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def fast_imports(for_good: bool = False) -> Iterator[None]:
    """Import hundreds of modules with the garbage collector off, which saves a quarter of the time.

    The objects of modules are no garbage, but the collector examines all of them whenever the
    number of objects has grown by a quarter.

    ``for_good``: exclude all present objects from later collections (`gc.freeze`). A collection
    within a training step then no longer takes 0.1 s. Present garbage is never freed, so this is
    for a process that has not begun to work.

    >>> with fast_imports():
    ...     import torch
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if for_good:
            gc.freeze()
        if collects:
            gc.enable()


@contextmanager
def hidden_package(package: str) -> Iterator[None]:
    """Make imports of ``package`` fail within the block, unless it is already imported.

    >>> with hidden_package("json.tool"):
    ...     import json.tool
    Traceback (most recent call last):
    ModuleNotFoundError: import of json.tool halted; None in sys.modules
    """
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]  # None makes Python refuse the import
    try:
        yield
    finally:
        del sys.modules[package]
