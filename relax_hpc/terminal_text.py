"""Text that a model, or anybody else, has written, neutralised for terminals and logs, and fitted to a width."""

from __future__ import annotations

import contextlib
import sys
import unicodedata
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

_PLAIN = {"\n", "\t", "\u200c", "\u200d"}
"""Control and format characters that move no cursor and hide nothing; the last two join letters."""
_HIDDEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
_TAB = " " * 4


def harmless(text: str) -> str:
    """``text`` with every character spelled out that a terminal would obey, or hide.

    >>> harmless("a\\x1b[31mb\\u202ec")
    'a\\\\x1b[31mb\\\\u202ec'
    """
    if text.isprintable():
        return text
    return "".join(c if c in _PLAIN or unicodedata.category(c) not in _HIDDEN else _spelled(c) for c in text)


def one_line(text: str) -> str:
    """``text`` as of `harmless`, in one line: a text of a service cannot begin a line of a log.

    >>> one_line("bad request\\nrollout: all is well")
    'bad request\\\\nrollout: all is well'
    """
    return harmless(text).replace("\n", "\\n")


def log_entry(text: str) -> str:
    """``text`` as of `harmless`, its further lines indented: in a log none of them looks like another entry.

    >>> print(log_entry("it failed: bad\nrollout: all is well"))
    it failed: bad
        rollout: all is well
    """
    return harmless(text).replace("\n", "\n    ")


class HarmlessStream:
    """A text stream whose written text is neutralised by `harmless`; all else is that of ``stream``.

    Our own colours and cursor movements are written to `unfiltered`.
    """

    def __init__(self, stream: TextIO) -> None:
        self.unfiltered = stream

    def write(self, text: str) -> int:
        """Write ``text``; the number of its characters."""
        self.unfiltered.write(harmless(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write ``lines``, which have their ends."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unfiltered, name)


def unfiltered(stream: TextIO) -> TextIO:
    """The stream below ``stream``, for text that has been neutralised already, or is ours."""
    return stream.unfiltered if isinstance(stream, HarmlessStream) else stream


@contextlib.contextmanager
def harmless_output() -> Iterator[None]:
    """Neutralise what this process prints within the block, by `HarmlessStream`."""
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = HarmlessStream(unfiltered(sys.stdout)), HarmlessStream(unfiltered(sys.stderr))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams


def _spelled(character: str) -> str:
    number = ord(character)
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def wrapped(text: str, width: int) -> Iterator[str]:
    """Lines of at most ``width`` columns, broken behind blanks where there are some; East Asian ones count twice.

    >>> list(wrapped("one two three", 8))
    ['one two ', 'three']
    """
    for line in text.expandtabs(len(_TAB)).split("\n"):
        yield from _pieces(line, max(2, width))


def _pieces(line: str, width: int) -> Iterator[str]:
    start, used, blank = 0, 0, 0
    for place, character in enumerate(line):
        columns = _columns(character)
        if used + columns > width:
            end = blank if blank > start else place
            yield line[start:end]
            start = end
            used = sum(map(_columns, line[start:place]))
        used += columns
        if character == " ":
            blank = place + 1
    yield line[start:]


def _columns(character: str) -> int:
    if unicodedata.combining(character) or character in _PLAIN:
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
