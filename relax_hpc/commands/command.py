"""Descriptions of subcommands, and arguments that several of them share."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jsonargparse import ArgumentParser

from relax_hpc.config.options import add_options


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand."""

    help: str
    usage: str
    add_arguments: Callable[[ArgumentParser], None]
    handle: Callable[[dict[str, Any]], int]
    """Function that takes the nested arguments of the command line and returns the exit code."""
    takes_config: bool = False
    """Whether every field of the configuration is an option."""
    is_whole: bool = False
    """Whether the options make the whole configuration of a run, and not a change of a running
    one."""
    only_reads: bool = False
    """Whether it only reads a run, also of another user. Then it imports no module that the run's
    configuration names."""
    takes_program: bool = False
    """Whether another program with its arguments may follow after `--`, as argument `program`."""
    for_others: bool = False
    """Whether it writes files that its user may want to share. They get the user's own umask, and
    are not in a run directory."""


@dataclass(frozen=True, slots=True)
class CommandGroup:
    """Several subcommands under one name, as in `relax-hpc queue audit`."""

    help: str
    commands: dict[str, Command]


CONFIG_USAGE = "[--config F]... [--KEY VALUE]... [--print_config]"


def config_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of commands that take a whole configuration."""
    # jsonargparse passes its own option of this name as `--print_config=`.
    parser.add_argument(
        "--print_config",
        nargs="?",
        metavar="",
        help="Print the configuration with the origin of each value, and exit.",
    )
    layer_arguments(parser)


def layer_arguments(parser: ArgumentParser) -> None:
    """Add the files of configurations, and an option for every field."""
    parser.add_argument(
        "--config",
        action="append",
        metavar="F",
        help="YAML file, or the short name of a packaged one, such as quickstart. Later files "
        "override earlier ones.",
    )
    add_options(parser)


def run_argument(parser: ArgumentParser) -> None:
    """Add the argument that names the run directory."""
    parser.add_argument("run", metavar="RUN", help="Run directory.")


def json_argument(parser: ArgumentParser) -> None:
    """Add the option for output that programs read."""
    parser.add_argument("--json", action="store_true", help="Print the result as JSON.")


def complain(*messages: str) -> None:
    """Print errors, one line each."""
    for message in messages:
        print(f"relax-hpc: error: {' '.join(message.split())}", file=sys.stderr)
