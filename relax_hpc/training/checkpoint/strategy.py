"""Writing of megatron-core's sharded state: copied by each rank at once, and put on disk in a
thread.

megatron-core's own writer forks processes and talks to them through a spawned manager that imports
the program's main module again: seconds for each save of a small model. The files are the same, so
its reader reads them.
"""

from __future__ import annotations

import copy
import itertools
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as torch_checkpoint
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)

from relax_hpc.base.host_memory import allocate_host_memory, unpin_memory
from relax_hpc.base.parallel_copies import Copier

if TYPE_CHECKING:
    from relax_hpc.net.rendezvous.channel import RankChannel

_ALIGNED = 64


@dataclass(frozen=True, slots=True)
class StagedState:
    """A copy of what a rank saves, until the next one is made."""

    channel: RankChannel
    shards: dict[str, Any]
    common: dict[str, Any]

    def write_common(self, folder: Path) -> None:
        """Write the part that is not sharded; by rank 0 alone."""
        TorchCommonSaveStrategy("torch", 1).save_common(self.common, folder)
        save_config(CheckpointingConfig("torch_dist", 1), str(folder))

    def write_shards(self, folder: Path) -> None:
        """Write this rank's shards; collective over the channel."""
        torch_checkpoint.save(
            self.shards,
            storage_writer=torch_checkpoint.FileSystemWriter(folder, sync_files=False),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
            process_group=self.channel.group,
        )


class StateWriter:
    """The torch_dist format, version 1, one file a rank; each shard once, data-parallel replicas
    sharing the work."""

    def __init__(self, channel: RankChannel, copies: int, pinned: bool) -> None:
        """``channel``: for the thread that writes. ``copies``: ranks with the same weights.
        ``pinned``: what is copied comes from a GPU."""
        self.channel, self.pinned = channel, pinned
        self._room = torch.empty(0, dtype=torch.uint8)
        self._coming: Future[torch.Tensor] | None = None
        self._checked = False
        self._copier = Copier("checkpoint-copy")
        self._share: FullyParallelSaveStrategyWrapper | None = None
        if copies > 1:
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            # Asked for the shares of the ranks alone; what it wraps never writes.
            inner = TorchDistSaveShardedStrategy("torch_dist", 1)
            self._share = FullyParallelSaveStrategyWrapper(inner, group, do_cache_distribution=True)

    def prepare(self, state: dict[str, Any]) -> None:
        """Begin to make the memory for copies of such a ``state``, in a thread: a first save that
        had to would keep training for many times the copy. Collective."""
        shards, _ = self._mine(state)
        size = sum(map(_padded, _tensors(shards)))
        # A thread would pin for GPU 0, and take memory there, unless told.
        own = (
            {"initializer": torch.cuda.set_device, "initargs": (torch.cuda.current_device(),)}
            if self.pinned
            else {}
        )
        hand = ThreadPoolExecutor(1, "checkpoint-room", **own)
        self._coming = hand.submit(allocate_host_memory, size, self.pinned, "checkpoint")
        hand.shutdown(wait=False)

    def ready(self) -> None:
        """Wait until the memory of copies is there. OSError: it cannot be had."""
        if self._coming is not None:
            self._room, self._coming = self._coming.result(), None

    def stage(self, state: dict[str, Any]) -> StagedState:
        """Copy what this rank saves of the sharded ``state``. Collective. The next call overwrites
        the copy."""
        shards, common = self._mine(state)
        self._copy(_tensors(shards))
        return StagedState(
            self.channel, mcore_to_pyt_state_dict(shards, is_loading=False), copy.deepcopy(common)
        )

    def _mine(self, state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The shards by key that this rank saves of ``state``, and what is not sharded."""
        # Who has which shard does not change from one save to the next.
        sharded, common = save_preprocess(state, not self._checked)
        self._checked = True
        if self._share is not None:
            self._share.apply_saving_parallelization(sharded)
        shards, _, _ = _replace_state_dict_keys_with_sharded_keys(
            sharded, keep_only_main_replica=True
        )
        return shards, common

    def _copy(self, tensors: list[ShardedTensor]) -> None:
        """Replace the data of ``tensors`` by copies in one piece of memory, which is used again."""
        self.ready()
        sizes = [one.data.nbytes for one in tensors]
        padded = list(map(_padded, tensors))
        if sum(padded) > len(self._room):
            if self.pinned and len(self._room):
                unpin_memory(self._room)
            self._room = allocate_host_memory(sum(padded), self.pinned, "checkpoint")
        ends = list(itertools.accumulate(padded, initial=0))
        sources = [one.data.detach() for one in tensors]
        rooms = [
            self._room[at : at + size].view(source.dtype).view(source.shape)
            for at, size, source in zip(ends, sizes, sources, strict=False)
        ]
        self._copy_all(sources, rooms)
        for one, room in zip(tensors, rooms, strict=True):
            one.data = room

    def _copy_all(self, sources: list[torch.Tensor], rooms: list[torch.Tensor]) -> None:
        pairs = list(zip(sources, rooms, strict=True))
        for source, room in pairs:
            if source.is_cuda:
                room.copy_(source, non_blocking=True)
        # Offloaded states, and what was gathered, are in host memory: beside what the GPU copies.
        here = [(source, room) for source, room in pairs if not source.is_cuda]
        self._copier.copy([source for source, _ in here], [room for _, room in here])
        if self.pinned:
            torch.cuda.current_stream().synchronize()


def _tensors(shards: dict[str, Any]) -> list[ShardedTensor]:
    return [one for found in shards.values() for one in found if isinstance(one, ShardedTensor)]


def _padded(one: ShardedTensor) -> int:
    return -(-one.data.nbytes // _ALIGNED) * _ALIGNED
