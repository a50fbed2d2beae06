"""Decoders compared with the FFmpeg program: the same frames and samples, or a refusal that names
the format."""

from __future__ import annotations

import asyncio
import struct
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relax_hpc.base.content_id import hash_content
from relax_hpc.data.multimodal import frame_reader
from relax_hpc.data.multimodal.bad_media import Reason, UnusableMedium
from relax_hpc.data.multimodal.frame_reader import Video, read_video
from relax_hpc.data.multimodal.limits import Limits
from relax_hpc.data.multimodal.loading import header, load
from relax_hpc.data.multimodal.medium import Kind
from relax_hpc.data.multimodal.pool import MediaPool
from relax_hpc.data.multimodal.rules import Rules
from relax_hpc.data.multimodal.sizes import Budget
from relax_hpc.data.multimodal.sound_reader import read_sound, sound_length
from tests.data.ffmpeg_reference import (
    AV1,
    H264,
    HEVC,
    MJPEG,
    MPEG1,
    MPEG2,
    MPEG4,
    OPEN_H264,
    VP8,
    VP9,
    decoded_frames,
    decoded_sound,
    make_file,
    moving,
    tones,
)
from tests.effort import effort
from tests.requirements import requires

requires("ffmpeg")
RULES = Rules(image=Budget(1024, 1 << 20), clip=Budget(1024, 1 << 24), rate=16000)
LIMITS = Limits()
ONE = 1 << 16


def assert_same_frames(video: Video, expected: list[np.ndarray], numbers: list[int]) -> None:
    """Assert that all frames, and only the frames `numbers`, equal the expected frames.

    Adjacent frames differ by much more than the tolerance.
    """
    assert video.count == len(expected)
    for requested in (list(range(video.count)), numbers):
        frames = list(video.frames(requested))
        assert len(frames) == len(requested)
        for number, frame in zip(requested, frames, strict=True):
            assert frame.shape == expected[number].shape
            assert np.abs(frame.astype(int) - expected[number]).mean() < 1, f"frame {number}"


