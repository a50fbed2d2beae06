"""`relax-hpc doctor`: every class of mistake, on a fake Slurm or a plain configuration; then on a real one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.config import Config, load
from relax_hpc.doctor import cluster, deep, doctor, host
from relax_hpc.doctor.doctor import Finding, diagnose
from relax_hpc.doctor.planes import judge_planes
from relax_hpc.slurm.commands import Slurm
from relax_hpc.transport.plane_check import Trial
from tests.fake_slurm import CONFIG, PARTITION, PROGRAMS, FakeSlurm
from tests.requirements import requires
from tests.slurm_sandbox import private_sandbox

requires("mpi")
QUICKSTART = Path(__file__).parents[1] / "configs" / "runs" / "quickstart.yaml"
GOOD = {
    "layout": "het",
    "site": {"partition": "main", "gpu_request": "none", "mpi": {"launcher": "pmi2", "library": "wheel"}},
}


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    monkeypatch.setattr(host, "filesystem", lambda path: "nfs4")
    slurm, run = FakeSlurm(tmp_path / "fake", monkeypatch), subprocess.run

    def quick(argv: list[str], **options: Any) -> subprocess.CompletedProcess:
        """Most of the time would go to starting programs; this very interpreter has all modules."""
        if argv[0] == sys.executable:
            return subprocess.CompletedProcess(argv, 0, "[]", "")
        return slurm.run(argv) if argv[0] in PROGRAMS else run(argv, **options)

    monkeypatch.setattr(subprocess, "run", quick)
    return slurm


def make(tmp_path: Path, changes: dict[str, Any]) -> Config:
    return load([QUICKSTART], merged({"run_dir": str(tmp_path / "run")} | GOOD, changes))


def merged(below: dict, above: dict) -> dict:
    found = dict(below)
    for key, value in above.items():
        found[key] = (
            merged(found[key], value) if isinstance(value, dict) and isinstance(found.get(key), dict) else value
        )
    return found


def bad(findings: list[Finding]) -> list[str]:
    for finding in findings:
        assert "\n" not in finding.text
    return [f"{finding.severity}: {finding.text}" for finding in findings if finding.severity != "ok"]


def group(name: str, **resources: Any) -> dict[str, Any]:
    return {"groups": {name: {"resources": resources}}}


def site(**changes: Any) -> dict[str, Any]:
    return {"site": changes}


NO_ACCOUNTS = "warning: site.account, site.qos: not checked"


@pytest.mark.parametrize("layout", ["het", "jobs", "local"])
def test_nothing_is_wrong(fake: FakeSlurm, tmp_path: Path, layout: str) -> None:
    found = bad(diagnose(make(tmp_path, {"layout": layout}), Slurm()))
    assert [line for line in found if not line.startswith(NO_ACCOUNTS)] == []


CLUSTER_MISTAKES = [
    (
        group("actor", nodes=5) | {"actor": {"parallel": {"data": 5}}},
        {},
        "error: groups.actor.resources.nodes: found 5, allowed in partition main: 4",
    ),
    (
        group("rollout", nodes=3) | {"rollout": {"replicas": 3}},
        {"MaxNodes": "2"},
        "error: groups.rollout.resources.nodes: found 3, allowed .*: 2",
    ),
    (group("rollout", nodes=1), {"MinNodes": "2"}, "error: groups.rollout.resources.nodes: found 1, allowed .*least 2"),
    (
        site(gpu_request="gres") | group("actor", gpus_per_node=8),
        {},
        "error: groups.actor.resources.gpus_per_node: found 8, nodes of partition main have at most 4 GPUs",
    ),
    (
        site(gpu_request="gres", gpu_type="h100") | group("actor", gpus_per_node=1),
        {},
        "error: groups.actor.resources.gpus_per_node: found 1, .* at most 0 GPUs of type h100; see site.gpu_type",
    ),
    (group("actor", cpus_per_task=64), {}, "error: groups.actor.resources.cpus_per_task: found 64, .* at most 8"),
    (group("actor", memory="128G"), {}, "error: groups.actor.resources.memory: found 128G, .* at most 64000M"),
    (
        {"slurm": {"time": "2-00:00:00"}},
        {},
        "error: slurm.time: found 2-00:00:00, allowed in partition main: 1-00:00:00",
    ),
    (
        {"layout": "jobs"} | group("rollout", time="30:00:00"),
        {},
        "error: groups.rollout.resources.time: found 30:00:00, allowed",
    ),
    (site(partition="mian"), {}, "error: site.partition: found 'mian', allowed: main; did you mean main"),
    (site(hub_partition="cpu"), {}, "error: site.hub_partition: found 'cpu', allowed: main"),
    (site(partition=""), {"Default": "NO"}, "error: site.partition: found none, and Slurm has no default"),
    ({}, {"State": "DRAIN"}, "error: site.partition: partition main is DRAIN"),
    ({}, {"AllocNodes": "login1"}, "error: site.sbatch_on_nodes: found true, .* submitted on login1 alone"),
    (site(account="b"), {"AllowAccounts": "a,c"}, "error: site.account: found 'b', allowed in partition main: a,c"),
    (site(qos="b"), {"DenyQos": "b"}, "error: site.qos: found 'b', which partition main denies"),
    ({}, {"AllowGroups": "chosen-few"}, "error: site.partition: partition main is for the groups chosen-few"),
    ({"layout": "jobs"}, {"OverSubscribe": "EXCLUSIVE"}, "warning: site.partition: .* one of them to the hub alone"),
]


@pytest.mark.parametrize(("changes", "partition", "expected"), CLUSTER_MISTAKES)
def test_the_request_against_the_partition(
    fake: FakeSlurm, tmp_path: Path, changes: dict, partition: dict, expected: str
) -> None:
    fake.set(partitions=[PARTITION | partition])
    expect(diagnose(make(tmp_path, changes), Slurm()), expected)


SLURM_MISTAKES = [
    ({}, {"SchedulerType": "sched/builtin"}, "error: layout: found het, but SchedulerType is sched/builtin"),
    ({}, {"SchedulerParameters": "x,disable_hetjob_steps"}, "warning: layout: .*disable_hetjob_steps"),
    ({"layout": "jobs"}, {"JobRequeue": "0"}, "warning: layout: found jobs with JobRequeue=0"),
    ({}, {"KillWait": "3 sec"}, "warning: KillWait: found 3 s, recommended: 30"),
    ({}, {"PreemptMode": "REQUEUE"}, "warning: PreemptMode: found REQUEUE without .*preempt_send_user_signal"),
    ({}, {"PreemptMode": "GANG,SUSPEND"}, "warning: PreemptMode: found SUSPEND"),
]


@pytest.mark.parametrize(("changes", "slurm", "expected"), SLURM_MISTAKES)
def test_slurms_own_settings(fake: FakeSlurm, tmp_path: Path, changes: dict, slurm: dict, expected: str) -> None:
    fake.set(config=CONFIG | slurm)
    expect(diagnose(make(tmp_path, changes), Slurm()), expected)


def expect(findings: list[Finding], expected: str) -> None:
    lines = bad(findings)
    assert any(re.match(expected, line) for line in lines), lines


def test_preemption_that_announces_itself(fake: FakeSlurm, tmp_path: Path) -> None:
    fake.set(config={"PreemptMode": "REQUEUE", "SlurmctldParameters": "preempt_send_user_signal"})
    assert not [line for line in bad(diagnose(make(tmp_path, {}), Slurm())) if "Preempt" in line]


@pytest.mark.parametrize(
    ("resources", "expected"),
    [
        ({}, r"found 'none', .* gives 0.8 GiB a node \(DefMemPerCPU 100 MiB x 8 CPUs\); .* need 46 GiB and more"),
        ({"memory": "20G"}, r"found '20G', .* gives 20.0 GiB a node \(as asked\)"),
        ({"memory": "0"}, ""),
        ({"memory": "50G"}, ""),
    ],
)
def test_memory_is_weighed_against_the_model(
    fake: FakeSlurm, tmp_path: Path, resources: dict[str, str], expected: str
) -> None:
    fake.set(config=CONFIG | {"SelectTypeParameters": "CR_CPU_MEMORY", "DefMemPerCPU": "100"})
    with (tmp_path / "model.safetensors").open("wb") as weights:
        weights.truncate(30 << 30)
    config = make(
        tmp_path, {"layout": "jobs", "rollout": {"replicas": 8}} | group("rollout", cpus_per_task=8, **resources)
    )
    config.model.device, config.model.path = "cuda", str(tmp_path)
    for settings in config.groups.values():
        settings.resources.gpus_per_node = 4
    found = [
        line for line in bad(diagnose(config, Slurm())) if line.startswith("warning: groups.rollout.resources.memory")
    ]
    assert len(found) == bool(expected) and all(re.search(expected, line) for line in found), found


def test_mpi_is_tried_where_ranks_need_it(tmp_path: Path) -> None:
    ranks = {"layout": "jobs", "actor": {"parallel": {"data": 2}}}
    assert not [line for line in bad(list(host.check_programs(make(tmp_path, ranks)))) if "MPI" in line]
    broken = merged(ranks, site(mpi={"library": __file__}))
    says = (
        "error: site.mpi.library: found .*: ranks cannot begin MPI with it .*; name the libmpi.so of an MPI, or wheel"
    )
    expect(list(host.check_programs(make(tmp_path, broken))), says)
    alone = merged(broken, {"actor": {"parallel": {"data": 1}}})
    assert not [line for line in bad(list(host.check_programs(make(tmp_path, alone)))) if "begin MPI" in line]


def test_an_untried_version(fake: FakeSlurm, tmp_path: Path) -> None:
    fake.answer("sinfo", "slurm 25.11.0\n", match="--version")
    expect(diagnose(make(tmp_path, {}), Slurm()), "warning: Slurm 25.11.0: untried, tried are 22.05")


def test_nodes_that_are_down(fake: FakeSlurm, tmp_path: Path) -> None:
    states = ("idle", "down*", "drained", "idle*")
    fake.set(nodes=[f"node{n}|main*|{state}|8|64000|host{n}|gpu:4" for n, state in enumerate(states)])
    expect(
        diagnose(make(tmp_path, {}), Slurm()), "warning: groups.hub.resources: 2 nodes asked for, 1 of partition main"
    )


def test_typed_gpus(fake: FakeSlurm, tmp_path: Path) -> None:
    fake.set(nodes=[f"n{n}|main*|idle|8|64000|host{n}|gpu:a100:2(S:0),gpu:h100:4(S:1),shard:8" for n in range(4)])
    count = {"model": {"device": "cuda"}, "site": {"gpu_request": "gres", "gpu_type": "h100"}}
    groups = {name: {"resources": {"gpus_per_node": 4}} for name in ("actor", "rollout", "actor_fwd", "reference")}
    good = diagnose(make(tmp_path, count | {"groups": groups}), Slurm())
    assert not [line for line in bad(good) if "gpus_per_node" in line]
    groups["actor"]["resources"]["gpus_per_node"] = 5
    expect(
        diagnose(make(tmp_path, count | {"groups": groups}), Slurm()), "error: groups.actor.* at most 4 GPUs of type"
    )


def test_a_plugin_of_mpi_that_srun_lacks(fake: FakeSlurm, tmp_path: Path) -> None:
    fake.answer("srun", err="MPI plugin types are...\n\tnone\n", match="--mpi=list")
    expect(
        diagnose(make(tmp_path, {}), Slurm()), "error: site.mpi.launcher: found pmi2, allowed by srun --mpi=list: none"
    )


def test_pyxis_that_srun_lacks(fake: FakeSlurm, tmp_path: Path) -> None:
    container = site(container={"runtime": "pyxis", "image": "docker://x"})
    expect(diagnose(make(tmp_path, container), Slurm()), "error: site.container.runtime: found pyxis, but srun has no")
    fake.answer("srun", "  --container-image=[USER@][REGISTRY#]IMAGE\n", match="--help")
    assert not [line for line in bad(diagnose(make(tmp_path, container), Slurm())) if "found pyxis" in line]


ACCOUNT_MISTAKES = [
    (site(account="x"), "a|normal,long||\n", "error: site.account: found 'x', allowed for you: a"),
    (
        site(account="a", qos="fast"),
        "a|normal,long||\n",
        "error: site.qos: found 'fast', allowed for you: long, normal",
    ),
    ({"layout": "jobs"}, "a|normal|2|100\n", r"error: layout: found jobs with 4 jobs at once, allowed for you: 2"),
    (
        site(account="a", sbatch_on_nodes=False) | {"slurm": {"successors": 2}},
        "a|normal|10|11\n",
        "error: layout: found het with 12 jobs submitted, .* allowed for account a: 11",
    ),
]


@pytest.mark.parametrize(("changes", "rows", "expected"), ACCOUNT_MISTAKES)
def test_accounts_and_limits(fake: FakeSlurm, tmp_path: Path, changes: dict, rows: str, expected: str) -> None:
    fake.answer("sacctmgr", rows, match="associations")
    fake.answer("sacctmgr", "normal||||||\n", match="show qos")
    expect(diagnose(make(tmp_path, changes), Slurm()), expected)


def test_limits_of_a_qos(fake: FakeSlurm, tmp_path: Path) -> None:
    fake.answer("sacctmgr", "a|debug||\n", match="associations")
    fake.answer("sacctmgr", "debug|1|1||||\n", match="show qos")
    expect(diagnose(make(tmp_path, site(qos="debug")), Slurm()), "error: layout: .* allowed for qos debug: 1")


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("debug|||2:00:00|||", "error: slurm.time: found 24:00:00, allowed by qos debug: 2:00:00"),
        ("debug|||1-00:00:00|||", ""),
        ("debug||||cpu=9,gres/gpu=1||", r"error: site.qos: found debug, which allows a job 1 of gres/gpu \(MaxTRES\)"),
        ("debug|||||gres/gpu=7|", r"error: site.qos: .* allows a user 7 of gres/gpu \(MaxTRESPU\), but 8 are asked"),
        ("debug||||||node=5", r"error: site.qos: .* allows all users 5 of node \(GrpTRES\), but 6 are asked for"),
        ("debug||||gres/gpu=2|gres/gpu=8|node=6", ""),
    ],
)
def test_what_a_qos_allows(fake: FakeSlurm, tmp_path: Path, row: str, expected: str) -> None:
    fake.answer("sacctmgr", "a|debug||\n", match="associations")
    fake.answer("sacctmgr", f"{row}\n", match="show qos")
    groups = {name: {"resources": {"gpus_per_node": 2}} for name in ("rollout", "actor", "actor_fwd", "reference")}
    config = make(tmp_path, site(qos="debug", gpu_request="gres") | {"groups": groups})
    found = diagnose(config, Slurm())
    if expected:
        expect(found, expected)
    else:
        assert not [line for line in bad(found) if "qos" in line]


@pytest.mark.parametrize(
    ("said", "key"),
    [
        ("Invalid account or account/partition combination specified", "site.account, site.partition"),
        ("Invalid qos specification", "site.qos"),
    ],
)
def test_an_account_that_nobody_but_sbatch_knows_of(fake: FakeSlurm, tmp_path: Path, said: str, key: str) -> None:
    fake.remove("sacctmgr")
    fake.answer("sbatch", err=f"allocation failure: {said}\n", code=1, match="--test-only")
    found = diagnose(make(tmp_path, site(account="x", qos="y")), Slurm())
    expect(found, f"error: run.sbatch: sbatch --test-only refuses it: .*{said}; see {key}$")
    expect(found, f"{NO_ACCOUNTS} but by sbatch --test-only")


def test_sbatchs_own_opinion(fake: FakeSlurm, tmp_path: Path) -> None:
    fake.answer("sbatch", err="allocation failure: Requested reservation is invalid\n", code=1, match="--test-only")
    found = diagnose(make(tmp_path, {}), Slurm())
    expect(found, "error: run.sbatch: sbatch --test-only refuses it: .*reservation is invalid")
    assert len(fake.calls("sbatch")) == 1


def test_a_missing_slurm(fake: FakeSlurm, tmp_path: Path) -> None:
    fake.remove("sbatch")
    expect(diagnose(make(tmp_path, {}), Slurm()), "error: Slurm: sbatch not found on PATH")


def test_a_dead_controller(fake: FakeSlurm, tmp_path: Path) -> None:
    fake.answer("scontrol", err="slurm_load_partitions: Unable to contact slurm controller\n", code=1)
    expect(diagnose(make(tmp_path, {}), Slurm(tries=1)), "error: Slurm: .*Unable to contact slurm controller")


def test_what_slurm_cannot_say_is_listed(fake: FakeSlurm, tmp_path: Path) -> None:
    fake.answer("srun", err="srun: error: broken\n", code=1)
    fake.answer("sacctmgr", err="sacctmgr: error: slurmdbd is down\n", code=1)
    found = diagnose(make(tmp_path, {}), Slurm())
    expect(found, "warning: site.mpi.launcher: not checked: .*broken")
    expect(found, "warning: site.account, .*: not checked: .*slurmdbd is down")
    expect(diagnose(make(tmp_path, {}), None), "warning: Slurm: not asked")


PLAIN_MISTAKES = [
    (site(account="YOUR-gpu"), "error: site.account: found the placeholder 'YOUR-gpu'"),
    (
        group("hub", options={"account": "YOUR-cpu"}),
        "error: groups.hub.resources.options.account: found the placeholder 'YOUR-cpu'",
    ),
    (
        group("hub", memory="16G"),
        "error: groups.rollout.resources.memory: found none, but groups.hub states one, which sbatch passes on",
    ),
    (
        site(container={"runtime": "apptainer", "image": "/"}, mpi={"launcher": "pmix"}),
        "error: site.mpi.launcher: found pmix with container runtime apptainer",
    ),
    ({"rollout": {"groups_per_request": 64}}, "warning: rollout.groups_per_request: found 64, .* raise max_staleness"),
    ({"actor": {"parallel": {"data": 64}}, "algorithm": {"mini_batches": 32}}, "error: actor.parallel.data: found 64"),
    ({"model": {"path": "/nowhere"}}, "error: model.path: found '/nowhere', which is not a directory"),
    (group("actor", gpus_per_node=1), "warning: groups.actor.resources.gpus_per_node: found 1 with model.device cpu"),
    (group("actor", gpus_per_node=1), "warning: site.gpu_request: found none, so the 1 GPUs a node of groups.actor"),
    (site(setup=["module purge", "export A='b"]), "error: site.setup: bash cannot read it: .*line 2: unexpected EOF"),
    (site(srun_options={"mpi": "none"}), "error: site.srun_options.mpi: .* set site.mpi.launcher instead"),
    (site(local_dir="scratch"), "error: site.local_dir: found 'scratch', allowed: an absolute path"),
    ({"slurm": {"time": "4", "signal_s": 300}}, "error: slurm.signal_s: found 300"),
    (site(options={"nodes": "3"}), "error: options.nodes: found '3', but it is set by relax_hpc"),
    ({"slurm": {"one_node_hub": True}}, "warning: slurm.one_node_hub: found true"),
    (site(cpu_nodes=False), "error: groups..*.resources.nodes: found 1 for component 0 of a het job"),
    ({"slurm": {"successors": 0}}, "warning: slurm.successors: found 0"),
    (site(sbatch_on_nodes=False), "warning: groups.actor.spares: found 0 with site.sbatch_on_nodes false"),
    (
        site(sbatch_on_nodes=False) | {"groups": {"rollout": {"on_failure": "resubmit"}}},
        "error: groups.rollout.spares: found 0",
    ),
    (site(python="/nowhere/python"), "error: site.python: found '/nowhere/python', which is no program here"),
    (site(python="/bin/true"), "error: site.python: found '/bin/true', which is no Python"),
    (site(mpi={"launcher": "pmix", "library": "wheel"}), "error: site.mpi.library: found wheel with launcher pmix"),
    (site(mpi={"library": "/nowhere/libmpi.so"}), "error: site.mpi.library: found '/nowhere/libmpi.so', which is not"),
    (
        site(mpi={"launcher": "mpiexec"}) | {"actor": {"parallel": {"data": 2}}},
        "error: site.mpi.launcher: found mpiexec, but actor of groups.actor has 2 ranks, allowed: 1; take pmix or pmi2",
    ),
    (site(container={"image": "/x.sif"}), "warning: site.container.image: found '/x.sif' with runtime none"),
    (site(container={"runtime": "apptainer"}), "error: site.container.image: found nothing with runtime apptainer"),
    (site(container={"runtime": "apptainer", "image": "/no/x.sif"}), "error: site.container.image: .*cannot read"),
    (
        site(container={"runtime": "apptainer", "image": "/no/x.sif"}),
        "warning: site.container.program: apptainer is not",
    ),
    (site(container={"runtime": "apptainer", "image": "docker://x"}), "warning: site.container.image: .* not checked"),
    ({"run_dir": "/tmp/" + "/".join(["x" * 100] * 12)}, "error: run_dir: found a path of 1216 bytes"),
]


@pytest.mark.parametrize(("changes", "expected"), PLAIN_MISTAKES)
def test_settings_layout_and_programs(fake: FakeSlurm, tmp_path: Path, changes: dict, expected: str) -> None:
    expect(diagnose(make(tmp_path, changes), None), expected)


@pytest.mark.parametrize(("soname", "launcher"), [("libmpi.so.40.30.4", "pmi2"), ("libmpi.so.12.1.1", "pmix")])
def test_mpi_libraries_that_do_not_pair(fake: FakeSlurm, tmp_path: Path, soname: str, launcher: str) -> None:
    (tmp_path / soname).touch()
    (tmp_path / "libmpi.so").symlink_to(soname)
    pair = {"launcher": launcher, "library": str(tmp_path / "libmpi.so")}
    expect(diagnose(make(tmp_path, site(mpi=pair)), None), f"(error|warning): site.mpi.launcher: found {launcher} with")


def test_a_python_without_the_packages(fake: FakeSlurm, tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f"#!/bin/sh\nexec '{sys.executable}' -I -S \"$@\"\n")
    bare.chmod(0o755)
    expect(diagnose(make(tmp_path, site(python=str(bare))), None), "error: site.python: .* has no relax_hpc, mpi4py")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("tmpfs", "error: run_dir: .* is on tmpfs"),
        ("ext4", "warning: run_dir: .* is on ext4"),
        ("", "warning: run_dir"),
    ],
)
def test_a_run_directory_that_is_not_shared(
    fake: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, expected: str
) -> None:
    monkeypatch.setattr(host, "filesystem", lambda path: kind)
    expect(diagnose(make(tmp_path, {}), Slurm()), expected)
    # Where all nodes are one machine, every filesystem will do.
    fake.set(nodes=[f"node{n}|main*|idle|8|64000|127.0.0.1|gpu:4" for n in range(4)])
    assert not [line for line in bad(diagnose(make(tmp_path, {}), Slurm())) if "run_dir" in line]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("exec sleep 60", "warning: site.setup: not checked: .*timed out after 0.1 seconds"),
        ("kill -9 $$", "error: site.setup: bash cannot read it: it ended with code -9"),
    ],
)
def test_a_bash_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, expected: str
) -> None:
    bash = tmp_path / "bash"
    bash.write_text(f"#!/bin/sh\n{script}\n")
    bash.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    if "sleep" in script:
        monkeypatch.setattr(host, "SETUP_TIMEOUT_S", 0.1)
    expect(list(host.check_settings(make(tmp_path, site(setup=["module purge"])))), expected)


def test_names_of_filesystems() -> None:
    assert all(map(host.shared, ("nfs4", "lustre", "gpfs", "beegfs", "fuse.glusterfs", "ceph", "wekafs")))
    assert not any(map(host.shared, ("ext4", "tmpfs", "xfs", "fuse.sshfs", "")))
    assert host.filesystem(Path("/proc/self")) == "proc"


class Room:
    """As statvfs answers."""

    f_frsize, f_bavail, f_files, f_favail = 4096, 1 << 30, 1 << 20, 1 << 20


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({"f_bavail": 1000}, "error: run_dir: .* GiB free"), ({"f_favail": 5}, "error: run_dir: .* has 5 inodes left")],
)
def test_a_full_disk(
    fake: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict, expected: str
) -> None:
    room = type("Full", (Room,), changes)
    monkeypatch.setattr(host.os, "statvfs", lambda path: room)
    expect(diagnose(make(tmp_path, {}), None), expected)


def test_a_umask_against_oneself(fake: FakeSlurm, tmp_path: Path) -> None:
    before = os.umask(0o377)
    try:
        found = list(host.check_disk(make(tmp_path, {}), False))
    finally:
        os.umask(before)
    expect(found, "error: umask: found 0377")


def test_a_run_directory_of_another(fake: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    monkeypatch.setattr(host.os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    expect(list(host.check_disk(make(tmp_path, {}), False)), "error: run_dir: .* belongs to uid")


def probe(**changes: Any) -> dict[str, Any]:
    return {"problems": [], "seen": ["a", "b"], "skew_s": {}} | changes


@pytest.mark.parametrize(
    ("reports", "state", "expected"),
    [
        ({}, "PENDING", "warning: nodes of all groups: not checked, as 2 nodes were not free"),
        ({}, "", "error: nodes of all groups: the probe left no log .*no report in .*see site.modules"),
        ({"a": probe(seen=["a"]), "b": probe()}, "", "error: run_dir: node a does not see what b renamed"),
        ({"a": probe()}, "", "error: run_dir: 2 nodes were probed, a reported"),
        ({"a": probe(skew_s={"b": 7.0}), "b": probe()}, "", r"warning: clock: b is \+7.0 s off a"),
        ({"a": probe(problems=["ports: cannot reach b"]), "b": probe()}, "", "error: node a: ports: cannot reach b"),
    ],
)
def test_what_the_nodes_report(tmp_path: Path, reports: dict, state: str, expected: str) -> None:
    expect(list(deep.judge(reports, 2, state, tmp_path)), expected)


def test_two_processes_of_this_host_try_the_planes(tmp_path: Path) -> None:
    found = diagnose(make(tmp_path, {"layout": "local", "queue": {"planes": {"shm": "required"}}}), None, deep=True)
    assert bad(found) == []
    table = [line.split()[:5] for line in found[-1].detail.splitlines()[1:]]
    pairs = [["process-1", "process-2"], ["process-2", "process-1"]]
    assert sorted(table)[::2] == [[*pair, "shm", "ok", "*"] for pair in pairs]
    assert [row[:4] for row in sorted(table)[1::2]] == [[*pair, "tcp", "ok"] for pair in pairs]


def test_planes_that_fail_between_nodes_are_told() -> None:
    trials = [Trial("a", "b", name, False, 0.0, why="no way") for name in ("shm", "rdma", "tcp")]
    modes = {"shm": "required", "rdma": "required", "tcp": "auto"}
    problems = bad(list(judge_planes(trials, modes, several_nodes=True)))
    assert problems == [
        "error: queue.planes: plane rdma is required, but a cannot read b by it: no way",
        "warning: queue.planes: a reads b by none of them; rows will pass through files",
    ]
    assert list(judge_planes([], modes, several_nodes=True)) == []


def test_a_probe_that_cannot_be_submitted_leaves_nothing(fake: FakeSlurm, tmp_path: Path) -> None:
    fake.answer("sbatch", err="sbatch: error: closed today\n", code=1, match="--parsable")
    expect(diagnose(make(tmp_path, {}), Slurm(), deep=True), "warning: nodes: not checked: .*closed today")
    assert not list(tmp_path.glob(".relax-doctor*"))


def test_no_probe_where_there_are_errors(fake: FakeSlurm, tmp_path: Path) -> None:
    found = diagnose(make(tmp_path, site(partition="nope")), Slurm(), deep=True)
    expect(found, "warning: nodes: not probed")
    assert fake.calls("sbatch") == []


def test_what_is_printed(fake: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(make(tmp_path, {}), deep=False, as_json=True) == 0
    assert json.loads(capsys.readouterr().out)[0] == {"severity": "ok", "text": "settings: no mistakes"}
    assert doctor.main(make(tmp_path, site(partition="nope")), deep=False, as_json=False) == 78
    assert "error    site.partition: found 'nope', allowed: main" in capsys.readouterr().out


def test_the_tried_versions_are_named() -> None:
    assert "22.05" in cluster.TRIED_VERSIONS


@pytest.fixture
def real(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    """The commands, talking to a real Slurm."""
    monkeypatch.setenv("SLURM_CONF", str(request.getfixturevalue("sandbox").conf))
    return Slurm()


def test_a_good_run_on_a_real_slurm(real: Slurm, tmp_path: Path) -> None:
    """From its nodes too, which run for this by themselves."""
    found = diagnose(make(tmp_path, site(interface="lo", sbatch_on_nodes=True)), real, deep=True)
    assert [finding.text for finding in found if finding.severity == "error"] == []
    assert any(finding.text.startswith("nodes node1, node2 (hub") for finding in found), found
    (table,) = [finding.detail.splitlines() for finding in found if finding.text.startswith("planes: ")]
    assert {tuple(line.split()[:2]) for line in table[1:]} == {("node1", "node2"), ("node2", "node1")}
    assert not list(tmp_path.glob(".relax-doctor*"))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            group("actor", nodes=50) | {"actor": {"parallel": {"data": 50}}},
            "error: groups.actor.* in partition main: 12",
        ),
        (site(gpu_request="gres") | group("actor", gpus_per_node=3), "error: groups.actor.*3, .* at most 2 GPUs"),
        (group("actor", memory="5G"), "error: groups.actor.resources.memory: .* at most 4000M"),
        (group("actor", cpus_per_task=9), "error: groups.actor.resources.cpus_per_task: .* at most 8"),
        (site(partition="big"), "error: site.partition: found 'big', allowed: main"),
        (site(options={"constraint": "h100"}), "error: run.sbatch: sbatch --test-only refuses it"),
        (site(options={"reservation": "none"}), "error: run.sbatch: sbatch --test-only refuses it"),
    ],
)
def test_a_bad_run_on_a_real_slurm(real: Slurm, tmp_path: Path, changes: dict, expected: str) -> None:
    expect(diagnose(make(tmp_path, merged(site(interface="lo"), changes)), real), expected)


@pytest.mark.slurm
def test_a_node_of_every_kind_is_looked_at(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Of two partitions; and MPI between nodes whose groups have ranks."""
    lines = ("PartitionName=thin Nodes=node[1-2]", "PartitionName=main Nodes=node[3-4] Default=YES")
    with private_sandbox(nodes=4, gpus=0, extra=lines) as own, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(own.conf))
        changes = site(interface="lo", hub_partition="thin") | {"actor": {"parallel": {"data": 2}}}
        found = diagnose(make(tmp_path, changes), Slurm(), deep=True)
        assert [finding.text for finding in found if finding.severity == "error"] == []
        texts = [finding.text for finding in found]
        assert any(re.match(r"nodes node1, node2 \(hub\): see each other's", text) for text in texts), texts
        assert any(re.match(r"nodes node3 \(rollout, actor.*\): see each other's", text) for text in texts), texts
        broken = merged(changes, site(mpi={"library": __file__}))
        expect(list(deep.check_nodes(make(tmp_path, broken), Slurm())),
               rf"error: MPI_Init did not succeed \(.*site.mpi.library \(found {__file__}\)")  # fmt: skip
        broken = merged(changes, site(setup=["echo a line of the site fails; exit 3"]))
        expect(list(deep.check_nodes(make(tmp_path, broken), Slurm())),
               "error: nodes of hub: the probe said: a line of the site fails")  # fmt: skip
        assert not own.client("squeue", "--noheader", "--states=PD,R") and not list(tmp_path.glob(".relax*"))


def test_nodes_without_the_interface(real: Slurm, tmp_path: Path) -> None:
    found = diagnose(make(tmp_path, site(interface="ib77")), real, deep=True)
    expect(found, "error: node node[12]: site.interface: found 'ib77', allowed on host")
