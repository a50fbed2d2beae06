"""Checks whether this machine can run a sandbox: programs, host name, folder, free ports."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path

from relax_hpc.base.errors import ConfigError
from relax_hpc.cluster.sandbox import config_files, options
from relax_hpc.cluster.sandbox.installation import SlurmInstallation
from relax_hpc.cluster.sandbox.options import Options

PROGRAMS = {
    "munged": "munge",
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "srun": "slurm-wlm",
    "scontrol": "slurm-wlm",
}
"""Programs that a sandbox needs -> the Debian package of each."""


def find(program: str) -> str | None:
    """Path of a program, or None if it is not installed."""
    return SlurmInstallation().find(program)


def missing() -> list[str]:
    """Programs of PROGRAMS that are not installed."""
    return [program for program in PROGRAMS if find(program) is None]


def check(prefix: str) -> None:
    """ConfigError if this machine cannot run a sandbox with the Slurm in `prefix`; empty: with the
    Slurm on PATH."""
    programs = [program for program in missing() if not prefix or program == "munged"]
    if programs:
        packages = " ".join(sorted({PROGRAMS[program] for program in programs}))
        raise ConfigError(
            f"sandbox: found no {', '.join(programs)} on this machine, install them: "
            f"apt-get install --no-install-recommends {packages}"
        )
    SlurmInstallation(prefix).check()
    name = config_files.host()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        raise ConfigError(
            f"sandbox: this machine's own name {name} does not resolve, add `127.0.0.1 {name}` to "
            "/etc/hosts"
        ) from None


def check_owner(folder: Path) -> None:
    """ConfigError if `folder` belongs to another user."""
    if folder.exists() and folder.stat().st_uid != os.getuid():
        raise ConfigError(f"sandbox: folder: {folder} is another user's, choose one of your own")


def check_binding(wanted: Options) -> None:
    """ConfigError if processes would be bound to more CPUs than this machine has."""
    cpus = len(os.sched_getaffinity(0))
    if wanted.bind and wanted.nodes and wanted.cpus > cpus:
        raise ConfigError(
            f"sandbox: cpus: found {wanted.cpus} with bind, allowed: up to the {cpus} of this "
            "machine"
        )


def with_port(folder: Path, wanted: Options, saved: Options | None) -> Options:
    """`wanted` with a block of ports: the one that it names, the previous one, or a free one."""
    if wanted.port:
        port = _first_used_port(wanted)
        if port is not None:
            raise ConfigError(
                f"sandbox: port: {port} of 127.0.0.1 is in use, leave port out to get free ones"
            )
        return wanted
    blocks = ([saved.port] if saved and saved.port else []) + options.port_blocks(folder)
    for block in blocks:
        chosen = replace(wanted, port=block)
        if _first_used_port(chosen) is None:
            return chosen
    raise ConfigError(
        "sandbox: port: found no free block of ports from 20000 to 32160, name a --port"
    )


def _first_used_port(chosen: Options) -> int | None:
    """First port of `chosen` that is in use; None if all are free."""
    for port in range(chosen.port, chosen.port + chosen.nodes + 1):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                return port
    return None
