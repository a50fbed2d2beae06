"""What preparing media costs beside their decoders alone, as ratios of throughput, the two by turns
in one run.

Ours is all that a worker does: checks of the file, decoding, resizing, and the blob that is stored.
Times are of the processor, so that other work on the machine counts little. Videos of Motion JPEG
are resized. Those of H.264 and HEVC have a size that the model takes.

    python tools/bench/media.py --json
"""

from __future__ import annotations

import argparse
import asyncio
import io
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median

import numpy as np
import psutil
from figures import Figure, print_figures
from PIL import Image

from relax_hpc.data.multimodal.audio import resampled
from relax_hpc.data.multimodal.features import mel
from relax_hpc.data.multimodal.loading import load
from relax_hpc.data.multimodal.medium import Kind
from relax_hpc.data.multimodal.pool import MediaPool
from relax_hpc.data.multimodal.rules import Rules
from relax_hpc.data.multimodal.source import Source

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.helpers.media_files import avi, clip, encoded, picture, sound, tone

RULES = Rules(rate=16000)
SECONDS, FPS = 30, 30
_DISTINCT_FRAMES = 30


def seconds(work: Callable[[], object], clock: Callable[[], float] = time.process_time) -> float:
    """Seconds that ``work`` takes."""
    begun = clock()
    work()
    return clock() - begun


def ratio(
    name: str, target: float, rounds: int, alone: Callable[[], object], ours: Callable[[], object]
) -> Figure:
    """Throughput of ours as a share of that of the decoder alone."""
    alone(), ours()
    found = [seconds(alone) / seconds(ours) for _ in range(rounds)]
    return Figure(name, median(found), "x", f">= {target}", median(found) >= target, found)


def pictures(rounds: int) -> Iterator[Figure]:
    """JPEG, as large as the model takes it, and not."""

    def decoded(content: bytes, size: tuple[int, int]) -> None:
        with Image.open(io.BytesIO(content)) as image:
            image.load()
            if image.size != size:
                image.resize(size, Image.Resampling.BICUBIC)

    for name, target, (height, width) in (
        ("unresized", 0.6, (1024, 1024)),
        ("resized", 0.8, (1100, 1500)),
    ):
        content = encoded(picture(height, width), "JPEG", quality=90)
        size = RULES.image_size((height, width))[::-1]
        yield ratio(
            f"JPEG {width} x {height}, {name}: of "
            f"decoding{' and resizing' if name == 'resized' else ''}",
            target,
            rounds * 5,
            lambda content=content, size=size: decoded(content, size),
            lambda content=content: load(Kind.IMAGE, content, RULES).to_bytes(),
        )
    yield size_of("1024 x 1024 image", Kind.IMAGE, encoded(picture(1024, 1024), "JPEG"), 3.15)


def videos(folder: Path, rounds: int) -> Iterator[Figure]:
    """Half a minute, 2 frames a second."""
    import av
    import decord

    taken = RULES.frames(SECONDS * FPS, FPS).tolist()

    def by_decord(path: Path) -> None:
        decord.VideoReader(str(path), num_threads=1).get_batch(taken).asnumpy()

    def by_pyav(path: Path) -> None:
        with av.open(path) as container:
            container.streams.video[0].codec_context.thread_count = 1
            for number, frame in enumerate(container.decode(video=0)):
                if number in taken:
                    frame.to_ndarray(format="rgb24")

    for height, width, target in ((360, 640, 0.8), (720, 1280, 0.7)):
        distinct = clip(_DISTINCT_FRAMES, height, width)
        frames = [distinct[number % len(distinct)] for number in range(SECONDS * FPS)]
        path = folder / f"{height}.avi"
        path.write_bytes(avi(frames, FPS))
        yield ratio(
            f"Motion JPEG {height}p, {SECONDS} s: of decord",
            target,
            rounds,
            lambda path=path: by_decord(path),
            lambda path=path: load(Kind.VIDEO, path, RULES).parts(),
        )
        if height == 360:
            yield size_of(f"{SECONDS} s of video, 360p", Kind.VIDEO, path, 40.6)
    # Of a size that is not resized, so that decoding is what counts.
    distinct = clip(_DISTINCT_FRAMES, 352, 640)
    frames = [distinct[number % len(distinct)] for number in range(SECONDS * FPS)]
    for codec, name, alone in (("libx264", "decord", by_decord), ("libx265", "PyAV", by_pyav)):
        path = compressed_video(folder / f"{codec}.mp4", codec, frames)
        yield ratio(
            f"{codec[3:]} 640 x 352, {SECONDS} s: of {name}",
            0.8,
            rounds,
            lambda path=path, alone=alone: alone(path),
            lambda path=path: load(Kind.VIDEO, path, RULES).parts(),
        )


def compressed_video(path: Path, codec: str, frames: Sequence[Image.Image]) -> Path:
    """An MP4 of these ``frames``."""
    import av

    with av.open(path, "w") as container:
        stream = container.add_stream(
            codec, FPS, options={"preset": "veryfast", "x265-params": "log-level=none"}
        )
        stream.width, stream.height, stream.pix_fmt = *frames[0].size, "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_image(frame)))
        container.mux(stream.encode())
    return path


