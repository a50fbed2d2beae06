"""Features of media: the same numbers as the processors of transformers compute for the files."""

from __future__ import annotations

import fcntl
import itertools
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from relax_hpc.base.transformers_hook import install_transformers_hook
from relax_hpc.data.multimodal import features, image
from relax_hpc.data.multimodal.bad_media import UnusableMedium
from relax_hpc.data.multimodal.medium import Header, Kind, Medium
from relax_hpc.data.multimodal.placeholders import runs_with_sound
from relax_hpc.data.multimodal.positions import positions
from relax_hpc.data.multimodal.rules import IMAGE as IMAGE_BUDGET
from relax_hpc.data.multimodal.rules import Rules, sound_tokens
from relax_hpc.data.multimodal.sizes import Budget
from tests.helpers.media_files import PROCESSOR, encoded, model_files, picture, tone

install_transformers_hook()
BUDGET = {"size": {"shortest_edge": 1024, "longest_edge": 16777216}}
GREY = 2 / 255 / 0.5
"""Difference of two grey levels in patches."""


def processors() -> Any:
    """Image processors of transformers: with Pillow, and with torchvision."""
    from transformers.models.qwen2_vl import (
        image_processing_pil_qwen2_vl,
        image_processing_qwen2_vl,
    )

    pillow, fast = (
        image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil,
        image_processing_qwen2_vl.Qwen2VLImageProcessor,
    )
    return pillow(**PROCESSOR, **BUDGET), fast(**PROCESSOR, **BUDGET)


@pytest.mark.parametrize("size", [(256, 256), (96, 352), (333, 517), (20, 900)], ids=str)
def test_patches_of_an_image_equal_those_of_transformers(
    tmp_path: Path, size: tuple[int, int]
) -> None:
    rules = Rules.from_model(model_files(tmp_path))
    medium = image.load(encoded(picture(*size)), rules)
    ours = features.patches(medium, rules)
    for processor in processors():
        expected = processor(images=[picture(*size)], return_tensors="np")
        assert tuple(expected["image_grid_thw"][0]) == medium.grid
        # The bicubic filters of torchvision and Pillow round differently.
        is_same = "Pil" in type(processor).__name__ or medium.data.shape[:2] == size
        assert np.abs(expected["pixel_values"] - ours).max() <= (1.3e-7 if is_same else GREY)
    assert len(ours) == math.prod(medium.grid) == 4 * rules.tokens(medium)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 3000), st.integers(1, 3000))
def test_sizes_of_images_equal_those_of_transformers(height: int, width: int) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    rules = Rules()
    if max(height, width) / min(height, width) <= 200:
        expected = smart_resize(height, width, 32, IMAGE_BUDGET.low, IMAGE_BUDGET.high)
        assert rules.image_size((height, width)) == tuple(max(32, side) for side in expected)
    else:
        reduced = rules.image_size((height, width))
        assert max(reduced) / min(reduced) < 250


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 90),
    st.integers(32, 900),
    st.integers(32, 900),
    st.sampled_from([20_000, 2_000_000, 25165824]),
)
def test_sizes_of_frames_equal_those_of_transformers(
    frames: int, height: int, width: int, max_pixels: int
) -> None:
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

    rules = Rules(clip=Budget(4096, max_pixels))
    assert rules.frame_size((height, width), frames) == smart_resize(
        frames, height, width, 2, 32, 4096, max_pixels
    )


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 3000), st.sampled_from([10.0, 23.976, 24.0, 25.0, 29.97, 60.0]))
def test_frames_and_time_stamps_equal_those_of_transformers(total: int, native: float) -> None:
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    rules = Rules()
    metadata = SimpleNamespace(total_num_frames=total, fps=native)
    expected = Qwen3VLVideoProcessor.sample_frames(
        SimpleNamespace(fps=2, min_frames=4, max_frames=768), metadata
    )
    frames = rules.frames(total, native)
    assert frames.tolist() == expected.tolist()
    stamps = Qwen3VLProcessor._calculate_timestamps(None, expected.tolist(), native)
    assert rules.times(frames, total, native) == pytest.approx(stamps, abs=1e-9)


