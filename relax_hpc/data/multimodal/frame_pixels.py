"""Pixels of decoded video frames: in RGB, and upright by the display matrix of their file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from relax_hpc.data.multimodal.bad_media import BadMedium, Reason

if TYPE_CHECKING:
    from av import VideoFrame
    from av.filter import Graph

_MOST_SKEW = 0.02
"""Sine of the angle by which a display matrix may miss a quarter turn: a degree, as in FFmpeg's own
program."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Operations that make a frame upright: first swap its sides, then flip it."""

    swap: bool = False
    flip_rows: bool = False
    flip_columns: bool = False

    @property
    def is_rotation(self) -> bool:
        """Whether it is a turn, not a mirror image."""
        return (self.swap + self.flip_rows + self.flip_columns) % 2 == 0

    def apply(self, pixels: np.ndarray) -> np.ndarray:
        """``pixels`` [height, width, 3], upright."""
        if self.swap:
            pixels = pixels.transpose(1, 0, 2)
        return pixels[:: -1 if self.flip_rows else 1, :: -1 if self.flip_columns else 1]


def turn_of(frame: VideoFrame) -> Turn:
    """The turn by a frame's display matrix. BadMedium: its angle is no multiple of 90 degrees.

    The matrix [a b u; c d v; x y w] of libavutil/display.h shows the pixel (x, y) at (a x + c y, b
    x + d y).
    """
    data = frame.side_data.get("DISPLAYMATRIX")
    if data is None:
        return Turn()
    a, b, _, c, d = np.frombuffer(data, np.int32).astype(float)[:5]
    scale = max(abs(a), abs(b), abs(c), abs(d))
    swap = abs(b) + abs(c) > abs(a) + abs(d)
    small = max(abs(a), abs(d)) if swap else max(abs(b), abs(c))
    if small > _MOST_SKEW * scale:
        raise BadMedium(
            Reason.UNSUPPORTED, "a display matrix that turns by no multiple of 90 degrees"
        )
    if swap:
        return Turn(True, bool(b < 0), bool(c < 0))
    return Turn(False, bool(d < 0), bool(a < 0))


class RgbConverter:
    """Converter of frames to RGB by FFmpeg's filter `scale`, as its own program and decord do it.

    Not `VideoFrame.to_ndarray`: PyAV 18.1.0 converts the fields of interlaced frames one by one,
    and frames of 10 bits with another filter, by which pixels are off by up to 134 levels.
    """

    def __init__(self) -> None:
        self._graph: Graph | None = None
        self._layout: tuple[int, int, str] | None = None
        self._size: tuple[int, int] | None = None
        """Width and height of the first frame. FFmpeg's program scales all frames to them:
        recorders of calls change the size of frames within a file."""

    def convert(self, frame: VideoFrame) -> np.ndarray:
        """``frame`` as it is shown, uint8 [height, width, 3]."""
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
