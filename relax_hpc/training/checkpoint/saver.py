"""Saving beside training: a step waits until its state is copied, and a thread of each rank writes
the copy."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial as partial_of
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
    digest_of,
    files_of,
    joined,
    layout_of,
    optimizer_of,
    random_file,
    sharded_state,
)

if TYPE_CHECKING:
    from torch import Tensor

    from relax_hpc.training.checkpoint.strategy import StagedState
    from relax_hpc.training.trainer import Trainer

T = TypeVar("T")
_LOOK_S = 0.05
_TORN = "inline_container.cc"
"""Part of torch's message where the disk has taken only a part of a file."""


@dataclass(frozen=True, slots=True)
class _Job:
    directory: Path
    state: StagedState
    random: dict[str, Tensor]
    about: dict[str, Any]
    then: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class SaveFailure:
    """Reason why something could not be saved; ``errno``: of a disk that may have room later, else
    0."""

    why: str
    errno: int = 0


class SaveFailedError(CheckpointError):
    """SaveFailure of a save, the same error in every rank."""

    def __init__(self, failure: SaveFailure) -> None:
        super().__init__(failure.why)
        self.failure = failure


class Saver:
    """Saver of one rank; every rank makes and calls it alike. A failed save is told of and leaves
    nothing behind; training goes on, and resumes from an older one if it must. While the disk is
    full it is tried again, until the next is due.

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
        """``channel``: used by nothing else. ``timeout_s``: seconds of a save that is still being
        written when the next one is due. ``on_failure``: called by rank 0's thread, once a save.
        ``max_failures``: failures in a row, other than by a full disk, after which `check` raises
        NoProgressError. ``stands``: whether time does not count now, as a disk is full, the hub
        away, or it is the leader who counts it."""
        # It imports megatron-core, which a trainer has prepared for its device.
        from relax_hpc.training.checkpoint.strategy import StateWriter

        self.trainer, self.channel, self.timeout_s, self.on_failure = (
            trainer,
            channel,
            timeout_s,
            on_failure,
        )
        self.max_failures, self.stands = max_failures, stands
        self.failed = 0
        """Saves in a row that failed, or have not succeeded yet."""
        self._failed_anyway = 0
        """Failures, of those in a row, that a full disk was not the cause of."""
        self._hurries, self._awaited = False, False
        """Whether the next save is due; whether this one is waited for however long it takes."""
        self.seconds = 0.0
        """Seconds that the last save took, from copying to the end."""
        self.failure = ""
        """Reason why the last save failed."""
        model = trainer.model
        self._writer = StateWriter(channel, model.layout.dense.copies, model.device.type == "cuda")
        device = torch.cuda.current_device() if model.device.type == "cuda" else None
        self._work = BackgroundThread("checkpoint", self._save_timed, device)

    def prepare(self) -> None:
        """Have the memory of copies made beside what comes next, so that the first save takes no
        longer than others. Collective, once the optimizer is there."""
        self._writer.prepare(sharded_state(self.trainer, loading=False))

    def ready(self) -> None:
        """Wait until the memory of copies is made. ConfigError: it cannot be."""
        try:
            self._writer.ready()
        except OSError as error:
            raise ConfigError(
                f"{error}; a rank needs as much host memory as what it saves"
            ) from error

    def save(
        self,
        directory: Path,
        meta: dict[str, Any],
        then: Callable[[str], None] = lambda digest: None,
    ) -> None:
        """Copy weights, optimizer and random states; they are written, with `meta` (JSON values),
        to a new `directory`.

        Collective, between optimizer steps. The name of `directory` must be this incarnation's own:
        a partial one of the same name is replaced. All files are synced before it gets its name;
        then `then` is called, by rank 0's thread, with the digest of the marker. Raises what `then`
        raised for an earlier save.
        """
        self.wait()
        self._hurries = False
        state = sharded_state(self.trainer, loading=False)
        about = {
            "layout": layout_of(self.trainer),
            "optimizer": optimizer_of(self.trainer),
            "meta": meta,
        }
        self._work.put(_Job(directory, self._writer.stage(state), random_state(), about, then))

    def settle(self) -> None:
        """Wait until what was to be saved is. CheckpointError: it could not be. DeadlineError: it
        takes too long."""
        self._awaited = True
        self._wait()
        self._awaited = False
        if self.failure:
            raise CheckpointError(self.failure)

    def check(self) -> None:
        """Raise what has gone wrong for good, such as FencedError."""
        self._work.check()

    def wait(self) -> None:
        """Wait until nothing is being saved, whether it could be or not. DeadlineError: it takes
        too long."""
        self._hurries = True
        self._wait()

    def _wait(self) -> None:
        if not self._work.wait(self.timeout_s, is_paused=self.stands):
            limit = f"checkpoint.timeout_s={self.timeout_s:g}"
            raise DeadlineError(
                f"a checkpoint is not written within {limit}; see its file system, or raise it"
            )

    # -- in the thread -----------------------------------------------------------------------------

    def _save_timed(self, job: _Job) -> None:
        started, full, said = time.monotonic(), WriteRetry(job.directory), False
        try:
            while failure := self._save(job):
                if not said:
                    self._count(job, failure)
                    said = True
                if not failure.errno or self._gives_up(full, failure):
                    break
            else:
                self.failed, self._failed_anyway, self.failure = 0, 0, ""
        finally:
            full.note_success()
        self.seconds = time.monotonic() - started

    def _count(self, job: _Job, failure: SaveFailure) -> None:
        self.failed, self.failure = self.failed + 1, f"{job.directory}: {failure.why}"
        self._failed_anyway += not failure.errno
        if self.channel.rank == 0:
            self.on_failure(failure.why)
        if self._failed_anyway >= self.max_failures:
            raise NoProgressError(
                f"{self._failed_anyway} checkpoints in a row were not saved, the last: "
                f"{failure.why}; allowed checkpoint.max_failures={self.max_failures}"
            )

    def _gives_up(self, full: WriteRetry, failure: SaveFailure) -> bool:
        """Whether the next save is due; else, after a while, it is time for the next try. The same
        in every rank."""
        full.loose = not self._awaited
        full.note_failure(OSError(failure.errno, failure.why))
        while not self._hurries and not full.is_due():
            time.sleep(_LOOK_S)
        return self.channel.broadcast({"next": self._hurries} if self.channel.rank == 0 else None)[
            "next"
        ]

    def _save(self, job: _Job) -> SaveFailure | None:
        """Reason why it could not be saved, the same in every rank; None: it is."""
        partial = job.directory.with_name(f".{job.directory.name}.partial")
        rank, leads = self.channel.rank, self.channel.rank == 0
        together = partial_of(self._together, partial.parent)
        try:
            together(lambda: leads and _begin(job.directory, partial))
            # Apart from the shards: those are written in steps of all ranks together.
            together(lambda: leads and job.state.write_common(partial))
            together(lambda: job.state.write_shards(partial))
            together(lambda: save_random_state(job.random, partial / random_file(rank)))
            mine = together(lambda: checksums_of(partial, files_of(partial, rank), sync=True))
            files = joined(self.channel.gather(mine))
            digest = together(lambda: leads and _finish(partial, job.directory, files, job.about))
        except SaveFailedError as error:
            if leads:
                print_log_line(f"checkpoint: {job.directory}: {error}")
                shutil.rmtree(partial, ignore_errors=True)
            return error.failure
        self.channel.run_on_leader(lambda: job.then(digest))
        return None

    def _together(self, folder: Path, act: Callable[[], T]) -> T:
        """Have all ranks do their part; SaveFailedError, in all of them, if one cannot."""
        failure, done = ("", 0), None
        try:
            done = act()
        # Libraries raise errors of their own for a full disk, and whoever left here would leave the
        # others waiting.
        except (Exception, CheckpointException) as error:
            why, number = _cause(error, folder)
            failure = f"not saved: rank {self.channel.rank}: {why}", number
        found = self.channel.gather(failure)
        failed = [one for one in found if one[0]] if found is not None else []
        # What a full disk has not caused no room on it will mend.
        why, number = self.channel.broadcast(
            min(failed, key=lambda one: bool(one[1]), default=("", 0))
        )
        if why:
            raise SaveFailedError(SaveFailure(why, number))
        return cast(T, done)


def _cause(error: BaseException, folder: Path) -> tuple[str, int]:
    """Cause in words, and the number of the error if it `is_temporary`. torch's own is a table of
    all ranks' errors."""
    errors = (
        [one for one, _ in error.failures.values()]
        if isinstance(error, CheckpointException)
        else [error]
    )
    for one in errors:
        if isinstance(one, OSError) and is_temporary(one):
            return f"{one.filename or folder}: {os.strerror(one.errno)}", one.errno
    text = "; ".join(map(str, errors))
    if isinstance(error, OSError | RelaxError):
        return text, 0
    # Libraries have words of their own, or none at all, for a disk that takes nothing.
    try:
        number = probe_folder(folder).get("errno", errno.EIO if _TORN in text else 0)
    except OSError as other:
        number, text = 0, f"{folder}: {other.strerror} ({text})"
    return (f"{folder}: {os.strerror(number)}", number) if number else (text, 0)


def _finish(partial: Path, directory: Path, files: dict[str, str], about: dict[str, Any]) -> str:
    write_json(partial / MARKER, {"format": FORMAT_VERSION, "files": files, **about}, sync=True)
    digest = digest_of(partial / MARKER)
    partial.rename(directory)
    try:
        sync_directory(directory.parent)
    except OSError:
        # It is written again, and nothing is ever overwritten.
        directory.rename(partial)
        raise
    return digest


def _begin(directory: Path, partial: Path) -> None:
    if directory.exists():
        raise CheckpointError(f"{directory}: is there already; a checkpoint is never overwritten")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
