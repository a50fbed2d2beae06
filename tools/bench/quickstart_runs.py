"""Runs of the quickstart in a mode or by an algorithm, and what is read of them; one that was begun
before goes on.

A mode is a word:
- `colocate`: engine and actor take turns on the same devices.
- `4`: max_staleness. How old samples really are depends on how fast either side is.
- `true-4`: samples are 4 versions old in the mean, whatever is fast: of 2 * 4 + 1 versions one is
  published, and a step
  may be as many versions after it, so that staleness goes from 0 to 8 and begins anew.
- with `-group` behind it: a group actor_fwd makes the old log-probabilities from the published
weights. In a `true-` mode these are the weights of the engines: the clip is around the policy that
drew the samples, and old / rollout is 1.
- with `-uncorrected` behind it: no weight by old / rollout, so the loss ignores staleness.
- `shuffled`: rewards are permuted over the step's responses.
- the name of an algorithm, at staleness 0; `distill` is taught by what mode `0` of the same seed
  has become.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from statistics import mean

import numpy as np

from relax_hpc.algorithms import ALGORITHMS
from relax_hpc.base.metrics.read import read_metrics

CONFIG = Path(__file__).parents[2] / "configs" / "runs" / "quickstart.yaml"
BASE = "0"
"""Synchronous, by the default algorithm: what all others are compared with."""
COLOCATE = '{"rollout": null, "actor": {"roles": ["rollout", "actor"]}}'
LOSSES = {
    "": [],
    "group": ["--groups.actor_fwd.roles", "[actor_fwd]"],
    "uncorrected": ["--algorithm.correction.kind", "off"],
}
"""Options by the word behind a mode's staleness."""
FITTING = sorted(name for name, kind in ALGORITHMS.items() if kind.gives)
"""Algorithms for this task: those that learn from what is drawn, and not from a file."""
FURTHER = {"ppo": ["--critic.optimizer.lr", "1e-3"]}
"""Options of an algorithm beside its name: a critic begins without anything learned, and has as
many steps to learn."""
_RUN_S = 3600.0


def words_of(mode: str) -> list[str]:
    """Options of a mode. KeyError, ValueError: there is no such mode."""
    if mode == "colocate":
        return ["--colocate", "true", "--groups", COLOCATE]
    if mode == "shuffled":
        return ["--algorithm.shuffle_rewards", "true"]
    if mode in ALGORITHMS:
        return ["--algorithm.name", mode, *FURTHER.get(mode, [])]
    staleness, _, loss = mode.removeprefix("true-").partition("-")
    most = 2 * int(staleness) if mode.startswith("true-") else int(staleness)
    every = ["--weights.publish_every", str(most + 1)] if mode.startswith("true-") else []
    return ["--max_staleness", str(most), *every, *LOSSES[loss]]


def directory_of(keep: Path, mode: str, seed: int, steps: int) -> Path:
    """Where the run of a mode and seed is kept; with other steps it is another one, whose rate
    falls otherwise."""
    return (keep / f"{steps}-steps" / f"{mode}-seed-{seed}").absolute()


def taught_by(keep: Path, seed: int, steps: int) -> list[str]:
    """Options by which `distill` has the last weights of mode `0` for a teacher. FileNotFoundError:
    there are none."""
    base = directory_of(keep, BASE, seed, steps)
    found = sorted((base / "weights").glob(f"*-v{steps:06d}/model"))
    if not found:
        raise FileNotFoundError(
            f"{base}: no weights of version {steps}; distill needs mode {BASE} of its seed first"
        )
    return ["--model.teacher_path", str(found[-1])]


def run(
    directory: Path, mode: str, seed: int, steps: int, *over: str, evaluate_every: int = 0
) -> Path:
    """The quickstart in a mode, with options ``over`` it; its run directory.

    One that was begun before goes on, one that is finished stays as it is. ``evaluate_every``:
    versions between evaluations; 0: the first and the last one alone. CalledProcessError: the run
    failed; what it said is beside it.
    """
    words = ["--run_dir", str(directory)]
    if (directory / "config.yaml").exists():
        words += ["--resume"]
    else:
        size = ["--seed", str(seed), "--steps", str(steps), "--checkpoint.every", str(steps)]
        size += ["--eval.every", str(evaluate_every or steps)]
        words += ["--config", str(CONFIG), *size, *words_of(mode), *over]
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


def rewards_by_version(directory: Path) -> dict[int, float]:
    """Mean reward of what each version of the weights drew, to the nearest version where a step has
    samples of several.

    By step, a mode with older samples would seem to learn later than it does.
    """
    found: dict[int, list[float]] = {}
    for row in read_metrics(directory):
        if "reward/mean" in row:
            found.setdefault(row["step"] - round(row["staleness/mean"]), []).append(
                row["reward/mean"]
            )
    return {version: mean(values) for version, values in found.items()}


def staleness(directory: Path) -> tuple[float, float]:
    """Mean over the steps, and the most, of how many versions older the weights were that drew the
    samples."""
    rows = [row for row in read_metrics(directory) if "staleness/mean" in row]
    return mean(row["staleness/mean"] for row in rows), max(row["staleness/max"] for row in rows)
