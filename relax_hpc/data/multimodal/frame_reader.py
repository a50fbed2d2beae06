"""Reader of single frames of a video by their numbers, upright and in RGB, equal to the output of
FFmpeg's program.

First all packets are read. They give the number of frames and the time of each, after edit lists.
Then one of three functions decodes the frames, see `Video.frames`.
`tests/data/test_media_decoders.py` compares all of them with that program.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from relax_hpc.data.multimodal.bad_media import Reason, UnusableMedium
from relax_hpc.data.multimodal.frame_pixels import RgbConverter, turn_of
from relax_hpc.data.multimodal.limits import Limits
from relax_hpc.data.multimodal.sizes import Size
from relax_hpc.data.multimodal.streams import (
    CUT_ANYWHERE,
    INTRA_CODECS,
    codec_of,
    decode,
    open_container,
    packets_of,
    video_stream,
)

if TYPE_CHECKING:
    from av import Packet, VideoFrame, VideoStream
    from av.container import InputContainer
    from decord.ndarray import NDArray

_INDEXED = frozenset({"mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm"})
"""Containers that store the time of each frame."""
_DECORD_CODECS = frozenset({"h264", "vp8", "vp9", "av1"})
"""Codecs in which decord2 3.4.0 can seek. With HEVC it fails ("Error sending packet"), and also
with frames that are 96 pixels wide."""
_PACKET_IS_FRAME = _DECORD_CODECS | {"hevc"}
"""Codecs in which each packet gives one frame, in an `_INDEXED` container. With other codecs a
packet may give no frame."""
_BATCH_BYTES = 1 << 28
"""Bytes of the frames that decord decodes in one call. One call for many frames is faster than
several calls."""
_RATE_TOLERANCE = 0.02
"""Relative tolerance of a declared rate, and of the usual time between frames, to the mean."""


@dataclass(frozen=True, slots=True)
class Video:
    """Properties of a video that its packets and its first frame give."""

    path: str
    fps: float
    """Mean number of frames in a second."""
    first: np.ndarray
    """Frame 0, uint8 [height, width, 3]."""
    times: tuple[int | None, ...]
    """Time of each shown frame, in units of its stream; None: the container has no time."""
    is_intra: bool
    """Whether each packet is a frame that depends on no other packet."""
    keys: tuple[int, ...]
    """Numbers of the key frames if decord can be used for this video; else empty."""

    @property
    def count(self) -> int:
        """Number of frames."""
        return len(self.times)

    def frames(self, numbers: Sequence[int]) -> Iterator[np.ndarray]:
        """Frames of these ascending ``numbers``, each uint8 [height, width, 3].

        UnusableMedium: a frame cannot be decoded.
        """
        if self.is_intra:
            # Only the packets of these frames are decoded: for Motion JPEG 5 times as fast as
            # decord.
            return _intra_frames(self, numbers)
        if self.keys and 2 * _count_decoded(self.keys, numbers) < numbers[-1]:
            # decord seeks to the group of pictures of each frame, which is fast for long videos.
            return _decord_frames(self, numbers)
        # decord 0.6.0 and decord2 3.4.0 may return wrong frames without an error: they start MPEG
        # streams at the second group of pictures, ignore edit lists, and confuse the position of a
        # key frame in the file with its position in time. PyAV, which decodes every frame, is right
        # for all files, and as fast as decord if decord could skip only few groups.
        return _sequential_frames(self, numbers)


def read_video(path: str, limits: Limits) -> Video:
    """The video at ``path``. Its packets are read, and its first frame is decoded.

    UnusableMedium: it has no video, is damaged, exceeds a limit, or has a format that is not read.
    """
    with open_container(path) as container:
        stream = video_stream(container)
        _check_pixels((stream.height, stream.width), limits)
        scan = _Scan(container, stream, limits)
        first = next(_decode_video(container, scan.packets), None)
        if first is None:
            raise UnusableMedium(Reason.CORRUPTED, "no frame can be decoded")
        pixels = RgbConverter().convert(first)
        _check_pixels(pixels.shape[:2], limits)
        scan.finish()
        times = scan.shown_times() or _decoded_times(path, limits)
        fps = _mean_fps(stream, times)
        if len(times) / fps > limits.seconds:
            raise UnusableMedium(
                Reason.SECONDS, f"{len(times) / fps:.0f} s, allowed {limits.seconds:g}"
            )
        keys = scan.decord_keys() if turn_of(first).is_rotation else ()
        return Video(path, fps, pixels, times, scan.is_intra, keys)


class _Scan:
    """The packets of a video stream, recorded while `packets` is read."""

    def __init__(self, container: InputContainer, stream: VideoStream, limits: Limits) -> None:
        self._format, self._codec = container.format.name, codec_of(stream)
        self._is_only = len(container.streams.video) == 1
        self._times: list[int | None] = []
        """Time of each shown packet, in the order of the file."""
        self._keys: list[int] = []
        """Indices of key frames in `_times`."""
        self._start: int | None = None
        """Time of the file's first packet, if it is a key frame."""
        self._has_hidden = False
        """Whether an edit list hides packets."""
        self.packets = self._record_all(container, stream, limits)

    def _record_all(
        self, container: InputContainer, stream: VideoStream, limits: Limits
    ) -> Iterator[Packet]:
        is_first = True
        for packet in packets_of(container, stream):
            if packet.size:
                self._record(packet, is_first)
                is_first = False
            _check_count(len(self._times), limits)
            yield packet

    def _record(self, packet: Packet, is_first: bool) -> None:
        if is_first and packet.is_keyframe:
            self._start = packet.pts
        if packet.is_discard:
            self._has_hidden = True
            return
        if packet.is_keyframe:
            self._keys.append(len(self._times))
        self._times.append(packet.pts)

    def finish(self) -> None:
        """Read the remaining packets."""
        for _ in self.packets:
            pass

    def shown_times(self) -> tuple[int, ...]:
        """Times of the frames, in the order in which they are shown; empty if they are only known
        after decoding."""
        times = {time for time in self._times if time is not None}
        if not times or len(times) < len(self._times):
            return ()
        # Frames before the first key frame depend on a part that was cut off. They are not decoded,
        # although they have packets.
        if self._start is None or min(times) < self._start:
            return ()
        is_indexed = self._codec in _PACKET_IS_FRAME and self._format in _INDEXED
        is_intra = self._codec in INTRA_CODECS and self._format not in CUT_ANYWHERE
        return tuple(sorted(times)) if is_indexed or is_intra else ()

    @property
    def is_intra(self) -> bool:
        """Whether each packet is a whole frame, and packets have the order of the frames."""
        times = self.shown_times()
        return (
            self._codec in INTRA_CODECS
            and bool(times)
            and list(times) == self._times
            and not self._has_hidden
        )

    def decord_keys(self) -> tuple[int, ...]:
        """Numbers of the key frames, if all groups of pictures are closed and shown; else empty.

        A group is closed if its key frame has the same position in the file and in time.
        """
        times = self.shown_times()
        if self._codec not in _DECORD_CODECS or self._format not in _INDEXED or self._has_hidden:
            return ()
        if not times or not self._is_only:
            return ()
        is_closed = all(times[key] == self._times[key] for key in self._keys)
        return tuple(self._keys) if is_closed else ()


