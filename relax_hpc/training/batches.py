"""Rows of the queue as padded tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from relax_hpc.transfer_queue.row_schema import Row

PAD = 0
"""Token id after a row's end; nothing that is used depends on it."""


@dataclass(slots=True)
class Batch:
    """A micro-batch, right padded: everything [b, s] but `lengths`; float32 but the int64 `tokens`."""

    tokens: Tensor
    mask: Tensor
    """1 where the token was chosen by the policy and is trained on."""
    lengths: list[int]
    """Tokens of each row before padding."""
    advantages: Tensor
    rollout_logprobs: Tensor | None = None
    """None (a row lacks them): taken to be `old_logprobs`."""
    old_logprobs: Tensor | None = None
    """None (a row lacks them): taken to be the policy's own before the update, so that the ratio is 1."""
    ref_logprobs: Tensor | None = None


def collate(rows: Sequence[Row], pad_id: int, device: str | torch.device, multiple: int = 1) -> Batch:
    """One micro-batch of `rows` (at least one), as long as the longest rounded up to a multiple of `multiple`.

    Needs `token_ids`; a row without `loss_mask` has no trained token, one without `advantages` has advantage 0.
    """
    lengths = [len(row["token_ids"]) for row in rows]
    size = -(-max(lengths) // multiple) * multiple

    def stack(name: str, fill: float, dtype: type) -> Tensor:
        out = np.full((len(rows), size), fill, dtype)
        for line, row, length in zip(out, rows, lengths, strict=True):
            if row.get(name) is not None:
                line[:length] = row[name]
        return torch.from_numpy(out).to(device)

    def optional(name: str) -> Tensor | None:
        return stack(name, 0.0, np.float32) if all(row.get(name) is not None for row in rows) else None

    return Batch(
        tokens=stack("token_ids", pad_id, np.int64),
        mask=stack("loss_mask", 0.0, np.float32),
        lengths=lengths,
        advantages=stack("advantages", 0.0, np.float32),
        rollout_logprobs=optional("rollout_logprobs"),
        old_logprobs=optional("old_logprobs"),
        ref_logprobs=optional("ref_logprobs"),
    )


def split_rows(rows: Sequence[Row], max_tokens: int) -> list[list[Row]]:
    """`rows` in their order as micro-batches of at most `max_tokens` padded tokens; a longer row stands alone.

    >>> [len(part) for part in split_rows([{"token_ids": [0] * n} for n in (2, 2, 5, 9)], 8)]
    [2, 1, 1]
    """
    parts: list[list[Row]] = []
    longest = 0
    for row in rows:
        longest = max(longest, len(row["token_ids"]))
        if parts and (len(parts[-1]) + 1) * longest <= max_tokens:
            parts[-1].append(row)
        else:
            parts.append([row])
            longest = len(row["token_ids"])
    return parts
