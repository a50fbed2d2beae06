"""The present processes of this machine."""

from __future__ import annotations

from collections.abc import Iterator

import psutil


def all_processes() -> Iterator[psutil.Process]:
    """All processes, by pid.

    psutil keeps process objects between two calls of `process_iter`. If a pid was reused, the old
    object refuses to send a signal. The cache is cleared, so that callers can end any process.
    """
    psutil.process_iter.cache_clear()
    return psutil.process_iter()
