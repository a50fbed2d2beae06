"""`relax-hpc replay`: train a step of a run again, on the rows of its journal, and compare the
result with the run's.

The replay begins at the newest checkpoint at or before the step. It runs in a temporary folder, on
this machine, and changes nothing in the run directory.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from relax_hpc.base.errors import EXIT_CONFIG, EXIT_DONE, ConfigError, RelaxError
from relax_hpc.base.metrics.read import is_step, read_metrics
from relax_hpc.base.rundir import RunDir, check_owner
from relax_hpc.base.terminal_text import escape_line
from relax_hpc.base.versions import Version
from relax_hpc.cluster.supervise.processes import kill_processes, process_tree, role_environment
from relax_hpc.config import Config, dump, load_resolved
from relax_hpc.config.groups import group_environment, group_with_role
from relax_hpc.config.roles import POLICY
from relax_hpc.config.schema import PlanesConfig
from relax_hpc.queue.controller.journal import JournalError
from relax_hpc.queue.inspect.replay_plan import ReplayDir, ReplayPlan
from relax_hpc.queue.inspect.trained_steps import TrainingHistory
from relax_hpc.training.weights.version_digests import VersionDigest, read_digests

_LOOK_S = 0.2
_MARKER = "COMPLETE.json"
_COMPARED = {"loss/lr": "learning rate", "loss/grad_norm": "gradient norm"}
"""Metrics that must be equal, and their names."""
_REPLAYED_INCARNATION = 1


@dataclass(frozen=True, slots=True)
class StepComparison:
    """A replayed step, compared with the step of the run."""

    step: int
    version: str
    """The version after the step, in the run."""
    differences: tuple[str, ...]
    """One text for each value that differs."""
    missing: tuple[str, ...]
    """Values that the run has not recorded."""

    def __str__(self) -> str:
        if self.differences:
            return f"step {self.step}: {'; '.join(self.differences)}"
        names = [*_COMPARED.values(), f"bytes of version {self.version}"]
        equal = [name for name in names if name not in self.missing]
        text = f"step {self.step}: equal: {', '.join(equal) or 'nothing to compare'}"
        return text + (f"; not recorded: {', '.join(self.missing)}" if self.missing else "")


def main(root: str, step: int, as_json: bool = False) -> int:
    """Replay ``step`` and print the comparison. Returns the exit code."""
    run = RunDir(Path(root))
    if not run.config.exists():
        raise ConfigError(f"{run.root}: no run here (config.yaml is missing); name a run directory")
    check_owner(run.root, "replay")
    group = group_with_role(load_resolved(run.root), POLICY)
    plan, history = plan_replay(run, group, step)
    if not as_json:
        start = f"checkpoint {plan.checkpoint['name']}" if plan.checkpoint else "version 0"
        print(f"{run.root}: from {start}, training steps {plan.first} to {plan.last}", flush=True)
    comparisons = list[StepComparison]()
    with tempfile.TemporaryDirectory(prefix="relax-replay-") as name:
        folder = ReplayDir(Path(name), run.root)
        _prepare(folder, load_resolved(run.root, group), plan)
        for comparison in _train(folder, plan, history):
            comparisons.append(comparison)
            if not as_json:
                print(escape_line(str(comparison)), flush=True)
        note = _device_note(read_digests(run, group), read_digests(folder, group))
    return _conclude(plan, comparisons, note, as_json)


def plan_replay(run: RunDir, group: str, step: int) -> tuple[ReplayPlan, TrainingHistory]:
    """The plan to replay ``step``. ConfigError: it was not trained, or its rows are gone; the error
    names the setting that keeps them."""
    try:
        history = TrainingHistory(run)
    except JournalError as error:
        raise ConfigError(str(error)) from error
    if step not in history.steps:
        trained = f"0 to {max(history.steps)}" if history.steps else "none, no step was trained"
        raise ConfigError(f"--step: found {step}, allowed: {trained}")
    saved = [
        point
        for point in history.checkpoints
        if point["step"] <= step and (run.checkpoints / point["name"] / _MARKER).exists()
    ]
    point = max(saved, key=lambda point: point["step"], default={})
    first = point.get("step", 0)
    windows = {number: history.windows(number) for number in range(first, step + 1)}
    gone = [number for number, claims in windows.items() if claims is None]
    if gone:
        raise ConfigError(_explain_missing_rows(run, history, step, first, gone))
    steps = [claims for claims in windows.values() if claims is not None]
    checkpoint = {"name": point["name"], "digest": point["digest"]} if point else {}
    return ReplayPlan(str(run.root), group, first, checkpoint, steps), history


def _explain_missing_rows(
    run: RunDir, history: TrainingHistory, step: int, first: int, gone: list[int]
) -> str:
    """Error about rows that were deleted."""
    newest = max((point["step"] for point in history.checkpoints), default=step)
    present = f"rows of steps {gone[0]} to {gone[-1]} are gone"
    # After the newest checkpoint, rows of the last `keep_steps` steps before it stay.
    remedy = f"queue.keep_steps of at least {max(1, newest - first)} keeps them"
    later = [number for number in history.kept_steps() if number > gone[-1]]
    if later and later[0] <= step:
        remedy += (
            f", or checkpoint.keep_every keeps a checkpoint between steps {later[0]} and {step}"
        )
    return (
        f"{run.root}: step {step} would be trained again from step {first} on, but {present}; "
        f"in the next run, {remedy}"
    )


def _prepare(folder: ReplayDir, config: Config, plan: ReplayPlan) -> None:
    """Write the plan and the configuration of the replay."""
    folder.create()
    config.run_dir, config.layout, config.site.stage = str(folder.root), "local", []
    # No process reads the weights, so files and faster planes have no use.
    config.weights.keep_every = config.weights.file_every = 0
    config.queue.planes = PlanesConfig()
    dump(config, folder.config)
    plan.write(folder.root)


def _train(
    folder: ReplayDir, plan: ReplayPlan, history: TrainingHistory
) -> Iterator[StepComparison]:
    """Run the ranks of the replay. Yields the comparison of each step when it is trained.

    RelaxError: the ranks failed, or trained no step for a long time.
    """
    run, config = RunDir(Path(plan.source)), load_resolved(folder.root)
    recorded = {row["step"]: row for row in read_metrics(run.root) if is_step(row)}
    digests = read_digests(run, plan.group)
    limit_s = config.liveness.start_timeout_s + config.liveness.hang_s
    with _ranks(folder, config, plan.group) as (process, log):
        pending, deadline = list(range(plan.first, plan.last + 1)), time.monotonic() + limit_s
        while pending:
            has_ended = process.poll() is not None
            values = folder.read_steps()
            own_digests = read_digests(folder, plan.group)
            while pending:
                step = pending[0]
                own = own_digests.get(str(Version(_REPLAYED_INCARNATION, step + 1)))
                if step not in values or own is None:
                    break
                version = str(Version(history.steps[step].incarnation, step + 1))
                row = recorded.get(step, {})
                yield compare_step(step, values[step], row, own, digests.get(version), version)
                pending.pop(0)
                deadline = time.monotonic() + limit_s
            if not pending:
                return
            if has_ended:
                raise RelaxError(f"replay: {_last_line(log)}")
            if time.monotonic() > deadline:
                raise RelaxError(
                    f"replay: step {pending[0]} was not trained within {limit_s:g} s "
                    "(liveness.start_timeout_s + liveness.hang_s)"
                )
            time.sleep(_LOOK_S)


@contextmanager
def _ranks(
    folder: ReplayDir, config: Config, group: str
) -> Iterator[tuple[subprocess.Popen, Path]]:
    """The processes of the replay, and their log. They are killed at the end of the block."""
    log = folder.logs(group, _REPLAYED_INCARNATION) / "replay.log"
    log.parent.mkdir(parents=True)
    ranks = config.actor.parallel.ranks
    parent = ["-m", "relax_hpc.cluster.supervise.ranks", str(ranks)] if ranks > 1 else []
    arguments = ["-m", "relax_hpc.roles.replay", "--folder", str(folder.root)]
    environment = role_environment(config, group_environment(config, group))
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *parent, *arguments], stdout=output, stderr=output, env=environment
        )
    try:
        yield process, log
    finally:
        kill_processes(process_tree(process.pid))
        process.wait()


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines() or ["no output"]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines)[-1].removeprefix("error: ")


def compare_step(
    step: int,
    values: dict[str, float],
    recorded: dict[str, Any],
    own: VersionDigest,
    expected: VersionDigest | None,
    version: str,
) -> StepComparison:
    """Compare a replayed step.

    ``values``, ``own``: metrics and digest of the replay; ``recorded``, ``expected``: of the run.
    ``version``: name of the version after the step in the run.
    """
    differences, missing = list[str](), list[str]()
    for tag, name in _COMPARED.items():
        value, before = values.get(tag, math.nan), recorded.get(tag, math.nan)
        if math.isnan(before) and tag not in recorded:
            missing.append(name)
        elif value != before and not (math.isnan(value) and math.isnan(before)):
            differences.append(f"{name} {value!r}, in the run {before!r}")
    if expected is None:
        missing.append(f"bytes of version {version}")
    elif own.digest != expected.digest:
        differences.append(f"bytes of version {version} differ")
    return StepComparison(step, version, tuple(differences), tuple(missing))


def _device_note(recorded: dict[str, VersionDigest], own: dict[str, VersionDigest]) -> str:
    """A sentence about devices of different kinds; empty if they are the same."""
    before, now = ({item.device for item in group.values()} for group in (recorded, own))
    if not before or before >= now:
        return ""
    return (
        f"the run trained on {', '.join(sorted(before))}, this machine has "
        f"{', '.join(sorted(now))}: bits can differ"
    )


def _conclude(plan: ReplayPlan, comparisons: list[StepComparison], note: str, as_json: bool) -> int:
    """Print the result. Returns the exit code."""
    different = [comparison for comparison in comparisons if comparison.differences]
    incomplete = [comparison for comparison in comparisons if comparison.missing]
    if as_json:
        values = {
            "first_step": plan.first,
            "last_step": plan.last,
            "equal": not different,
            "complete": not incomplete,
            "note": note,
            "steps": [asdict(comparison) for comparison in comparisons],
        }
        print(json.dumps(values))
    elif different:
        first = different[0]
        learning_rate = _COMPARED["loss/lr"]
        is_other_schedule = first.differences[0].startswith(learning_rate)
        cause = " (steps and actor.optimizer may have changed since)" if is_other_schedule else ""
        print(f"different from step {first.step} on{cause}{f'; {note}' if note else ''}")
    else:
        print(f"equal: {len(comparisons)} steps{f'; {note}' if note else ''}")
    return EXIT_CONFIG if different else EXIT_DONE
