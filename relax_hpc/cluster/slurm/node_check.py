"""Look at the nodes of an allocation before groups start on them, and remember those that fail."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.slurm.container import container_command, container_srun_options, role_python
from relax_hpc.cluster.slurm.mpi import mpi_plugin, mpi_problem, with_ranks
from relax_hpc.cluster.slurm.node_probe import BadNodes, excluded
from relax_hpc.cluster.slurm.srun import srun_options
from relax_hpc.cluster.slurm.steps import StepLauncher, step_environment
from relax_hpc.config import Config, load_resolved
from relax_hpc.config.groups import group_of

_DEADLINE_S, _END_S = 60.0, 5.0
_CONTAINER_S = 300.0
"""Further seconds for an image that has to be fetched first."""
_MPI_S, _LOOK_S = 60.0, 1.0
"""Seconds for MPI once all nodes have reported, and between looks."""
_NOT_STARTED = (
    "Unable to create step",
    "Unable to confirm allocation",
    "Unable to contact slurm controller",
)
"""Messages of srun where Slurm started nothing, which is no fault of the nodes."""


@dataclass(frozen=True, slots=True)
class NodeCheck:
    """A pre-flight that runs on the nodes of a group."""

    name: str
    config: Config
    step: subprocess.Popen[str]
    deadline: float
    mpi: bool
    """Whether it tries MPI between the nodes."""
    nodes: int = 1


def check_nodes(launcher: StepLauncher, names: Sequence[str]) -> dict[str, str]:
    """Run the pre-flight on all nodes of the groups ``names`` at once; of each group that must not
    start there, why.

    It runs where the roles will: on their nodes, in their container, by their interpreter, and with
    their MPI if any has ranks. One that could not run is a reason too. Failing nodes are written to
    the run's list of bad nodes.
    """
    checks = [_start(launcher, name) for name in names]
    return {check.name: reason for check in checks if (reason := _judge(launcher, check))}


def exclude_option(run: RunDir, chosen: str = "", avoid: str = "") -> list[str]:
    """`--exclude` for sbatch with the run's repeat offenders and node ``avoid``, beside those that
    the user has ``chosen``, which stand in the script too; nothing if they are all."""
    names = [name for name in (avoid, *excluded(run)) if name]
    return [f"--exclude={','.join([chosen, *names] if chosen else names)}"] if names else []


def _start(launcher: StepLauncher, name: str) -> NodeCheck:
    config, run, place = (
        load_resolved(launcher.run.root, name),
        launcher.run,
        launcher.allocation.places[name],
    )
    group, mpi = group_of(config, name), with_ranks(config, name) and mpi_plugin(config) != "none"
    words = [
        role_python(config),
        "-m",
        "relax_hpc.cluster.slurm.node_probe",
        "--run_dir",
        str(run.root),
    ]
    srun = [*launcher.place_words(place), f"--mpi={mpi_plugin(config) if mpi else 'none'}"]
    srun += [
        "--ntasks-per-node=1",
        f"--ntasks={place.nodes}",
        *srun_options(config),
        "--export=ALL",
    ]
    if config.model.device == "cuda" and group.resources.gpus_per_node:
        words += ["--gpus", str(group.resources.gpus_per_node)]
        srun += (
            []
            if config.site.gpu_request == "none"
            else [f"--gpus-per-node={group.resources.gpus_per_node}"]
        )
    if interface := group.interface or config.site.interface:
        words += ["--interface", interface]
    if mpi:
        words.append("--mpi")
    inside = config.site.container.runtime != "none"
    step = subprocess.Popen(
        [*srun, "--job-name=preflight", *container_srun_options(config, run.root),
         *container_command(config, run.root), *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=step_environment(config, name),
        start_new_session=True,
    )  # fmt: skip
    return NodeCheck(
        name,
        config,
        step,
        time.monotonic() + (_CONTAINER_S if inside else _DEADLINE_S),
        mpi,
        place.nodes,
    )


def _judge(launcher: StepLauncher, check: NodeCheck, again: bool = True) -> str:
    """Reason why the group must not start on its nodes; empty if all of them are well."""
    (output, late), name = _output(check), check.name
    found, rest = read_reports(output)
    last = " ".join(rest.split())[-300:] or "it said nothing"
    reports = {report["node"]: report for report in found if "problems" in report}
    if not reports and any(text in output for text in _NOT_STARTED):
        print(f"{name}: no pre-flight, as Slurm did not start it: {last}", flush=True)
        return ""
    if not reports:
        # The same everywhere: no node is to blame.
        return f"the pre-flight could not run ({last}); see {_where(check.config)}"
    bad = {node: report["problems"] for node, report in reports.items() if not report["ok"]}
    bad |= {
        node: ["no answer to the pre-flight"]
        for node in launcher.nodes_of(name)
        if node not in reports
    }
    for node, problems in bad.items():
        BadNodes(launcher.run).add(node, "preflight", problems)
    reason = "; ".join(f"{node}: {', '.join(problems)}" for node, problems in bad.items())
    if reason or not check.mpi:
        return reason
    wrong = mpi_problem(
        check.config, [report["mpi"] for report in found if "mpi" in report], len(reports), last
    )
    if wrong and late and again:
        # As MPICH does now and then where it is not told of `mpi_defaults`.
        print(f"{name}: {wrong}; it hung, and is tried again", flush=True)
        return _judge(launcher, _start(launcher, name), again=False)
    return wrong


def read_reports(output: str) -> tuple[list[dict[str, Any]], str]:
    """Reports of nodes, a line each, and all else that was said: by Slurm, a container, or a site's
    profile."""
    found, rest = [], []
    for line in output.splitlines():
        try:
            report = json.loads(line)
        except ValueError:
            report = None
        if isinstance(report, dict) and "node" in report:
            found.append(report)
        else:
            rest.append(line)
    return found, "\n".join(rest)


def _output(check: NodeCheck) -> tuple[str, bool]:
    """Output of the step when it ends, or at the deadline; whether it is that. Then the step is
    ended.

    Once all nodes have reported the deadline is that of MPI, which waits for ever where it is
    broken.
    """
    step, said, end = check.step, b"", check.deadline
    while (left := end - time.monotonic()) > 0:
        try:
            return step.communicate(timeout=min(left, _LOOK_S))[0], False
        except subprocess.TimeoutExpired as late:
            said = late.output or b""
        if end == check.deadline and len(read_reports(_text(said))[0]) >= check.nodes:
            end = min(end, time.monotonic() + _MPI_S)
    for _ in range(2):
        # First srun alone, as its second process then cancels the step; that may be hung as well.
        with contextlib.suppress(ProcessLookupError):
            step.kill() if step.poll() is None else os.killpg(step.pid, signal.SIGKILL)
        try:
            return step.communicate(timeout=_END_S)[0], True
        except subprocess.TimeoutExpired as late:
            said = late.output or b""
    return _text(said), True


def _text(said: bytes | str) -> str:
    return said.decode(errors="replace") if isinstance(said, bytes) else said


def _where(config: Config) -> str:
    inside = config.site.container.runtime != "none"
    return (
        "site.container (image, python, mounts)"
        if inside
        else "site.python and the modules of the nodes"
    )
