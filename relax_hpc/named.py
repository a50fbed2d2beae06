"""Functions that a configuration names: built in, or imported from a user's module."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from relax_hpc.error_origin import describe_with_location
from relax_hpc.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])


def named(kind: str, name: str, known: Mapping[str, F | str]) -> F:
    """The function called ``name``: one of ``known``, which may say where it lies, or imported from
    `package.module:function`.

    ConfigError if there is none; it begins with ``kind``, which says what the function is for.
    """
    if ":" in name:
        return _imported(kind, name)
    if name in known:
        found = known[name]
        return _imported(kind, found) if isinstance(found, str) else found
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else "write package.module:function for your own"
    raise ConfigError(f"{kind}: found {name!r}, allowed {', '.join(known)}; {hint}")


def _imported(kind: str, name: str) -> Any:
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module may raise anything while it is imported
        raise ConfigError(
            f"{kind}: {name!r}: importing {module_name!r} failed: {describe_with_location(error)}; "
            "put the module on PYTHONPATH or mend it"
        ) from error
    function = getattr(module, attribute, None)
    if callable(function):
        return function
    near = difflib.get_close_matches(attribute, [key for key in vars(module) if not key.startswith("_")], n=1)
    hint = f"did you mean {near[0]!r}?" if near else "define it there"
    raise ConfigError(f"{kind}: {name!r}: module {module_name!r} has no function {attribute!r}; {hint}")
