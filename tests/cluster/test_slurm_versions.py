"""Everything that reads output of Slurm reads that of Slurm 22.05, 24.11 and 25.11. The answers were
recorded on a real Slurm of each version (tests/helpers/record_slurm_outputs.py)."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.slurm import commands
from relax_hpc.cluster.slurm.allocation import Allocation, GroupNodes
from relax_hpc.cluster.slurm.commands import Slurm, SlurmError
from relax_hpc.cluster.slurm.expedited_requeue import is_enabled, with_expedited_requeue
from relax_hpc.cluster.slurm.job_endings import is_cancelled
from relax_hpc.cluster.slurm.job_lookup import is_over, is_queued
from relax_hpc.cluster.slurm.layout import components
from relax_hpc.cluster.slurm.lost_jobs import _INTENDED, _LOST
from relax_hpc.cluster.slurm.parsing import read_job
from relax_hpc.cluster.slurm.steps import StepLauncher
from relax_hpc.config import Config, dump, load
from relax_hpc.ops.doctor.cluster import TRIED_VERSIONS, Cluster, check_cluster

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).with_name("slurm_outputs")
VERSIONS = sorted(path.stem for path in FOLDER.glob("*.json"))
ENDINGS = {
    "scancel": True,
    "scancel, afterwards": True,
    "het, component cancelled": True,
    "time limit": False,
    "time limit, afterwards": False,
    "exit 75, afterwards": False,
    "killed script, afterwards": False,
    "loss of a node": False,
    "loss of a node, afterwards": False,
    "preemption": False,
    "requeue": False,
    "requeue, afterwards": False,
    "het, described": False,
}
"""Situation -> whether a user cancelled the job."""


class Recording:
    """Stored answers of one version. Slurm's commands get the answer of ``situation``."""

    def __init__(self, version: str) -> None:
        table = json.loads((FOLDER / f"{version}.json").read_text())
        self.version, self.source = version, table["source"]
        self.answers: dict[str, dict[str, Any]] = table["answers"]
        self.variables: dict[str, dict[str, str]] = table["variables"]
        self.situation = ""

    def replay(self, situation: str) -> Slurm:
        """Slurm's commands, of which each one gives the stored answer."""
        self.situation = situation
        return Slurm(tries=1)

    def run_program(self, *_: Any) -> subprocess.CompletedProcess[str]:
        answer = self.answers[self.situation]
        return subprocess.CompletedProcess(
            answer["command"], answer["code"], answer["stdout"], answer["stderr"]
        )

    def job_id(self, situation: str) -> str:
        """Id of the job that the command of ``situation`` names."""
        command = self.answers[situation]["command"]
        words = [word for word in command if word.startswith("--jobs=")]
        return words[0].removeprefix("--jobs=") if words else command[-1]


@pytest.fixture(params=VERSIONS)
def recording(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Recording]:
    recorded = Recording(request.param)
    monkeypatch.setattr(commands, "run_program", recorded.run_program)
    monkeypatch.setattr(commands.shutil, "which", lambda program: program)
    yield recorded


def test_each_tried_version_has_answers_with_a_source() -> None:
    assert tuple(VERSIONS) == TRIED_VERSIONS
    for version in VERSIONS:
        assert Recording(version).source.startswith(f"Slurm {version}.")


def test_the_cluster_is_read(recording: Recording) -> None:
    assert recording.replay("version").version().startswith(recording.version)
    config = recording.replay("config").config()
    assert config["KillWait"] == "4 sec" and config["SchedulerType"] == "sched/backfill"
    assert config["BOOT_TIME"] < "2100" and "T" in config["BOOT_TIME"]
    partitions = recording.replay("partitions").partitions()
    assert partitions["main"]["Default"] == "YES" and partitions["urgent"]["State"] == "UP"
    nodes = recording.replay("nodes").nodes()
    assert {node.name for node in nodes} == {f"node{number}" for number in range(1, 7)}
    assert {(node.cpus, node.memory_mib, node.gres) for node in nodes} == {(8, 4000, "gpu:2")}
    assert {"pmi2", "pmix"} <= set(recording.replay("mpi plugins").mpi_plugins())
    assert recording.replay("hostnames").hostnames("x") == ["node1", "node2", "node3", "node5"]
    states = recording.replay("nodes, one down").node_states()
    assert states["node5"].startswith("down")