@pytest.mark.parametrize("count", [4, 5], ids=["even", "odd"])
def test_patches_of_a_video_equal_those_of_transformers(tmp_path: Path, count: int) -> None:
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    rules = Rules.from_model(model_files(tmp_path))
    frames = np.stack([np.asarray(picture(64, 96, seed)) for seed in range(count)])
    medium = Medium(Kind.VIDEO, frames, rules.video_header(count, 2.0, (64, 96)).grid)
    processor = Qwen3VLVideoProcessor(size={"shortest_edge": 4096, "longest_edge": 25165824})
    expected = processor(videos=[frames], do_sample_frames=False, return_tensors="np")
    assert tuple(expected["video_grid_thw"][0]) == medium.grid
    assert np.abs(expected["pixel_values_videos"] - features.patches(medium, rules)).max() <= 1.3e-7


def sound_of(seconds: float, rules: Rules) -> Medium:
    """A sound of `seconds` seconds."""
    samples = np.rint(tone(seconds) * 32768).astype(np.int16)
    return Medium(Kind.AUDIO, samples, rules.audio_header(len(samples)).grid)


def whisper(*media: Medium) -> tuple[np.ndarray, np.ndarray]:
    """Features of a padded batch by transformers, and their lengths in frames."""
    from transformers import WhisperFeatureExtractor

    extractor = WhisperFeatureExtractor(feature_size=128)
    batch = extractor(
        [features.waveform(medium) for medium in media],
        sampling_rate=16000,
        padding=True,
        truncation=False,
        return_attention_mask=True,
        return_tensors="np",
    )
    return batch["input_features"], batch["attention_mask"].sum(-1)


def test_spectrograms_equal_those_of_transformers(tmp_path: Path) -> None:
    rules = Rules.from_model(model_files(tmp_path, "qwen3_omni_moe"))
    long, short = sound_of(3.0, rules), sound_of(0.7716, rules)
    for medium in (long, short):
        expected, lengths = whisper(medium)
        ours = features.mel(medium, rules)
        assert ours.shape == expected[0].shape and ours.shape[1] == lengths[0]
        assert np.abs(ours - expected[0]).max() <= 1e-5
    batch, _ = whisper(long, short)
    ours = features.mel(short, rules)
    # The windows of the last two frames contain padding zeros of the batch.
    inside = (short.data.size - rules.window // 2) // rules.hop
    assert np.abs(batch[1][:, :inside] - ours[:, :inside]).max() <= 1e-5


FILTERS = """
import sys
from relax_hpc.data.multimodal.features import mel_filters
filters = mel_filters(16000, 400, 128)
print("librosa.filters" in sys.modules, hash(filters.tobytes()))
"""


def filters_of_processes(folder: Path, count: int) -> list[str]:
    """Outputs of `count` concurrent processes: whether librosa was imported, and a filter hash."""
    environment = os.environ | {"RELAX_LOCAL_DIR": str(folder), "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-c", FILTERS]
    started = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(count)
    ]
    return [process.communicate(timeout=120)[0] for process in started]


def test_filters_are_computed_once_per_node(tmp_path: Path) -> None:
    outputs = filters_of_processes(tmp_path / "node", 3)
    assert sorted(line.split()[0] for line in outputs) == ["False", "False", "True"]
    assert len({line.split()[1] for line in outputs}) == 1
    (cache_file,) = (tmp_path / "node/mel").glob("*.npy")
    cache_file.write_bytes(cache_file.read_bytes()[:500])
    (recomputed,) = filters_of_processes(tmp_path / "node", 1)
    assert recomputed == next(line for line in outputs if line.startswith("True"))


