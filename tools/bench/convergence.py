"""Does every algorithm learn, and does staleness cost anything? The quickstart in many ways,
several seeds each.

    python tools/bench/convergence.py --keep runs/convergence --seeds 0 1 2 3 4
    python tools/bench/convergence.py --keep runs/convergence --seeds 0 --algorithms
    python tools/bench/convergence.py --keep runs/convergence --seeds 0 1 2 3 4 --report
    python tools/bench/convergence.py --keep runs/convergence --seeds 0 1 2 3 4 5 6 7 --claim --json

One run after the other; those that are there already are not made again, one that was cut off goes
on, and `--report` makes none. Modes are compared with staleness 0 seed by seed, as a seed fixes
prompts, first weights and some of the luck, by the area between two curves: a final score sits near
its ceiling and is one draw of 400 answers. The curve that decides is of rewards, by the version
that drew the samples, for it is of 256 samples a step; greedy held-out answers, which turn all at
once, spread by twice as much, and are printed beside it. The interval is Student's, of 95 %; the
power is that of finding a true loss of `--loss`. A comparison that could not fail says nothing, so
the last mode is one that must lose: samples 16 versions old, of which the loss knows nothing.

`--claim` tests what the documentation claims (`CLAIM`): at staleness 1 and at a true staleness of 4
the reward area is at most 0.03 below that of staleness 0, measured with at least 8 seeds and an
interval whose half-width is at most 0.015.

An algorithm has to end higher than both controls by `--margin`: GRPO with permuted rewards, which
shows what is learned of anything but the rewards, though it may end lower than it began; and its
own first weights, which is what a learning rate of 0 would leave, whatever else is broken.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median, stdev

import numpy as np
from curves import POWER, Paired, area, area_between, paired, steps_to
from figures import print_result
from quickstart_runs import (
    BASE,
    FITTING,
    directory_of,
    finished,
    rewards,
    rewards_by_version,
    run,
    scores,
    staleness,
    taught_by,
)

CONTROL = "shuffled"
MUST_LOSE = "true-16-uncorrected"
REPORTED = "true-8"
"""Mode whose loss is reported, and not judged."""
MODES = (BASE, "1", "true-4", REPORTED, "colocate", MUST_LOSE)
DEFAULT = "grpo"
"""Algorithm of the quickstart: mode `0` is its run."""
EVALUATE_EVERY = 9
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")

Runs = dict[str, dict[int, Path]]
"""Run directories by mode and seed."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Bound of what staleness costs, and how sure a measurement of it has to be."""

    modes: tuple[str, ...]
    most_lost: float
    """Reward area by which a mode may be below staleness 0, as the mean over seeds."""
    least_seeds: int
    widest: float
    """Largest half-width of the paired interval of 95 %."""

    def judged(self, differences: Sequence[float]) -> tuple[str, bool]:
        """Verdict on a mode's ``differences`` to staleness 0, one a seed, in words; and whether the
        claim holds."""
        if len(differences) < self.least_seeds:
            return f"not decided: found {len(differences)} seeds, needs {self.least_seeds}", False
        difference = paired(differences)
        if difference.half_width > self.widest:
            return (
                f"not decided: half-width {difference.half_width:.3f}, needs {self.widest:g}",
                False,
            )
        is_met = difference.mean >= -self.most_lost
        return f"at most {self.most_lost:g} below: {'met' if is_met else 'MISSED'}", is_met


CLAIM = Claim(modes=("1", "true-4"), most_lost=0.03, least_seeds=8, widest=0.015)


