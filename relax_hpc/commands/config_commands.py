"""Commands that read a configuration: they start, resume, submit, check or plan a run.

Handlers import heavy modules late, so that the program starts quickly.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

from relax_hpc.base.errors import EXIT_CONFIG, EXIT_DONE, ConfigError, Mistakes
from relax_hpc.base.rundir import RunDir, check_owner
from relax_hpc.base.terminal_text import log_entry
from relax_hpc.commands.command import (
    CONFIG_USAGE,
    Command,
    config_arguments,
    json_argument,
    run_argument,
)
from relax_hpc.config.changes import change_files
from relax_hpc.config.layer_validation import COMMAND_LINE
from relax_hpc.config.load import (
    Layers,
    build,
    compose,
    gather,
    load_resolved,
    print_config,
    resolve,
)
from relax_hpc.config.schema import Config
from relax_hpc.ops.checks.settings import check_request


def _resume_argument(parser: ArgumentParser) -> None:
    parser.add_argument("--resume", action="store_true", help="Resume the run in run_dir.")


def _run_arguments(parser: ArgumentParser) -> None:
    _resume_argument(parser)
    config_arguments(parser)


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


def _warm(arguments: dict[str, Any]) -> int:
    layers = _layers(arguments)
    if layers is None:
        return EXIT_DONE
    from relax_hpc.commands import warm

    config = resolve(build(Config, layers.tree))
    mistakes = Mistakes()
    mistakes.add(*findings_of(config, layers))
    mistakes.raise_if_any()
    return warm.main(config)


def _layers(arguments: dict[str, Any]) -> Layers | None:
    """The configuration of the command line with its mistakes. None if the user only wants to see
    it; then it is printed."""
    files = arguments.pop("config", None) or []
    if arguments.pop("print_config", None) is None:
        return gather(files, arguments)
    print(print_config(compose(files, arguments)), end="")
    return None


def findings_of(config: Config, layers: Layers) -> list[str]:
    """All mistakes in a configuration: those of its layers, and other findings of `check`."""
    texts = [mistake.text for mistake in layers.mistakes if mistake.text]
    if layers.lost_layer:
        return texts
    findings = [finding for finding in check_request(config) if not layers.may_cause(finding)]
    return texts + [layers.with_source(finding) for finding in findings]


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


CONFIG_COMMANDS: dict[str, Command] = {
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
    "warm": Command(
        "Compile the kernels of a run before its first start, and keep them in site.kernel_cache. "
        "It trains two steps in a new run directory, RUN_DIR-warm-DATE, with the layout and the "
        "jobs of the run.",
        CONFIG_USAGE,
        config_arguments,
        _warm,
        takes_config=True,
        is_whole=True,
    ),
}
