"""How megatron-core's sharded state is written: by each rank itself.

megatron-core's own writer forks processes and talks to them through a spawned manager that imports the program's main
module again: seconds for each save of a small model. The files are the same, so its reader reads them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as torch_checkpoint
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)


def save_strategy(data_size: int) -> SaveShardedStrategy:
    """Writes each shard once; data-parallel replicas share the work."""
    strategy = DirectSave("torch_dist", 1)
    if data_size == 1:
        return strategy
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return FullyParallelSaveStrategyWrapper(strategy, group, do_cache_distribution=True)


class DirectSave(SaveShardedStrategy):
    """The torch_dist format, version 1, one file a rank, written before `save` returns."""

    can_handle_sharded_objects = True

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        """Write this rank's main replicas to `checkpoint_dir`. Collective."""
        shards, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, keep_only_main_replica=True)
        torch_checkpoint.save(
            mcore_to_pyt_state_dict(shards, is_loading=False),
            storage_writer=torch_checkpoint.FileSystemWriter(checkpoint_dir, sync_files=False),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )
