"""Functions and classes that a configuration names: built in, or of a user's module."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from relax_hpc.base.error_origin import describe_with_location
from relax_hpc.base.errors import ConfigError
from relax_hpc.renamed_modules import present_name

F = TypeVar("F", bound=Callable[..., Any])
_imports = True
"""Whether modules that a configuration names are imported in this process."""

_TOYS = "relax_hpc.examples.tasks"
RENAMED: dict[str, dict[str, str]] = {
    "task": {
        "sort_digits": f"{_TOYS}.sort_digits:SortDigits",
        "sort_digit_pairs": f"{_TOYS}.sort_digits:SortDigitPairs",
        "coloured_shapes": f"{_TOYS}.coloured_shapes:ColouredShapes",
        "moving_squares": f"{_TOYS}.moving_squares:MovingSquares",
        "beeps": f"{_TOYS}.beeps:Beeps",
        "pitches": f"{_TOYS}.beeps:Pitches",
        "mixed_media": f"{_TOYS}.mixed_media:MixedMedia",
        "arithmetic": f"{_TOYS}.arithmetic:Arithmetic",
        "fine_stripes": f"{_TOYS}.fine_stripes:FineStripes",
    }
}
"""Kind of the name -> old short name -> import path. Release 0.2 accepts old names with a
warning."""
_OURS = frozenset(RENAMED["task"].values())
"""Import paths of this package, which `refuse_imports` does not refuse: no file of the user is
imported."""
_warned: set[str] = set()
"""Old names for which this process has printed a warning."""


@contextlib.contextmanager
def refuse_imports() -> Iterator[None]:
    """Refuse, within the block, to import modules that a configuration names.

    Commands that only read a run use it. The run may belong to another user, whose module would
    otherwise run with the rights of the reader.
    """
    global _imports
    before, _imports = _imports, False
    try:
        yield
    finally:
        _imports = before


def imports_allowed() -> bool:
    """Whether this process may import modules that a configuration names, see `refuse_imports`."""
    return _imports


def load_plugin(kind: str, name: str, builtin: Mapping[str, F | str]) -> F:
    """The function called ``name``: a built-in one, or one imported from `package.module:function`.

    ``kind``: key of the configuration, for messages. ``builtin``: functions by name, or their
    import paths. ConfigError, which begins with ``kind``: there is no such function.
    """
    if name not in builtin:
        name = current_name(kind, name)
    if ":" in name:
        if not (_imports or name in _OURS):
            raise ConfigError(
                f"{kind}: {name!r}: this command imports no module that a configuration names"
            )
        return _imported(kind, name)
    if name in builtin:
        function = builtin[name]
        return _imported(kind, function) if isinstance(function, str) else function
    if name.endswith(".py"):
        raise ConfigError(f"{kind}: {name!r}: {_not_a_file(name, '')}")
    renamed = RENAMED.get(kind, {})
    near = difflib.get_close_matches(name, [*builtin, *renamed], n=1)
    hint = f"did you mean {renamed.get(near[0], near[0])!r}?" if near else _own_name(name)
    allowed = ", ".join(builtin) or "package.module:function"
    raise ConfigError(f"{kind}: found {name!r}, allowed {allowed}; {hint}")


def current_name(kind: str, name: str) -> str:
    """``name``, or the name that has replaced it since the last release, with a warning on stderr.

    >>> current_name("task", "my_task:Reverse")
    'my_task:Reverse'
    """
    module, colon, attribute = name.partition(":")
    if name in RENAMED.get(kind, {}):
        current = RENAMED[kind][name]
    elif colon and (present := present_name(module)):
        current = f"{present}:{attribute}"
    else:
        return name
    if name not in _warned:
        _warned.add(name)
        text = (
            f"warning: {kind}: {name!r} is now called {current!r}; write the new name, the next "
            "release refuses this"
        )
        print(text, file=sys.stderr, flush=True)
    return current


def _own_name(name: str) -> str:
    """Advice how to name a user's function, which ``name`` may be meant to be."""
    module, dot, function = name.rpartition(".")
    if not dot:
        return "write package.module:function for your own"
    return f"write package.module:function for your own, such as {module}:{function}"


def _imported(kind: str, name: str) -> Any:
    module_name, _, attribute = name.partition(":")
    if module_name.endswith(".py") or "/" in module_name:
        raise ConfigError(f"{kind}: {name!r}: {_not_a_file(module_name, attribute)}")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a user's module may raise anything, and end itself
        raise ConfigError(
            f"{kind}: {name!r}: importing {module_name!r} failed: {describe_with_location(error)}; "
            f"{_remedy(module_name, error)}"
        ) from error
    function = getattr(module, attribute, None)
    if callable(function):
        return function
    if attribute in vars(module):
        raise ConfigError(
            f"{kind}: {name!r}: found {type(function).__name__} {attribute!r} in module "
            f"{module_name!r}, allowed: a function or a class"
        )
    functions = [
        key for key, value in vars(module).items() if callable(value) and not key.startswith("_")
    ]
    near = difflib.get_close_matches(attribute, functions, n=1)
    hint = f"did you mean {near[0]!r}?" if near else "define it there"
    raise ConfigError(
        f"{kind}: {name!r}: module {module_name!r} has no function {attribute!r}; {hint}"
    )


def _not_a_file(path: str, attribute: str) -> str:
    """Advice for the path of a file, which other trainers accept."""
    file = Path(path)
    folder = file.parent.absolute()
    return (
        f"found a file, allowed: a module; leave out .py, and put the folder on PYTHONPATH: "
        f"PYTHONPATH={folder} and {file.stem}:{attribute or 'FUNCTION'}"
    )


def _remedy(module_name: str, error: BaseException) -> str:
    """Remedy for an import that has failed."""
    top = module_name.partition(".")[0]
    if not isinstance(error, ModuleNotFoundError):
        return "correct that"
    if error.name not in (top, module_name):
        return f"install {error.name}, or put the folder that holds it on PYTHONPATH"
    folder = Path.cwd()
    if (folder / f"{top}.py").is_file() or (folder / top).is_dir():
        return f"put its folder on PYTHONPATH: export PYTHONPATH={folder}"
    return "put the folder that holds the module on PYTHONPATH"
