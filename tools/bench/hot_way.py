"""What a step costs the toolkit itself: groups from the engine to the actor, and nothing else.

Every row is a run of real processes: controller with its journal on disk, rollouts, advantages,
actor with its publisher. What the engine and the trainer compute takes `--generate_s` and
`--train_s`, at max_staleness 0 one after the other, so all that a step takes beyond their sum is
the toolkit's own. CPU seconds of each role say where it goes, also where other work keeps the cores
busy.

    python tools/bench/hot_way.py --shapes 128x2 1024x16 --json
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import yaml
from figures import Figure, print_figures

from relax_hpc.base.metrics.read import read_metrics

SAMPLES = 8
"""Of a prompt group."""
TARGETS_MS = {"128x2": 120.0, "1024x16": 500.0}
"""Own time of a step, with two rollout processes."""
_WARM_UP_STEPS = 8
_TOKENS = 8
"""Of a prompt and its response, at most."""
_LOOK_S = 0.2
_RUN_S = 900.0


@dataclass(frozen=True, slots=True)
class Shape:
    """How many prompt groups a step has, and how many a request."""

    groups: int
    per_request: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        groups, _, per_request = text.partition("x")
        return cls(int(groups), int(per_request))

    def settings(self, options: argparse.Namespace) -> dict[str, Any]:
        """Of a run in which each engine has work for all that it is given."""
        each = -(-self.groups // options.processes)
        simulated = {"response_s": options.generate_s, "sigma": 0.0, "concurrency": each * SAMPLES}
        return {
            "steps": options.steps,
            "prompts_per_step": self.groups,
            "samples_per_prompt": SAMPLES,
            "max_staleness": 0,
            "model": {
                "tiny": {
                    "hidden_size": 32,
                    "num_layers": 1,
                    "head_dim": 16,
                    "intermediate_size": 64,
                }
            },
            "data": {
                "task": "relax_hpc.examples.tasks.sort_digits:SortDigits",
                "digits": 4,
                "max_prompt_tokens": 32,
            },
            "rollout": {
                "replicas": options.processes,
                "processes": options.processes,
                "groups_per_request": self.per_request,
                "requests_in_flight": -(-each // self.per_request),
                "max_new_tokens": 1,
                "engine": {"kind": "simulated", "simulated": simulated},
            },
            "actor": {
                "simulated_step_s": options.train_s,
                "max_tokens_per_micro_batch": self.groups * SAMPLES * _TOKENS,
                "balance_window": 1,
            },
            "checkpoint": {"every": 1_000_000},
            "weights": {"file_every": 0},
            "eval": {"every": 0},
            "queue": {"durability": options.durability},
            "groups": {"actor_fwd": None, "reference": None},
        }


class CpuTimes(threading.Thread):
    """CPU seconds of the processes of a run by role, looked at now and then."""

    def __init__(self, run: Path) -> None:
        super().__init__(daemon=True)
        self.run_dir, self.found = str(run), list[tuple[float, Counter[str]]]()
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(_LOOK_S):
            spent: Counter[str] = Counter()
            for process in psutil.process_iter():
                with contextlib.suppress(psutil.Error):
                    words = process.cmdline()
                    if self.run_dir in words and "--role" in words:
                        times = process.cpu_times()
                        spent[words[words.index("--role") + 1]] += times.user + times.system
            self.found.append((time.time(), spent))

    def between(self, start: float, end: float) -> dict[str, float]:
        """Seconds a second, by role."""
        inside = [(at, spent) for at, spent in self.found if start <= at <= end]
        if len(inside) < 2:
            return {}
        (first, before), (last, after) = inside[0], inside[-1]
        return {role: (after[role] - before[role]) / (last - first) for role in sorted(after)}

    def end(self) -> None:
        self._ended.set()
        self.join()


def measure(
    shape: Shape, options: argparse.Namespace, folder: Path
) -> tuple[list[float], dict[str, float]]:
    """Run it; seconds of each step but the first ones, and CPU seconds of a step by role."""
    run, file = folder / "run", folder / "run.yaml"
    file.write_text(yaml.safe_dump(shape.settings(options)))
    cpu = CpuTimes(run)
    cpu.start()
    words = [sys.executable, "-m", "relax_hpc", "run", "--config", str(file), "--run_dir", str(run)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=_RUN_S)
    cpu.end()
    if done.returncode:
        raise RuntimeError(f"{shape}: exit code {done.returncode}: {done.stderr[-500:]}")
    ends = [row["time"] for row in read_metrics(run) if "reward/mean" in row][
        min(_WARM_UP_STEPS, options.steps // 4) :
    ]
    steps = [after - before for before, after in pairwise(ends)]
    mean = (ends[-1] - ends[0]) / len(steps)
    return steps, {role: share * mean for role, share in cpu.between(ends[0], ends[-1]).items()}


def figures(options: argparse.Namespace) -> Iterator[Figure]:
    """Of every shape the own time of a step, and what of CPU time it costs."""
    for name in options.shapes:
        shape, load = Shape.parse(name), os.getloadavg()[0]
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            steps, cpu = measure(shape, options, Path(folder))
        least = options.generate_s + options.train_s
        own = [1e3 * (seconds - least) for seconds in steps]
        title, limit = (
            f"{name}, load {load:.1f}",
            TARGETS_MS.get(name) if options.processes == 2 else None,
        )
        value = statistics.median(own)
        target = f"<= {limit:g}" if limit else None
        yield Figure(
            f"{title}: own time of a step",
            value,
            "ms",
            target,
            value <= limit if limit else None,
            own,
        )
        yield Figure(
            f"{title}: samples", shape.groups * SAMPLES / statistics.median(steps), "samples/s"
        )
        for role, seconds in cpu.items():
            yield Figure(f"{title}: CPU of {role}", 1e3 * seconds, "ms/step")
        yield Figure(f"{title}: CPU of all", 1e3 * sum(cpu.values()), "ms/step")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=list(TARGETS_MS),
        help="prompt groups of 8 x groups a request",
    )
    parser.add_argument(
        "--processes", type=int, default=2, help="of the rollout role, each with an engine"
    )
    parser.add_argument("--generate_s", type=float, default=0.02, help="of all responses of a step")
    parser.add_argument("--train_s", type=float, default=0.02)
    parser.add_argument(
        "--steps", type=int, default=60, help=f"the first {_WARM_UP_STEPS} are left out"
    )
    parser.add_argument("--durability", default="commit", choices=["commit", "flush", "none"])
    parser.add_argument("--folder", type=Path, help="where runs are made: its disk matters")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args()
    about = {name: value for name, value in vars(options).items() if name not in ("json", "shapes")}
    print_figures(figures(options), about, options.json)


if __name__ == "__main__":
    main()