def test_filters_need_no_local_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = features._compute_filters(16000, 400, 80)
    (tmp_path / "file").touch()
    monkeypatch.setenv("RELAX_LOCAL_DIR", str(tmp_path / "file"))
    assert (features.mel_filters.__wrapped__(16000, 400, 80) == expected).all()
    monkeypatch.setenv("RELAX_LOCAL_DIR", str(tmp_path / "node"))
    monkeypatch.setattr(features, "_LOCK_S", 0.1)
    (tmp_path / "node/mel").mkdir(parents=True)
    with (tmp_path / "node/mel/lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert (features.mel_filters.__wrapped__(16000, 400, 80) == expected).all()
    assert not list((tmp_path / "node/mel").glob("*.npy"))


@given(st.integers(1, 100_000))
def test_the_token_count_of_a_sound_equals_that_of_the_tower(frames: int) -> None:
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
        _get_feat_extract_output_lengths,
    )

    assert sound_tokens(frames) == int(_get_feat_extract_output_lengths(torch.tensor(frames)))


VISION_START, IMAGE, VIDEO, VISION_END, AUDIO_START, AUDIO, AUDIO_END, TEXT = (
    7,
    1,
    2,
    8,
    9,
    3,
    10,
    50,
)
CONFIG = SimpleNamespace(
    image_token_id=IMAGE,
    video_token_id=VIDEO,
    audio_token_id=AUDIO,
    vision_start_token_id=VISION_START,
    audio_start_token_id=AUDIO_START,
    position_id_per_seconds=13,
    vision_config=SimpleNamespace(spatial_merge_size=2),
)
PLACEHOLDERS = {IMAGE: "image", VIDEO: "video", AUDIO: "audio"}


def spans_of(ids: list[int], names: dict[str, list[str]]) -> list[dict[str, Any]]:
    """Spans of placeholders in `ids`. Each run of placeholders is the next medium of its kind."""
    order = {kind: iter(of_kind) for kind, of_kind in names.items()}
    spans, position = [], 0
    for token, run in itertools.groupby(ids):
        length = len(list(run))
        if kind := PLACEHOLDERS.get(token):
            spans.append(
                {"kind": kind, "start": position, "length": length, "media_id": next(order[kind])}
            )
        position += length
    return spans


def test_positions_of_images_and_videos_equal_those_of_qwen3_vl() -> None:
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

    media = {
        "wide": Header(Kind.IMAGE, (1, 4, 12)),
        "high": Header(Kind.IMAGE, (1, 8, 4)),
        "clip": Header(Kind.VIDEO, (3, 4, 6), (0.25, 1.25, 2.25)),
    }
    frame = [TEXT, TEXT, VISION_START, *[VIDEO] * 6, VISION_END]
    ids = [
        TEXT,
        VISION_START,
        *[IMAGE] * 12,
        VISION_END,
        *frame * 3,
        TEXT,
        VISION_START,
        *[IMAGE] * 8,
        VISION_END,
        TEXT,
    ]
    tokens = torch.tensor([ids])
    model = SimpleNamespace(
        config=CONFIG,
        get_vision_position_ids=Qwen3VLModel.get_vision_position_ids.__get__(object()),
    )
    expected, _ = Qwen3VLModel.get_rope_index(
        model,
        tokens,
        tokens * (tokens < 3),
        torch.tensor([[1, 4, 12], [1, 8, 4]]),
        torch.tensor([[3, 4, 6]]),
    )
    spans = spans_of(ids, {"image": ["wide", "high"], "video": ["clip"] * 3})
    assert np.array_equal(positions(len(ids), spans, media, Rules()), expected[:, 0].numpy())


def omni_positions(ids: list[int], seconds_apart: float, with_sound: bool) -> np.ndarray:
    """Positions of transformers for the media of the tests below.

    `seconds_apart` is the time between temporal patches.
    """
    from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as omni

    base = omni.Qwen3OmniMoePreTrainedModelForConditionalGeneration
    model = SimpleNamespace(config=CONFIG, spatial_merge_size=2)
    model.get_llm_pos_ids_for_vision = base.get_llm_pos_ids_for_vision.__get__(model)
    tokens = torch.tensor([ids])
    rope_positions, _ = base.get_rope_index(
        model,
        tokens,
        torch.tensor([[1, 6, 8]]),
        torch.tensor([[3, 4, 6]]),
        torch.ones_like(tokens),
        with_sound,
        torch.tensor([250] if with_sound else [250, 90]),
        torch.tensor([seconds_apart]),
    )
    return rope_positions[:, 0].numpy()


