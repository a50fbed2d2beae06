"""The present processes of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil


def all_processes() -> Iterator[psutil.Process]:
    """All processes, by pid.

    psutil keeps process objects between two calls of `process_iter`. If a pid was reused, the old
    object refuses to send a signal. The cache is cleared, so that callers can end any process.
    """
    psutil.process_iter.cache_clear()
    return psutil.process_iter()


def command_text(process: psutil.Process, max_chars: int) -> str:
    """Program and arguments of ``process`` in one line, cut to ``max_chars`` characters."""
    arguments = [argument for argument in process.cmdline() if argument]
    text = process.name()
    if arguments:
        text = " ".join([Path(arguments[0]).name, *arguments[1:]])
    return text if len(text) <= max_chars else f"{text[: max_chars - 3]}..."
