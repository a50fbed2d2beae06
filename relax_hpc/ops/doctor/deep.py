"""`doctor --deep`: short jobs look from nodes of every kind at the run directory, network, clocks
and files."""

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
from relax_hpc.cluster.slurm.mpi import mpi_problem
from relax_hpc.config.schema import Config
from relax_hpc.net.transport.choice import planes_wanted
from relax_hpc.net.transport.plane_check import PlaneTrial
from relax_hpc.ops.doctor.finding import Finding, error, ok, warning
from relax_hpc.ops.doctor.job import PROBE, Probe, make_folder, plan, plane_words
from relax_hpc.ops.doctor.planes import judge_planes
from relax_hpc.ops.doctor.probe import MPI_DONE

WAIT_S = 120.0
"""Seconds for the probe to be started and to end; its nodes may be busy."""
MAX_SKEW_S = 1.0
POLL_S = 0.5


def check_nodes(config: Config, slurm: Slurm) -> Iterator[Finding]:
    """Run a probe on nodes of every kind that a component asks for, and say what they found.

    Their folder lies beside the run directory, and is removed, like their jobs, whatever happens.
    """
    parent = next(folder for folder in Path(config.run_dir).parents if folder.exists())
    folder = parent / f".relax-doctor-{secrets.token_hex(4)}"
    probes, jobs = plan(config, folder), list[str]()
    try:
        folder.mkdir(mode=0o700)
    except OSError as problem:
        yield error(f"run_dir: cannot make {folder}: {problem.strerror}; name another directory")
        return
    try:
        # All at once: each waits for its own nodes.
        for probe in probes:
            probe.make()
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
    yield from judge(reports, probe.nodes, state, probe.folder, ", ".join(probe.groups))
    yield from judge_planes(_trials(reports), planes_wanted(config), probe.nodes > 1)
    if probe.mpi and len(reports) == probe.nodes:
        worlds = [json.loads(path.read_text()) for path in probe.folder.glob(f"*{MPI_DONE}")]
        if problem := mpi_problem(config, worlds, probe.nodes, _last_words(probe.folder)):
            yield error(problem)


def check_here(config: Config) -> Iterator[Finding]:
    """Let two probes on this host try the planes between them."""
    with tempfile.TemporaryDirectory(prefix="relax-doctor-") as name:
        folder = Path(name)
        make_folder(folder / "probes")
        words = [
            sys.executable,
            *PROBE,
            f"--folder={folder / 'probes'}",
            "--nodes=2",
            "--interfaces=lo",
            *plane_words(config),
        ]
        probes = [subprocess.Popen([*words, f"--name=process-{number}"]) for number in (1, 2)]
        try:
            for probe in probes:
                probe.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            yield warning(f"planes: not checked, as the probes have not ended for {WAIT_S:g} s")
        finally:
            for probe in probes:
                probe.kill()
                probe.wait()
        yield from judge_planes(_trials(_reports(folder / "probes")), planes_wanted(config), False)


def _trials(reports: Mapping[str, dict[str, Any]]) -> list[PlaneTrial]:
    return [PlaneTrial(**trial) for report in reports.values() for trial in report["trials"]]


def judge(
    reports: dict[str, dict[str, Any]],
    nodes: int,
    state: str,
    folder: Path,
    groups: str = "all groups",
) -> Iterator[Finding]:
    """Findings in what the probes of ``groups`` reported."""
    if not reports and state == "PENDING":
        some = "1 node was" if nodes == 1 else f"{nodes} nodes were"
        yield warning(
            f"nodes of {groups}: not checked, as {some} not free within {WAIT_S:g} s; try again "
            "later"
        )
        return
    if not reports:
        yield error(
            f"nodes of {groups}: {_last_words(folder)} (job: {state or 'gone'}, no report in "
            f"{folder}); see "
            "site.modules, site.setup, site.python and site.container, or name a run_dir that the "
            "nodes share"
        )
        return
    for name, report in reports.items():
        for problem in report["problems"]:
            yield error(f"node {name}: {problem}")
        yield from (warning(f"node {name}: {problem}") for problem in report.get("warnings", ()))
        if words := report.get("compiler"):
            yield ok(f"node {name}: {words}")
        unseen = set(reports) - set(report["seen"])
        if unseen:
            yield error(
                f"run_dir: node {name} does not see what {', '.join(sorted(unseen))} renamed; take "
                "another one"
            )
        for other, skew in report.get("skew_s", {}).items():
            if abs(skew) > MAX_SKEW_S:
                yield warning(
                    f"clock: {other} is {skew:+.1f} s off {name}, allowed: {MAX_SKEW_S:g} s; tell "
                    "the site"
                )
    if len(reports) < nodes:
        yield error(
            f"run_dir: {nodes} nodes were probed, {', '.join(sorted(reports))} reported; see the "
            "others' disks"
        )
    else:
        yield ok(
            f"nodes {', '.join(sorted(reports))} ({groups}): see each other's files, ports and "
            "clocks"
        )


def _wait(
    slurm: Slurm, job: str, probe: Probe, deadline: float
) -> tuple[dict[str, dict[str, Any]], str]:
    """Reports by node and the job's last state, once all are there, the job is gone, or time is
    up."""
    while True:
        # The state first: a job that ended in between has written all that it will.
        found = slurm.jobs(job).get(job)
        state = found.state if found else ""
        reports = _reports(probe.folder)
        told = not probe.mpi or len(list(probe.folder.glob(f"*{MPI_DONE}"))) >= probe.nodes
        ended = state not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")
        if (len(reports) >= probe.nodes and told) or ended or time.monotonic() > deadline:
            return reports, state
        time.sleep(POLL_S)


def _reports(folder: Path) -> dict[str, dict[str, Any]]:
    return {
        path.name.removesuffix(".done.json"): json.loads(path.read_text())
        for path in folder.glob("*.done.json")
    }


def _last_words(folder: Path) -> str:
    try:
        lines = (folder / "probe.log").read_text(errors="replace").strip().split("\n")
        return f"the probe said: {' '.join(lines[-4:])[-300:]}"
    except OSError:
        return "the probe left no log"
