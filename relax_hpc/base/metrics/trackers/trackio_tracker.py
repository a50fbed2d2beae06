"""trackio (0.43): a local SQLite file that `trackio show` displays. Its variables decide:
TRACKIO_DIR, TRACKIO_PROJECT, TRACKIO_SERVER_URL, TRACKIO_SPACE_ID.

Without TRACKIO_DIR, the file is in RUN/trackers/trackio.
"""

from __future__ import annotations

import os
import time as clock
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relax_hpc.base.errors import RelaxError
from relax_hpc.base.metrics.trackers.service_tracker import PROJECT, ServiceTracker

_FLUSH_S = 30.0
_LOOK_S = 0.02
_WARNING = "trackio"


class TrackioTracker(ServiceTracker):
    """A run of trackio."""

    package = "trackio"

    def __init__(self, run_dir: Path, settings: Mapping[str, Any]) -> None:
        super().__init__(run_dir, settings)
        # trackio reads the variable when it is imported.
        os.environ.setdefault("TRACKIO_DIR", str(self.local_folder("trackio")))
        self._warnings: list[str] = []

    def open_run(self, name: str, identity: str) -> None:
        """Open or continue the run."""
        import trackio

        # trackio reports a full disk and a lost server only by warnings.
        warnings.simplefilter("always")
        warnings.showwarning = self._note_warning
        self._run: Any = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=f"{name} {identity[:6]}",
            group=str(self.settings.get("name") or self.run_dir.name),
            resume="allow",
            config=self.shown_settings(),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def send(self, number: int, step: int, values: Mapping[str, float], time: float) -> None:
        """Log the values at ``step``."""
        self._run.log(dict(values), step=step)

    def flush(self) -> None:
        """Wait until trackio's thread has written the values."""
        deadline = clock.monotonic() + _FLUSH_S
        while self._is_open and self._has_queued() and clock.monotonic() < deadline:
            clock.sleep(_LOOK_S)
        self._check()

    def close_run(self, rolled_back_to: int | None) -> None:
        """Finish the run."""
        if rolled_back_to is not None:
            self._run.log({"rolled_back_to": rolled_back_to}, step=rolled_back_to)
        self._run.finish()
        self._check()

    def _has_queued(self) -> bool:
        """Whether values wait in memory. trackio 0.43 has no public call for it."""
        return bool(getattr(self._run, "_queued_logs", ())) or bool(
            getattr(self._run, "_sending_batch", None)
        )

    def _note_warning(self, message: Warning | str, category: Any, *_: Any, **__: Any) -> None:
        text = str(message)
        print(f"{getattr(category, '__name__', 'Warning')}: {text}", flush=True)
        if text.lower().lstrip("* ").startswith(_WARNING) and not issubclass(
            category, DeprecationWarning | FutureWarning
        ):
            self._warnings.append(text)

    def _check(self) -> None:
        """Raise RelaxError if trackio has warned since the last check."""
        if self._warnings:
            text = self._warnings[0]
            self._warnings.clear()
            raise RelaxError(text)
