"""Work on what a process has in memory, by a child that is a copy of it at one moment, while it
goes on itself."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import traceback
from collections.abc import Callable

from relax_hpc.base.errors import EXIT_DONE, EXIT_RETRY
from relax_hpc.net.rendezvous.process import die_with_parent

_LOOK_S = 0.01


class Forked:
    """One child at a time. It ends with this process, and is killed once it takes longer than
    ``longest_s``."""

    def __init__(self, longest_s: float) -> None:
        self.longest_s = longest_s
        self._child = 0
        self._started = 0.0

    @property
    def runs(self) -> bool:
        return bool(self._child)

    def start(self, work: Callable[[], int | None]) -> None:
        """Have a child do ``work``, whose exit code that is; EXIT_RETRY if it raises. OSError:
        there is no child."""
        self._started = time.monotonic()
        self._child = os.fork()
        if not self._child:
            _work_and_exit(work)

    def ended(self) -> int | None:
        """Exit status of a child that has ended, 0 if all is well, told once. None: there is
        none."""
        if not self._child:
            return None
        status = EXIT_DONE
        # Somebody else may have waited for all children of this process.
        with contextlib.suppress(ChildProcessError):
            pid, status = os.waitpid(self._child, os.WNOHANG)
            if not pid:
                if time.monotonic() - self._started > self.longest_s:
                    os.kill(self._child, signal.SIGKILL)
                return None
        self._child = 0
        return os.waitstatus_to_exitcode(status)

    def wait(self, seconds: float) -> int | None:
        """`ended`, for which it waits a little; then the child is given up."""
        deadline = time.monotonic() + seconds
        while self._child and time.monotonic() < deadline:
            if (status := self.ended()) is not None:
                return status
            time.sleep(_LOOK_S)
        if self._child:
            os.kill(self._child, signal.SIGKILL)
            os.waitpid(self._child, 0)
            self._child = 0
        return None


def _work_and_exit(work: Callable[[], int | None]) -> None:
    """Run the child's work and exit; does not return."""
    code: int | None = EXIT_RETRY
    try:
        die_with_parent()
        code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code or EXIT_DONE)
