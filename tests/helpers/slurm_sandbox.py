"""A real Slurm for tests: one of eight nodes for the whole session, and small private ones."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from relax_hpc.cluster.sandbox import Options, Sandbox, cluster, machine
from tests.guardian import session_folder
from tests.requirements import requires

PREFIX_VARIABLE = "RELAX_SLURM_PREFIX"
"""Environment variable with the prefix of a Slurm built from source, which all tests on a real
Slurm then use instead of the installed one: `RELAX_SLURM_PREFIX=/opt/slurm env/test.sh --all`."""
QUICK = {"slurmd_timeout": 10, "kill_wait": 3, "cred_expire": 6}
"""Timing under which a dead node, a kill and a requeue take seconds."""


def requires_sandbox() -> None:
    """Skip unless Slurm's daemons are here too; fail where RELAX_REQUIRE names slurm."""
    requires("slurm")
    if lacking := machine.missing():
        what = f"Slurm's daemons, found no {', '.join(lacking)}"
        if "slurm" in os.environ.get("RELAX_REQUIRE", "").split(","):
            pytest.fail(f"RELAX_REQUIRE names slurm, but it is not whole: {what}", pytrace=False)
        pytest.skip(f"needs {what}", allow_module_level=True)


@contextmanager
def private_sandbox(**changes: Any) -> Iterator[Sandbox]:
    """A sandbox of two nodes, or as `changes` to Options say, in a folder of its own; all of it
    goes at the end."""
    requires_sandbox()
    # Not pytest's folder: its path is too long for unix sockets.
    folder = Path(tempfile.mkdtemp(dir=session_folder())).resolve()
    prefix = os.environ.get(PREFIX_VARIABLE, "")
    try:
        sandbox = cluster.up(folder, Options(**QUICK | {"nodes": 2, "slurm": prefix} | changes))
        if prefix:
            # Clients of another version than the daemons' cannot talk to them.
            os.environ["PATH"] = sandbox.environment()["PATH"]
        yield sandbox
    finally:
        cluster.down(folder)
        left = left_behind(folder)
        shutil.rmtree(folder)
    assert not left, f"left behind by the sandbox: {left}"


def left_behind(folder: Path) -> list[str]:
    """Processes that have to do with `folder` (command line, working directory, open files), and
    sockets in it."""
    found = [str(path) for path in folder.rglob("*") if path.is_socket()]
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            words = [
                *process.cmdline(),
                process.cwd(),
                *(file.path for file in process.open_files()),
            ]
            if process.pid != os.getpid() and any(str(folder) in word for word in words):
                found.append(f"pid {process.pid}: {' '.join(process.cmdline())}")
    return found


PREEMPTION = (
    "PreemptType=preempt/partition_prio",
    "PreemptMode=REQUEUE",
    "PartitionName=urgent Nodes=ALL PriorityTier=9",
)
"""Jobs of partition `urgent` take the nodes of others."""


_GRACE_S = 60


def preempt(sandbox: Sandbox, node: str) -> None:
    """Run a more urgent job on ``node``. The job that is there has a minute to save, so that a busy
    machine does not decide whether it can."""
    partition = ("scontrol", "update", "PartitionName=main")
    sandbox.client(*partition, f"GraceTime={_GRACE_S}")
    try:
        sandbox.client("srun", "--partition=urgent", "--exclusive", f"--nodelist={node}", "true")
    finally:
        sandbox.client(*partition, "GraceTime=0")


@pytest.fixture(scope="session")
def sandbox() -> Iterator[Sandbox]:
    """Twelve nodes of 8 CPUs, 4000 MB and 2 GPUs that do not exist, for all tests of the session: a
    run of seven, and its successor while five of them are not yet given back.

    Its Slurm misses a node long after the project does. A test leaves it as it found it: no jobs,
    all nodes up.
    """
    with private_sandbox(
        nodes=12, cpus=8, memory=4000, gpus=2, slurmd_timeout=60, extra=PREEMPTION
    ) as shared:
        yield shared


@contextmanager
def busy_but(sandbox: Sandbox, nodes: int) -> Iterator[None]:
    """In the block there are only so many nodes: of those that no job has, some are given to
    nobody."""
    free = [
        node
        for node, state in sandbox.node_states().items()
        if state in ("idle", "planned", "completing")
    ]
    names = ",".join(free[: len(sandbox.nodes) - nodes])
    if not names:
        yield
        return
    sandbox.client(
        "scontrol", "update", f"nodename={names}", "state=drain", "reason=kept from the test"
    )
    try:
        yield
    finally:
        sandbox.client("scontrol", "update", f"nodename={names}", "state=resume")


@pytest.fixture
def small_sandbox() -> Iterator[Sandbox]:
    """Two nodes for one test, which may leave them as it likes."""
    with private_sandbox() as own:
        yield own
