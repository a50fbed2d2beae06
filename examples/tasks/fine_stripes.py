"""A verifiable task for small models that zoom: the colour of the first of the stripes of a tile in
an image, which are too fine to be seen from afar ("<image>which?" -> a call that zooms in ->
"r")."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from relax_hpc.data.rows import data_uri
from relax_hpc.environments.tool_calls import ToolCall
from relax_hpc.rewards.answers import answer_exact
from relax_hpc.tasks.base import Task

if TYPE_CHECKING:
    from PIL.Image import Image

    from relax_hpc.config.schema import DataConfig
    from relax_hpc.data.tokenizer import Tokenizer

SIDE, CELL = 128, 64
"""Pixels of an image and of each of the cells in it, either way; a tile is in one of them."""
COLOURS = {"r": (255, 0, 0), "g": (0, 255, 0), "b": (0, 0, 255)}
_MISTAKEN = {"r": "g", "g": "b", "b": "r"}
_STRIPE = 1
"""Pixels of a stripe. The next one has the complementary colour, so that half as large a tile is
grey but for its edges."""
_STEP, _LEAST, _MOST = 4, 44, 56
"""Pixels of which the sides and places of tiles are multiples, and how long their sides are."""
_FRAME = 4
"""Pixels of the white frame of a tile."""
_GROUND = (128, 128, 128)
"""Nothing, to a tower whose inputs are centred: a frame stands out from the first step on."""
_SIZES = {"train": 2048, "heldout": 256}
_DEMONSTRATIONS = 4096


@dataclass(frozen=True, slots=True)
class Picture:
    """An image, the place of its tile, and what that is."""

    image: Image
    box: tuple[int, int, int, int]
    """Cell of the tile: left, top, right, bottom, pixels."""
    answer: str

    @classmethod
    def drawn(cls, name: str) -> Picture:
        """The one called ``name``: the same on every machine."""
        from PIL import Image, ImageDraw

        rng = random.Random(name)
        cell, sides = _places(rng, 0, SIDE, CELL), _places(rng, _LEAST, _MOST + _STEP, _STEP)
        answer = rng.choice(list(COLOURS))
        left, top = (
            start + rng.randrange(0, CELL - side, _STEP)
            for start, side in zip(cell, sides, strict=True)
        )
        image = Image.new("RGB", (SIDE, SIDE), _GROUND)
        pen, colour = ImageDraw.Draw(image), COLOURS[answer]
        complement = tuple(255 - part for part in colour)
        pen.rectangle((left, top, left + sides[0] - 1, top + sides[1] - 1), fill="white")
        for place in range(_FRAME, sides[0] - _FRAME, _STRIPE):
            stripe = (
                left + place,
                top + _FRAME,
                left + place + _STRIPE - 1,
                top + sides[1] - _FRAME - 1,
            )
            pen.rectangle(stripe, fill=complement if place // _STRIPE % 2 else colour)
        return cls(image, (*cell, cell[0] + CELL, cell[1] + CELL), answer)

    @property
    def uri(self) -> str:
        """The image as a row names it."""
        return _uri(self.image)

    def part(self, box: tuple[int, int, int, int]) -> str:
        """Part of it in ``box``, in the same form."""
        return _uri(self.image.crop(box))


class FineStripes(Task):
    """Images of one striped tile, anywhere and of any size, and the environment `zoom`; those held
    out are others."""

    evaluations = ("heldout",)
    environment = "zoom"
    reward = staticmethod(answer_exact)

    def rows(self, split: str, data: DataConfig) -> Iterator[dict[str, Any]]:
        for number, picture in enumerate(islice(pictures(split), _SIZES[split])):
            yield {
                "id": f"{split}-{number}",
                "prompt": "<image>which?",
                "answer": picture.answer,
                "images": [picture.uri],
            }

    def demonstrations(
        self, data: DataConfig, tokenizer: Tokenizer, noise: float, seed: int
    ) -> Iterator[dict]:
        """Chats about images of their own, which look where the tile is. A share ``noise`` takes
        its colour for another, always the same one: with more than half, the likeliest answer is a
        wrong one however long they are learned."""
        rng = random.Random(f"noise {seed}")
        for picture in islice(pictures(f"warm start {seed}"), _DEMONSTRATIONS):
            said = _MISTAKEN[picture.answer] if rng.random() < noise else picture.answer
            yield {
                "messages": [
                    {"role": "user", "content": "<image>which?"},
                    {
                        "role": "assistant",
                        "content": ToolCall(
                            "image_zoom_in_tool", {"bbox_2d": list(picture.box)}
                        ).text,
                    },
                    {"role": "tool", "content": "<image>"},
                    {"role": "assistant", "content": said},
                ],
                "images": [picture.uri, picture.part(picture.box)],
            }


def pictures(split: str) -> Iterator[Picture]:
    """Pictures of a ``split``, without an end."""
    number = 0
    while True:
        yield Picture.drawn(f"{split} {number}")
        number += 1


def _places(rng: random.Random, *bounds: int) -> tuple[int, int]:
    return rng.randrange(*bounds), rng.randrange(*bounds)


def _uri(image: Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return data_uri(file.getvalue(), "image/png")
