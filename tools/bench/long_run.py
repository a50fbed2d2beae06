"""Does a run of many steps stay as it began? Memory, descriptors, threads, /dev/shm, disk, step
time, held-out score, and the time that commands take on its directory.

python tools/bench/long_run.py quickstart --steps 20000 --keep runs/long
python tools/bench/long_run.py video --steps 2000 --keep runs/long

The quickstart runs with simulated engines and small prompt groups, so that a step takes
milliseconds. `video` runs as it is, with SGLang. A run that is there already goes on, and one that
has reached its steps is only evaluated, without its processes if these were not sampled.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from figures import Figure, print_figures
from long_run_trends import fit_trend, largest_fall
from long_run_usage import MEASURES, newest_step, record

from relax_hpc.base.metrics.read import load_metrics
from relax_hpc.config import load_resolved

CONFIGS = Path(__file__).parents[2] / "configs" / "runs"
SIMULATED = [
    *("--rollout.engine.kind", "simulated", "--rollout.engine.flags", "{}"),
    *("--prompts_per_step", "8", "--samples_per_prompt", "4", "--warm_start.steps", "5"),
    *("--algorithm.passes", "1", "--checkpoint.every", "1000", "--eval.every", "500"),
]
"""Options of the quickstart with short steps."""
COMMANDS = ("status", "report", "samples", "queue audit")
COMMAND_S, ROUNDS = 2.0, 3
SKIPPED_SHARE = 0.5
"""Share of the steps at the beginning that no trend covers. Caches of up to 4,096 entries fill
there, and buffers reach their sizes."""
MOST_GROWTH = 0.02
"""Growth over the whole run, as a share of the mean, that counts as none."""
_LEAST_SAMPLES = 40
"""A process with fewer samples lived for a moment only."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", choices=["quickstart", "video"])
    parser.add_argument("--steps", type=int, help="default: 20000, video: 2000")
    parser.add_argument(
        "--keep", type=Path, required=True, help="folder of the run and its samples"
    )
    parser.add_argument("--minutes", type=float, default=0, help="stop the run after this time")
    parser.add_argument("--json", action="store_true", help="one object as the last line")
    args = parser.parse_args(argv)
    steps = args.steps or {"quickstart": 20000, "video": 2000}[args.config]
    root, usage = args.keep.absolute() / args.config, args.keep.absolute() / f"{args.config}.usage"
    if newest_step(root) + 1 < steps:
        run(args.config, steps, root, usage, 60 * args.minutes)
    about = {"config": args.config, "steps": newest_step(root) + 1, "planned": steps}
    figures = print_figures(evaluate(root, usage), about, args.json)
    return 0 if all(figure.ok is not False for figure in figures) else 1


def run(config: str, steps: int, root: Path, usage: Path, limit_s: float) -> None:
    """Run until all steps are trained, or for ``limit_s`` seconds (0: no limit), and sample it."""
    words = ["--config", str(CONFIGS / f"{config}.yaml"), "--run_dir", str(root)]
    words += ["--steps", str(steps), *(SIMULATED if config == "quickstart" else [])]
    if (root / "config.yaml").exists():
        words = ["--resume", "--run_dir", str(root)]
    root.parent.mkdir(parents=True, exist_ok=True)
    with root.with_suffix(".txt").open("a") as output:
        command = [sys.executable, "-m", "relax_hpc", "run", *words]
        process = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            record(root, psutil.Process(process.pid), usage, limit_s)
        finally:
            process.terminate()
            process.wait(300)


def evaluate(root: Path, usage: Path) -> Iterator[Figure]:
    """Figures of a run directory, and of the samples of its processes if there are any."""
    last_step = newest_step(root)
    first_step = round(SKIPPED_SHARE * last_step)
    yield Figure("steps", last_step + 1, "")
    if usage.exists():
        yield from _resources(usage, first_step, last_step)
    yield from _learning(root, first_step, last_step)
    yield from _commands(root)


def _resources(usage: Path, first_step: int, last_step: int) -> Iterator[Figure]:
    """Trends of all processes and of the disk from step ``first_step`` on."""
    lines = [json.loads(line) for line in usage.read_text().splitlines()]
    lines = [line for line in lines if line["step"] >= first_step]
    steps = np.array([line["step"] for line in lines], float)
    for name in _process_names(lines):
        for measure in MEASURES:
            present = [number for number, line in enumerate(lines) if name in line["processes"]]
            values = [lines[number]["processes"][name][measure] for number in present]
            if any(values):
                yield _trend_figure(f"{name}: {measure}", steps[present], values, last_step)
    yield from _disk(lines)


