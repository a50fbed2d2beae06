"""Files of runs, a fake Slurm and fake supervisors, for tests of the user's commands."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.base.rundir import RunDir, write_json
from relax_hpc.cluster.slurm.submissions import Ledger, Submission
from relax_hpc.cluster.supervise import requests
from relax_hpc.cluster.supervise.launch_records import Launch, record_launch
from relax_hpc.cluster.supervise.requests import GroupRequest
from relax_hpc.commands import resubmit, stop
from relax_hpc.config import dump, load
from relax_hpc.net.rendezvous.roster import GroupCard, claim_incarnation, publish_card
from relax_hpc.ops.observe import logs
from tests.helpers.fake_slurm import FakeSlurm

DEADLINE_S = 120.0
GROUPS = ("hub", "rollout", "actor", "actor_fwd")
LIMITS = {"beat_s": 0.1, "lease_s": 4.0, "stop_timeout_s": 0.1}


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks and deadlines of tests."""
    monkeypatch.setattr(requests, "LOOK_S", 0.01)
    for name, value in {"ANSWER_S": 3.0, "LOOK_S": 0.02, "GRACE_S": 0.2}.items():
        monkeypatch.setattr(resubmit, name, value)
    monkeypatch.setattr(stop, "_LOOK_S", 0.02)
    monkeypatch.setattr(stop, "_MARGIN_S", 2.0)
    monkeypatch.setattr(logs, "_POLL_S", 0.01)
    monkeypatch.setattr(logs, "_QUIET_S", 0.1)


@pytest.fixture(name="slurm")
def slurm_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    return FakeSlurm(tmp_path / "slurm", monkeypatch)


def make_run(path: Path, layout: str = "jobs") -> RunDir:
    """A run directory as `submit` makes it."""
    run = RunDir(path)
    nodes = {
        f"groups.{name}.resources.nodes": 2 for name in ("hub", "rollout") if layout != "local"
    }
    over = {
        "layout": layout,
        "run_dir": str(run.root),
        "groups.reference": None,
        "rollout.replicas": 4,
        **nodes,
    }
    over |= {
        "data.task": "relax_hpc.examples.tasks.sort_digits:SortDigits",
        "liveness": LIMITS,
        "steps": 10,
        "groups.actor_fwd": {},
    }
    over |= {"rollout.max_new_tokens": 5, "data.max_prompt_tokens": 32}
    run.create()
    dump(load([], over), run.config)
    return run


def begin(run: RunDir, name: str, job: str = "", beat_age_s: float | None = 0.0) -> int:
    """An incarnation of a group, with a beat that is so old; its incarnation."""
    incarnation = claim_incarnation(run, name)
    record_launch(run, name, incarnation, Launch(1, (0, 0, 0), job))
    publish_card(run, GroupCard(name, incarnation, [{"pid": 1, "node": "node1"}]))
    if beat_age_s is not None:
        beat = {
            "time": time.time() - beat_age_s,
            "incarnation": incarnation,
            "progress": 7,
            "busy_s": 0.1,
            "gap_s": 0.3,
        }
        write_json(run.rendezvous(name) / f"beat-{name}.json", beat)
    run.logs(name, incarnation).mkdir(parents=True)
    return incarnation


def submitted(run: RunDir, slurm: FakeSlurm, **states: str) -> None:
    """One job a group, in these states (RUNNING if not said, "" for gone), and the groups that run
    in them."""
    jobs = slurm.state["jobs"]
    for number, name in enumerate(GROUPS, start=11):
        state = states.get(name, "RUNNING")
        Ledger(run).add(Submission(str(number), "group", name, attempt=1))
        if state:
            jobs[str(number)] = {"state": state, "nodes": 2, "node_list": "node[1-2]", "name": name}
        if state == "RUNNING":
            begin(run, name, str(number))
    slurm.set(jobs=jobs)


class Supervisors:
    """Answers requests of a run as its supervisors would; `seen`: the requests."""

    def __init__(self, run: RunDir, slurm: FakeSlurm | None = None, **answer: Any) -> None:
        self.run, self.slurm, self.content = run, slurm, answer or {"done": True}
        self.seen: list[tuple[str, str]] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> Supervisors:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _serve(self) -> None:
        answered: set[Path] = set()
        while not self._end.wait(0.01):
            for path in sorted((self.run.root / "requests").glob("[0-9]*.json")):
                if path not in answered and "answer" not in path.name:
                    answered.add(path)
                    value = json.loads(path.read_text())
                    self.seen.append((value["op"], value["group"]))
                    self._end_job(value)
                    request = GroupRequest(int(path.name[:6]), value["op"], value["group"])
                    requests.answer(self.run, request, **self.content)

    def _end_job(self, value: dict[str, str]) -> None:
        if self.slurm and value["op"] == "release":
            entry = Ledger(self.run).separate_job(value["group"])
            jobs = self.slurm.state["jobs"]
            jobs.pop(entry.job if entry else "", None)
            self.slurm.set(jobs=jobs)


def words(slurm: FakeSlurm, program: str) -> list[list[str]]:
    return [call["argv"] for call in slurm.calls(program)]


def until(condition: Any) -> None:
    """Look until it is true; AssertionError at the deadline."""
    for _ in range(int(DEADLINE_S / 0.01)):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("not within the deadline")


@contextmanager
def in_thread(target: Callable[[], object]) -> Iterator[None]:
    """Run ``target`` in a thread meanwhile. It has to end soon after the block."""
    thread = threading.Thread(target=target)
    thread.start()
    yield
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
