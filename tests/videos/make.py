"""Videos as other programs write them, 20 frames of 64 x 64, 10 a second, and two seconds of a tone
of 440 Hz.

Frame n is 20 + 10 n grey but for a square that moves. They lie here, as FFmpeg is needed to make
them:

    python tests/videos/make.py
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import numpy as np

VIDEOS = Path(__file__).parent
FRAMES, SIDE, FPS, RATE = 20, 64, 10, 44100
H264 = ("-c:v", "libx264", "-crf", "18", "-g", "12", "-bf", "3")
# Left to itself, x265 has frames that are shown before a key frame behind it.
HEVC = ("-c:v", "libx265", "-crf", "18", "-x265-params", "keyint=12:bframes=3:log-level=none")
VP9 = ("-c:v", "libvpx-vp9", "-crf", "20", "-b:v", "0", "-g", "12")
AV1 = ("-c:v", "libaom-av1", "-crf", "20", "-cpu-used", "8", "-g", "12")
AAC, OPUS = ("-ar", "16000", "-c:a", "aac", "-b:a", "12k"), ("-c:a", "libopus", "-b:a", "12k")
FILES = {
    "h264.mp4": (*H264, *AAC),
    "hevc.mkv": (*HEVC, *AAC),
    "vp9.webm": (*VP9, *OPUS),
    "av1.mp4": (*AV1, *AAC),
}


def frame(number: int) -> np.ndarray:
    """Frame of that number, uint8 [side, side, 3]."""
    found = np.full((SIDE, SIDE, 3), 20 + 10 * number, np.uint8)
    found[24:40, 2 * number + 8 :][:, :16] = (255, 0, 0) if number % 2 else (0, 0, 255)
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        pixels, samples = Path(name) / "pixels", Path(name) / "samples"
        pixels.write_bytes(b"".join(frame(number).tobytes() for number in range(FRAMES)))
        seconds = np.arange(FRAMES / FPS * RATE) / RATE
        samples.write_bytes((8000 * np.sin(2 * np.pi * 440 * seconds)).astype("<i2").tobytes())
        seen = [
            "-f",
            "rawvideo",
            "-pix_fmt",
            "rgb24",
            "-s",
            f"{SIDE}x{SIDE}",
            "-r",
            str(FPS),
            "-i",
            str(pixels),
        ]
        heard = ["-f", "s16le", "-ar", str(RATE), "-ac", "1", "-i", str(samples)]
        for file, how in FILES.items():
            target = VIDEOS / file
            bare = ["-pix_fmt", "yuv420p", "-fflags", "+bitexact", "-map_metadata", "-1"]
            subprocess.run(
                ["ffmpeg", "-y", "-loglevel", "error", *seen, *heard, *how, *bare, str(target)],
                check=True,
            )


if __name__ == "__main__":
    main()
