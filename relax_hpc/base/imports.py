"""Importing torch, megatron-core and their like, which is most of what a start takes."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def fast_imports(for_good: bool = False) -> Iterator[None]:
    """Import hundreds of modules without a garbage collector, which takes a quarter of the time
    that they need.

    What modules define is no garbage, and yet all of it is looked at again whenever there are so
    many objects more. ``for_good``: what is there at the end never is again; so the collections of
    later, in the middle of a step, do not take a tenth of a second each. For a process that has not
    begun to work: garbage of before would stay, too.

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
    """Import as if ``package`` were not installed, unless it is imported already. It can be later.

    >>> with hidden_package("json.tool"):
    ...     import json.tool
    Traceback (most recent call last):
    ModuleNotFoundError: import of json.tool halted; None in sys.modules
    """
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[package]
