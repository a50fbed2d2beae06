"""Probe of a node before a group is started on it, and the list of nodes that fail repeatedly.

`python -m relax_hpc.cluster.slurm.node_probe --run_dir RUN [--gpus N [--exact_gpus]
[--gpu_vendor V] [--max_gpu_used_share S]] [--group G] [--min_memory_gib M] [--interface I]
[--programs] [--mpi]` takes about a second and prints one JSON line. With --mpi it prints a second
line after MPI has connected all nodes; a broken MPI ends the process or hangs. The caller needs a
deadline, because the probe hangs on a file system that hangs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shutil
import socket
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from relax_hpc.base.errors import EXIT_CONFIG, EXIT_DONE, EXIT_RETRY, ConfigError
from relax_hpc.base.foreign_files import parse_json, read_in_run
from relax_hpc.base.free_memory import available_host_bytes
from relax_hpc.base.machine.gpu_vendors import (
    GpuMemory,
    GpuVendor,
    MissingTool,
    NoGpuAnswer,
    select_vendor,
)
from relax_hpc.base.machine.own_environment import own_problems
from relax_hpc.base.machine.requirements import GPU, PROGRAMS
from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.slurm.mpi import try_mpi
from relax_hpc.config.gpus import describe_gpu_mismatch
from relax_hpc.net.rendezvous.network import interface_address

MAX_CLOCK_S = 2.0
MIN_SHM_MIB = 32
FORGET_S = 24 * 3600.0
"""Seconds after which a failure no longer counts, because nodes are repaired."""
FABRIC = Path("/sys/class/infiniband")
SHM = Path("/dev/shm")


@dataclass(slots=True)
class Report:
    """Report of a node about itself. `problems` are lines with the value found and the allowed
    one."""

    node: str
    problems: list[str] = field(default_factory=list)
    gpus: int = 0
    memory_gib: float = 0.0
    """Free host memory, without that of GPUs."""
    shm_mib: int = 0
    clock_s: float = 0.0
    """Seconds by which the clock of the run directory's file system is ahead of this host."""
    meets_requirements: bool = True
    """Whether it has what the environment needs; otherwise no other try can succeed on it."""
    permanent_problems: list[str] = field(default_factory=list)
    """Part of `problems` that does not depend on the node: other nodes of its kind have it too."""

    @property
    def ok(self) -> bool:
        return not self.problems

    def add_requirement(self, problem: str, is_permanent: bool) -> None:
        """Add a requirement that the node does not meet. ``is_permanent``: other nodes of its kind
        do not meet it either."""
        self.meets_requirements = False
        self.problems.append(problem)
        if is_permanent:
            self.permanent_problems.append(problem)

    def line(self) -> str:
        """Report as JSON."""
        return json.dumps(asdict(self) | {"ok": self.ok})


def node_name() -> str:
    """Name of this node in Slurm."""
    # Nodes of a sandbox share one host name; slurmd sets SLURMD_NODENAME in every task.
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def check_node(
    run: RunDir,
    gpus: int = 0,
    min_memory_gib: float = 0.0,
    interface: str = "",
    programs: bool = False,
    gpu_vendor: str = "",
    max_gpu_used_share: float = 0.1,
    group: str = "",
    exact_gpus: bool = False,
) -> Report:
    """Check this node.

    ``gpus``: number of GPUs that it must have, each with at most ``max_gpu_used_share`` of its
    memory in use (0: GPUs are not checked); ``programs``: whether roles on it run programs of the
    policy in namespaces; ``group``: name of the group for messages; ``exact_gpus``: whether this
    process must not see more than ``gpus``.
    """
    report = Report(node_name())
    uses = [*([GPU] if gpus else []), *([PROGRAMS] if programs else [])]
    for problem in own_problems(uses):
        if problem.is_fatal:
            report.add_requirement(str(problem), not problem.is_node_fault)
    report.memory_gib = round(available_host_bytes() / 2**30, 2)
    if report.memory_gib < min_memory_gib:
        report.problems.append(
            f"memory: found {report.memory_gib} GiB free, needed: {min_memory_gib:g}"
        )
    report.shm_mib = shutil.disk_usage(SHM).free >> 20 if SHM.is_dir() else 0
    if report.shm_mib < MIN_SHM_MIB:
        report.problems.append(
            f"{SHM}: found {report.shm_mib} MiB free, needed: {MIN_SHM_MIB}; left-over segments?"
        )
    # The vendor's tool would hang too on a driver that does not answer.
    if gpus and report.meets_requirements:
        vendor, setting = select_vendor(gpu_vendor), f"groups.{group}.resources.gpus_per_node"
        mismatch = describe_gpu_mismatch(vendor, os.environ, gpus, setting, exact_gpus)
        if mismatch:
            report.add_requirement(mismatch, is_permanent=True)
        else:
            _check_gpus(report, vendor, gpus, max_gpu_used_share)
    report.problems += fabric_problems(FABRIC)
    if interface:
        try:
            interface_address(interface)
        except ConfigError as problem:
            report.problems.append(str(problem))
    _check_run_dir(report, run)
    return report


