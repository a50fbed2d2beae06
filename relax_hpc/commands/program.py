"""`relax-hpc`: start, check, watch and plot runs. Each parser is made when asked for, heavy parts
load in handlers."""

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
from relax_hpc.commands.command import CONFIG_USAGE, Command, Verbs, complain, config_arguments
from relax_hpc.commands.convert import CONVERT
from relax_hpc.commands.queue import QUEUE
from relax_hpc.commands.run_commands import LIVING
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
    "Every setting of the configuration is an option too, such as --rollout.replicas 2: "
    "`relax-hpc {name} --help rollout` explains those of a section, `--help model.tiny` those of "
    "a part, `--help all` all of them. docs/configuration/ has all of them as pages."
)


class _Parser(ArgumentParser):
    """Parser whose errors end as one line, like all others."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        explain(message)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code: 0 done, 75 try again, 78 configuration, 93 no
    progress.

    What it prints is neutralised: names and texts of runs, models and services may be of anybody.
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
        # The reader has seen enough, as in `relax-hpc logs RUN | head`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_DONE
    except OSError as error:
        return _end_by_os_error(error)


def _end_by_os_error(error: OSError) -> int:
    """Print one line about the disk or the path that ``error`` names; the exit code. Any other
    error is raised again."""
    if is_temporary(error):
        complain(describe_write_error(error.filename or "disk", error))
        return EXIT_RETRY
    if not (sentence := explain_path_error(error)):
        raise error
    complain(sentence)
    return exit_code_of(error)


def parser_of(name: str) -> ArgumentParser:
    """The parser of the subcommand `name`, such as `run` or `queue audit`."""
    command = commands()[name]
    prog = f"relax-hpc {name}"
    parser = _Parser(
        prog=prog, usage=f"{prog} {command.usage}", description=command.help, allow_abbrev=False
    )
    command.add_arguments(parser)
    return parser


def commands() -> dict[str, Command]:
    """Every subcommand by its words."""
    found = {}
    for name, entry in COMMANDS.items():
        found |= (
            {f"{name} {v}": c for v, c in entry.commands.items()}
            if isinstance(entry, Verbs)
            else {name: entry}
        )
    return found


def _dispatch(argv: list[str]) -> int:
    known = commands()
    for words in (argv[:1], argv[:2]):
        if (name := " ".join(words)) in known:
            return _do(name, known[name], argv[len(words) :])
    if argv and not argv[0].startswith("-"):
        return _explain_verbs(argv)
    parser = _top_parser("relax-hpc", _TITLE, COMMANDS)
    parser.parse_args(argv)
    parser.print_help()
    return EXIT_DONE


def _do(name: str, command: Command, argv: list[str]) -> int:
    if command.takes_config and argv[:1] in (["-h"], ["--help"]):
        print(_help(name, argv[1:]), end="")
        return EXIT_DONE
    rest, free = split_free(argv) if command.takes_config else (argv, {})
    given, wrong = _parse(name, rest)
    if wrong:
        raise ConfigError(*_with_other_mistakes(wrong, given | free, command))
    return _handle(command, given | free)


def _explain_verbs(argv: list[str]) -> int:
    """Explain a command that needs another word, or refuse one that there is not."""
    word, entry = argv[0], COMMANDS.get(argv[0])
    if not isinstance(entry, Verbs):
        raise ConfigError(
            f"{COMMAND_LINE}: {word}: unknown command, allowed: "
            f"{', '.join(COMMANDS)}{near(word, list(COMMANDS))}"
        )
    if len(argv) > 1 and argv[1] not in ("-h", "--help"):
        allowed = f"allowed: {', '.join(entry.commands)}{near(argv[1], list(entry.commands))}"
        raise ConfigError(f"{COMMAND_LINE}: {word} {argv[1]}: unknown verb, {allowed}")
    _top_parser(f"relax-hpc {word}", entry.help, entry.commands).print_help()
    return EXIT_DONE


def _help(name: str, topics: Sequence[str]) -> str:
    """Help of a command: its own options, or those of ``topics``: sections of the configuration,
    single settings, or `all`. ConfigError: there is no such topic."""
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
    """The arguments that were given, and what is wrong with the others."""
    wrong: list[OptionError] = []
    while True:
        try:
            return parser_of(name).parse_args(argv, defaults=False).as_dict(), wrong
        except OptionError as error:
            left = without(argv, error.option)
            if len(left) == len(argv):
                raise
            argv = left
            wrong.append(error)


def _with_other_mistakes(
    wrong: list[OptionError], given: dict[str, Any], command: Command
) -> list[str]:
    """Mistakes in options, and in the configuration that all others make."""
    found = [text for error in wrong for text in error.mistakes]
    if not command.is_whole:
        return found
    settings = {
        key: value
        for key, value in given.items()
        if key in Config.__dataclass_fields__ or "." in key
    }
    layers = gather(given.get("config") or [], settings)
    layers.mistakes += [Mistake(error.option.lstrip("-"), "") for error in wrong]
    return found + findings_of(resolve(build(Config, layers.tree)), layers)


def findings_of(config: Config, layers: Layers) -> list[str]:
    """Everything that is wrong with a configuration: mistakes of its layers, and what `check` finds
    about the rest."""
    texts = [mistake.text for mistake in layers.mistakes if mistake.text]
    rest = (
        []
        if layers.lost_layer
        else [one for one in check_request(config) if not layers.may_cause(one)]
    )
    return texts + [layers.with_source(finding) for finding in rest]


def _handle(command: Command, given: dict[str, Any]) -> int:
    with refuse_imports() if command.only_reads else nullcontext():
        if command.for_others:
            return command.handle(given)
        before = os.umask(PRIVATE_UMASK)
        try:
            return command.handle(given)
        finally:
            os.umask(before)


def _top_parser(prog: str, about: str, entries: Mapping[str, Command | Verbs]) -> ArgumentParser:
    """Parser of a command line that goes on with one of ``entries``."""
    version = {"version": __version__} if entries is COMMANDS else {}
    parser = _Parser(
        prog=prog, usage=f"{prog} COMMAND ...", description=about, allow_abbrev=False, **version
    )
    shown = parser.add_argument_group(f"commands ({prog} COMMAND --help tells more)")
    for name, entry in entries.items():
        shown.add_argument(
            f"command_{name}", nargs="?", default=SUPPRESS, metavar=name, help=entry.help
        )
    return parser


def _run_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--resume", action="store_true", help="Go on with the run that lies in run_dir"
    )
    config_arguments(parser)


def _plot_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="Run directories")
    parser.add_argument("--output", default="rewards.png", metavar="F.png", help="Image to write")
    parser.add_argument(
        "--tags", nargs="+", default=[], metavar="TAG", help="Metrics to draw; none: the usual ones"
    )


def _run(given: dict[str, Any]) -> int:
    resume = given.pop("resume", False)
    if resume and not given.get("config"):
        given["config"] = _files_of(_run_dir(given))
    layers = _layers(given)
    if layers is None:
        return EXIT_DONE
    config = _sound(layers, resume)
    from relax_hpc.commands import local

    return local.run(config, resume)


def _from_files(algorithm: str, given: dict[str, Any]) -> int:
    """Start a run whose rows are those of files, by ``algorithm``. ConfigError: the command line
    names another."""
    if (named := given.get("algorithm", {}).get("name", algorithm)) != algorithm:
        raise ConfigError(
            f"{COMMAND_LINE}: algorithm.name: found {named!r} with relax-hpc {algorithm}; use run"
        )
    return _run(given | {"algorithm.name": algorithm})


def _submit_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--resume", action="store_true", help="Go on with the run that lies in run_dir"
    )
    parser.add_argument("--dry-run", action="store_true", help="Write every file, contact nothing")
    parser.add_argument("--json", action="store_true", help="For programs")
    parser.add_argument("--parsable", action="store_true", help="Job ids only, as sbatch does")
    config_arguments(parser)


def _submit(given: dict[str, Any]) -> int:
    resume, dry_run = given.pop("resume", False), given.pop("dry_run", False)
    form = (
        "json" if given.pop("json", False) else "parsable" if given.pop("parsable", False) else ""
    )
    if resume and not given.get("config"):
        given["config"] = _files_of(_run_dir(given))
    layers = _layers(given)
    if layers is None:
        return EXIT_DONE
    asked, wrong = build(Config, layers.tree), list[str]()
    if asked.layout == "local" and asked.site.name == "":
        wrong.append(
            "layout: found 'local', allowed with submit: het or jobs, or local with a site; see run"
        )
    config = _sound(layers, resume, wrong)
    from relax_hpc.cluster.slurm.commands import Slurm
    from relax_hpc.cluster.slurm.job_lookup import check_no_live_jobs
    from relax_hpc.commands.submit import submit

    if resume and not dry_run:
        check_no_live_jobs(RunDir(Path(config.run_dir)), config, Slurm())
    return submit(config, resume, dry_run, form)


def _resume_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="Run directory")
    config_arguments(parser)


def _resume(given: dict[str, Any]) -> int:
    """Resume a run as it was started: on this machine, or by Slurm."""
    folder = given["run_dir"] = given.pop("run")
    _check_run_dir(RunDir(Path(folder)), resume=True)
    was = load_resolved(Path(folder))
    layout, site = given.get("layout", was.layout), given.get("site.name", was.site.name)
    start = _run if (layout, site) == ("local", "") else _submit
    return start(given | {"resume": True})


def _check(given: dict[str, Any]) -> int:
    layers = _layers(given)
    if layers is None:
        return EXIT_DONE
    config = resolve(build(Config, layers.tree))
    findings = findings_of(config, layers)
    lines = [*findings, *(f"note: {note}" for note in notes_of(config))] or ["no findings"]
    # A name of a model's file may hold newlines, which must not look like further findings.
    print("\n".join(map(log_entry, lines)))
    return EXIT_CONFIG if findings else EXIT_DONE


def _plot(given: dict[str, Any]) -> int:
    from relax_hpc.base.metrics import plot

    return plot.main(given["runs"], given.get("output", "rewards.png"), given.get("tags", []))


def _doctor_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--deep", action="store_true", help="Also look from the nodes, by a job of a minute"
    )
    parser.add_argument("--json", action="store_true", help="For programs")
    config_arguments(parser)


def _doctor(given: dict[str, Any]) -> int:
    deep, as_json = given.pop("deep", False), given.pop("json", False)
    layers = _layers(given)
    if layers is None:
        return EXIT_DONE
    from relax_hpc.ops.doctor import doctor

    return doctor.main(resolve(build(Config, layers.tree)), deep, as_json, layers)


def _plan_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="For programs")
    config_arguments(parser)


def _plan(given: dict[str, Any]) -> int:
    as_json = given.pop("json", False)
    layers = _layers(given)
    if layers is None:
        return EXIT_DONE
    if layers.mistakes:
        raise ConfigError(*(mistake.text for mistake in layers.mistakes))
    from relax_hpc.ops.checks.memory import misfits
    from relax_hpc.ops.checks.model_files import spec_at
    from relax_hpc.ops.plan import view

    config = resolve(build(Config, layers.tree))
    spec = spec_at(config.model)
    if wrong := sorted(misfits(config, spec)):
        raise ConfigError(*(layers.with_source(one) for one in wrong))
    return view.main(config, spec, as_json)


def _layers(given: dict[str, Any]) -> Layers | None:
    """The configuration asked for, with what is wrong with it; None if it was only to be
    printed."""
    files, only_print = given.pop("config", None) or [], given.pop("print_config", None) is not None
    if not only_print:
        return gather(files, given)
    print(print_config(compose(files, given)), end="")
    return None


def notes_of(config: Config) -> list[str]:
    """Notes on what is no mistake, but may not be meant."""
    from relax_hpc.ops.checks.files import notes

    return list(notes(config))


def _sound(layers: Layers, resume: bool, wrong: Sequence[str] = ()) -> Config:
    """The whole configuration of a run that may begin, or go on. ConfigError: everything that is
    wrong with it, ``wrong`` among it."""
    config, mistakes = resolve(build(Config, layers.tree)), Mistakes()
    mistakes.add(*wrong)
    with mistakes:
        _check_run_dir(RunDir(Path(config.run_dir)), resume)
    mistakes.texts = [one for one in mistakes.texts if not layers.may_cause(one)]
    mistakes.add(*findings_of(config, layers))
    mistakes.raise_if_any()
    for note in notes_of(config):
        print(f"relax-hpc: note: {note}", file=sys.stderr)
    return config


def _run_dir(given: dict[str, Any]) -> RunDir:
    """Run directory in which a resume without files finds its configuration."""
    if not (given.get("run_dir") or given.get("name")):
        raise ConfigError(
            f"{COMMAND_LINE}: --resume: found neither --run_dir nor --config, give one of them"
        )
    run = RunDir(Path(given.get("run_dir") or f"runs/{given['name']}"))
    # A run directory that was moved counts from where it is now.
    given["run_dir"] = str(run.root)
    _check_run_dir(run, resume=True)
    return run


def _files_of(run: RunDir) -> list[str]:
    """A run's own configuration, with what was changed for whole groups since."""
    names = load_resolved(run.root).groups
    return [
        str(path) for path in (run.config, *(f for f in change_files(run) if f.stem[7:] in names))
    ]


