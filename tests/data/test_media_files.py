"""Files of media: what they become, and the one reason why a bad one is refused."""

from __future__ import annotations

import io
import struct
import subprocess
import sys
import zlib
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from relax_hpc.base.errors import ConfigError
from relax_hpc.config.schema import MultimodalConfig
from relax_hpc.data.multimodal import frame_reader, sound_reader
from relax_hpc.data.multimodal.audio import resampled
from relax_hpc.data.multimodal.bad_media import Reason, UnusableMedium
from relax_hpc.data.multimodal.features import waveform
from relax_hpc.data.multimodal.limits import Limits
from relax_hpc.data.multimodal.loading import header, load
from relax_hpc.data.multimodal.medium import Kind, Medium
from relax_hpc.data.multimodal.placeholders import stamped_runs
from relax_hpc.data.multimodal.rules import Rules
from relax_hpc.data.multimodal.sizes import Budget
from tests.effort import effort
from tests.helpers.media_files import avi, clip, encoded, model_files, picture, sound, tone
from tests.videos import make as videos

IMAGE, VIDEO, AUDIO = Kind
SMALL = Rules(image=Budget(1024, 1 << 20), rate=16000)
PNG, JPEG = encoded(picture(64, 96)), encoded(picture(64, 96), "JPEG")
WAV = sound(tone(1.0))
MOVIE = avi(clip(20, 64, 96), 10, tone(2.0))


def refused(kind: Kind, source: bytes | Path, **limits: float) -> str:
    """Reason why a file is refused, for its header or its content."""
    with pytest.raises(UnusableMedium) as caught:
        load(kind, source, SMALL, Limits(**limits))
    assert caught.value.detail
    return caught.value.reason


def png_of(width: int, height: int) -> bytes:
    """A PNG whose header says this size, over the pixels of another."""
    body = b"IHDR" + struct.pack(">II", width, height) + PNG[24:29]
    return PNG[:12] + body + struct.pack(">I", zlib.crc32(body)) + PNG[33:]


def wav_of(rate: int) -> bytes:
    """A sound whose header says this rate."""
    return WAV[:24] + struct.pack("<I", rate) + WAV[28:]


