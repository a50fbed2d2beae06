"""Changes to modules of SGLang, made when it imports them: in its child interpreters too, and at no
cost before."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function with each of some modules, once that has run."""

    def __init__(self, changes: Mapping[str, Callable[[ModuleType], None]]) -> None:
        self._changes = changes

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`."""
        change = self._changes.get(fullname)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path) if change else None
        if not (change and spec and spec.loader):
            return None
        load = spec.loader.exec_module

        def run(module: ModuleType) -> None:
            load(module)
            change(module)

        spec.loader.exec_module = run  # type: ignore[method-assign]
        return spec


def change(changes: Mapping[str, Callable[[ModuleType], None]]) -> None:
    """Have ``changes``, by name, made to modules that nothing has imported yet."""
    sys.meta_path.insert(0, AfterImport(changes))
