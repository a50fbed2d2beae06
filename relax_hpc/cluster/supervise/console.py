"""Output of `relax-hpc run`: events of the groups, one progress line for each step, and the paths
of all results at the end."""

from __future__ import annotations

import contextlib
import json
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from relax_hpc.base.errors import RelaxError
from relax_hpc.base.log_rotation import rotate_log
from relax_hpc.base.metrics.first_failures import FirstFailure, parse_failure
from relax_hpc.base.metrics.learning_signal import why_nothing_learned
from relax_hpc.base.metrics.progress import Progress
from relax_hpc.base.metrics.read import is_step
from relax_hpc.base.rundir import RunDir
from relax_hpc.base.terminal_text import escape_line
from relax_hpc.cluster.supervise.unsaved_work import describe_unsaved_work
from relax_hpc.config.schema import Config


class _NewLines:
    """Reader of the lines that are appended to a file after this object was made."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0

    def read(self) -> list[bytes]:
        """Complete lines that were appended since the last call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        return complete.splitlines()


class Terminal:
    """Terminal of the user, which follows metrics.jsonl. With ``steps`` false it shows only events
    of groups."""

    def __init__(self, run: RunDir, config: Config, steps: bool = True) -> None:
        self.run, self.config, self.steps = run, config, steps
        self.progress = Progress(config.steps)
        self.started = time.monotonic()
        self.log = (run.root / "supervisor.log").open("a")
        self._metrics = _NewLines(run.metrics)
        self._failures = _NewLines(run.failures)
        self._scores: dict[str, float] = {}
        self._activities: Mapping[str, str] = {}
        self._failed_checkpoints = 0
        self._learns_nothing = False
        """Whether the policy learned nothing from the rewards of the last step."""

    def say(self, text: str) -> None:
        """Print one line and write it to the supervisor's log."""
        self.progress.close()
        line = f"[{time.monotonic() - self.started:7.1f}s] {escape_line(text)}"
        # A full disk must not end the supervision.
        with contextlib.suppress(OSError):
            print(line, flush=True)
        self._log(line)

    def _log(self, line: str) -> None:
        with contextlib.suppress(OSError):
            self.log.write(line + "\n")
            self.log.flush()
            rotate_log(self.run.root / "supervisor.log")

    def log_error(
        self, _kind: object, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write the exception that ends the command to the log, because the terminal may be
        closed."""
        if error is not None and not isinstance(error, RelaxError):
            for text in traceback.format_exception(type(error), error, trace):
                for line in text.splitlines():
                    self._log(escape_line(line))
        elif error is not None:
            self._log(escape_line(str(error)))

    def show_activities(self, activities: Mapping[str, str]) -> None:
        """Print the new activities of groups, because a start can take minutes. ``activities``
        maps a group to its activity."""
        for name, activity in activities.items():
            if self._activities.get(name) != activity:
                self.say(f"{name}: {activity}")
        self._activities = activities

    def show_unsaved(self, unsaved: Mapping[str, Any]) -> None:
        """Print once for each failed checkpoint that it failed, and how much work is at risk.
        ``unsaved``: see `find_unsaved_work`."""
        failed = unsaved.get("failed", 0)
        if failed > self._failed_checkpoints:
            self.say(f"checkpoint: {describe_unsaved_work(unsaved)}")
        elif self._failed_checkpoints and not failed:
            self.say("checkpoint: saved again")
        self._failed_checkpoints = failed

    def show_progress(self) -> None:
        """Show the steps that were trained since the last call."""
        if not self.steps:
            return
        self.show_failures()
        for text in self._metrics.read():
            # A killed hub can leave half a line, and a user can write into the file by hand.
            with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):
                self._show(json.loads(text))

    def show_failures(self) -> None:
        """Show each failure that is the first of its kind and new since the last call."""
        if not self.steps:
            return
        for text in self._failures.read():
            if failure := parse_failure(text):
                self._show_failure(failure)

    def _show_failure(self, failure: FirstFailure) -> None:
        """Print a failure, with the traceback of the user's code."""
        self.say(f"{failure.group}: first {failure.headline}")
        for line in failure.traceback.splitlines():
            self.say(f"    {line}")

    def _show(self, line: dict) -> None:
        if line.get("event") == "rolled_back":
            self.say(f"training continues at step {line['step']}; later steps were rolled back")
        values = {tag: value for tag, value in line.items() if "/" in tag and value is not None}
        if any(tag.startswith("eval/") for tag in values) and not is_step(values):
            self._scores = values
            scores = "  ".join(
                f"{tag.removeprefix('eval/')} {value:.3f}" for tag, value in sorted(values.items())
            )
            self.say(f"version {line['step']}: {scores}")
        elif is_step(values):
            self.progress.update(line["step"], values, line["time"])
            self._show_signal(line["step"], values)

    def _show_signal(self, step: int, values: Mapping[str, float]) -> None:
        """Warn when the policy stops learning from rewards, and print when it learns again."""
        reason = why_nothing_learned(values, self.config.algorithm.updates)
        if reason and not self._learns_nothing:
            self.say(
                f"step {step}: nothing was learned from rewards: {reason}; look at the samples and "
                "the reward"
            )
        elif self._learns_nothing and not reason:
            self.say(f"step {step}: the policy learns from rewards again")
        self._learns_nothing = bool(reason)

    def summary(self) -> None:
        """Print where the run's results are, and draw the reward plot."""
        from relax_hpc.base.metrics.plot import plot_runs

        checkpoints = [path for _, path in self.run.saved()]
        try:
            picture: object = plot_runs([self.run.root], self.run.root / "rewards.png", [])
        except OSError as error:
            picture = f"not drawn: {error}"
        self.progress.close()
        print(f"finished in {time.monotonic() - self.started:.1f} s")
        print(f"run directory  {self.run.root}")
        print(f"checkpoint     {checkpoints[-1] if checkpoints else 'none'}")
        # TensorBoard names a run by its path below --logdir. The parent folder also shows the
        # neighbouring runs for comparison.
        print(f"TensorBoard    tensorboard --logdir {self.run.root.parent}")
        print(f"reward plot    {picture}")
        sys.stdout.flush()

    def close(self) -> None:
        """Show the last failures, which may be the cause of the end, and close the log."""
        with contextlib.suppress(OSError):
            self.show_failures()
        self.progress.close()
        with contextlib.suppress(OSError):
            self.log.close()
