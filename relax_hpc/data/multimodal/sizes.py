"""Sizes to which images and frames are resized, as the processors of Qwen's models do it."""

from __future__ import annotations

import math
from dataclasses import dataclass

MOST_ASPECT = 200.0
"""Longer side over shorter side at most; a picture beyond is squeezed to `SQUEEZED_ASPECT`, as
Relax does."""
SQUEEZED_ASPECT = 199

Size = tuple[int, int]
"""Height, width in pixels."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Bounds of the pixels of an image, a frame, or all frames of a clip together."""

    low: int
    high: int


def squeezed(size: Size) -> Size:
    """``size`` with an aspect that models take."""
    height, width = size
    if max(size) <= MOST_ASPECT * min(size):
        return size
    most = SQUEEZED_ASPECT * min(size)
    return min(height, most), min(width, most)


def resized(
    size: Size, factor: int, budget: Budget, frames: int = 1, padded: int = 1, least: int = 0
) -> Size:
    """Multiples of ``factor`` near ``size``, of the same aspect, so that all ``frames`` fit the
    budget.

    ``padded``: frames once the last one is repeated to fill a temporal patch. ``least``: pixels of
    a side at least before the area is compared with the budget. The arithmetic, and where it
    rounds, is that of `smart_resize` of Qwen2-VL (images, and frames of Qwen3-Omni), of Qwen3-VL
    (clips), and, with ``least`` = ``factor``, of qwen-vl-utils.
    """
    height, width = size
    pixels = frames * height * width
    rounded = (
        max(least, round(height / factor) * factor),
        max(least, round(width / factor) * factor),
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
