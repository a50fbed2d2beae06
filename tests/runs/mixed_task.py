"""All media at once for tests: some images and sounds damaged, and a set whose media were
exchanged."""

from __future__ import annotations

import base64
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

from relax_hpc.config.schema import DataConfig
from relax_hpc.data.rows import data_uri
from relax_hpc.examples.tasks.mixed_media import PARTS, MixedMedia
from tests.effort import effort

EVERY = 10
"""One image and one sound of so many is damaged."""
_KEPT = {"images": (60, "image/png"), "audios": (2000, "audio/flac")}
"""Column -> bytes that a damaged file keeps, its header among them, and its type."""
_COLUMNS = ("images", "videos", "audios")


TRAIN_ROWS, HELD_OUT_ROWS = effort(400, 10_000), effort(40, 10_000)
"""At most so many rows of each set: making and indexing all takes as long as four steps."""


class Mixed(MixedMedia):
    """`exchanged` has the rows with media of all held-out ones, each with the medium of another of
    its question."""

    evaluations = (*PARTS, "exchanged")

    def rows(self, split: str, data: DataConfig) -> Iterator[dict[str, Any]]:
        if split == "exchanged":
            parts = [
                exchanged(list(islice(PARTS[part].rows("heldout", data), HELD_OUT_ROWS)))
                for part in ("images", "videos", "sounds")
            ]
            yield from chain.from_iterable(zip(*parts, strict=True))
            return
        count = TRAIN_ROWS if split == "train" else HELD_OUT_ROWS
        for number, row in enumerate(islice(super().rows(split, data), count)):
            yield damaged(row) if split == "train" and number // len(PARTS) % EVERY == 0 else row


def damaged(row: dict[str, Any]) -> dict[str, Any]:
    """A row whose file's header says what it would be, and whose content is not there."""
    for column, (kept, kind) in _KEPT.items():
        if column in row:
            file = base64.b64decode(row[column][0].partition(",")[2])
            return row | {column: [data_uri(file[:kept], kind)]}
    return row


def exchanged(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    by_question = defaultdict(list)
    for row in rows:
        by_question[row["prompt"]].append(row)
    for some in by_question.values():
        (column,) = some[0].keys() & set(_COLUMNS)
        for row, other in zip(some, [*some[1:], some[0]], strict=True):
            yield row | {"id": f"{column}-{row['id']}", column: other[column]}
