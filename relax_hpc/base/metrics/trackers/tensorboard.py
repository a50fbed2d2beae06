"""TensorBoard: one event file for each incarnation of the hub.

The hub itself writes it, not a separate process: `AppendFile` keeps bytes that a slow or full disk
does not accept, and no write of it waits.
"""

from __future__ import annotations

import os
import socket
import time as clock
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from relax_hpc.base.disk_waits import AppendFile
from relax_hpc.base.metrics.tags import tensorboard_tag
from relax_hpc.base.metrics.trackers import Tracker

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

TENSORBOARD_DIR = "tensorboard"


class TensorBoard(Tracker):
    """Event file in <run_dir>/tensorboard.

    tensorboard's own writer stops for good when a disk is full, so only its record format is used.
    """

    def __init__(self, run_dir: Path, incarnation: int) -> None:
        super().__init__(run_dir, {})
        # Importing tensorboard takes 0.2 s, which commands that only read metrics do not need.
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        now = clock.time()
        begin = f"events.out.tfevents.{now:010.0f}.{socket.gethostname()}.{os.getpid()}"
        self._lines = AppendFile(run_dir / TENSORBOARD_DIR / f"{begin}.0.inc-{incarnation:06d}")
        self._records = RecordWriter(self._lines)
        self._write(event_pb2.Event(wall_time=now, file_version="brain.Event:2"))

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        """Record the scalars of a step."""
        from tensorboard.compat.proto import summary_pb2

        scalars = [
            summary_pb2.Summary.Value(tag=tensorboard_tag(tag), simple_value=value)
            for tag, value in values.items()
        ]
        self._write(_event(step, time, summary_pb2.Summary(value=scalars)))

    def rolled_back(self, step: int) -> None:
        """Have TensorBoard drop the points of ``step`` and later that it has read so far."""
        from tensorboard.compat.proto import event_pb2

        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._write(event_pb2.Event(wall_time=clock.time(), step=step, session_log=start))

    def show(self, step: int, tag: str, text: str) -> None:
        """Show ``text`` unchanged in the Text tab: every line is code, which Markdown does not
        format."""
        from tensorboard.plugins.text.summary_v2 import text_pb

        # A code block needs a line before it that is not indented.
        lines = "\n".join(f"    {line}" for line in text.splitlines())
        self._write(_event(step, clock.time(), text_pb(tag, f"step {step}\n\n{lines}")))

    def configured(self, values: Mapping[str, bool | float | str], metrics: Sequence[str]) -> None:
        """Show the run's settings in the HParams tab, with the last value of each of
        ``metrics``."""
        from tensorboard.plugins.hparams import summary_v2 as hparams

        settings = [hparams.HParam(name) for name in values]
        shown = [hparams.Metric(tensorboard_tag(tag), display_name=tag) for tag in metrics]
        for summary in (hparams.hparams_config_pb(settings, shown), hparams.hparams_pb(values)):
            self._write(_event(0, clock.time(), summary))

    def finish(self) -> None:
        """Flush and close the file; a second call does nothing."""
        self._lines.close()

    def _write(self, event: Event) -> None:
        self._records.write(event.SerializeToString())
        self._lines.flush()


def _event(step: int, time: float, summary: Summary) -> Event:
    from tensorboard.compat.proto import event_pb2

    return event_pb2.Event(wall_time=time, step=step, summary=summary)
