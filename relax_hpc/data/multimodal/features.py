"""Inputs of the vision and audio towers, computed from stored media. They are equal to the output
of the family's Hugging Face processors."""

from __future__ import annotations

import fcntl
import functools
import io
import math
import time
from importlib.metadata import version
from pathlib import Path
from typing import TextIO

import numpy as np

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.local_dir import local_folder
from relax_hpc.base.rundir import private_folder, write_atomic
from relax_hpc.data.multimodal.medium import Kind, Medium
from relax_hpc.data.multimodal.rules import Rules

_MEL_FLOOR, _MEL_RANGE = 1e-10, 8.0
"""Smallest power, and range below the largest one in decades (Whisper, arXiv 2212.04356, section
2.2)."""
_FULL_SCALE = np.float32(32768)
"""Value of 1.0 in samples of 16 bits."""
MAX_HERTZ = 8000.0
"""Highest frequency of the mel filters."""
_LOCK_S, _LOCK_PAUSE_S = 60.0, 0.05
"""Seconds to wait for another process of this node that computes the filters, and between
attempts."""


def features(medium: Medium, rules: Rules) -> np.ndarray:
    """Input of the tower of a medium, float32: `patches`, or the transposed `mel`, [frames,
    bins]."""
    if medium.kind is Kind.AUDIO:
        return np.ascontiguousarray(mel(medium, rules).T)
    return patches(medium, rules)


def patches(medium: Medium, rules: Rules) -> np.ndarray:
    """Patches of an image or video, float32 [product of the grid, channels * temporal * patch *
    patch].

    Rows are ordered by time, then by the squares that become one token, then within a square.
    """
    return _as_rows(_normalise(_pixels(medium, rules), rules), medium, rules)


def raw_features(medium: Medium, rules: Rules) -> np.ndarray:
    """Like `features`, but with patches as pixels, uint8. These are a quarter of the bytes to move
    to the tower's device, which normalises them."""
    if medium.kind is Kind.AUDIO:
        return features(medium, rules)
    return _as_rows(_pixels(medium, rules), medium, rules)


def _pixels(medium: Medium, rules: Rules) -> np.ndarray:
    """Pixels of patches in the order of `patches`, uint8 [patches, channels, frames, patch, patch];
    an image has one frame."""
    frames = medium.data[None] if medium.kind is Kind.IMAGE else medium.data
    time, height, width = medium.grid
    patch, merge, channels = rules.patch, rules.merge, frames.shape[-1]
    depth = 1 if medium.kind is Kind.IMAGE else rules.temporal
    frames = _pad_frames(frames, time * depth)
    split = frames.reshape(
        time, depth, height // merge, merge, patch, width // merge, merge, patch, channels
    )
    return split.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(-1, channels, depth, patch, patch)


def _as_rows(values: np.ndarray, medium: Medium, rules: Rules) -> np.ndarray:
    """``values`` of `_pixels` as one row for each patch. The single frame of an image is copied to
    all frames of the patch."""
    copies = rules.temporal // values.shape[2]
    return values.repeat(copies, axis=2).reshape(math.prod(medium.grid), -1)


def _pad_frames(frames: np.ndarray, count: int) -> np.ndarray:
    """``frames``, with copies of the last one up to ``count`` frames."""
    missing = count - len(frames)
    if missing:
        return np.concatenate([frames, frames[-1:].repeat(missing, axis=0)])
    return frames


def _normalise(values: np.ndarray, rules: Rules) -> np.ndarray:
    """uint8 [n, channels, ...] as float32 with about mean 0 and deviation 1 in each channel."""
    mean = np.array(rules.mean, np.float32).reshape(-1, 1, 1, 1)
    std = np.array(rules.std, np.float32).reshape(-1, 1, 1, 1)
    normalised = values.astype(np.float32)
    normalised -= mean * np.float32(255)
    normalised /= std * np.float32(255)
    return normalised


def waveform(medium: Medium) -> np.ndarray:
    """Samples of a sound, float32 [samples], full scale 1."""
    if medium.data.dtype == np.int16:
        return medium.data.astype(np.float32) / _FULL_SCALE
    return medium.data


def mel(medium: Medium, rules: Rules) -> np.ndarray:
    """Log-mel spectrogram of a sound, float32 [bins, frames], like Whisper's for a batch of one.

    In a larger batch, Whisper's processor pads shorter sounds with zeros instead of their
    reflection, so that their last two frames depend on the batch. Here they never do.
    """
    padded = np.pad(waveform(medium), rules.window // 2, mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(padded, rules.window)
    frames = windows[:: rules.hop][: medium.grid[2]]
    logarithms = np.log10(np.maximum(_filters(rules) @ _power(frames).T, np.float32(_MEL_FLOOR)))
    clipped = np.maximum(logarithms, logarithms.max() - np.float32(_MEL_RANGE))
    return (clipped + np.float32(4)) / np.float32(4)


def _power(frames: np.ndarray) -> np.ndarray:
    """Power spectra, float32 [frames, window // 2 + 1]."""
    # numpy's transform would compute in float64.
    from scipy.fft import rfft

    length = frames.shape[1]
    hann = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(length) / length)).astype(np.float32)
    spectrum = rfft(frames * hann, axis=-1)
    return spectrum.real**2 + spectrum.imag**2


def _filters(rules: Rules) -> np.ndarray:
    return mel_filters(rules.rate, rules.window, rules.mel_bins)


@functools.lru_cache(maxsize=8)
def mel_filters(rate: int, window: int, bins: int) -> np.ndarray:
    """`librosa.filters.mel` up to 8 kHz: float32 [bins, window // 2 + 1].

    It is computed once a node and cached in `site.local_dir`, because the import of librosa 0.11.0
    takes 0.7 s and 145 MB in each process that has a tower.
    """
    try:
        folder = private_folder(local_folder() / "mel")
        with (folder / "lock").open("w") as lock:
            _await_lock(lock)
            return _cached_filters(folder, rate, window, bins)
    except (OSError, ConfigError):
        # The cache is unusable or full, or its lock is busy: this process computes the filters.
        return _compute_filters(rate, window, bins)


def _await_lock(lock: TextIO) -> None:
    """Take an exclusive lock among the processes of a node. OSError: not within _LOCK_S."""
    deadline = time.monotonic() + _LOCK_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
        time.sleep(_LOCK_PAUSE_S)


def _cached_filters(folder: Path, rate: int, window: int, bins: int) -> np.ndarray:
    path = folder / f"librosa-{version('librosa')}-{rate}-{window}-{bins}.npy"
    try:
        filters = np.load(path, allow_pickle=False)
        if filters.shape == (bins, window // 2 + 1) and filters.dtype == np.float32:
            return filters
    except (OSError, ValueError, EOFError):
        # The file is missing or damaged.
        pass
    filters = _compute_filters(rate, window, bins)
    data = io.BytesIO()
    np.save(data, filters, allow_pickle=False)
    write_atomic(path, data.getvalue())
    return filters


def _compute_filters(rate: int, window: int, bins: int) -> np.ndarray:
    from librosa.filters import mel

    return mel(sr=rate, n_fft=window, n_mels=bins, fmax=MAX_HERTZ, dtype=np.float32)
