"""Saving during training: a step waits until its state is copied. A thread of each rank writes the
copy."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch.distributed.checkpoint.api import CheckpointException

from relax_hpc.base.background import BackgroundThread, print_log_line
from relax_hpc.base.disk_waits import WAITS, WriteRetry, is_temporary, probe_folder
from relax_hpc.base.errors import ConfigError, DeadlineError, NoProgressError, RelaxError
from relax_hpc.base.rundir import sync_directory, write_json
from relax_hpc.net.rendezvous.channel import RankChannel
from relax_hpc.training.checkpoint.random_state import random_state, save_random_state
from relax_hpc.training.checkpoint.store import (
    FORMAT_VERSION,
    MARKER,
    CheckpointError,
    checksums_of,
    layout_sizes,
    marker_digest,
    merge_checksums,
    optimizer_settings,
    random_file,
    rank_files,
    sharded_state,
)

if TYPE_CHECKING:
    from torch import Tensor

    from relax_hpc.training.checkpoint.strategy import StagedState
    from relax_hpc.training.trainer import Trainer

T = TypeVar("T")
_POLL_S = 0.05
# Part of torch's error message (torch 2.13) if the disk took only a part of a file.
_SHORT_WRITE = "inline_container.cc"


@dataclass(frozen=True, slots=True)
class _SaveTask:
    directory: Path
    state: StagedState
    random: dict[str, Tensor]
    description: dict[str, Any]
    """Entries of the marker besides its files."""
    then: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class SaveFailure:
    """Reason why a checkpoint could not be saved.

    ``errno``: error number of a disk that may have space later, else 0.
    """

    reason: str
    errno: int = 0


class SaveFailedError(CheckpointError):
    """A save failed. All ranks raise the same error."""

    def __init__(self, failure: SaveFailure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


class Saver:
    """Saver of one rank. All ranks create and call it in the same way.

    A failed save is reported and removed; training continues, and a restart resumes from an older
    checkpoint. While the disk is full, the save is tried again until the next one is due.

    ::

        saver.save(directory, {"step": 100}, then=journal)
        saver.settle()
    """

    def __init__(
        self,
        trainer: Trainer,
        channel: RankChannel,
        timeout_s: float,
        on_failure: Callable[[str], None] = lambda why: None,
        max_failures: int = 1 << 30,
        stands: Callable[[], object] = lambda: WAITS,
    ) -> None:
        """``channel``: used only by this saver. ``timeout_s``: limit for a save that is still being
        written when the next one is due. ``on_failure``: called by rank 0's thread once per failed
        save. ``max_failures``: failures in a row, except by a full disk, after which `check` raises
        NoProgressError. ``stands``: whether the time limit is suspended, because a disk is full,
        the hub is unreachable, or only the leader measures time."""
        # Imported here, because it imports megatron-core, which a trainer prepares for its device.
        from relax_hpc.training.checkpoint.strategy import StateWriter

        self.trainer, self.channel = trainer, channel
        self.timeout_s, self.on_failure = timeout_s, on_failure
        self.max_failures, self.stands = max_failures, stands
        # Saves in a row that failed or have not succeeded yet.
        self.failed = 0
        # Failures in a row that a full disk did not cause.
        self._failed_permanently = 0
        self._next_is_due = False
        # Whether a caller waits for this save without a limit.
        self._is_awaited = False
        # Seconds that the last save took, from copying to the end.
        self.seconds = 0.0
        # Reason why the last save failed.
        self.failure = ""
        model = trainer.model
        self._writer = StateWriter(channel, model.layout.dense.copies, model.device.type == "cuda")
        device = torch.cuda.current_device() if model.device.type == "cuda" else None
        self._work = BackgroundThread("checkpoint", self._save_timed, device)

    def prepare(self) -> None:
        """Begin to allocate the memory of copies in the background, so that the first save takes
        no longer than others. Collective, after the optimizer is built."""
        self._writer.prepare(sharded_state(self.trainer, loading=False))

    def ready(self) -> None:
        """Wait until the memory of copies is allocated. ConfigError: the node has too little."""
        try:
            self._writer.ready()
        except OSError as error:
            raise ConfigError(
                f"{error}; a rank needs as much host memory as the state that it saves"
            ) from error

    def save(
        self,
        directory: Path,
        meta: dict[str, Any],
        then: Callable[[str], None] = lambda digest: None,
    ) -> None:
        """Copy weights, optimizer and random states. A thread writes them, with `meta` (JSON
        values), to a new `directory`.

        Collective, between optimizer steps. The name of `directory` must be unique to this
        incarnation, because a partial directory of that name is replaced. All files are synced
        before the directory is renamed. Then rank 0's thread calls `then` with the digest of the
        marker. Raises the error that `then` raised for an earlier save.
        """
        self.wait()
        self._next_is_due = False
        description = {
            "layout": layout_sizes(self.trainer),
            "optimizer": optimizer_settings(self.trainer),
            "meta": meta,
        }
        with _paused_collector():
            staged = self._writer.stage(sharded_state(self.trainer, loading=False))
        self._work.put(_SaveTask(directory, staged, random_state(), description, then))

    def settle(self) -> None:
        """Wait until the last save is complete. CheckpointError: it failed. DeadlineError: it takes
        too long."""
        self._is_awaited = True
        self._wait()
        self._is_awaited = False
        if self.failure:
            raise CheckpointError(self.failure)

    def check(self) -> None:
        """Raise a permanent error of the thread, such as FencedError."""
        self._work.check()

    def wait(self) -> None:
        """Wait until the last save has succeeded or failed. DeadlineError: it takes too long."""
        self._next_is_due = True
        self._wait()

    def _wait(self) -> None:
        if not self._work.wait(self.timeout_s, is_paused=self.stands):
            limit = f"checkpoint.timeout_s={self.timeout_s:g}"
            raise DeadlineError(
                f"a checkpoint is not written within {limit}; see its file system, or raise it"
            )

    # -- in the thread -----------------------------------------------------------------------------

    def _save_timed(self, task: _SaveTask) -> None:
        started, disk, is_counted = time.monotonic(), WriteRetry(task.directory), False
        try:
            failure = self._save(task)
            while failure is not None:
                if not is_counted:
                    self._count_failure(task, failure)
                    is_counted = True
                if not failure.errno or not self._await_retry(disk, failure):
                    break
                failure = self._save(task)
            if failure is None:
                self.failed, self._failed_permanently, self.failure = 0, 0, ""
        finally:
            disk.note_success()
        self.seconds = time.monotonic() - started

    def _count_failure(self, task: _SaveTask, failure: SaveFailure) -> None:
        self.failed, self.failure = self.failed + 1, f"{task.directory}: {failure.reason}"
        self._failed_permanently += not failure.errno
        if self.channel.rank == 0:
            self.on_failure(failure.reason)
        if self._failed_permanently >= self.max_failures:
            raise NoProgressError(
                f"{self._failed_permanently} checkpoints in a row were not saved, the last: "
                f"{failure.reason}; allowed checkpoint.max_failures={self.max_failures}"
            )

    def _await_retry(self, disk: WriteRetry, failure: SaveFailure) -> bool:
        """Wait for the next try. False: the next save is due instead. All ranks return the same."""
        disk.loose = not self._is_awaited
        disk.note_failure(OSError(failure.errno, failure.reason))
        while not self._next_is_due and not disk.is_due():
            time.sleep(_POLL_S)
        message = {"next": self._next_is_due} if self.channel.rank == 0 else None
        return not self.channel.broadcast(message)["next"]

    def _save(self, task: _SaveTask) -> SaveFailure | None:
        """Reason why the checkpoint could not be saved, or None. All ranks return the same."""
        partial = task.directory.with_name(f".{task.directory.name}.partial")
        rank, leads, folder = self.channel.rank, self.channel.rank == 0, partial.parent
        try:
            self._run_leader(folder, lambda: _create(task.directory, partial))
            # Separate from the shards, because writing shards contains collectives.
            self._run_leader(folder, lambda: task.state.write_common(partial))
            self._run_all(folder, lambda: task.state.write_shards(partial))
            self._run_all(
                folder, lambda: save_random_state(task.random, partial / random_file(rank))
            )
            sums = self._run_all(
                folder, lambda: checksums_of(partial, rank_files(partial, rank), sync=True)
            )
            files = merge_checksums(self.channel.gather(sums))
            digest = self._run_leader(
                folder, lambda: _finish(partial, task.directory, files, task.description)
            )
        except SaveFailedError as error:
            if leads:
                print_log_line(f"checkpoint: {task.directory}: {error}")
                shutil.rmtree(partial, ignore_errors=True)
            return error.failure
        # Only the leader runs it, and the leader has the digest.
        self.channel.run_on_leader(lambda: task.then(digest or ""))
        return None

    def _run_leader(self, folder: Path, act: Callable[[], T]) -> T | None:
        """`_run_all` with an action of rank 0 only. Other ranks return None."""
        leads = self.channel.rank == 0
        return self._run_all(folder, lambda: act() if leads else None)

    def _run_all(self, folder: Path, act: Callable[[], T]) -> T:
        """Run one action on all ranks. SaveFailedError on all ranks if it fails on one of them."""
        failure, result = ("", 0), None
        try:
            result = act()
        # Any error: libraries have their own classes for a full disk. A rank that left here would
        # let the other ranks wait.
        except (Exception, CheckpointException) as error:
            reason, number = _failure_cause(error, folder)
            failure = f"not saved: rank {self.channel.rank}: {reason}", number
        gathered = self.channel.gather(failure) or []
        failed = [candidate for candidate in gathered if candidate[0]]
        # A failure without a number has priority: space on the disk would not solve it.
        first = min(failed, key=lambda candidate: bool(candidate[1]), default=("", 0))
        reason, number = self.channel.broadcast(first)
        if reason:
            raise SaveFailedError(SaveFailure(reason, number))
        return cast(T, result)


@contextmanager
def _paused_collector() -> Iterator[None]:
    """Keep Python's garbage collector off. megatron-core's sharded state of a small model is 50,000
    objects. They can start a collection that takes longer than copying the state."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _failure_cause(error: BaseException, folder: Path) -> tuple[str, int]:
    """Cause as text, and the error number if the error `is_temporary`."""
    errors: list[BaseException] = [error]
    if isinstance(error, CheckpointException):
        # torch's error contains those of all ranks.
        errors = [rank_error for rank_error, _ in error.failures.values()]
    for cause in errors:
        if isinstance(cause, OSError) and cause.errno is not None and is_temporary(cause):
            return f"{cause.filename or folder}: {os.strerror(cause.errno)}", cause.errno
    text = "; ".join(map(str, errors))
    if isinstance(error, OSError | RelaxError):
        return text, 0
    # Errors of libraries may not say that the disk is full, so a file is written to find out.
    number = 0
    try:
        number = probe_folder(folder).get("errno", errno.EIO if _SHORT_WRITE in text else 0)
    except OSError as probe_error:
        text = f"{folder}: {probe_error.strerror} ({text})"
    return (f"{folder}: {os.strerror(number)}", number) if number else (text, 0)


def _finish(
    partial: Path, directory: Path, files: dict[str, str], description: dict[str, Any]
) -> str:
    """Write the marker, and rename the directory. Returns the digest of the marker."""
    marker = {"format": FORMAT_VERSION, "files": files, **description}
    write_json(partial / MARKER, marker, sync=True)
    digest = marker_digest(partial / MARKER)
    partial.rename(directory)
    try:
        sync_directory(directory.parent)
    except OSError:
        # The save is tried again, and it never overwrites a directory.
        directory.rename(partial)
        raise
    return digest


def _create(directory: Path, partial: Path) -> None:
    """Create an empty ``partial`` directory."""
    if directory.exists():
        raise CheckpointError(f"{directory}: exists already; a checkpoint is never overwritten")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