def _process_names(lines: Sequence[dict[str, Any]]) -> list[str]:
    counts = Counter(name for line in lines for name in line["processes"])
    return [name for name, count in counts.items() if count >= _LEAST_SAMPLES]


def _trend_figure(name: str, steps: np.ndarray, values: Sequence[float], last_step: int) -> Figure:
    """Growth per 1,000 steps as a share of the mean. It must include none, or be small."""
    trend = fit_trend(steps, np.array(values, float))
    mean = trend.mean or 1.0
    # In percent. Rounded, because the fit of a constant is not exactly zero.
    slopes = (trend.slope, trend.low, trend.high)
    growth = [round(100_000 * slope / mean, 6) + 0.0 for slope in slopes]
    is_flat = trend.low <= 0 or growth[0] * last_step <= 100_000 * MOST_GROWTH
    text = f"{name} {_readable(trend.mean, name)}: growth in 1,000 steps"
    target = f"interval has 0, or <= {MOST_GROWTH:.0%} in the run"
    return Figure(text, growth[0], "%", target, is_flat, sorted(growth))


def _readable(value: float, name: str) -> str:
    return f"{value / 2**20:.1f} MiB" if "bytes" in name else f"{value:.4g}"


def _disk(lines: Sequence[dict[str, Any]]) -> Iterator[Figure]:
    """Bytes for each step by folder. What a run keeps of each step grows; the rest must not."""
    looked = [line for line in lines if "disk" in line]
    if len(looked) < 3:
        return
    steps = np.array([line["step"] for line in looked], float)
    sums: dict[str, list[float]] = {}
    for line in looked:
        by_name: Counter[str] = Counter()
        for path, size in line["disk"].items():
            first, _, second = path.partition("/")
            by_name[f"queue/{second}" if first == "queue" else first] += size
        for name, size in by_name.items():
            sums.setdefault(name, []).append(size)
    total_slope = 0.0
    for name, sizes in sums.items():
        if len(sizes) != len(steps):
            continue
        trend = fit_trend(steps, np.array(sizes))
        unit = "files a step" if name == "files" else "bytes a step"
        if name != "files":
            total_slope += trend.slope
        if name == "files" or abs(trend.slope) > 1:
            yield Figure(f"disk: {name}", trend.slope, unit, None, None, trend.bounds)
    yield Figure("disk: all folders", total_slope, "bytes a step")


def _learning(root: Path, first_step: int, last_step: int) -> Iterator[Figure]:
    rows = load_metrics(root).rows
    timed = [row for row in rows if row["step"] >= first_step and "perf/step_s" in row]
    steps = np.array([row["step"] for row in timed], float)
    times = np.array([row["perf/step_s"] for row in timed])
    # The median of some steps: a checkpoint, an evaluation or another program takes single ones.
    size = max(1, len(times) // 100)
    medians = [statistics.median(times[at : at + size]) for at in range(0, len(times), size)]
    yield _trend_figure("step time, s", steps[::size], medians, last_step)
    samples = load_resolved(root).eval.samples
    for tag in sorted({tag for row in rows for tag in row if tag.startswith("eval/")}):
        scores = [row[tag] for row in rows if tag in row]
        fall, spread = largest_fall(scores, samples)
        name = f"held-out {tag.removeprefix('eval/')}, best {max(scores):.3f}: fall below the best"
        yield Figure(name, fall, "", f"<= its spread {spread:.3f}", fall <= spread)


def _commands(root: Path) -> Iterator[Figure]:
    for command in COMMANDS:
        seconds, cpu_seconds = [], []
        for _ in range(ROUNDS):
            started, cpu_before = time.monotonic(), _cpu_of_children()
            words = [sys.executable, "-m", "relax_hpc", *command.split(), str(root)]
            subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=600)
            seconds.append(time.monotonic() - started)
            cpu_seconds.append(_cpu_of_children() - cpu_before)
        middle = statistics.median(seconds)
        target = f"< {COMMAND_S:g}"
        yield Figure(f"relax-hpc {command}", middle, "s", target, middle < COMMAND_S, seconds)
        # On a busy machine, the time includes that of other programs.
        cpu_s = statistics.median(cpu_seconds)
        yield Figure(f"relax-hpc {command}, CPU", cpu_s, "s", None, None, cpu_seconds)


def _cpu_of_children() -> float:
    """CPU seconds of all children that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    os.environ.setdefault("PYTHONPATH", str(Path(__file__).parents[2]))
    sys.exit(main())
