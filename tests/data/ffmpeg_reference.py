"""FFmpeg's own program: it makes files of media, and decodes them as the reference of our
decoders."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np

_QUIET = ("-y", "-loglevel", "error")
H264 = (
    "-c:v",
    "libx264",
    "-preset",
    "veryfast",
    "-crf",
    "16",
    "-pix_fmt",
    "yuv420p",
    "-g",
    "12",
    "-bf",
    "2",
)
# Open groups of pictures: frames that are shown before a key frame come after it.
OPEN_H264 = (*H264, "-x264-params", "open-gop=1:scenecut=0")
HEVC = (
    "-c:v",
    "libx265",
    "-preset",
    "veryfast",
    "-x265-params",
    "keyint=12:bframes=3:log-level=none",
)
VP8 = ("-c:v", "libvpx", "-b:v", "1M", "-g", "12", "-cpu-used", "8", "-deadline", "realtime")
VP9 = (
    "-c:v",
    "libvpx-vp9",
    "-crf",
    "20",
    "-b:v",
    "0",
    "-g",
    "12",
    "-cpu-used",
    "8",
    "-deadline",
    "realtime",
)
AV1 = ("-c:v", "libaom-av1", "-crf", "30", "-cpu-used", "8", "-g", "12", "-usage", "realtime")
MPEG1 = ("-c:v", "mpeg1video", "-q:v", "2", "-bf", "2", "-g", "12")
MPEG2 = ("-c:v", "mpeg2video", "-q:v", "2", "-bf", "2", "-g", "12")
MPEG4 = ("-c:v", "mpeg4", "-q:v", "2", "-bf", "2", "-g", "12")
MJPEG = ("-c:v", "mjpeg", "-q:v", "2", "-pix_fmt", "yuvj420p")


def ffmpeg(*words: str | Path) -> bytes:
    """What FFmpeg's program writes to its standard output. CalledProcessError: it failed."""
    return subprocess.run(
        ["ffmpeg", *_QUIET, *map(str, words)], check=True, capture_output=True, timeout=120
    ).stdout


def moving(size: str = "128x96", rate: str = "25", frames: int = 36) -> tuple[str, ...]:
    """Input of a picture that changes in each frame."""
    return "-f", "lavfi", "-i", f"testsrc2=size={size}:rate={rate},trim=end_frame={frames}"


def tones(channels: int = 1, rate: int = 44100, seconds: float = 0.7) -> tuple[str, ...]:
    """Input of a tone a channel, of another pitch and loudness in each."""
    waves = [
        f"{0.1 + 0.05 * number}*sin({300 + 170 * number}*2*PI*t)" for number in range(channels)
    ]
    return "-f", "lavfi", "-i", f"aevalsrc={'|'.join(waves)}:s={rate}:d={seconds}"


def decoded_frames(path: Path, *settings: str) -> list[np.ndarray]:
    """Frames of the video that FFmpeg's program shows, each uint8 [height, width, 3]."""
    pictures = ffmpeg(
        *("-i", path, *settings, "-an", "-fps_mode", "passthrough"),
        *("-f", "image2pipe", "-c:v", "ppm", "-pix_fmt", "rgb24", "-"),
    )
    frames, at = list[np.ndarray](), 0
    while at < len(pictures):
        # "P6\n", "WIDTH HEIGHT\n", "255\n", pixels.
        sizes = pictures.index(b"\n", at) + 1
        end = pictures.index(b"\n", sizes)
        width, height = map(int, pictures[sizes:end].split())
        pixels = pictures.index(b"\n", end + 1) + 1
        frames.append(
            np.frombuffer(pictures, np.uint8, width * height * 3, pixels).reshape(height, width, 3)
        )
        at = pixels + width * height * 3
    return frames


def decoded_sound(path: Path) -> tuple[np.ndarray, int]:
    """Mean of the channels that FFmpeg's program decodes, float32 [samples], and their rate."""
    # A WAV file, whose header tells channels and rate; of 64 bits, as one that is written to a pipe
    # has no length.
    wav = ffmpeg("-i", path, "-vn", "-f", "wav", "-c:a", "pcm_f32le", "-bitexact", "-")
    channels, rate = np.frombuffer(wav, "<u2", 1, 22)[0], np.frombuffer(wav, "<u4", 1, 24)[0]
    begin = wav.index(b"data", 36) + 8
    samples = np.frombuffer(wav[begin : begin + (len(wav) - begin) // 4 * 4], "<f4")
    return samples.reshape(-1, int(channels)).mean(axis=1), int(rate)


def make_file(path: Path, *settings: str | Path | Sequence[str]) -> Path:
    """The file that FFmpeg's program writes at ``path`` from inputs and settings."""
    arguments = list[str | Path]()
    for setting in settings:
        arguments += [setting] if isinstance(setting, str | Path) else setting
    ffmpeg(*arguments, path)
    return path
