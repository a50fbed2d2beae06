"""Training steps of data-parallel ranks with one GPU each, whose gradients are summed during the
last backward pass or after it."""

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
    """Figures of the first of ``ranks`` processes, see `overlap_rank`.

    RuntimeError: a process fails, or takes more than ``limit_s`` seconds.
    """
    arguments = {
        "shape": shape,
        "count": count,
        "length": length,
        "micro": micro,
        "actor": actor,
        "steps": steps,
        "ranks": ranks,
    }

    def run_rank(rank: int) -> dict[str, Any]:
        return ask("overlap_rank", arguments | {"rank": rank}, device, limit_s)

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(ranks) as threads:
        arguments["meeting"] = str(Path(folder, "meeting"))
        figures = list(threads.map(run_rank, range(ranks)))
    errors = [figures_of_rank["error"] for figures_of_rank in figures if "error" in figures_of_rank]
    if errors:
        raise RuntimeError(errors[0].removeprefix("FAILED: "))
    return figures[0]


if __name__ == "__main__":
    answer(measure)