def main() -> int:
    """Make the runs that are not there, and print what all have reached."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--modes", nargs="+", default=MODES, help="see tools/bench/quickstart_runs.py"
    )
    names = [name for name in FITTING if name != DEFAULT]
    parser.add_argument(
        "--algorithms", nargs="*", choices=names, help="compare these, or all, with the controls"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument(
        "--loss", type=float, default=0.05, help="of area, that should be found in 80 %% of cases"
    )
    parser.add_argument(
        "--margin", type=float, default=0.1, help="by which an algorithm ends above its controls"
    )
    parser.add_argument(
        "--level", type=float, default=0.8, help="held-out score to which steps are counted"
    )
    parser.add_argument(
        "--keep", type=Path, required=True, help="folder of the run directories and the picture"
    )
    parser.add_argument(
        "--claim",
        action="store_true",
        help="exit with 1 unless the claim of the documentation holds",
    )
    parser.add_argument("--report", action="store_true", help="make no runs")
    parser.add_argument(
        "--json", action="store_true", help="end with the table as one line of JSON"
    )
    args = parser.parse_args()
    load_before = round(os.getloadavg()[0], 1)
    by_algorithm = args.algorithms is not None
    modes = [BASE, CONTROL, *(args.algorithms or names)] if by_algorithm else list(args.modes)
    found = gathered(args, modes)
    columns, rows, ok = (algorithm_table if by_algorithm else mode_table)(found, args)
    print_table(columns, rows)
    print(plot(found, args.keep / ("algorithms.png" if by_algorithm else "convergence.png")))
    if args.json:
        settings = {"steps": args.steps, "seeds": args.seeds, "load_before": load_before}
        print_result([], settings, columns=columns, rows=rows)
    return 0 if ok else 1


def gathered(args: argparse.Namespace, modes: Sequence[str]) -> Runs:
    """Finished runs, made where they are not there. Seed by seed: what slows the machine then slows
    all modes."""
    found: Runs = {mode: {} for mode in modes}
    for seed in args.seeds:
        for mode in modes:
            directory = directory_of(args.keep, mode, seed, args.steps)
            if not args.report:
                over = taught_by(args.keep, seed, args.steps) if mode == "distill" else []
                run(directory, mode, seed, args.steps, *over, evaluate_every=EVALUATE_EVERY)
            if finished(directory, args.steps):
                found[mode][seed] = directory
            else:
                print(f"not finished: {mode}, seed {seed}")
    return {mode: by_seed for mode, by_seed in found.items() if by_seed}


Table = tuple[list[str], list[list[str]], bool]
"""Names of columns, rows, and whether all that was to be shown was shown."""


def mode_table(found: Runs, args: argparse.Namespace) -> Table:
    """Modes against staleness 0, seed by seed."""
    columns = [
        "mode",
        "staleness, mean and most",
        *reached_columns(args.level),
        "reward area to staleness 0, paired, 95 %",
    ]
    columns += [
        "spread",
        f"power for {args.loss:g}",
        "seeds for 80 %",
        "held-out area to staleness 0",
    ]
    columns += ["verdict", "claim"]
    rows, verdicts, claims = [], [], {}
    for mode, by_seed in found.items():
        old = [staleness(directory) for directory in by_seed.values()]
        about = f"{mean(middle for middle, _ in old):.1f}, {max(most for _, most in old):.0f}"
        compared, ok = against_base(mode, found, args.loss) if mode != BASE else ([""] * 6, True)
        claim = ""
        if mode in CLAIM.modes:
            claim, claims[mode] = CLAIM.judged(area_differences(mode, found))
        rows.append([mode, about, *reached(by_seed, args.steps, args.level), *compared, claim])
        verdicts.append(ok or mode == REPORTED)
    is_claim_met = all(claims.get(mode, False) for mode in CLAIM.modes)
    return columns, rows, is_claim_met if args.claim else all(verdicts)


def area_differences(mode: str, runs: Runs) -> list[float]:
    """Reward area of ``mode`` less that of staleness 0, of each seed that both have."""
    mode_runs, base_runs = runs[mode], runs.get(BASE, {})
    shared_seeds = sorted(mode_runs.keys() & base_runs.keys())
    return [
        area_between(rewards_by_version(mode_runs[seed]), rewards_by_version(base_runs[seed]))
        for seed in shared_seeds
    ]


def against_base(mode: str, found: Runs, loss: float) -> tuple[list[str], bool]:
    """Cells of a mode's paired difference to staleness 0, and whether it is as it should be, and
    power suffices."""
    shared = sorted(set(found[mode]) & set(found.get(BASE, {})))
    pairs = [(found[mode][seed], found[BASE][seed]) for seed in shared]
    if len(pairs) < 2:
        return ["", "", "", "", "", "fewer than two seeds of both say nothing"], False
    seen = paired(area_differences(mode, found))
    held_out = paired([area_between(scores(one), scores(base)) for one, base in pairs])
    cells = [_interval(seen), f"{seen.spread:.3f}", f"{seen.power(loss):.2f}"]
    cells += [f"{seen.needed(loss)} (surely {seen.surely_needed(loss)})", _interval(held_out)]
    verdict, ok = judged(seen, loss)
    if mode == MUST_LOSE:
        return [*cells, "loses, as it must" if seen.lost else "NOT FOUND to lose"], seen.lost
    return [*cells, verdict], ok


def judged(seen: Paired, loss: float) -> tuple[str, bool]:
    """What a difference says of a true ``loss``, in words, and whether there is none, with power
    enough to say so."""
    if seen.low > -loss:
        return (
            f"loses less than {loss:g}" if seen.lost else f"a loss of {loss:g} is ruled out",
            True,
        )
    if seen.lost:
        return "LOSES", False
    enough = seen.power(loss) >= POWER
    return "no loss found" if enough else "no loss found; TOO FEW SEEDS", enough


def _interval(seen: Paired) -> str:
    return f"{seen.mean:+.3f} ({seen.low:+.3f} to {seen.high:+.3f})"


def algorithm_table(found: Runs, args: argparse.Namespace) -> Table:
    """Algorithms against permuted rewards and against the weights that they began with."""
    columns = [
        "algorithm",
        *reached_columns(args.level),
        "held-out of the first weights",
        "verdict",
    ]
    rows, verdicts = [], []
    for mode, by_seed in found.items():
        gained = min(gains(mode, found, args.steps))
        ok = (gained >= args.margin) is (mode != CONTROL)
        verdict = (
            f"over both by {gained:.3f} or more"
            if mode != CONTROL
            else f"control, over its first by {gained:.3f}"
        )
        name = {BASE: DEFAULT, CONTROL: f"{DEFAULT}, rewards permuted"}.get(mode, mode)
        cells = reached(by_seed, args.steps, args.level)
        firsts = _spread([scores(directory)[0] for directory in by_seed.values()])
        rows.append([name, *cells, firsts, verdict if ok else f"MISSED: {verdict}"])
        verdicts.append(ok)
    return columns, rows, all(verdicts) and CONTROL in found


def gains(mode: str, found: Runs, steps: int) -> Iterator[float]:
    """Last score of each seed, above the higher one of its first and that of the control, which has
    the first alone; a seed without a control has the best of the others'."""
    ends = {one: scores(directory)[steps] for one, directory in found.get(CONTROL, {}).items()}
    for seed, directory in found[mode].items():
        curve = scores(directory)
        permuted = ends.get(seed, max(ends.values(), default=math.inf))
        yield curve[steps] - (curve[0] if mode == CONTROL else max(curve[0], permuted))


