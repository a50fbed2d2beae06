"""Where a step of the quickstart goes, what the toolkit itself costs, and how that compares with a
plain loop.

Starts the run, and beside it the plain loop of plain_loop.py with the same engine, model, trainer
and settings; the two take turns on the machine. Steps that a change of turns cuts are left out,
medians are over the others.

    python tools/bench/quickstart.py --steps 60 --json
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from figures import Figure, print_figures
from turns import Program

from relax_hpc.base.metrics.read import read_metrics
from relax_hpc.base.metrics.read_spans import Span, merge_intervals, read_spans, union_length
from relax_hpc.base.metrics.spans import MODEL_KINDS
from relax_hpc.config import load
from relax_hpc.net.rendezvous.process import clean_environment

ROOT = Path(__file__).parents[2]
WARM_UP_STEPS = 10
"""First steps that are left out: caches fill, the engine's garbage collector is not yet frozen."""
PARTS = {
    "generation": ("generate",),
    "train": ("train",),
    "forward roles": ("forward",),
    "weight update of the engine": ("engine_update",),
    "publishing and pulling weights": ("publish", "weights"),
    "queue, rewards and rows": ("queue",),
}
"""Part of a step -> kinds of spans. A moment counts for the first part that some role is at; the
rest is waiting."""
WAITING = "messages and wake-ups"
TURN_STEPS = 8
_TURN_TIMEOUT_S = 900.0
_STEP = re.compile(r"^eta +\S+ +step +(\d+)/")

Interval = tuple[float, float]


def step_intervals(spans: Sequence[Span]) -> dict[int, Interval]:
    """From the end of training of the step before to that of its own, for every step that has
    both."""
    ends: dict[int, float] = {}
    for span in spans:
        if span.what == "train" and span.step is not None:
            ends[span.step] = max(span.end, ends.get(span.step, span.end))
    return {step: (ends[step - 1], end) for step, end in ends.items() if step - 1 in ends}


def parts_of(spans: Sequence[Span], start: float, end: float) -> dict[str, float]:
    """Seconds of [start, end] by part; they add up to its length."""
    near = [span for span in spans if span.end > start and span.start < end]
    covered: list[Interval] = []
    parts, before = {}, 0.0
    for part, kinds in PARTS.items():
        covered = merge_intervals(
            [*covered, *((span.start, span.end) for span in near if span.what in kinds)]
        )
        now = union_length(covered, start, end)
        parts[part], before = now - before, now
    return parts | {WAITING: end - start - before}


def own_share(spans: Sequence[Span], start: float, end: float) -> float:
    """Share of [start, end] in which no engine and no model was at work."""
    model = [(span.start, span.end) for span in spans if span.what in MODEL_KINDS]
    return 1.0 - union_length(model, start, end) / (end - start)


def spent(spans: Sequence[Span], what: str, step: int) -> float:
    """Seconds in which some role did ``what`` for ``step``."""
    intervals = merge_intervals(
        (span.start, span.end) for span in spans if (span.what, span.step) == (what, step)
    )
    return sum(high - low for low, high in intervals)


def tokens_per_second(
    spans: Sequence[Span], run_dir: Path, steps: Sequence[int], passes: int
) -> tuple[float, float]:
    """Medians over ``steps``: response tokens by generation time, tokens of all passes by training
    time."""
    rows = {row["step"]: row for row in read_metrics(run_dir)}
    rollout = [rows[step]["perf/rollout_tokens"] / spent(spans, "generate", step) for step in steps]
    train = [
        passes * rows[step]["perf/trained_tokens"] / spent(spans, "train", step) for step in steps
    ]
    return median(rollout), median(train)


def run_figures(
    spans: Sequence[Span], steps: Sequence[int], intervals: dict[int, Interval]
) -> list[Figure]:
    """The step, its parts and the toolkit's own share: medians over ``steps``."""
    split = [parts_of(spans, *intervals[step]) for step in steps]
    wall = median(intervals[step][1] - intervals[step][0] for step in steps)
    own = median(own_share(spans, *intervals[step]) for step in steps)
    figures = [Figure("step", wall, "s")]
    figures += [
        Figure(f"step: {part}", median(parts[part] for parts in split), "s") for part in split[0]
    ]
    return [*figures, Figure("toolkit's own share", own, "of a step", "< 0.10", own < 0.10)]


def plain_figures(lines: Sequence[dict[str, Any]], wall: float) -> list[Figure]:
    """The plain loop's step with and without forward passes, ``wall`` seconds as multiples of it,
    and its parts."""
    figures = []
    for forward, name in ((False, "plain loop"), (True, "plain loop with forward passes")):
        chosen = [line for line in lines if line["forward"] == forward]
        plain = median(line["end"] - line["start"] for line in chosen)
        ratio = wall / plain
        figures += [
            Figure(name, plain, "s"),
            Figure(f"step / {name}", ratio, "times", "<= 1.3", ratio <= 1.3),
        ]
    parts = {
        part: median(line["seconds"][part] for line in chosen) for part in chosen[0]["seconds"]
    }
    return [
        *figures,
        *(Figure(f"plain loop: {part}", seconds, "s") for part, seconds in parts.items()),
    ]


