"""Pixels of decoded video frames: converted to RGB, and turned upright by the display matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np

from relax_hpc.data.multimodal.bad_media import Reason, UnusableMedium

if TYPE_CHECKING:
    from av import VideoFrame
    from av.filter import Graph

_MAX_SKEW = 0.02
"""Sine of the angle by which a display matrix may differ from a multiple of 90 degrees: about one
degree, as in FFmpeg's program."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Operations that turn a frame upright: first swap height and width, then flip."""

    swap: bool = False
    flip_rows: bool = False
    flip_columns: bool = False

    @property
    def is_rotation(self) -> bool:
        """Whether it is a rotation, not a reflection."""
        return (self.swap + self.flip_rows + self.flip_columns) % 2 == 0

    def apply(self, pixels: np.ndarray) -> np.ndarray:
        """``pixels`` [height, width, 3], upright."""
        if self.swap:
            pixels = pixels.transpose(1, 0, 2)
        return pixels[:: -1 if self.flip_rows else 1, :: -1 if self.flip_columns else 1]


def turn_of(frame: VideoFrame) -> Turn:
    """The turn by a frame's display matrix. UnusableMedium: its angle is not a multiple of 90
    degrees.

    The matrix [a b u; c d v; x y w] of libavutil/display.h shows the pixel (x, y) at (a x + c y, b
    x + d y).
    """
    data = cast("bytes | None", frame.side_data.get("DISPLAYMATRIX"))
    if data is None:
        return Turn()
    a, b, _, c, d = np.frombuffer(data, np.int32).astype(float)[:5]
    scale = max(abs(a), abs(b), abs(c), abs(d))
    swap = abs(b) + abs(c) > abs(a) + abs(d)
    small = max(abs(a), abs(d)) if swap else max(abs(b), abs(c))
    if small > _MAX_SKEW * scale:
        raise UnusableMedium(
            Reason.UNSUPPORTED, "a display matrix that turns by no multiple of 90 degrees"
        )
    if swap:
        return Turn(True, bool(b < 0), bool(c < 0))
    return Turn(False, bool(d < 0), bool(a < 0))


class RgbConverter:
    """Converter of frames to RGB by FFmpeg's filter `scale`, like in FFmpeg's program and decord.

    `VideoFrame.to_ndarray` is not used: PyAV 18.1.0 converts the fields of interlaced frames one by
    one, and frames of 10 bits with another filter. Its pixels differ by up to 134 levels.
    """

    def __init__(self) -> None:
        self._graph: Graph | None = None
        self._layout: tuple[int, int, str] | None = None
        self._size: tuple[int, int] | None = None
        """Width and height of the first frame. All frames are scaled to this size, like in FFmpeg's
        program: some recorders of calls change the size within a file."""

    def convert(self, frame: VideoFrame) -> np.ndarray:
        """``frame`` upright, uint8 [height, width, 3]."""
        layout = frame.width, frame.height, frame.format.name
        if self._size is None:
            self._size = frame.width, frame.height
        if self._graph is None or layout != self._layout:
            self._graph, self._layout = _rgb_graph(frame, self._size), layout
        self._graph.push(frame)
        return turn_of(frame).apply(self._graph.pull().to_ndarray())


def _rgb_graph(frame: VideoFrame, size: tuple[int, int]) -> Graph:
    from av.filter import Graph

    graph = Graph()
    source = graph.add_buffer(
        width=frame.width,
        height=frame.height,
        format=frame.format,
        time_base=frame.time_base,
    )
    scale = graph.add("scale", f"{size[0]}:{size[1]}:flags=bicubic")
    source.link_to(scale)
    rgb = graph.add("format", "rgb24")
    scale.link_to(rgb)
    rgb.link_to(graph.add("buffersink"))
    graph.configure()
    return graph
