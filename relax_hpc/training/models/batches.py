"""Rows of the queue as packs: their tokens one after the other, and padded tables of what the loss
takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
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
"""Token id where no row is; nothing that is used depends on it."""
WHOLE = PackSplit()
"""Split of a pack that one rank has all of."""


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """The n tokens whose log-probabilities this rank makes, in the order of its pack: int64 [n]
    each."""

    tokens: Tensor
    """Token ids."""
    states: Tensor
    """Numbers of this rank's hidden states [t] that predict the tokens: each that of the token
    before it."""
    places: Tensor
    """Numbers of the tokens' places among [b, s]."""

    def scatter(self, values: Tensor, shape: torch.Size) -> Tensor:
        """``values`` [n, *tail] where they belong in `shape` [b, s], and 0 elsewhere: [b, s,
        *tail]; differentiable."""
        tail = values.shape[1:]
        return (
            values.new_zeros((shape.numel(), *tail))
            .index_copy(0, self.places, values)
            .view(*shape, *tail)
        )


@dataclass(slots=True)
class Batch:
    """A micro-batch of b rows of at most s tokens, of whose pack this rank has t."""

    tokens: Tensor
    """Token ids of the pack, [1, t] int64."""
    packed: PackedRows
    """PackLayout of the rows in the pack."""
    mask: Tensor
    """Loss mask, [b, s] float32, 1 where the token was chosen by the policy and is trained on."""
    lengths: list[int]
    """Tokens of each row; none of an `idle_batch` one."""
    episode_tokens: Tensor
    """Trained tokens of all rows of the row's episode, [b, 1] float32; other batches may have some
    of them."""
    shares: Tensor
    """Share of each trained token in its episode, [1, t] float32; 0 for others, and -1 where no row
    is."""
    scored: ScoredTokens
    """Tokens that are scored: those that are trained, and all of a row that says of none whether it
    is; the first of a row is predicted by nothing. Found on the host: a device would have to be
    waited for."""
    fields: dict[str, Tensor] = field(default_factory=dict)
    """Fields that the loss takes, as far as every row has them: by name, [b, s, *tail] of the
    declared type."""
    media: MediaInputs | None = None
    """Media among its tokens of this rank; None: there are none in any row."""
    inputs: dict[str, Tensor] = field(default_factory=dict)
    """Token fields that the model's forward pass takes: by name, [1, t, *tail] of the declared
    type."""
    routes: Routes | None = None
    """Routes that the last forward pass was given, with the results of their comparison."""


def collate(
    rows: Sequence[Row],
    pad_id: int,
    device: str | torch.device,
    split: PackSplit = WHOLE,
    also: Sequence[str] = (),
    episode_tokens: Sequence[int] | None = None,
    media: RowMedia | None = None,
) -> Batch:
    """One micro-batch of `rows` (at least one), as this rank of `split` has it.

    It has the fields that the loss takes, and of `also`, token fields that a model's forward pass
    needs, those that every row has. A row needs `token_ids`; one without `loss_mask` has no trained
    token, and is here to be scored. `episode_tokens`: see `Batch`; None: each row is all of its
    episode. `media`: those that rows name in their `spans`.
    """
    lengths = [len(row["token_ids"]) for row in rows]
    places = PackLayout.from_lengths(lengths, split)
    mine = places.rank_indices(split.rank)

    def on_device(values: np.ndarray) -> Tensor:
        return upload(values, device)

    def known(names: Sequence[str]) -> list[str]:
        return [name for name in names if all(row.get(name) is not None for row in rows)]

    def input_of(name: str) -> Tensor:
        return on_device(
            _packed(rows, name, FIELDS[name].pad, FIELDS[name].dtype, places)[mine][None]
        )

    mask = _padded(rows, "loss_mask", 0.0, np.float32)
    counts = mask.sum(1) if episode_tokens is None else np.array(episode_tokens, np.float32)
    tokens = _packed(rows, "token_ids", pad_id, np.int64, places)
    given, positions = _media(rows, places, split, device, media)
    return Batch(
        tokens=on_device(tokens[mine][None]),
        packed=places.rank_rows(split.rank, device, positions),
        mask=on_device(mask),
        lengths=lengths,
        episode_tokens=on_device(counts[:, None]),
        shares=on_device(_shares(rows, mask, counts, places)[mine][None]),
        scored=_scored(rows, tokens, places, mine, on_device),
        fields={
            name: on_device(_padded(rows, name, FIELDS[name].pad, FIELDS[name].dtype))
            for name in known(loss_fields())
        },
        media=given,
        inputs={name: input_of(name) for name in known(also)},
    )


def collate_parts(
    rows: Sequence[Row],
    parts: Sequence[Sequence[int]],
    device: str | torch.device,
    split: PackSplit = WHOLE,
    also: Sequence[str] = (),
    episode_tokens: Sequence[int] | None = None,
    media: RowMedia | None = None,
) -> list[Batch]:
    """A micro-batch for each of `parts`, numbers of `rows`; see `collate`. One without any is
    `idle_batch`."""
    return [
        collate(
            [rows[n] for n in part],
            PAD,
            device,
            split,
            also,
            None if episode_tokens is None else [episode_tokens[n] for n in part],
            media,
        )
        if part
        else idle_batch(rows[0], device, split, also)
        for part in parts
    ]


