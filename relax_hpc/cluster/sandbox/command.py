"""`relax-hpc sandbox VERB`: commands for the sandbox."""

from __future__ import annotations

import argparse
import getpass
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from relax_hpc.base.errors import EXIT_DONE, EXIT_RETRY, ConfigError
from relax_hpc.cluster.sandbox import cluster, options
from relax_hpc.cluster.sandbox.cluster import Sandbox
from relax_hpc.cluster.sandbox.options import Options

VERBS = {
    "up": "start the sandbox, or those of its daemons that do not run",
    "down": "cancel all jobs and stop the sandbox; its files stay",
    "status": "show daemons and nodes; the exit code is 0 only if all of them run",
    "kill-node": "simulate a power loss of NODE: kill all of its processes by SIGKILL",
    "start-node": "power NODE on again",
    "restart": "kill slurmctld and every slurmd, and start them again; running jobs continue",
}
_HELP = {
    "nodes": "Number of nodes",
    "cpus": "CPUs that Slurm assumes on each node",
    "sockets": "Sockets that contain these CPUs",
    "memory": "Memory in MB that Slurm assumes on each node",
    "gpus": "GPUs that Slurm assumes on each node; each one is a link to /dev/null",
    "slurmd_timeout": "Seconds without an answer after which a node is down",
    "kill_wait": "Seconds between SIGTERM and SIGKILL of a job",
    "cred_expire": "Seconds until a job's credential expires; a requeued job starts 2 s later",
    "port": "First of 64 ports; 0 selects free ports",
}
_SLURM_HELP = (
    "Folder with the bin/ and sbin/ of a Slurm built from source with --enable-multiple-slurmd. "
    "Default: the previous value, at first the Slurm on PATH; '' selects that again."
)


def default_folder() -> Path:
    """Default folder of a user's sandbox."""
    return Path(tempfile.gettempdir()) / f"relax-sandbox-{getpass.getuser()}"


def usage(verb: str) -> str:
    """Usage of ``verb``: the arguments after it.

    >>> usage("kill-node")
    'NODE [DIR] [--down]'
    """
    node = "NODE " if verb.endswith("-node") else ""
    options_of_verb = {"up": " [OPTION]...", "kill-node": " [--down]"}
    return f"{node}[DIR]{options_of_verb.get(verb, '')}"


def add_arguments(verb: str, parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``verb``. Options that the user leaves out are None or absent."""
    metavar = "[NODE] [DIR]" if verb.endswith("-node") else "DIR"
    parser.add_argument(
        "positional",
        nargs="*",
        metavar=metavar,
        help=f"DIR: folder of the sandbox. Default: {default_folder()}.",
    )
    if verb == "kill-node":
        parser.add_argument(
            "--down", action="store_true", help="Report the loss of NODE to slurmctld immediately."
        )
    if verb != "up":
        return
    for name, text in _HELP.items():
        unit = "MB" if name == "memory" else "N"
        default = getattr(Options(), name)
        parser.add_argument(
            f"--{name}",
            type=int,
            metavar=unit,
            help=f"{text}. Default: the previous value, at first {default}.",
        )
    parser.add_argument("--slurm", metavar="PREFIX", help=_SLURM_HELP)
    parser.add_argument(
        "--bind", action="store_const", const=True, help="Bind processes to their CPUs."
    )
    parser.add_argument(
        "--declared",
        action="append",
        metavar="LINE",
        help='Nodes that Slurm knows but that run no jobs, such as "big[1-9] CPUs=64 Gres=gpu:8".',
    )
    parser.add_argument(
        "--extra", action="append", metavar="LINE", help="Further line of slurm.conf."
    )


def main(verb: str, positional: Sequence[str] = (), *, down: bool = False, **values: Any) -> int:
    """Run `verb` of VERBS with [NODE] [DIR] in `positional`. `values` are Options by name, or None.

    Returns the exit code. The functions of `cluster` raise RelaxError and its subclasses.
    """
    changes = {name: value for name, value in values.items() if value is not None}
    node, folder = _parse_positional(verb, positional)
    if verb == "up":
        return _up(folder, changes)
    if verb == "down":
        cluster.down(folder)
        return EXIT_DONE
    return _run_verb(verb, cluster.load(folder), node, down)


def _parse_positional(verb: str, positional: Sequence[str]) -> tuple[str, Path]:
    """NODE, which is empty for verbs without a node, and DIR."""
    remaining = list(positional)
    takes_node = verb.endswith("-node")
    if takes_node and not remaining:
        raise ConfigError(f"sandbox: {verb}: found no NODE, give one, as in `{verb} node1`")
    node = remaining.pop(0) if takes_node else ""
    if len(remaining) > 1:
        raise ConfigError(f"sandbox: {verb}: found {' '.join(remaining)}, allowed one DIR")
    return node, Path(remaining[0]).expanduser().resolve() if remaining else default_folder()


def _up(folder: Path, changes: dict[str, Any]) -> int:
    changes |= {name: tuple(changes[name]) for name in ("extra", "declared") if name in changes}
    if changes.get("slurm"):
        changes["slurm"] = str(Path(changes["slurm"]).expanduser().resolve())
    saved = options.load(folder / "options.json") or Options()
    sandbox = cluster.up(folder, replace(saved, **changes))
    version = sandbox.installation.version()
    print(f"{len(sandbox.nodes)} nodes of Slurm {version} are up in {sandbox.folder}")
    print(f"use them:  source {sandbox.folder}/env.sh; sinfo")
    print(f"run there: relax-hpc ... --config {sandbox.site}")
    return EXIT_DONE


def _run_verb(verb: str, sandbox: Sandbox, node: str, down: bool) -> int:
    if verb == "kill-node":
        print("killed:", *sandbox.kill_node(node, down=down))
    elif verb == "start-node":
        sandbox.start_node(node)
    elif verb == "restart":
        sandbox.restart()
    else:
        return _status(sandbox)
    return EXIT_DONE


def _status(sandbox: Sandbox) -> int:
    for name, pid in sandbox.daemons().items():
        print(f"{name:16} {f'up, pid {pid}' if pid else 'DOWN'}")
    for name, state in sandbox.node_states().items():
        print(f"{name:16} {state}")
    return EXIT_DONE if sandbox.is_up() else EXIT_RETRY
