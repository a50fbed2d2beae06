"""Command of the site that reports the end of a run to people (`site.on_end`)."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.events.watch import report_run_end
from relax_hpc.cluster.supervise.requests import read_stop_request
from relax_hpc.config import Config

_LONGEST_S = 30.0
"""Seconds for the command; the job holds its nodes meanwhile."""
FAILED = "failed"
INTERRUPTED = ("stopped", "interrupted by a signal")
"""State and reason of a local run that ended without a request to stop it."""


def report_end(run: RunDir, config: Config, otherwise: tuple[str, str] | None = None) -> None:
    """Run `site.on_event` and `site.on_end` if the run has ended for good. The supervisor of the
    hub calls this.

    The last arguments of the command are the state (finished, stopped, failed), the run directory
    and the reason. A command that fails or takes too long has no effect. ``otherwise``: state and
    reason if the run directory has none; None: another job continues the run.
    """
    end = read_end(run) or otherwise
    if end is None:
        return
    report_run_end(run, config, *end, say=lambda text: print(text, file=sys.stderr, flush=True))
    if not config.site.on_end:
        return
    command = [*config.site.on_end, end[0], str(run.root), end[1]]
    try:
        subprocess.run(command, stdin=subprocess.DEVNULL, timeout=_LONGEST_S, check=True)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        print(f"site.on_end: {command[0]}: {_describe(error)}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def report_local_end(run: RunDir, config: Config) -> Iterator[None]:
    """Report the end of a local run after the block. An exception in the block is a failure."""
    end = INTERRUPTED
    try:
        yield
    except Exception as error:
        end = FAILED, str(error)
        raise
    finally:
        report_end(run, config, end)


def _describe(error: Exception) -> str:
    """Cause without the arguments of the command, which may hold a password or a token."""
    if isinstance(error, subprocess.TimeoutExpired):
        return f"ended after {_LONGEST_S:g} s"
    if isinstance(error, subprocess.CalledProcessError):
        return f"exit code {error.returncode}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error)


def read_end(run: RunDir) -> tuple[str, str] | None:
    """State and reason from the run directory."""
    if run.finished.exists():
        return "finished", "all steps are trained"
    request = read_stop_request(run)
    if request:
        return FAILED if request.get("code") else "stopped", str(request.get("reason", ""))
    return None
