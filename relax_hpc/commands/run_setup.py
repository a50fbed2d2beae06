"""Run directories: created for a new run, or checked before a run is resumed."""

from __future__ import annotations

from datetime import date
from pathlib import Path

from relax_hpc.algorithms import algorithm_record
from relax_hpc.base.errors import EXIT_DONE, ConfigError, Mistakes
from relax_hpc.base.rundir import RunDir, read_map, write_json
from relax_hpc.config import Config, dump, load_resolved, resolve
from relax_hpc.config.changes import retire_changes
from relax_hpc.config.differences import differences
from relax_hpc.config.groups import groups_that_train
from relax_hpc.config.schema.environment import AGENT
from relax_hpc.net.kernel_caches.node import archive_folder
from relax_hpc.ops.checks.settings import check
from relax_hpc.ops.observe.status import status
from relax_hpc.tasks.files import check_unchanged

_ANSWER_S = 1.0
FIXED = ("seed", "prompts_per_step", "samples_per_prompt", "model", "data", "warm_start")
"""Settings that a run can never change, because its tickets and its first weights depend on
them."""


def prepare_run_dir(
    config: Config, resume: bool, starts_here: bool = False
) -> tuple[RunDir, Config]:
    """Create the run directory of ``config``, or prepare it for a resume. ConfigError if it does
    not fit. ``starts_here``: whether the roles start on this machine next."""
    config = resolve(config)
    directory = RunDir(Path(config.run_dir))
    findings = check(config, starts_here)
    if findings:
        raise ConfigError(findings[0])
    if config.site.kernel_cache:
        # Containers mount it, so it must exist.
        archive_folder(config.site.kernel_cache)
    keep_date(directory, config)
    if directory.config.exists():
        if not resume:
            raise ConfigError(
                f"run_dir: {directory.root} holds a run already; add --resume or name another "
                "--run_dir"
            )
        check_resumable(directory, config)
        if directory.finished.exists():
            return directory, config
    elif not directory.token_file.exists() and directory.holds_other_files():
        raise ConfigError(
            f"run_dir: {directory.root} holds other files; name a new or empty folder"
        )
    directory.create()
    directory.stop.unlink(missing_ok=True)
    dump(config, directory.config)
    if ":" in config.algorithm.name:
        write_json(directory.algorithm, algorithm_record(config.algorithm))
    retire_changes(directory)
    return directory, config


def keep_date(directory: RunDir, config: Config) -> None:
    """Set the date that chat templates read in ``config``: the date of the run in ``directory``, or
    the present date if the run is new."""
    data = config.data
    if data.template_date or not (data.chat_template or config.environment.kind == AGENT):
        return
    resumed = directory.config.exists()
    data.template_date = (
        load_resolved(directory.root).data.template_date if resumed else str(date.today())
    )


def check_resumable(directory: RunDir, config: Config) -> None:
    """ConfigError if a fixed setting or a file of prompts has changed, or if the run is running. A
    finished run is reopened if it has more steps now."""
    before = load_resolved(directory.root)
    changed = Mistakes()
    for name in FIXED:
        for key, value, kept in differences(getattr(config, name), getattr(before, name), name):
            text = f"{key}: found {value}, a run keeps {kept}; start a new run_dir"
            changed.add(f"{directory.config}: {text}")
    changed.raise_if_any()
    # The rows of all sets are numbered in the order of the sets, and tickets use these numbers.
    sets, stored_sets = [*config.data.train_sets], [*before.data.train_sets]
    if sets != stored_sets:
        text = f"found {', '.join(sets)}, a run keeps the order {', '.join(stored_sets)}"
        raise ConfigError(
            f"{directory.config}: data.train_sets: {text}; list the sets in that order"
        )
    trainers, stored_trainers = (
        [*groups_that_train(config.groups)],
        [*groups_that_train(before.groups)],
    )
    if trainers != stored_trainers:
        text = (
            f"found {', '.join(trainers)} for the roles that train, a run keeps "
            f"{', '.join(stored_trainers)}"
        )
        raise ConfigError(
            f"{directory.config}: groups: {text}, because its checkpoints contain them; start a "
            "new run_dir"
        )
    saved = max((step for step, _ in directory.saved()), default=0)
    if config.steps < saved:
        raise ConfigError(
            f"steps: found {config.steps}, but step {saved} is checkpointed; allowed: at least "
            f"{saved}"
        )
    check_unchanged(directory, config)
    if not directory.finished.exists():
        if status(directory, _ANSWER_S)["hub"]:
            raise ConfigError(
                f"run_dir: the run in {directory.root} is running; look with: relax-hpc status RUN"
            )
    elif config.steps > before.steps:
        reopen(directory)


def reopen(directory: RunDir) -> None:
    """Prepare a finished run for more steps: its roles count as stopped, not as done."""
    for mark in directory.root.glob("logs/*/inc-*/exit-*.json"):
        # A mark can be empty after a power loss. It then reads as an empty map.
        if read_map(mark).get("status") == "done":
            write_json(
                mark,
                {
                    "status": "stopped",
                    "code": EXIT_DONE,
                    "reason": "the run continues with more steps",
                },
            )
    directory.finished.unlink()
