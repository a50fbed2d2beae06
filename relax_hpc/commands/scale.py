"""`relax-hpc scale`: change the number of jobs or engines of a rollout group in a running run.

Members after the first one are separate groups, `rollout-2`, `rollout-3`, ... Each has an ordinary
small job, which Slurm can start in any gap of its schedule. The command requests operations from
the service of the run (`relax_hpc.service`). The supervisor of the hub's group brings them about,
also if this command is interrupted.

With --without, the processes of the group apply the change without a restart. Other engines take
over the work of a removed engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from relax_hpc.base.errors import EXIT_DONE, ConfigError, DeadlineError, RelaxError
from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.slurm.job_lookup import load_unfinished_run
from relax_hpc.commands.resubmit import print_job, print_progress
from relax_hpc.config import Config
from relax_hpc.config.groups import group_settings
from relax_hpc.queue.operations import FINAL, IN, OUT, OperationRefused
from relax_hpc.service.client import EngineOperations, engine_operations

_POLL_S = 0.3
"""Seconds between two questions for the state of an operation."""
_MARGIN_S = 30.0
"""Seconds after the deadline of an operation for which its end is awaited."""
_STARTED = ("HEALTH_CHECKING", "WEIGHT_SYNCING", "READY", *FINAL[OUT])
"""States of an operation whose processes have started."""


def main(
    root: str, group: str, replicas: int, options: Sequence[str] = (), parsable: bool = False
) -> int:
    """Start or end jobs of ``group`` until it has ``replicas`` jobs. The ids of new jobs go to
    standard output.

    ``options``: --time and --time-min of sbatch. Slurm's backfill starts short jobs earlier.
    """
    run = RunDir(Path(root))
    config = load_unfinished_run(run)
    _check_request(config, group, replicas)
    limits = dict(option.removeprefix("--").split("=", 1) for option in options)
    if limits and config.layout == "local":
        raise ConfigError(
            "--time, --time-min: options of Slurm jobs, but the run has layout local; leave them "
            "out"
        )
    body = {"groups": replicas, **{name.replace("-", "_"): text for name, text in limits.items()}}
    _check_service(config)
    with engine_operations(run, config) as operations:
        before = len(operations.groups()[0])
        if replicas > before:
            is_local = config.layout == "local"
            _add_groups(operations, body, is_local, parsable)
        elif replicas < before:
            _await_end(operations, IN, _create(operations, IN, {"groups": replicas}))
    kind = "groups of processes" if config.layout == "local" else "jobs"
    print_progress(f"{group}: {replicas} {kind} ({before} before)")
    return EXIT_DONE


def remove_engines(root: str, group: str, numbers: str) -> int:
    """Make all engines of ``group`` serve except those in ``numbers``, such as `3,5`; empty: all of
    them."""
    run = RunDir(Path(root))
    config = load_unfinished_run(run)
    if "rollout" not in group_settings(config, group).roles:
        raise ConfigError(
            f"--group: found {group!r}, whose roles have no engines, allowed: a group with rollout"
        )
    removed = [f"{group}/{number}" for number in _parse_numbers(numbers)]
    _check_service(config)
    with engine_operations(run, config) as operations:
        _, before = operations.groups()
        present = [name for name in before if name.rpartition("/")[0] == group]
        if set(present) == set(removed):
            print_progress(f"{group}: its engines are already as requested")
            return EXIT_DONE
        returning = [name for name in present if name not in removed]
        leaving = [name for name in removed if name not in present]
        # Engines return first, so that the group never has too few.
        for kind, names in ((OUT, returning), (IN, leaving)):
            if names:
                _await_end(operations, kind, _create(operations, kind, {"engines": names}))
    print_progress(f"{group}: without {', '.join(removed) or 'none'}")
    return EXIT_DONE


def _check_request(config: Config, group: str, replicas: int) -> None:
    if group not in config.groups or group_settings(config, group).roles != ["rollout"]:
        allowed = [name for name, other in config.groups.items() if other.roles == ["rollout"]]
        raise ConfigError(
            f"--group: found {group!r}, allowed: {', '.join(allowed) or 'none here'} (groups "
            "whose only role is rollout; other groups have one job each, see resubmit --nodes)"
        )
    if replicas < 1:
        raise ConfigError(
            f"--replicas: found {replicas}, allowed: at least 1; to end the run: relax-hpc stop"
        )


def _check_service(config: Config) -> None:
    if not config.service.enabled:
        raise ConfigError(
            "service.enabled: found false, allowed with scale: true; stop the run, and continue it "
            "with --resume --service.enabled true"
        )


def _create(operations: EngineOperations, kind: str, body: dict[str, Any]) -> dict[str, Any]:
    """Create an operation. RelaxError: another one is unfinished. ConfigError: it is refused."""
    try:
        operation = operations.create(kind, body)
    except OperationRefused as refusal:
        if refusal.code == "busy":
            raise RelaxError(f"{kind}: {refusal}") from None
        raise ConfigError(f"{kind}: {refusal} ({refusal.code})") from None
    print_progress(f"{operation['request_id']}: {operation['detail'] or operation['status']}")
    return operation


def _add_groups(
    operations: EngineOperations, body: dict[str, Any], is_local: bool, parsable: bool
) -> None:
    """Add groups, and print their jobs when all of them are submitted."""
    operation = _create(operations, OUT, body)
    groups = operation.get("groups", [])

    def has_started(state: dict[str, Any]) -> bool:
        if is_local:
            return state["status"] in _STARTED
        jobs = [state["jobs"].get(name, "") for name in groups]
        return state["status"] in FINAL[OUT] or all(map(str.isdecimal, jobs))

    operation = _await(operations, OUT, operation, has_started)
    for name in groups:
        if not is_local and operation["jobs"].get(name, "").isdecimal():
            print_job(name, operation["jobs"][name], parsable)
    _check_success(operation)


def _await_end(operations: EngineOperations, kind: str, operation: dict[str, Any]) -> None:
    final = FINAL[kind]
    _check_success(_await(operations, kind, operation, lambda state: state["status"] in final))


def _check_success(operation: dict[str, Any]) -> None:
    if operation["status"] in ("FAILED", "PARTIAL", "CANCELLED"):
        raise RelaxError(
            f"{operation['request_id']}: {operation['status']}, {operation['error_message']}"
        )


def _await(
    operations: EngineOperations,
    kind: str,
    operation: dict[str, Any],
    has_arrived: Callable[[dict[str, Any]], bool],
) -> dict[str, Any]:
    """The newest state of an operation, as soon as ``has_arrived``. Its changes go to standard
    error."""
    if operation["status"] == "NOOP":
        return operation
    shown, limit = operation["status"], operation["deadline_at"] + _MARGIN_S
    while not has_arrived(operation):
        if time.time() > limit:
            raise DeadlineError(f"{operation['request_id']}: still {operation['status']}")
        time.sleep(_POLL_S)
        operation = operations.get(kind, operation["request_id"])
        text = " ".join(filter(None, (operation["status"], operation["detail"])))
        if text != shown:
            shown = text
            print_progress(f"{operation['request_id']}: {text}")
    return operation


def _parse_numbers(text: str) -> list[int]:
    try:
        return sorted({int(number) for number in text.replace(",", " ").split()})
    except ValueError as error:
        raise ConfigError(
            f"--without: found {text!r}, allowed: numbers of engines, such as 3,5, or '' for none"
        ) from error