def assert_right_frames(path: Path) -> Video:
    video = read_video(str(path), LIMITS)
    expected = decoded_frames(path)
    assert_same_frames(video, expected, sorted({0, video.count // 3, video.count - 1}))
    return video


CODECS = {
    "h264": (H264, ("mp4", "mov", "mkv", "ts", "flv", "avi", "m2ts")),
    "open": (OPEN_H264, ("mp4", "mkv", "ts")),
    "hevc": (HEVC, ("mp4", "mkv", "ts")),
    "vp8": (VP8, ("webm", "mkv", "avi")),
    "vp9": (VP9, ("webm", "mp4")),
    "av1": (AV1, ("mp4", "webm")),
    "mpeg1": (MPEG1, ("mpg", "ts", "mkv")),
    "mpeg2": (MPEG2, ("ts", "mpg", "vob", "mkv", "mp4")),
    "mpeg4": (MPEG4, ("avi", "mp4", "mkv")),
    "mjpeg": (MJPEG, ("avi", "mov", "mkv")),
    "msmpeg4": (("-c:v", "msmpeg4", "-q:v", "2"), ("avi",)),
    "wmv": (("-c:v", "wmv2", "-q:v", "2"), ("wmv",)),
    "theora": (("-c:v", "libtheora", "-q:v", "9"), ("ogv",)),
    "flv": (("-c:v", "flv", "-q:v", "2"), ("flv",)),
    "prores": (("-c:v", "prores", "-pix_fmt", "yuv422p10le"), ("mov", "mkv")),
    "ffv1": (("-c:v", "ffv1"), ("mkv", "avi")),
    "png": (("-c:v", "png", "-pix_fmt", "rgb24"), ("mov",)),
    "huffyuv": (("-c:v", "huffyuv"), ("avi",)),
    "raw": (("-c:v", "rawvideo", "-pix_fmt", "yuv420p"), ("avi",)),
    "gif": ((), ("gif",)),
}
"""Arguments of FFmpeg that encode a codec, and containers that support it."""
QUICK_PAIRS = {
    *(("h264", "ts"), ("open", "mp4"), ("mpeg1", "mpg"), ("mpeg2", "ts"), ("mpeg4", "avi")),
    *(("mjpeg", "avi"), ("wmv", "wmv"), ("gif", "gif")),
}
PAIRS: list[tuple[str, str]] = []
for codec_name, (_, codec_containers) in CODECS.items():
    PAIRS += [(codec_name, container_name) for container_name in codec_containers]


@pytest.mark.parametrize(
    ("codec", "container"),
    [pair for pair in PAIRS if pair in QUICK_PAIRS or effort(0, 1)],
    ids=lambda value: value,
)
def test_frames_equal_those_of_ffmpeg(codec: str, container: str, tmp_path: Path) -> None:
    encode, _ = CODECS[codec]
    assert_right_frames(make_file(tmp_path / f"x.{container}", *moving(), encode))


@pytest.mark.parametrize(
    ("name", "encode", "readers"),
    [
        ("closed.mp4", H264, ["_decord_frames", "_sequential_frames"]),
        ("closed.webm", VP8, ["_decord_frames", "_sequential_frames"]),
        ("open.mp4", OPEN_H264, ["_sequential_frames"] * 2),
        ("x.ts", H264, ["_sequential_frames"] * 2),
        ("x.avi", MJPEG, ["_intra_frames"] * 2),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_decord_reads_only_few_frames_of_files_where_seeking_is_exact(
    name: str,
    encode: tuple[str, ...],
    readers: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = make_file(tmp_path / name, *moving(), encode)
    video, expected, used_readers = read_video(str(path), LIMITS), decoded_frames(path), list[str]()
    for reader in ("_intra_frames", "_decord_frames", "_sequential_frames"):
        original = getattr(frame_reader, reader)
        monkeypatch.setattr(
            frame_reader,
            reader,
            lambda *arguments, reader=reader, original=original: (
                used_readers.append(reader),
                original(*arguments),
            )[1],
        )
    for numbers in ([1, 13, 26], list(range(video.count))):
        for number, frame in zip(numbers, video.frames(numbers), strict=True):
            assert np.abs(frame.astype(int) - expected[number]).mean() < 1
    assert used_readers == readers


@settings(max_examples=effort(3, 200), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    pair=st.sampled_from(PAIRS),
    frames=st.integers(1, 40),
    rate=st.sampled_from(["10", "25", "30000/1001", "60"]),
    size=st.sampled_from(["64x64", "98x66", "176x144"]),
    data=st.data(),
)
def test_frames_of_random_videos_equal_those_of_ffmpeg(
    pair: tuple[str, str],
    frames: int,
    rate: str,
    size: str,
    data,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    codec, container = pair
    # MPEG-1 and MPEG-2 support only some frame rates.
    rate = "25" if codec in ("mpeg1", "mpeg2") else rate
    path = tmp_path_factory.mktemp("video") / f"x.{container}"
    make_file(path, *moving(size, rate, frames), CODECS[codec][0])
    video = read_video(str(path), LIMITS)
    numbers = sorted(data.draw(st.sets(st.integers(0, video.count - 1), min_size=1, max_size=6)))
    assert_same_frames(video, decoded_frames(path), numbers)


@pytest.mark.parametrize(
    ("encode", "start"),
    [(H264, "0.7"), (HEVC, "0.7"), (MPEG4, "0.3")],
    ids=["h264", "hevc", "mpeg4"],
)
def test_an_edit_list_is_applied(encode: tuple[str, ...], start: str, tmp_path: Path) -> None:
    """FFmpeg writes an edit list when it cuts a video between two key frames without encoding."""
    whole = make_file(
        tmp_path / "whole.mp4", *moving(), *tones(2, 44100, 1.4), "-c:a", "aac", encode
    )
    cut = make_file(tmp_path / "cut.mp4", "-ss", start, "-i", whole, "-c", "copy")
    video = assert_right_frames(cut)
    assert video.count < 36 and video.fps == pytest.approx(25, rel=0.06)
    assert_right_sound(cut)


def test_a_video_cut_inside_a_group_of_pictures_has_all_decodable_frames(
    tmp_path: Path,
) -> None:
    whole = make_file(tmp_path / "whole.mkv", *moving(), HEVC)
    assert (
        assert_right_frames(
            make_file(tmp_path / "x.mkv", "-ss", "0.9", "-i", whole, "-c", "copy")
        ).count
        < 36
    )
    stream = make_file(tmp_path / "whole.ts", *moving(), OPEN_H264).read_bytes()
    (tmp_path / "cut.ts").write_bytes(stream[len(stream) // 3 :])
    assert assert_right_frames(tmp_path / "cut.ts").count < 36


@pytest.mark.parametrize("matrix", range(8) if effort(0, 1) else [1, 6])
def test_a_rotated_or_mirrored_video_is_upright(matrix: int, tmp_path: Path) -> None:
    signs = [ONE * (-1 if matrix & bit else 1) for bit in (1, 2)]
    a, b, c, d = (0, *signs, 0) if matrix & 4 else (signs[0], 0, 0, signs[1])
    path = make_file(tmp_path / "x.mp4", *moving(frames=14), H264)
    set_matrix(path, a, b, c, d)
    video = assert_right_frames(path)
    assert video.first.shape == ((128, 96, 3) if matrix & 4 else (96, 128, 3))


def set_matrix(path: Path, a: int, b: int, c: int, d: int) -> None:
    """Set the display matrix of the video in an MP4 file; its numbers have 16.16 bits."""
    content = bytearray(path.read_bytes())
    offset = content.index(b"tkhd") + 44
    content[offset : offset + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    path.write_bytes(content)


def test_a_rotation_by_another_angle_is_refused(tmp_path: Path) -> None:
    path = make_file(tmp_path / "x.mp4", *moving(frames=2), H264)
    set_matrix(path, 46341, 46341, -46341, 46341)
    assert refusal(Kind.VIDEO, path) == Reason.UNSUPPORTED


VARIANTS = {
    "ten_bits.mp4": (*H264, "-pix_fmt", "yuv420p10le"),
    "interlaced.mp4": (*H264, "-flags", "+ilme+ildct", "-x264-params", "interlaced=1"),
    "variable.mp4": (*H264, "-vf", "setpts='if(lt(N,12),N,N*3-24)/25/TB'", "-vsync", "vfr"),
    "bt709.mp4": (*H264, "-vf", "scale=out_color_matrix=bt709", "-colorspace", "bt709"),
    "full_range.mp4": (*H264, "-vf", "scale=out_range=full", "-color_range", "pc"),
    "fragmented.mp4": (*H264, "-movflags", "frag_keyframe+empty_moov"),
    "colours.mp4": (*H264, "-pix_fmt", "yuv444p"),
    "late.mkv": (*H264, "-vf", "setpts=PTS+0.5/TB"),
    "grey.mp4": (*H264, "-pix_fmt", "gray"),
    "all_key.mp4": (*H264, "-g", "1"),
    "refresh.ts": (*H264, "-x264-params", "intra-refresh=1"),
}


@pytest.mark.parametrize(
    "name", [*VARIANTS] if effort(0, 1) else ["ten_bits.mp4", "interlaced.mp4", "variable.mp4"]
)
def test_frames_of_unusual_videos_equal_those_of_ffmpeg(name: str, tmp_path: Path) -> None:
    assert_right_frames(make_file(tmp_path / name, *moving(), VARIANTS[name]))


def test_frames_of_changing_size_get_the_size_of_the_first(tmp_path: Path) -> None:
    """Recordings of calls have such frames."""
    streams = [
        make_file(tmp_path / f"{size}.ts", *moving(size, frames=14), H264)
        for size in ("128x96", "160x128")
    ]
    (tmp_path / "both.ts").write_bytes(b"".join(stream.read_bytes() for stream in streams))
    assert_right_frames(tmp_path / "both.ts")
    assert_right_frames(make_file(tmp_path / "both.mkv", "-i", tmp_path / "both.ts", "-c", "copy"))


def test_the_selected_stream_is_that_of_ffmpeg(tmp_path: Path) -> None:
    small, large = (
        make_file(tmp_path / f"{size}.mp4", *moving(size), H264) for size in ("128x96", "160x128")
    )
    sounds = [
        make_file(tmp_path / f"{count}.m4a", *tones(count), "-c:a", "aac") for count in (1, 2)
    ]
    inputs: list[str | Path] = []
    for path in (small, large, *sounds):
        inputs += ["-i", path]
    maps = ("-map", "0", "-map", "1", "-map", "2", "-map", "3", "-c", "copy")
    path = make_file(
        tmp_path / "x.mkv", *inputs, *maps, "-disposition:a:0", "default", "-disposition:a:1", "0"
    )
    assert assert_right_frames(path).first.shape == (128, 160, 3)
    assert_right_sound(path)


def test_a_cover_image_is_not_a_video(tmp_path: Path) -> None:
    picture = make_file(tmp_path / "x.jpg", *moving(frames=1))
    add_cover = (
        "-i",
        picture,
        "-map",
        "0",
        "-map",
        "1",
        "-c:v",
        "mjpeg",
        "-disposition:v",
        "attached_pic",
    )
    for name, codec in (("x.m4a", "aac"), ("x.mp3", "libmp3lame")):
        path = make_file(tmp_path / name, *tones(2), *add_cover, "-c:a", codec, "-strict", "-2")
        assert_right_sound(path)
        assert refusal(Kind.VIDEO, path) in (Reason.NO_STREAM, Reason.MISLABELLED)
    # A file with only a sound, and with the name of a video.
    (tmp_path / "x.mp4").write_bytes((tmp_path / "x.m4a").read_bytes())
    assert len(load(Kind.AUDIO, tmp_path / "x.mp4", RULES).data) > 0


def assert_right_sound(path: Path) -> None:
    sound = read_sound(str(path), LIMITS)
    expected, rate = decoded_sound(path)
    assert sound.rate == rate and len(sound.samples) == len(expected)
    assert np.abs(sound.samples - expected).max() < 2e-5
    assert sound_length(str(path), LIMITS) == (len(expected), rate)


SOUNDS = {
    "aac": ("m4a", "mp4", "mkv", "mov", "aac", "ts", "flv", "3gp"),
    "alac": ("m4a", "mov"),
    "libopus": ("webm", "mkv", "opus", "mp4", "ts"),
    "libvorbis": ("webm", "mkv", "ogg"),
    "libmp3lame": ("mp3", "mp4", "mkv", "avi", "ts", "wav"),
    "ac3": ("ac3", "mkv", "mp4", "ts"),
    "eac3": ("eac3", "mkv"),
    "mp2": ("mp2", "mpg"),
    "wmav2": ("wma", "wmv"),
    "flac": ("flac", "mkv", "mp4", "ogg"),
    "pcm_s16le": ("wav", "mov", "mkv", "avi", "w64"),
    "pcm_s24le": ("wav", "mov"),
    "pcm_s32le": ("wav",),
    "pcm_f32le": ("wav", "w64", "mkv"),
    "pcm_f64le": ("wav",),
    "pcm_u8": ("wav",),
    "pcm_mulaw": ("wav", "au"),
    "adpcm_ms": ("wav",),
    "pcm_s24be": ("aiff", "caf"),
    "pcm_f32be": ("aiff", "au", "caf"),
}
"""Containers by codec of sound."""
SOUND_PAIRS: list[tuple[str, str]] = []
for codec_name, sound_containers in SOUNDS.items():
    SOUND_PAIRS += [(codec_name, container_name) for container_name in sound_containers]
CHANNELS = {"alac": (1, 2), "libmp3lame": (1, 2), "mp2": (1, 2), "wmav2": (1, 2)}
"""Numbers of channels by codec, if not all of 1, 2 and 6 are supported."""
QUICK_SOUNDS = [
    *(("aac", "m4a", 2, 44100), ("aac", "mp4", 6, 48000), ("aac", "aac", 2, 44100)),
    *(("aac", "ts", 2, 48000), ("libopus", "webm", 2, 16000), ("libvorbis", "ogg", 6, 44100)),
    *(("ac3", "ac3", 6, 48000), ("wmav2", "wma", 2, 44100), ("pcm_f32le", "w64", 2, 22050)),
]
ALL_SOUNDS: list[tuple[str, str, int, int]] = []
for codec_name, container_name in SOUND_PAIRS:
    rates = (16000, 22050, 44100) if container_name == "flv" else (16000, 22050, 44100, 48000)
    for channel_count, sample_rate in product(CHANNELS.get(codec_name, (1, 2, 6)), rates):
        ALL_SOUNDS.append((codec_name, container_name, channel_count, sample_rate))


@pytest.mark.parametrize(
    ("codec", "container", "channels", "rate"),
    ALL_SOUNDS if effort(0, 1) else QUICK_SOUNDS,
)
def test_samples_equal_those_of_ffmpeg(
    codec: str, container: str, channels: int, rate: int, tmp_path: Path
) -> None:
    path = tmp_path / f"x.{container}"
    assert_right_sound(make_file(path, *tones(channels, rate), "-c:a", codec, "-strict", "-2"))


@settings(max_examples=effort(3, 200), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    pair=st.sampled_from(SOUND_PAIRS),
    channels=st.sampled_from([1, 2, 6]),
    rate=st.sampled_from([16000, 22050, 32000, 44100, 48000]),
    seconds=st.floats(0.1, 2.0),
)
def test_samples_of_random_sounds_equal_those_of_ffmpeg(
    pair: tuple[str, str],
    channels: int,
    rate: int,
    seconds: float,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    codec, container = pair
    if channels not in CHANNELS.get(codec, (1, 2, 6)):
        channels = 2
    rate = 44100 if container == "flv" else rate
    path = tmp_path_factory.mktemp("sound") / f"x.{container}"
    assert_right_sound(
        make_file(path, *tones(channels, rate, seconds), "-c:a", codec, "-strict", "-2")
    )


def test_a_worker_stores_what_this_process_decodes(tmp_path: Path) -> None:
    """Two channels were uninitialized memory in an earlier version, and differed by process."""
    video = make_file(tmp_path / "x.mp4", *moving(), *tones(2), H264, "-c:a", "aac")
    transport = make_file(tmp_path / "x.ts", *moving(), *tones(6), MPEG2, "-c:a", "ac3")

    async def ids() -> list[str]:
        pool = MediaPool(RULES)
        try:
            return [(await pool.load(kind, path)).media_id for kind, path in media]
        finally:
            await pool.close()

    media = [(kind, path) for path, kind in product((video, transport), (Kind.VIDEO, Kind.AUDIO))]
    assert asyncio.run(ids()) == [
        hash_content(load(kind, path, RULES).to_bytes()) for kind, path in media
    ]


def refusal(kind: Kind, path: Path) -> Reason:
    """Reason of the refusal of a file, which must be the same for header and content."""
    reasons = set[Reason]()
    for read in (header, load):
        with pytest.raises(UnusableMedium) as caught:
            read(kind, path, RULES)
        reasons.add(caught.value.reason)
    (reason,) = reasons
    return reason


@pytest.mark.parametrize(
    ("kind", "name", "arguments"),
    [
        (Kind.AUDIO, "x.wv", (*tones(2), "-c:a", "wavpack")),
        (Kind.AUDIO, "x.mkv", (*tones(2), "-c:a", "dca", "-strict", "-2")),
        (Kind.VIDEO, "x.avi", (*moving(frames=2), "-c:v", "cinepak")),
        (Kind.VIDEO, "x.h264", (*moving(), *H264)),
        (Kind.VIDEO, "x.mxf", (*moving(frames=2), *MPEG2)),
    ],
    ids=["wavpack", "dts", "cinepak", "h264_without_times", "mxf"],
)
def test_a_format_outside_the_lists_is_refused(
    kind: Kind, name: str, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    assert refusal(kind, make_file(tmp_path / name, *arguments)) == Reason.UNSUPPORTED


def test_only_the_stream_of_an_unknown_codec_is_refused(tmp_path: Path) -> None:
    path = make_file(tmp_path / "x.mp4", *moving(), *tones(2), H264, "-c:a", "aac")
    content = path.read_bytes()
    offset = content.index(b"avc1", content.index(b"stsd"))
    path.write_bytes(content[:offset] + b"zzzz" + content[offset + 4 :])
    assert refusal(Kind.VIDEO, path) == Reason.UNSUPPORTED
    assert_right_sound(path)


@pytest.mark.parametrize("name", ["x.mp4", "x.wmv", "x.flv", "x.gif"])
def test_a_truncated_video_is_refused(name: str, tmp_path: Path) -> None:
    codecs = {"x.wmv": ("-c:v", "wmv2"), "x.gif": (), "x.flv": H264}
    whole = make_file(tmp_path / name, *moving(), codecs.get(name, MPEG4)).read_bytes()
    (tmp_path / name).write_bytes(whole[: len(whole) * 2 // 3])
    assert refusal(Kind.VIDEO, tmp_path / name) == Reason.TRUNCATED


@pytest.mark.parametrize(
    "playlist", ["#EXTM3U\n#EXTINF:8,\n{}\n#EXT-X-ENDLIST\n", "ffconcat version 1.0\nfile {}\n"]
)
def test_a_playlist_is_not_opened(playlist: str, tmp_path: Path) -> None:
    make_file(tmp_path / "other.ts", *moving(), *tones(), H264, "-c:a", "aac")
    for lead in ("", "\n", "\ufeff"):
        (tmp_path / "x.mp4").write_text(lead + playlist.format("other.ts"))
        assert refusal(Kind.VIDEO, tmp_path / "x.mp4") == Reason.UNSUPPORTED
        assert refusal(Kind.AUDIO, tmp_path / "x.mp4") == Reason.UNSUPPORTED


def test_a_damaged_sound_is_refused(tmp_path: Path) -> None:
    path = make_file(tmp_path / "x.m4a", *tones(2, seconds=3.0), "-c:a", "aac")
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 400] = np.random.default_rng(0).bytes(400)
    path.write_bytes(content)
    with pytest.raises(UnusableMedium, match="corrupted"):
        load(Kind.AUDIO, path, RULES)


def test_bytes_after_a_stream_are_ignored(tmp_path: Path) -> None:
    """Tags after an MP3, and bytes that are not a packet after an AAC stream."""
    for name, codec, junk in (
        ("x.mp3", "libmp3lame", b"TAG" + bytes(125)),
        ("x.aac", "aac", b"\xff\xf1junk" * 9),
    ):
        path = make_file(tmp_path / name, *tones(2), "-c:a", codec, "-strict", "-2")
        samples = read_sound(str(path), LIMITS).samples
        path.write_bytes(path.read_bytes() + junk)
        assert len(read_sound(str(path), LIMITS).samples) == pytest.approx(len(samples), abs=2048)
