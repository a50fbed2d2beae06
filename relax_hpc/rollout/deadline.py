"""A deadline for code that knows of none, such as a user's reward."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


async def within(seconds: float, function: Callable[[], T]) -> T:
    """What `function` returns, in a thread of its own. TimeoutError: it takes longer, and its thread is left behind."""
    pool = ThreadPoolExecutor(1)
    try:
        async with asyncio.timeout(seconds):
            return await asyncio.get_running_loop().run_in_executor(pool, function)
    finally:
        pool.shutdown(wait=False)
