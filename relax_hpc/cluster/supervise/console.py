"""Output of `relax-hpc run`: events of the groups, a progress line a step, and where everything
lies at the end."""

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
from relax_hpc.cluster.supervise.unsaved_work import in_words as unsaved_in_words
from relax_hpc.config.schema import Config


class _NewLines:
    """Lines that are appended to a file from now on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0

    def read(self) -> list[bytes]:
        """The whole lines since the last call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return whole.splitlines()


class Terminal:
    """Follows metrics.jsonl for the user in front of it; ``steps`` false: says only what happens to
    groups."""

    def __init__(self, run: RunDir, config: Config, steps: bool = True) -> None:
        self.run, self.config, self.steps = run, config, steps
        self.progress = Progress(config.steps)
        self.started = time.monotonic()
        self.log = (run.root / "supervisor.log").open("a")
        self._metrics = _NewLines(run.metrics)
        self._failures = _NewLines(run.failures)
        self._scores: dict[str, float] = {}
        self._doing: Mapping[str, str] = {}
        self._unsaved = 0
        self._teaches_nothing = False
        """Whether the last step has taught the policy nothing."""

    def say(self, text: str) -> None:
        """Print one line for the user and the supervisor's log."""
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
        """Write the exception that ends the command to the log. The terminal, which shows it too,
        may be closed."""
        if error is not None and not isinstance(error, RelaxError):
            for text in traceback.format_exception(type(error), error, trace):
                for line in text.splitlines():
                    self._log(escape_line(line))
        elif error is not None:
            self._log(escape_line(str(error)))

    def show_doing(self, doing: Mapping[str, str]) -> None:
        """Say what each group is ``doing``, if it is something new: a start of minutes would pass
        without a word."""
        for name, words in doing.items():
            if self._doing.get(name) != words:
                self.say(f"{name}: {words}")
        self._doing = doing

    def show_unsaved(self, found: Mapping[str, Any]) -> None:
        """Say once of each checkpoint that it could not be written, and what is at risk. ``found``:
        see `unsaved_work`."""
        failed = found.get("failed", 0)
        if failed > self._unsaved:
            self.say(f"checkpoint: {unsaved_in_words(found)}")
        elif self._unsaved and not failed:
            self.say("checkpoint: saved again")
        self._unsaved = failed

    def show_progress(self) -> None:
        """Show the steps that came since the last call."""
        if not self.steps:
            return
        self.show_failures()
        for text in self._metrics.read():
            # A line that a killed hub left half written, or nobody of ours wrote, is nothing to
            # show.
            with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):
                self._show(json.loads(text))

    def show_failures(self) -> None:
        """Show each first failure of its kind that came since the last call."""
        if not self.steps:
            return
        for text in self._failures.read():
            if failure := parse_failure(text):
                self._show_failure(failure)

    def _show_failure(self, failure: FirstFailure) -> None:
        """Show the first failure of its kind, with the traceback of the user's code."""
        self.say(f"{failure.group}: first {failure.headline}")
        for line in failure.traceback.splitlines():
            self.say(f"    {line}")

    def _show(self, line: dict) -> None:
        if line.get("event") == "rolled_back":
            self.say(
                f"training goes on at step {line['step']}; what was trained beyond it does not "
                "count"
            )
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
        """Warn of the first step of a stretch of steps that teach the policy nothing, and say when
        it is over."""
        reason = why_nothing_learned(values, self.config.algorithm.updates)
        if reason and not self._teaches_nothing:
            self.say(
                f"step {step}: nothing was learned from rewards: {reason}; look at the samples and "
                "the reward"
            )
        elif self._teaches_nothing and not reason:
            self.say(f"step {step}: rewards are learned from again")
        self._teaches_nothing = bool(reason)

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
        # A run is called by its path below --logdir, and its siblings are shown for comparison.
        print(f"TensorBoard    tensorboard --logdir {self.run.root.parent}")
        print(f"reward plot    {picture}")
        sys.stdout.flush()

    def close(self) -> None:
        """Show failures that came last: they may be why the run ends."""
        with contextlib.suppress(OSError):
            self.show_failures()
        self.progress.close()
        with contextlib.suppress(OSError):
            self.log.close()
