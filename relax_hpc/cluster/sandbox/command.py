"""`relax-hpc sandbox VERB`: the sandbox on the command line."""

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
    "up": "start it, or what does not run of it",
    "down": "cancel its jobs and stop it; the files stay",
    "status": "show daemons and nodes; exit code 0 only if all is up",
    "kill-node": "power loss of NODE: kill -9 of all that runs on it",
    "start-node": "power NODE on again",
    "restart": "kill slurmctld and every slurmd and start them again; running jobs go on",
}
_HELP = {
    "nodes": "nodes",
    "cpus": "CPUs a node claims to have",
    "sockets": "sockets that these are in",
    "memory": "MB a node claims to have",
    "gpus": "GPUs a node claims to have; they are /dev/null",
    "slurmd_timeout": "seconds of silence after which a node is down",
    "kill_wait": "seconds between SIGTERM and SIGKILL of a job",
    "cred_expire": "seconds a job's credential lives; a requeue takes 2 more",
    "port": "first of 64 ports; 0: free ones",
}


def default_folder() -> Path:
    """Folder of the sandbox when no DIR is given: one a user."""
    return Path(tempfile.gettempdir()) / f"relax-sandbox-{getpass.getuser()}"


def usage(verb: str) -> str:
    """Usage of ``verb``: what may follow it on a command line.

    >>> usage("kill-node")
    'NODE [DIR] [--down]'
    """
    node, more = (
        ("NODE " if verb.endswith("-node") else ""),
        {"up": " [OPTION]...", "kill-node": " [--down]"},
    )
    return f"{node}[DIR]{more.get(verb, '')}"


def add_arguments(verb: str, parser: argparse.ArgumentParser) -> None:
    """Add what `main` takes with ``verb``; options that are not given stay None, or are absent."""
    places = "[NODE] [DIR]" if verb.endswith("-node") else "DIR"
    parser.add_argument(
        "words", nargs="*", metavar=places, help=f"DIR: the folder (default {default_folder()})"
    )
    if verb == "kill-node":
        parser.add_argument(
            "--down", action="store_true", help="tell slurmctld at once that NODE is down"
        )
    if verb != "up":
        return
    for name, text in _HELP.items():
        metavar = "MB" if name == "memory" else "N"
        default = getattr(Options(), name)
        parser.add_argument(
            f"--{name}", type=int, metavar=metavar, help=f"{text}; {default} unless it had another"
        )
    parser.add_argument(
        "--bind", action="store_const", const=True, help="bind processes to their CPUs"
    )
    parser.add_argument(
        "--declared",
        action="append",
        metavar="LINE",
        help='nodes that run nothing: "big[1-9] CPUs=64 Gres=gpu:8"',
    )
    parser.add_argument(
        "--extra", action="append", metavar="LINE", help="one more line of slurm.conf"
    )


def main(verb: str, words: Sequence[str] = (), *, down: bool = False, **given: Any) -> int:
    """Do `verb` of VERBS on [NODE] [DIR] in `words`; `given` are Options by name, None where not
    given.

    Returns the exit code. RelaxError and its kinds: see the functions of `cluster`.
    """
    changes = {name: value for name, value in given.items() if value is not None}
    node, folder = _places(verb, words)
    if verb == "up":
        return _up(folder, changes)
    if verb == "down":
        cluster.down(folder)
        return EXIT_DONE
    return _on(verb, cluster.load(folder), node, down)


def _places(verb: str, words: Sequence[str]) -> tuple[str, Path]:
    """NODE, empty for verbs without one, and DIR."""
    places = list(words)
    takes_node = verb.endswith("-node")
    if takes_node and not places:
        raise ConfigError(f"sandbox: {verb}: found no NODE, give one, as in `{verb} node1`")
    node = places.pop(0) if takes_node else ""
    if len(places) > 1:
        raise ConfigError(f"sandbox: {verb}: found {' '.join(places)}, allowed one DIR")
    return node, Path(places[0]).expanduser().resolve() if places else default_folder()


def _up(folder: Path, changes: dict[str, Any]) -> int:
    changes |= {name: tuple(changes[name]) for name in ("extra", "declared") if name in changes}
    saved = options.load(folder / "options.json") or Options()
    sandbox = cluster.up(folder, replace(saved, **changes))
    print(f"{len(sandbox.nodes)} nodes are up in {sandbox.folder}")
    print(f"use them:  source {sandbox.folder}/env.sh; sinfo")
    print(f"run there: relax-hpc ... --config {sandbox.site}")
    return EXIT_DONE


def _on(verb: str, sandbox: Sandbox, node: str, down: bool) -> int:
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
