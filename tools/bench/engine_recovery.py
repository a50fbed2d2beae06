"""What a fault costs with real engines: seconds from a kill to the next trained step, with cold and
warm caches, split by what they are spent on.

Starts a small run with SGLang on this machine and kills the engine, the rollout group or the actor,
one after the other. The parts come from the records of the run, as in `relax-hpc report`; only the
time of the kill is this program's. Before a kill with cold caches it drops the files of the
installation from the page cache, as far as no living process has them mapped, which needs no
privilege, and removes the caches of compiled kernels. The column "disk" shows what the new
processes read from disk.

    python tools/bench/engine_recovery.py --kill rollout --caches cold --rounds 3 --json
    python tools/bench/engine_recovery.py --config my_gpu.yaml
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import yaml
from figures import Figure, print_result

from relax_hpc.base.local_dir import COMPILED, LOCAL_DIR
from relax_hpc.base.metrics.read import read_metrics
from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.supervise.incarnations import read_incarnations, restarts
from relax_hpc.config import load_resolved
from relax_hpc.net.rendezvous.roster import latest_incarnation
from relax_hpc.ops.observe.recovery import PARTS, Recovery, measure_recovery

KILLS = {"engine": "rollout", "rollout": "rollout", "actor": "actor"}
"""What is killed -> the group that it ends."""
CACHES = ("warm", "cold")
"""In the order of the kills: the first start of the run leaves warm caches."""
ENGINE_MODULE = "relax_hpc.rollout.engines.sglang.server"
SETTINGS: dict[str, Any] = {
    "seed": 3,
    "steps": 1_000_000,
    "prompts_per_step": 4,
    "samples_per_prompt": 4,
    # The next trained step then needs the group that was killed.
    "max_staleness": 0,
    "model": {
        "tiny": {"hidden_size": 32, "num_layers": 1, "head_dim": 16, "intermediate_size": 64}
    },
    "data": {
        "task": "relax_hpc.examples.tasks.sort_digits:SortDigits",
        "digits": 3,
        "max_prompt_tokens": 32,
    },
    "rollout": {"max_new_tokens": 5, "engine": {"kind": "sglang", "start_timeout_s": 900.0}},
    "checkpoint": {"every": 1},
    "eval": {"every": 0},
    "groups": {"reference": None, "actor_fwd": None},
}
COLUMNS = ["killed", "caches", "total, s", *PARTS, "disk, MB"]
STEPS_BETWEEN, WITHIN_S, LOOK_S, END_S = 2, 900.0, 0.2, 60.0


@dataclass(frozen=True, slots=True)
class Kill:
    """One measured kill."""

    what: str
    caches: str
    recovery: Recovery
    disk_bytes: int
    """Bytes that the new processes of the group have read from disk."""


class Run:
    """A run in layout `local`, until `close`."""

    def __init__(self, folder: Path, configs: Sequence[Path]) -> None:
        self.run, self.local = RunDir(folder / "run"), folder / "local"
        self._output = (folder / "output.txt").open("wb")
        command = [sys.executable, "-m", "relax_hpc", "run", "--run_dir", str(self.run.root)]
        for config in configs:
            command += ["--config", str(config)]
        self.supervisor = psutil.Popen(
            command,
            stdout=self._output,
            stderr=self._output,
            env=os.environ | {LOCAL_DIR: str(self.local)},
        )

    def close(self) -> None:
        """End the run; the second signal ends it at once."""
        for _ in range(2):
            with contextlib.suppress(psutil.NoSuchProcess):
                self.supervisor.terminate()
            time.sleep(LOOK_S)
        self.supervisor.wait(END_S)
        self._output.close()

    def wait(self, what: str, condition: Callable[[], Any]) -> Any:
        """The first true value of ``condition``. RuntimeError if that takes too long."""
        deadline = time.monotonic() + WITHIN_S
        while not (value := condition()):
            if time.monotonic() > deadline or self.supervisor.poll() is not None:
                output = Path(self._output.name).read_text(errors="replace")
                raise RuntimeError(f"{what}: not within {WITHIN_S:g} s\n{output[-2000:]}")
            time.sleep(LOOK_S)
        return value

    def count_steps(self) -> int:
        return sum("reward/mean" in row for row in read_metrics(self.run.root))

    def processes(self, group: str, incarnation: int) -> list[psutil.Process]:
        """The processes of an incarnation of a group, with their children."""
        words = f"--group {group} --role {group} --incarnation {incarnation} "
        processes = dict[int, psutil.Process]()
        for process in self.supervisor.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if words in " ".join(process.cmdline()) + " ":
                    members = [process, *process.children(recursive=True)]
                    processes |= {member.pid: member for member in members}
        return list(processes.values())

    def find_victim(self, what: str) -> psutil.Process:
        """The process to kill: an engine's server, or the last process of the group's role."""
        group = KILLS[what]
        marker = ENGINE_MODULE if what == "engine" else "--role"
        processes = self.processes(group, latest_incarnation(self.run, group))
        victims = [process for process in processes if marker in process.cmdline()]
        return victims[0] if what == "engine" else victims[-1]

    def find_recovery(self, group: str, former: int, killed_at: float) -> Recovery | None:
        """Recovery of the incarnation after ``former``, once its records are on disk."""
        incarnations = read_incarnations(self.run, load_resolved(self.run.root))
        workers = list(chain.from_iterable(entry.workers for entry in incarnations))
        for restart in restarts(incarnations):
            if restart.after.group == group and restart.after.incarnation > former:
                return measure_recovery(restart, workers, killed_at)
        return None


# -- caches ----------------------------------------------------------------------------------------


def make_cold(local: Path) -> None:
    """Drop the installation from the page cache, and remove caches of compiled kernels."""
    for folder in COMPILED.values():
        shutil.rmtree(local / folder, ignore_errors=True)
    installation = Path(sys.prefix) / "lib"
    package = Path(__file__).resolve().parents[2] / "relax_hpc"
    for path in chain(installation.rglob("*"), package.rglob("*")):
        if path.is_symlink() or not path.is_file():
            continue
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def count_read_bytes(processes: Sequence[psutil.Process]) -> int:
    """Bytes that ``processes`` have read from disk."""
    total = 0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            total += process.io_counters().read_bytes
    return total


# -- kills -----------------------------------------------------------------------------------------


def measure(run: Run, what: str, caches: str) -> Kill:
    """Kill, and wait until the next step is trained and all records of it are on disk."""
    goal = run.count_steps() + STEPS_BETWEEN
    run.wait(f"step {goal}", lambda: run.count_steps() >= goal)
    group = KILLS[what]
    former, victim = latest_incarnation(run.run, group), run.find_victim(what)
    if caches == "cold":
        make_cold(run.local)
    killed_at = time.time()
    victim.kill()
    recovery = run.wait(
        f"{what}: a step after the kill", lambda: run.find_recovery(group, former, killed_at)
    )
    processes = run.processes(group, latest_incarnation(run.run, group))
    return Kill(what, caches, recovery, count_read_bytes(processes))


def measure_all(folder: Path, args: argparse.Namespace) -> Iterator[Kill]:
    """All kills, in one run."""
    config = folder / "run.yaml"
    ahead = {} if args.ahead else {"liveness": {"start_ahead_s": 0.0}}
    config.write_text(yaml.safe_dump(SETTINGS | ahead))
    run = Run(folder, [config, *args.config])
    try:
        for caches in args.caches:
            for _ in range(args.rounds):
                for what in args.kill:
                    kill = measure(run, what, caches)
                    print(describe(kill), file=sys.stderr, flush=True)
                    yield kill
    finally:
        run.close()


def describe(kill: Kill) -> str:
    parts = ", ".join(f"{part} {seconds:.2f}" for part, seconds in kill.recovery.seconds.items())
    return f"{kill.what}, {kill.caches}: {kill.recovery.total_s:.2f} s: {parts}"


# -- results ---------------------------------------------------------------------------------------


def by_kind(kills: Sequence[Kill]) -> dict[tuple[str, str], list[Kill]]:
    """Kills by what was killed and by the state of the caches."""
    kinds = dict[tuple[str, str], list[Kill]]()
    for kill in kills:
        kinds.setdefault((kill.what, kill.caches), []).append(kill)
    return kinds


def table(kills: Sequence[Kill]) -> list[list[str]]:
    """A row for each kind of kill: medians in seconds, and MB read."""
    rows = list[list[str]]()
    for kind, same in by_kind(kills).items():
        totals = [kill.recovery.total_s for kill in same]
        parts = [median(kill.recovery.seconds[part] for kill in same) for part in PARTS]
        disk_mb = median(kill.disk_bytes for kill in same) / 1e6
        spread = f" ({min(totals):.1f} to {max(totals):.1f})" if len(totals) > 1 else ""
        total = f"{median(totals):.1f}{spread}"
        rows.append([*kind, total, *(f"{seconds:.2f}" for seconds in parts), f"{disk_mb:.0f}"])
    return rows


def print_table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(COLUMNS, *rows, strict=True)]
    for row in (COLUMNS, *rows):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join(cells).rstrip())
    print("\n".join(f"{part}: {text}" for part, text in PARTS.items()))


def figures(kills: Sequence[Kill]) -> list[Figure]:
    result = list[Figure]()
    for kind, same in by_kind(kills).items():
        name = ", ".join(kind)
        totals = [kill.recovery.total_s for kill in same]
        result.append(Figure(f"{name}: total", median(totals), "s", rounds=totals))
        for part in PARTS:
            rounds = [kill.recovery.seconds[part] for kill in same]
            result.append(Figure(f"{name}: {part}", median(rounds), "s", rounds=rounds))
    return result


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; what is left out means all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kill", action="append", choices=[*KILLS])
    parser.add_argument("--caches", action="append", choices=CACHES)
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="times each")
    parser.add_argument(
        "--ahead", action="store_true", help="start ranks ahead, as liveness.start_ahead_s does"
    )
    parser.add_argument(
        "--config", action="append", type=Path, default=[], help="further settings of the run"
    )
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args(argv)
    args.kill, args.caches = args.kill or [*KILLS], args.caches or [*CACHES]
    return args


def main(argv: list[str] | None = None) -> int:
    """Measure and print; 1 if the run did not recover."""
    args = parse(argv)
    settings = {
        "load_before": round(os.getloadavg()[0], 2),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9),
        "torch": version("torch"),
        "sglang": version("sglang"),
        "ahead": args.ahead,
        "rounds": args.rounds,
    }
    kills, exit_code = list[Kill](), 0
    with tempfile.TemporaryDirectory(prefix="recovery-") as folder:
        try:
            for kill in measure_all(Path(folder), args):
                kills.append(kill)
        except RuntimeError as error:
            print(f"ended early: {error}", file=sys.stderr, flush=True)
            exit_code = 1
    if kills:
        rows = table(kills)
        print_table(rows)
        print("settings: " + ", ".join(f"{key}={value}" for key, value in settings.items()))
        if args.json:
            print_result(figures(kills), settings, columns=COLUMNS, rows=rows)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