def bounds(figures: Sequence[Figure]) -> str:
    """What bounds a step, in words: its largest parts."""
    wall = figures[0].value
    parts = sorted((f for f in figures if f.name.startswith("step: ")), key=lambda f: -f.value)
    return ", ".join(f"{f.name.removeprefix('step: ')} {f.value / wall:.0%}" for f in parts[:3])


def step_of_run(line: str) -> int | None:
    """The step that a progress line of `relax-hpc run` reports."""
    match = _STEP.match(line.rpartition("\r")[2])
    return int(match[1]) if match else None


def step_of_plain(line: str) -> int | None:
    """The step of a line of plain_loop.py."""
    return json.loads(line)["step"] if line.startswith("{") else None


def take_turns(
    run: Program, run_dir: Path, steps: int, environment: dict[str, str]
) -> list[dict[str, Any]]:
    """Run both to their end, the plain loop to be; its lines of whole steps."""
    run.turn(WARM_UP_STEPS, _TURN_TIMEOUT_S)
    words = [
        sys.executable,
        str(Path(__file__).with_name("plain_loop.py")),
        "--run_dir",
        str(run_dir),
    ]
    # More than it can take: it ends with the last turn.
    words += ["--steps", str(10 * steps), "--forward", "alternate"]
    with Program(words, step_of_plain, environment) as plain:
        plain.turn(WARM_UP_STEPS, _TURN_TIMEOUT_S)
        while not run.ended:
            run.turn(run.last_step + TURN_STEPS, _TURN_TIMEOUT_S)
            plain.turn(plain.last_step + TURN_STEPS, _TURN_TIMEOUT_S)
            if plain.ended:
                raise RuntimeError("the plain loop ended early:\n" + "\n".join(plain.lines[-20:]))
        lines = [json.loads(line) for line in plain.lines if line.startswith("{")]
        first = plain.windows[1][0]
        return [
            line
            for line in lines
            if line["start"] > first and plain.had_machine(line["start"], line["end"])
        ]


def measure(config_file: Path, run_dir: Path, steps: int) -> tuple[list[Figure], dict[str, Any]]:
    """Run both programs and make all figures, with the settings they were measured at."""
    config = load([config_file])
    environment = clean_environment() | {
        "OMP_NUM_THREADS": str(config.threads),
        "HF_HUB_OFFLINE": "1",
    }
    environment["PYTHONUNBUFFERED"] = "1"
    load_before = os.getloadavg()[0]
    words = [
        sys.executable,
        "-m",
        "relax_hpc",
        "run",
        "--config",
        str(config_file),
        "--run_dir",
        str(run_dir),
    ]
    words += [
        "--steps",
        str(WARM_UP_STEPS + steps),
        "--eval.every",
        "0",
        "--checkpoint.every",
        "1000000",
    ]
    words += ["--checkpoint.every_s", "0"]
    with Program(words, step_of_run, environment) as run:
        plain = take_turns(run, run_dir, steps, environment)
        if code := run.returncode(60.0):
            raise RuntimeError(f"the run ended with code {code}:\n" + "\n".join(run.lines[-20:]))
    spans = read_spans(run_dir)
    intervals = step_intervals(spans)
    whole = [
        s
        for s, (start, end) in intervals.items()
        if s >= WARM_UP_STEPS and run.had_machine(start, end)
    ]
    figures = run_figures(spans, whole, intervals)
    rollout, train = tokens_per_second(spans, run_dir, whole, config.algorithm.passes)
    ready = min(span.start for span in spans if span.what == "generate") - run.started
    memory = run.peak_bytes / 2**30
    figures += plain_figures(plain, figures[0].value)
    figures += [
        Figure("rollout tokens", rollout, "/s"),
        Figure("training tokens, all passes", train, "/s"),
    ]
    figures += [Figure("start-up to the first request", ready, "s")]
    figures += [Figure("memory of all processes (PSS)", memory, "GiB", "<= 8", memory <= 8)]
    settings = {"config": config_file.name, "steps": len(whole), "plain_steps": len(plain)}
    settings |= {
        "cores": os.cpu_count(),
        "load_before": round(load_before, 2),
        "max_staleness": config.max_staleness,
    }
    return figures, settings


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=ROOT / "configs/runs/quickstart.yaml")
    parser.add_argument(
        "--steps", type=int, default=60, help=f"training steps after {WARM_UP_STEPS} of warm-up"
    )
    parser.add_argument(
        "--keep", type=Path, help="make the run here and leave it; otherwise it is temporary"
    )
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Measure and print; 0 even when a target is missed."""
    args = parse(argv)
    with tempfile.TemporaryDirectory(prefix="bench-quickstart-") as folder:
        figures, settings = measure(args.config, args.keep or Path(folder) / "run", args.steps)
    print(f"the step is bound by: {bounds(figures)}")
    print_figures(figures, settings, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
