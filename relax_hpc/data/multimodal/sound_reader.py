"""Reader of sound with FFmpeg: the mean of a file's channels, at the rate of the file.

This reader is used for all files, because the others have faults. decord 0.6.0 returns
uninitialized memory for more than one channel. decord2 3.4.0 ends a sound at the first damaged
packet without an error, and decodes the whole sound before a limit can stop it. libsndfile 1.2.2
reads W64 files of floats wrongly, and cannot read video files. `librosa.load` of librosa 0.11.0
uses libsndfile, has no limit either, and needs the time and memory that `audio.resampled` names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, cast

import numpy as np

from relax_hpc.data.multimodal.bad_media import Reason, UnusableMedium
from relax_hpc.data.multimodal.limits import Limits
from relax_hpc.data.multimodal.streams import (
    audio_stream,
    codec_of,
    decode,
    open_container,
    packets_of,
)

if TYPE_CHECKING:
    from av import AudioFrame, AudioStream
    from av.container import InputContainer

_LEAST_RATE = 1000
_FULL_SCALES = {"u1": 1 << 7, "i2": 1 << 15, "i4": 1 << 31}
"""Type of integer samples -> the value of 1.0, as in libsndfile and librosa. Samples of 24 bits are
the upper bits of 32."""
_EXACT_CONTAINERS = frozenset({"wav", "aiff", "au", "caf", "flac"})
"""Containers whose header has the exact number of samples of PCM or FLAC."""


@dataclass(frozen=True, slots=True)
class Sound:
    """Sound of one channel at the rate of its file."""

    samples: np.ndarray
    """float32 [samples]; full scale is 1. Floating-point samples may be larger."""
    rate: int
    """Sample rate in Hz."""


def read_sound(path: str, limits: Limits) -> Sound:
    """The sound of a file.

    UnusableMedium: it has no sound, is damaged, exceeds a limit, or has a format that is not read.
    """
    with open_container(path) as container:
        stream = audio_stream(container)
        delay = _opus_delay(container, stream)
        pieces, rate = list[np.ndarray](), 0
        for layout, frames in groupby(_frames(container, stream, limits), _layout):
            rate, channels, is_planar = layout
            pieces.append(_mono([frame.to_ndarray() for frame in frames], channels, is_planar))
        if not pieces:
            raise UnusableMedium(Reason.EMPTY, "no samples")
        samples = np.concatenate(pieces)[delay:]
        declared = _declared_samples(stream)
        if len(samples) < declared:
            raise UnusableMedium(Reason.TRUNCATED, f"{len(samples)} samples of {declared}")
        return Sound(samples[: declared or None], rate)


def sound_length(path: str, limits: Limits) -> tuple[int, int]:
    """Number of samples of a sound, and its rate. It is decoded unless its header is exact.

    UnusableMedium: see `read_sound`.
    """
    with open_container(path) as container:
        stream = audio_stream(container)
        declared = _declared_samples(stream)
        if declared:
            _check_rate(stream.rate, limits)
            _check_seconds(declared, stream.rate, limits)
            return declared, stream.rate
        count, rate = -_opus_delay(container, stream), stream.rate
        for frame in _frames(container, stream, limits):
            count += frame.samples
            rate = frame.sample_rate
        return max(0, count), rate


def _frames(container: InputContainer, stream: AudioStream, limits: Limits) -> Iterator[AudioFrame]:
    count, rate = 0, 0
    frames = cast("Iterator[AudioFrame]", decode(container, packets_of(container, stream)))
    for frame in frames:
        if not rate:
            rate = frame.sample_rate
            _check_rate(rate, limits)
        if frame.sample_rate != rate:
            detail = f"the rate changes from {rate} to {frame.sample_rate} samples a second"
            raise UnusableMedium(Reason.UNSUPPORTED, detail)
        count += frame.samples
        _check_seconds(count, rate, limits)
        yield frame


def _layout(frame: AudioFrame) -> tuple[int, int, bool]:
    """Rate, number of channels, and whether the channels are stored one after the other.

    The number of channels may change within a stream, as in broadcasts.
    """
    return frame.sample_rate, frame.layout.nb_channels, frame.format.is_planar


def _mono(pieces: list[np.ndarray], channels: int, is_planar: bool) -> np.ndarray:
    """Mean of the channels of successive ``pieces``, as in `librosa.to_mono`: float32 [samples].

    A piece is [channels, samples], or [1, samples * channels] with interleaved channels.
    """
    values = np.concatenate(pieces, axis=1)
    if not is_planar:
        values = values.reshape(-1, channels).T
    kind = values.dtype.str[1:]
    # A loop over the channels, because `values.mean(axis=0)` takes 5 times as long if the channels
    # are interleaved.
    mono = np.zeros(values.shape[1], np.float32)
    for channel in values:
        mono += _floating(channel, kind)
    return mono / np.float32(channels) if channels > 1 else mono


def _floating(values: np.ndarray, kind: str) -> np.ndarray:
    """Samples of the type ``kind`` as float32, full scale 1."""
    samples = values.astype(np.float32)
    if kind == "u1":
        # In FFmpeg samples of 8 bits are unsigned: silence is 128.
        samples -= 128
    if kind in _FULL_SCALES:
        samples *= np.float32(1 / _FULL_SCALES[kind])
    return samples


def _declared_samples(stream: AudioStream) -> int:
    """Number of samples by the file's header; 0 if the header has none, or only an estimate."""
    codec = codec_of(stream)
    is_exact = codec == "flac" or codec.startswith("pcm_")
    if not is_exact or not stream.duration or stream.container.format.name not in _EXACT_CONTAINERS:
        return 0
    # FFmpeg sets the time base of each stream of a file.
    assert stream.time_base is not None
    return round(stream.duration * stream.time_base * stream.rate)


def _opus_delay(container: InputContainer, stream: AudioStream) -> int:
    """Number of samples at the beginning of Opus in Matroska that must be dropped in addition to
    those that FFmpeg 8.1 drops. Call it before the first packet is decoded, which changes `delay`.

    FFmpeg drops as many samples as Matroska's CodecDelay says. FFmpeg up to 5.1 writes that number
    in units of the source's rate, so that it is too small in files made from 8 to 24 kHz. The
    header of Opus has the right number (pre-skip, RFC 7845, section 4.2).
    """
    header = stream.codec_context.extradata or b""
    if codec_of(stream) != "opus" or "matroska" not in container.format.name or len(header) < 12:
        return 0
    return max(0, int.from_bytes(header[10:12], "little") - stream.codec_context.delay)


def _check_rate(rate: int, limits: Limits) -> None:
    if not _LEAST_RATE <= rate <= limits.rate:
        raise UnusableMedium(
            Reason.RATE, f"{rate} samples a second, allowed {_LEAST_RATE} to {limits.rate}"
        )


def _check_seconds(samples: int, rate: int, limits: Limits) -> None:
    if samples > limits.seconds * rate:
        raise UnusableMedium(Reason.SECONDS, f"{samples / rate:.0f} s, allowed {limits.seconds:g}")
