"""Rows of the queue as padded tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from relax_hpc.fields import FIELDS, loss_fields
from relax_hpc.transfer_queue.row_ids import place_of
from relax_hpc.transfer_queue.row_schema import Row

PAD = 0
"""Token id after a row's end; nothing that is used depends on it."""


@dataclass(frozen=True, slots=True)
class Scored:
    """The n tokens of a batch that get log-probabilities, in the order of its rows: int64 [n] each."""

    tokens: Tensor
    """Their ids."""
    states: Tensor
    """Which of the model's hidden states [s, b], by number, predicts each: that of the token before it."""
    places: Tensor
    """Where its value stands among [b, s], by number."""

    def placed(self, values: Tensor, shape: torch.Size) -> Tensor:
        """``values`` [n] where they belong in `shape` [b, s], and 0 elsewhere; differentiable."""
        return values.new_zeros(shape.numel()).index_copy(0, self.places, values).view(shape)


@dataclass(slots=True)
class Batch:
    """A micro-batch of b rows, right padded to s tokens."""

    tokens: Tensor
    """[b, s] int64."""
    mask: Tensor
    """[b, s] float32, 1 where the token was chosen by the policy and is trained on."""
    lengths: list[int]
    """Tokens of each row before padding."""
    episode_tokens: Tensor
    """[b, 1] float32: trained tokens of all rows of the row's episode, some of which other batches may have."""
    scored: Scored
    """Tokens that are trained, and all of a row that says of none whether it is; the first of a row is predicted by
    nothing. Found on the host: a device would have to be waited for."""
    fields: dict[str, Tensor] = field(default_factory=dict)
    """By name, [b, s, *tail] of the declared type: of the fields that were asked for, those that every row has."""


def collate(
    rows: Sequence[Row],
    pad_id: int,
    device: str | torch.device,
    multiple: int = 1,
    also: Sequence[str] = (),
    episode_tokens: Sequence[int] | None = None,
) -> Batch:
    """One micro-batch of `rows` (at least one), as long as the longest rounded up to a multiple of `multiple`.

    It has the fields that the loss takes, and `also` token fields that a model's forward pass needs. A row needs
    `token_ids`; one without `loss_mask` has no trained token, and is here to be scored. `episode_tokens`: see `Batch`;
    None: each row is all of its episode.
    """
    lengths = [len(row["token_ids"]) for row in rows]
    size = -(-max(lengths) // multiple) * multiple

    def stack(name: str, pad: float, dtype: type | str, tail: tuple[int, ...] = ()) -> Tensor:
        out = np.full((len(rows), size, *tail), pad, dtype)
        for line, row, length in zip(out, rows, lengths, strict=True):
            if row.get(name) is not None:
                line[:length] = row[name]
        return torch.from_numpy(out).to(device)

    def stacked(name: str) -> Tensor:
        return stack(name, FIELDS[name].pad, FIELDS[name].dtype, np.shape(rows[0][name])[1:])

    known = [name for name in (*loss_fields(), *also) if all(row.get(name) is not None for row in rows)]
    mask = stack("loss_mask", 0.0, np.float32)
    counts = mask.sum(1) if episode_tokens is None else torch.tensor(episode_tokens, dtype=mask.dtype, device=device)
    return Batch(
        tokens=stack("token_ids", pad_id, np.int64),
        mask=mask,
        lengths=lengths,
        episode_tokens=counts[:, None],
        scored=_scored(rows, (len(rows), size), device),
        fields={name: stacked(name) for name in known},
    )


def _scored(rows: Sequence[Row], shape: tuple[int, int], device: str | torch.device) -> Scored:
    wanted, tokens = np.zeros(shape, np.bool_), np.zeros(shape, np.int64)
    for keep, ids, row in zip(wanted, tokens, rows, strict=True):
        length, mask = len(row["token_ids"]), row.get("loss_mask")
        ids[:length] = row["token_ids"]
        keep[1:length] = True if mask is None else np.asarray(mask[1:]) > 0
    line, place = np.nonzero(wanted)
    found = (tokens[line, place], (place - 1) * shape[0] + line, line * shape[1] + place)
    return Scored(*(torch.from_numpy(numbers).to(device) for numbers in found))


def episode_tokens(rows: Sequence[Row]) -> list[int]:
    """Of each of `rows`, the trained tokens of its whole episode, all rows of which are among them."""
    episodes = [place_of(row["row_id"])[:2] for row in rows]
    found: Counter[tuple[int, int]] = Counter()
    for episode, row in zip(episodes, rows, strict=True):
        found[episode] += int(np.count_nonzero(row["loss_mask"]))
    return [found[episode] for episode in episodes]


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