def reached_columns(level: float) -> list[str]:
    """Names of the cells of `reached`."""
    return ["seeds", "held-out", f"steps to {level:g}", "held-out area", "reward area"]


def reached(by_seed: dict[int, Path], steps: int, level: float) -> list[str]:
    """Cells of what the runs of a mode have come to."""
    curves = [scores(directory) for directory in by_seed.values()]
    to = [steps_to(curve, level) for curve in curves]
    there = [one for one in to if math.isfinite(one)]
    words = f"{median(there):.0f}" if there else "never"
    words += f" ({len(there)} of {len(to)})" if 0 < len(there) < len(to) else ""
    areas = [
        [area(one) for one in each] for each in (curves, map(rewards_by_version, by_seed.values()))
    ]
    return [
        str(len(curves)),
        _spread([curve[steps] for curve in curves]),
        words,
        *map(_spread, areas),
    ]


def _spread(values: Sequence[float]) -> str:
    return f"{mean(values):.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as what is in them."""
    lines = [columns, *rows]
    widths = [max(len(line[place]) for line in lines) for place in range(len(columns))]
    for line in lines:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        )


def plot(found: Runs, path: Path) -> Path:
    """Held-out scores by version, mean and range over seeds, and rewards by minute of each seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (by_version, by_time) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for number, (mode, by_seed) in enumerate(found.items()):
        colour, dash = _COLOURS[number % len(_COLOURS)], "-" if number < len(_COLOURS) else "--"
        curves = [scores(directory) for directory in by_seed.values()]
        versions = sorted(set.intersection(*map(set, curves)))
        values = np.array([[curve[version] for version in versions] for curve in curves])
        by_version.plot(versions, values.mean(0), dash, color=colour, label=mode)
        by_version.fill_between(
            versions, values.min(0), values.max(0), color=colour, alpha=0.15, linewidth=0
        )
        for seconds, reward in map(rewards, by_seed.values()):
            by_time.plot(seconds / 60, _smooth(reward), dash, color=colour, alpha=0.7)
    by_version.set(
        xlabel="version",
        ylabel="held-out score",
        title="Mean over seeds; shaded: lowest and highest",
    )
    by_time.set(xlabel="minutes since the first step", ylabel="reward", title="Each seed")
    by_version.legend(frameon=False, fontsize="small")
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


def _smooth(values: np.ndarray, width: int = 5) -> np.ndarray:
    """Means of each value and those before it, ``width`` of them or as many as there are."""
    sums = np.cumsum(np.insert(values, 0, 0.0))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - width)
    return (sums[ends] - sums[starts]) / (ends - starts)


if __name__ == "__main__":
    sys.exit(main())
