"""`relax-hpc`: start, check, watch and plot runs. Each parser is made when asked for, heavy parts load in handlers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from jsonargparse import SUPPRESS, ArgumentParser

from relax_hpc import __version__
from relax_hpc.config.check import check
from relax_hpc.config.clean import COMMAND_LINE, near
from relax_hpc.config.load import build, compose, print_config, resolve
from relax_hpc.config.options import add_options, explain, split_groups
from relax_hpc.config.schema import Config
from relax_hpc.errors import EXIT_CONFIG, EXIT_DONE, ConfigError, RelaxError
from relax_hpc.rundir import RunDir

EXIT_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand."""

    help: str
    usage: str
    add_arguments: Callable[[ArgumentParser], None]
    handle: Callable[[dict[str, Any]], int]
    """From the arguments that were given, nested, to the exit code."""
    takes_config: bool = False
    """Whether every field of the configuration is an option."""


class _Parser(ArgumentParser):
    """Errors end as one line, like all others."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        explain(message)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code: 0 done, 75 try again, 78 configuration, 93 no progress."""
    try:
        return _dispatch(list(sys.argv[1:] if argv is None else argv))
    except RelaxError as error:
        _complain(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def parser_of(name: str) -> ArgumentParser:
    """The parser of the subcommand `name`."""
    command = COMMANDS[name]
    prog = f"relax-hpc {name}"
    parser = _Parser(prog=prog, usage=f"{prog} {command.usage}", description=command.help, allow_abbrev=False)
    command.add_arguments(parser)
    return parser


def _dispatch(argv: list[str]) -> int:
    if argv and argv[0] in COMMANDS:
        command = COMMANDS[argv[0]]
        rest, groups = split_groups(argv[1:]) if command.takes_config else (argv[1:], {})
        return command.handle(parser_of(argv[0]).parse_args(rest, defaults=False).as_dict() | groups)
    if argv and not argv[0].startswith("-"):
        raise ConfigError(
            f"{COMMAND_LINE}: {argv[0]}: unknown command, allowed: {', '.join(COMMANDS)}{near(argv[0], list(COMMANDS))}"
        )
    parser = _top_parser()
    parser.parse_args(argv)
    parser.print_help()
    return EXIT_DONE


def _top_parser() -> ArgumentParser:
    parser = _Parser(
        prog="relax-hpc",
        usage="relax-hpc COMMAND ...",
        description="Reinforcement-learning post-training of language models on a Slurm cluster or one machine.",
        version=__version__,
        allow_abbrev=False,
    )
    commands = parser.add_argument_group("commands (relax-hpc COMMAND --help tells more)")
    for name, command in COMMANDS.items():
        commands.add_argument(f"command_{name}", nargs="?", default=SUPPRESS, metavar=name, help=command.help)
    return parser


def _config_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--config", action="append", metavar="F", help="YAML file; several compose from left to right")
    # jsonargparse hands its own option of this name over as `--print_config=`.
    parser.add_argument("--print_config", nargs="?", metavar="", help="Print the configuration and where it came from")
    add_options(parser)


def _run_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--resume", action="store_true", help="Go on with the run that lies in run_dir")
    _config_arguments(parser)


def _plot_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="Run directories")
    parser.add_argument("--output", default="rewards.png", metavar="F.png", help="Image to write")
    parser.add_argument("--tags", nargs="+", default=[], metavar="TAG", help="Metrics to draw; none: the usual ones")


def _status_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="Run directory")
    parser.add_argument("--json", action="store_true", help="For programs")


def _run(given: dict[str, Any]) -> int:
    resume = given.pop("resume", False)
    if resume and not given.get("config"):
        given["config"] = [str(_run_dir(given).config)]
    config = _configure(given)
    if config is None:
        return EXIT_DONE
    config = resolve(config)
    _check_run_dir(RunDir(Path(config.run_dir)), resume)
    if findings := check(config):
        for finding in findings:
            _complain(finding)
        return EXIT_CONFIG
    from relax_hpc.launch import local

    return local.run(config, resume)


def _check(given: dict[str, Any]) -> int:
    config = _configure(given)
    if config is None:
        return EXIT_DONE
    findings = check(resolve(config))
    print("\n".join(findings) or "no findings")
    return EXIT_CONFIG if findings else EXIT_DONE


def _plot(given: dict[str, Any]) -> int:
    from relax_hpc.metrics import plot

    return plot.main(given["runs"], given.get("output", "rewards.png"), given.get("tags", []))


def _status(given: dict[str, Any]) -> int:
    from relax_hpc.launch import status

    return status.main(given["run"], given.get("json", False))


def _configure(given: dict[str, Any]) -> Config | None:
    """The configuration asked for; None if it was only to be printed."""
    files, only_print = given.pop("config", None) or [], given.pop("print_config", None) is not None
    layers = compose(files, given)
    if only_print:
        print(print_config(layers), end="")
        return None
    return build(Config, layers.tree)


def _run_dir(given: dict[str, Any]) -> RunDir:
    """Where a resume without files finds its configuration."""
    if not (given.get("run_dir") or given.get("name")):
        raise ConfigError(f"{COMMAND_LINE}: --resume: found neither --run_dir nor --config, give one of them")
    run = RunDir(Path(given.get("run_dir") or f"runs/{given['name']}"))
    # A run directory that was moved counts from where it is now.
    given["run_dir"] = str(run.root)
    _check_run_dir(run, resume=True)
    return run


def _check_run_dir(run: RunDir, resume: bool) -> None:
    if resume and not run.config.is_file():
        raise ConfigError(f"run_dir: found no run in {run.root} (no config.yaml), leave out --resume to start one")
    if not resume and run.config.exists():
        raise ConfigError(f"run_dir: {run.root} already holds a run, --resume it or name another --run_dir")


def _complain(message: str) -> None:
    print(f"relax-hpc: error: {' '.join(message.split())}", file=sys.stderr)


_CONFIG_USAGE = "[--config F]... [--KEY VALUE]... [--print_config]"
COMMANDS = {
    "run": Command(
        "Start a run, or go on with one, and supervise it until it ends.",
        f"[--resume] [--run_dir D] {_CONFIG_USAGE}",
        _run_arguments,
        _run,
        takes_config=True,
    ),
    "check": Command("Look for mistakes without starting anything.", _CONFIG_USAGE, _config_arguments, _check, True),
    "status": Command("Show what a run is doing.", "RUN [--json]", _status_arguments, _status),
    "plot": Command(
        "Draw the metrics of one or more runs.", "RUN [RUN ...] [--output F] [--tags T ...]", _plot_arguments, _plot
    ),
}
