"""Origin of an exception in a user's code: file, line, and the user's part of the traceback."""

from __future__ import annotations

import inspect
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PACKAGE = f"{Path(__file__).parents[1]}/"
_LIBRARIES = tuple(
    f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
"""Folders of the standard library and of installed packages."""
_MAX_TRACEBACK_CHARS = 4000
_MAX_MESSAGE_CHARS = 1000


@dataclass(frozen=True, slots=True)
class ErrorOrigin:
    """Origin of an exception, as text that can be sent to other processes."""

    location: str = ""
    """`FILE:LINE in FUNCTION`, of the last frame in the user's code."""
    traceback: str = ""
    """Traceback from the first frame of the user's code on, or the end of what a program printed to
    standard error; several lines."""


NO_ORIGIN = ErrorOrigin()


def describe_error(error: BaseException) -> str:
    """Type and text of ``error``, whose class may be a user's and fail to give a text.

    >>> describe_error(KeyError("solution"))
    "KeyError: 'solution'"
    """
    try:
        text = str(error)
    except Exception:
        text = "it has no text, because its __str__ raises"
    return f"{type(error).__name__}: {text}"[:_MAX_MESSAGE_CHARS]


def locate_error(error: BaseException) -> ErrorOrigin:
    """The origin of ``error``; empty if only code of this package was involved."""
    formatted = traceback.TracebackException.from_exception(error)
    if all(map(_is_of_package, formatted.stack)) and not isinstance(error, SyntaxError):
        return NO_ORIGIN
    location = _location(formatted)
    _drop_outer_frames(formatted)
    return ErrorOrigin(location, shorten("".join(formatted.format()).rstrip()))


def describe_with_location(error: BaseException) -> str:
    """`describe_error`, and the file and line if ``error`` was raised by a user's code."""
    if not has_user_frame(error):
        return describe_error(error)
    return f"{describe_error(error)} at {locate_error(error).location}"


def has_user_frame(error: BaseException) -> bool:
    """Whether ``error`` was raised in or through code of a user, or by a syntax error in it."""
    formatted = traceback.TracebackException.from_exception(error)
    return isinstance(error, SyntaxError) or any(map(_is_of_user, formatted.stack))


def locate_definition(function: Any) -> ErrorOrigin:
    """File and line of the definition of a user's function, method or callable object.

    Empty: it is defined in this package, or the line is unknown.
    """
    called = function if inspect.isroutine(function) else type(function).__call__
    code = getattr(inspect.unwrap(getattr(called, "__func__", called)), "__code__", None)
    if code is None or code.co_filename.startswith((_PACKAGE, "<")):
        return NO_ORIGIN
    return ErrorOrigin(f"{code.co_filename}:{code.co_firstlineno} in {code.co_name}")


def format_stack(stack: Sequence[traceback.FrameSummary]) -> ErrorOrigin:
    """Present file and line of a running thread. ``stack``: its frames, the innermost last."""
    lines = traceback.StackSummary.from_list(list(_from_first_user_frame(stack))).format()
    text = "".join(["Stack (most recent call last):\n", *lines]).rstrip()
    return ErrorOrigin(_location_in(stack), shorten(text))


def shorten(text: str, max_chars: int = _MAX_TRACEBACK_CHARS) -> str:
    """``text`` without its middle if it is too long. The ends of a traceback tell the most."""
    if len(text) <= max_chars:
        return text
    start = max_chars // 4
    return f"{text[:start]}\n  ...\n{text[start - max_chars :]}"


def _location(formatted: traceback.TracebackException) -> str:
    # The frames of a syntax error are those of the import system.
    if getattr(formatted, "filename", None) and getattr(formatted, "lineno", None):
        return f"{formatted.filename}:{formatted.lineno}"
    return _location_in(formatted.stack)


def _location_in(stack: Sequence[traceback.FrameSummary]) -> str:
    if not stack:
        return ""
    frames = [frame for frame in stack if _is_of_user(frame)]
    if not frames:
        # A user's package may be installed among the libraries.
        frames = [frame for frame in stack if not _is_of_package(frame)]
    last = (frames or list(stack))[-1]
    return f"{last.filename}:{last.lineno} in {last.name}"


def _is_of_user(frame: traceback.FrameSummary) -> bool:
    return not frame.filename.startswith((_PACKAGE, *_LIBRARIES, "<"))


def _is_of_package(frame: traceback.FrameSummary) -> bool:
    return frame.filename.startswith((_PACKAGE, "<"))


def _from_first_user_frame(
    stack: Sequence[traceback.FrameSummary],
) -> Iterator[traceback.FrameSummary]:
    first = next((number for number, frame in enumerate(stack) if _is_of_user(frame)), 0)
    yield from stack[first:]


def _drop_outer_frames(formatted: traceback.TracebackException) -> None:
    """Leave out the frames before the user's first, of an error and of its causes.

    Without recursion: a function that calls itself may wrap an error at each level.
    """
    pending, visited = [formatted], set[int]()
    while pending:
        error = pending.pop()
        if id(error) in visited:
            continue
        visited.add(id(error))
        frames = list(_from_first_user_frame(error.stack))
        error.stack = traceback.StackSummary.from_list(frames)
        pending += filter(None, (error.__cause__, error.__context__))
