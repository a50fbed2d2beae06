"""Sounds of files, of videos too: one channel, 16 bits, at the rate that the model hears."""

from __future__ import annotations

import math
from typing import BinaryIO

import numpy as np

from relax_hpc.multimodal.bad import BadMedium, Reason
from relax_hpc.multimodal.limits import Limits
from relax_hpc.multimodal.medium import Header, Kind, Medium
from relax_hpc.multimodal.rules import Rules
from relax_hpc.multimodal.source import Source, is_container, opened, path_of

_LEAST_RATE = 1000
_FULL_SCALE = 32768


def header(source: Source, rules: Rules, limits: Limits | None = None) -> Header:
    """Header of a sound; that of a video is decoded for it. BadMedium: it is none, or over a limit."""
    limits = limits or Limits()
    with opened(source, Kind.AUDIO, limits) as file:
        if is_container(file):
            return rules.audio_header(len(_of_container(file, rules, limits)))
        frames, rate = _declared(file, limits)
        return rules.audio_header(_checked_length(resampled_length(frames, rate, rules.rate), rules))


def load(source: Source, rules: Rules, limits: Limits | None = None) -> Medium:
    """A sound as it is stored. BadMedium: it is none, damaged, or over a limit."""
    limits = limits or Limits()
    with opened(source, Kind.AUDIO, limits) as file:
        samples = _of_container(file, rules, limits) if is_container(file) else _of_file(file, rules, limits)
    if not np.isfinite(samples).all():
        raise BadMedium(Reason.NOT_FINITE, f"{np.count_nonzero(~np.isfinite(samples))} of {len(samples)} samples")
    whole = np.rint(samples * _FULL_SCALE).clip(-_FULL_SCALE, _FULL_SCALE - 1).astype(np.int16)
    return Medium(Kind.AUDIO, whole, rules.audio_header(len(whole)).grid)


def resampled_length(samples: int, rate: int, wanted: int) -> int:
    """Samples that a sound has at another rate, as librosa rounds."""
    return math.ceil(samples * (wanted / rate))


def resampled(samples: np.ndarray, rate: int, wanted: int) -> np.ndarray:
    """Samples at the rate ``wanted``, float32, by the resampler and in the length that librosa has by default."""
    if rate == wanted:
        return samples
    # Not by librosa itself, which compiles for seconds where it was not imported before.
    import soxr

    found, length = soxr.resample(samples, rate, wanted, quality="HQ"), resampled_length(len(samples), rate, wanted)
    return np.pad(found[:length], (0, max(0, length - len(found))))


def _of_file(file: BinaryIO, rules: Rules, limits: Limits) -> np.ndarray:
    """Samples at the family's rate, float32 [samples]."""
    import soundfile

    frames, rate = _declared(file, limits)
    with path_of(file) as path:
        try:
            channels, _ = soundfile.read(path, dtype="float32", always_2d=True)
        except soundfile.LibsndfileError as error:
            raise BadMedium(Reason.CORRUPTED, error.error_string) from error
    if len(channels) < frames:
        raise BadMedium(Reason.TRUNCATED, f"{len(channels)} samples of {frames}")
    _checked_length(resampled_length(frames, rate, rules.rate), rules)
    return resampled(channels[:frames].mean(axis=1), rate, rules.rate)


def _declared(file: BinaryIO, limits: Limits) -> tuple[int, int]:
    """Samples of a channel and rate by the header. BadMedium: over a limit, or no sound."""
    import soundfile

    with path_of(file) as path:
        try:
            about = soundfile.info(path)
        except soundfile.LibsndfileError as error:
            raise BadMedium(Reason.CORRUPTED, error.error_string) from error
    if not _LEAST_RATE <= about.samplerate <= limits.rate:
        raise BadMedium(Reason.RATE, f"{about.samplerate} samples a second, allowed {_LEAST_RATE} to {limits.rate}")
    if about.frames > limits.seconds * about.samplerate:
        raise BadMedium(Reason.SECONDS, f"{about.frames / about.samplerate:.0f} s, allowed {limits.seconds:g}")
    return about.frames, about.samplerate


def _of_container(file: BinaryIO, rules: Rules, limits: Limits) -> np.ndarray:
    """Samples of the sound of a video, or of a form that FFmpeg alone reads, at the family's rate."""
    import decord

    with path_of(file) as path:
        try:
            channels = decord.AudioReader(path, sample_rate=rules.rate, mono=False)[:].asnumpy()
        except (RuntimeError, decord.DECORDError) as error:
            reason = Reason.NO_STREAM if "find audio stream" in str(error) else Reason.CORRUPTED
            raise BadMedium(reason, str(error).strip().splitlines()[0][-200:]) from error
    if channels.shape[1] > limits.seconds * rules.rate:
        raise BadMedium(Reason.SECONDS, f"{channels.shape[1] / rules.rate:.0f} s, allowed {limits.seconds:g}")
    _checked_length(channels.shape[1], rules)
    return channels.mean(axis=0)


def _checked_length(samples: int, rules: Rules) -> int:
    """``samples``, if there are enough for a spectrum."""
    if not samples:
        raise BadMedium(Reason.EMPTY, "no samples")
    if samples <= rules.window // 2:
        raise BadMedium(Reason.SHORT, f"{samples} samples, at least {rules.window // 2 + 1} at {rules.rate} a second")
    return samples
