"""When a group that has fallen silent is given to another job; tests/test_slurm_jobs.py has it from a real Slurm."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from relax_hpc.launch.slurm.commands import SlurmError
from relax_hpc.launch.slurm.ledger import Entry, Ledger
from relax_hpc.launch.slurm.silence import Silence
from relax_hpc.rendezvous.roster import claim_epoch
from relax_hpc.rundir import RunDir


@dataclass
class World:
    """A run of one group in job 7, Slurm's and the supervisor's part in it, and what they are told."""

    run: RunDir
    state: str = "RUNNING"
    used_s: float = 60.0
    new: str = "8"
    told: list[tuple[str, ...]] = field(default_factory=list)
    elsewhere: dict[str, str] = field(default_factory=dict)
    terminal: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(say=print))

    def jobs(self, *ids: str) -> dict[str, SimpleNamespace]:
        if self.state == "no answer":
            raise SlurmError("squeue: no answer")
        job = SimpleNamespace(state=self.state, node_list="node[4-5]", used_s=self.used_s)
        return dict.fromkeys(ids, job) if self.state else {}

    def hostnames(self, node_list: str) -> list[str]:
        return {"node[4-5]": ["node4", "node5"]}[node_list]

    def cancel(self, job: str) -> None:
        self.told.append(("cancel", job))

    def submit(self, name: str, avoid: str) -> str:
        self.told.append(("submit", name, avoid))
        return self.new

    def count_failure(self, name: str, reason: str) -> None:
        self.told.append(("failure", name))

    def beat(self, number: int) -> None:
        folder = self.run.rendezvous("supervisor-rollout")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "lease").write_text(str(number))


REPLACED = [("failure", "rollout"), ("submit", "rollout", "node4"), ("cancel", "7")]


@pytest.fixture
def world(run_dir: Path) -> World:
    run = RunDir(run_dir)
    claim_epoch(run, "rollout")
    Ledger(run).add(Entry("7", "group", "rollout"))
    world = World(run)
    world.beat(0)
    return world


def silence(world: World, lease_s: float = 0.0) -> Silence:
    return Silence(world.run, world, lease_s, world.submit)


def rounds(world: World, watch: Silence, count: int = 3) -> list[tuple[str, ...]]:
    watch.tick(world, ["rollout"])
    watch.suspect("rollout", 1)
    for _ in range(count):
        watch.tick(world, ["rollout"])
    return world.told


def test_it_goes_to_another_job_once(world: World) -> None:
    world.elsewhere["rollout"] = "7"
    assert rounds(world, silence(world)) == REPLACED
    assert world.elsewhere == {"rollout": "8"}


def test_a_supervisor_that_beats_is_left_to_it(world: World) -> None:
    assert rounds(world, silence(world, lease_s=3600.0)) == []


def test_a_beat_is_a_sign(world: World) -> None:
    watch, told = silence(world), world.told
    watch.tick(world, ["rollout"])
    first = watch._seen["rollout"]
    world.beat(1)
    watch.tick(world, ["rollout"])
    assert watch._seen["rollout"] != first and not told


def test_a_group_that_has_begun_again_is_none_of_its_business(world: World) -> None:
    claim_epoch(world.run, "rollout")
    assert rounds(world, silence(world)) == []


@pytest.mark.parametrize("state", ["PENDING", "COMPLETING", ""])
def test_slurm_that_has_missed_the_node_brings_it_back(world: World, state: str) -> None:
    world.state = state
    assert rounds(world, silence(world)) == []


def test_a_job_that_slurm_has_just_brought_back_is_left_alone(world: World) -> None:
    world.used_s = 0.0
    assert rounds(world, silence(world)) == []


def test_slurm_that_does_not_answer_is_asked_again(world: World) -> None:
    world.state, watch = "no answer", silence(world)
    assert rounds(world, watch) == []
    world.state = "RUNNING"
    watch.tick(world, ["rollout"])
    assert world.told == REPLACED


def test_without_another_job_the_old_one_stays(world: World) -> None:
    world.new = ""
    assert rounds(world, silence(world)) == REPLACED[:-1]


def test_a_run_without_supervisors_elsewhere_is_not_judged(world: World) -> None:
    (world.run.rendezvous("supervisor-rollout") / "lease").unlink()
    assert rounds(world, silence(world)) == []
