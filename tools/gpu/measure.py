"""Measure the jobs of tools/gpu/jobs.py and print the table of tools/gpu/rows.py.

Each job is a process. They run one after the other, the most valuable first.

With --store, the figures of a job are stored as soon as they exist, and a second call measures only
the jobs without stored figures.

python tools/gpu/measure.py --only step --store
python tools/gpu/measure.py --device cpu --small
"""

from __future__ import annotations

import argparse
import difflib
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from child import ask
from jobs import JOBS, Job
from requirements import has
from results import FOLDER, load, machine, store
from rows import COLUMNS, ROWS, Figures

PROGRAMS = tuple(dict.fromkeys(job.program for job in JOBS.values()))
RATES = "rates"
"""Name of the job with the rates of the device. Other figures are shares of them."""
_ONLY_FOR_GPUS = ("triton", "liger_kernel")
_SHORTEST_LIMIT_S = 15.0


def run(job: Job, device: str, small: bool, limit_s: float) -> Figures:
    """Figures of a job, or an `error` with the reason why the job has none."""
    reason = obstacle(job, device)
    if reason:
        return {"error": f"not measured: {reason}"}
    arguments = {**job.arguments, **(job.small if small else {})}
    return ask(job.program, arguments, device, limit_s, job.environment)


def obstacle(job: Job, device: str) -> str:
    """Why the job cannot be measured on this machine; empty if it can."""
    for module in job.needs:
        if not has(module) and (device == "cuda" or module not in _ONLY_FOR_GPUS):
            return f"no {module}"
    if device == "cuda" and torch.cuda.device_count() < job.gpus:
        return f"needs {job.gpus} GPUs"
    if device == "cpu" and "liger_kernel" in job.needs:
        return "needs a GPU"
    return ""


def describe(figures: Figures) -> str:
    """Figures as one line of text."""
    texts = []
    for name, value in figures.items():
        if name == "error":
            texts.append(str(value))
        elif isinstance(value, float):
            texts.append(f"{name} {value:.4g}")
        elif name != "memory":
            texts.append(f"{name} {value}")
    return ", ".join(texts)


def chosen_jobs(only: Sequence[str]) -> Iterator[str]:
    """Names of the jobs to measure, in order: those named in ``only`` by program or by job."""
    for name, job in JOBS.items():
        if not only or name in only or job.program in only or name == RATES:
            yield name


def table(measured: dict[str, Figures], judge: bool) -> str:
    """The rows that have a figure or an error of ``measured``."""
    lines = [" | ".join(COLUMNS)]
    for row in ROWS:
        if set(row.jobs) & measured.keys() - {RATES}:
            lines.append(" | ".join(row.cells(measured, judge)))
    return "\n".join(lines)


def known_name(name: str) -> str:
    """``name``, if it is one of a program or a job."""
    if name in PROGRAMS or name in JOBS:
        return name
    near = difflib.get_close_matches(name, [*PROGRAMS, *JOBS], n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise argparse.ArgumentTypeError(
        f"found {name!r}, allowed: {', '.join(PROGRAMS)}, or a job of tools/gpu/jobs.py{hint}"
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny shapes")
    parser.add_argument(
        "--only",
        nargs="+",
        type=known_name,
        default=(),
        metavar="NAME",
        help="programs or jobs",
    )
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="start no job that would take longer"
    )
    parser.add_argument(
        "--store",
        nargs="?",
        type=Path,
        const=FOLDER,
        metavar="FOLDER",
        help="store figures and skip jobs that have some (default: tools/bench/results)",
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 1 if a job of this code failed for another reason than its memory, a missing
    package or a missing GPU."""
    options = parse(arguments)
    end = time.monotonic() + options.seconds
    description = machine(options.device)
    print(", ".join(f"{name} {value}" for name, value in description.items()), flush=True)
    measured = load(description, options.store) if options.store else {}
    for name in chosen_jobs(options.only):
        if name in measured and "error" not in measured[name]:
            print(f"{name} | stored", flush=True)
            continue
        job, left_s = JOBS[name], end - time.monotonic()
        if left_s < max(job.expected_s, _SHORTEST_LIMIT_S) and not options.small:
            print(f"{name} | no time left", flush=True)
            continue
        started = time.monotonic()
        measured[name] = run(job, options.device, options.small, min(job.limit_s, left_s))
        took_s = time.monotonic() - started
        print(f"{name} | {took_s:.0f} s | {describe(measured[name])}", flush=True)
        if options.store:
            store(description, measured, options.store)
    real = options.device == "cuda" and not options.small
    print("", table(measured, judge=real), sep="\n")
    if not real:
        print("Tiny shapes or a CPU: this shows only that each figure can be measured.")
    failed = [name for name, figures in measured.items() if _failed(name, figures)]
    if failed:
        print(f"FAILED to be measured: {'; '.join(failed)}")
    return int(bool(failed))


def _failed(name: str, figures: Figures) -> bool:
    return JOBS[name].ours and str(figures.get("error", "")).startswith("FAILED")


if __name__ == "__main__":
    sys.exit(main())