def _count_decoded(keys: Sequence[int], numbers: Sequence[int]) -> int:
    """Number of frames to decode for the frames of ``numbers``, if decoding starts at the key frame
    before each."""
    count, position = 0, 0
    for number in numbers:
        key = keys[bisect_right(keys, number) - 1]
        count += number + 1 - max(key, position)
        position = number + 1
    return count


def _decoded_times(path: str, limits: Limits) -> tuple[int | None, ...]:
    """Times of all frames of a video, found by decoding it."""
    times: list[int | None] = []
    with open_container(path) as container:
        for frame in _decode_video(container, packets_of(container, video_stream(container))):
            times.append(frame.pts)
            _check_count(len(times), limits)
    return tuple(times)


def _mean_fps(stream: VideoStream, times: Sequence[int | None]) -> float:
    """Frames of a second: the declared rate, unless the times of the frames contradict it.

    AVI files and streams that were cut may declare the rate of fields, or another wrong rate.
    """
    declared = float(stream.average_rate or 0)
    # Sorted, because in AVI the frames of H.264 may have each other's times.
    sorted_times = sorted(time for time in times if time is not None)
    gaps = np.diff(sorted_times)
    if len(sorted_times) < max(2, len(times)) or gaps.min() <= 0:
        return declared or 1.0
    # FFmpeg sets the time base of each stream of a file.
    assert stream.time_base is not None
    seconds = float((sorted_times[-1] - sorted_times[0]) * stream.time_base)
    if declared and abs(declared * seconds - len(gaps)) <= max(2, len(gaps) * _RATE_TOLERANCE):
        return declared
    usual_gap = float(np.median(gaps))
    if abs(gaps.mean() - usual_gap) <= _RATE_TOLERANCE * usual_gap:
        return 1 / (usual_gap * float(stream.time_base))
    return len(gaps) / seconds