@pytest.mark.parametrize(
    ("reason", "kind", "content"),
    [
        (Reason.EMPTY, IMAGE, b""),
        (Reason.EMPTY, AUDIO, sound(tone(0.0))),
        (Reason.SHORT, AUDIO, sound(tone(0.01))),
        (Reason.UNSUPPORTED, IMAGE, b"no picture at all" * 9),
        (Reason.UNSUPPORTED, VIDEO, b"no video at all" * 9),
        (Reason.UNSUPPORTED, AUDIO, b"no sound at all" * 9),
        (Reason.UNSUPPORTED, IMAGE, b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"),
        (Reason.UNSUPPORTED, IMAGE, b"\n%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"),
        (Reason.UNSUPPORTED, IMAGE, b"\xc5\xd0\xd3\xc6" + bytes(40)),
        (Reason.UNSUPPORTED, IMAGE, b"\0\0\0\x18ftypheic" + bytes(40)),
        (Reason.UNSUPPORTED, IMAGE, encoded(picture(8, 8), "TGA")),
        (Reason.CORRUPTED, IMAGE, b"\x89PNG" + bytes(40)),
        (Reason.CORRUPTED, VIDEO, b"\0\0\0\x18ftypisom" + bytes(40)),
        (Reason.CORRUPTED, IMAGE, PNG[:40] + bytes(200) + PNG[240:]),
        (Reason.TRUNCATED, IMAGE, JPEG[: len(JPEG) // 2]),
        (Reason.TRUNCATED, IMAGE, PNG[: len(PNG) // 2]),
        (Reason.TRUNCATED, VIDEO, MOVIE[: len(MOVIE) // 2]),
        (Reason.TRUNCATED, AUDIO, WAV[: len(WAV) // 2]),
        (Reason.CORRUPTED, AUDIO, sound(tone(1.0), form="FLAC")[:9000]),
        (Reason.TRUNCATED, AUDIO, sound(tone(1.0), form="OGG")[:4000]),
        (Reason.TRUNCATED, AUDIO, sound(tone(3.0), form="MP3")[:8000]),
        (Reason.TRUNCATED, AUDIO, sound(tone(3.0), form="W64")[:8000]),
        (Reason.TRUNCATED, AUDIO, sound(tone(3.0), form="RF64")[:8000]),
        # Boxes whose lengths lead to offsets that no file system has.
        (
            Reason.TRUNCATED,
            VIDEO,
            b"\0\0\0\x18ftypisom" + bytes(12) + struct.pack(">I4sQ", 1, b"mdat", 1 << 56),
        ),
        (
            Reason.TRUNCATED,
            VIDEO,
            b"\0\0\0\x18ftypisom" + bytes(12) + struct.pack(">I4sQ", 1, b"mdat", 1 << 63),
        ),
        (
            Reason.TRUNCATED,
            VIDEO,
            b"\x1a\x45\xdf\xa3" + struct.pack(">Q", 0x01FF << 48) + bytes(40),
        ),
        (Reason.MISLABELLED, IMAGE, WAV),
        (Reason.MISLABELLED, IMAGE, b"<!doctype html><title>404</title>"),
        (Reason.MISLABELLED, VIDEO, PNG),
        (Reason.MISLABELLED, AUDIO, JPEG),
        (Reason.NO_STREAM, AUDIO, avi(clip(4, 64, 96))),
        (Reason.PIXELS, IMAGE, png_of(9000, 9000)),
        (Reason.PIXELS, IMAGE, png_of(60000, 60000)),
        (Reason.CORRUPTED, AUDIO, wav_of(0)),
        (Reason.RATE, AUDIO, wav_of(4_000_000)),
        (Reason.NOT_FINITE, AUDIO, sound(np.full(16000, np.nan, np.float32), subtype="FLOAT")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_file_has_one_reason(
    reason: Reason, kind: Kind, content: bytes, tmp_path: Path
) -> None:
    assert refused(kind, content) == reason
    (tmp_path / "file").write_bytes(content)
    assert refused(kind, tmp_path / "file") == reason


def test_a_file_over_a_limit_is_not_decoded(tmp_path: Path) -> None:
    assert refused(IMAGE, PNG, bytes=100) == Reason.LARGE
    assert refused(VIDEO, MOVIE, frames=19) == Reason.FRAMES
    assert refused(VIDEO, MOVIE, seconds=1.9) == Reason.SECONDS
    assert refused(VIDEO, MOVIE, pixels=64 * 95) == Reason.PIXELS
    assert refused(AUDIO, WAV, seconds=0.9) == Reason.SECONDS
    assert refused(AUDIO, MOVIE, seconds=1.9) == Reason.SECONDS


def test_a_configuration_changes_budgets_frames_and_limits(tmp_path: Path) -> None:
    model = model_files(tmp_path)
    settings = MultimodalConfig(
        image_max_token_num=2, video_min_token_num=8, fps=5.0, fps_max_frames=8, frame_factor=4
    )
    rules = Rules.from_model(model, settings)
    assert 1 <= rules.tokens(load(IMAGE, PNG, rules)) <= 2
    video = load(VIDEO, MOVIE, rules)
    assert len(video.data) == 8 and video.grid[0] == 4 and rules.tokens(video) >= 4 * 8
    small = MultimodalConfig(
        video_total_token_num=8, image_min_token_num=100, image_resize_scale_factor=64
    )
    changed = Rules.from_model(model, small)
    assert changed.tokens(load(VIDEO, MOVIE, changed)) <= 8
    picture_of_model = load(IMAGE, PNG, changed)
    assert changed.tokens(picture_of_model) >= 100 and not any(
        side % 64 for side in picture_of_model.data.shape[:2]
    )
    assert Rules.from_model(model, MultimodalConfig()) == Rules.from_model(model)
    assert Limits.from_config(MultimodalConfig(max_pixels=9, file_timeout_s=3.0)).pixels == 9
    with pytest.raises(
        ConfigError, match="image_resize_scale_factor: found 28, allowed: multiples of the 32"
    ):
        Rules.from_model(model, MultimodalConfig(image_resize_scale_factor=28))


def test_a_missing_file_or_another_extension_is_refused(tmp_path: Path) -> None:
    assert refused(IMAGE, tmp_path / "missing.png") == Reason.MISSING
    assert refused(IMAGE, tmp_path) == Reason.MISSING
    (tmp_path / "sound.mp3").write_bytes(PNG)
    assert refused(IMAGE, tmp_path / "sound.mp3") == Reason.EXTENSION
    # Many JPEG files of the web have the extension of PNG.
    (tmp_path / "picture.png").write_bytes(JPEG)
    assert load(IMAGE, tmp_path / "picture.png", SMALL).grid == (1, 4, 6)


@pytest.mark.parametrize("fps", [2.0, 3.0, 7.0, 10.0])
@pytest.mark.parametrize("name", videos.FILES)
def test_the_requested_frames_of_a_compressed_video_are_decoded(name: str, fps: float) -> None:
    rules = replace(SMALL, fps=fps, clip=Budget(1024, 1 << 24))
    for source in (videos.VIDEOS / name, (videos.VIDEOS / name).read_bytes()):
        video = load(VIDEO, source, rules)
        numbers = rules.frames(videos.FRAMES, videos.FPS)
        assert len(video.data) == len(numbers)
        for number, frame in zip(numbers, video.data, strict=True):
            # Compression changes grey levels by less than 2; adjacent frames differ by 10.
            assert np.abs(frame[:, :8].astype(int) - videos.frame(number)[:, :8]).mean() < 2, (
                f"frame {number}"
            )


@pytest.mark.parametrize("name", videos.FILES)
def test_the_sound_of_a_compressed_video_is_decoded(name: str) -> None:
    samples = load(AUDIO, videos.VIDEOS / name, SMALL).data
    spectrum = np.abs(np.fft.rfft(samples.astype(float)))
    assert spectrum.argmax() / len(samples) * SMALL.rate == pytest.approx(440, abs=1)
    assert len(samples) / SMALL.rate == pytest.approx(videos.FRAMES / videos.FPS, abs=0.15)


def test_a_video_with_fewer_frames_than_packets_is_truncated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decode = frame_reader.decode
    monkeypatch.setattr(frame_reader, "decode", lambda *stream: islice(decode(*stream), 5))
    with pytest.raises(UnusableMedium, match="truncated: 5 frames, its packets say 20"):
        load(VIDEO, videos.VIDEOS / "hevc.mkv", SMALL)


def test_a_file_that_decord_refuses_is_decoded_by_the_other_reader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import decord

    few = replace(SMALL, min_frames=2, max_frames=2)
    expected = load(VIDEO, videos.VIDEOS / "h264.mp4", few)

    def refuse(*_: Any, **settings: Any) -> None:
        raise decord.DECORDError("Error sending packet.")

    monkeypatch.setattr(decord.VideoReader, "get_batch", refuse)
    assert load(VIDEO, videos.VIDEOS / "h264.mp4", few).to_bytes() == expected.to_bytes()


@pytest.mark.parametrize("form", ["JPEG", "PNG", "TIFF", "WEBP", "AVIF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_orientation_is_applied_once(form: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = encoded(picture(32, 96), form, exif=exif)
    upright = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(content))).convert("RGB"))
    medium = load(IMAGE, content, SMALL)
    assert np.array_equal(medium.data, upright)
    assert header(IMAGE, content, SMALL) == medium.header


RAMP = np.linspace(0, 1, 64 * 64).reshape(64, 64)
DEEP = {
    "floats of 0 to 1": (RAMP.astype(np.float32), 255 * RAMP),
    "floats a little beyond": ((RAMP * 1.0002 - 0.0001).astype(np.float32), 255 * RAMP),
    "floats of 0 to 255": (np.rint(RAMP * 255).astype(np.float32), 255 * RAMP),
    "32 bits of 0 to 255": (np.rint(RAMP * 255).astype(np.int32), 255 * RAMP),
    "16 bits": ((RAMP * 65535).astype(np.uint16), 255 * RAMP),
    "16 bits of 0 to 255": (np.rint(RAMP * 255).astype(np.uint16), 0 * RAMP),
}
"""Pixels of more than 8 bits, and what they become."""


@pytest.mark.parametrize("name", DEEP)
def test_pixels_of_more_than_eight_bits_have_a_rule(name: str) -> None:
    pixels, expected = DEEP[name]
    grey = load(IMAGE, encoded(Image.fromarray(pixels), "TIFF"), SMALL).data
    assert np.abs(grey - expected[..., None]).max() <= 1


@pytest.mark.parametrize(
    "pixels",
    [
        RAMP * 2,
        RAMP - 0.5,
        RAMP * 255,
        RAMP * 1e4,
        RAMP.astype(np.int32) - 1,
        (RAMP * 256).astype(np.int32),
    ],
    ids=[
        "0 to 2",
        "-0.5 to 0.5",
        "0 to 255, not whole",
        "0 to 10000",
        "-1 to 0",
        "whole, 0 to 256",
    ],
)
def test_pixels_without_a_rule_are_refused(pixels: np.ndarray) -> None:
    pixels = pixels if pixels.dtype == np.int32 else pixels.astype(np.float32)
    assert refused(IMAGE, encoded(Image.fromarray(pixels), "TIFF")) == Reason.UNSUPPORTED


def test_pixels_that_are_not_numbers_are_refused() -> None:
    pixels = RAMP.astype(np.float32)
    pixels[3, 3] = np.nan
    assert refused(IMAGE, encoded(Image.fromarray(pixels), "TIFF")) == Reason.NOT_FINITE


def tiff_of(pixels: np.ndarray, sample_format: int) -> bytes:
    """A grey TIFF of one strip, as other programs write it; Pillow writes not all types of
    numbers."""
    height, width = pixels.shape
    tags = {
        256: width,
        257: height,
        258: pixels.itemsize * 8,
        259: 1,
        262: 1,
        273: 0,
        277: 1,
        278: height,
    }
    tags |= {279: pixels.nbytes, 339: sample_format}
    tags[273] = 8 + 2 + 12 * len(tags) + 4
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4) + pixels.tobytes()


@pytest.mark.parametrize(
    ("kind", "sample_format"),
    [("f2", 3), ("f8", 3), ("i1", 2), ("i2", 2), ("u4", 1), ("u8", 1)],
)
def test_other_numbers_of_a_tiff_are_refused(kind: str, sample_format: int) -> None:
    largest = 1 if kind.startswith("f") else np.iinfo(kind).max
    assert (
        refused(IMAGE, tiff_of((RAMP * largest).astype(kind), sample_format)) == Reason.UNSUPPORTED
    )


def test_other_images_of_sixteen_bits_have_their_high_byte() -> None:
    deep = (RAMP * 65535).astype(">u2").tobytes()
    for content in (
        b"P5\n64 64\n65535\n" + deep,
        encoded(Image.fromarray((RAMP * 65535).astype(np.uint16))),
    ):
        assert np.abs(load(IMAGE, content, SMALL).data - 255 * RAMP[..., None]).max() <= 1


def test_a_sound_for_a_model_without_sound_is_refused() -> None:
    with pytest.raises(ConfigError, match="qwen3_omni_moe"):
        load(AUDIO, WAV, Rules())


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(
        [(IMAGE, JPEG), (IMAGE, PNG), (AUDIO, WAV), (AUDIO, sound(tone(0.3), form="FLAC"))]
    ),
    st.data(),
)
def test_damaged_content_raises_only_unusable_medium(original: tuple[Kind, bytes], data) -> None:
    kind, content = original
    offset = data.draw(st.integers(0, len(content) - 1))
    damaged = bytearray(content)
    damaged[offset : offset + data.draw(st.integers(1, 40))] = data.draw(
        st.binary(min_size=0, max_size=40)
    )
    try:
        assert load(kind, bytes(damaged), SMALL).kind == kind
    except UnusableMedium as bad:
        assert bad.reason in set(Reason)


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        (IMAGE, JPEG),
        (VIDEO, MOVIE),
        (AUDIO, sound(tone(1.01, 44100), 44100, "MP3")),
        (AUDIO, sound(tone(0.77, 22050), 22050, "FLAC")),
        (AUDIO, sound(tone(0.77, 48000), 48000, "OGG")),
        (AUDIO, MOVIE),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_header_has_the_token_count_of_the_content(kind: Kind, content: bytes) -> None:
    medium = load(kind, content, SMALL)
    assert header(kind, content, SMALL) == medium.header
    assert SMALL.tokens(medium) > 0
    reloaded = Medium.from_bytes(medium.to_bytes())
    assert reloaded.header == medium.header and np.array_equal(reloaded.data, medium.data)
    assert reloaded.to_bytes() == medium.to_bytes()


def test_a_blob_is_a_safetensors_file_and_other_bytes_are_refused() -> None:
    from safetensors.numpy import load as of_safetensors

    blob = load(IMAGE, PNG, SMALL).to_bytes()
    assert np.array_equal(of_safetensors(blob)["data"], np.asarray(picture(64, 96)))
    for damaged in (
        b"",
        blob[:7],
        blob[:-1],
        blob + b"0",
        blob.replace(b"image", b"audio"),
        blob[:8] + blob[9:],
    ):
        with pytest.raises(UnusableMedium, match="damaged_blob"):
            Medium.from_bytes(damaged)


def test_frames_of_a_video_are_drawn_evenly_and_have_their_times() -> None:
    medium = load(VIDEO, MOVIE, SMALL)
    # 2 s at 2 frames a second.
    assert medium.data.shape == (4, 64, 96, 3) and medium.grid == (2, 4, 6)
    assert medium.seconds == pytest.approx((0.3, 1.6))
    for frame, number in zip(medium.data, (0, 6, 13, 19), strict=True):
        assert np.abs(frame.astype(int) - np.asarray(clip(20, 64, 96)[number])).mean() < 4
    assert stamped_runs(medium, SMALL) == [
        ("<0.3 seconds>", (VIDEO, 6)),
        ("<1.6 seconds>", (VIDEO, 6)),
    ]


def test_a_long_video_stays_within_its_pixel_budget() -> None:
    tight = Rules(frame=Budget(1024, 64 * 64), clip=Budget(1024, 20 * 32 * 32), fps=10.0)
    medium = load(VIDEO, MOVIE, tight)
    assert medium.data.shape == (20, 32, 32, 3)
    assert (
        load(VIDEO, MOVIE, Rules(frame=Budget(128 * 1024, 768 * 1024), clip=None)).data[0].size
        >= 3 * 128 * 1024
    )


RATES = [8000, 22050, 44100, 48000]
COMPARED = """
import sys, types
import numpy as np
# librosa compiles functions for 12 s when it is imported. Its resampling is not compiled.
numba = types.ModuleType("numba")
numba.jit = numba.stencil = numba.guvectorize = numba.vectorize = lambda *given, **settings: (
    given[0] if given and callable(given[0]) else lambda function: function
)
numba.__getattr__ = lambda name: None
sys.modules["numba"] = numba
import librosa
from relax_hpc.data.multimodal import frame_reader, sound_reader
from relax_hpc.data.multimodal.audio import resampled
for rate in map(int, sys.argv[1:]):
    samples = np.random.default_rng(0).standard_normal(rate // 3).astype(np.float32)
    theirs = librosa.resample(samples, orig_sr=rate, target_sr=16000)
    assert np.array_equal(resampled(samples, rate, 16000), theirs), rate
"""


def test_sounds_are_resampled_as_by_librosa() -> None:
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPARED, *map(str, RATES)], check=True, timeout=120
    )


@pytest.mark.skipif(
    not effort(0, 1), reason="as above, with librosa's compiler: 12 s where it is new"
)
@pytest.mark.parametrize("rate", RATES)
def test_sounds_are_resampled_as_by_the_whole_librosa(rate: int) -> None:
    import librosa

    samples = tone(0.31, rate)
    theirs = librosa.resample(samples, orig_sr=rate, target_sr=16000)
    assert np.array_equal(resampled(samples, rate, 16000), theirs)


@pytest.mark.parametrize(
    ("form", "subtype"),
    [
        *(
            ("WAV", "PCM_16"),
            ("WAV", "PCM_24"),
            ("WAV", "PCM_32"),
            ("WAV", "FLOAT"),
            ("WAV", "DOUBLE"),
        ),
        *(
            ("WAV", "PCM_U8"),
            ("WAV", "ULAW"),
            ("FLAC", "PCM_16"),
            ("FLAC", "PCM_24"),
            ("AIFF", "PCM_24"),
        ),
        *(("AU", "FLOAT"), ("CAF", "PCM_32"), ("RF64", "PCM_24"), ("WAVEX", "PCM_24")),
    ],
)
@pytest.mark.parametrize("loudness", [1e-3, 1.0, 5.0])
def test_samples_have_the_precision_of_their_file(form: str, subtype: str, loudness: float) -> None:
    """Equal to libsndfile's, and so to `librosa.load`: quiet ones too, and those of floating point
    beyond 1."""
    stereo = np.stack([tone(0.2), tone(0.2, pitch=700.0)], axis=1) * loudness
    content = sound(stereo, 16000, form, subtype)
    channels, _ = soundfile.read(io.BytesIO(content), dtype="float32", always_2d=True)
    samples = load(AUDIO, content, SMALL).data
    assert samples.dtype == np.float32 and np.array_equal(samples, channels.mean(axis=1))
    assert (np.abs(samples).max() > 1) == (loudness > 1 and subtype in ("FLOAT", "DOUBLE"))


def test_channels_become_one_and_sixteen_bits_stay_as_they_are() -> None:
    samples = np.rint(tone(0.5) * 32768).astype(np.int16)
    assert np.array_equal(load(AUDIO, sound(samples), SMALL).data * 32768, samples)
    stereo = np.stack([samples, np.zeros_like(samples)], axis=1)
    assert np.array_equal(load(AUDIO, sound(stereo), SMALL).data * 65536, samples)
    # Of a video, too.
    assert np.abs(load(AUDIO, MOVIE, SMALL).data * 32768 - tone(2.0) * 32767).max() <= 1


def test_a_sound_of_an_earlier_release_is_read() -> None:
    """As a run has stored it that is resumed: 16 bits."""
    samples = np.rint(tone(0.5) * 32768).astype(np.int16)
    stored = Medium.from_bytes(Medium(AUDIO, samples, (1, 1, 50)).to_bytes())
    assert stored.data.dtype == np.int16
    assert np.array_equal(waveform(stored), load(AUDIO, sound(samples), SMALL).data)


def test_a_decoder_that_stops_early_is_compared_with_the_header(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = sound_reader.decode
    monkeypatch.setattr(sound_reader, "decode", lambda *stream: islice(real(*stream), 1))
    assert refused(AUDIO, WAV) == Reason.TRUNCATED
