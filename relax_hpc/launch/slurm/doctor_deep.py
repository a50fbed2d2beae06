"""`doctor --deep`: a short job looks from the nodes at the run directory, the network, the clocks and the files."""

from __future__ import annotations

import contextlib
import json
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import relax_hpc
from relax_hpc.config.schema import Config
from relax_hpc.errors import RelaxError
from relax_hpc.launch.slurm.commands import Slurm
from relax_hpc.launch.slurm.container import local_dir
from relax_hpc.launch.slurm.doctor_planes import judge_planes
from relax_hpc.launch.slurm.doctor_probe import TOKEN
from relax_hpc.launch.slurm.finding import Finding, error, ok, warning
from relax_hpc.launch.slurm.layout import Component, components
from relax_hpc.launch.slurm.render import directive
from relax_hpc.transfer_queue.planes.choice import planes_wanted
from relax_hpc.transfer_queue.planes.preflight import Trial

WAIT_S = 120.0
"""For the probe to be started and to end; its nodes may be busy."""
MAX_SKEW_S = 1.0
_PROBE = ("-m", "relax_hpc.launch.slurm.doctor_probe")
POLL_S = 0.5


def check_nodes(config: Config, slurm: Slurm) -> Iterator[Finding]:
    """Run the probe on as many nodes as the largest component has, at most 8, and say what it found.

    Its folder lies beside the run directory, and is removed, like its job, whatever happens.
    """
    part = max(components(config), key=lambda part: part.nodes)
    nodes = min(8, max(2, part.nodes))
    parent = next(folder for folder in Path(config.run_dir).parents if folder.exists())
    folder = parent / f".relax-doctor-{secrets.token_hex(4)}"
    try:
        _make(folder)
    except OSError as problem:
        yield error(f"run_dir: cannot make {folder}: {problem.strerror}; name another directory")
        return
    job = ""
    try:
        script = folder / "probe.sbatch"
        script.write_text(_script(config, part, folder, nodes))
        job = slurm.submit(script)
        reports, state = _wait(slurm, job, folder, nodes)
        yield from judge(reports, nodes, state, folder)
        yield from judge_planes(_trials(reports), planes_wanted(config), nodes > 1)
    except RelaxError as problem:
        yield warning(f"nodes: not checked: {problem}")
    finally:
        with contextlib.suppress(RelaxError):
            if job:
                slurm.cancel(job)
        shutil.rmtree(folder, ignore_errors=True)


