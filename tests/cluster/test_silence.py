"""When a group that has fallen silent is given to another job; tests/cluster/test_slurm_jobs.py has it from
a real Slurm."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.slurm.commands import SlurmError
from relax_hpc.cluster.slurm.node_check import exclude_option
from relax_hpc.cluster.slurm.silent_groups import SilentGroups
from relax_hpc.cluster.slurm.submissions import Ledger, Submission
from relax_hpc.config import Config
from relax_hpc.net.rendezvous.exit_mark import write_exit_mark
from relax_hpc.net.rendezvous.roster import claim_incarnation


@dataclass
class World:
    """A run of one group in job 7, the parts of Slurm and the supervisor, what they are told, and a
    clock."""

    run: RunDir
    config: Config
    state: str = "RUNNING"
    used_s: float = 1e6
    new: str = "8"
    deaf: int = 0
    """So many cancellations get no answer."""
    asked: int = 0
    told: list[tuple[str, ...]] = field(default_factory=list)
    failures: World | None = None
    """This one: how failures are judged is told like all else."""
    table: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(detached={}))
    terminal: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(say=print))
    disk: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(is_full=lambda: False))
    now: float = 0.0
    beats: int = 0
    silence: SilentGroups | None = None

    def sleep(self, seconds: float, suspected: int = 1) -> None:
        """A tick a second, in which a member of the group is silent."""
        for _ in range(int(seconds)):
            self.now += 1.0
            self.silence.suspect("rollout", suspected)
            self.silence.tick(self, ["rollout"], self.now)

    def beat(self) -> None:
        self.beats += 1
        folder = self.run.rendezvous("supervisor-rollout")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "lease").write_text(str(self.beats))

    # -- Slurm -------------------------------------------------------------------------------------

    def jobs(self, *ids: str) -> dict[str, SimpleNamespace]:
        self.asked += 1
        if self.state == "no answer":
            raise SlurmError("squeue: no answer")
        # The new job waits in the queue.
        states = {job: self.state if job == "7" else "PENDING" for job in ids}
        values = {"node_list": "node[4-5]", "used_s": self.used_s}
        return {
            job: SimpleNamespace(state=state, **values) for job, state in states.items() if state
        }

    def hostnames(self, node_list: str) -> list[str]:
        return {"node[4-5]": ["node4", "node5"]}[node_list]

    def cancel(self, job: str) -> None:
        if self.deaf:
            self.deaf -= 1
            raise SlurmError("scancel: no answer")
        self.told.append(("cancel", job))

    # -- the supervisor ----------------------------------------------------------------------------

    def submit(self, name: str, avoid: str) -> str:
        self.told.append(("submit", name, avoid))
        if self.new == "no answer":
            raise SlurmError("sbatch: no answer", timed_out=True)
        if self.new:
            Ledger(self.run).add(Submission(self.new, "group", name))
        return self.new

    def check_failure(self, name: str, reason: str) -> None:
        self.told.append(("judge", name))

    def before_wait(self) -> None:
        pass


REPLACED = [("judge", "rollout"), ("submit", "rollout", "node4"), ("cancel", "7")]
LEASE_S = 30.0


@pytest.fixture
def world(run_dir: Path) -> World:
    run = RunDir(run_dir)
    claim_incarnation(run, "rollout")
    Ledger(run).add(Submission("7", "group", "rollout"))
    world = World(run, Config())
    world.config.liveness.lease_s = LEASE_S
    world.failures = world
    world.silence = SilentGroups(run, world.config, world, world.submit)
    world.beat()
    return world


def test_on_a_full_disk_a_supervisor_that_stands_still_says_nothing(world: World) -> None:
    world.disk.is_full = lambda: True
    world.sleep(3 * LEASE_S)
    assert not world.told
    world.disk.is_full = lambda: False
    world.sleep(30.0)
    assert world.told == REPLACED, "it is as silent with room again"


def test_it_goes_to_another_job_once(world: World) -> None:
    world.table.detached["rollout"] = "7"
    world.sleep(LEASE_S - 1.0)
    assert not world.told
    world.sleep(60.0)
    assert world.told == REPLACED and world.table.detached == {"rollout": "8"}


def test_a_supervisor_that_beats_is_left_to_it(world: World) -> None:
    for _ in range(5):
        world.sleep(LEASE_S - 1.0)
        world.beat()
    assert not world.told


def test_who_was_asleep_itself_has_not_seen_anybody_stand_still(world: World) -> None:
    world.sleep(10.0)
    world.now += 10 * LEASE_S
    world.sleep(LEASE_S - 1.0)
    assert not world.told
    world.sleep(3.0)
    assert world.told == REPLACED


def test_a_group_that_has_begun_again_is_none_of_its_business(world: World) -> None:
    claim_incarnation(world.run, "rollout")
    world.sleep(100.0, suspected=1)
    assert not world.told


@pytest.mark.parametrize("stopped", [True, False])
def test_a_group_that_ended_in_order_is_not_silent(world: World, stopped: bool) -> None:
    mark = world.run.exit_mark("rollout", 1, "rollout")
    mark.parent.mkdir(parents=True)
    write_exit_mark(mark, 75, "asked to stop" if stopped else "a peer is gone", stopped)
    world.sleep(100.0)
    assert world.told == ([] if stopped else REPLACED)


@pytest.mark.parametrize("state", ["PENDING", "COMPLETING", ""])
def test_slurm_that_has_missed_the_node_brings_it_back(world: World, state: str) -> None:
    world.state = state
    world.sleep(100.0)
    assert not world.told


def test_a_job_that_slurm_has_just_brought_back_is_left_alone(world: World) -> None:
    world.used_s = 5.0
    world.sleep(100.0)
    assert not world.told


def test_slurm_is_asked_again_when_it_does_not_answer_but_not_at_each_beat(world: World) -> None:
    world.state = "no answer"
    world.sleep(100.0)
    assert not world.told and 5 <= world.asked <= 8
    world.state = "RUNNING"
    world.sleep(11.0)
    assert world.told == REPLACED


def test_the_former_job_is_ended_even_if_slurm_does_not_answer_at_once(world: World) -> None:
    world.deaf = 2
    world.sleep(100.0)
    assert world.told == REPLACED


def test_a_job_that_may_have_been_made_is_not_asked_for_again(world: World) -> None:
    world.new = "no answer"
    world.sleep(100.0)
    assert world.told == REPLACED[:-1]


def test_without_another_job_the_old_one_stays(world: World) -> None:
    world.new = ""
    world.sleep(100.0)
    assert world.told == REPLACED[:-1]


def test_a_group_whose_supervisor_never_beat_is_not_judged(world: World) -> None:
    (world.run.rendezvous("supervisor-rollout") / "lease").unlink()
    world.sleep(100.0)
    assert not world.told


def test_the_former_job_of_a_group_knows_that_it_is_one(world: World) -> None:
    ledger = Ledger(world.run)
    assert not ledger.superseded("7", "rollout")
    ledger.add(Submission("8", "group", "rollout", options=["--time=30"]))
    assert ledger.superseded("7", "rollout") and not ledger.superseded("8", "rollout")
    assert not ledger.superseded("9", "rollout"), "the ledger does not know it"
    assert not ledger.superseded("7", "") and ledger.separate_job("rollout").options == [
        "--time=30"
    ]


def test_the_node_is_excluded_beside_what_the_user_has_chosen(world: World) -> None:
    assert exclude_option(world.run, "node1") == [], "it stands in the script"
    assert exclude_option(world.run, "", "node4") == ["--exclude=node4"]
    assert exclude_option(world.run, "node1", "node4") == ["--exclude=node1,node4"]
