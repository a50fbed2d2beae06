"""Saving beside training: a step waits until its state is copied, and a thread of each rank writes the copy."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch.distributed.checkpoint.api import CheckpointException

from relax_hpc.background import Background, say
from relax_hpc.checkpoint.random_state import random_state, save_random_state
from relax_hpc.checkpoint.store import (
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
from relax_hpc.errors import DeadlineError
from relax_hpc.rendezvous.channel import Channel
from relax_hpc.rundir import sync_directory, write_json

if TYPE_CHECKING:
    from torch import Tensor

    from relax_hpc.checkpoint.strategy import StagedState
    from relax_hpc.training.trainer import Trainer

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Job:
    directory: Path
    state: StagedState
    random: dict[str, Tensor]
    about: dict[str, Any]
    then: Callable[[str], None]


class Saver:
    """One rank's; every rank makes and calls it alike. A save that fails is told of and leaves nothing behind; training
    goes on, and resumes from an older one if it must.

    >>> saver.save(directory, {"step": 100}, then=journal)
    >>> saver.settle()
    """

    def __init__(
        self, trainer: Trainer, channel: Channel, timeout_s: float, on_failure: Callable[[str], None] = lambda why: None
    ) -> None:
        """``channel``: for this alone. ``timeout_s``: for a save that is still being written when the next one is due.
        ``on_failure``: called by rank 0's thread."""
        # It imports megatron-core, which a trainer has prepared for its device.
        from relax_hpc.checkpoint.strategy import StateWriter

        self.trainer, self.channel, self.timeout_s, self.on_failure = trainer, channel, timeout_s, on_failure
        self.seconds = 0.0
        """What the last save took, from copying to the end."""
        self.failure = ""
        """Why the last save failed."""
        model = trainer.model
        self._writer = StateWriter(channel, model.layout.data_size, model.device.type == "cuda")
        device = torch.cuda.current_device() if model.device.type == "cuda" else None
        self._work = Background("checkpoint", self._save_timed, device)

    def save(self, directory: Path, meta: dict[str, Any], then: Callable[[str], None] = lambda digest: None) -> None:
        """Copy weights, optimizer and random states; they are written, with `meta` (JSON values), to a new `directory`.

        Collective, between optimizer steps. The name of `directory` must be this incarnation's own: a partial one of
        the same name is replaced. All files are synced before it gets its name; then `then` is called, by rank 0's
        thread, with the digest of the marker. Raises what `then` raised for an earlier save.
        """
        self.wait()
        state = sharded_state(self.trainer, loading=False)
        about = {"layout": layout_of(self.trainer), "optimizer": optimizer_of(self.trainer), "meta": meta}
        self._work.put(_Job(directory, self._writer.stage(state), random_state(), about, then))

    def settle(self) -> None:
        """Wait until what was to be saved is. CheckpointError: it could not be. DeadlineError: it takes too long."""
        self.wait()
        if self.failure:
            raise CheckpointError(self.failure)

    def check(self) -> None:
        """Raise what has gone wrong for good, such as FencedError."""
        self._work.check()

    def wait(self) -> None:
        """Until nothing is being saved, whether it could be or not. DeadlineError: it takes too long."""
        if not self._work.wait(self.timeout_s):
            limit = f"checkpoint.timeout_s={self.timeout_s:g}"
            raise DeadlineError(f"a checkpoint is not written within {limit}; see its file system, or raise it")

    # -- in the thread -----------------------------------------------------------------------------------------

    def _save_timed(self, job: _Job) -> None:
        started = time.monotonic()
        self.failure = self._save(job)
        self.seconds = time.monotonic() - started

    def _save(self, job: _Job) -> str:
        """Why it could not be saved, the same in every rank; empty: it is."""
        partial = job.directory.with_name(f".{job.directory.name}.partial")
        rank, leads = self.channel.rank, self.channel.rank == 0
        try:
            self._together(lambda: leads and _begin(job.directory, partial))
            # Apart from the shards: those are written in steps of all ranks together.
            self._together(lambda: leads and job.state.write_common(partial))
            self._together(lambda: job.state.write_shards(partial))
            self._together(lambda: save_random_state(job.random, partial / random_file(rank)))
            mine = self._together(lambda: checksums_of(partial, files_of(partial, rank), sync=True))
            files = joined(self.channel.gather(mine))
            digest = self._together(lambda: leads and _finish(partial, job.directory, files, job.about))
        except CheckpointError as error:
            if leads:
                say(f"checkpoint: {error}")
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
        # Libraries raise errors of their own for a full disk, and whoever left here would leave the others waiting.
        except (Exception, CheckpointException) as error:
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
