"""Warm-up of a group before its first rows: kernels are compiled and ranks connect to each other.

Both take up to minutes. In a role's first step they would count as work on that step.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from relax_hpc.queue.row_schema import Row
from relax_hpc.training.model import PolicyModel
from relax_hpc.training.models.batches import PAD, Batch, collate

LENGTHS = (256, 251)
"""Tokens of the rows. Triton compiles a kernel once for sizes that 16 divides, and once for
others."""
_GROUPS = (
    "get_tensor_model_parallel_group",
    "get_context_parallel_group",
    "get_data_parallel_group",
    "get_model_parallel_group",
    "get_expert_model_parallel_group",
    "get_expert_data_parallel_group",
)
"""Functions of megatron.core.parallel_state whose groups a step uses. Pipeline stages connect in
the passes of `warm_up_batches`."""


def warm_up_batches(model: PolicyModel, pack_tokens: int) -> list[Batch]:
    """Micro-batches of one row each, the same on every rank. ``pack_tokens``: tokens of a
    micro-batch, at most."""
    batches = []
    for length in LENGTHS:
        count = max(2, min(length, pack_tokens))
        row: Row = {
            "row_id": "000000000.00.00",
            "token_ids": np.arange(count, dtype=np.int32) % model.spec.vocab,
            "loss_mask": np.ones(count, np.uint8),
        }
        batches.append(collate([row], PAD, model.device, model.pack_split))
    return batches


def connect_ranks(device: torch.device) -> int:
    """Use each process group once, so that its ranks connect. Collective over all ranks. Returns
    the number of groups with several ranks."""
    from megatron.core import parallel_state

    groups = {id(dist.group.WORLD): dist.group.WORLD}
    for name in _GROUPS:
        group = getattr(parallel_state, name)()
        groups[id(group)] = group
    shared = [group for group in groups.values() if dist.get_world_size(group) > 1]
    for group in shared:
        dist.all_reduce(torch.ones(1, device=device), group=group)
    return len(shared)
