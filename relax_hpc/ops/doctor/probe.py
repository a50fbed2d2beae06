"""Probe that `doctor --deep` runs on every node: `python -m relax_hpc.ops.doctor.probe --folder F
--nodes N`.

Each probe renames a report into the shared folder and waits until it sees all reports. Then it
connects to every other probe over TCP, which answers with its time, and reads the slab that it
offers on each plane. A second report has the results.
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
from relax_hpc.base.machine.requirements import GPU
from relax_hpc.base.reward_settings import CodeSettings, rebuild_settings
from relax_hpc.base.rundir import write_json
from relax_hpc.cluster.slurm.mpi import try_mpi
from relax_hpc.config.schema import Config
from relax_hpc.net.rendezvous.network import LOOPBACK, interface_address, own_address
from relax_hpc.ops.doctor.gpus import node_report
from relax_hpc.ops.doctor.planes import PlaneProbe
from relax_hpc.rewards.jail import Jail

DEADLINE_S = 20.0
"""Seconds to wait for the first reports of all probes, and again for the second ones."""
CALL_TIMEOUT_S = 3.0
POLL_S = 0.05
MIN_LOCAL_BYTES = 1 << 30
MPI_DONE = ".mpi.json"
"""Suffix of the file in the folder with the result of MPI."""
TOKEN = "token"
"""Name of the file in the folder with the secret that authenticates the probes."""


def main() -> None:
    arguments = _parser().parse_args()
    node, folder, nodes = arguments.name, arguments.folder, arguments.nodes
    host, problems = _find_address(arguments.interfaces)
    local = arguments.local_dir or os.environ.get("TMPDIR") or "/tmp"
    problems += _local_disk_problems(Path(local), max(MIN_LOCAL_BYTES, arguments.local_bytes))
    problems += _missing_paths(arguments.paths)
    problems += _jail_problems(arguments.code) if arguments.code else []
    report: dict[str, Any] = {"node": node}
    report |= node_report([GPU] if arguments.gpus else [], arguments.engines)
    report["problems"] += problems
    modes = dict(text.split("=", 1) for text in arguments.planes)
    planes = PlaneProbe(node, modes, (folder / TOKEN).read_bytes(), host)
    with socket.create_server((host, 0)) as listener:
        threading.Thread(target=_serve_clock, args=(listener,), daemon=True).start()
        address = (host, listener.getsockname()[1])
        contact = {"address": address, "offer": planes.offer()}
        write_json(folder / f"{node}.seen.json", report | contact)
        peers = _await_reports(folder, "*.seen.json", nodes)
        report["seen"] = sorted(peers)
        for name, peer in peers.items():
            peer_host, port = peer["address"]
            report["problems"] += _check_peer(name, peer_host, port, report)
        report["trials"] = planes.trials(peer["offer"] for peer in peers.values())
        write_json(folder / f"{node}.done.json", report)
        _await_reports(folder, "*.done.json", nodes)
    planes.close()
    if arguments.mpi:
        # Last, because a broken MPI library aborts this process.
        write_json(folder / f"{node}{MPI_DONE}", try_mpi())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="doctor_probe")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--interfaces", nargs="*", default=[])
    parser.add_argument("--local_dir", default="", help="empty: this node's TMPDIR, or /tmp")
    parser.add_argument("--local_bytes", type=int, default=0, help="bytes that are staged there")
    parser.add_argument("--gpus", action="store_true", help="check what GPUs need")
    parser.add_argument("--engines", action="store_true", help="check the compilers of engines")
    parser.add_argument("--mpi", action="store_true", help="try MPI between the nodes, last")
    parser.add_argument("--code", default="", help="jails to try: JSON of settings by key")
    parser.add_argument("--paths", nargs="*", default=[], metavar="KEY=PATH")
    parser.add_argument("--planes", nargs="*", default=[], metavar="PLANE=MODE")
    parser.add_argument("--name", default=os.environ.get("SLURMD_NODENAME") or socket.gethostname())
    return parser


def _local_disk_problems(folder: Path, needed_bytes: int) -> list[str]:
    """Check that the node's own disk is writable and has enough space."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder):
            free_bytes = shutil.disk_usage(folder).free
    except OSError as problem:
        return [
            f"site.local_dir: cannot write in {folder}: {problem.strerror}; name a folder on the "
            "node's own disk"
        ]
    if free_bytes > needed_bytes:
        return []
    return [
        f"site.local_dir: found {free_bytes / 2**30:.1f} GiB free in {folder}, allowed: at least "
        f"{needed_bytes / 2**30:.1f} GiB"
    ]


def _find_address(interfaces: list[str]) -> tuple[str, list[str]]:
    """Address of the first of ``interfaces`` that works, and problems with the others.

    Without interfaces it is the address of the host's name.
    """
    if not interfaces:
        config = Config(layout="jobs")
        try:
            return own_address(config, "hub"), []
        except ConfigError as problem:
            return LOOPBACK, [str(problem)]
    addresses, problems = [], []
    for name in interfaces:
        try:
            addresses.append(interface_address(name))
        except ConfigError as problem:
            problems.append(str(problem))
    return (addresses or [LOOPBACK])[0], problems


def _missing_paths(paths: list[str]) -> list[str]:
    """A line for each of the texts KEY=PATH whose path this node does not see."""
    pairs = [text.split("=", 1) for text in paths]
    return [
        f"{key}: found {path!r}, which this node does not see; put it on the shared filesystem"
        for key, path in pairs
        if not Path(path).exists()
    ]


def _jail_problems(jails: str) -> list[str]:
    """A line for each jail that this node cannot start; ``jails``: JSON of settings by key."""
    problems = []
    for key, settings in json.loads(jails).items():
        try:
            Jail(rebuild_settings(CodeSettings, settings), key)
        except RelaxError as error:
            problems.append(str(error))
    return problems


def _serve_clock(listener: socket.socket) -> None:
    """Answer each connection with this node's time, until ``listener`` is closed."""
    while True:
        try:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(f"{time.time()!r}\n".encode())
        except OSError:
            return


def _check_peer(name: str, host: str, port: int, report: dict[str, Any]) -> list[str]:
    """Connect to the probe on node ``name``; returns a line if that fails.

    The difference of the clocks goes into ``report``. Its error is at most half the round-trip
    time.
    """
    started = time.time()
    try:
        with socket.create_connection((host, port), timeout=CALL_TIMEOUT_S) as connection:
            peer_time = float(connection.makefile().readline())
    except (OSError, ValueError) as problem:
        return [
            f"ports: cannot reach {name} at {host}:{port} ({problem}); open the ports, or see "
            "site.interface"
        ]
    report.setdefault("skew_s", {})[name] = peer_time - (started + time.time()) / 2
    return []


def _await_reports(folder: Path, pattern: str, count: int) -> dict[str, Any]:
    """Wait for ``count`` reports, or until the deadline; returns the reports by node."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        paths = list(folder.glob(pattern))
        if len(paths) >= count or time.monotonic() > deadline:
            return {path.name.rsplit(".", 2)[0]: json.loads(path.read_text()) for path in paths}
        time.sleep(POLL_S)


if __name__ == "__main__":
    main()