def _intra_frames(video: Video, numbers: Sequence[int]) -> Iterator[np.ndarray]:
    wanted, converter, count = set(numbers), RgbConverter(), 0
    with open_container(video.path) as container:
        packets = enumerate(packets_of(container, video_stream(container)))
        chosen = (packet for number, packet in packets if number in wanted or not packet.size)
        for frame, number in zip(_decode_video(container, chosen), numbers, strict=False):
            _check_time(video, number, frame)
            count += 1
            yield converter.convert(frame)
    if count < len(numbers):
        raise UnusableMedium(Reason.TRUNCATED, f"{count} frames in {len(numbers)} packets")


def _sequential_frames(video: Video, numbers: Sequence[int]) -> Iterator[np.ndarray]:
    wanted, converter, number = set(numbers), RgbConverter(), 0
    with open_container(video.path) as container:
        packets = packets_of(container, video_stream(container))
        for number, frame in enumerate(_decode_video(container, packets)):
            _check_time(video, number, frame)
            if number in wanted:
                yield converter.convert(frame)
            if number == numbers[-1]:
                return
    raise UnusableMedium(Reason.TRUNCATED, f"{number + 1} frames, its packets say {video.count}")


def _decode_video(container: InputContainer, packets: Iterable[Packet]) -> Iterator[VideoFrame]:
    """Frames of ``packets`` of a video stream, see `decode`."""
    return cast("Iterator[VideoFrame]", decode(container, packets))


def _check_time(video: Video, number: int, frame: VideoFrame) -> None:
    """UnusableMedium: ``frame`` does not have this ``number``, because an earlier frame was not
    decoded."""
    if frame.pts != video.times[number]:
        raise UnusableMedium(Reason.CORRUPTED, f"frame {number} or one before it cannot be decoded")


def _decord_frames(video: Video, numbers: Sequence[int]) -> Iterator[np.ndarray]:
    import decord

    batch = max(1, _BATCH_BYTES // video.first.nbytes)
    done = 0
    try:
        reader = decord.VideoReader(video.path, num_threads=1)
        while len(reader) == video.count and done < len(numbers):
            batch_frames = reader.get_batch(list(numbers[done : done + batch]))
            frames = np.from_dlpack(_SharedFrames(batch_frames))
            done += len(frames)
            yield from frames
    except (RuntimeError, decord.DECORDError):
        pass
    # If decord fails, PyAV decodes the remaining frames, or raises an error with the reason.
    if done < len(numbers):
        yield from _sequential_frames(video, numbers[done:])


class _SharedFrames:
    """Frames of decord for numpy, without a copy. `asnumpy` would copy many megabytes."""

    def __init__(self, frames: NDArray) -> None:
        self._frames = frames

    def __dlpack__(self, **_: Any) -> Any:
        return self._frames.to_dlpack()

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0  # memory of the CPU


def _check_count(count: int, limits: Limits) -> None:
    if count > limits.frames:
        raise UnusableMedium(Reason.FRAMES, f"at least {count} frames, allowed {limits.frames}")


def _check_pixels(size: Size, limits: Limits) -> None:
    if size[0] * size[1] > limits.pixels:
        raise UnusableMedium(
            Reason.PIXELS, f"{size[1]} x {size[0]}, allowed {limits.pixels} together"
        )
