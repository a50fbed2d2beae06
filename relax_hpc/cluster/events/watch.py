"""Watch of a run by the supervisor of its hub, which reports events."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from relax_hpc.base.errors import RelaxError
from relax_hpc.base.metrics.read import is_step, parse_lines
from relax_hpc.base.rundir import RunDir
from relax_hpc.base.versions import Version
from relax_hpc.cluster.events.command import EventCommand
from relax_hpc.cluster.events.conditions import (
    PACE_STEPS,
    RUN_ENDED,
    RUN_FAILED,
    Observations,
    find_conditions,
)
from relax_hpc.cluster.events.log import EventLog
from relax_hpc.cluster.supervise.liveness import Liveness
from relax_hpc.cluster.supervise.unsaved_work import find_unsaved_work
from relax_hpc.config import load_resolved
from relax_hpc.config.schema import Config
from relax_hpc.queue.client import QueueClient
from relax_hpc.queue.operations import LOST

_LOOK_S = 1.0
"""Seconds between two looks at the run."""
_ENGINES_S = 5.0
"""Seconds between two questions about engines that were started elsewhere, and for an answer."""
_FIRST_BYTES = 1 << 20
"""Bytes at the end of metrics.jsonl that a new watch reads."""


class EventWatch:
    """Looks at a run, and reports events. No method waits."""

    def __init__(self, run: RunDir, config: Config, say: Callable[[str], None]) -> None:
        self.run, self.config = run, config
        self.log = EventLog(run, config.events)
        self.command = EventCommand(run, config, self.log, say)
        self._steps: deque[Mapping[str, Any]] = deque(maxlen=PACE_STEPS)
        self._progress_since = time.time()
        self._offset = -1
        self._look_at = 0.0
        self._engines: Future[Any] | None = None
        self._engines_at = 0.0
        self._lost_engines: Mapping[str, str] = {}
        # The receiver of a failure also receives that the run was resumed.
        self.log.resolve(RUN_FAILED, "the run continues", time.time(), 0)
        self.log.drop(RUN_ENDED)

    def update(
        self, liveness: Liveness, client: QueueClient, disks: Collection[Mapping[str, Any]]
    ) -> None:
        """Look at the run if it is time, and run the command for new events. ``disks``: writes
        that wait for a disk."""
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + _LOOK_S
            # On a full disk, or while a file system does not answer, the next look reads them.
            with suppress(OSError):
                self._read_steps()
            self._ask_for_engines(client)
            observed = self._observe(liveness, disks)
            trained = liveness.progress[0]
            conditions = find_conditions(observed, self.config, self.log.active)
            self.log.update(conditions, observed.now, trained)
        self.command.poll()

    def close(self, with_command: bool) -> None:
        """Give the command the remaining events, for at most `events.command_s`. Without
        ``with_command`` the next supervisor does that."""
        if with_command:
            self.command.finish(self.config.events.command_s)
        self.log.close()

    def _observe(self, liveness: Liveness, disks: Collection[Mapping[str, Any]]) -> Observations:
        now = time.time()
        # After a wait, the time for the next step starts from zero.
        if liveness.awaited_groups or disks:
            self._progress_since = now
        return Observations(
            now=now,
            steps=list(self._steps),
            progress_since=self._progress_since,
            awaited_groups=liveness.awaited_groups,
            hub_silent_s=time.monotonic() - liveness.answered_at,
            disks=disks,
            unsaved=find_unsaved_work(self.config, liveness.beats, liveness.progress[0]),
            readers=liveness.readers,
            lost_engines=self._lost_engines,
            removed_engines=self._removed_engines(liveness.readers),
        )

    def _removed_engines(self, readers: Mapping[str, str]) -> set[str]:
        removed = set[str]()
        # Settings are read only if an engine serves nothing, because that takes some milliseconds.
        if all(Version.parse(version).incarnation for version in readers.values()):
            return removed
        for name, group in self.config.groups.items():
            if "rollout" in group.roles:
                # The settings of a group change while it runs.
                with suppress(OSError, RelaxError):
                    removed.update(load_resolved(self.run.root, name).rollout.without)
        return removed

    def _read_steps(self) -> None:
        """Read the training steps that metrics.jsonl has got since the last call."""
        if not self.run.metrics.exists():
            return
        with self.run.metrics.open("rb") as file:
            size = file.seek(0, 2)
            # A file that became shorter was replaced, for example by a copy of the run.
            is_first = self._offset < 0
            if is_first or size < self._offset:
                self._offset = max(0, size - _FIRST_BYTES)
            file.seek(self._offset)
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        lines, _ = parse_lines(complete.splitlines())
        for line in lines:
            if "event" in line:
                # Steps that were rolled back are trained again.
                kept = [step for step in self._steps if step["step"] < line["step"]]
                self._steps = deque(kept, maxlen=PACE_STEPS)
            elif is_step(line):
                self._steps.append(line)
        # Lines from before this supervisor do not count: the groups have yet to start.
        if self._steps and not is_first:
            self._progress_since = max(self._progress_since, self._steps[-1]["time"])

    def _ask_for_engines(self, client: QueueClient) -> None:
        """Read the last answer about external engines, and ask again."""
        # The answer arrives in another thread, so that a hub that is away delays nothing.
        if self._engines is not None and self._engines.done():
            answer, self._engines = self._engines, None
            if answer.exception() is None:
                self._lost_engines = {
                    engine.name: engine.detail or engine.reason
                    for engine in answer.result().external
                    if engine.state == LOST
                }
        if self._engines is None and time.monotonic() >= self._engines_at:
            self._engines_at = time.monotonic() + _ENGINES_S
            self._engines = client.operations.present(timeout=_ENGINES_S)


def report_run_end(
    run: RunDir, config: Config, state: str, reason: str, say: Callable[[str], None]
) -> None:
    """Report the end of a run, and events that the command has not received yet. ``state``:
    finished, stopped or failed."""
    log = EventLog(run, config.events)
    event = RUN_FAILED if state == "failed" else RUN_ENDED
    step = 0
    with suppress(OSError):
        steps = [line for line in _last_lines(run) if is_step(line)]
        step = steps[-1]["step"] + 1 if steps else 0
    # A condition of a run that has ended is no longer a problem. No later round would resolve it.
    log.resolve_all(time.time(), step)
    log.report(event, f"{state}: {reason}" if reason else state, time.time(), step)
    EventCommand(run, config, log, say).finish(2 * config.events.command_s)
    log.close()


def _last_lines(run: RunDir) -> list[dict[str, Any]]:
    with run.metrics.open("rb") as file:
        file.seek(max(0, file.seek(0, 2) - _FIRST_BYTES))
        return parse_lines(file.read().splitlines())[0]