def check_here(config: Config) -> Iterator[Finding]:
    """Two probes on this host try the planes between them."""
    with tempfile.TemporaryDirectory(prefix="relax-doctor-") as name:
        folder = Path(name)
        _make(folder / "probes")
        words = [
            sys.executable,
            *_PROBE,
            f"--folder={folder / 'probes'}",
            "--nodes=2",
            "--interfaces=lo",
            *_modes(config),
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


def _make(folder: Path) -> None:
    """The folder in which probes meet, for nobody else."""
    folder.mkdir(mode=0o700)
    (folder / TOKEN).write_bytes(secrets.token_bytes(32))


def _trials(reports: Mapping[str, dict[str, Any]]) -> list[Trial]:
    return [Trial(**trial) for report in reports.values() for trial in report["trials"]]


def judge(reports: dict[str, dict[str, Any]], nodes: int, state: str, folder: Path) -> Iterator[Finding]:
    """Findings of what the probes reported."""
    if not reports and state == "PENDING":
        yield warning(f"nodes: not checked, as {nodes} nodes were not free within {WAIT_S:g} s; try again later")
        return
    if not reports:
        yield error(
            f"run_dir: nothing that a node wrote to {folder} showed here within {WAIT_S:g} s (job: {state or 'gone'}); "
            f"it is not shared, or site.python does not start there; {_last_words(folder)}"
        )
        return
    for name, report in reports.items():
        for problem in report["problems"]:
            yield error(f"node {name}: {problem}")
        unseen = set(reports) - set(report["seen"])
        if unseen:
            yield error(f"run_dir: node {name} does not see what {', '.join(sorted(unseen))} renamed; take another one")
        for other, skew in report.get("skew_s", {}).items():
            if abs(skew) > MAX_SKEW_S:
                yield warning(f"clock: {other} is {skew:+.1f} s off {name}, allowed: {MAX_SKEW_S:g} s; tell the site")
    if len(reports) < nodes:
        yield error(f"run_dir: {nodes} nodes were probed, {', '.join(sorted(reports))} reported; see the others' disks")
    else:
        yield ok(f"nodes {', '.join(sorted(reports))}: see each other's files, ports and clocks")


def _script(config: Config, part: Component, folder: Path, nodes: int) -> str:
    """A batch job of one probe a node; values are quoted, nothing else is in it."""
    options = {name: value for name, value in part.options.items() if name in ("partition", "account", "qos")}
    options |= {name: part.options[name] for name in ("reservation", "constraint") if name in part.options}
    options |= {"nodes": str(nodes), "ntasks-per-node": "1", "time": "2", "job-name": "relax-doctor"}
    lines = [f"#SBATCH {directive(name, value)}" for name, value in options.items()]
    lines += [f"#SBATCH {directive('output', str(folder / 'probe.log'))}"]
    python = config.site.python or sys.executable
    words = [python, *_PROBE, f"--folder={folder}", f"--nodes={nodes}"]
    words += [f"--local_dir={local_dir(config)}", *_modes(config), "--interfaces", *_interfaces(config)]
    words += ["--paths", *(f"{key}={path}" for key, path in _paths(config).items())]
    source = shlex.quote(str(Path(relax_hpc.__file__).parents[1]))
    modules = " ".join(map(shlex.quote, config.site.modules))
    load = ["type module &>/dev/null || source /etc/profile", f"module load {modules} || exit 78"] if modules else []
    start = f"exec srun --ntasks-per-node=1 --export=ALL {shlex.join(words)}"
    return "\n".join(
        ["#!/bin/bash", *lines, *load, f"export PYTHONPATH={source}${{PYTHONPATH:+:$PYTHONPATH}}", start, ""]
    )


def _modes(config: Config) -> list[str]:
    return ["--planes", *(f"{plane}={mode}" for plane, mode in planes_wanted(config).items())]


def _interfaces(config: Config) -> list[str]:
    """The site's first, over which the probes call each other."""
    found = [config.site.interface, *(group.interface for group in config.groups.values())]
    return list(dict.fromkeys(name for name in found if name))


def _paths(config: Config) -> dict[str, str]:
    """Files and folders that every node must see, by their keys."""
    site = config.site
    found = {
        "model.path": config.model.path,
        "model.reference_path": config.model.reference_path,
        "data.train": config.data.train,
        "site.container.image": site.container.image if site.container.image.startswith("/") else "",
        "site.mpi.library": "" if site.mpi.library == "wheel" else site.mpi.library,
    }
    return {key: path for key, path in found.items() if path}


def _wait(slurm: Slurm, job: str, folder: Path, nodes: int) -> tuple[dict[str, dict[str, Any]], str]:
    """Reports by node and the job's last state, once all are there, the job is gone, or time is up."""
    deadline, state = time.monotonic() + WAIT_S, "PENDING"
    while True:
        # The state first: a job that ended in between has written all that it will.
        found = slurm.jobs(job).get(job)
        state = found.state if found else ""
        reports = _reports(folder)
        ended = state not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")
        if len(reports) >= nodes or ended or time.monotonic() > deadline:
            return reports, state
        time.sleep(POLL_S)


def _reports(folder: Path) -> dict[str, dict[str, Any]]:
    return {path.name.removesuffix(".done.json"): json.loads(path.read_text()) for path in folder.glob("*.done.json")}


def _last_words(folder: Path) -> str:
    try:
        lines = (folder / "probe.log").read_text(errors="replace").split("\n")
        return f"its log says: {' '.join(lines[-4:])[:300]}"
    except OSError:
        return "it left no log"
