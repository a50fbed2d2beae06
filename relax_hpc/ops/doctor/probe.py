"""Probe that `doctor --deep` runs on every node: `python -m relax_hpc.ops.doctor.probe --folder F
--nodes N`.

Each probe renames a report into the shared folder, waits until it sees all of them, then calls on
every other one over TCP, which answers with its clock, and reads what it offers on the planes. The
second report says what it saw.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from relax_hpc.base.errors import ConfigError, RelaxError
from relax_hpc.base.reward_settings import CodeSettings, rebuild_settings
from relax_hpc.base.rundir import write_json
from relax_hpc.cluster.slurm.mpi import try_mpi
from relax_hpc.config.schema import Config
from relax_hpc.net.rendezvous.network import LOOPBACK, interface_address, own_address
from relax_hpc.ops.doctor.gpus import node_report
from relax_hpc.ops.doctor.planes import PlaneProbe
from relax_hpc.rewards.jail import Jail

DEADLINE_S = 20.0
"""Seconds for the others' reports to appear, and again for their calls to end."""
CALL_TIMEOUT_S = 3.0
POLL_S = 0.05
MIN_LOCAL = 1 << 30
MPI_DONE = ".mpi.json"
"""Suffix of the file in the folder that says what MPI found."""
TOKEN = "token"
"""Name of the file in the folder with the secret by which the probes know each other."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="doctor_probe")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--interfaces", nargs="*", default=[])
    parser.add_argument("--local_dir", default="", help="empty: this node's TMPDIR, or /tmp")
    parser.add_argument("--local_bytes", type=int, default=0, help="that will be copied there")
    parser.add_argument("--gpus", action="store_true", help="look at the driver")
    parser.add_argument(
        "--engines", action="store_true", help="look at the compilers of engines on GPUs"
    )
    parser.add_argument("--mpi", action="store_true", help="try it between the nodes, last")
    parser.add_argument(
        "--code", default="", help="jails by key, as JSON: whether programs can be kept apart here"
    )
    parser.add_argument("--paths", nargs="*", default=[], metavar="KEY=PATH")
    parser.add_argument("--planes", nargs="*", default=[], metavar="PLANE=MODE")
    parser.add_argument("--name", default=os.environ.get("SLURMD_NODENAME") or socket.gethostname())
    given = parser.parse_args()
    node = given.name
    host, problems = _address(given.interfaces)
    local = given.local_dir or os.environ.get("TMPDIR") or "/tmp"
    problems += [*_local(Path(local), max(MIN_LOCAL, given.local_bytes)), *_missing(given.paths)]
    problems += _programs(given.code) if given.code else []
    report: dict[str, Any] = {"node": node, "problems": problems}
    if given.gpus:
        report |= node_report(given.engines)
    modes, token = (
        dict(text.split("=", 1) for text in given.planes),
        (given.folder / TOKEN).read_bytes(),
    )
    planes = PlaneProbe(node, modes, token, host)
    with socket.create_server((host, 0)) as listener:
        threading.Thread(target=_answer, args=(listener,), daemon=True).start()
        address = [host, listener.getsockname()[1]]
        write_json(
            given.folder / f"{node}.seen.json",
            report | {"address": address, "offer": planes.offer()},
        )
        others = _wait(given.folder, "*.seen.json", given.nodes)
        report["seen"] = sorted(others)
        for name, other in others.items():
            report["problems"] += _call(name, *other["address"], report)
        report["trials"] = planes.trials(other["offer"] for other in others.values())
        write_json(given.folder / f"{node}.done.json", report)
        _wait(given.folder, "*.done.json", given.nodes)
    planes.close()
    if given.mpi:
        # Last, as a broken one ends this process.
        write_json(given.folder / f"{node}{MPI_DONE}", try_mpi())


def _local(folder: Path, needed: int) -> list[str]:
    """Problems of the node's own disk: it must be writable, and have room."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder):
            free = shutil.disk_usage(folder).free
    except OSError as problem:
        return [
            f"site.local_dir: cannot write in {folder}: {problem.strerror}; name a folder on the "
            "node's own disk"
        ]
    if free > needed:
        return []
    return [
        f"site.local_dir: {folder} has {free / 2**30:.1f} GiB free, allowed: at least "
        f"{needed / 2**30:.1f}"
    ]


def _address(interfaces: list[str]) -> tuple[str, list[str]]:
    """The first interface's address, or that of the host's own name; and what is wrong with any of
    them."""
    if not interfaces:
        config = Config(layout="jobs")
        try:
            return own_address(config, "hub"), []
        except ConfigError as problem:
            return LOOPBACK, [str(problem)]
    found, problems = [], []
    for name in interfaces:
        try:
            found.append(interface_address(name))
        except ConfigError as problem:
            problems.append(str(problem))
    return (found or [LOOPBACK])[0], problems


def _missing(paths: list[str]) -> list[str]:
    pairs = [text.split("=", 1) for text in paths]
    return [
        f"{key}: found {path!r}, which this node does not see; put it on the shared filesystem"
        for key, path in pairs
        if not Path(path).exists()
    ]


def _programs(jails: str) -> list[str]:
    problems = []
    for key, settings in json.loads(jails).items():
        try:
            Jail(rebuild_settings(CodeSettings, settings), key)
        except RelaxError as error:
            problems.append(str(error))
    return problems


def _answer(listener: socket.socket) -> None:
    while True:
        try:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(f"{time.time()!r}\n".encode())
        except OSError:
            return


def _call(name: str, host: str, port: int, report: dict[str, Any]) -> list[str]:
    """Note in ``report`` how far the other's clock is off, to half the time the answer took."""
    started = time.time()
    try:
        with socket.create_connection((host, port), timeout=CALL_TIMEOUT_S) as connection:
            theirs = float(connection.makefile().readline())
    except (OSError, ValueError) as problem:
        return [
            f"ports: cannot reach {name} at {host}:{port} ({problem}); open the ports, or see "
            "site.interface"
        ]
    report.setdefault("skew_s", {})[name] = theirs - (started + time.time()) / 2
    return []


def _wait(folder: Path, pattern: str, count: int) -> dict[str, Any]:
    """Reports by node: all of them, or those seen by the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        paths = list(folder.glob(pattern))
        if len(paths) >= count or time.monotonic() > deadline:
            return {path.name.rsplit(".", 2)[0]: json.loads(path.read_text()) for path in paths}
        time.sleep(POLL_S)


if __name__ == "__main__":
    main()
