"""Programming errors in plug-ins, which a restart does not correct.

AttributeError, TypeError, NameError and ImportError before any progress of a run end it. After
progress the same error may come from data, so that the role is retried.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import relax_hpc
from relax_hpc.base.error_origin import describe_error, has_user_frame, locate_error
from relax_hpc.base.last_error import is_temporary

_KINDS = (AttributeError, TypeError, NameError, ImportError)
_NAMES = (
    *(kind.__name__ for kind in _KINDS),
    "UnboundLocalError",
    "ModuleNotFoundError",
)
_DESCRIPTION = re.compile(rf"(?:[a-z_]+: )?(?:{'|'.join(_NAMES)}): ")
"""Beginning of a description of such an error, after an optional reason (`reward_exception`)."""
_PLUGIN = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):[A-Za-z_][\w.]*")
"""Name of a plug-in in a configuration: `package.module:attribute`."""
_PACKAGE = f"{Path(str(relax_hpc.__file__)).parent}/"
REMEDY = "a restart does not correct a programming error: correct the code, then resume the run"


def is_description(text: str) -> bool:
    """Whether ``text`` describes an error that may be a programming error.

    >>> is_description("reward_exception: NameError: name 'x' is not defined")
    True
    >>> is_description("ValueError: TypeError: no")
    False
    """
    return _DESCRIPTION.match(text) is not None and not is_temporary(text)


def describe_programming_error(error: BaseException, plugins: Iterable[str]) -> str:
    """One line on a programming error: the exception, the last file and line in a plug-in, and the
    remedy. Empty: ``error`` is of another kind, or no plug-in is involved.

    ``plugins``: names of plug-ins, see `plugin_names`.
    """
    text = " ".join(describe_error(error).split())
    if not isinstance(error, _KINDS) or is_temporary(text):
        return ""
    imported = {name: module for name in plugins if (module := _imported_module(name))}
    if location := _location(error, imported.values()):
        return f"{text} at {location}; {REMEDY}"
    if not imported:
        return ""
    return (
        f"{text} at {_last_frame(error)}, which is not in a plug-in: check what "
        f"{', '.join(sorted(imported))} returns; {REMEDY}"
    )


def plugin_names(settings: Any) -> Iterator[str]:
    """Names of plug-ins, `package.module:attribute`, among the values of nested ``settings``."""
    if isinstance(settings, Mapping):
        for value in settings.values():
            yield from plugin_names(value)
    elif isinstance(settings, list | tuple):
        for value in settings:
            yield from plugin_names(value)
    elif isinstance(settings, str) and _PLUGIN.fullmatch(settings):
        yield settings


def _imported_module(plugin: str) -> ModuleType | None:
    """The module of a plug-in, if this process has imported it and this package lacks it."""
    module = sys.modules.get(plugin.partition(":")[0])
    file = getattr(module, "__file__", None)
    return module if file and not file.startswith(_PACKAGE) else None


def _location(error: BaseException, modules: Iterable[ModuleType]) -> str:
    """`FILE:LINE in FUNCTION` of the last frame in a plug-in's package or in other user code.

    Empty: there is no such frame.
    """
    sources = tuple(_source(module) for module in modules)
    frames = traceback.extract_tb(error.__traceback__)
    plugin_frames = [frame for frame in frames if frame.filename.startswith(sources)]
    if plugin_frames:
        return _format(plugin_frames[-1])
    return locate_error(error).location if has_user_frame(error) else ""


def _source(module: ModuleType) -> str:
    """Folder of the plug-in's package, or the file of a plug-in that is a single module."""
    package = sys.modules.get(module.__name__.partition(".")[0], module)
    folders = list(getattr(package, "__path__", []))
    return f"{folders[0]}/" if folders else str(module.__file__)


def _last_frame(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return _format(frames[-1]) if frames else "an unknown line"


def _format(frame: traceback.FrameSummary) -> str:
    return f"{frame.filename}:{frame.lineno} in {frame.name}"
