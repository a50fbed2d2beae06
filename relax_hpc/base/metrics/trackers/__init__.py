"""Experiment trackers: each receives every line of metrics.jsonl, in a separate process.

`metrics.trackers` names classes derived from `Tracker` by import path. A tracker never delays a
run: the hub writes metrics.jsonl, and the process of the tracker reads it. If a tracker raises,
ends its process or takes too long, the hub reports that once and continues without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relax_hpc.base.error_origin import describe_with_location
from relax_hpc.base.errors import ConfigError
from relax_hpc.base.plugins import load_plugin

KEY = "metrics.trackers"
"""Setting that names trackers."""
CALLED_WITH = {
    "log": ("step", "values", "time"),
    "rolled_back": ("step",),
    "finish": (),
}
"""Method of a tracker -> its arguments."""


class Tracker:
    """Destination of metrics, such as a service or a file. A derived class overrides `log`.

    The hub starts one process for each tracker. Each start of the hub makes a new object, which
    continues after the last line that the previous one has logged. A line that was being logged
    when the hub was killed is logged again.
    """

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

    def finish(self) -> None:
        """Write pending data. The hub ends; it may start again later.

        All trackers together have half of `liveness.stop_timeout_s` for it. The default does
        nothing.
        """


def tracker_class(name: str) -> type[Tracker]:
    """Class of the tracker with the import path ``name``.

    Raises:
        ConfigError: there is no such class, or it is not derived from `Tracker`.
    """
    if ":" not in name:
        raise ConfigError(f"{KEY}: found {name!r}, allowed: package.module:Class")
    tracker: Any = load_plugin(KEY, name, {})
    if not (isinstance(tracker, type) and issubclass(tracker, Tracker)):
        raise ConfigError(
            f"{KEY}: {name!r}: found no class derived from relax_hpc.base.metrics.trackers.Tracker"
        )
    if tracker.log is Tracker.log:
        raise ConfigError(
            f"{KEY}: {name!r}: found no method log; define log(self, step, values, time)"
        )
    return tracker


def make_tracker(name: str, run_dir: Path, settings: Mapping[str, Any]) -> Tracker:
    """Tracker with the import path ``name``.

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