def _check_run_dir(run: RunDir, resume: bool) -> None:
    if not resume:
        # A path that cannot be looked at is a finding of `check`.
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


COMMANDS: dict[str, Command | Verbs] = {
    "run": Command(
        "Start a run, or go on with one, and supervise it until it ends.",
        f"[--resume] [--run_dir D] {CONFIG_USAGE}",
        _run_arguments,
        _run,
        takes_config=True,
        is_whole=True,
    ),
    "sft": Command(
        "Learn from demonstrations: run with algorithm sft, data.train with rows {id, prompt or "
        "messages, answer}.",
        f"[--run_dir D] {CONFIG_USAGE}",
        config_arguments,
        partial(_from_files, "sft"),
        takes_config=True,
        is_whole=True,
    ),
    "dpo": Command(
        "Learn from preferences: run with algorithm dpo, data.train with rows {id, prompt, chosen, "
        "rejected}.",
        f"[--run_dir D] {CONFIG_USAGE}",
        config_arguments,
        partial(_from_files, "dpo"),
        takes_config=True,
        is_whole=True,
    ),
    "resume": Command(
        "Go on with a run, as it was started: here, or by Slurm.",
        f"RUN {CONFIG_USAGE}",
        _resume_arguments,
        _resume,
        takes_config=True,
    ),
    "submit": Command(
        "Hand a run to Slurm.",
        f"[--resume] [--dry-run] [--json | --parsable] {CONFIG_USAGE}",
        _submit_arguments,
        _submit,
        takes_config=True,
        is_whole=True,
    ),
    "check": Command(
        "Look for mistakes without starting anything.",
        CONFIG_USAGE,
        config_arguments,
        _check,
        True,
        True,
    ),
    "doctor": Command(
        "Look for what would go wrong on this cluster, before anything is submitted.",
        f"[--deep] [--json] {CONFIG_USAGE}",
        _doctor_arguments,
        _doctor,
        takes_config=True,
        is_whole=True,
    ),
    "plan": Command(
        "Work out how much memory a run takes, and what would make it fit.",
        f"[--json] {CONFIG_USAGE}",
        _plan_arguments,
        _plan,
        takes_config=True,
        is_whole=True,
    ),
    **LIVING,
    "sandbox": SANDBOX,
    "plot": Command(
        "Draw the metrics of one or more runs.",
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