def test_components_of_a_heterogeneous_job_are_read(recording: Recording) -> None:
    leader = recording.job_id("het, components")
    jobs = recording.replay("het, components").jobs(leader, components=True)
    named = {job.name: job for job in jobs.values()}
    assert [job.nodes for job in named.values()] == [2, 2, 1]
    actor = named["actor-run"]
    assert (actor.het_leader, actor.het_offset, actor.state) == (leader, 1, "RUNNING")
    assert actor.node_list.startswith("node") and actor.time_left_s and not is_over(actor)
    assert list(recording.replay("het, components").jobs(leader)) == [leader]
    own_jobs = recording.replay("own jobs").own_jobs()
    assert {own_jobs[job].name for job in jobs} == set(named)
    fields = recording.replay("het, described").describe(actor.id)
    assert (fields["JobId"], fields["HetJobId"], fields["JobState"]) == (
        actor.id,
        leader,
        "RUNNING",
    )
    steps = recording.replay("het, steps").steps(actor.id)
    assert "actor.actor.i000001" in steps.values()
    others = recording.replay("het, others").jobs(leader, components=True)
    assert actor.id not in others and len(others) == 2


def test_the_batch_script_finds_its_components(recording: Recording) -> None:
    """`Allocation` reads them from variables that Slurm sets."""
    batch, task = recording.variables["batch"], recording.variables["task"]
    assert batch["SLURM_HET_SIZE"] == "3" and batch["SLURMD_NODENAME"].startswith("node")
    config = three_components()
    allocation = Allocation.from_environment(config, "", dict(batch))
    leader = batch["SLURM_JOB_ID"]
    assert [nodes.het for nodes in allocation.group_nodes.values()] == [0, 1, 2]
    assert allocation.group_nodes["actor"].job == str(int(leader) + 1)
    # The run passes the role in the arguments and the allocation in a variable, because this is
    # the leader's id in every component.
    assert task["SLURM_JOB_ID"] == leader and task["SLURM_PROCID"] == "0"


def three_components() -> Config:
    config = load([str(ROOT / "configs/runs/quickstart.yaml")], {"layout": "het"})
    config.site.cpu_nodes = True
    config.actor.parallel.data = 2
    for name in [*config.groups]:
        if name not in ("hub", "actor", "rollout"):
            del config.groups[name]
    for name, nodes in (("hub", 2), ("actor", 2), ("rollout", 1)):
        config.groups[name].resources.nodes = nodes
    assert len(components(config)) == 3
    return config


@pytest.mark.parametrize("situation", ENDINGS)
def test_who_ended_a_job_is_read(recording: Recording, situation: str) -> None:
    job = recording.job_id(situation)
    fields = recording.replay(situation).describe(job)
    assert fields["JobId"] == job
    assert is_cancelled(fields, restarts=0) == ENDINGS[situation], fields
    assert recording.replay(situation).is_preempted(job) == (situation == "preemption")
    if situation.endswith("afterwards") and not situation.startswith("requeue"):
        assert fields["JobState"] in (*_LOST, *_INTENDED)
    if situation == "requeue, afterwards":
        assert (fields["Restarts"], fields["JobState"]) == ("1", "PENDING")


def test_jobs_that_wait_are_read(recording: Recording) -> None:
    def job(situation: str) -> Any:
        (present,) = recording.replay(situation).jobs(recording.job_id(situation)).values()
        return present

    assert is_over(job("never starts")) and not is_queued(job("never starts"))
    assert is_queued(job("held")) and job("held").reason == "JobHeldUser"
    assert is_queued(job("requeued job")) and job("requeued job").name == "a|b c"
    assert is_over(job("scancel, in squeue")) and job("scancel, in squeue").state == "COMPLETING"
    recording.replay("requeue accepted").requeue("8")


