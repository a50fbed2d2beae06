"""`relax-hpc`: start, check, watch and plot runs.

A parser is built only for the subcommand that is called, and handlers import heavy modules late, so
that the program starts quickly. Commands that read a configuration are in `config_commands.py`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NoReturn

from jsonargparse import SUPPRESS, ArgumentParser

from relax_hpc import __version__
from relax_hpc.base.disk_waits import describe_write_error, is_temporary
from relax_hpc.base.errors import (
    EXIT_CONFIG,
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_RETRY,
    ConfigError,
    RelaxError,
)
from relax_hpc.base.foreign_files import ForeignFileError
from relax_hpc.base.path_errors import exit_code_of, explain_path_error
from relax_hpc.base.plugins import refuse_imports
from relax_hpc.base.terminal_text import harmless_output
from relax_hpc.commands.command import Command, CommandGroup, complain
from relax_hpc.commands.completion import bash_script, check_shell, completion_arguments
from relax_hpc.commands.config_commands import CONFIG_COMMANDS, findings_of
from relax_hpc.commands.convert import CONVERT
from relax_hpc.commands.queue import QUEUE
from relax_hpc.commands.run_commands import RUN_COMMANDS
from relax_hpc.commands.samples import PAGE, SAMPLES
from relax_hpc.commands.sandbox import SANDBOX
from relax_hpc.config.layer_validation import COMMAND_LINE, Mistake, near
from relax_hpc.config.load import build, gather, resolve
from relax_hpc.config.options import OptionError, explain, options, split_free, without
from relax_hpc.config.schema import Config
from relax_hpc.net.rendezvous.process import PRIVATE_UMASK

_TITLE = (
    "Reinforcement-learning post-training of language models on a Slurm cluster or one machine."
)
_SETTINGS = (
    "Every setting of the configuration is an option too, such as --rollout.replicas 2. "
    "`relax-hpc {name} --help rollout` explains the settings of a section, `--help model.tiny` "
    "those of a subsection, and `--help all` all settings. The same texts are in "
    "docs/configuration/."
)


class _Parser(ArgumentParser):
    """Parser with errors of one line, like all other errors of this program."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        explain(message)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code: 0 done, 75 try again, 78 configuration, 93 no
    progress.

    Control characters in its output are escaped, because names and texts of runs, models and
    services may come from other people.
    """
    with harmless_output():
        return _run_command(argv)


def _run_command(argv: Sequence[str] | None) -> int:
    try:
        return _dispatch(list(sys.argv[1:] if argv is None else argv))
    except ConfigError as error:
        complain(*error.mistakes)
        return error.exit_code
    except RelaxError as error:
        complain(str(error))
        return error.exit_code
    except ForeignFileError as error:
        complain(f"{error.filename}: {error.strerror}")
        return EXIT_CONFIG
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of a pipe has ended, as in `relax-hpc logs RUN | head`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_DONE
    except OSError as error:
        return _end_by_os_error(error)


def _end_by_os_error(error: OSError) -> int:
    """Print one line about the disk or the path in ``error``, and return the exit code. Other
    errors are raised again."""
    if is_temporary(error):
        complain(describe_write_error(error.filename or "disk", error))
        return EXIT_RETRY
    sentence = explain_path_error(error)
    if not sentence:
        raise error
    complain(sentence)
    return exit_code_of(error)


def parser_of(name: str) -> ArgumentParser:
    """The parser of subcommand ``name``, such as `run` or `queue audit`."""
    command = commands()[name]
    prog = f"relax-hpc {name}"
    parser = _Parser(
        prog=prog, usage=f"{prog} {command.usage}", description=command.help, allow_abbrev=False
    )
    command.add_arguments(parser)
    return parser


def commands() -> dict[str, Command]:
    """All subcommands by their full names."""
    by_name: dict[str, Command] = {}
    for name, entry in COMMANDS.items():
        if isinstance(entry, CommandGroup):
            by_name |= {f"{name} {verb}": command for verb, command in entry.commands.items()}
        else:
            by_name[name] = entry
    return by_name


def _dispatch(argv: list[str]) -> int:
    by_name = commands()
    for length in (1, 2):
        name = " ".join(argv[:length])
        if name in by_name:
            return _run_subcommand(name, by_name[name], argv[length:])
    if argv and not argv[0].startswith("-"):
        return _explain_group(argv)
    parser = _top_parser("relax-hpc", _TITLE, COMMANDS)
    parser.parse_args(argv)
    parser.print_help()
    return EXIT_DONE


def _run_subcommand(name: str, command: Command, argv: list[str]) -> int:
    if command.takes_config and argv[:1] in (["-h"], ["--help"]):
        print(_help(name, argv[1:]), end="")
        return EXIT_DONE
    program: dict[str, Any] = {}
    if command.takes_program and "--" in argv:
        position = argv.index("--")
        argv, program = argv[:position], {"program": argv[position + 1 :]}
    declared, free = split_free(argv) if command.takes_config else (argv, {})
    arguments, errors = _parse(name, declared)
    arguments |= program
    if errors:
        raise ConfigError(*_all_mistakes(errors, arguments | free, command))
    return _handle(command, arguments | free)


def _explain_group(argv: list[str]) -> int:
    """Print the help of a group of commands. ConfigError for an unknown command."""
    name, entry = argv[0], COMMANDS.get(argv[0])
    if not isinstance(entry, CommandGroup):
        raise ConfigError(
            f"{COMMAND_LINE}: {name}: unknown command, allowed: "
            f"{', '.join(COMMANDS)}{near(name, list(COMMANDS))}"
        )
    if len(argv) > 1 and argv[1] not in ("-h", "--help"):
        allowed = f"allowed: {', '.join(entry.commands)}{near(argv[1], list(entry.commands))}"
        raise ConfigError(f"{COMMAND_LINE}: {name} {argv[1]}: unknown verb, {allowed}")
    _top_parser(f"relax-hpc {name}", entry.help, entry.commands).print_help()
    return EXIT_DONE


def _help(name: str, topics: Sequence[str]) -> str:
    """Help of a command: its own options, or the settings of ``topics``. A topic is a section of
    the configuration, a single setting, or `all`. ConfigError for an unknown topic."""
    parser = parser_of(name)
    section_of = {option.key: option.section.partition(": ")[0] for option in options()}
    sections = list(dict.fromkeys(section_of.values()))
    shown = set[str]()
    for topic in topics:
        inside = [section for section in sections if f"{section}.".startswith(f"{topic}.")]
        if topic in section_of:
            inside = [section_of[topic]]
        if not inside and topic != "all":
            top = dict.fromkeys(section.partition(".")[0] for section in sections)
            allowed = f"all, {', '.join(top)}, or a part such as model.tiny"
            hint = near(topic, [*sections, *section_of])
            raise ConfigError(f"{COMMAND_LINE}: --help: found {topic!r}, allowed: {allowed}{hint}")
        shown.update(sections if topic == "all" else inside)
    parser._action_groups = [
        group
        for group in parser._action_groups
        if (group.title in shown if topics else group.title not in sections)
    ]
    if not topics:
        parser.epilog = _SETTINGS.format(name=name)
    return parser.format_help()


def _parse(name: str, argv: list[str]) -> tuple[dict[str, Any], list[OptionError]]:
    """The valid arguments, and the errors of the other ones."""
    errors: list[OptionError] = []
    while True:
        try:
            return parser_of(name).parse_args(argv, defaults=False).as_dict(), errors
        except OptionError as error:
            # The parser stops at its first error. Without that option it finds the next one.
            remaining = without(argv, error.option)
            if len(remaining) == len(argv):
                raise
            argv = remaining
            errors.append(error)


def _all_mistakes(
    errors: list[OptionError], arguments: dict[str, Any], command: Command
) -> list[str]:
    """Mistakes in options, and in the configuration that results from the valid options."""
    texts = list[str]()
    for error in errors:
        texts += error.mistakes
    if not command.is_whole:
        return texts
    settings = {
        key: value
        for key, value in arguments.items()
        if key in Config.__dataclass_fields__ or "." in key
    }
    layers = gather(arguments.get("config") or [], settings)
    layers.mistakes += [Mistake(error.option.lstrip("-"), "") for error in errors]
    return texts + findings_of(resolve(build(Config, layers.tree)), layers)


def _handle(command: Command, arguments: dict[str, Any]) -> int:
    with refuse_imports() if command.only_reads else nullcontext():
        if command.for_others:
            return command.handle(arguments)
        before = os.umask(PRIVATE_UMASK)
        try:
            return command.handle(arguments)
        finally:
            os.umask(before)


def _top_parser(
    prog: str, description: str, entries: Mapping[str, Command | CommandGroup]
) -> ArgumentParser:
    """Parser of a command line whose next argument is one of ``entries``."""
    parser = _Parser(
        prog=prog,
        usage=f"{prog} COMMAND ...",
        description=description,
        allow_abbrev=False,
        version=__version__ if entries is COMMANDS else None,
    )
    group = parser.add_argument_group(f"commands ({prog} COMMAND --help explains one)")
    for name, entry in entries.items():
        group.add_argument(
            f"command_{name}", nargs="?", default=SUPPRESS, metavar=name, help=entry.help
        )
    return parser


def _plot_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="Run directories.")
    parser.add_argument("--output", default="rewards.png", metavar="F.png", help="Image to write.")
    parser.add_argument(
        "--tags",
        nargs="+",
        default=[],
        metavar="TAG",
        help="Metrics to plot. Default: the rewards and other usual metrics.",
    )


def _plot(arguments: dict[str, Any]) -> int:
    from relax_hpc.base.metrics import plot

    return plot.main(
        arguments["runs"], arguments.get("output", "rewards.png"), arguments.get("tags", [])
    )


def _print_completion(arguments: dict[str, Any]) -> int:
    check_shell(arguments["shell"])
    parsers = {name: parser_of(name) for name in commands()}
    print(bash_script(COMMANDS, commands(), parsers), end="")
    return EXIT_DONE


COMMANDS: dict[str, Command | CommandGroup] = {
    **CONFIG_COMMANDS,
    **RUN_COMMANDS,
    "sandbox": SANDBOX,
    "plot": Command(
        "Plot the metrics of one or more runs as an image.",
        "RUN [RUN ...] [--output F] [--tags T ...]",
        _plot_arguments,
        _plot,
        only_reads=True,
        for_others=True,
    ),
    "samples": SAMPLES,
    "page": PAGE,
    "queue": QUEUE,
    "convert": CONVERT,
    "completion": Command(
        "Print a script by which a shell completes commands, options and values.",
        "bash",
        completion_arguments,
        _print_completion,
        only_reads=True,
        for_others=True,
    ),
}
