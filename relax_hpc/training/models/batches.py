"""Micro-batches: rows of the queue, packed into one sequence, with padded tables for the loss."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from relax_hpc.base.fields import FIELDS, loss_fields
from relax_hpc.queue.row_ids import parse_row_id
from relax_hpc.queue.row_schema import Row
from relax_hpc.queue.samplers import micro_batches
from relax_hpc.training.models.packs import PackedRows, PackLayout, PackSplit
from relax_hpc.training.models.replay import Routes
from relax_hpc.training.models.towers.encoder_input import MediaInputs
from relax_hpc.training.models.towers.media import RowMedia, media_inputs
from relax_hpc.training.models.upload import upload

PAD = 0
"""Token id of padding. No result depends on it."""
UNSPLIT = PackSplit()
"""Split of a pack that one rank has completely."""


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """The n tokens whose log-probabilities this rank computes, in the order of its pack. Each field
    is int64 [n]."""

    tokens: Tensor
    """Token ids."""
    states: Tensor
    """Indices of the hidden states [t] of this rank that predict the tokens: the states of the
    tokens before them."""
    positions: Tensor
    """Indices of the tokens in the flattened table [b, s]."""

    def scatter(self, values: Tensor, shape: torch.Size) -> Tensor:
        """Put ``values`` [n, *tail] at their positions in a table of `shape` [b, s]; 0 elsewhere.

        Returns [b, s, *tail]. Differentiable.
        """
        tail = values.shape[1:]
        table = values.new_zeros((shape.numel(), *tail))
        return table.index_copy(0, self.positions, values).view(*shape, *tail)


@dataclass(slots=True)
class Batch:
    """A micro-batch of b rows with at most s tokens each. This rank has t tokens of its pack."""

    tokens: Tensor
    """Token ids of the pack, [1, t] int64."""
    packed: PackedRows
    """Layout of the rows in the pack."""
    mask: Tensor
    """Loss mask, [b, s] float32: 1 for a token that the policy chose and that is trained."""
    lengths: list[int]
    """Tokens of each row; empty for an `idle_batch`."""
    episode_tokens: Tensor
    """Trained tokens of all rows of the row's episode, [b, 1] float32. Other batches may have some
    of these rows."""
    shares: Tensor
    """Share of each trained token in its episode, [1, t] float32; 0 for other tokens, -1 for
    padding."""
    scored: ScoredTokens
    """Tokens that are scored: the trained ones, and all tokens of a row without a loss mask. The
    first token of a row is not predicted. Computed on the host, because a device would have to
    synchronize."""
    fields: dict[str, Tensor] = field(default_factory=dict)
    """Inputs of the loss that every row has: by name, [b, s, *tail] of the declared type."""
    media: MediaInputs | None = None
    """Media among its tokens of this rank. None: no row has media."""
    inputs: dict[str, Tensor] = field(default_factory=dict)
    """Token fields that the model's forward pass takes: by name, [1, t, *tail] of the declared
    type."""
    routes: Routes | None = None
    """Routes of the last forward pass, with the results of their comparison."""


def collate(
    rows: Sequence[Row],
    pad_id: int,
    device: str | torch.device,
    split: PackSplit = UNSPLIT,
    also: Sequence[str] = (),
    episode_tokens: Sequence[int] | None = None,
    media: RowMedia | None = None,
) -> Batch:
    """Micro-batch of `rows` (at least one), as this rank of `split` has it.

    The batch has those inputs of the loss that every row has, and those token fields of `also`
    (inputs of a model's forward pass) that every row has. A row needs `token_ids`. A row without
    `loss_mask` has no trained token; all of its tokens are scored. `episode_tokens`: see `Batch`;
    None: each row is a whole episode. `media`: the media that rows name in their `spans`.
    """
    lengths = [len(row["token_ids"]) for row in rows]
    layout = PackLayout.from_lengths(lengths, split)
    # Tables [b, s] are whole on every rank; tensors of the pack have only this rank's tokens.
    local = layout.rank_indices(split.rank)
    mask = _pad_field(rows, "loss_mask", 0.0, np.float32)
    counts = mask.sum(1) if episode_tokens is None else np.array(episode_tokens, np.float32)
    tokens = _pack_field(rows, "token_ids", pad_id, np.int64, layout)
    inputs = {}
    for name in _common_fields(rows, also):
        spec = FIELDS[name]
        packed = _pack_field(rows, name, spec.pad, spec.dtype, layout)
        inputs[name] = upload(packed[local][None], device)
    fields = {}
    for name in _common_fields(rows, loss_fields()):
        spec = FIELDS[name]
        fields[name] = upload(_pad_field(rows, name, spec.pad, spec.dtype), device)
    rank_media, positions = _collate_media(rows, layout, split, device, media)
    return Batch(
        tokens=upload(tokens[local][None], device),
        packed=layout.rank_rows(split.rank, device, positions),
        mask=upload(mask, device),
        lengths=lengths,
        episode_tokens=upload(counts[:, None], device),
        shares=upload(_token_shares(rows, mask, counts, layout)[local][None], device),
        scored=_scored_tokens(rows, tokens, layout, local, device),
        fields=fields,
        media=rank_media,
        inputs=inputs,
    )


def collate_parts(
    rows: Sequence[Row],
    parts: Sequence[Sequence[int]],
    device: str | torch.device,
    split: PackSplit = UNSPLIT,
    also: Sequence[str] = (),
    episode_tokens: Sequence[int] | None = None,
    media: RowMedia | None = None,
) -> list[Batch]:
    """One micro-batch for each list of row indices in `parts`; see `collate`.

    An empty list gives an `idle_batch`.
    """
    batches = []
    for indices in parts:
        if not indices:
            batches.append(idle_batch(rows[0], device, split, also))
            continue
        selected = [rows[index] for index in indices]
        counts = None
        if episode_tokens is not None:
            counts = [episode_tokens[index] for index in indices]
        batches.append(collate(selected, PAD, device, split, also, counts, media))
    return batches


def idle_batch(
    row: Row, device: str | torch.device, split: PackSplit = UNSPLIT, also: Sequence[str] = ()
) -> Batch:
    """Micro-batch for a rank without rows, while other ranks of its window have some.

    The rank takes part in all collectives and adds nothing. The batch consists of the first token
    of `row`, any row of the window; it is not trained.
    """
    first: Row = dict(row)
    for name, spec in FIELDS.items():
        if spec.kind == "token" and row.get(name) is not None:
            first[name] = row[name][:1]
    first |= {"loss_mask": np.zeros(1, np.uint8), "spans": []}
    batch = collate([first], PAD, device, split, also)
    # No row and only padding: results of this batch are dropped, and routers count no token.
    batch.lengths = []
    batch.shares.fill_(-1.0)
    return batch


def _common_fields(rows: Sequence[Row], names: Sequence[str]) -> list[str]:
    """The ``names`` that every row has."""
    return [name for name in names if all(row.get(name) is not None for row in rows)]


def _pad_field(rows: Sequence[Row], name: str, pad: float, dtype: type | str) -> np.ndarray:
    """Padded table of field ``name``: [b, s, *tail]."""
    size = max(len(row["token_ids"]) for row in rows)
    tail = np.asarray(rows[0].get(name)).shape[1:]
    table = np.full((len(rows), size, *tail), pad, dtype)
    for line, row in zip(table, rows, strict=True):
        if row.get(name) is not None:
            line[: len(row["token_ids"])] = row[name]
    return table


def _pack_field(
    rows: Sequence[Row], name: str, pad: float, dtype: type | str, layout: PackLayout
) -> np.ndarray:
    """Values of field ``name`` in the order of the pack: [tokens of the whole pack, *tail]."""
    packed = np.full((layout.total, *np.shape(rows[0][name])[1:]), pad, dtype)
    for start, row in zip(layout.starts, rows, strict=False):
        packed[start : start + len(row["token_ids"])] = row[name]
    return packed


def _collate_media(
    rows: Sequence[Row],
    layout: PackLayout,
    split: PackSplit,
    device: str | torch.device,
    media: RowMedia | None,
) -> tuple[MediaInputs | None, np.ndarray | None]:
    """Media of this rank's tokens, if its stage embeds them, and the positions of all tokens in
    time, height and width, [3, tokens of the whole pack]. None: no row has media."""
    if not any(row.get("spans") for row in rows):
        return None, None
    if media is None:
        raise ValueError("rows name media in their spans, but no media were given")
    inputs = media_inputs(rows, media, layout, split, device) if split.embeds else None
    # A row without media has the same position on all three axes.
    positions = np.tile(layout.positions(), (3, 1))
    for start, row in zip(layout.starts, rows, strict=False):
        if row.get("spans"):
            positions[:, start : start + len(row["token_ids"])] = media.positions(row)
    return inputs, positions


def _token_shares(
    rows: Sequence[Row], mask: np.ndarray, counts: np.ndarray, layout: PackLayout
) -> np.ndarray:
    """`Batch.shares` of the whole pack, [tokens of the whole pack].

    ``mask``: [b, s]. ``counts``: trained tokens of each row's episode, [b].
    """
    shares = np.full(layout.total, -1.0, np.float32)
    for start, row, trained, count in zip(layout.starts, rows, mask, counts, strict=False):
        length = len(row["token_ids"])
        shares[start : start + length] = trained[:length] / max(count, 1.0)
    return shares


def _scored_tokens(
    rows: Sequence[Row],
    tokens: np.ndarray,
    layout: PackLayout,
    local: np.ndarray,
    device: str | torch.device,
) -> ScoredTokens:
    """Scored tokens whose predicting states are ``local``, the tokens of this rank."""
    longest = max(len(row["token_ids"]) for row in rows)
    # For each token of the pack: index in the table [b, s] of the token that it predicts, or -1 if
    # it predicts none that is scored.
    predicted = np.full(layout.total, -1, np.int64)
    for line, (start, row) in enumerate(zip(layout.starts, rows, strict=False)):
        length, mask = len(row["token_ids"]), row.get("loss_mask")
        wanted = np.ones(length, np.bool_) if mask is None else np.asarray(mask) > 0
        # A state predicts the next token, so the first token of a row is never predicted.
        inside = np.flatnonzero(wanted[1:])
        predicted[start + inside] = line * longest + inside + 1
    states = np.flatnonzero(predicted[local] >= 0)
    # The next token may belong to another rank, so it is taken from the whole pack.
    next_tokens = tokens[local[states] + 1]
    return ScoredTokens(
        upload(next_tokens, device),
        upload(states, device),
        upload(predicted[local[states]], device),
    )


def count_episode_tokens(rows: Sequence[Row]) -> list[int]:
    """Trained tokens of each row's whole episode. `rows` must hold all rows of each episode."""
    episodes = [parse_row_id(row["row_id"])[:2] for row in rows]
    counts: Counter[tuple[int, int]] = Counter()
    for episode, row in zip(episodes, rows, strict=True):
        counts[episode] += int(np.count_nonzero(row["loss_mask"]))
    return [counts[episode] for episode in episodes]


def split_rows(rows: Sequence[Row], max_tokens: int) -> list[list[Row]]:
    """Split `rows` into few micro-batches of about equal size, at most `max_tokens` tokens each.

    A longer row gets a separate micro-batch.

    >>> rows = [{"token_ids": [0] * length} for length in (2, 5, 9)]
    >>> [[len(row["token_ids"]) for row in part] for part in split_rows(rows, 8)]
    [[9], [2, 5]]
    """
    lengths = {number: len(row["token_ids"]) for number, row in enumerate(rows)}
    return [[rows[number] for number in part] for part in micro_batches(lengths, max_tokens)]
