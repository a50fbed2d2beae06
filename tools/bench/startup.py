"""What a start costs: wall and CPU seconds of each role, from the start of its process until it
begins to work.

Starts a small run with simulated engines, kills one role after the other, each of them several
times, and reads of every incarnation when it was at work. At the first start all roles load at
once, and share the processors; one that is started again has them nearly to itself, as the others
soon wait for it. "back" is from its death, which includes that it is noticed. Then what commands
cost that only look.

    python tools/bench/startup.py --rounds 5 --json
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import psutil
import yaml
from figures import Figure, print_figures

from relax_hpc.base.metrics.read import read_metrics
from relax_hpc.base.metrics.read_spans import Process, read_processes
from relax_hpc.base.rundir import RunDir

SETTINGS = {
    "seed": 3,
    "steps": 1_000_000,
    "prompts_per_step": 4,
    "samples_per_prompt": 4,
    "max_staleness": 1,
    "model": {
        "tiny": {"hidden_size": 32, "num_layers": 1, "head_dim": 16, "intermediate_size": 64}
    },
    "data": {
        "task": "relax_hpc.examples.tasks.sort_digits:SortDigits",
        "digits": 3,
        "max_prompt_tokens": 32,
    },
    # Steps are slow, so that those who wait leave the processors to who starts.
    "rollout": {
        "max_new_tokens": 5,
        "groups_per_request": 4,
        "engine": {"kind": "simulated", "simulated": {"response_s": 2.0}},
    },
    "checkpoint": {"every": 1},
    "eval": {"every": 0},
    "algorithm": {"kl": {"coefficient": 0.01}},
    "groups": {"actor_fwd": {}},
}
KILLED = ("actor", "actor_fwd", "reference", "rollout")
COMMANDS = (("--help",), ("status", "{run}"), ("report", "{run}"))
TARGET_S = 3.0
"""For a rank that trains or scores, started again in place, on a quiet machine."""
STEPS_BETWEEN, WITHIN_S, LOOK_S, LIST_S = 2, 120.0, 0.01, 0.25


class Watch:
    """The CPU seconds that the roles below process ``root`` had spent, again and again; a role has
    one process."""

    def __init__(self, root: int) -> None:
        self.root = psutil.Process(root)
        self.processes: dict[tuple[str, int], psutil.Process] = {}
        """By role and incarnation, also when they have ended."""
        self._spent: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
        self._listed = 0.0

    def look(self) -> None:
        """Take the time of each once."""
        if time.monotonic() - self._listed > LIST_S:
            self._listed = time.monotonic()
            self._list()
        for name, process in self.processes.items():
            with contextlib.suppress(psutil.Error):
                spent = process.cpu_times()
                self._spent[name].append((time.time(), spent.user + spent.system))

    def _list(self) -> None:
        for process in self.root.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                if "--role" in words:
                    name = (
                        words[words.index("--role") + 1],
                        int(words[words.index("--incarnation") + 1]),
                    )
                    self.processes[name] = process

    def spent(self, name: tuple[str, int], at: float) -> float:
        """CPU seconds, by ``at``, of that incarnation of a role."""
        times = [moment for moment, _ in self._spent[name]]
        return self._spent[name][min(bisect_left(times, at), len(times) - 1)][1]


@contextmanager
def running(folder: Path) -> Iterator[tuple[RunDir, Watch]]:
    """A run that goes on until the block ends."""
    config, run = folder / "run.yaml", RunDir(folder / "run")
    config.write_text(yaml.safe_dump(SETTINGS))
    words = [
        sys.executable,
        "-m",
        "relax_hpc",
        "run",
        "--config",
        str(config),
        "--run_dir",
        str(run.root),
    ]
    with (
        (folder / "output.txt").open("wb") as output,
        subprocess.Popen(words, stdout=output, stderr=output) as process,
    ):
        try:
            yield run, Watch(process.pid)
        finally:
            for _ in range(2):
                process.terminate()
            process.wait(60.0)


def wait_for(watch: Watch, what: str, found: Callable[[], object]) -> None:
    """Until ``found()``. RuntimeError if that takes too long."""
    end = time.monotonic() + WITHIN_S
    while not found():
        watch.look()
        if time.monotonic() > end or not watch.root.is_running():
            raise RuntimeError(f"{what}: not within {WITHIN_S:g} s")
        time.sleep(LOOK_S)


def steps_of(run: RunDir) -> int:
    return sum("reward/mean" in row for row in read_metrics(run.root))


def newest(run: RunDir, role: str) -> Process | None:
    """The newest incarnation of ``role``, if it is at work."""
    found = [one for one in read_processes(run.root) if one.role == role]
    incarnation = max(
        (int(path.stem[-6:]) for path in run.rendezvous(role).glob("inc-*.claim")), default=0
    )
    working = [one for one in found if any(span.what == "start" for span in one.spans)]
    return next((one for one in working if one.incarnation == incarnation), None)


def kill(run: RunDir, watch: Watch, role: str) -> tuple[float, Process]:
    """When the process of ``role`` was killed, and its next incarnation, which is at work."""
    goal, before = steps_of(run) + STEPS_BETWEEN, newest(run, role)
    wait_for(watch, "steps", lambda: steps_of(run) >= goal)
    assert before
    at = time.time()
    watch.processes[role, before.incarnation].kill()
    wait_for(
        watch,
        f"{role} is back",
        lambda: (now := newest(run, role)) and now.incarnation > before.incarnation,
    )
    after = newest(run, role)
    assert after
    return at, after


def at_work(process: Process) -> float:
    """When it began to."""
    return next(span.end for span in process.spans if span.what == "start")


def starts(
    name: str, watch: Watch, found: Sequence[Process], target: bool = False
) -> Iterator[Figure]:
    """Wall and CPU seconds from the start of these processes until they were at work."""
    wall = [at_work(one) - one.began for one in found]
    cpu = [watch.spent((one.role, one.incarnation), at_work(one)) for one in found]
    words, ok = (f"<= {TARGET_S:g}", median(wall) <= TARGET_S) if target else (None, None)
    yield Figure(f"{name}, wall", median(wall), "s", words, ok, wall)
    yield Figure(f"{name}, CPU", median(cpu), "s", None, None, cpu)


def measure(folder: Path, rounds: int) -> Iterator[Figure]:
    """First starts, starts in place, and commands, in one run."""
    with running(folder) as (run, watch):
        wait_for(
            watch,
            "the first step",
            lambda: steps_of(run) and all(newest(run, role) for role in KILLED),
        )
        for role in KILLED:
            yield from starts(f"{role}: first start", watch, [newest(run, role)])
        for role in KILLED:
            found = [kill(run, watch, role) for _ in range(rounds)]
            yield from starts(
                f"{role}: in place", watch, [one for _, one in found], target=role != "rollout"
            )
            back = [at_work(one) - at for at, one in found]
            yield Figure(f"{role}: back", median(back), "s", None, None, back)
        for words in COMMANDS:
            yield from command([word.format(run=run.root) for word in words], rounds)


def command(words: Sequence[str], rounds: int) -> Iterator[Figure]:
    """Wall and CPU seconds of a command."""
    wall, cpu = [], []
    for _ in range(rounds):
        began, before = time.monotonic(), os.times()
        subprocess.run(
            [sys.executable, "-m", "relax_hpc", *words], check=True, stdout=subprocess.DEVNULL
        )
        now = os.times()
        wall.append(time.monotonic() - began)
        cpu.append(
            now.children_user + now.children_system - before.children_user - before.children_system
        )
    name = " ".join(word for word in words if "/" not in word)
    yield Figure(f"relax-hpc {name}, wall", median(wall), "s", None, None, wall)
    yield Figure(f"relax-hpc {name}, CPU", median(cpu), "s", None, None, cpu)


def main(argv: list[str] | None = None) -> int:
    """Measure and print; 0 even when a target is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="deaths of each role")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="startup-") as folder:
        print_figures(measure(Path(folder), args.rounds), {"rounds": args.rounds}, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