def idle_batch(
    row: Row, device: str | torch.device, split: PackSplit = WHOLE, also: Sequence[str] = ()
) -> Batch:
    """A micro-batch for a rank that has no row where others of its window have: it takes part in
    what ranks do together, and adds nothing. It is made of the first token of `row`, any of the
    window, which is not trained."""
    tokens = {
        name for name, spec in FIELDS.items() if spec.kind == "token" and row.get(name) is not None
    }
    first = {name: value[:1] if name in tokens else value for name, value in row.items()}
    batch = collate(
        [first | {"loss_mask": np.zeros(1, np.uint8), "spans": []}], PAD, device, split, also
    )
    batch.lengths = []
    batch.shares.fill_(-1.0)
    return batch


def _padded(rows: Sequence[Row], name: str, pad: float, dtype: type | str) -> np.ndarray:
    """Field ``name`` of rows, padded: [b, s, *tail]."""
    size, tail = max(len(row["token_ids"]) for row in rows), np.shape(rows[0].get(name))[1:]
    out = np.full((len(rows), size, *tail), pad, dtype)
    for line, row in zip(out, rows, strict=True):
        if row.get(name) is not None:
            line[: len(row["token_ids"])] = row[name]
    return out


def _packed(
    rows: Sequence[Row], name: str, pad: float, dtype: type | str, places: PackLayout
) -> np.ndarray:
    """Field ``name`` of rows as they lie in the pack: [tokens of the whole pack, *tail]."""
    out = np.full((places.total, *np.shape(rows[0][name])[1:]), pad, dtype)
    for start, row in zip(places.starts, rows, strict=False):
        out[start : start + len(row["token_ids"])] = row[name]
    return out


def _media(
    rows: Sequence[Row],
    places: PackLayout,
    split: PackSplit,
    device: str | torch.device,
    media: RowMedia | None,
) -> tuple[MediaInputs | None, np.ndarray | None]:
    """Media of this rank's tokens, if its stage embeds them, and positions in time, height and
    width of all places, [3, tokens of the whole pack]; None: no row has media."""
    if not any(row.get("spans") for row in rows):
        return None, None
    if media is None:
        raise ValueError("rows name media in their spans, and came without them")
    given = media_inputs(rows, media, places, split, device) if split.embeds else None
    out = np.tile(places.positions(), (3, 1))
    for start, row in zip(places.starts, rows, strict=False):
        if row.get("spans"):
            out[:, start : start + len(row["token_ids"])] = media.positions(row)
    return given, out


def _shares(
    rows: Sequence[Row], mask: np.ndarray, counts: np.ndarray, places: PackLayout
) -> np.ndarray:
    """Shares of trained tokens, [tokens of the whole pack], see `Batch`; ``mask`` [b, s],
    ``counts`` [b] are of episodes."""
    out = np.full(places.total, -1.0, np.float32)
    for start, row, trained, count in zip(places.starts, rows, mask, counts, strict=False):
        length = len(row["token_ids"])
        out[start : start + length] = trained[:length] / max(count, 1.0)
    return out


def _scored(
    rows: Sequence[Row],
    tokens: np.ndarray,
    places: PackLayout,
    mine: np.ndarray,
    on_device: Callable[[np.ndarray], Tensor],
) -> ScoredTokens:
    longest = max(len(row["token_ids"]) for row in rows)
    # Of each place: where in [b, s] stands what it predicts; -1: it predicts nothing that is
    # wanted.
    predicts = np.full(places.total, -1, np.int64)
    for line, (start, row) in enumerate(zip(places.starts, rows, strict=False)):
        length, mask = len(row["token_ids"]), row.get("loss_mask")
        wanted = np.ones(length, np.bool_) if mask is None else np.asarray(mask) > 0
        inside = np.flatnonzero(wanted[1:])
        predicts[start + inside] = line * longest + inside + 1
    states = np.flatnonzero(predicts[mine] >= 0)
    # The next token may be another rank's.
    return ScoredTokens(
        on_device(tokens[mine[states] + 1]), on_device(states), on_device(predicts[mine[states]])
    )


def episode_tokens(rows: Sequence[Row]) -> list[int]:
    """Trained tokens of the whole episode of each of `rows`, which have all rows of an episode."""
    episodes = [parse_row_id(row["row_id"])[:2] for row in rows]
    found: Counter[tuple[int, int]] = Counter()
    for episode, row in zip(episodes, rows, strict=True):
        found[episode] += int(np.count_nonzero(row["loss_mask"]))
    return [found[episode] for episode in episodes]


def split_rows(rows: Sequence[Row], max_tokens: int) -> list[list[Row]]:
    """`rows` as micro-batches of at most `max_tokens` tokens, few and of about equal size; a longer
    row stands alone.

    >>> [[len(row["token_ids"]) for row in part] for part in split_rows([{"token_ids": [0] * n} for
    ...     n in (2, 5, 9)], 8)]
    [[9], [2, 5]]
    """
    lengths = {number: len(row["token_ids"]) for number, row in enumerate(rows)}
    return [[rows[number] for number in part] for part in micro_batches(lengths, max_tokens)]
