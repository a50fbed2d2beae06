"""Seconds from a request for one more engine to the first row that the engine puts, without the
start of its processes and without its generation.

Starts a small run with simulated engines on this machine, or uses a run in progress (--run), such
as one in the private Slurm of `relax-hpc sandbox`. Each round adds one group of engines by
POST /rollout/scale_out, waits for its first row in the queue's journal, and removes it again.

    python tools/bench/elastic.py --rounds 5 --json
    python tools/bench/elastic.py --run RUN --generation_s 0.5 --json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import startup
from figures import Figure, print_figures

from relax_hpc.base.metrics.read import read_metrics
from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.slurm.submissions import Ledger
from relax_hpc.cluster.supervise.launch_records import read_launch
from relax_hpc.net.rendezvous.roster import latest_incarnation
from relax_hpc.service.address import read_address

TARGET_S = 3.0
WITHIN_S, LOOK_S = 120.0, 0.02
GENERATION_S = 0.5
"""Seconds in which a simulated engine answers a request."""


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds of one round."""

    request_s: float
    """From the request to the start of the group's processes, or to the submission of its job."""
    start_s: float
    """From there until the engine serves a version."""
    row_s: float
    """From there to its first row, without its generation."""
    removal_s: float
    """From the request to remove the group until the operation is COMPLETED."""

    @property
    def overhead_s(self) -> float:
        return self.request_s + self.row_s


def ask(run: RunDir, method: str, path: str, body: Any = None) -> dict[str, Any]:
    """Answer of the run's service."""
    address = read_address(run)
    assert address is not None, "the run has a service"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{address.url}/rollout{path}", data, method=method)
    request.add_header("Authorization", f"Bearer {address.token}")
    with urllib.request.urlopen(request, timeout=30.0) as answer:
        return json.load(answer)


def wait_until(goal: str, condition: Callable[[], Any]) -> Any:
    """The first true value of ``condition``. RuntimeError: it takes too long."""
    end = time.monotonic() + WITHIN_S
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(LOOK_S)
    raise RuntimeError(f"{goal}: not within {WITHIN_S:g} s")


class JournalTail:
    """New bytes of the queue's journal."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._sizes = {path: path.stat().st_size for path in run.journal.glob("*.journal")}
        self._data = b""

    def puts_after(self, group: str, incarnation: int) -> int:
        """First incarnation of ``group`` after ``incarnation`` that has put rows; 0: none has."""
        for path in self._run.journal.glob("*.journal"):
            with path.open("rb") as file:
                file.seek(self._sizes.get(path, 0))
                data = file.read()
            self._sizes[path] = self._sizes.get(path, 0) + len(data)
            self._data += data
        numbers = re.findall(rf"{group}-i(\d{{6}})-".encode(), self._data)
        return min((int(number) for number in numbers if int(number) > incarnation), default=0)


def measure(run: RunDir, generation_s: float) -> Round:
    """Add one group, wait for its first row, and remove it."""
    tail, asked_at = JournalTail(run), time.time()
    accepted = ask(run, "POST", "/scale_out", {"relative": 1})
    id, engine = accepted["request_id"], accepted["engine_ids"][0]
    group = engine.rpartition("/")[0]
    former = latest_incarnation(run, group)

    def served() -> float:
        history = dict(ask(run, "GET", f"/scale_out/{id}")["history"])
        return history.get("READY", 0.0)

    try:
        incarnation = wait_until(f"{group} puts a row", lambda: tail.puts_after(group, former))
    except RuntimeError as error:
        raise RuntimeError(f"{error}: {ask(run, 'GET', f'/scale_out/{id}')}") from error
    row_at, served_at = time.time(), wait_until(f"{group} serves", served)
    entry = Ledger(run).separate_job(group)
    launch = read_launch(run, group, incarnation)
    assert launch is not None
    begun_at = entry.time if entry else launch.launched_at
    removed_at = time.time()
    id = ask(run, "POST", "/scale_in", {"relative": 1})["request_id"]
    wait_until(
        f"{group} leaves", lambda: ask(run, "GET", f"/scale_in/{id}")["status"] == "COMPLETED"
    )
    return Round(
        request_s=begun_at - asked_at,
        start_s=served_at - begun_at,
        row_s=max(0.0, row_at - served_at - generation_s),
        removal_s=time.time() - removed_at,
    )


@contextlib.contextmanager
def run_here() -> Iterator[RunDir]:
    """A run on this machine whose actor waits for rows, so that tickets are free."""
    engine = {"kind": "simulated", "simulated": {"response_s": GENERATION_S}}
    startup.SETTINGS |= {
        "max_staleness": 8,
        "rollout": startup.SETTINGS["rollout"] | {"groups_per_request": 1, "engine": engine},
        "actor": {"forward": ["actor_fwd"]},
        "algorithm": {},
        "groups": {"actor_fwd": None},
    }
    with tempfile.TemporaryDirectory() as folder, startup.running(Path(folder)) as (run, _):
        wait_until("the first step", lambda: len(read_metrics(run.root)) > 1)
        yield run


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--run", type=Path, help="a run in progress")
    parser.add_argument("--generation_s", type=float, default=GENERATION_S)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    given = contextlib.nullcontext(RunDir(arguments.run)) if arguments.run else run_here()
    with given as run:
        rounds = [measure(run, arguments.generation_s) for _ in range(arguments.rounds)]
    overhead = [one.overhead_s for one in rounds]
    figures = [
        Figure(
            "request to first row, without start and generation",
            median(overhead),
            "s",
            f"<= {TARGET_S:g}",
            median(overhead) <= TARGET_S,
            overhead,
        )
    ]
    for name, text in (
        ("request_s", "request to start or submission"),
        ("start_s", "start of the group until its engine serves"),
        ("row_s", "serving to first row, without generation"),
        ("removal_s", "request to removal"),
    ):
        values = [getattr(one, name) for one in rounds]
        figures.append(Figure(text, median(values), "s", rounds=values))
    settings = {"rounds": len(rounds), "run": "given" if arguments.run else "here"}
    print_figures(figures, settings, arguments.json)
    return int(not figures[0].ok)


if __name__ == "__main__":
    raise SystemExit(main())
