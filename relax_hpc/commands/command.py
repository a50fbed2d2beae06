"""Description of a subcommand."""

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
    """Function from the arguments that were given, nested, to the exit code."""
    takes_config: bool = False
    """Whether every field of the configuration is an option."""
    is_whole: bool = False
    """Whether the options make the configuration of a run, and no layer for a living one."""
    only_reads: bool = False
    """Whether it only reads a run, of anybody: then it imports no module that the run's
    configuration names."""
    for_others: bool = False
    """Whether it writes what its user may want to share, by the user's own umask, and nothing into
    a run."""


@dataclass(frozen=True, slots=True)
class Verbs:
    """A word before several subcommands, as in `relax-hpc queue audit`."""

    help: str
    commands: dict[str, Command]


CONFIG_USAGE = "[--config F]... [--KEY VALUE]... [--print_config]"


def config_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of commands that are given a whole configuration."""
    # jsonargparse hands its own option of this name over as `--print_config=`.
    parser.add_argument(
        "--print_config",
        nargs="?",
        metavar="",
        help="Print the configuration and where it came from",
    )
    layer_arguments(parser)


def layer_arguments(parser: ArgumentParser) -> None:
    """Add the files of configurations, and an option for every field."""
    parser.add_argument(
        "--config",
        action="append",
        metavar="F",
        help="YAML file, or short name of a packaged one, such as quickstart; several compose from "
        "left to right",
    )
    add_options(parser)


def run_argument(parser: ArgumentParser) -> None:
    """Add the argument that names the run that a command is about."""
    parser.add_argument("run", metavar="RUN", help="Run directory")


def complain(*messages: str) -> None:
    """Print errors, one line each."""
    for message in messages:
        print(f"relax-hpc: error: {' '.join(message.split())}", file=sys.stderr)
