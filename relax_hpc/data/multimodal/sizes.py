"""Sizes to which images and frames are resized, computed like in the processors of Qwen models."""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_ASPECT = 200.0
"""Maximum ratio of the longer side to the shorter one. A more extreme size is reduced to
`SQUEEZED_ASPECT`, like in Relax."""
SQUEEZED_ASPECT = 199

Size = tuple[int, int]
"""Height, width in pixels."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Bounds of the number of pixels of an image, a frame, or all frames of a clip together."""

    low: int
    high: int


def limit_aspect(size: Size) -> Size:
    """``size`` with an aspect ratio that models support."""
    height, width = size
    if max(size) <= MAX_ASPECT * min(size):
        return size
    max_side = SQUEEZED_ASPECT * min(size)
    return min(height, max_side), min(width, max_side)


def resize_to_budget(
    size: Size, factor: int, budget: Budget, frames: int = 1, padded: int = 1, min_side: int = 0
) -> Size:
    """A size near ``size`` with about the same aspect, whose sides are multiples of ``factor``, so
    that all ``frames`` together are within the budget.

    ``padded``: number of frames after the last one is repeated to fill a temporal patch.
    ``min_side``: smallest side before the area is compared with the budget. The formulas and their
    rounding are those of `smart_resize` in Qwen2-VL (images, and frames of Qwen3-Omni), in Qwen3-VL
    (clips), and, with ``min_side`` = ``factor``, in qwen-vl-utils.
    """
    height, width = size
    pixels = frames * height * width
    rounded = (
        max(min_side, round(height / factor) * factor),
        max(min_side, round(width / factor) * factor),
    )
    area = padded * rounded[0] * rounded[1]
    if area > budget.high:
        beta = math.sqrt(pixels / budget.high)
        rounded = (
            math.floor(height / beta / factor) * factor,
            math.floor(width / beta / factor) * factor,
        )
    elif area < budget.low:
        beta = math.sqrt(budget.low / pixels)
        rounded = (
            math.ceil(height * beta / factor) * factor,
            math.ceil(width * beta / factor) * factor,
        )
    return max(factor, rounded[0]), max(factor, rounded[1])