def fabric_problems(folder: Path) -> list[str]:
    """Problems of InfiniBand ports: no port is active, or a port has a link and is not active.
    Empty on a node without InfiniBand."""
    ports = [path for path in sorted(folder.glob("*/ports/*")) if (path / "state").exists()]
    states = {port: (port / "state").read_text().strip() for port in ports}
    if ports and not any(state.endswith("ACTIVE") for state in states.values()):
        return [f"fabric: found no active port among {len(ports)}, needed: one (ibstat)"]
    return [
        f"fabric: found {port.parents[1].name} port {port.name} {state}, with a link; needed: "
        "ACTIVE (ibstat)"
        for port, state in states.items()
        if not state.endswith("ACTIVE") and _has_link(port)
    ]


def _has_link(port: Path) -> bool:
    path = port / "phys_state"
    return path.exists() and "LinkUp" in path.read_text()


def _check_gpus(report: Report, vendor: GpuVendor, wanted: int, max_used_share: float) -> None:
    try:
        gpus = _visible_gpus(vendor, vendor.read_memory())
    except MissingTool as problem:
        report.problems.append(f"GPUs: {problem}, needed: {wanted} GPUs; is the driver installed?")
        return
    except NoGpuAnswer as problem:
        report.add_requirement(f"GPUs: {problem}, needed: {wanted} working GPUs", False)
        return
    report.gpus = len(gpus)
    if len(gpus) < wanted:
        report.problems.append(
            f"GPUs: found {len(gpus)}, needed: {wanted}; one has fallen off the bus? (dmesg)"
        )
    for gpu in gpus:
        share = gpu.used / gpu.total if gpu.total else 0.0
        if share > max_used_share:
            report.problems.append(
                f"GPU {gpu.number}: found {share:.0%} of its memory in use, allowed: "
                f"{max_used_share:.0%} (site.max_gpu_used_share); a process was left over "
                f"({vendor.smi[0]})"
            )


def _visible_gpus(vendor: GpuVendor, gpus: list[GpuMemory]) -> list[GpuMemory]:
    """Part of ``gpus`` that this process may use."""
    # If Slurm does not confine devices by cgroups, the tool also shows the GPUs of other jobs.
    visible = vendor.visible_gpus(os.environ)
    if visible is None or not visible.value:
        return gpus
    return [
        gpu for gpu in gpus if gpu.number in visible.entries or _is_named(gpu.uuid, visible.entries)
    ]


def _is_named(uuid: str, entries: Sequence[str]) -> bool:
    """Whether an entry is the beginning of ``uuid``. An entry that is a number is none."""
    names = tuple(entry for entry in entries if not entry.isdigit())
    return bool(uuid) and uuid.startswith(names)