def compressed_sound(path: Path, samples: np.ndarray, rate: int) -> Path:
    """An M4A of these ``samples`` [channels, samples], AAC."""
    import av

    with av.open(path, "w") as container:
        stream = container.add_stream("aac", rate, layout="stereo")
        frame = av.AudioFrame.from_ndarray(samples, "fltp", "stereo")
        frame.sample_rate = rate
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def sounds(folder: Path, rounds: int) -> Iterator[Figure]:
    """Half a minute in stereo."""
    import av
    import soundfile

    both = np.stack([tone(SECONDS, 44100)] * 2)
    content = sound(both.T, 44100, "FLAC")
    medium = load(Kind.AUDIO, content, RULES)

    def flac_alone() -> None:
        channels, rate = soundfile.read(io.BytesIO(content), dtype="float32")
        resampled(channels.mean(axis=1), rate, RULES.rate)
        mel(medium, RULES)

    path = compressed_sound(folder / "sound.m4a", both, 44100)

    def aac_alone() -> None:
        with av.open(path) as container:
            channels = np.concatenate(
                [frame.to_ndarray() for frame in container.decode(audio=0)], axis=1
            )
        resampled(channels.mean(axis=0), 44100, RULES.rate)
        mel(medium, RULES)

    for name, source, alone in (("FLAC", content, flac_alone), ("AAC in MP4", path, aac_alone)):

        def ours(source: Source = source) -> None:
            stored = load(Kind.AUDIO, source, RULES)
            stored.to_bytes()
            mel(stored, RULES)

        yield ratio(
            f"{name}, {SECONDS} s: of decoding, resampling and mel", 0.8, rounds * 3, alone, ours
        )
    yield size_of(f"{SECONDS} s of sound", Kind.AUDIO, content, 1.921)


def size_of(name: str, kind: Kind, source: Source, target: float) -> Figure:
    """Megabytes that a prompt group has in the queue's store for one medium."""
    found = len(load(kind, source, RULES).to_bytes()) / 1e6
    return Figure(
        f"{name}: stored once a prompt group", found, "MB", f"<= {target}", found <= target
    )


ALONE = """
import sys, time
from pathlib import Path
from relax_hpc.base.content_id import hash_content
from relax_hpc.data.multimodal.loading import load
from relax_hpc.data.multimodal.medium import Kind
from relax_hpc.data.multimodal.rules import Rules
path, count = Path(sys.argv[1]), int(sys.argv[2])
def work(): return hash_content(*load(Kind.IMAGE, path, Rules()).parts())
work()
print(flush=True)
sys.stdin.readline()
begun = time.process_time()
for _ in range(count):
    work()
print(time.process_time() - begun, flush=True)
"""
"""Program that prepares an image again and again once it is told to, and says what that took of the
processor."""
Times = tuple[float, float]
"""Seconds by the clock, and of the processor."""


def independent(path: Path, count: int) -> Times:
    """Times of two processes that know nothing of each other."""
    command = [sys.executable, "-c", ALONE, path, str(count)]
    both = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for one in both:
        one.stdout.readline()
    begun = time.perf_counter()
    for one in both:
        one.stdin.write("\n")
        one.stdin.flush()
    spent = sum(float(one.stdout.readline()) for one in both)
    took = time.perf_counter() - begun
    for one in both:
        one.communicate(timeout=60)
    return took, spent


async def pooled(path: Path, count: int) -> Times:
    """Times of a pool of two, and of the process that asks it."""
    pool = MediaPool(RULES, count=2)
    try:
        await asyncio.gather(*(pool.load(Kind.IMAGE, path) for _ in range(2)))
        before, begun = processor_time(), time.perf_counter()
        await asyncio.gather(*(pool.load(Kind.IMAGE, path) for _ in range(2 * count)))
        return time.perf_counter() - begun, processor_time() - before
    finally:
        await pool.close()


def processor_time() -> float:
    """Seconds of the processor that this process and its children have had."""
    own = psutil.Process()
    return sum(sum(one.cpu_times()[:2]) for one in (own, *own.children()))


def two_workers(folder: Path, rounds: int, count: int) -> Iterator[Figure]:
    """Throughput of a pool of two beside that of two processes; by the clock for a quiet machine
    alone."""
    path = folder / "picture.jpg"
    path.write_bytes(encoded(picture(1100, 1500), "JPEG", quality=90))
    both = [(independent(path, count), asyncio.run(pooled(path, count))) for _ in range(rounds)]
    for number, clock in enumerate(("by the clock", "of the processor")):
        found = [theirs[number] / ours[number] for theirs, ours in both]
        middle = median(found)
        yield Figure(
            f"two workers: of two processes, {clock}", middle, "x", ">= 0.95", middle >= 0.95, found
        )


def figures(rounds: int, count: int) -> Iterator[Figure]:
    """All of them."""
    with tempfile.TemporaryDirectory() as name:
        yield from pictures(rounds)
        yield from videos(Path(name), rounds)
        yield from sounds(Path(name), rounds)
        yield from two_workers(Path(name), rounds, count)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="measurements of each side of a ratio"
    )
    parser.add_argument(
        "--images", type=int, default=100, help="images that each of two workers prepares"
    )
    parser.add_argument(
        "--json", action="store_true", help="print all figures as one line of JSON at the end"
    )
    args = parser.parse_args()
    print_figures(
        figures(args.rounds, args.images), {"rounds": args.rounds, "images": args.images}, args.json
    )


if __name__ == "__main__":
    main()
