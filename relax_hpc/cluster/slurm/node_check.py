"""Check of the nodes of an allocation before groups start on them, with a record of bad nodes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.slurm.container import (
    container_command,
    container_srun_options,
    lacks_python,
    no_python_text,
    role_python,
    write_container_file,
)
from relax_hpc.cluster.slurm.mpi import find_mpi_problem, mpi_plugin, needs_mpi
from relax_hpc.cluster.slurm.node_probe import BadNodes, excluded_nodes
from relax_hpc.cluster.slurm.srun import changed_srun, placing_options
from relax_hpc.cluster.slurm.steps import StepLauncher, step_environment
from relax_hpc.cluster.supervise.launch_records import read_launch
from relax_hpc.config import Config, load_resolved
from relax_hpc.config.groups import group_settings
from relax_hpc.net.rendezvous.roster import latest_incarnation
from relax_hpc.net.rendezvous.visible_gpus import requests_gpus
from relax_hpc.tasks.jails import needs_namespaces

_DEADLINE_S, _END_S = 60.0, 5.0
"""Seconds for a check, and seconds for its step to end after SIGKILL."""
_CONTAINER_S = 300.0
"""Seconds for a check in a container, whose image may have to be fetched first."""
_MPI_S, _LOOK_S = 60.0, 1.0
"""Seconds for MPI after all nodes have reported, and seconds between two reads of the output."""
_NOT_STARTED = (
    "Unable to create step",
    "Unable to confirm allocation",
    "Unable to contact slurm controller",
)
"""Messages of srun if Slurm did not start the step. Then the nodes are not at fault."""


@dataclass(frozen=True, slots=True)
class NodeCheck:
    """A running check of the nodes of a group."""

    name: str
    config: Config
    step: subprocess.Popen[str]
    deadline: float
    mpi: bool
    """Whether it also tests MPI between the nodes."""
    nodes: int = 1


@dataclass(frozen=True, slots=True)
class CheckFailure:
    """Failed check of the nodes of a group, which must not start on them."""

    reason: str
    nodes: tuple[str, ...] = ()
    """Nodes that the group has, if all of them lack what no other node of their kind has."""
    is_hopeless: bool = False
    """Whether other nodes would fail too, so that the run has to end."""


def check_nodes(launcher: StepLauncher, names: Sequence[str]) -> dict[str, CheckFailure]:
    """Check all nodes of the groups ``names`` in parallel. Returns the failure of each group that
    must not start on its nodes.

    The check has the same conditions as the roles: their nodes, their container, their interpreter,
    and their MPI if a role has ranks. A check that could not run is a reason too. Failing nodes are
    added to the run's list of bad nodes.
    """
    checks = [_start(launcher, name) for name in names]
    refused = {name for name in names if _was_refused(launcher.run, name)}
    failures = {check.name: _evaluate(launcher, check) for check in checks}
    all_nodes = set[str]()
    for failure in failures.values():
        all_nodes.update(failure.nodes)
    all_fail = all(failure.nodes for failure in failures.values()) and len(all_nodes) > 1
    for name, failure in failures.items():
        # One node may differ from the others of its kind. If it is the only one, the group first
        # gets other nodes.
        has_more_evidence = all_fail or len(failure.nodes) > 1 or name in refused
        if failure.nodes and has_more_evidence:
            failures[name] = replace(failure, is_hopeless=True)
    return {name: failure for name, failure in failures.items() if failure.reason}


def _was_refused(run: RunDir, name: str) -> bool:
    """Whether all nodes of a group failed for good when it was to start the last time."""
    launch = read_launch(run, name, latest_incarnation(run, name))
    has_record = any(
        record.get("permanent") is True and record.get("group") == name
        for record in BadNodes(run).records()
    )
    # A group that has started since then has an allocation.
    return has_record and launch is not None and not launch.allocation


def exclude_option(run: RunDir, chosen: str = "", avoid: str = "") -> list[str]:
    """`--exclude` for sbatch with nodes that failed repeatedly and node ``avoid``; empty if there
    are none."""
    names = [name for name in (avoid, *excluded_nodes(run)) if name]
    if not names:
        return []
    # The option replaces that of the script, so that the nodes which the user has ``chosen`` are
    # repeated.
    return [f"--exclude={','.join([chosen, *names] if chosen else names)}"]


def _start(launcher: StepLauncher, name: str) -> NodeCheck:
    config, run = load_resolved(launcher.run.root, name), launcher.run
    nodes = launcher.allocation.group_nodes[name]
    group, mpi = (
        group_settings(config, name),
        needs_mpi(config, name) and mpi_plugin(config) != "none",
    )
    probe = [role_python(config), "-m", "relax_hpc.cluster.slurm.node_probe"]
    probe += ["--run_dir", str(run.root)]
    srun = [*launcher.srun_on_nodes(nodes), f"--mpi={mpi_plugin(config) if mpi else 'none'}"]
    srun += ["--ntasks-per-node=1", f"--ntasks={nodes.nodes}"]
    srun += [*placing_options(config), "--export=ALL"]
    # The probe requests GPUs in the same way as the roles, so that it sees the same GPUs.
    if config.model.device == "cuda" and group.resources.gpus_per_node:
        site = config.site
        probe += ["--gpus", str(group.resources.gpus_per_node), "--gpu_vendor", site.gpu_vendor]
        probe += ["--max_gpu_used_share", str(site.max_gpu_used_share), "--group", name]
        probe += ["--exact_gpus"] if requests_gpus(config) else []
        if config.site.gpu_request != "none":
            srun.append(f"--gpus-per-node={group.resources.gpus_per_node}")
    interface = group.interface or config.site.interface
    if interface:
        probe += ["--interface", interface]
    if "rollout" in group.roles and needs_namespaces(config):
        probe.append("--programs")
    if mpi:
        probe.append("--mpi")
    write_container_file(config, run.root)
    srun += ["--job-name=preflight", *container_srun_options(config, run.root)]
    in_container = config.site.container.runtime != "none"
    step = subprocess.Popen(
        [*changed_srun(srun, config, name), *container_command(config, run.root), *probe],
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
        time.monotonic() + (_CONTAINER_S if in_container else _DEADLINE_S),
        mpi,
        nodes.nodes,
    )


def _evaluate(launcher: StepLauncher, check: NodeCheck, may_retry: bool = True) -> CheckFailure:
    """Failure of a check; its reason is empty if all nodes passed."""
    (output, late), name = _read_output(check), check.name
    all_reports, messages = read_reports(output)
    last = " ".join(messages.split())[-300:] or "no output"
    reports = {report["node"]: report for report in all_reports if "problems" in report}
    if not reports and any(text in output for text in _NOT_STARTED):
        print(f"{name}: no pre-flight, as Slurm did not start it: {last}", flush=True)
        return CheckFailure("")
    in_container = check.config.site.container.runtime != "none"
    if not reports and in_container and lacks_python(check.config, output):
        # All nodes start the same image.
        return CheckFailure(no_python_text(check.config, output), is_hopeless=True)
    if not reports:
        # No node answered, so that a single node is not the cause.
        cause = _likely_cause(check.config)
        return CheckFailure(f"the pre-flight could not run ({last}); see {cause}")
    bad = {node: report["problems"] for node, report in reports.items() if not report["ok"]}
    bad |= {
        node: ["no answer to the pre-flight"]
        for node in launcher.nodes_of(name)
        if node not in reports
    }
    permanent = {
        node: report["permanent_problems"]
        for node, report in reports.items()
        if report.get("permanent_problems")
    }
    for node, problems in bad.items():
        BadNodes(launcher.run).add(node, "preflight", problems, name, node in permanent)
    reason = "; ".join(f"{node}: {', '.join(problems)}" for node, problems in bad.items())
    if len(permanent) >= check.nodes:
        return CheckFailure(_describe_permanent(permanent), tuple(permanent))
    if reason or not check.mpi:
        return CheckFailure(reason)
    worlds = [report["mpi"] for report in all_reports if "mpi" in report]
    problem = find_mpi_problem(check.config, worlds, len(reports), last)
    if problem and late and may_retry:
        # MPICH 5.0.2 with UCX sometimes hangs in MPI_Init under pmi2, see `mpi_defaults`.
        print(f"{name}: {problem}; it hung, and is tried again", flush=True)
        return _evaluate(launcher, _start(launcher, name), may_retry=False)
    return CheckFailure(problem)


def _describe_permanent(problems_by_node: Mapping[str, Sequence[str]]) -> str:
    """One line about problems that all nodes of a group have. Nodes with the same problems are
    named once."""
    nodes_by_text: dict[str, list[str]] = {}
    for node, problems in problems_by_node.items():
        nodes_by_text.setdefault(", ".join(problems), []).append(node)
    return "; ".join(f"{' '.join(nodes)}: {text}" for text, nodes in nodes_by_text.items())


def read_reports(output: str) -> tuple[list[dict[str, Any]], str]:
    """Reports of nodes, one line each, and all other lines, which Slurm, a container, or the site's
    profile prints."""
    reports, messages = [], []
    for line in output.splitlines():
        try:
            report = json.loads(line)
        except ValueError:
            report = None
        if isinstance(report, dict) and "node" in report:
            reports.append(report)
        else:
            messages.append(line)
    return reports, "\n".join(messages)


def _read_output(check: NodeCheck) -> tuple[str, bool]:
    """Output of the step, and whether the step was killed at its deadline.

    After all nodes have reported, the deadline is that of MPI, because a broken MPI hangs.
    """
    step, output, deadline = check.step, b"", check.deadline
    while True:
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            break
        try:
            return step.communicate(timeout=min(remaining_s, _LOOK_S))[0], False
        except subprocess.TimeoutExpired as timeout:
            output = timeout.output or b""
        if deadline == check.deadline and len(read_reports(_decode(output))[0]) >= check.nodes:
            deadline = min(deadline, time.monotonic() + _MPI_S)
    for _ in range(2):
        # srun 22.05 consists of two processes. If only the parent is killed, the child cancels the
        # step. If the child hangs too, the second attempt kills it.
        with contextlib.suppress(ProcessLookupError):
            if step.poll() is None:
                step.kill()
            else:
                os.killpg(step.pid, signal.SIGKILL)
        try:
            return step.communicate(timeout=_END_S)[0], True
        except subprocess.TimeoutExpired as timeout:
            output = timeout.output or b""
    return _decode(output), True


def _decode(output: bytes | str) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output


def _likely_cause(config: Config) -> str:
    """Settings that a user should check if no node answers."""
    if config.site.container.runtime != "none":
        return "site.container (image, python, mounts)"
    return "site.python and the modules of the nodes"
