"""Does the quickstart learn? Every seed must, and the control with permuted rewards must not.

python tools/bench/learning.py --seeds 0 1 2 3 4 --keep runs/learning
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean

from figures import Figure, print_figures

from relax_hpc.base.metrics.plot import plot_runs
from relax_hpc.base.metrics.read import read_metrics

CONFIG = Path(__file__).parents[2] / "configs" / "runs" / "quickstart.yaml"
MINUTES = 15
EDGE = 5
"""Steps averaged at each end of a run."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run all seeds one after the other and print what they reached."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--no-control", dest="control", action="store_false", help="leave the permuted rewards out"
    )
    parser.add_argument(
        "--keep",
        type=Path,
        help="folder for the run directories and the picture; default: none stays",
    )
    parser.add_argument("--json", action="store_true", help="one object as the last line")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        root = (args.keep or Path(scratch)).absolute()
        figures = print_figures(
            measure(args, root), vars(args) | {"keep": str(args.keep)}, args.json
        )
    return 0 if all(figure.ok for figure in figures) else 1


def measure(args: argparse.Namespace, root: Path) -> Iterator[Figure]:
    """As the runs end; the picture of those that are kept comes last."""
    for seed in args.seeds:
        yield from learned(*run(root / f"seed-{seed}", seed, args.steps, False))
    if args.control:
        yield from unlearned(run(root / "control", args.seeds[0], args.steps, True)[0])
    if args.keep:
        runs = [root / f"seed-{seed}" for seed in args.seeds] + [root / "control"] * args.control
        print(plot_runs(runs, root / "learning.png", []))


def run(directory: Path, seed: int, steps: int, control: bool) -> tuple[Path, float]:
    """The quickstart with a seed; its run directory and its wall time in seconds."""
    words = [
        "--config",
        str(CONFIG),
        "--run_dir",
        str(directory),
        "--seed",
        str(seed),
        "--steps",
        str(steps),
    ]
    words += ["--algorithm.shuffle_rewards", "true"] if control else []
    started = time.monotonic()
    directory.parent.mkdir(parents=True, exist_ok=True)
    with (directory.parent / f"{directory.name}.txt").open("w") as output:
        command = [sys.executable, "-m", "relax_hpc", "run", *words]
        subprocess.run(command, stdout=output, stderr=output, check=True, timeout=60 * MINUTES)
    return directory, time.monotonic() - started


def ends(directory: Path) -> tuple[float, float, float, float]:
    """Mean reward of the first and last steps, mean held-out exact match of the first and last
    evaluation."""
    rows = read_metrics(directory)
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    scores = [
        mean(v for tag, v in row.items() if tag.startswith("eval/"))
        for row in rows
        if evaluated(row)
    ]
    return mean(rewards[:EDGE]), mean(rewards[-EDGE:]), scores[0], scores[-1]


def evaluated(row: dict) -> bool:
    return any(tag.startswith("eval/") for tag in row)


def learned(directory: Path, seconds: float) -> list[Figure]:
    """What a run must reach."""
    first, last, before, after = ends(directory)
    name = directory.name
    return [
        Figure(f"{name}: reward, first {EDGE} steps", first, "", "< 0.35", first < 0.35),
        Figure(f"{name}: reward, last {EDGE} steps", last, "", "> 0.85", last > 0.85),
        Figure(f"{name}: held-out exact match before", before, "", "< 0.1", before < 0.1),
        Figure(f"{name}: held-out exact match after", after, "", "> 0.6", after > 0.6),
        Figure(f"{name}: whole job", seconds, "s", "< 300", seconds < 300),
    ]


def unlearned(directory: Path) -> list[Figure]:
    """What the control must not reach."""
    _, last, _, after = ends(directory)
    return [
        Figure(f"control: reward, last {EDGE} steps", last, "", "< 0.35", last < 0.35),
        Figure("control: held-out exact match after", after, "", "< 0.1", after < 0.1),
    ]


if __name__ == "__main__":
    sys.exit(main())
