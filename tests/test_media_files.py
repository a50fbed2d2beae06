"""Files of media: what they become, and the one reason why a bad one is refused."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_hpc.config.schema import MultimodalConfig
from relax_hpc.errors import ConfigError
from relax_hpc.multimodal.audio import resampled
from relax_hpc.multimodal.bad import BadMedium, Reason
from relax_hpc.multimodal.limits import Limits
from relax_hpc.multimodal.loading import header, load
from relax_hpc.multimodal.medium import Kind, Medium
from relax_hpc.multimodal.placeholders import stamped_runs
from relax_hpc.multimodal.rules import Rules
from relax_hpc.multimodal.sizes import Budget
from tests.effort import effort
from tests.media_files import avi, clip, encoded, model_files, picture, sound, tone
from tests.videos import make as videos

IMAGE, VIDEO, AUDIO = Kind
SMALL = Rules(image=Budget(1024, 1 << 20), rate=16000)
PNG, JPEG = encoded(picture(64, 96)), encoded(picture(64, 96), "JPEG")
WAV = sound(tone(1.0))
MOVIE = avi(clip(20, 64, 96), 10, tone(2.0))


def refused(kind: Kind, source: bytes | Path, **limits: float) -> str:
    """Reason why a file is refused, for its header or its content."""
    with pytest.raises(BadMedium) as caught:
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
        (Reason.CORRUPTED, IMAGE, b"no picture at all" * 9),
        (Reason.CORRUPTED, VIDEO, b"no video at all" * 9),
        (Reason.CORRUPTED, AUDIO, b"no sound at all" * 9),
        (Reason.CORRUPTED, IMAGE, PNG[:40] + bytes(200) + PNG[240:]),
        (Reason.TRUNCATED, IMAGE, JPEG[: len(JPEG) // 2]),
        (Reason.TRUNCATED, IMAGE, PNG[: len(PNG) // 2]),
        (Reason.TRUNCATED, VIDEO, MOVIE[: len(MOVIE) // 2]),
        (Reason.TRUNCATED, AUDIO, WAV[: len(WAV) // 2]),
        (Reason.CORRUPTED, AUDIO, sound(tone(1.0), form="FLAC")[:9000]),
        (Reason.TRUNCATED, AUDIO, sound(tone(1.0), form="OGG")[:4000]),
        (Reason.TRUNCATED, AUDIO, sound(tone(3.0), form="MP3")[:8000]),
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
def test_a_bad_file_has_one_reason(reason: Reason, kind: Kind, content: bytes, tmp_path: Path) -> None:
    assert refused(kind, content) == reason
    (tmp_path / "file").write_bytes(content)
    assert refused(kind, tmp_path / "file") == reason


def test_what_is_over_a_limit_is_not_decoded(tmp_path: Path) -> None:
    assert refused(IMAGE, PNG, bytes=100) == Reason.LARGE
    assert refused(VIDEO, MOVIE, frames=19) == Reason.FRAMES
    assert refused(VIDEO, MOVIE, seconds=1.9) == Reason.SECONDS
    assert refused(VIDEO, MOVIE, pixels=64 * 95) == Reason.PIXELS
    assert refused(AUDIO, WAV, seconds=0.9) == Reason.SECONDS
    assert refused(AUDIO, MOVIE, seconds=1.9) == Reason.SECONDS


def test_a_configuration_changes_budgets_frames_and_limits(tmp_path: Path) -> None:
    model = model_files(tmp_path)
    settings = MultimodalConfig(image_max_token_num=2, video_min_token_num=8, fps=5.0, fps_max_frames=8, frame_factor=4)
    rules = Rules.of(model, settings)
    assert 1 <= rules.tokens(load(IMAGE, PNG, rules)) <= 2
    video = load(VIDEO, MOVIE, rules)
    assert len(video.data) == 8 and video.grid[0] == 4 and rules.tokens(video) >= 4 * 8
    small = MultimodalConfig(video_total_token_num=8, image_min_token_num=100, image_resize_scale_factor=64)
    changed = Rules.of(model, small)
    assert changed.tokens(load(VIDEO, MOVIE, changed)) <= 8
    picture_of_model = load(IMAGE, PNG, changed)
    assert changed.tokens(picture_of_model) >= 100 and not any(side % 64 for side in picture_of_model.data.shape[:2])
    assert Rules.of(model, MultimodalConfig()) == Rules.of(model)
    assert Limits.of(MultimodalConfig(max_pixels=9, file_timeout_s=3.0)).pixels == 9
    with pytest.raises(ConfigError, match="image_resize_scale_factor: found 28, allowed: multiples of the 32"):
        Rules.of(model, MultimodalConfig(image_resize_scale_factor=28))


def test_a_file_that_is_not_there_or_named_as_another_kind_is_refused(tmp_path: Path) -> None:
    assert refused(IMAGE, tmp_path / "missing.png") == Reason.MISSING
    assert refused(IMAGE, tmp_path) == Reason.MISSING
    (tmp_path / "sound.mp3").write_bytes(PNG)
    assert refused(IMAGE, tmp_path / "sound.mp3") == Reason.EXTENSION
    # As on the web, where many a JPEG is called a PNG.
    (tmp_path / "picture.png").write_bytes(JPEG)
    assert load(IMAGE, tmp_path / "picture.png", SMALL).grid == (1, 4, 6)


@pytest.mark.parametrize("fps", [2.0, 3.0, 7.0, 10.0])
@pytest.mark.parametrize("name", ["h264.mp4", "hevc.mkv", "vp9.webm"])
def test_frames_of_a_compressed_video_are_those_that_were_asked_for(name: str, fps: float) -> None:
    rules = replace(SMALL, fps=fps, clip=Budget(1024, 1 << 24))
    for source in (videos.VIDEOS / name, (videos.VIDEOS / name).read_bytes()):
        found = load(VIDEO, source, rules)
        taken = rules.frames(videos.FRAMES, videos.FPS)
        assert len(found.data) == len(taken)
        for number, frame in zip(taken, found.data, strict=True):
            # Apart from what compression costs; the next frame's grey is ten away.
            assert np.abs(frame[:, :8].astype(int) - videos.frame(number)[:, :8]).mean() < 2, f"frame {number}"


@pytest.mark.parametrize("name", videos.FILES)
def test_the_sound_of_a_compressed_video_is_heard(name: str) -> None:
    samples = load(AUDIO, videos.VIDEOS / name, SMALL).data
    spectrum = np.abs(np.fft.rfft(samples.astype(float)))
    assert spectrum.argmax() / len(samples) * SMALL.rate == pytest.approx(440, abs=1)
    assert len(samples) / SMALL.rate == pytest.approx(videos.FRAMES / videos.FPS, abs=0.15)


def test_a_video_that_decord_does_not_decode_is_refused_by_what_it_does() -> None:
    with pytest.raises(BadMedium, match=r"no_stream.*H\.264.*AV1 it does not"):
        load(VIDEO, videos.VIDEOS / "av1.mp4", SMALL)


@pytest.mark.parametrize("frames", [0, 5])
def test_a_video_of_fewer_frames_than_its_index_is_cut_short(frames: int, monkeypatch: pytest.MonkeyPatch) -> None:
    import decord

    real, left = decord.VideoReader.next, iter(range(frames))
    monkeypatch.setattr(decord.VideoReader, "next", lambda reader: (next(left), real(reader))[1])
    with pytest.raises(BadMedium, match=f"truncated: {frames} frames, its index says 20"):
        load(VIDEO, videos.VIDEOS / "h264.mp4", SMALL)


def test_a_model_without_ears_says_so() -> None:
    with pytest.raises(ConfigError, match="qwen3_omni_moe"):
        load(AUDIO, WAV, Rules())


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([(IMAGE, JPEG), (IMAGE, PNG), (AUDIO, WAV), (AUDIO, sound(tone(0.3), form="FLAC"))]), st.data())
def test_damage_is_refused_or_goes_unnoticed_but_never_raises_anything_else(one: tuple[Kind, bytes], data) -> None:
    kind, content = one
    at = data.draw(st.integers(0, len(content) - 1))
    damaged = bytearray(content)
    damaged[at : at + data.draw(st.integers(1, 40))] = data.draw(st.binary(min_size=0, max_size=40))
    try:
        assert load(kind, bytes(damaged), SMALL).kind == kind
    except BadMedium as bad:
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
def test_a_header_counts_the_tokens_that_the_content_has(kind: Kind, content: bytes) -> None:
    medium = load(kind, content, SMALL)
    assert header(kind, content, SMALL) == medium.header
    assert SMALL.tokens(medium) > 0
    again = Medium.from_bytes(medium.to_bytes())
    assert again.header == medium.header and np.array_equal(again.data, medium.data)
    assert again.to_bytes() == medium.to_bytes()


def test_a_blob_is_a_safetensors_file_and_other_bytes_are_none() -> None:
    from safetensors.numpy import load as of_safetensors

    blob = load(IMAGE, PNG, SMALL).to_bytes()
    assert np.array_equal(of_safetensors(blob)["data"], np.asarray(picture(64, 96)))
    for damaged in (b"", blob[:7], blob[:-1], blob + b"0", blob.replace(b"image", b"audio"), blob[:8] + blob[9:]):
        with pytest.raises(BadMedium, match="damaged_blob"):
            Medium.from_bytes(damaged)


def test_frames_of_a_video_are_drawn_evenly_and_have_their_times() -> None:
    medium = load(VIDEO, MOVIE, SMALL)
    # 2 s at 2 frames a second.
    assert medium.data.shape == (4, 64, 96, 3) and medium.grid == (2, 4, 6)
    assert medium.seconds == pytest.approx((0.3, 1.6))
    for frame, number in zip(medium.data, (0, 6, 13, 19), strict=True):
        assert np.abs(frame.astype(int) - np.asarray(clip(20, 64, 96)[number])).mean() < 4
    assert stamped_runs(medium, SMALL) == [("<0.3 seconds>", (VIDEO, 6)), ("<1.6 seconds>", (VIDEO, 6))]


def test_a_long_video_has_no_more_pixels_than_its_budgets() -> None:
    tight = Rules(frame=Budget(1024, 64 * 64), clip=Budget(1024, 20 * 32 * 32), fps=10.0)
    medium = load(VIDEO, MOVIE, tight)
    assert medium.data.shape == (20, 32, 32, 3)
    assert load(VIDEO, MOVIE, Rules(frame=Budget(128 * 1024, 768 * 1024), clip=None)).data[0].size >= 3 * 128 * 1024


@pytest.mark.skipif(not effort(0, 1), reason="librosa compiles for 20 s where it is new: env/test.sh --all")
@pytest.mark.parametrize("rate", [8000, 22050, 44100, 48000])
def test_sounds_are_resampled_as_by_librosa(rate: int) -> None:
    import librosa

    samples = tone(0.31, rate)
    theirs = librosa.resample(samples, orig_sr=rate, target_sr=16000)
    assert np.array_equal(resampled(samples, rate, 16000), theirs)


def test_channels_become_one_and_sixteen_bits_stay_as_they_are() -> None:
    samples = np.rint(tone(0.5) * 32768).astype(np.int16)
    assert np.array_equal(load(AUDIO, sound(samples), SMALL).data, samples)
    stereo = np.stack([samples, np.zeros_like(samples)], axis=1)
    assert np.abs(load(AUDIO, sound(stereo), SMALL).data - samples / 2).max() <= 1
    # Of a video, too.
    assert np.abs(load(AUDIO, MOVIE, SMALL).data - tone(2.0) * 32767).max() <= 1


def test_a_decoder_that_stops_early_is_compared_with_the_header(monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable = soundfile.read
    monkeypatch.setattr(soundfile, "read", lambda *args, **how: (real(*args, **how)[0][:-1], 16000))
    assert refused(AUDIO, WAV) == Reason.TRUNCATED
