"""A step of data-parallel ranks, one GPU each, whose gradients are summed beside the last backward
pass or after it."""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from child import answer, ask


def measure(
    device: str,
    ranks: int,
    limit_s: float,
    shape: str,
    count: int,
    length: int,
    micro: int,
    actor: dict[str, Any],
    steps: int = 6,
) -> dict[str, float]:
    """What the first of ``ranks`` finds, see `overlap_rank`. RuntimeError: one of them fails, or
    takes ``limit_s``."""
    about = {
        "shape": shape,
        "count": count,
        "length": length,
        "micro": micro,
        "actor": actor,
        "steps": steps,
    }
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(ranks) as threads:
        about |= {"ranks": ranks, "meeting": str(Path(folder, "meeting"))}
        each = [{**about, "rank": rank} for rank in range(ranks)]
        found = list(threads.map(lambda one: ask("overlap_rank", one, device, limit_s), each))
    if errors := [one["error"] for one in found if "error" in one]:
        raise RuntimeError(errors[0].removeprefix("FAILED: "))
    return found[0]


if __name__ == "__main__":
    answer(measure)
