"""Sounds of audio and video files: one channel, float32, at the sample rate of the model."""

from __future__ import annotations

import math

import numpy as np

from relax_hpc.data.multimodal.bad_media import Reason, UnusableMedium
from relax_hpc.data.multimodal.limits import Limits
from relax_hpc.data.multimodal.medium import Header, Kind, Medium
from relax_hpc.data.multimodal.rules import Rules
from relax_hpc.data.multimodal.sound_reader import read_sound, sound_length
from relax_hpc.data.multimodal.source import Source, open_source, path_of


def header(source: Source, rules: Rules, limits: Limits | None = None) -> Header:
    """Header of a sound. The sound is decoded unless the file's header has the number of samples.

    UnusableMedium: it is not a sound, is damaged, exceeds a limit, or has a format that is not
    read."""
    limits = limits or Limits()
    with open_source(source, Kind.AUDIO, limits) as file, path_of(file) as path:
        samples, rate = sound_length(path, limits)
    return rules.audio_header(_checked_length(resampled_length(samples, rate, rules.rate), rules))


def load(source: Source, rules: Rules, limits: Limits | None = None) -> Medium:
    """A sound in its stored form. UnusableMedium: see `header`; or a sample is NaN or infinity."""
    limits = limits or Limits()
    with open_source(source, Kind.AUDIO, limits) as file, path_of(file) as path:
        sound = read_sound(path, limits)
    samples = sound.samples
    _checked_length(resampled_length(len(samples), sound.rate, rules.rate), rules)
    not_finite = np.count_nonzero(~np.isfinite(samples))
    if not_finite:
        raise UnusableMedium(Reason.NOT_FINITE, f"{not_finite} of {len(samples)} samples")
    samples = resampled(samples, sound.rate, rules.rate)
    return Medium(Kind.AUDIO, samples, rules.audio_header(len(samples)).grid)


def resampled_length(samples: int, rate: int, model_rate: int) -> int:
    """Number of samples of a sound at another rate, rounded like in librosa."""
    return math.ceil(samples * (model_rate / rate))


def resampled(samples: np.ndarray, rate: int, model_rate: int) -> np.ndarray:
    """Samples at ``model_rate``, float32, equal to those of `librosa.resample` with its defaults.

    It calls librosa's resampler, soxr, and fixes the length as librosa does: the samples are equal
    bit for bit. librosa 0.11.0 itself compiles other functions of its module when
    `librosa.resample` is first used, which takes 10 s and 340 MB. With numba's cache on the node it
    takes 1.1 s and 210 MB in each worker, and soxr takes 5 ms. NUMBA_DISABLE_JIT does not help:
    with it the import of `librosa.core.audio` fails, because numba 0.65.1 still compiles gufuncs.
    """
    if rate == model_rate:
        return samples
    import soxr

    output = soxr.resample(samples, rate, model_rate, quality="HQ")
    length = resampled_length(len(samples), rate, model_rate)
    return np.pad(output[:length], (0, max(0, length - len(output))))


def _checked_length(samples: int, rules: Rules) -> int:
    """``samples``, the number of samples of a sound. UnusableMedium: too few for a spectrum."""
    if not samples:
        raise UnusableMedium(Reason.EMPTY, "no samples")
    if samples <= rules.window // 2:
        detail = f"{samples} samples, at least {rules.window // 2 + 1} at {rules.rate} a second"
        raise UnusableMedium(Reason.SHORT, detail)
    return samples
