"""Pre-flights where the roles will run: on nodes of a real Slurm, with their MPI, and inside of
real containers."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.sandbox import Sandbox
from relax_hpc.cluster.sandbox.config_files import open_mpi
from relax_hpc.cluster.sandbox.processes import until
from relax_hpc.cluster.slurm import node_check
from relax_hpc.cluster.slurm.allocation import Allocation, GroupNodes
from relax_hpc.cluster.slurm.commands import Slurm
from relax_hpc.cluster.slurm.mpi import mpi_plugin
from relax_hpc.cluster.slurm.node_check import check_nodes, read_reports
from relax_hpc.cluster.slurm.node_probe import BadNodes
from relax_hpc.cluster.slurm.steps import StepLauncher, step_environment
from relax_hpc.cluster.supervise.disk_watch import DiskWatch
from relax_hpc.cluster.supervise.failures import Failures
from relax_hpc.cluster.supervise.group_table import GroupTable
from relax_hpc.cluster.supervise.launch_records import UNKNOWN, Launch, record_launch
from relax_hpc.cluster.supervise.requests import read_stop_request
from relax_hpc.cluster.supervise.starts import GroupStarts
from relax_hpc.cluster.supervise.wakeups import Wakeups
from relax_hpc.commands.snapshot import take_snapshot
from relax_hpc.config import load
from relax_hpc.config.load import dump
from relax_hpc.net.rendezvous.roster import claim_incarnation
from tests.helpers.containers import PYTHON, install, make_image
from tests.requirements import requires

requires("mpi")

pytestmark = pytest.mark.run
WHEEL = {"launcher": "pmi2", "library": "wheel"}


@pytest.fixture
def job(sandbox: Sandbox) -> Iterator[str]:
    """Two nodes for a while."""
    found = sandbox.client(
        "sbatch", "--parsable", "--nodes=2", "--output=/dev/null", "--wrap=sleep 120"
    ).strip()
    words = ("squeue", "--noheader", "--format=%T", f"--jobs={found}")
    until(lambda: "RUNNING" in sandbox.client(*words), 30.0, "the job does not start")
    yield found
    sandbox.client("scancel", found)
    until(lambda: not sandbox.client("squeue", "--noheader").strip(), 30.0, "the job does not end")


def look(
    sandbox: Sandbox, job: str, folder: Path, monkeypatch: pytest.MonkeyPatch, site: dict[str, Any]
) -> tuple[str, RunDir]:
    """Why a group of two ranks on two nodes must not start there; empty: it may."""
    folder.mkdir()
    groups = {"actor": {"resources": {"nodes": 2}}}
    config = load([sandbox.site], {"layout": "jobs", "groups": groups, "actor.parallel.data": 2})
    for name, value in site.items():
        if isinstance(value, dict):
            for key, one in value.items():
                setattr(getattr(config.site, name), key, one)
        else:
            setattr(config.site, name, value)
    run = RunDir(folder)
    dump(config, run.config)
    take_snapshot(run)
    # As the head has it, which the batch script starts.
    monkeypatch.setenv("SLURM_CONF", str(sandbox.conf))
    monkeypatch.setenv("PYTHONPATH", str(run.code))
    launcher = StepLauncher(
        run,
        config,
        Slurm(),
        Allocation(job, 0, "node1", {"actor": GroupNodes(job, 2)}),
        lambda: None,
    )
    failure = check_nodes(launcher, ["actor"]).get("actor")
    return failure.reason if failure else "", run


def test_what_is_no_report_is_left_alone() -> None:
    report = {"node": "n1", "problems": [], "ok": True}
    output = (
        f'{{ welcome to the cluster }}\n{json.dumps(report)}\n{{"half": \n[1]\n7\nsrun: '
        "error: a word\n"
    )
    found, rest = read_reports(output)
    assert (
        found == [report]
        and rest.split("\n")[-1] == "srun: error: a word"
        and len(rest.split("\n")) == 5
    )


def test_a_step_that_hangs_ends_at_the_deadline_with_what_it_has_said() -> None:
    """The pipe stays open in a process that outlives the first kill, as srun's second one may."""
    words = ["bash", "-c", "echo said; trap '' TERM; sleep 300 & wait"]
    step = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node_check, "_END_S", 0.2)
        found = node_check._read_output(
            node_check.NodeCheck("actor", load([]), step, time.monotonic() + 0.2, False)
        )
    assert found == ("said\n", True) and step.poll() is not None


HANGS = """
echo x >> %s
calls=$(wc -l < %s)
report='{"node": "n1", "problems": [], "ok": true}'
if (( calls <= %d )); then printf '%%s\\nmpi/pmi2: no cmd in req\\n' "$report"; exec sleep 300; fi
printf '%%s\\n%%s\\n' "$report" '{"node": "n1", "mpi": {"ranks": 1, "library": "MPICH"}}'
"""


