"""`relax-hpc doctor`: settings, programs, disks and nodes, without a Slurm or on one made up; then
on a real one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.cluster.slurm.commands import Slurm
from relax_hpc.net.transport.plane_check import PlaneTrial
from relax_hpc.ops.doctor import cluster, deep, doctor, host, job
from relax_hpc.ops.doctor.doctor import diagnose
from relax_hpc.ops.doctor.planes import judge_planes
from tests.helpers.doctor_helpers import bad, expect, fake_fixture, group, make, site  # noqa: F401
from tests.helpers.fake_slurm import FakeSlurm
from tests.helpers.run_helpers import merged
from tests.helpers.slurm_sandbox import private_sandbox
from tests.requirements import requires

requires("mpi")
PLAIN_MISTAKES = [
    (site(account="YOUR-gpu"), "error: site.account: found the placeholder 'YOUR-gpu'"),
    (
        group("hub", options={"account": "YOUR-cpu"}),
        "error: groups.hub.resources.options.account: found the placeholder 'YOUR-cpu'",
    ),
    (
        group("hub", memory="16G"),
        "error: groups.rollout.resources.memory: found none, but groups.hub states one, which "
        "sbatch passes on",
    ),
    (
        site(container={"runtime": "apptainer", "image": "/"}, mpi={"launcher": "pmix"}),
        "error: site.mpi.launcher: found pmix with container runtime apptainer",
    ),
    (
        {"rollout": {"groups_per_request": 64}},
        "warning: rollout.groups_per_request: found 64, .* raise max_staleness",
    ),
    (
        {"actor": {"parallel": {"data": 64}}, "algorithm": {"mini_batches": 32}},
        "error: actor.parallel.data: found 64",
    ),
    (
        {"model": {"path": "/nowhere"}},
        "error: model.path: found '/nowhere', which is not a directory",
    ),
    (
        group("actor", gpus_per_node=1),
        "error: groups.actor.resources.gpus_per_node: found 1 with model.device cpu",
    ),
    (
        group("actor", gpus_per_node=1),
        "warning: site.gpu_request: found none, so the 1 GPUs per node of groups.actor",
    ),
    (
        site(setup=["module purge", "export A='b"]),
        "error: site.setup: bash cannot parse it: .*line 2: unexpected EOF",
    ),
    (
        site(srun_options={"mpi": "none"}),
        "error: site.srun_options.mpi: .* set site.mpi.launcher instead",
    ),
    (
        site(local_dir="scratch"),
        "error: site.local_dir: found 'scratch', allowed: an absolute path",
    ),
    ({"slurm": {"time": "4", "signal_s": 300}}, "error: slurm.signal_s: found 300"),
    (
        site(options={"nodes": "3"}),
        "error: site.options.nodes: found '3', but it is set by relax_hpc",
    ),
    ({"slurm": {"one_node_hub": True}}, "warning: slurm.one_node_hub: found true"),
    (
        site(cpu_nodes=False),
        "error: groups..*.resources.nodes: found 1 for component 0 of a het job",
    ),
    ({"slurm": {"successors": 0}}, "warning: slurm.successors: found 0"),
    (
        site(sbatch_on_nodes=False),
        "warning: groups.actor.spares: found 0 with site.sbatch_on_nodes false",
    ),
    (
        site(sbatch_on_nodes=False) | {"groups": {"rollout": {"on_failure": "resubmit"}}},
        "error: groups.rollout.spares: found 0",
    ),
    (
        site(python="/nowhere/python"),
        "error: site.python: found '/nowhere/python', which is not a program",
    ),
    (site(python="/bin/true"), "error: site.python: found '/bin/true', allowed: Python"),
    (
        site(mpi={"launcher": "pmix", "library": "wheel"}),
        "error: site.mpi.library: found wheel with launcher pmix",
    ),
    (
        site(mpi={"library": "/nowhere/libmpi.so"}),
        "error: site.mpi.library: found '/nowhere/libmpi.so', allowed: the path",
    ),
    (
        site(mpi={"launcher": "mpiexec"}) | {"actor": {"parallel": {"data": 2}}},
        "error: site.mpi.launcher: found mpiexec, but actor of groups.actor has 2 ranks, allowed: "
        "1; use pmix or pmi2",
    ),
    (
        site(container={"image": "/x.sif"}),
        "warning: site.container.image: found '/x.sif' with runtime none",
    ),
    (
        site(container={"runtime": "apptainer"}),
        "error: site.container.image: found nothing with runtime apptainer",
    ),
    (
        site(container={"runtime": "apptainer", "image": "/no/x.sif"}),
        "error: site.container.image: .*cannot read",
    ),
    (
        site(container={"runtime": "apptainer", "image": "/no/x.sif"}),
        "warning: site.container.program: apptainer is not",
    ),
    (
        site(container={"runtime": "apptainer", "image": "docker://x"}),
        "warning: site.container.image: .* not checked",
    ),
    (
        {"run_dir": "/tmp/" + "/".join(["x" * 100] * 12)},
        "error: run_dir: found a path of 1216 bytes",
    ),
]


@pytest.mark.parametrize(("changes", "expected"), PLAIN_MISTAKES)
def test_settings_layout_and_programs(
    fake: FakeSlurm, tmp_path: Path, changes: dict, expected: str
) -> None:
    expect(diagnose(make(tmp_path, changes), None), expected)


def test_mpi_is_tried_where_ranks_need_it(tmp_path: Path) -> None:
    ranks = {"layout": "jobs", "actor": {"parallel": {"data": 2}}}
    assert not [
        line for line in bad(list(host.check_programs(make(tmp_path, ranks)))) if "MPI" in line
    ]
    broken = merged(ranks, site(mpi={"library": __file__}))
    says = (
        "error: site.mpi.library: found .*, which ranks cannot load .*; name the "
        "libmpi.so of an MPI, or wheel"
    )
    expect(list(host.check_programs(make(tmp_path, broken))), says)
    alone = merged(broken, {"actor": {"parallel": {"data": 1}}})
    assert not [
        line
        for line in bad(list(host.check_programs(make(tmp_path, alone))))
        if "ranks cannot load" in line
    ]


@pytest.mark.parametrize(
    ("soname", "launcher"), [("libmpi.so.40.30.4", "pmi2"), ("libmpi.so.12.1.1", "pmix")]
)
def test_mpi_libraries_that_do_not_pair(
    fake: FakeSlurm, tmp_path: Path, soname: str, launcher: str
) -> None:
    (tmp_path / soname).touch()
    (tmp_path / "libmpi.so").symlink_to(soname)
    pair = {"launcher": launcher, "library": str(tmp_path / "libmpi.so")}
    expect(
        diagnose(make(tmp_path, site(mpi=pair)), None),
        f"(error|warning): site.mpi.launcher: found {launcher} with",
    )


def test_a_python_without_the_packages(fake: FakeSlurm, tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f"#!/bin/sh\nexec '{sys.executable}' -I -S \"$@\"\n")
    bare.chmod(0o755)
    expect(
        diagnose(make(tmp_path, site(python=str(bare))), None),
        "error: site.python: .* lacks relax_hpc, mpi4py",
    )


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("tmpfs", "error: run_dir: found .* on tmpfs"),
        ("ext4", "warning: run_dir: found .* on ext4"),
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
        ("kill -9 $$", "error: site.setup: bash cannot parse it: bash ended with code -9"),
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
    assert all(
        map(
            host.is_shared, ("nfs4", "lustre", "gpfs", "beegfs", "fuse.glusterfs", "ceph", "wekafs")
        )
    )
    assert not any(map(host.is_shared, ("ext4", "tmpfs", "xfs", "fuse.sshfs", "")))
    assert host.filesystem(Path("/proc/self")) == "proc"


class Room:
    """As statvfs answers."""

    f_frsize, f_bavail, f_files, f_favail = 4096, 1 << 30, 1 << 20, 1 << 20


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"f_bavail": 1000}, "error: run_dir: .* GiB free"),
        ({"f_favail": 5}, "error: run_dir: found 5 free inodes"),
    ],
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


def test_a_run_directory_of_another(
    fake: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    monkeypatch.setattr(host.os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    expect(list(host.check_disk(make(tmp_path, {}), False)), "error: run_dir: found .* of uid")


def probe(**changes: Any) -> dict[str, Any]:
    return {"problems": [], "seen": ["a", "b"], "skew_s": {}} | changes


@pytest.mark.parametrize(
    ("reports", "state", "expected"),
    [
        ({}, "PENDING", "warning: nodes of all groups: not checked; 2 nodes were not free"),
        (
            {},
            "",
            "error: nodes of all groups: the probe left no log .*no report in .*see site.modules",
        ),
        (
            {"a": probe(seen=["a"]), "b": probe()},
            "",
            "error: run_dir: node a does not see files that b renamed",
        ),
        ({"a": probe()}, "", "error: run_dir: found reports of a only, but 2 nodes were probed"),
        ({"a": probe(skew_s={"b": 7.0}), "b": probe()}, "", r"warning: clock: b is \+7.0 s off a"),
        (
            {"a": probe(problems=["ports: cannot reach b"]), "b": probe()},
            "",
            "error: node a: ports: cannot reach b",
        ),
    ],
)
def test_what_the_nodes_report(tmp_path: Path, reports: dict, state: str, expected: str) -> None:
    expect(list(deep.judge_reports(reports, 2, state, tmp_path)), expected)


def test_two_processes_of_this_host_try_the_planes(tmp_path: Path) -> None:
    found = diagnose(
        make(tmp_path, {"layout": "local", "queue": {"planes": {"shm": "required"}}}),
        None,
        deep=True,
    )
    assert bad(found) == []
    table = [line.split()[:5] for line in found[-1].detail.splitlines()[1:]]
    pairs = [["process-1", "process-2"], ["process-2", "process-1"]]
    assert sorted(table)[::2] == [[*pair, "shm", "ok", "*"] for pair in pairs]
    assert [row[:4] for row in sorted(table)[1::2]] == [[*pair, "tcp", "ok"] for pair in pairs]


def test_planes_that_fail_between_nodes_are_told() -> None:
    trials = [
        PlaneTrial("a", "b", name, False, 0.0, why="no way") for name in ("shm", "rdma", "tcp")
    ]
    modes = {"shm": "required", "rdma": "required", "tcp": "auto"}
    problems = bad(list(judge_planes(trials, modes, several_nodes=True)))
    assert problems == [
        "error: queue.planes: plane rdma is required, but a cannot read b by it: no way",
        "warning: queue.planes: no plane lets a read from b; rows will pass through files",
    ]
    assert list(judge_planes([], modes, several_nodes=True)) == []


def test_a_probe_that_cannot_be_submitted_leaves_nothing(fake: FakeSlurm, tmp_path: Path) -> None:
    fake.answer("sbatch", err="sbatch: error: closed today\n", code=1, match="--parsable")
    expect(
        diagnose(make(tmp_path, {}), Slurm(), deep=True),
        "warning: nodes: not checked: .*closed today",
    )
    assert not list(tmp_path.glob(".relax-doctor*"))


def test_no_probe_where_there_are_errors(fake: FakeSlurm, tmp_path: Path) -> None:
    found = diagnose(make(tmp_path, site(partition="nope")), Slurm(), deep=True)
    expect(found, "warning: nodes: not probed")
    assert fake.calls("sbatch") == []


def test_what_is_printed(
    fake: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor.main(make(tmp_path, {}), deep=False, as_json=True) == 0
    assert json.loads(capsys.readouterr().out)[0] == {
        "severity": "ok",
        "text": "settings: no mistakes",
    }
    assert doctor.main(make(tmp_path, site(partition="nope")), deep=False, as_json=False) == 78
    assert "error    site.partition: found 'nope', allowed: main" in capsys.readouterr().out


@pytest.mark.parametrize(("python", "problems"), [("", 0), ("/no/such/python", 2)])
def test_a_node_is_asked_whether_programs_can_be_kept_apart(
    tmp_path: Path, python: str, problems: int
) -> None:
    tools = {
        "kind": "tools",
        "options": {"tools": {"python": {"python": python}, "search": {"corpus": "/corpus"}}},
    }
    rewards = {"rollout": {"reward": "code"}, "reward": {"code": {"python": python}}}
    config = make(tmp_path, {**rewards, "environment": tools})
    probe = job.Probe(("rollout",), 1, {}, tmp_path / "probe", mpi=False)
    probe.make_folder()
    [word] = [word for word in probe._arguments(config) if word.startswith("--code=")]
    assert "environment.options.tools.search.corpus=/corpus" in probe._arguments(config)
    assert not any(
        "--code" in word
        for word in job.Probe(("actor",), 1, {}, tmp_path, mpi=False)._arguments(config)
    )
    words = [
        *job.PROBE,
        f"--folder={probe.folder}",
        "--nodes=1",
        "--interfaces",
        "lo",
        "--name=here",
        word,
    ]
    subprocess.run([sys.executable, *words], check=True, timeout=60)
    lines = json.loads((probe.folder / "here.done.json").read_text())["problems"]
    keys = ("reward.code", "environment.options.tools.python")
    wrong = [
        f"{key}.python: found '{python}', which is no program on this node; name a Python "
        "interpreter"
        for key in keys
    ]
    assert lines == wrong[:problems]


def test_the_tried_versions_are_named() -> None:
    assert "22.05" in cluster.TRIED_VERSIONS


@pytest.fixture
def real(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    """The commands, talking to a real Slurm."""
    monkeypatch.setenv("SLURM_CONF", str(request.getfixturevalue("sandbox").conf))
    return Slurm()


def test_a_good_run_on_a_real_slurm(real: Slurm, tmp_path: Path) -> None:
    """From its nodes too, which run for this by themselves."""
    changes = site(interface="lo", sbatch_on_nodes=True) | {"rollout": {"reward": "code"}}
    found = diagnose(make(tmp_path, changes), real, deep=True)
    assert [finding.text for finding in found if finding.severity == "error"] == []
    assert any(finding.text.startswith("nodes node1, node2 (hub") for finding in found), found
    (table,) = [
        finding.detail.splitlines() for finding in found if finding.text.startswith("planes: ")
    ]
    assert {tuple(line.split()[:2]) for line in table[1:]} == {
        ("node1", "node2"),
        ("node2", "node1"),
    }
    assert not list(tmp_path.glob(".relax-doctor*"))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            group("actor", nodes=50) | {"actor": {"parallel": {"data": 50}}},
            "error: groups.actor.* in partition main: 12",
        ),
        (
            site(gpu_request="gres") | group("actor", gpus_per_node=3),
            "error: groups.actor.*3, .* at most 2 GPUs",
        ),
        (group("actor", memory="5G"), "error: groups.actor.resources.memory: .* at most 4000M"),
        (
            group("actor", cpus_per_task=9),
            "error: groups.actor.resources.cpus_per_task: .* at most 8",
        ),
        (site(partition="big"), "error: site.partition: found 'big', allowed: main"),
        (site(options={"constraint": "h100"}), "error: run.sbatch: sbatch --test-only rejects it"),
        (site(options={"reservation": "none"}), "error: run.sbatch: sbatch --test-only rejects it"),
    ],
)
def test_a_bad_run_on_a_real_slurm(
    real: Slurm, tmp_path: Path, changes: dict, expected: str
) -> None:
    expect(diagnose(make(tmp_path, merged(site(interface="lo"), changes)), real), expected)


@pytest.mark.slurm
def test_a_node_of_every_kind_is_looked_at(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Of two partitions; and MPI between nodes whose groups have ranks."""
    lines = ("PartitionName=thin Nodes=node[1-2]", "PartitionName=main Nodes=node[3-4] Default=YES")
    with (
        private_sandbox(nodes=4, gpus=0, extra=lines) as own,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("SLURM_CONF", str(own.conf))
        changes = site(interface="lo", hub_partition="thin") | {"actor": {"parallel": {"data": 2}}}
        found = diagnose(make(tmp_path, changes), Slurm(), deep=True)
        assert [finding.text for finding in found if finding.severity == "error"] == []
        texts = [finding.text for finding in found]
        assert any(
            re.match(r"nodes node1, node2 \(hub\): see each other's", text) for text in texts
        ), texts
        assert any(
            re.match(r"nodes node3 \(rollout, actor.*\): see each other's", text) for text in texts
        ), texts
        broken = merged(changes, site(mpi={"library": __file__}))
        expect(list(deep.check_nodes(make(tmp_path, broken), Slurm())),
               r"error: MPI_Init did not succeed \(.*site.mpi.library \(found "
               rf"{__file__}\)")  # fmt: skip
        broken = merged(changes, site(setup=["echo a line of the site fails; exit 3"]))
        expect(list(deep.check_nodes(make(tmp_path, broken), Slurm())),
               "error: nodes of hub: the probe printed: a line of the site fails")  # fmt: skip
        assert not own.client("squeue", "--noheader", "--states=PD,R") and not list(
            tmp_path.glob(".relax*")
        )


def test_nodes_without_the_interface(real: Slurm, tmp_path: Path) -> None:
    found = diagnose(make(tmp_path, site(interface="ib77")), real, deep=True)
    expect(found, "error: node node[12]: site.interface: found 'ib77', allowed on host")
