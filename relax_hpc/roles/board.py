"""The hub's board: collects the reports of the roles and writes one line of metrics per step."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

from relax_hpc.base.error_origin import ErrorOrigin
from relax_hpc.base.metrics.first_failures import FailureWriter, FirstFailure
from relax_hpc.base.metrics.length_counts import LENGTHS
from relax_hpc.base.metrics.progress import Progress
from relax_hpc.base.metrics.read import is_step, read_metrics
from relax_hpc.base.metrics.resource_samples import RESOURCES
from relax_hpc.base.metrics.shares import tags_of_time
from relax_hpc.base.metrics.writer import (
    CACHED,
    COMPONENT_COUNT,
    COMPONENT_SUM,
    GENERATED,
    GENERATED_SUM,
    READ,
    SKIPPED,
    MetricsWriter,
)
from relax_hpc.config.differences import leaves
from relax_hpc.config.roles import POLICY
from relax_hpc.config.schema import Config
from relax_hpc.queue.controller.state.queue_state import QueueState

_SUMMED = (
    "perf/rollout_tokens",
    "queue/by_",
    GENERATED,
    READ,
    CACHED,
    SKIPPED,
    COMPONENT_SUM,
    COMPONENT_COUNT,
    LENGTHS,
)
"""Prefixes of tags whose values are summed."""
_MAX_TEXTS = 4
"""Maximum number of texts of a step in TensorBoard."""
_NOT_LEARNING = ("name", "run_dir", "groups", "site", "slurm", "events")
"""Sections of a configuration that do not affect learning."""
_COMPARED = (
    *("algorithm.name", "actor.optimizer.lr", "prompts_per_step", "samples_per_prompt"),
    *("max_staleness", "steps", "seed"),
)
"""Settings that TensorBoard's table of runs always shows, even with default values."""
_NO_DEFAULT = object()


