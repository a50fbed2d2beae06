"""Tools that show a picture of the prompt again, larger or turned, named and called as in DeepEyes
(arXiv 2505.14362)."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from relax_hpc.data.multimodal.image import picture
from relax_hpc.data.multimodal.limits import Limits
from relax_hpc.data.multimodal.source import Source
from relax_hpc.environments.base import MediaPart, Observation
from relax_hpc.environments.tool_calls import ToolError
from relax_hpc.environments.tools.base import Parameter, Tool

if TYPE_CHECKING:
    from PIL.Image import Image

Box = tuple[int, int, int, int]
"""Left, top, right, bottom, pixels."""
Unit = Literal["pixels", "thousandths"]
MOST_RATIO = 100
"""Sides of a box, the longer by the shorter, at most."""
_NOTHING = 1e-3
"""Pixels of a side of a box that has none."""
MOST_PIXELS = 1 << 24
"""Pixels of what is shown; more than any model's processor takes, and a file that is made and sent
in a moment."""
_WHICH = Parameter("integer", "number of the picture in the prompt, from 0", default=0)


class _OfPictures(Tool):
    """A tool of one episode, over the pictures of its prompt."""

    def __init__(self, sources: Sequence[Source], limits: Limits) -> None:
        self._sources, self._limits = sources, limits

    def _picture(self, number: int) -> Image:
        """Decoded for each call: an environment that waits for its policy keeps no pixels."""
        if not 0 <= number < len(self._sources):
            raise ToolError(
                f"argument img_idx: found {number}, the prompt has {len(self._sources)} pictures, "
                "from 0"
            )
        return picture(self._sources[number], self._limits)


class Zoom(_OfPictures):
    """Shows a part of a picture."""

    name = "image_zoom_in_tool"
    parameters: ClassVar = {
        "bbox_2d": Parameter(
            "numbers", "the part to show, as [left, top, right, bottom]", length=4
        ),
        "label": Parameter("string", "what is to be seen there", default=""),
        "img_idx": _WHICH,
    }

    def __init__(self, sources: Sequence[Source], limits: Limits, unit: Unit, least: int) -> None:
        """``unit``: of a box. ``least``: pixels that a side of what is shown has at least."""
        super().__init__(sources, limits)
        self._unit, self._least = unit, least
        self.description = f"Shows a part of a picture, which a box in {unit} of it says."

    def call(self, bbox_2d: list[float], label: str, img_idx: int) -> Observation:
        """The part. ToolError: there is no such part."""
        whole = self._picture(img_idx)
        scale = (1.0, 1.0) if self._unit == "pixels" else (whole.width / 1000, whole.height / 1000)
        return _shown(whole.crop(box_of(bbox_2d, scale, whole.size, self._least)))


class Rotate(_OfPictures):
    """Shows a picture turned."""

    name = "image_rotate_tool"
    description = "Shows a picture turned by an angle."
    parameters: ClassVar = {
        "angle": Parameter("number", "degrees, counter-clockwise"),
        "img_idx": _WHICH,
    }

    def call(self, angle: float, img_idx: int) -> Observation:
        """The whole picture. ToolError: there is no such picture."""
        return _shown(self._picture(img_idx).rotate(angle % 360, expand=True))


def box_of(
    wanted: Sequence[float], scale: tuple[float, float], size: tuple[int, int], least: int
) -> Box:
    """``wanted``, in units of ``scale`` pixels, within a picture of ``size`` (width, height): cut
    at its edges, then enlarged around its middle until no side has less than ``least`` pixels.
    ToolError: nothing of it is in the picture.

    >>> box_of([90, 10, 140, 30], (1, 1), (100, 100), 28)
    (72, 0, 100, 56)
    """
    ends = [_within(wanted[axis], wanted[axis + 2], scale[axis], size[axis]) for axis in (0, 1)]
    sides = sorted(high - low for low, high in ends)
    if sides[1] > MOST_RATIO * sides[0]:
        ratio = f"found {sides[1] / sides[0]:.0f}, allowed {MOST_RATIO}"
        raise ToolError(f"argument bbox_2d: one side by the other: {ratio}")
    larger = max(1.0, least / sides[0])
    (left, right), (top, bottom) = (
        _enlarged(*end, larger, whole) for end, whole in zip(ends, size, strict=True)
    )
    return left, top, right, bottom


def png(image: Image) -> bytes:
    """``image`` as a file of a form that loses nothing, always the same."""
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    return file.getvalue()


def _shown(image: Image) -> Observation:
    if (pixels := image.width * image.height) > MOST_PIXELS:
        scale = (MOST_PIXELS / pixels) ** 0.5
        image = image.resize((max(1, int(image.width * scale)), max(1, int(image.height * scale))))
    return Observation(media=(MediaPart("image", png(image)),))


def _within(start: float, end: float, scale: float, size: int) -> tuple[float, float]:
    """Ends of one side of a box, pixels."""
    low, high = (max(0.0, min(value * scale, size)) for value in (start, end))
    if high - low < _NOTHING:
        limits = "left < right and top < bottom, within the picture"
        raise ToolError(
            f"argument bbox_2d: found {start:g} and {end:g} of {size / scale:g}, allowed: {limits}"
        )
    return low, high


def _enlarged(low: float, high: float, larger: float, size: int) -> tuple[int, int]:
    length = max(1, min(size, round((high - low) * larger)))
    first = min(max(0, round((low + high - length) / 2)), size - length)
    return first, first + length


def sources_of(media: Sequence[Any]) -> list[Source]:
    """Sources of the pictures among the media of a prompt."""
    return [medium.source for medium in media if medium.kind == "image"]
