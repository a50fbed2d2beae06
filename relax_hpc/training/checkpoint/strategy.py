"""Writing of megatron-core's sharded state: each rank copies it, and a thread writes the copy.

The writer of megatron-core 0.16.1 forks processes and uses a spawned manager, which imports the
program's main module again. That takes seconds for each save of a small model. This writer creates
the same files, which megatron-core's reader reads.
"""

from __future__ import annotations

import copy
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
    """Copy of the state that a rank saves. It is valid until the next copy."""

    channel: RankChannel
    shards: dict[str, Any]
    common: dict[str, Any]

    def write_common(self, folder: Path) -> None:
        """Write the values that are not sharded. Only rank 0 calls it."""
        # megatron-core's reader finds the format by this configuration file.
        TorchCommonSaveStrategy("torch", 1).save_common(self.common, folder)
        save_config(CheckpointingConfig("torch_dist", 1), str(folder))

    def write_shards(self, folder: Path) -> None:
        """Write this rank's shards; collective over the channel."""
        torch_checkpoint.save(
            self.shards,
            # The saver syncs all files later, together with their checksums.
            storage_writer=torch_checkpoint.FileSystemWriter(folder, sync_files=False),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
            process_group=self.channel.group,
        )


class StateWriter:
    """Writer of the torch_dist format, version 1, with one file per rank.

    Each shard is written once; data-parallel replicas share the work.
    """

    def __init__(self, channel: RankChannel, copies: int, pinned: bool) -> None:
        """``channel``: of the writing thread. ``copies``: number of ranks with the same weights.
        ``pinned``: whether the state is on a GPU."""
        self.channel, self.pinned = channel, pinned
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._pending_memory: Future[torch.Tensor] | None = None
        self._is_validated = False
        self._copier = Copier("checkpoint-copy")
        self._share: FullyParallelSaveStrategyWrapper | None = None
        if copies > 1:
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            # Used only to distribute the shards over ranks; the wrapped strategy never writes.
            inner = TorchDistSaveShardedStrategy("torch_dist", 1)
            self._share = FullyParallelSaveStrategyWrapper(inner, group, do_cache_distribution=True)

    def prepare(self, state: dict[str, Any]) -> None:
        """Begin to allocate the memory for copies of such a ``state`` in a thread. Collective.

        Allocating pinned memory takes many times as long as a copy. Without this call, training
        would wait for it in the first save.
        """
        shards, _ = self._rank_shards(state)
        size = sum(map(_padded_bytes, _tensors(shards)))
        # A new thread has GPU 0 as current device, and would allocate memory there for pinning.
        if self.pinned:
            device = torch.cuda.current_device()
            thread = ThreadPoolExecutor(
                1, "checkpoint-room", initializer=torch.cuda.set_device, initargs=(device,)
            )
        else:
            thread = ThreadPoolExecutor(1, "checkpoint-room")
        self._pending_memory = thread.submit(allocate_host_memory, size, self.pinned, "checkpoint")
        thread.shutdown(wait=False)

    def ready(self) -> None:
        """Wait until the memory of copies is allocated. OSError: the node has too little."""
        if self._pending_memory is not None:
            self._memory, self._pending_memory = self._pending_memory.result(), None

    def stage(self, state: dict[str, Any]) -> StagedState:
        """Copy this rank's shards of ``state``. Collective. The next call overwrites the copy."""
        shards, common = self._rank_shards(state)
        self._start_copy(_tensors(shards))
        # Both are made while the GPU copies. They do not read the copies.
        torch_state = mcore_to_pyt_state_dict(shards, is_loading=False)
        staged = StagedState(self.channel, torch_state, copy.deepcopy(common))
        if self.pinned:
            torch.cuda.current_stream().synchronize()
        return staged

    def _rank_shards(self, state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The shards that this rank saves of ``state``, by key, and the values that are not
        sharded."""
        # The distribution of shards does not change between saves, so it is validated once.
        sharded, common = save_preprocess(state, not self._is_validated)
        self._is_validated = True
        if self._share is not None:
            self._share.apply_saving_parallelization(sharded)
        shards, _, _ = _replace_state_dict_keys_with_sharded_keys(
            sharded, keep_only_main_replica=True
        )
        return shards, common

    def _start_copy(self, tensors: list[ShardedTensor]) -> None:
        """Replace the data of ``tensors`` by copies in one block of memory, which all saves use.
        Copies from a GPU are complete when its stream has finished."""
        self.ready()
        needed = sum(map(_padded_bytes, tensors))
        if needed > len(self._memory):
            if self.pinned and len(self._memory):
                unpin_memory(self._memory)
            self._memory = allocate_host_memory(needed, self.pinned, "checkpoint")
        sources = [tensor.data.detach() for tensor in tensors]
        targets = []
        start = 0
        for tensor, source in zip(tensors, sources, strict=True):
            memory = self._memory[start : start + source.nbytes]
            targets.append(memory.view(source.dtype).view(source.shape))
            start += _padded_bytes(tensor)
        self._copy_all(sources, targets)
        for tensor, target in zip(tensors, targets, strict=True):
            tensor.data = target

    def _copy_all(self, sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
        host_sources: list[torch.Tensor] = []
        host_targets: list[torch.Tensor] = []
        for source, target in zip(sources, targets, strict=True):
            if source.is_cuda:
                target.copy_(source, non_blocking=True)
            else:
                host_sources.append(source)
                host_targets.append(target)
        # Offloaded and gathered states are in host memory. Threads copy them while the GPU copies.
        self._copier.copy(host_sources, host_targets)


def _tensors(shards: dict[str, Any]) -> list[ShardedTensor]:
    """All tensors of ``shards``, a list of values per key."""
    tensors: list[ShardedTensor] = []
    for values in shards.values():
        tensors += (value for value in values if isinstance(value, ShardedTensor))
    return tensors


def _padded_bytes(tensor: ShardedTensor) -> int:
    return -(-tensor.data.nbytes // _ALIGNED) * _ALIGNED
