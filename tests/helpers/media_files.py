"""Files of media that tests make: images by Pillow, sounds by soundfile, videos as MJPEG in AVI,
and model directories with nothing but the files that say how a model wants its media."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from PIL import Image

from relax_hpc.examples.tasks.avi import avi as avi

PROCESSOR = {
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
}
TOWER = {"patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2}
SOUND = {"feature_size": 128, "sampling_rate": 16000, "hop_length": 160, "n_fft": 400}


def model_files(path: Path, kind: str = "qwen3_vl", **image: Any) -> Path:
    """Directory ``path`` of a model of a family, as far as media go; ``image``: keys of its image
    processor."""
    path.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {"model_type": kind, "vision_config": TOWER}
    if "omni" in kind:
        thinker = {
            "vision_config": TOWER,
            "audio_config": {"num_mel_bins": 128},
            "position_id_per_seconds": 13,
        }
        config = {"model_type": kind, "thinker_config": thinker}
    (path / "config.json").write_text(json.dumps(config))
    usual = {"size": {"shortest_edge": 1024, "longest_edge": 16777216}}
    (path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR | SOUND | usual | image))
    video = {
        "size": {"shortest_edge": 4096, "longest_edge": 25165824},
        "fps": 2,
        "min_frames": 4,
        "max_frames": 768,
    }
    (path / "video_preprocessor_config.json").write_text(json.dumps(PROCESSOR | video))
    return path


def picture(height: int, width: int, seed: int = 0) -> Image.Image:
    """A smooth picture with some noise."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8)).resize(
        (width, height), Image.Resampling.BICUBIC
    )
    noise = rng.integers(-8, 9, (height, width, 3))
    return Image.fromarray((np.asarray(coarse).astype(int) + noise).clip(0, 255).astype(np.uint8))


def encoded(image: Image.Image, form: str = "PNG", **how: Any) -> bytes:
    """Bytes of a file of ``image``."""
    file = io.BytesIO()
    image.save(file, form, **how)
    return file.getvalue()


def tone(seconds: float, rate: int = 16000, pitch: float = 440.0) -> np.ndarray:
    """A tone with noise, float32 [samples]."""
    times = np.arange(int(seconds * rate)) / rate
    noise = np.random.default_rng(0).standard_normal(len(times)) * 0.05
    return (0.3 * np.sin(2 * np.pi * pitch * times) + noise).astype(np.float32)


def sound(
    samples: np.ndarray, rate: int = 16000, form: str = "WAV", subtype: str | None = None
) -> bytes:
    """Bytes of a file of ``samples`` [samples] or [samples, channels]."""
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=form, subtype=subtype)
    return file.getvalue()


def clip(count: int, height: int, width: int) -> list[Image.Image]:
    """Frames of a picture that moves."""
    whole = np.asarray(picture(height, width + 4 * count))
    return [Image.fromarray(whole[:, 4 * at : 4 * at + width]) for at in range(count)]


HANGS, CRASHES, SWELLS, KILLED_TWICE = 33, 34, 35, 36
"""Widths of pictures of 32 lines over which the Pillow of `have_own_pillow` hangs, crashes, takes a
gigabyte, and is killed the first two times."""
_OWN_PILLOW = f"""
import os, signal, time
from PIL import Image as pillow
from tests.helpers.signalled import signal_first_calls
real = pillow.open
def opened(file, *args, **settings):
    found = real(file, *args, **settings)
    if found.size == ({HANGS}, 32):
        time.sleep(3600)
    if found.size == ({CRASHES}, 32):
        os.kill(os.getpid(), signal.SIGSEGV)
    if found.size == ({SWELLS}, 32):
        bytearray(1 << 30)
    if found.size == ({KILLED_TWICE}, 32):
        signal_first_calls(signal.SIGKILL, 2, __file__ + ".log")
    return found
pillow.open = opened
"""


def have_own_pillow(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have workers that start from now on import a Pillow from ``folder`` that fails over some
    pictures."""
    (folder / "sitecustomize.py").write_text(_OWN_PILLOW)
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
