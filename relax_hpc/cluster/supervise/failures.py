"""Failures of groups that end the run: by the group's policy, or because a group restarts without
progress."""

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
from relax_hpc.cluster.supervise.launch_records import (
    Progress,
    count_fruitless_starts,
    repeated_start_error,
)
from relax_hpc.config import Config
from relax_hpc.config.groups import group_settings
from relax_hpc.net.rendezvous.roster import latest_incarnation

_ASK_S = 10.0
"""Seconds for which the request to stop is retried on a full disk."""


class Failures:
    """Rules that decide, in one attempt at a run, whether the failure of a group ends the run."""

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

    def check_failure(self, name: str, reason: str) -> None:
        """End the run if the policy of the failed group says so, or if the group restarts without
        progress."""
        if group_settings(self.config, name).on_failure == "stop_run":
            self.end_run(
                name, f"{reason}; groups.{name}.on_failure is stop_run", RelaxError.exit_code
            )
        error = self.repeated_start_error(name)
        if error and name in self.config.groups:
            text = f"cannot start, the last two times by the same error: {error}"
            self.end_run(name, f"{text}; correct the settings that it names", EXIT_CONFIG)
        self.check_restart_limit(name, reason)

    def repeated_start_error(self, name: str) -> str:
        """Error of a child program of a group, if its last two starts failed by the same one; else
        empty."""
        return repeated_start_error(self.run, self.config, name, self.attempt)

    def check_restart_limit(self, name: str, reason: str) -> None:
        """End the run if a group was restarted too often without progress, unless the disk is
        full."""
        limit = self.config.liveness.max_restarts
        times = count_fruitless_starts(self.run, name, self.attempt, self.progress())
        if times > limit and not self.disk.is_full():
            text = f"ended {times} times without new samples, steps or checkpoints between"
            text = f"{text}, allowed liveness.max_restarts={limit}; the last time: {reason}"
            self.end_run(name, text, EXIT_NO_PROGRESS)

    def end_run(self, name: str, reason: str, code: int, has_log: bool = True) -> NoReturn:
        """End the run with an error that names the log, if the group ``has_log``. Other supervisors
        of the run end their groups too."""
        log = self.run.logs(name, latest_incarnation(self.run, name))
        text = f"{name}: {reason} (log: {log})" if has_log else f"{name}: {reason}"
        with contextlib.suppress(OSError):
            retry_write(
                self.run.stop,
                lambda: requests.request_stop(self.run, code, text),
                has_passed_in(_ASK_S),
            )
        raise {EXIT_CONFIG: ConfigError, EXIT_NO_PROGRESS: NoProgressError}.get(code, RelaxError)(
            text
        )
