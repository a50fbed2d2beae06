"""Saving beside training: a step waits until its state is copied, and a thread of each rank writes the copy."""

from __future__ import annotations

import queue
import shutil
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint.api import CheckpointException

from relax_hpc.checkpoint.random_state import random_state, save_random_state
from relax_hpc.checkpoint.store import (
    FORMAT_VERSION,
    MARKER,
    CheckpointError,
    checksums_of,
    digest_of,
    joined,
    layout_of,
    optimizer_of,
    random_file,
    sharded_state,
)
from relax_hpc.checkpoint.strategy import StateWriter
from relax_hpc.errors import DeadlineError
from relax_hpc.rendezvous.channel import Channel
from relax_hpc.rundir import sync_directory, write_json

if TYPE_CHECKING:
    from torch import Tensor

    from relax_hpc.training.trainer import Trainer

T = TypeVar("T")
_UNWRITABLE = (OSError, CheckpointError, CheckpointException, CheckpointingException)


@dataclass(frozen=True, slots=True)
class _Job:
    directory: Path
    write: Callable[[Path], None]
    random: dict[str, Tensor]
    about: dict[str, Any]
    then: Callable[[str], None]


class Saver:
    """One rank's; every rank makes and calls it alike. A save that fails is told of and leaves nothing behind; training
    goes on, and resumes from an older one if it must.

    >>> saver.save(directory, {"step": 100}, then=journal)
    >>> saver.settle(600.0)
    """

    def __init__(
        self, trainer: Trainer, channel: Channel, timeout_s: float, on_failure: Callable[[str], None] = lambda why: None
    ) -> None:
        """``channel``: for this alone. ``timeout_s``: for a save that is still being written when the next one is due.
        ``on_failure``: called by rank 0's thread."""
        self.trainer, self.channel, self.timeout_s, self.on_failure = trainer, channel, timeout_s, on_failure
        self.seconds = 0.0
        """What the last save took, from copying to the end."""
        self.failure = ""
        """Why the last save failed."""
        model = trainer.model
        self._writer = StateWriter(channel, model.layout.data_size, model.device.type == "cuda")
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._idle = threading.Condition()
        self._busy = False
        self._fatal: BaseException | None = None
        threading.Thread(target=self._work, name="saver", daemon=True).start()

    def save(self, directory: Path, meta: dict[str, Any], then: Callable[[str], None] = lambda digest: None) -> None:
        """Copy weights, optimizer and random states; they are written, with `meta` (JSON values), to a new `directory`.

        Collective, between optimizer steps. The name of `directory` must be this incarnation's own: a partial one of
        the same name is replaced. All files are synced before it gets its name; then `then` is called, by rank 0's
        thread, with the digest of the marker. Raises what `then` raised for an earlier save.
        """
        self._wait()
        state = sharded_state(self.trainer, loading=False)
        about = {"layout": layout_of(self.trainer), "optimizer": optimizer_of(self.trainer), "meta": meta}
        job = _Job(directory, self._writer.stage(state), random_state(), about, then)
        with self._idle:
            self._busy = True
        self._jobs.put(job)

    def settle(self) -> None:
        """Wait until what was to be saved is. CheckpointError: it could not be. DeadlineError: it takes too long."""
        self._wait()
        if self.failure:
            raise CheckpointError(self.failure)

    def _wait(self) -> None:
        with self._idle:
            done = self._idle.wait_for(lambda: self._fatal or not self._busy, self.timeout_s)
        if self._fatal is not None:
            raise self._fatal
        if not done:
            raise DeadlineError(f"a checkpoint is not written in {self.timeout_s:g} s; see its file system")

    # -- in the thread -----------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            started = time.monotonic()
            try:
                self.failure = self._save(job)
            except BaseException as error:
                self._fatal = error
            self.seconds = time.monotonic() - started
            with self._idle:
                self._busy = False
                self._idle.notify_all()

    def _save(self, job: _Job) -> str:
        """Why it could not be saved, the same in every rank; empty: it is."""
        partial = job.directory.with_name(f".{job.directory.name}.partial")
        rank, leads = self.channel.rank, self.channel.rank == 0
        try:
            self._together(lambda: leads and _begin(job.directory, partial))
            self._together(lambda: (job.write(partial), save_random_state(job.random, partial / random_file(rank))))
            # All files must be there, under their last names, before they are listed.
            names = self.channel.tell(sorted(path.name for path in partial.iterdir()) if leads else None)
            mine = self._together(lambda: checksums_of(partial, names, rank, self.channel.size, sync=True))
            files = joined(self.channel.gather(mine))
            digest = self._together(lambda: leads and _finish(partial, job.directory, files, job.about))
        except CheckpointError as error:
            if leads:
                print(f"checkpoint: {error}", file=sys.stderr, flush=True)
                shutil.rmtree(partial, ignore_errors=True)
                self.on_failure(str(error))
            return f"{job.directory}: {error}"
        if leads:
            job.then(digest)
        return ""

    def _together(self, act: Callable[[], T]) -> T:
        """Have all ranks do their part; CheckpointError, in all of them, if one cannot."""
        why, done = "", None
        try:
            done = act()
        except _UNWRITABLE as error:
            why = f"not saved: rank {self.channel.rank}: {_reason(error)}"
        found = self.channel.gather(why)
        if why := self.channel.tell(next(filter(None, found), "") if found is not None else None):
            raise CheckpointError(why)
        return cast(T, done)


def _reason(error: BaseException) -> str:
    """torch's error is a table of all ranks' errors with their traces."""
    if isinstance(error, CheckpointException):
        return "; ".join(str(failure[0]) for failure in error.failures.values())
    return str(error)


def _finish(partial: Path, directory: Path, files: dict[str, str], about: dict[str, Any]) -> str:
    write_json(partial / MARKER, {"format": FORMAT_VERSION, "files": files, **about}, sync=True)
    digest = digest_of(partial / MARKER)
    partial.rename(directory)
    sync_directory(directory.parent)
    return digest


def _begin(directory: Path, partial: Path) -> None:
    if directory.exists():
        raise CheckpointError(f"{directory}: is there already; a checkpoint is never overwritten")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