@pytest.mark.parametrize("hangs", [1, 2])
def test_an_mpi_that_hangs_is_tried_again_and_ends_by_its_own_deadline(
    hangs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by that of an image that may have to be fetched: by then the nodes have reported, from
    inside of it."""
    for name in ("_MPI_S", "_LOOK_S", "_END_S"):
        monkeypatch.setattr(node_check, name, 0.2)
    monkeypatch.setattr(node_check, "needs_mpi", lambda config, name: True)
    monkeypatch.setattr(node_check, "container_command", lambda config, run_dir: [])
    config = load(
        [], {"layout": "jobs", "site.container.runtime": "apptainer", "site.mpi.launcher": "pmi2"}
    )
    dump(config, RunDir(tmp_path).config)
    calls = tmp_path / "calls"
    words = ["bash", "-c", HANGS % (calls, calls, hangs)]
    allocation = SimpleNamespace(group_nodes={"actor": GroupNodes("1", 1)})
    launcher: Any = SimpleNamespace(
        run=RunDir(tmp_path),
        allocation=allocation,
        srun_on_nodes=lambda _: words,
        nodes_of=lambda _: ["n1"],
    )
    said = check_nodes(launcher, ["actor"])
    assert len(calls.read_text().split()) == 2
    if hangs == 1:
        assert said == {}
    else:
        line = said["actor"].reason
        assert line.startswith(
            "MPI_Init did not succeed (mpi/pmi2: no cmd in req); see site.mpi.launcher (found pmi2)"
        )
        assert "\n" not in line and not BadNodes(launcher.run).records()


def test_what_a_site_says_in_another_encoding_ends_nothing(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    dump(load([]), run.config)
    said = ["bash", "-c", r"printf 'f\374r heute\n'"]
    allocation = SimpleNamespace(group_nodes={"actor": GroupNodes("1", 1)})
    launcher: Any = SimpleNamespace(
        run=run, allocation=allocation, srun_on_nodes=lambda place: said
    )
    assert "r heute" in check_nodes(launcher, ["actor"])["actor"].reason


OLD_LIBC = "glibc 2.28 found, 2.34 needed by sglang 0.5.21: use site.container"


def permanent_report(node: str, *permanent: str) -> str:
    """Report of a node that lacks a minimum requirement, or of a good one."""
    problems = list(permanent)
    report = {"node": node, "problems": problems, "ok": not problems}
    return json.dumps(report | {"permanent_problems": problems})


def launcher_with_reports(run: RunDir, nodes_by_group: dict[str, list[str]], bad: str) -> Any:
    """A launcher whose nodes report `OLD_LIBC` if their names are in ``bad``."""
    groups = {name: GroupNodes("1", len(nodes)) for name, nodes in nodes_by_group.items()}

    def srun_on_nodes(group: GroupNodes) -> list[str]:
        (name,) = (name for name, nodes in groups.items() if nodes is group)
        lines = [
            permanent_report(node, *([OLD_LIBC] if node in bad.split() else []))
            for node in nodes_by_group[name]
        ]
        return [sys.executable, "-c", f"print({chr(10).join(lines)!r})"]

    return SimpleNamespace(
        run=run,
        allocation=SimpleNamespace(group_nodes=groups),
        srun_on_nodes=srun_on_nodes,
        nodes_of=lambda name: nodes_by_group[name],
    )


@pytest.mark.parametrize(
    ("nodes_by_group", "bad", "hopeless"),
    [
        ({"actor": ["n1", "n2"]}, "n1 n2", ["actor"]),
        # Other nodes may be newer.
        ({"actor": ["n1", "n2"]}, "n1", []),
        ({"actor": ["n1"]}, "n1", []),
        ({"actor": ["n1"], "rollout": ["n2"]}, "n1", []),
        # All nodes of the run.
        ({"actor": ["n1"], "rollout": ["n2"]}, "n1 n2", ["actor", "rollout"]),
        ({"actor": ["n1"], "rollout": ["n2", "n3"]}, "n2 n3", ["rollout"]),
    ],
)
def test_nodes_that_all_lack_a_requirement_are_not_replaced(
    nodes_by_group: dict[str, list[str]], bad: str, hopeless: list[str], tmp_path: Path
) -> None:
    run = RunDir(tmp_path)
    dump(load([], {"layout": "jobs"}), run.config)
    launcher = launcher_with_reports(run, nodes_by_group, bad)
    failures = check_nodes(launcher, list(nodes_by_group))
    assert [name for name, failure in failures.items() if failure.is_hopeless] == hopeless
    failing = {name for name, nodes in nodes_by_group.items() if {*nodes} & {*bad.split()}}
    assert set(failures) == failing
    for name in hopeless:
        nodes = " ".join(nodes_by_group[name])
        assert failures[name].reason == f"{nodes}: {OLD_LIBC}"


def test_a_single_node_counts_when_its_successor_lacks_the_same(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    dump(load([], {"layout": "jobs"}), run.config)
    for number in (1, 2):
        launcher = launcher_with_reports(run, {"actor": [f"n{number}"]}, f"n{number}")
        failure = check_nodes(launcher, ["actor"])["actor"]
        assert failure.is_hopeless == (number == 2)
        # As `GroupStarts.refuse_start` records it.
        record_launch(run, "actor", claim_incarnation(run, "actor"), Launch(1, UNKNOWN))
    # The group has started since then.
    incarnation = claim_incarnation(run, "actor")
    record_launch(run, "actor", incarnation, Launch(1, UNKNOWN, allocation="7-0"))
    failure = check_nodes(launcher, ["actor"])["actor"]
    assert failure.reason and not failure.is_hopeless


def test_a_group_that_no_node_can_run_ends_the_run(tmp_path: Path) -> None:
    run, config = RunDir(tmp_path), load([], {"layout": "jobs"})
    table = GroupTable(run, config, ["actor"])
    table.hopeless.add("actor")
    disk = DiskWatch(run, 60.0, print, 60.0)
    failures = Failures(run, config, 1, lambda: UNKNOWN, disk)
    launcher: Any = SimpleNamespace()
    starts = GroupStarts(
        run, config, table, lambda _: launcher, failures, Wakeups(print), print, print
    )
    reason = f"n1 n2: {OLD_LIBC}"
    with pytest.raises(ConfigError) as caught:
        starts.refuse_start("actor", reason)
    assert str(caught.value) == f"actor: no node can run it: {reason}"
    request = read_stop_request(run)
    assert (request["code"], request["reason"]) == (78, str(caught.value)), (
        "supervisors of other groups stop too, and no job is submitted again"
    )


def test_nodes_that_are_well_and_programs_that_are_not(
    sandbox: Sandbox, job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert look(sandbox, job, tmp_path / "well", monkeypatch, {})[0] == ""
    said, run = look(
        sandbox, job, tmp_path / "python", monkeypatch, {"python": "/usr/bin/false-python"}
    )
    assert said.startswith("the pre-flight could not run (") and "see site.python" in said
    assert "false-python" in said and BadNodes(run).records() == [], "no node is to blame"


def test_mpi_that_the_launcher_does_not_speak_names_the_settings(
    sandbox: Sandbox, job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert look(sandbox, job, tmp_path / "pmi2", monkeypatch, {"mpi": WHEEL})[0] == ""
    missing = {"launcher": "pmi2", "library": "/nowhere/libmpi.so"}
    said, _ = look(sandbox, job, tmp_path / "missing", monkeypatch, {"mpi": missing})
    assert (
        "MPI_Init did not succeed" in said and "site.mpi.library (found /nowhere/libmpi.so)" in said
    )
    if open_mpi():
        mixed = {"launcher": "pmi2", "library": open_mpi()}
        said, _ = look(sandbox, job, tmp_path / "mixed", monkeypatch, {"mpi": mixed})
        assert "MPI" in said and "site.mpi.launcher (found pmi2)" in said and open_mpi() in said


def test_what_ranks_leave_with_slurm_fits_into_its_lines(
    sandbox: Sandbox, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pmi2 plugin cuts what is longer than 1,024 bytes, and MPI_Init waits for ever."""
    config = load([sandbox.site], {"layout": "jobs", "actor.parallel.data": 2, "site.mpi": WHEEL})
    monkeypatch.setenv("SLURM_CONF", str(sandbox.conf))
    code = "from relax_hpc.cluster.slurm.mpi import try_mpi; print(try_mpi()['ranks'])"
    words = [
        "srun",
        f"--jobid={job}",
        "--overlap",
        "--mem=0",
        "--nodes=2",
        "--ntasks=2",
        f"--mpi={mpi_plugin(config)}",
    ]
    # MPICH then says what it sends.
    env = step_environment(config, "actor") | {
        "PMI_DEBUG": "1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    done = subprocess.run(
        [*words, sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=100
    )
    sent = [line.partition(" pmi: ")[2] for line in done.stderr.splitlines() if " cmd=put " in line]
    assert done.stdout.split() == ["2", "2"] and len(sent) >= 2, done.stderr
    assert max(map(len, sent)) < 512, sent


def test_a_pre_flight_runs_in_the_container_of_the_roles(
    sandbox: Sandbox, job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requires("bubblewrap")
    program = install(tmp_path / "bin")
    (tmp_path / "local").mkdir()
    container = {"runtime": "apptainer", "program": str(program), "python": PYTHON}
    site = {"mpi": WHEEL, "local_dir": str(tmp_path / "local"), "env": {}, "python": sys.executable}
    good = site | {"container": container | {"image": str(make_image(tmp_path / "image"))}}
    said, run = look(sandbox, job, tmp_path / "inside", monkeypatch, good)
    assert said == ""
    calls = [json.loads(line) for line in (tmp_path / "bin" / "calls").read_text().splitlines()]
    assert len(calls) == 2 and all(
        f"--bind={run.root}" in call and PYTHON in call for call in calls
    )
    empty = site | {
        "container": container | {"image": str(make_image(tmp_path / "empty", python=False))}
    }
    said, run = look(sandbox, job, tmp_path / "without", monkeypatch, empty)
    assert said.startswith(f"site.container.python: found {PYTHON}, which the image")
    assert "\n" not in said