class Board:
    """Collects reports until the actor's report completes the step."""

    def __init__(self, run_dir: Path, incarnation: int, steps: int, state: QueueState) -> None:
        rows = read_metrics(run_dir)
        self._next = 1 + max((row["step"] for row in rows if is_step(row)), default=-1)
        self.writer = MetricsWriter(run_dir, incarnation)
        self.progress = Progress(steps)
        self.state = state
        self._values: dict[str, float] = defaultdict(float)
        self._seconds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._scores: dict[str, float] = {}
        self._shown: Counter[int] = Counter()
        self._failures = FailureWriter(run_dir)
        self.own_metrics: Callable[[], dict[str, float]] = dict
        """Metrics of the hub's process itself."""

    def report(
        self, role: str, step: int, values: dict[str, float], seconds: dict[str, float]
    ) -> None:
        """Record a role's report. An evaluation is written immediately. A step is written when the
        actor reports it, with the reports of other trainers since the last step."""
        if role == "eval":
            self.writer.write(step, values)
            self._scores = values
            return
        for kind, spent_s in seconds.items():
            self._seconds[role][kind] += spent_s
        if role in self.state.plan.trainers and role != POLICY:
            values = {
                tag
                if tag.startswith(RESOURCES)
                else f"trainer/{role}_{tag.replace('/', '_')}": value
                for tag, value in values.items()
            }
        for tag, value in values.items():
            self._values[tag] = self._values[tag] + value if tag.startswith(_SUMMED) else value
        if role == POLICY:
            self._write(step)

    def note_first_failure(
        self, group: str, reason: str, detail: str, location: str, traceback: str
    ) -> None:
        """Write the first failure of its kind in a process of ``group`` to the run directory."""
        origin = ErrorOrigin(location, traceback)
        self._failures.write(FirstFailure.from_origin(group, reason, detail, origin))

    def show(self, step: int, texts: Iterable[str]) -> None:
        """Show a few texts of a step in TensorBoard."""
        for text in list(texts)[: _MAX_TEXTS - self._shown[step]]:
            self.writer.tensorboard.show(step, "samples", text)
            self._shown[step] += 1

    def log_settings(self, config: Config) -> None:
        """Write the settings of the run to TensorBoard, and the metrics by which runs are
        compared."""
        from_file = config.algorithm.from_file
        metric = "loss" if from_file else config.eval.metric
        scores = [f"eval/{name}/{metric}" for name in config.data.eval]
        objective = "loss/policy" if from_file else "reward/mean"
        self.writer.tensorboard.configured(settings_of(config), [objective, *scores])

    def _write(self, step: int) -> None:
        values = dict(self._values) | self._shares() | self._queue() | self.own_metrics()
        generating = self._seconds["rollout"].get("generate", 0.0)
        if generating:
            values["perf/rollout_tokens_per_s"] = (
                values.get("perf/rollout_tokens", 0.0) / generating
            )
        training = self._seconds[POLICY].get("train", 0.0)
        if training:
            values["perf/train_tokens_per_s"] = values["perf/trained_tokens"] / training
        cached = values.pop(CACHED, 0.0)
        read = values.pop(READ, 0.0)
        if read:
            values["perf/cached_share"] = cached / read
        total = values.pop(GENERATED_SUM, 0.0)
        count = values.get(GENERATED)
        if count:
            # reward/mean is over the rows that a filter kept: of easy prompts, the worst responses.
            values["reward/mean_generated"] = total / count
        self.writer.write(step, _with_components(values))
        self._next = step + 1
        self.progress.update(step, values | self._scores)
        self._values.clear()
        self._seconds.clear()
        self._scores = {}
        self._shown.clear()

    def _shares(self) -> dict[str, float]:
        """Return, per role, the shares of its time since the last step that it waited, by cause,
        and its seconds by kind."""
        shares: dict[str, float] = {}
        for role, seconds in self._seconds.items():
            shares |= tags_of_time(role, seconds)
        return shares

    def _queue(self) -> dict[str, float]:
        state = self.state
        newest = state.weights.newest
        lags = []
        if newest:
            for _, version in state.weights.readers.values():
                if version in state.lineage:
                    lags.append(newest.number - version.number)
        values = {f"queue/{name}": float(count) for name, count in state.tickets.depth().items()}
        values |= {
            f"queue/dropped_{reason}": float(count)
            for reason, count in state.counts.dropped.items()
        }
        values |= {
            f"queue/{name.replace('/', '_')}": float(count)
            for name, count in state.counts.noted.items()
        }
        values["weights/version"] = float(newest.number if newest else 0)
        values["weights/publish_lag"] = float(max(lags, default=0))
        return values

    def roll_back(self, step: int) -> None:
        """Continue at ``step``. Metrics of this step and of later steps no longer count."""
        if step < self._next:
            self.writer.rolled_back(step)
            self._next = step

    def close(self) -> None:
        self.writer.close()
        self._failures.close()


def _with_components(values: Mapping[str, float]) -> dict[str, float]:
    """Return ``values`` with the mean of each reward component instead of its sum and count."""
    means = {}
    plain = {}
    for tag, value in values.items():
        if tag.startswith(COMPONENT_COUNT):
            name = tag.removeprefix(COMPONENT_COUNT)
            means[f"reward/component_{name}"] = values[COMPONENT_SUM + name] / value
        elif not tag.startswith(COMPONENT_SUM):
            plain[tag] = value
    return plain | means


def settings_of(config: Config) -> dict[str, bool | float | str]:
    """Return settings for TensorBoard's table, by their dotted keys: those that differ from the
    defaults, and those that people compare first.

    >>> settings_of(Config(steps=7))["steps"]
    7
    >>> "queue.max_rows" in settings_of(Config())
    False
    """
    defaults = dict(leaves(asdict(Config())))
    settings = {}
    for key, value in leaves(asdict(config)):
        is_shown = key in _COMPARED or value != defaults.get(key, _NO_DEFAULT)
        affects_learning = key.partition(".")[0] not in _NOT_LEARNING
        if is_shown and affects_learning and isinstance(value, bool | int | float | str):
            settings[key] = value
    return settings
