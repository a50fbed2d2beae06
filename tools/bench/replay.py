"""Whether `relax-hpc replay` gives the bits of the run: the quickstart, synchronous and
asynchronous.

Each run has real SGLang and megatron-core. Its last step is replayed from the newest checkpoint
before it, so several steps are compared.

    python tools/bench/replay.py --steps 12 --staleness 0 2 --json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from figures import Figure, print_figures

from relax_hpc.base.metrics.read import is_step, read_metrics

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "relax_hpc"]
_TIMEOUT_S = 3600.0


def run_quickstart(folder: Path, steps: int, staleness: int) -> None:
    """Run the quickstart for ``steps``, with checkpoints and rows that a replay needs."""
    every = max(1, steps // 3)
    options = {
        "run_dir": folder,
        "steps": steps,
        "max_staleness": staleness,
        "checkpoint.every": every,
        "checkpoint.every_s": 0,
        "queue.keep_steps": steps,
        "eval.every": 0,
    }
    words = [str(word) for key, value in options.items() for word in (f"--{key}", value)]
    subprocess.run(
        [*COMMAND, "run", "--config", "quickstart", *words],
        check=True,
        timeout=_TIMEOUT_S,
        stdout=subprocess.DEVNULL,
        cwd=ROOT,
    )


def replay_last(folder: Path, steps: int) -> Iterator[Figure]:
    """Figures of a replay of the last step of the run in ``folder``."""
    started = time.monotonic()
    command = [*COMMAND, "replay", str(folder), "--step", str(steps - 1), "--json"]
    process = subprocess.run(command, timeout=_TIMEOUT_S, capture_output=True, text=True, cwd=ROOT)
    seconds = time.monotonic() - started
    result = json.loads(process.stdout)
    compared = result["steps"]
    equal = [step for step in compared if not step["differences"] and not step["missing"]]
    rows = [row for row in read_metrics(folder) if is_step(row)]
    ages = [row["staleness/mean"] for row in rows[-len(compared) :]]
    yield Figure("mean age of the replayed rows", sum(ages) / len(ages), "versions")
    yield Figure(
        "steps with equal gradient norm and bytes",
        len(equal),
        f"of {len(compared)} steps",
        "all",
        len(equal) == len(compared) and process.returncode == 0,
    )
    yield Figure("seconds of the replay, with its start", seconds, "s")


def all_figures(steps: int, stalenesses: Sequence[int]) -> Iterator[Figure]:
    """Figures of a run and its replay for each bound of staleness."""
    for staleness in stalenesses:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / "run"
            run_quickstart(folder, steps, staleness)
            for figure in replay_last(folder, steps):
                name_of_mode = f"max_staleness {staleness}: {figure.name}"
                yield Figure(name_of_mode, figure.value, figure.unit, figure.target, figure.ok)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    settings = {"steps": args.steps, "staleness": args.staleness}
    figures = print_figures(all_figures(args.steps, args.staleness), settings, args.json)
    return 0 if all(figure.ok is not False for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
