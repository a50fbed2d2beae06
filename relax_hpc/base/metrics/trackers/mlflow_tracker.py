"""MLflow (mlflow or mlflow-skinny, 3.17). Its variables decide: MLFLOW_TRACKING_URI,
MLFLOW_EXPERIMENT_NAME.

Without MLFLOW_TRACKING_URI it writes below RUN/trackers/mlflow: a SQLite file if sqlalchemy is
installed, as with mlflow, else a tree of files, as with mlflow-skinny.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relax_hpc.base.metrics.trackers.service_tracker import PROJECT, ServiceTracker

_IDENTITY = "relax_hpc.identity"
"""Tag by which a later process finds the run, because MLflow chooses the ids of runs."""
_NAMES = re.compile(r"[^\w\-. :/]")
"""Characters that MLflow refuses in names of metrics."""
_BATCH = 1000
"""Metrics, and characters of a parameter's value, that MLflow accepts in one request."""
_PARAMS = 100
"""Parameters that MLflow accepts in one request."""
_PARAM_CHARS = 500
_RETRIES = "3"


class MlflowTracker(ServiceTracker):
    """A run of MLflow."""

    package = "mlflow"

    def __init__(self, run_dir: Path, settings: Mapping[str, Any]) -> None:
        super().__init__(run_dir, settings)
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            folder = self.local_folder("mlflow")
            uri = f"sqlite:///{folder}/mlflow.db"
            if importlib.util.find_spec("sqlalchemy") is None:
                uri = f"file://{folder}"
                # MLflow 3.17 refuses to write files otherwise, and without sqlalchemy it has
                # no other local store.
                os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
            os.environ["MLFLOW_TRACKING_URI"] = uri
        # The default, 7 with growing pauses, exceeds metrics.tracker_timeout_s without a network.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", _RETRIES)
        from mlflow import MlflowClient

        self._client = MlflowClient()
        self._run = ""
        """Id of the open run."""

    def open_run(self, name: str, identity: str) -> None:
        """Open or make the run."""
        from mlflow.entities import Param

        experiment = self._experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT))
        filter_string = f"tags.`{_IDENTITY}` = '{identity}'"
        runs = self._client.search_runs([experiment], filter_string, max_results=1)
        if runs:
            self._run = runs[0].info.run_id
            return
        tags = {_IDENTITY: identity}
        run = self._client.create_run(experiment, run_name=name, tags=tags)
        self._run = run.info.run_id
        params = [
            Param(_NAMES.sub("_", key), str(value)[:_PARAM_CHARS])
            for key, value in self.shown_settings().items()
        ]
        for begin in range(0, len(params), _PARAMS):
            self._client.log_batch(self._run, params=params[begin : begin + _PARAMS])

    def _experiment(self, name: str) -> str:
        """Id of the experiment ``name``, which is created if it does not exist."""
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            return str(self._client.create_experiment(name))
        return str(experiment.experiment_id)

    def send(self, number: int, step: int, values: Mapping[str, float], time: float) -> None:
        """Log the values at ``step``."""
        from mlflow.entities import Metric

        metrics = [
            Metric(metric_name(tag), value, round(1000 * time), step)
            for tag, value in values.items()
        ]
        for begin in range(0, len(metrics), _BATCH):
            self._client.log_batch(self._run, metrics=metrics[begin : begin + _BATCH])

    def close_run(self, rolled_back_to: int | None) -> None:
        """Mark the end of the run. A later process may add to it."""
        if rolled_back_to is not None:
            self._client.set_tag(self._run, "rolled_back_to", rolled_back_to)
        status = "FINISHED" if rolled_back_to is None else "KILLED"
        self._client.set_terminated(self._run, status)


def metric_name(tag: str) -> str:
    """Name of a metric that MLflow accepts.

    >>> metric_name("eval/held_out/pass@4")
    'eval/held_out/pass_at_4'
    """
    return _NAMES.sub("_", tag.replace("@", "_at_"))
