"""A verifiable task for small models that see videos: where a square moves to ("<video>?" -> "l",
r, u or d)."""

from __future__ import annotations

import random

from relax_hpc.examples.tasks.avi import avi
from relax_hpc.examples.tasks.one_medium import OneMedium

DIRECTIONS = {"l": (-1, 0), "r": (1, 0), "u": (0, -1), "d": (0, 1)}
"""Answer -> steps to the right and downwards."""
SIDE, FRAMES, FPS = 64, 4, 2
"""Pixels of a frame, either way; frames of a video; frames of a second, all of which a model takes
by default."""
_SQUARE, _STEP = 20, 14
_GROUND, _COLOURS = (128, 128, 128), ((255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255))
QUESTIONS = {"?": list(DIRECTIONS)}
"""Question -> its answers."""


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


class MovingSquares(OneMedium):
    """Videos of one square, of 4 colours, that starts anywhere and moves in one of 4 directions."""

    kind, type, tokens = "video", "video/x-msvideo", "<|vision_start|><|video_pad|><|vision_end|>"
    questions = QUESTIONS

    @classmethod
    def made(cls, name: str) -> tuple[bytes, str, str]:
        video, answer = filmed(name)
        return video, next(iter(QUESTIONS)), answer
