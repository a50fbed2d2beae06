"""Coloured shapes for tests: some images damaged, and a set whose images were exchanged."""

from __future__ import annotations

import base64
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from relax_hpc.config.schema import DataConfig
from relax_hpc.data.rows import data_uri
from relax_hpc.tasks.coloured_shapes import ColouredShapes

EVERY = 10
"""One image of so many is damaged."""


class Shapes(ColouredShapes):
    """`exchanged` has the rows of `heldout`, each with the image of another one of its question."""

    evaluations = ("heldout", "exchanged")

    def rows(self, split: str, data: DataConfig) -> Iterator[dict[str, Any]]:
        if split == "exchanged":
            yield from exchanged(list(super().rows("heldout", data)))
            return
        for number, row in enumerate(super().rows(split, data)):
            damaged = split == "train" and number % EVERY == 0
            yield row | {"images": [cut(row["images"][0])]} if damaged else row


def cut(uri: str) -> str:
    """An image whose header says what it would be, and whose content is not there."""
    return data_uri(base64.b64decode(uri.partition(",")[2])[:60], "image/png")


def exchanged(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    by_question = defaultdict(list)
    for row in rows:
        by_question[row["prompt"]].append(row)
    for some in by_question.values():
        for row, other in zip(some, [*some[1:], some[0]], strict=True):
            yield row | {"images": other["images"]}
