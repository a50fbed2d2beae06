"""Does learning suffer from staleness? The quickstart in each mode, several seeds each, by steps and by wall time.

One run after the other. A mode's difference to staleness 0 is of the final held-out scores after equal steps, with the
95 % interval of Welch's t; it should lie within 0.1. Runs that are there already, as after an interruption, are not
made again.

    python tools/bench/convergence.py --modes 0 1 4 colocate 4-uncorrected --seeds 0 1 2 3 4 --keep runs/convergence
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev

import numpy as np
from scipy import stats

from relax_hpc.metrics.read import read_metrics

CONFIG = Path(__file__).parents[2] / "configs" / "runs" / "quickstart.yaml"
BASE = "0"
COLOCATE = '{"rollout": null, "actor": {"roles": ["rollout", "actor"]}}'
WITHIN = 0.1
_RUN_S = 1800.0
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def words_of(mode: str) -> list[str]:
    """Options of a mode: `colocate`, or max_staleness, perhaps without the off-policy correction."""
    if mode == "colocate":
        return ["--colocate", "true", "--groups", COLOCATE]
    staleness, _, uncorrected = mode.partition("-")
    return ["--max_staleness", staleness, *(["--algorithm.correction.kind", "off"] if uncorrected else [])]


def run(directory: Path, mode: str, seed: int, steps: int, *over: str) -> Path:
    """The quickstart in a mode, with options ``over`` it; its run directory. One that was begun before goes on."""
    words = ["--run_dir", str(directory)]
    if (directory / "config.yaml").exists():
        words += ["--resume"]
    else:
        size = ["--seed", str(seed), "--steps", str(steps), "--checkpoint.every", str(steps)]
        words += ["--config", str(CONFIG), *size, "--eval.every", str(steps), *words_of(mode), *over]
    if not finished(directory, steps):
        directory.parent.mkdir(parents=True, exist_ok=True)
        with (directory.parent / f"{directory.name}.txt").open("a") as output:
            command = [sys.executable, "-m", "relax_hpc", "run", *words]
            subprocess.run(command, stdout=output, stderr=output, check=True, timeout=_RUN_S)
    return directory


def finished(directory: Path, steps: int) -> bool:
    """Whether its last version was evaluated."""
    return directory.exists() and steps in scores(directory)


def scores(directory: Path) -> dict[int, float]:
    """Held-out score by version, the mean over the sets."""
    found = {}
    for row in read_metrics(directory):
        values = [value for tag, value in row.items() if tag.startswith("eval/")]
        if values:
            found[row["step"]] = mean(values)
    return found


def rewards(directory: Path) -> tuple[np.ndarray, np.ndarray]:
    """Seconds since the first step, and rewards, of each step."""
    rows = [row for row in read_metrics(directory) if "reward/mean" in row]
    # The line of a step is as old as the last that was added to it, an evaluation perhaps.
    times = np.minimum.accumulate(np.array([row["time"] for row in rows])[::-1])[::-1]
    return times - times[0], np.array([row["reward/mean"] for row in rows])


def difference(one: Sequence[float], base: Sequence[float]) -> tuple[float, float, float]:
    """Of the means, and its 95 % interval."""
    if len(one) < 2 or len(base) < 2:
        return mean(one) - mean(base), float("nan"), float("nan")
    interval = stats.ttest_ind(one, base, equal_var=False).confidence_interval(0.95)
    return mean(one) - mean(base), float(interval.low), float(interval.high)


def plot(runs: dict[str, list[Path]], path: Path) -> Path:
    """Mean and spread of the reward against steps, and each run's against wall time."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (by_step, by_time) = plt.subplots(1, 2, figsize=(11, 4), sharey=True, layout="constrained")
    for (mode, directories), colour in zip(runs.items(), _COLOURS, strict=False):
        curves = [rewards(directory) for directory in directories]
        size = min(len(values) for _, values in curves)
        values = np.array([_smooth(values[:size]) for _, values in curves])
        by_step.plot(values.mean(0), color=colour, label=_label(mode))
        by_step.fill_between(range(size), values.min(0), values.max(0), color=colour, alpha=0.15, linewidth=0)
        for number, (seconds, found) in enumerate(curves):
            by_time.plot(seconds / 60, _smooth(found), color=colour, alpha=0.7, label=None if number else _label(mode))
    by_step.set(xlabel="step", ylabel="reward", title="Mean over seeds; shaded: lowest and highest")
    by_time.set(xlabel="minutes since the first step", title="Each seed")
    by_step.legend(frameon=False)
    figure.savefig(path, dpi=150)
    return path


def _label(mode: str) -> str:
    return mode if mode == "colocate" else "staleness " + mode.replace("-uncorrected", ", not corrected")


def _smooth(values: np.ndarray, width: int = 5) -> np.ndarray:
    sums = np.cumsum(np.insert(values, 0, 0.0))
    starts = np.maximum(0, np.arange(1, len(values) + 1) - width)
    ends = np.arange(1, len(values) + 1)
    return (sums[ends] - sums[starts]) / (ends - starts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", default=["0", "1", "4", "colocate", "4-uncorrected"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--keep", type=Path, required=True, help="folder for the run directories and the picture")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    args = parser.parse_args()
    # Seed by seed, so that whatever slows the machine slows all modes.
    runs: dict[str, list[Path]] = {mode: [] for mode in args.modes}
    for seed in args.seeds:
        for mode in args.modes:
            runs[mode].append(run((args.keep / f"{mode}-seed-{seed}").absolute(), mode, seed, args.steps))
    finals = {mode: [scores(directory)[args.steps] for directory in found] for mode, found in runs.items()}
    minutes = {mode: [rewards(directory)[0][-1] / 60 for directory in found] for mode, found in runs.items()}
    table = []
    for mode in args.modes:
        spread = stdev(finals[mode]) if len(finals[mode]) > 1 else float("nan")
        about = {"mode": mode, "held_out": mean(finals[mode]), "spread": spread, "minutes": mean(minutes[mode])}
        if mode != BASE and BASE in finals:
            about |= dict(zip(("difference", "low", "high"), difference(finals[mode], finals[BASE]), strict=True))
        table.append(about)
    picture = plot(runs, args.keep / "convergence.png")
    if args.json:
        print(json.dumps({"steps": args.steps, "seeds": args.seeds, "modes": table, "picture": str(picture)}, indent=2))
    else:
        print(f"{'mode':16s} held-out  spread  minutes  to staleness 0 (95 %)")
        for row in table:
            compared = f"{row['difference']:+.3f} ({row['low']:+.3f}, {row['high']:+.3f})" if "low" in row else ""
            print(f"{row['mode']:16s} {row['held_out']:8.3f} {row['spread']:7.3f} {row['minutes']:8.2f}  {compared}")
        print(picture)
    close = [row for row in table if "low" in row and "uncorrected" not in row["mode"]]
    return 0 if all(row["low"] >= -WITHIN and row["high"] <= WITHIN for row in close) else 1


if __name__ == "__main__":
    sys.exit(main())
