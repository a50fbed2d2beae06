"""Experiment trackers: each receives every line of metrics.jsonl, in a separate process.

`metrics.trackers` and `relax-hpc track` name trackers: a service of `SERVICES`, or a class derived
from `Tracker` by its import path. A tracker never delays a run: the hub writes metrics.jsonl, and
the process of the tracker reads it. If a tracker raises, ends its process or takes too long, the
hub reports that once and continues without it, and `relax-hpc track` starts it again.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from relax_hpc.base.error_origin import describe_with_location
from relax_hpc.base.errors import ConfigError
from relax_hpc.base.plugins import load_plugin

KEY = "metrics.trackers"
"""Setting that names trackers."""
SERVICES = {
    "wandb": "relax_hpc.base.metrics.trackers.wandb_tracker:WandbTracker",
    "trackio": "relax_hpc.base.metrics.trackers.trackio_tracker:TrackioTracker",
    "mlflow": "relax_hpc.base.metrics.trackers.mlflow_tracker:MlflowTracker",
}
"""Short name of a service -> import path of its tracker."""
CALLED_WITH = {
    "log": ("step", "values", "time"),
    "rolled_back": ("step",),
    "flush": (),
    "finish": (),
}
"""Method of a tracker -> its arguments."""


class Tracker:
    """Destination of metrics, such as a service or a file. A derived class overrides `log`.

    The hub starts one process for each tracker. Each start of the hub makes a new object, which
    continues after the last line that the previous one has logged. A line that was being logged
    when the hub was killed is logged again.
    """

    package: ClassVar[str] = ""
    """Module that the tracker imports and relax_hpc does not install; empty: none."""
    line_number = 0
    """Number of lines in metrics.jsonl before the one of the present call. It is the same if the
    line is logged again, so that a service can recognise it."""

    def __init__(self, run_dir: Path, settings: Mapping[str, Any]) -> None:
        """Keep the arguments.

        Args:
            run_dir: the run directory, where a tracker may write its files.
            settings: the configuration of the run as nested mappings, the sections as in YAML.
        """
        self.run_dir = run_dir
        self.settings = settings

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        """Record the metrics of a training step, or of an evaluation of its weights.

        Several calls may concern one step. If they have the same tag, the later value counts.

        Args:
            step: training step, from 0.
            values: tag such as `reward/mean` -> value, which may be nan.
            time: seconds since 1970.
        """
        raise NotImplementedError

    def rolled_back(self, step: int) -> None:
        """Training resumes at ``step``: discard the metrics of this and later steps.

        The default does nothing.
        """

    def flush(self) -> None:
        """Make the logged lines durable. After this call they are not logged again.

        The default does nothing: `log` itself has stored the values.
        """

    def finish(self) -> None:
        """Write pending data. The hub ends; it may start again later.

        All trackers together have half of `liveness.stop_timeout_s` for it. The default does
        nothing.
        """


def tracker_class(name: str, key: str = KEY) -> type[Tracker]:
    """Class of the tracker ``name``: a service of `SERVICES`, or an import path.

    Args:
        name: the name.
        key: the setting or option that has it, for messages.

    Raises:
        ConfigError: there is no such class, it is not derived from `Tracker`, or its package is
            not installed.
    """
    if ":" not in name and name not in SERVICES:
        allowed = f"{', '.join(SERVICES)} or package.module:Class"
        raise ConfigError(f"{key}: found {name!r}, allowed: {allowed}")
    tracker: Any = load_plugin(key, name, SERVICES)
    if not (isinstance(tracker, type) and issubclass(tracker, Tracker)):
        raise ConfigError(
            f"{key}: {name!r}: found no class derived from relax_hpc.base.metrics.trackers.Tracker"
        )
    if tracker.log is Tracker.log:
        raise ConfigError(
            f"{key}: {name!r}: found no method log; define log(self, step, values, time)"
        )
    if tracker.package and importlib.util.find_spec(tracker.package) is None:
        raise ConfigError(
            f"{key}: {name!r}: the package {tracker.package} is not installed; "
            f"pip install {tracker.package}"
        )
    return tracker


def make_tracker(name: str, run_dir: Path, settings: Mapping[str, Any]) -> Tracker:
    """Tracker with the name ``name``, see `tracker_class`.

    Raises:
        ConfigError: there is no such class, or its constructor fails.
    """
    tracker = tracker_class(name)
    try:
        return tracker(run_dir, settings)
    except Exception as error:  # a user's class may raise anything
        raise ConfigError(
            f"{KEY}: {name!r}: cannot be made: {describe_with_location(error)}; "
            "it is called with (run_dir, settings)"
        ) from error
