"""Processes of this machine, as they are now."""

from __future__ import annotations

from collections.abc import Iterator

import psutil


def all_processes() -> Iterator[psutil.Process]:
    """Every process that is there, by pid.

    psutil keeps handles from one look to the next, and one of a pid that has been given to another
    process since then refuses to send it a signal: who means to end what it finds has to look anew.
    """
    psutil.process_iter.cache_clear()
    return psutil.process_iter()