def _check_run_dir(report: Report, run: RunDir) -> None:
    """Write, sync, rename and remove a file, and compare its time with the clock of this host."""
    path = run.root / f".preflight-{report.node}-{secrets.token_hex(4)}"
    renamed = path.with_name(f"{path.name}.done")
    try:
        with path.open("wb") as file:
            before = time.time()
            file.write(b"x")
            file.flush()
            os.fsync(file.fileno())
            after = time.time()
        path.replace(renamed)
        changed = renamed.stat().st_mtime
    except OSError as problem:
        report.problems.append(
            f"run_dir: cannot write in {run.root}: {problem.strerror}; is it mounted here?"
        )
        return
    finally:
        for leftover in (path, renamed):
            with contextlib.suppress(OSError):
                leftover.unlink()
    # A slow sync is no clock skew. Only a time before or after the whole write counts.
    report.clock_s = round(min(changed - before, 0.0) + max(changed - after, 0.0), 3)
    if abs(report.clock_s) > MAX_CLOCK_S:
        report.problems.append(
            f"clock: the run directory's is {report.clock_s:+.1f} s off, allowed: {MAX_CLOCK_S:g} s"
        )


_KINDS = (("time", (int, float)), ("node", str), ("kind", str))


class BadNodes:
    """Failed node checks and deaths of nodes, one line each in <run>/submit/nodes.jsonl."""

    def __init__(self, run: RunDir) -> None:
        self.path = run.submit / "nodes.jsonl"

    def add(
        self, node: str, kind: str, problems: list[str], group: str = "", permanent: bool = False
    ) -> None:
        """Record that ``node`` failed. ``kind``: `preflight` or `death`. ``group``: the group that
        was to start there. ``permanent``: other nodes of its kind would fail too."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        record = {"time": time.time(), "node": node, "kind": kind, "problems": problems}
        line = json.dumps(record | {"group": group, "permanent": permanent})
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(descriptor, "ab", buffering=0) as file:
            file.write(line.encode() + b"\n")

    def records(self) -> list[dict]:
        """Records, oldest first. Half a line from a killed process is skipped."""
        records = []
        for text in read_in_run(self.path).splitlines() if self.path.exists() else []:
            try:
                record = parse_json(text)
                if isinstance(record, dict) and all(
                    isinstance(record.get(name), kind) for name, kind in _KINDS
                ):
                    records.append(record)
            except ValueError:
                continue
        return records


def excluded_nodes(run: RunDir, threshold: int = 2, now: float | None = None) -> list[str]:
    """Nodes that failed at least ``threshold`` times within the last day, for sbatch's --exclude
    and for `status`."""
    oldest = (time.time() if now is None else now) - FORGET_S
    counts = Counter(
        record["node"] for record in BadNodes(run).records() if record["time"] >= oldest
    )
    return sorted(node for node, count in counts.items() if count >= threshold)


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0, 75 if the node has problems, or 78 if it lacks a minimum requirement."""
    parser = argparse.ArgumentParser(
        prog="preflight", description="Check this node before a group starts on it."
    )
    parser.add_argument("--run_dir", type=Path, required=True)
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--gpu_vendor", default="", help="empty or auto: that of the node")
    parser.add_argument("--max_gpu_used_share", type=float, default=0.1)
    parser.add_argument("--group", default="")
    parser.add_argument("--exact_gpus", action="store_true", help="more GPUs are a mistake too")
    parser.add_argument("--min_memory_gib", type=float, default=0.0)
    parser.add_argument("--interface", default="")
    parser.add_argument("--programs", action="store_true", help="programs will run in namespaces")
    parser.add_argument("--mpi", action="store_true", help="try MPI between the nodes")
    arguments = parser.parse_args(argv)
    report = check_node(
        RunDir(arguments.run_dir),
        arguments.gpus,
        arguments.min_memory_gib,
        arguments.interface,
        arguments.programs,
        arguments.gpu_vendor,
        arguments.max_gpu_used_share,
        arguments.group,
        arguments.exact_gpus,
    )
    print(report.line(), flush=True)
    if arguments.mpi:
        print(json.dumps({"node": report.node, "mpi": try_mpi()}), flush=True)
    if not report.meets_requirements:
        return EXIT_CONFIG
    return EXIT_DONE if report.ok else EXIT_RETRY


if __name__ == "__main__":
    sys.exit(main())
