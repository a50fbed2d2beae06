"""`relax-hpc`: start, check, watch and plot runs.

A parser is built only for the subcommand that is called, and handlers import heavy modules late, so
that the program starts quickly.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
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
    Mistakes,
    RelaxError,
)
from relax_hpc.base.foreign_files import ForeignFileError
from relax_hpc.base.path_errors import exit_code_of, explain_path_error
from relax_hpc.base.plugins import refuse_imports
from relax_hpc.base.rundir import RunDir, check_owner
from relax_hpc.base.terminal_text import harmless_output, log_entry
from relax_hpc.commands.command import (
    CONFIG_USAGE,
    Command,
    CommandGroup,
    complain,
    config_arguments,
    json_argument,
    run_argument,
)
from relax_hpc.commands.convert import CONVERT
from relax_hpc.commands.queue import QUEUE
from relax_hpc.commands.run_commands import RUN_COMMANDS
from relax_hpc.commands.samples import SAMPLES
from relax_hpc.commands.sandbox import SANDBOX
from relax_hpc.config.changes import change_files
from relax_hpc.config.layer_validation import COMMAND_LINE, Mistake, near
from relax_hpc.config.load import (
    Layers,
    build,
    compose,
    gather,
    load_resolved,
    print_config,
    resolve,
)
from relax_hpc.config.options import OptionError, explain, options, split_free, without
from relax_hpc.config.schema import Config
from relax_hpc.net.rendezvous.process import PRIVATE_UMASK
from relax_hpc.ops.checks.settings import check_request

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
    declared, free = split_free(argv) if command.takes_config else (argv, {})
    arguments, errors = _parse(name, declared)
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


def findings_of(config: Config, layers: Layers) -> list[str]:
    """All mistakes in a configuration: those of its layers, and other findings of `check`."""
    texts = [mistake.text for mistake in layers.mistakes if mistake.text]
    if layers.lost_layer:
        return texts
    findings = [finding for finding in check_request(config) if not layers.may_cause(finding)]
    return texts + [layers.with_source(finding) for finding in findings]


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


def _resume_argument(parser: ArgumentParser) -> None:
    parser.add_argument("--resume", action="store_true", help="Resume the run in run_dir.")


def _run_arguments(parser: ArgumentParser) -> None:
    _resume_argument(parser)
    config_arguments(parser)


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


def _run(arguments: dict[str, Any]) -> int:
    resume = arguments.pop("resume", False)
    if resume and not arguments.get("config"):
        arguments["config"] = _config_files(_run_dir(arguments))
    layers = _layers(arguments)
    if layers is None:
        return EXIT_DONE
    config = _check_config(layers, resume)
    from relax_hpc.commands import local

    return local.run(config, resume)


def _from_files(algorithm: str, arguments: dict[str, Any]) -> int:
    """Start a run that reads its rows from files and trains by ``algorithm``. ConfigError if the
    command line names another algorithm."""
    name = arguments.get("algorithm", {}).get("name", algorithm)
    if name != algorithm:
        raise ConfigError(
            f"{COMMAND_LINE}: algorithm.name: found {name!r} with relax-hpc {algorithm}; use run"
        )
    return _run(arguments | {"algorithm.name": algorithm})


def _submit_arguments(parser: ArgumentParser) -> None:
    _resume_argument(parser)
    parser.add_argument(
        "--dry-run", action="store_true", help="Write all files, but submit nothing to Slurm."
    )
    json_argument(parser)
    parser.add_argument(
        "--parsable", action="store_true", help="Print only the job ids, as sbatch --parsable does."
    )
    config_arguments(parser)


def _submit(arguments: dict[str, Any]) -> int:
    resume, dry_run = arguments.pop("resume", False), arguments.pop("dry_run", False)
    as_json, parsable = arguments.pop("json", False), arguments.pop("parsable", False)
    form = "parsable" if parsable else ""
    if as_json:
        form = "json"
    if resume and not arguments.get("config"):
        arguments["config"] = _config_files(_run_dir(arguments))
    layers = _layers(arguments)
    if layers is None:
        return EXIT_DONE
    unresolved, mistakes = build(Config, layers.tree), list[str]()
    if unresolved.layout == "local" and unresolved.site.name == "":
        mistakes.append(
            "layout: found 'local', allowed with submit: het or jobs, or local with a site; see run"
        )
    config = _check_config(layers, resume, mistakes)
    from relax_hpc.cluster.slurm.commands import Slurm
    from relax_hpc.cluster.slurm.job_lookup import check_no_live_jobs
    from relax_hpc.commands.submit import submit

    if resume and not dry_run:
        check_no_live_jobs(RunDir(Path(config.run_dir)), config, Slurm())
    return submit(config, resume, dry_run, form)


def _resume_arguments(parser: ArgumentParser) -> None:
    run_argument(parser)
    config_arguments(parser)


def _resume(arguments: dict[str, Any]) -> int:
    """Resume a run in the way it was started: on this machine, or by Slurm."""
    folder = arguments["run_dir"] = arguments.pop("run")
    _check_run_dir(RunDir(Path(folder)), resume=True)
    stored = load_resolved(Path(folder))
    layout = arguments.get("layout", stored.layout)
    site = arguments.get("site.name", stored.site.name)
    start = _run if (layout, site) == ("local", "") else _submit
    return start(arguments | {"resume": True})


def _check(arguments: dict[str, Any]) -> int:
    layers = _layers(arguments)
    if layers is None:
        return EXIT_DONE
    config = resolve(build(Config, layers.tree))
    findings = findings_of(config, layers)
    lines = [*findings, *(f"note: {note}" for note in notes_of(config))] or ["no findings"]
    # The name of a model's file may contain newlines, which must not look like further findings.
    print("\n".join(map(log_entry, lines)))
    return EXIT_CONFIG if findings else EXIT_DONE


def _plot(arguments: dict[str, Any]) -> int:
    from relax_hpc.base.metrics import plot

    return plot.main(
        arguments["runs"], arguments.get("output", "rewards.png"), arguments.get("tags", [])
    )


def _doctor_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--deep",
        action="store_true",
        help="Also run the checks on compute nodes, in a job of about a minute.",
    )
    json_argument(parser)
    config_arguments(parser)


def _doctor(arguments: dict[str, Any]) -> int:
    deep, as_json = arguments.pop("deep", False), arguments.pop("json", False)
    layers = _layers(arguments)
    if layers is None:
        return EXIT_DONE
    from relax_hpc.ops.doctor import doctor

    return doctor.main(resolve(build(Config, layers.tree)), deep, as_json, layers)


def _plan_arguments(parser: ArgumentParser) -> None:
    json_argument(parser)
    config_arguments(parser)


def _plan(arguments: dict[str, Any]) -> int:
    as_json = arguments.pop("json", False)
    layers = _layers(arguments)
    if layers is None:
        return EXIT_DONE
    if layers.mistakes:
        raise ConfigError(*(mistake.text for mistake in layers.mistakes))
    from relax_hpc.ops.checks.memory import misfits
    from relax_hpc.ops.checks.model_files import spec_at
    from relax_hpc.ops.plan import view

    config = resolve(build(Config, layers.tree))
    spec = spec_at(config.model)
    problems = sorted(misfits(config, spec))
    if problems:
        raise ConfigError(*(layers.with_source(problem) for problem in problems))
    return view.main(config, spec, as_json)


def _layers(arguments: dict[str, Any]) -> Layers | None:
    """The configuration of the command line with its mistakes. None if the user only wants to see
    it; then it is printed."""
    files = arguments.pop("config", None) or []
    if arguments.pop("print_config", None) is None:
        return gather(files, arguments)
    print(print_config(compose(files, arguments)), end="")
    return None


def notes_of(config: Config) -> list[str]:
    """Notes on settings that are valid but unusual."""
    from relax_hpc.ops.checks.files import notes

    return list(notes(config))


def _check_config(layers: Layers, resume: bool, known_mistakes: Sequence[str] = ()) -> Config:
    """The whole configuration of a run that may start or resume. ConfigError with all mistakes,
    including ``known_mistakes``."""
    config, mistakes = resolve(build(Config, layers.tree)), Mistakes()
    mistakes.add(*known_mistakes)
    with mistakes:
        _check_run_dir(RunDir(Path(config.run_dir)), resume)
    # A mistake that follows from a mistake in a layer is reported only once.
    mistakes.texts = [text for text in mistakes.texts if not layers.may_cause(text)]
    mistakes.add(*findings_of(config, layers))
    mistakes.raise_if_any()
    for note in notes_of(config):
        print(f"relax-hpc: note: {note}", file=sys.stderr)
    return config


def _run_dir(arguments: dict[str, Any]) -> RunDir:
    """Run directory with the configuration of a run that is resumed without files."""
    if not (arguments.get("run_dir") or arguments.get("name")):
        raise ConfigError(
            f"{COMMAND_LINE}: --resume: found neither --run_dir nor --config, give one of them"
        )
    run = RunDir(Path(arguments.get("run_dir") or f"runs/{arguments['name']}"))
    # A run directory that was moved has its present path.
    arguments["run_dir"] = str(run.root)
    _check_run_dir(run, resume=True)
    return run


def _config_files(run: RunDir) -> list[str]:
    """The configuration file of a run, and the files with later changes of whole groups."""
    groups = load_resolved(run.root).groups
    changes = [path for path in change_files(run) if path.stem[7:] in groups]
    return [str(path) for path in (run.config, *changes)]


def _check_run_dir(run: RunDir, resume: bool) -> None:
    if not resume:
        # A path that cannot be read is a finding of `check`.
        if os.path.exists(run.config):  # noqa: PTH110 - Path.exists raises then
            raise ConfigError(
                f"run_dir: {run.root} already holds a run, --resume it or name another --run_dir"
            )
        return
    if not run.config.is_file():
        raise ConfigError(
            f"run_dir: found no run in {run.root} (no config.yaml); start one with relax-hpc run"
        )
    check_owner(run.root, "resume")


COMMANDS: dict[str, Command | CommandGroup] = {
    "run": Command(
        "Start or resume a run on this machine, and supervise it until it ends.",
        f"[--resume] [--run_dir D] {CONFIG_USAGE}",
        _run_arguments,
        _run,
        takes_config=True,
        is_whole=True,
    ),
    "sft": Command(
        "Learn from demonstrations: `run` with algorithm sft. data.train has rows {id, prompt or "
        "messages, answer}.",
        f"[--run_dir D] {CONFIG_USAGE}",
        config_arguments,
        partial(_from_files, "sft"),
        takes_config=True,
        is_whole=True,
    ),
    "dpo": Command(
        "Learn from preferences: `run` with algorithm dpo. data.train has rows {id, prompt, "
        "chosen, rejected}.",
        f"[--run_dir D] {CONFIG_USAGE}",
        config_arguments,
        partial(_from_files, "dpo"),
        takes_config=True,
        is_whole=True,
    ),
    "resume": Command(
        "Resume a run in the way it was started: on this machine, or by Slurm.",
        f"RUN {CONFIG_USAGE}",
        _resume_arguments,
        _resume,
        takes_config=True,
    ),
    "submit": Command(
        "Submit a run to Slurm.",
        f"[--resume] [--dry-run] [--json | --parsable] {CONFIG_USAGE}",
        _submit_arguments,
        _submit,
        takes_config=True,
        is_whole=True,
    ),
    "check": Command(
        "Look for mistakes in a configuration without starting anything.",
        CONFIG_USAGE,
        config_arguments,
        _check,
        True,
        True,
    ),
    "doctor": Command(
        "Check the cluster, the site file and the configuration before a run is submitted.",
        f"[--deep] [--json] {CONFIG_USAGE}",
        _doctor_arguments,
        _doctor,
        takes_config=True,
        is_whole=True,
    ),
    "plan": Command(
        "Estimate the memory of a run on each GPU and node, and suggest settings that make it fit.",
        f"[--json] {CONFIG_USAGE}",
        _plan_arguments,
        _plan,
        takes_config=True,
        is_whole=True,
    ),
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
    "queue": QUEUE,
    "convert": CONVERT,
}
