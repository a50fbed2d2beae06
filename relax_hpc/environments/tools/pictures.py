"""Tools that show a picture of the prompt enlarged or rotated. Their names and arguments are those
of DeepEyes (arXiv 2505.14362)."""

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
"""Left, top, right, bottom in pixels."""
Unit = Literal["pixels", "thousandths"]
MAX_RATIO = 100
"""Maximum ratio of the longer side of a box to the shorter one."""
_EMPTY_SIDE = 1e-3
"""A box with a side of fewer pixels is empty."""
MAX_PIXELS = 1 << 24
"""Maximum number of pixels of a shown picture. It is more than the processor of any model uses, and
the file can be made and sent fast."""
_NUMBER = Parameter("integer", "number of the picture in the prompt, from 0", default=0)


class _PictureTool(Tool):
    """A tool of one episode for the pictures of its prompt."""

    def __init__(self, sources: Sequence[Source], limits: Limits) -> None:
        self._sources, self._limits = sources, limits

    def _picture(self, number: int) -> Image:
        """A picture, decoded for each call, so that a waiting environment holds no pixels."""
        if not 0 <= number < len(self._sources):
            raise ToolError(
                f"argument img_idx: found {number}, the prompt has {len(self._sources)} pictures, "
                "from 0"
            )
        return picture(self._sources[number], self._limits)


class Zoom(_PictureTool):
    """Shows a part of a picture."""

    name = "image_zoom_in_tool"
    parameters: ClassVar = {
        "bbox_2d": Parameter(
            "numbers", "the part to show, as [left, top, right, bottom]", length=4
        ),
        "label": Parameter("string", "what is to be seen there", default=""),
        "img_idx": _NUMBER,
    }

    def __init__(
        self, sources: Sequence[Source], limits: Limits, unit: Unit, min_side: int
    ) -> None:
        """``unit``: unit of a box. ``min_side``: minimum side, in pixels, of a shown part."""
        super().__init__(sources, limits)
        self._unit, self._min_side = unit, min_side
        self.description = f"Shows a part of a picture, which a box in {unit} of it says."

    def call(self, bbox_2d: list[float], label: str, img_idx: int) -> Observation:
        """The part of the picture. ToolError: the part or the picture does not exist."""
        whole = self._picture(img_idx)
        scale = (1.0, 1.0) if self._unit == "pixels" else (whole.width / 1000, whole.height / 1000)
        return _show(whole.crop(box_of(bbox_2d, scale, whole.size, self._min_side)))


class Rotate(_PictureTool):
    """Shows a rotated picture."""

    name = "image_rotate_tool"
    description = "Shows a picture turned by an angle."
    parameters: ClassVar = {
        "angle": Parameter("number", "degrees, counter-clockwise"),
        "img_idx": _NUMBER,
    }

    def call(self, angle: float, img_idx: int) -> Observation:
        """The whole picture, rotated. ToolError: the picture does not exist."""
        return _show(self._picture(img_idx).rotate(angle % 360, expand=True))


def box_of(
    wanted: Sequence[float], scale: tuple[float, float], size: tuple[int, int], min_side: int
) -> Box:
    """The box ``wanted`` in pixels of a picture of ``size`` (width, height). ``scale``: pixels of
    one unit of ``wanted``.

    The box is cut at the edges of the picture, then enlarged around its middle until each side has
    at least ``min_side`` pixels. ToolError: no part of it is in the picture, or it is too narrow.

    >>> box_of([90, 10, 140, 30], (1, 1), (100, 100), 28)
    (72, 0, 100, 56)
    """
    ends = [_within(wanted[axis], wanted[axis + 2], scale[axis], size[axis]) for axis in (0, 1)]
    sides = sorted(high - low for low, high in ends)
    if sides[1] > MAX_RATIO * sides[0]:
        ratio = f"found {sides[1] / sides[0]:.0f}, allowed {MAX_RATIO}"
        raise ToolError(f"argument bbox_2d: one side by the other: {ratio}")
    factor = max(1.0, min_side / sides[0])
    left, right = _enlarge(*ends[0], factor, size[0])
    top, bottom = _enlarge(*ends[1], factor, size[1])
    return left, top, right, bottom


def png(image: Image) -> bytes:
    """``image`` as a PNG file. Equal images give equal files."""
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    return file.getvalue()


def _show(image: Image) -> Observation:
    pixels = image.width * image.height
    if pixels > MAX_PIXELS:
        scale = (MAX_PIXELS / pixels) ** 0.5
        image = image.resize((max(1, int(image.width * scale)), max(1, int(image.height * scale))))
    return Observation(media=(MediaPart("image", png(image)),))


def _within(start: float, end: float, scale: float, size: int) -> tuple[float, float]:
    """Ends of one side of a box in pixels, cut at the edges of the picture."""
    low, high = (max(0.0, min(value * scale, size)) for value in (start, end))
    if high - low < _EMPTY_SIDE:
        limits = "left < right and top < bottom, within the picture"
        raise ToolError(
            f"argument bbox_2d: found {start:g} and {end:g} of {size / scale:g}, allowed: {limits}"
        )
    return low, high


def _enlarge(low: float, high: float, factor: float, size: int) -> tuple[int, int]:
    """Ends of a side, enlarged around its middle by ``factor``, within a picture of ``size``."""
    length = max(1, min(size, round((high - low) * factor)))
    first = min(max(0, round((low + high - length) / 2)), size - length)
    return first, first + length


def sources_of(media: Sequence[Any]) -> list[Source]:
    """Sources of the pictures among the media of a prompt."""
    return [medium.source for medium in media if medium.kind == "image"]
