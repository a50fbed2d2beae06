"""`doctor --deep`: short jobs on each kind of node check files, network and clocks."""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from relax_hpc.base.errors import RelaxError
from relax_hpc.cluster.slurm.commands import Slurm
from relax_hpc.cluster.slurm.mpi import find_mpi_problem
from relax_hpc.config.schema import Config
from relax_hpc.net.transport.choice import planes_wanted
from relax_hpc.net.transport.plane_check import PlaneTrial
from relax_hpc.ops.doctor.finding import Finding, error, ok, warning
from relax_hpc.ops.doctor.job import PROBE, Probe, make_probe_folder, plan_probes, plane_arguments
from relax_hpc.ops.doctor.planes import judge_planes
from relax_hpc.ops.doctor.probe import MPI_DONE

WAIT_S = 120.0
"""Seconds in which a probe must start and end; its nodes may be busy."""
MAX_SKEW_S = 1.0
POLL_S = 0.5


def check_nodes(config: Config, slurm: Slurm) -> Iterator[Finding]:
    """Run a probe on each kind of node that a component requests, and judge the reports.

    The probes use a folder next to the run directory. The folder and the jobs are always removed.
    """
    parent = next(folder for folder in Path(config.run_dir).parents if folder.exists())
    folder = parent / f".relax-doctor-{secrets.token_hex(4)}"
    probes, jobs = plan_probes(config, folder), list[str]()
    try:
        folder.mkdir(mode=0o700)
    except OSError as problem:
        yield error(f"run_dir: cannot make {folder}: {problem.strerror}; name another directory")
        return
    try:
        # Submit all jobs before waiting, because each waits for different nodes.
        for probe in probes:
            probe.make_folder()
            jobs.append(slurm.submit(probe.script(config)))
        deadline = time.monotonic() + WAIT_S
        for probe, job in zip(probes, jobs, strict=True):
            yield from _findings(config, probe, *_wait(slurm, job, probe, deadline))
    except RelaxError as problem:
        yield warning(f"nodes: not checked: {problem}")
    finally:
        for job in jobs:
            with contextlib.suppress(RelaxError):
                slurm.cancel(job)
        shutil.rmtree(folder, ignore_errors=True)


def _findings(
    config: Config, probe: Probe, reports: dict[str, dict[str, Any]], state: str
) -> Iterator[Finding]:
    """Findings of one probe: its nodes, the planes between them, and MPI."""
    yield from judge_reports(reports, probe.nodes, state, probe.folder, ", ".join(probe.groups))
    yield from judge_planes(_trials(reports), planes_wanted(config), probe.nodes > 1)
    if probe.mpi and len(reports) == probe.nodes:
        worlds = [json.loads(path.read_text()) for path in probe.folder.glob(f"*{MPI_DONE}")]
        problem = find_mpi_problem(config, worlds, probe.nodes, _log_tail(probe.folder))
        if problem:
            yield error(problem)


def check_local_planes(config: Config) -> Iterator[Finding]:
    """Start two probes on this host, which try the planes between them."""
    with tempfile.TemporaryDirectory(prefix="relax-doctor-") as name:
        folder = Path(name) / "probes"
        make_probe_folder(folder)
        command = [sys.executable, *PROBE, f"--folder={folder}", "--nodes=2", "--interfaces=lo"]
        command += plane_arguments(config)
        probes = [subprocess.Popen([*command, f"--name=process-{number}"]) for number in (1, 2)]
        try:
            for probe in probes:
                probe.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            yield warning(f"planes: not checked; the probes did not end within {WAIT_S:g} s")
        finally:
            for probe in probes:
                probe.kill()
                probe.wait()
        yield from judge_planes(_trials(_reports(folder)), planes_wanted(config), False)


def _trials(reports: Mapping[str, dict[str, Any]]) -> list[PlaneTrial]:
    """Trials of planes in all reports."""
    trials = list[PlaneTrial]()
    for report in reports.values():
        trials += [PlaneTrial(**fields) for fields in report["trials"]]
    return trials


def judge_reports(
    reports: dict[str, dict[str, Any]],
    nodes: int,
    state: str,
    folder: Path,
    groups: str = "all groups",
) -> Iterator[Finding]:
    """Findings from the reports of the probes of ``groups``."""
    if not reports and state == "PENDING":
        subject = "1 node was" if nodes == 1 else f"{nodes} nodes were"
        yield warning(
            f"nodes of {groups}: not checked; {subject} not free within {WAIT_S:g} s; try again "
            "later"
        )
        return
    if not reports:
        yield error(
            f"nodes of {groups}: {_log_tail(folder)} (job: {state or 'not in the queue'}, no "
            f"report in {folder}); see site.modules, site.setup, site.python and site.container, "
            "or name a run_dir that the nodes share"
        )
        return
    for name, report in reports.items():
        yield from _judge_report(name, report, set(reports))
    names = ", ".join(sorted(reports))
    if len(reports) < nodes:
        yield error(
            f"run_dir: found reports of {names} only, but {nodes} nodes were probed; check the "
            "filesystem of run_dir on the other nodes"
        )
    else:
        yield ok(f"nodes {names} ({groups}): see each other's files, ports and clocks")


def _judge_report(name: str, report: dict[str, Any], nodes: set[str]) -> Iterator[Finding]:
    """Findings from the report of node ``name``; ``nodes``: all nodes with a report."""
    for problem in report["problems"]:
        yield error(f"node {name}: {problem}")
    for problem in report.get("warnings", ()):
        yield warning(f"node {name}: {problem}")
    if report.get("compiler"):
        yield ok(f"node {name}: {report['compiler']}")
    unseen = nodes - set(report["seen"])
    if unseen:
        yield error(
            f"run_dir: node {name} does not see files that {', '.join(sorted(unseen))} renamed; "
            "name a directory on another filesystem"
        )
    for peer, skew in report.get("skew_s", {}).items():
        if abs(skew) > MAX_SKEW_S:
            yield warning(
                f"clock: {peer} is {skew:+.1f} s off {name}, allowed: {MAX_SKEW_S:g} s; tell "
                "the site"
            )


def _wait(
    slurm: Slurm, job: str, probe: Probe, deadline: float
) -> tuple[dict[str, dict[str, Any]], str]:
    """Wait for all reports, the end of the job, or the deadline.

    Returns the reports by node and the last state of the job.
    """
    while True:
        # Query the state before the reports: a job that has ended then has written all of them.
        job_state = slurm.jobs(job).get(job)
        state = job_state.state if job_state else ""
        reports = _reports(probe.folder)
        mpi_reports = len(list(probe.folder.glob(f"*{MPI_DONE}")))
        complete = len(reports) >= probe.nodes and (not probe.mpi or mpi_reports >= probe.nodes)
        ended = state not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")
        if complete or ended or time.monotonic() > deadline:
            return reports, state
        time.sleep(POLL_S)


def _reports(folder: Path) -> dict[str, dict[str, Any]]:
    return {
        path.name.removesuffix(".done.json"): json.loads(path.read_text())
        for path in folder.glob("*.done.json")
    }


def _log_tail(folder: Path) -> str:
    """The end of the probe's log, for a finding."""
    try:
        lines = (folder / "probe.log").read_text(errors="replace").strip().split("\n")
    except OSError:
        return "the probe left no log"
    return f"the probe printed: {' '.join(lines[-4:])[-300:]}"