def test_positions_of_all_kinds_equal_those_of_qwen3_omni(tmp_path: Path) -> None:
    rules = Rules.from_model(model_files(tmp_path, "qwen3_omni_moe"))
    media = {
        "picture": Header(Kind.IMAGE, (1, 6, 8)),
        "clip": Header(Kind.VIDEO, (3, 4, 6), (0.0, 1.0, 2.0)),
        "speech": Header(Kind.AUDIO, (1, 1, 250)),
        "beep": Header(Kind.AUDIO, (1, 1, 90)),
    }
    speech, beep = (
        [AUDIO_START, *[AUDIO] * sound_tokens(frames), AUDIO_END] for frames in (250, 90)
    )
    picture_ids = [VISION_START, *[IMAGE] * 12, VISION_END]
    ids = [
        TEXT,
        *speech,
        TEXT,
        *picture_ids,
        VISION_START,
        *[VIDEO] * 18,
        VISION_END,
        TEXT,
        *beep,
        TEXT,
    ]
    spans = spans_of(ids, {"image": ["picture"], "video": ["clip"], "audio": ["speech", "beep"]})
    assert np.array_equal(positions(len(ids), spans, media, rules), omni_positions(ids, 1.0, False))


def test_positions_of_a_video_with_sound_equal_those_of_qwen3_omni(tmp_path: Path) -> None:
    rules = Rules.from_model(model_files(tmp_path, "qwen3_omni_moe"))
    for seconds_apart in (1.0, 2.0):
        media = {
            "picture": Header(Kind.IMAGE, (1, 6, 8)),
            "video": Header(
                Kind.VIDEO, (3, 4, 6), tuple(seconds_apart * number for number in range(3))
            ),
            "audio": Header(Kind.AUDIO, (1, 1, 250)),
        }
        ids = [TEXT, VISION_START, *[IMAGE] * 12, VISION_END, TEXT, VISION_START, AUDIO_START]
        spans = spans_of(ids, {"image": ["picture"]})
        for kind, count in runs_with_sound(media["video"], media["audio"], rules):
            spans.append({"kind": kind, "start": len(ids), "length": count, "media_id": str(kind)})
            ids += [VIDEO if kind is Kind.VIDEO else AUDIO] * count
        ids += [AUDIO_END, VISION_END, TEXT]
        assert np.array_equal(
            positions(len(ids), spans, media, rules), omni_positions(ids, seconds_apart, True)
        )


def test_a_missing_medium_or_another_token_count_is_refused() -> None:
    media = {"one": Header(Kind.IMAGE, (1, 4, 4))}
    span = {"kind": "image", "start": 0, "length": 4, "media_id": "one"}
    assert positions(4, [span], media, Rules())[1].tolist() == [0, 0, 1, 1]
    for wrong in ({"media_id": "two"}, {"length": 5}):
        with pytest.raises(UnusableMedium, match="media_mismatch"):
            positions(8, [span | wrong], media, Rules())


def test_an_image_that_occurs_twice_has_positions_twice() -> None:
    media = {"one": Header(Kind.IMAGE, (1, 4, 4))}
    spans = [{"kind": "image", "start": start, "length": 4, "media_id": "one"} for start in (0, 5)]
    placed = positions(9, spans, media, Rules())
    assert np.array_equal(placed[:, 5:], placed[:, :4] + 3)


def test_transparent_16_bit_and_rotated_images_have_the_pixels_of_a_viewer() -> None:
    rules = Rules(image=Budget(1024, 1 << 20))
    clear = Image.new("RGBA", (64, 32), (255, 0, 0, 0))
    assert (image.load(encoded(clear), rules).data == 255).all()
    deep = Image.fromarray(np.full((32, 64), 40000, np.uint16))
    assert (image.load(encoded(deep), rules).data == 40000 // 257).all()
    whole, exif = picture(32, 96), Image.Exif()
    for orientation, turned in ((6, -90), (3, 180), (8, 90)):
        exif[0x0112] = orientation
        medium = image.load(encoded(whole, exif=exif), rules)
        assert np.array_equal(medium.data, np.asarray(whole.rotate(turned, expand=True)))
        assert image.header(encoded(whole, exif=exif), rules) == medium.header
