"""Trackers for tests: one that writes down what it receives, and some that fail."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relax_hpc.base.metrics.trackers import Tracker


class Recorder(Tracker):
    """Writes every call to recorded.jsonl."""

    def __init__(self, run_dir: Path, settings: Mapping[str, Any]) -> None:
        super().__init__(run_dir, settings)
        self._write("made", settings["seed"])

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        print("a tracker may print")
        self._write("log", step, dict(values), time)

    def rolled_back(self, step: int) -> None:
        self._write("rolled_back", step)

    def finish(self) -> None:
        self._write("finish")

    def _write(self, *call: Any) -> None:
        with (self.run_dir / "recorded.jsonl").open("a") as file:
            file.write(json.dumps(call) + "\n")


class Raises(Tracker):
    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        raise ConnectionError("the service does not answer")


class Blocks(Tracker):
    """Marks in the run directory that it blocks, and blocks for ever."""

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        (self.run_dir / f"blocks-{step}").touch()
        threading.Event().wait()


class IsKilled(Tracker):
    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class BlocksAtItsEnd(Recorder):
    def finish(self) -> None:
        threading.Event().wait()


class CannotBeMade(Recorder):
    def __init__(self, run_dir: Path, settings: Mapping[str, Any]) -> None:
        raise ValueError("no key")


class NeedsMore(Recorder):
    def __init__(self, run_dir: Path, settings: Mapping[str, Any], project: str) -> None:
        super().__init__(run_dir, settings)


class OtherParameters(Recorder):
    def log(self, step: int, values: Mapping[str, float]) -> None:  # type: ignore[override]  # the mistake of the test
        super().log(step, values, 0.0)


class LogsNothing(Tracker):
    pass
