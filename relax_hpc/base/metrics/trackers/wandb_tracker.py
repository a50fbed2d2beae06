"""Weights & Biases (wandb 0.31). Its variables decide: WANDB_MODE, WANDB_PROJECT, WANDB_API_KEY.

Without WANDB_MODE and without a key it works offline: files in RUN/trackers/wandb, which
`wandb sync` sends later.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from relax_hpc.base.disk_waits import describe_write_error, probe_folder
from relax_hpc.base.errors import RelaxError
from relax_hpc.base.metrics.trackers.service_tracker import PROJECT, ServiceTracker

STEP = "train/step"
"""Horizontal axis of all charts. wandb's own step rises with each line: it refuses smaller ones."""
_INIT_S = 30.0


class WandbTracker(ServiceTracker):
    """A run of Weights & Biases."""

    package = "wandb"

    def open_run(self, name: str, identity: str) -> None:
        """Open or continue the run."""
        import wandb

        mode: Any = os.environ.get("WANDB_MODE") or None
        if mode is None and not wandb.api.api_key:
            # Without a key, wandb would ask for one.
            mode = "offline"
        quiet = wandb.Settings(
            console="off",
            disable_git=True,
            init_timeout=_INIT_S,
            # These are values of the machine with the tracker, not of the run.
            x_disable_stats=True,
        )
        self._folder = self.local_folder("wandb")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            group=str(self.settings.get("name") or self.run_dir.name),
            name=name,
            id=identity,
            resume="allow",
            dir=str(self._folder.parent),
            mode=mode,
            config=self.shown_settings(),
            settings=quiet,
        )
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    def send(self, number: int, step: int, values: Mapping[str, float], time: float) -> None:
        """Log the values at wandb's step ``number``."""
        self._run.log({STEP: step, "time": time, **values}, step=number)

    def flush(self) -> None:
        """Raise RelaxError if wandb's folder cannot be written: wandb 0.31 only logs that."""
        if self._is_open:
            self._check_folder()

    def close_run(self, rolled_back_to: int | None) -> None:
        """Finish the run. wandb waits until its data are sent, or stored if it works offline."""
        if rolled_back_to is not None:
            self._run.tags = (*(self._run.tags or ()), "rolled back")
            self._run.summary["rolled_back_to"] = rolled_back_to
        self._run.finish()
        self._check_folder()

    def _check_folder(self) -> None:
        problem = probe_folder(self._folder)
        if problem:
            raise RelaxError(describe_write_error(problem["path"], OSError(problem["errno"], "")))