def test_jobs_that_are_gone_are_no_errors(recording: Recording) -> None:
    assert recording.replay("unknown job in squeue").jobs("99999999") == {}
    assert recording.replay("unknown job in scontrol").describe("99999999") == {}
    assert recording.replay("steps of an unknown job").steps("99999999") == {}
    recording.replay("unknown job in scancel").cancel("99999999")
    recording.replay("scancel again").cancel("8")


def test_errors_are_told_apart(recording: Recording, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/bash\n")
    with pytest.raises(SlurmError, match="invalid partition specified: none") as refusal:
        recording.replay("unknown partition").submit(script)
    assert not refusal.value.is_temporary
    assert "to start at" in recording.replay("test only").test_only(script)
    with pytest.raises(SlurmError, match="unrecognized option"):
        recording.replay("unknown option").test_only(script)
    for ask in (Slurm.own_jobs, lambda slurm: slurm.submit(script)):
        situation = "no controller" if ask is Slurm.own_jobs else "no controller for sbatch"
        with pytest.raises(SlurmError) as outage:
            ask(recording.replay(situation))
        assert outage.value.transient, outage.value
    assert recording.replay("accounting").associations() == []


def test_an_expedited_requeue_is_requested_where_slurm_has_it(
    recording: Recording, tmp_path: Path
) -> None:
    has_it = recording.version >= "25.11"
    slurm = recording.replay("config")
    assert is_enabled(slurm.config()) == has_it
    config = load([str(ROOT / "configs/runs/quickstart.yaml")], {"layout": "jobs"})
    options = with_expedited_requeue(config, slurm).site.options
    assert options.get("requeue") == ("expedite" if has_it else None)
    config.site.options["requeue"] = ""
    assert with_expedited_requeue(config, slurm) is config, "the user's choice"
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/bash\n")
    if has_it:
        assert "to start at" in recording.replay("expedite").test_only(script)
    else:
        with pytest.raises(SlurmError, match="allow an argument"):
            recording.replay("expedite").test_only(script)


def test_doctor_reads_the_cluster(recording: Recording) -> None:
    cluster = Cluster(
        version=recording.replay("version").version(),
        config=recording.replay("config").config(),
        partitions=recording.replay("partitions").partitions(),
        nodes=recording.replay("nodes").nodes(),
    )
    config = load([str(ROOT / "configs/runs/quickstart.yaml")], {"layout": "jobs"})
    config.site.options["requeue"] = "expedite"
    findings = list(
        check_cluster(config, components(config), recording.replay("mpi plugins"), cluster)
    )
    texts = [finding.text for finding in findings if finding.severity == "error"]
    assert any("enable_expedited_requeue" in text for text in texts) != (
        recording.version >= "25.11"
    )
    assert any(f"Slurm {recording.version}" in finding.text for finding in findings)


def test_an_expediting_job_waits() -> None:
    """squeue 25.11 shows the state of a requeued job as EXPEDITING."""
    job = read_job([], "8|8|EXPEDITING|2|node[1-2]|0:00|10:00|None|actor-run")
    assert is_queued(job) and job.state == "PENDING"


def test_the_output_of_rank_0_is_in_its_file(recording: Recording, tmp_path: Path) -> None:
    """In a step of one component, %t is another number since 24.11 (`StepLauncher`)."""
    config = three_components()
    run = RunDir(tmp_path / "run")
    run.create()
    dump(config, run.config)
    for het, pattern in ((1, "%t" if recording.version < "24.11" else "%n"), (None, "%t")):
        nodes = {"actor": GroupNodes("8", 2, het)}
        launcher = StepLauncher(
            run,
            config,
            recording.replay("version"),
            Allocation("7", 0, "node1", nodes),
            lambda: None,
        )
        command = launcher.commands("actor", 1)["actor"].arguments
        assert f"--output={run.logs('actor', 1)}/actor-rank-{pattern}.log" in command
