"""Text of models and other programs: made safe for terminals and logs, and wrapped to a width."""

from __future__ import annotations

import contextlib
import os
import sys
import unicodedata
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

_PLAIN = {"\n", "\t", "\u200c", "\u200d"}
"""Control and format characters that stay. The last two join letters in some scripts."""
_HIDDEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
_TAB = " " * 4
_WITHOUT_COLOURS = ("dumb", "unknown", "vt52", "vt100", "vt102", "vt220")
"""Beginnings of the names of terminals that show colours as text or not at all."""


def escape_controls(text: str) -> str:
    """``text`` with each control character and each invisible character as an escape sequence.

    >>> escape_controls("a\\x1b[31mb\\u202ec")
    'a\\\\x1b[31mb\\\\u202ec'
    """
    # Almost every text has only printable lines. A check of each character takes 80 times as long
    # (measured).
    if text.replace("\n", "").replace("\t", "").isprintable():
        return text
    return "".join(map(_harmless_character, text))


def escape_line(text: str) -> str:
    """``text`` as one line, without control characters, so that it cannot add lines to a log.

    >>> escape_line("bad request\\nrollout: all is well")
    'bad request\\\\nrollout: all is well'
    """
    return escape_controls(text).replace("\n", "\\n")


def log_entry(text: str) -> str:
    """``text`` without control characters. Lines after the first are indented, so that they do not
    look like entries.

    >>> print(log_entry("it failed: bad\\nrollout: all is well"))
    it failed: bad
        rollout: all is well
    """
    return escape_controls(text).replace("\n", "\n    ")


class HarmlessStream:
    """A text stream without control characters, see `escape_controls`.

    Its other attributes are those of ``stream``. This package writes its own colours and cursor
    movements to `unfiltered`.
    """

    def __init__(self, stream: TextIO) -> None:
        self.unfiltered = stream

    def write(self, text: str) -> int:
        """Write ``text``. Returns the number of its characters."""
        self.unfiltered.write(escape_controls(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write ``lines``, each of which has its line end."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unfiltered, name)


def unfiltered(stream: TextIO) -> TextIO:
    """The stream below a `HarmlessStream`, for text that this package composes or has escaped."""
    return stream.unfiltered if isinstance(stream, HarmlessStream) else stream


@contextlib.contextmanager
def harmless_output() -> Iterator[None]:
    """Write the output of this process within the block through `HarmlessStream`."""
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (
        HarmlessStream(unfiltered(sys.stdout)),
        HarmlessStream(unfiltered(sys.stderr)),
    )
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams


def _harmless_character(character: str) -> str:
    if character in _PLAIN or unicodedata.category(character) not in _HIDDEN:
        return character
    number = ord(character)
    if number < 0x100:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def has_colours(stream: TextIO) -> bool:
    """Whether ``stream`` is a terminal with colours, and the user wants them
    (https://no-color.org)."""
    if os.environ.get("NO_COLOR") or not stream.isatty():
        return False
    return not os.environ.get("TERM", "").startswith(_WITHOUT_COLOURS)


def wrap_text(text: str, width: int) -> Iterator[str]:
    """Lines of at most ``width`` columns, broken after blanks where possible. East Asian characters
    take two columns.

    >>> list(wrap_text("one two three", 8))
    ['one two ', 'three']
    """
    for line in text.expandtabs(len(_TAB)).split("\n"):
        yield from _pieces(line, max(2, width))


def _pieces(line: str, width: int) -> Iterator[str]:
    start, used, blank = 0, 0, 0
    for index, character in enumerate(line):
        columns = _character_columns(character)
        if used + columns > width:
            end = blank if blank > start else index
            yield line[start:end]
            start = end
            used = columns_of(line[start:index])
        used += columns
        if character == " ":
            blank = index + 1
    yield line[start:]


def columns_of(text: str) -> int:
    """Columns that a line of text takes on a terminal.

    >>> columns_of("run 7"), columns_of("训练 7")
    (5, 6)
    """
    return len(text) if text.isascii() else sum(map(_character_columns, text))


def _character_columns(character: str) -> int:
    if unicodedata.combining(character) or character in _PLAIN:
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
