"""A service for tests of `relax-hpc track`: it stores points like one that cannot delete them."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping

from relax_hpc.base.metrics.trackers.service_tracker import ServiceTracker

CALLS = "service.jsonl"


class PointService(ServiceTracker):
    """Appends each call to service.jsonl of the run directory."""

    def open_run(self, name: str, identity: str) -> None:
        self.identity = identity
        self.write("open", name)

    def send(self, number: int, step: int, values: Mapping[str, float], time: float) -> None:
        self.write("send", number, step, dict(values))

    def close_run(self, rolled_back_to: int | None) -> None:
        self.write("close", rolled_back_to)

    def write(self, *call: object) -> None:
        with (self.run_dir / CALLS).open("a") as file:
            file.write(json.dumps([self.identity, *call]) + "\n")


class KilledService(PointService):
    """Its process is killed in the middle of a rollback, twice."""

    def send(self, number: int, step: int, values: Mapping[str, float], time: float) -> None:
        super().send(number, step, values, time)
        deaths = self.run_dir / "deaths"
        count = len(list(self.run_dir.glob("deaths*")))
        if self.identity.endswith("-r1") and number == 1 and count < 2:
            deaths.with_suffix(f".{count}").touch()
            os.kill(os.getpid(), signal.SIGKILL)


class LostService(PointService):
    """Has no network until the file `network` exists."""

    def open_run(self, name: str, identity: str) -> None:
        if not (self.run_dir / "network").exists():
            raise ConnectionError("the service does not answer")
        super().open_run(name, identity)
