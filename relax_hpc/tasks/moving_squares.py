"""A verifiable task for small models that see videos: where a square moves to ("<video>?" -> "l", r, u or d)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from relax_hpc.data.rows import data_uri
from relax_hpc.tasks.avi import avi
from relax_hpc.tasks.base import Task

if TYPE_CHECKING:
    from relax_hpc.config.schema import DataConfig
    from relax_hpc.data.prompts import Tokenizer

DIRECTIONS = {"l": (-1, 0), "r": (1, 0), "u": (0, -1), "d": (0, 1)}
"""Answer -> steps to the right and downwards."""
SIDE, FRAMES, FPS = 64, 4, 2
"""Pixels of a frame, either way; frames of a video; frames of a second, all of which a model takes by default."""
_SIZES = {"train": 2048, "heldout": 256}
_SQUARE, _STEP = 20, 14
_GROUND, _COLOURS = (128, 128, 128), ((255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255))
_QUESTION = "?"


def filmed(name: str) -> tuple[bytes, str]:
    """The video called ``name``, an AVI file, and its answer: the same on every machine."""
    from PIL import Image, ImageDraw

    rng = random.Random(name)
    answer = rng.choice(list(DIRECTIONS))
    way, most = DIRECTIONS[answer], SIDE - _SQUARE - 1
    path = _STEP * (FRAMES - 1)
    # The way is as long as there is room for, and starts where it does not lead out.
    start = [rng.randint(max(0, -one * path), min(most, most - one * path)) for one in way]
    colour, frames = rng.choice(_COLOURS), []
    for number in range(FRAMES):
        left, top = (at + one * _STEP * number for at, one in zip(start, way, strict=True))
        frame = Image.new("RGB", (SIDE, SIDE), _GROUND)
        ImageDraw.Draw(frame).rectangle((left, top, left + _SQUARE, top + _SQUARE), fill=colour)
        frames.append(frame)
    return avi(frames, FPS), answer


class MovingSquares(Task):
    """Videos of one square, of 4 colours, that starts anywhere and moves in one of 4 directions."""

    evaluations = ("heldout",)

    def rows(self, split: str, data: DataConfig) -> Iterator[dict[str, Any]]:
        for number in range(_SIZES[split]):
            video, answer = filmed(f"{split} {number}")
            yield {
                "id": f"{split}-{number}",
                "prompt": f"<video>{_QUESTION}",
                "answer": answer,
                "videos": [data_uri(video, "video/x-msvideo")],
            }

    def demonstrations(self, data: DataConfig, tokenizer: Tokenizer, noise: float, seed: int) -> Iterator[dict]:
        """Demonstrations of videos of their own; wrong ones have any answer."""
        rng, some = random.Random(f"warm start {seed}"), list(DIRECTIONS)
        place = tokenizer.encode("<|vision_start|><|video_pad|><|vision_end|>", special_tokens=True)
        prompt = [*place, *tokenizer.encode(_QUESTION, special=False)]
        for number in itertools.count():
            video, answer = filmed(f"warm start {seed} {number}")
            said = rng.choice(some) if rng.random() < noise else answer
            response = [*tokenizer.encode(said, special=False), tokenizer.eos_ids[0]]
            about = {"prompt_len": len(prompt), "videos": [data_uri(video, "video/x-msvideo")]}
            yield {"token_ids": [*prompt, *response], **about}
