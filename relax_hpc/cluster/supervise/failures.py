"""Failures of groups after which a run is given up: by policy, or because a group goes in
circles."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NoReturn

from relax_hpc.base.disk_waits import has_passed_in, retry_write
from relax_hpc.base.errors import (
    EXIT_CONFIG,
    EXIT_NO_PROGRESS,
    ConfigError,
    NoProgressError,
    RelaxError,
)
from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.supervise import requests
from relax_hpc.cluster.supervise.disk_watch import DiskWatch
from relax_hpc.cluster.supervise.launch_records import Progress, fruitless, repeated_start_error
from relax_hpc.config import Config
from relax_hpc.config.groups import group_of
from relax_hpc.net.rendezvous.roster import latest_incarnation

_ASK_S = 10.0
"""Seconds for which a stop is asked for on a disk that does not take it."""


class Failures:
    """Failures of groups, and what becomes of the run by them, in one attempt at it."""

    def __init__(
        self,
        run: RunDir,
        config: Config,
        attempt: int,
        progress: Callable[[], Progress],
        disk: DiskWatch,
    ) -> None:
        self.run, self.config, self.attempt, self.progress, self.disk = (
            run,
            config,
            attempt,
            progress,
            disk,
        )

    def judge(self, name: str, reason: str) -> None:
        """Give up the run where that is the policy of a group that has failed, and on one that goes
        in circles."""
        if group_of(self.config, name).on_failure == "stop_run":
            self.give_up(
                name, f"{reason}; groups.{name}.on_failure is stop_run", RelaxError.exit_code
            )
        error = self.repeated_start_error(name)
        if error and name in self.config.groups:
            text = f"cannot start, the last two times by the same error: {error}"
            self.give_up(name, f"{text}; correct the settings that it names", EXIT_CONFIG)
        self.count(name, reason)

    def repeated_start_error(self, name: str) -> str:
        """Error with which a child program of a group failed at its last two starts, or empty."""
        return repeated_start_error(self.run, self.config, name, self.attempt)

    def count(self, name: str, reason: str) -> None:
        """Give up on a group that goes in circles, if not for want of room on a disk."""
        limit = self.config.liveness.max_restarts
        times = fruitless(self.run, name, self.attempt, self.progress())
        if times > limit and not self.disk.hinders():
            text = f"ended {times} times without new samples, steps or checkpoints between"
            text = f"{text}, allowed liveness.max_restarts={limit}; the last time: {reason}"
            self.give_up(name, text, EXIT_NO_PROGRESS)

    def give_up(self, name: str, reason: str, code: int) -> NoReturn:
        """End the run with an error that says where to look; other supervisors of the run end
        theirs too."""
        text = f"{name}: {reason} (log: {self.run.logs(name, latest_incarnation(self.run, name))})"
        with contextlib.suppress(OSError):
            retry_write(
                self.run.stop,
                lambda: requests.ask_to_stop(self.run, code, text),
                has_passed_in(_ASK_S),
            )
        raise {EXIT_CONFIG: ConfigError, EXIT_NO_PROGRESS: NoProgressError}.get(code, RelaxError)(
            text
        )
