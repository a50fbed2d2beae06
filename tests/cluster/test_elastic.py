"""The reconciler: it starts, submits and ends groups of engines for operations of the journal, and
continues where an earlier one was killed, without a second job."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from relax_hpc.base.rundir import RunDir
from relax_hpc.base.versions import Version
from relax_hpc.cluster.elastic import reconciler as reconciler_module
from relax_hpc.cluster.elastic import slurm_members
from relax_hpc.cluster.elastic.local_members import LocalMembers
from relax_hpc.cluster.elastic.reconciler import Reconciler
from relax_hpc.cluster.elastic.slurm_members import SlurmMembers
from relax_hpc.cluster.slurm.commands import Slurm
from relax_hpc.cluster.slurm.submissions import Ledger
from relax_hpc.cluster.supervise import requests
from relax_hpc.config import Config, dump, load, load_resolved
from relax_hpc.queue.client import QueueClient
from relax_hpc.queue.client.operations import OperationRequests
from relax_hpc.queue.operations import IN, OUT, Operation
from tests.helpers.command_helpers import begin, make_run, slurm_fixture, submitted, words  # noqa: F401
from tests.helpers.fake_slurm import FakeSlurm
from tests.helpers.queue_helpers import in_thread

FIRST = Version(1, 0)


class Killed(BaseException):
    """The process of the reconciler dies here."""


class World:
    """A run with a hub in a thread. `reconciler` makes the one of a new supervisor."""

    def __init__(self, run: RunDir, config: Config, client: QueueClient, slurm: bool) -> None:
        self.run, self.config, self.client, self.is_slurm = run, config, client, slurm
        self.names = ["rollout"]
        self.supervisor: Any = None

    @property
    def operations(self) -> OperationRequests:
        return self.client.operations

    def reconciler(self) -> Reconciler:
        """One of a new supervisor, which has reported the groups."""
        names = list(self.names)
        table = SimpleNamespace(names=names, supervised=dict.fromkeys(names))
        self.supervisor = SimpleNamespace(
            run=self.run,
            config=self.config,
            name="supervisor",
            incarnation=1,
            client=self.client,
            fenced=False,
            interrupted=0,
            table=table,
            failures=SimpleNamespace(attempt=1, repeated_start_error=lambda _: ""),
            wakeups=SimpleNamespace(wake=lambda: None),
        )
        members: Any = LocalMembers(self.supervisor, "rollout")
        if self.is_slurm:
            members = SlurmMembers(self.run, self.config, Slurm(), "rollout")
        made = Reconciler(self.supervisor, "rollout", members, pause_s=0.05, idle_s=0.0)
        made.do_round()
        return made

    def create(self, kind: str, **body: Any) -> str:
        return self.operations.create(kind, body).result().operation.id

    def get(self, id: str) -> Operation:
        return self.operations.get(id).result()

    def serve(self, *engines: str, version: Version = FIRST) -> None:
        for engine in engines:
            self.client.weights.serve(engine, version).result()

    def requested(self) -> list[tuple[str, str]]:
        """Requests to the local supervisor that it has not answered."""
        return [(r.op, r.group) for r in requests.pending_requests(self.run, lambda _: True)]

    def answer(self) -> None:
        """Do what the local supervisor does."""
        table = self.supervisor.table
        for request in requests.pending_requests(self.run, lambda _: True):
            if request.op == "start":
                table.names.append(request.group)
                table.supervised[request.group] = None
            else:
                table.names.remove(request.group)
                del table.supervised[request.group]
            requests.answer(self.run, request, done=request.op)


@pytest.fixture(autouse=True)
def short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconciler_module, "_REPORT_S", 0.05)


@contextmanager
def world(path: Path, layout: str = "local", slurm: bool = False) -> Iterator[World]:
    run = make_run(path, layout)
    one_engine = {"rollout.replicas": 1, "groups.rollout.resources.nodes": 1}
    dump(load([run.config], one_engine), run.config)
    config = load_resolved(run.root)
    with in_thread(run, config), QueueClient(run, config, "supervisor", 1) as client:
        yield World(run, config, client, slurm)


def rounds(reconciler: Reconciler, until: Callable[[], bool], limit_s: float = 20.0) -> None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if until():
            return
        reconciler.do_round()
    raise AssertionError(f"not there: {reconciler._wanted} {reconciler._groups}")


def test_local_groups_start_and_end(tmp_path: Path) -> None:
    with world(tmp_path / "run") as it:
        reconciler = it.reconciler()
        id = it.create(OUT, num_replicas=3)
        rounds(reconciler, lambda: len(it.requested()) == 2)
        reconciler.do_round()
        assert it.requested() == [("start", "rollout-2"), ("start", "rollout-3")]
        assert it.get(id).state == "CREATING"
        it.answer()
        rounds(reconciler, lambda: it.get(id).state == "HEALTH_CHECKING")
        it.serve("rollout-2/0", "rollout-3/0")
        rounds(reconciler, lambda: it.get(id).state == "ACTIVE")
        groups = it.operations.present().result().groups
        assert [name for name, group in groups.items() if group["state"] == "running"] == [
            *("rollout", "rollout-2", "rollout-3")
        ]
        id = it.create(IN, engines=["rollout-2/0"])
        rounds(reconciler, lambda: it.requested() == [("release", "rollout-2")])
        assert it.get(id).state == "DRAINING"
        it.serve("rollout-2/0", version=Version(0, 0))
        it.answer()
        rounds(reconciler, lambda: it.get(id).state == "COMPLETED")
        assert set(it.operations.present().result().groups) == {"rollout", "rollout-3"}


def test_a_group_that_its_supervisor_gives_up_fails_the_operation(tmp_path: Path) -> None:
    with world(tmp_path / "run") as it:
        reconciler = it.reconciler()
        id = it.create(OUT, num_replicas=2)
        rounds(reconciler, lambda: bool(it.requested()))
        it.answer()
        rounds(reconciler, lambda: it.get(id).state == "HEALTH_CHECKING")
        it.supervisor.table.names.remove("rollout-2")
        del it.supervisor.table.supervised["rollout-2"]
        it.supervisor.failures.repeated_start_error = lambda _: "no such model"
        rounds(reconciler, lambda: it.get(id).is_final)
        assert (it.get(id).state, it.get(id).reason) == ("FAILED", "start_failed")
        assert it.get(id).detail == "no such model"
        rounds(reconciler, lambda: not it.get(id).leftover)
        assert it.create(OUT, num_replicas=2) != id and not it.requested()


def test_a_group_whose_start_is_answered_during_a_look_has_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with world(tmp_path / "run") as it:
        reconciler = it.reconciler()
        id = it.create(OUT, num_replicas=2)
        rounds(reconciler, lambda: bool(it.requested()))
        list_pending = requests.pending_requests

        def answer_first(*args: Any) -> list[requests.GroupRequest]:
            monkeypatch.setattr(requests, "pending_requests", list_pending)
            it.answer()
            return list_pending(*args)

        monkeypatch.setattr(requests, "pending_requests", answer_first)
        reconciler.do_round()
        assert it.get(id).state == "HEALTH_CHECKING"


def test_engines_of_a_group_leave_and_return_without_a_restart(tmp_path: Path) -> None:
    with world(tmp_path / "run") as it:
        (it.run.root / "changes").mkdir()
        (it.run.root / "changes" / "000001-rollout.yaml").write_text("rollout: {replicas: 3}\n")
        reconciler = it.reconciler()
        it.serve("rollout/0", "rollout/1", "rollout/2")
        id = it.create(IN, engines=["rollout/2"])
        rounds(reconciler, lambda: it.get(id).state == "DRAINING")
        assert load_resolved(it.run.root, "rollout").rollout.without == ["rollout/2"]
        assert not it.requested()
        it.serve("rollout/2", version=Version(0, 0))
        rounds(reconciler, lambda: it.get(id).state == "COMPLETED")
        assert it.operations.present().result().without == ["rollout/2"]
        id = it.create(OUT, num_replicas=3)
        rounds(reconciler, lambda: it.get(id).state == "HEALTH_CHECKING")
        assert load_resolved(it.run.root, "rollout").rollout.without == []
        it.serve("rollout/2")
        rounds(reconciler, lambda: it.get(id).state == "ACTIVE")


def test_jobs_are_submitted_once_and_a_cancelled_operation_cancels_them(
    tmp_path: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    with world(tmp_path / "run", "jobs", slurm=True) as it:
        submitted(it.run, slurm)
        reconciler = it.reconciler()
        id = it.create(OUT, num_replicas=3, time="1:00:00", time_min="10")
        rounds(reconciler, lambda: it.get(id).jobs == {"rollout-2": "100", "rollout-3": "101"})
        for _ in range(3):
            reconciler.do_round()
        calls = words(slurm, "sbatch")
        assert len(calls) == 2
        assert all({"--time=1:00:00", "--time-min=10"} <= set(argv) for argv in calls)
        assert it.get(id).state == "CREATING"
        groups = it.operations.present().result().groups
        assert groups["rollout-2"]["state"] == "pending" and groups["rollout-2"]["job"] == "100"
        # Slurm shows a new job after some time. The job that is cancelled below is no longer new.
        monkeypatch.setattr(slurm_members, "_NEW_S", 0.0)
        it.operations.cancel(id).result()
        rounds(reconciler, lambda: not it.get(id).leftover)
        assert sorted(words(slurm, "scancel")) == [["100"], ["101"]]
        assert set(it.operations.present().result().groups) == {"rollout"}


def test_a_running_job_is_asked_to_stop_once_and_no_request_is_left_for_the_next(
    tmp_path: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    with world(tmp_path / "run", "jobs", slurm=True) as it:
        submitted(it.run, slurm)
        reconciler = it.reconciler()
        id = it.create(OUT, num_replicas=2)
        rounds(reconciler, lambda: it.get(id).jobs == {"rollout-2": "100"})
        begin(it.run, "rollout-2", "100")
        jobs = slurm.state["jobs"]
        jobs["100"]["state"] = "RUNNING"
        slurm.set(jobs=jobs)
        rounds(reconciler, lambda: it.get(id).state == "HEALTH_CHECKING")
        it.serve("rollout-2/0")
        rounds(reconciler, lambda: it.get(id).state == "ACTIVE")
        id = it.create(IN, num_replicas=1)
        rounds(reconciler, lambda: it.requested() == [("release", "rollout-2")])
        requests.answer(
            it.run, requests.pending_requests(it.run, lambda _: True)[0], done="release"
        )
        for _ in range(3):
            reconciler.do_round()
        assert not it.requested(), "a second request would stop the group's next job"
        it.serve("rollout-2/0", version=Version(0, 0))
        # Otherwise it counts as just submitted for 10 s, about as long as all rounds take.
        monkeypatch.setattr(slurm_members, "_NEW_S", 0.0)
        del jobs["100"]
        slurm.set(jobs=jobs)
        rounds(reconciler, lambda: it.get(id).state == "COMPLETED")
        requests.send_request(it.run, "release", "rollout-2")
        id = it.create(OUT, num_replicas=2)
        rounds(reconciler, lambda: it.get(id).jobs == {"rollout-2": "101"})
        assert not it.requested() and len(words(slurm, "sbatch")) == 2


@pytest.mark.parametrize("point", ["before sbatch", "after sbatch", "after the entry"])
def test_a_kill_around_the_submission_makes_no_second_job(
    tmp_path: Path,
    slurm: FakeSlurm,
    point: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    submit, add = Slurm.submit, Ledger.add

    def killed_submit(self: Slurm, *args: Any, **keywords: Any) -> str:
        if point == "before sbatch":
            raise Killed
        job = submit(self, *args, **keywords)
        if point == "after sbatch":
            raise Killed
        return job

    def killed_add(self: Ledger, entry: Any) -> None:
        add(self, entry)
        raise Killed

    with world(tmp_path / "run", "jobs", slurm=True) as it:
        submitted(it.run, slurm)
        reconciler = it.reconciler()
        id = it.create(OUT, num_replicas=2)
        with monkeypatch.context() as patch:
            patch.setattr(Slurm, "submit", killed_submit)
            if point == "after the entry":
                patch.setattr(Ledger, "add", killed_add)
            with pytest.raises(Killed):
                rounds(reconciler, lambda: False)
        reconciler = it.reconciler()
        rounds(reconciler, lambda: it.get(id).jobs.get("rollout-2", "").isdecimal())
        for _ in range(3):
            reconciler.do_round()
        assert len(words(slurm, "sbatch")) == 1 and it.get(id).jobs == {"rollout-2": "100"}
        assert [e.job for e in Ledger(it.run).entries() if e.group == "rollout-2"] == ["100"]


def test_a_refused_submission_fails_the_operation(
    tmp_path: Path,
    slurm: FakeSlurm,
) -> None:
    with world(tmp_path / "run", "jobs", slurm=True) as it:
        submitted(it.run, slurm)
        reconciler = it.reconciler()
        slurm.answer("sbatch", err="error: invalid account", code=1)
        id = it.create(OUT, num_replicas=2)
        rounds(reconciler, lambda: it.get(id).is_final)
        assert (it.get(id).state, it.get(id).reason) == ("FAILED", "submission_refused")
        assert "invalid account" in it.get(id).detail
        rounds(reconciler, lambda: not it.get(id).leftover)


def test_a_fenced_reconciler_does_nothing(tmp_path: Path) -> None:
    with world(tmp_path / "run") as it:
        reconciler = it.reconciler()
        it.supervisor.fenced = True
        it.create(OUT, num_replicas=2)
        for _ in range(3):
            reconciler.do_round()
        assert not it.requested()
        it.supervisor.fenced = False
        requests.request_stop(it.run)
        for _ in range(3):
            reconciler.do_round()
        assert not it.requested()
