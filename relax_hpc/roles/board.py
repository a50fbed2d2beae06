"""The hub's board: gathers what the roles report and writes one line of metrics a step."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

from relax_hpc.base.error_origin import ErrorOrigin
from relax_hpc.base.metrics.first_failures import FailureWriter, FirstFailure
from relax_hpc.base.metrics.progress import Progress
from relax_hpc.base.metrics.read import is_step, read_metrics
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

_ADDED_UP = (
    "perf/rollout_tokens",
    "queue/by_",
    GENERATED,
    READ,
    CACHED,
    SKIPPED,
    COMPONENT_SUM,
    COMPONENT_COUNT,
)
"""Prefixes of tags whose values are added up."""
_TEXTS = 4
"""Texts of a step in TensorBoard, at most."""
_ELSEWHERE = ("name", "run_dir", "groups", "site", "slurm")
"""Parts of a configuration that say where a run is, and nothing of what is learned."""
_COMPARED = (
    *("algorithm.name", "actor.optimizer.lr", "prompts_per_step", "samples_per_prompt"),
    *("max_staleness", "steps", "seed"),
)
"""Settings that TensorBoard's table of runs shows even if they are the defaults."""
_NO_DEFAULT = object()


class Board:
    """Collects reports until the actor's closes the step."""

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

    def report(
        self, role: str, step: int, values: dict[str, float], seconds: dict[str, float]
    ) -> None:
        """Take a role's report; an evaluation is written at once, a step when the actor reports it,
        with what other trainers have reported since the last."""
        if role == "eval":
            self.writer.write(step, values)
            self._scores = values
            return
        for what, spent in seconds.items():
            self._seconds[role][what] += spent
        if role in self.state.plan.trainers and role != POLICY:
            values = {
                f"trainer/{role}_{tag.replace('/', '_')}": value for tag, value in values.items()
            }
        for tag, value in values.items():
            self._values[tag] = self._values[tag] + value if tag.startswith(_ADDED_UP) else value
        if role == POLICY:
            self._write(step)

    def note_first_failure(
        self, group: str, reason: str, detail: str, location: str, traceback: str
    ) -> None:
        """Write down the first failure of its kind that a process of ``group`` has seen."""
        origin = ErrorOrigin(location, traceback)
        self._failures.write(FirstFailure.from_origin(group, reason, detail, origin))

    def show(self, step: int, texts: Iterable[str]) -> None:
        """Show a few texts of a step in TensorBoard."""
        for text in list(texts)[: _TEXTS - self._shown[step]]:
            self.writer.tensorboard.show(step, "samples", text)
            self._shown[step] += 1

    def configured(self, config: Config) -> None:
        """Tell TensorBoard how the run is configured, and what to judge that by."""
        from_file = config.algorithm.from_file
        scores = [
            f"eval/{name}/{'loss' if from_file else config.eval.metric}"
            for name in config.data.eval
        ]
        metric = "loss/policy" if from_file else "reward/mean"
        self.writer.tensorboard.configured(settings_of(config), [metric, *scores])

    def _write(self, step: int) -> None:
        values = dict(self._values) | self._shares() | self._queue()
        generating = self._seconds["rollout"].get("generate", 0.0)
        if generating:
            values["perf/rollout_tokens_per_s"] = (
                values.get("perf/rollout_tokens", 0.0) / generating
            )
        training = self._seconds[POLICY].get("train", 0.0)
        if training:
            values["perf/train_tokens_per_s"] = values["perf/trained_tokens"] / training
        cached = values.pop(CACHED, 0.0)
        if read := values.pop(READ, 0.0):
            values["perf/cached_share"] = cached / read
        total = values.pop(GENERATED_SUM, 0.0)
        if count := values.get(GENERATED):
            # Beside reward/mean, of what was kept and trained on: a filter leaves of easy prompts
            # the worst.
            values["reward/mean_generated"] = total / count
        self.writer.write(step, _with_components(values))
        self._next = step + 1
        self.progress.update(step, values | self._scores)
        self._values.clear()
        self._seconds.clear()
        self._scores = {}
        self._shown.clear()

    def _shares(self) -> dict[str, float]:
        """Shares of each role's time since the last step that it waited, for whom, and seconds by
        kind."""
        shares: dict[str, float] = {}
        for role, seconds in self._seconds.items():
            shares |= tags_of_time(role, seconds)
        return shares

    def _queue(self) -> dict[str, float]:
        state = self.state
        served = [
            version for _, version in state.weights.readers.values() if version in state.lineage
        ]
        lags = (
            [state.weights.newest.number - version.number for version in served]
            if state.weights.newest
            else []
        )
        values = {f"queue/{name}": float(count) for name, count in state.tickets.depth().items()}
        values |= {
            f"queue/dropped_{reason}": float(count)
            for reason, count in state.counts.dropped.items()
        }
        values |= {
            f"queue/{name.replace('/', '_')}": float(count)
            for name, count in state.counts.noted.items()
        }
        values["weights/version"] = float(
            state.weights.newest.number if state.weights.newest else 0
        )
        values["weights/publish_lag"] = float(max(lags, default=0))
        return values

    def rolled_back(self, step: int) -> None:
        """Training goes on at ``step``; what was written of it and later steps no longer counts."""
        if step < self._next:
            self.writer.rolled_back(step)
            self._next = step

    def close(self) -> None:
        self.writer.close()
        self._failures.close()


def _with_components(values: Mapping[str, float]) -> dict[str, float]:
    """``values`` with the mean of each component of the reward, in the place of what it is made
    of."""
    counts = {
        tag.removeprefix(COMPONENT_COUNT): n
        for tag, n in values.items()
        if tag.startswith(COMPONENT_COUNT)
    }
    means = {
        f"reward/component_{name}": values[COMPONENT_SUM + name] / count
        for name, count in counts.items()
    }
    return {
        tag: v for tag, v in values.items() if not tag.startswith((COMPONENT_SUM, COMPONENT_COUNT))
    } | means


def settings_of(config: Config) -> dict[str, bool | float | str]:
    """Settings for TensorBoard's table, by their dotted keys: those that differ from the defaults,
    and those that people compare first.

    >>> settings_of(Config(steps=7))["steps"]
    7
    >>> "queue.max_rows" in settings_of(Config())
    False
    """
    defaults = dict(leaves(asdict(Config())))
    settings = {
        key: value
        for key, value in leaves(asdict(config))
        if key in _COMPARED or value != defaults.get(key, _NO_DEFAULT)
    }
    return {
        key: value
        for key, value in settings.items()
        if key.partition(".")[0] not in _ELSEWHERE and isinstance(value, bool | int | float | str)
    }
