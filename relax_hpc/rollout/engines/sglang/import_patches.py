"""Patches of SGLang's modules, applied when SGLang imports them.

A patch also works in SGLang's child interpreters, and costs nothing before the import.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType

Patch = Callable[[ModuleType], None]


class ImportPatcher(importlib.abc.MetaPathFinder):
    """Calls a patch with a module after the module was executed."""

    def __init__(self, patches: Mapping[str, Patch]) -> None:
        self._patches = patches

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`."""
        patch = self._patches.get(fullname)
        if patch is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_patch(module: ModuleType) -> None:
            execute(module)
            patch(module)

        spec.loader.exec_module = execute_and_patch  # type: ignore[method-assign]  # one object
        return spec


def patch_on_import(patches: Mapping[str, Patch]) -> None:
    """Apply ``patches`` (module name -> patch) to modules that this process imports later."""
    # Before Python's own finders, which would import the module without the patch.
    sys.meta_path.insert(0, ImportPatcher(patches))
