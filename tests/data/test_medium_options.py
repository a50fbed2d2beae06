"""Options of media in content parts mean the same as in qwen-vl-utils; unknown ones are refused."""

from __future__ import annotations

import base64
import functools
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image

from relax_hpc.config.schema import DataConfig, TinyModelConfig
from relax_hpc.data.multimodal.bad_media import UnusableMedium
from relax_hpc.data.multimodal.loading import header, load
from relax_hpc.data.multimodal.medium import Kind
from relax_hpc.data.multimodal.options import MediumOptions, with_options
from relax_hpc.data.multimodal.rules import Rules
from relax_hpc.data.named_media import MediumReference, reference_in
from relax_hpc.data.prompts import Prompt, PromptRules
from relax_hpc.data.rows import BadLine
from relax_hpc.data.tokenizer import load_tokenizer
from relax_hpc.training.models.tiny_model import make_tiny_model
from tests.data.ffmpeg_reference import H264, decoded_frames, make_file, moving
from tests.effort import effort
from tests.helpers.media_prompts import png
from tests.requirements import requires

requires("torch")

PATCH = 16
RULES = Rules()
PIXELS = st.integers(1 << 14, 1 << 22)
SIDE = st.integers(1, 3000)


@functools.cache
def vision_process() -> Any:
    """`qwen_vl_utils.vision_process`. The torchvision of PyPI does not load with a CPU build of
    torch; these tests use no function that needs it."""
    requires("qwen_vl_utils")
    names = ("torchvision", "torchvision.io", "torchvision.transforms")
    modules_before = {name: sys.modules.get(name) for name in names}
    for name in names:
        sys.modules[name] = ModuleType(name)
    sys.modules["torchvision"].io = sys.modules["torchvision.io"]  # type: ignore[attr-defined]
    sys.modules["torchvision"].transforms = sys.modules["torchvision.transforms"]  # type: ignore[attr-defined]
    sys.modules["torchvision.transforms"].InterpolationMode = object  # type: ignore[attr-defined]
    try:
        return importlib.import_module("qwen_vl_utils.vision_process")
    finally:
        for name, module in modules_before.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module


def some_options(**options: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Dictionaries with some of `options`."""
    return st.fixed_dictionaries({}, optional=options)


@settings(max_examples=effort(200, 5000), deadline=None)
@given(
    size=st.tuples(SIDE, SIDE),
    options=some_options(
        min_pixels=PIXELS, max_pixels=PIXELS, resized_height=SIDE, resized_width=SIDE
    ),
)
def test_sizes_of_images_equal_those_of_qwen_vl_utils(
    size: tuple[int, int], options: dict[str, Any]
) -> None:
    assume(options and ("resized_height" in options) == ("resized_width" in options))
    height, width = size
    # qwen-vl-utils refuses such an image. relax_hpc reduces its longer side.
    assume(max(size) <= 200 * min(size))
    low, high = options.get("min_pixels", 4 * 1024), options.get("max_pixels", 16384 * 1024)
    assume(low <= high)
    rules = with_options(RULES, MediumOptions.from_mapping(Kind.IMAGE, options))
    if "resized_height" in options:
        sides = options["resized_height"], options["resized_width"]
        assume(max(sides) <= 200 * min(sides))
    picture = Image.new("1", (width, height)).convert("L")
    try:
        expected = vision_process().fetch_image(
            {"image": picture, **options}, image_patch_size=PATCH
        )
    except ValueError:
        # In qwen-vl-utils one side is 0. In relax_hpc it has the size of a token.
        assert 32 in rules.image_size(size)
        return
    assert rules.image_size(size) == (expected.height, expected.width)


@settings(max_examples=effort(200, 5000), deadline=None)
@given(
    total=st.integers(2, 4000),
    native_fps=st.sampled_from([5.0, 23.976, 25.0, 29.97, 60.0]),
    options=some_options(
        fps=st.sampled_from([0.5, 1, 2.0, 7.5]),
        nframes=st.integers(1, 64),
        min_frames=st.integers(1, 16),
        max_frames=st.integers(1, 900),
        video_start=st.floats(0, 100).map(lambda s: round(s, 2)),
        video_end=st.floats(0.01, 100).map(lambda s: round(s, 2)),
    ),
)
def test_frames_of_a_video_equal_those_of_qwen_vl_utils(
    total: int, native_fps: float, options: dict[str, Any]
) -> None:
    import torch

    assume(options and not ("fps" in options and "nframes" in options))
    rules = with_options(RULES, MediumOptions.from_mapping(Kind.VIDEO, options))
    try:
        first, last, count = vision_process().calculate_video_frame_range(
            options, total, native_fps
        )
        frames = vision_process().smart_nframes(options, count, native_fps)
    except ValueError:
        with pytest.raises(UnusableMedium, match="bad_option"):
            rules.frames(total, native_fps)
        return
    expected = torch.linspace(first, last, frames).round().long().tolist()
    # qwen-vl-utils computes in float32 and relax_hpc in float64, so halves can round differently.
    assert np.abs(rules.frames(total, native_fps) - np.array(expected)).max() <= 1
    assert len(rules.frames(total, native_fps)) == frames


@settings(max_examples=effort(100, 2000), deadline=None)
@given(
    size=st.tuples(st.integers(32, 1200), st.integers(32, 1200)),
    frames=st.integers(2, 64).map(lambda half: 2 * half),
    options=some_options(
        min_pixels=PIXELS, max_pixels=PIXELS, total_pixels=st.integers(1 << 18, 1 << 26)
    ),
)
def test_sizes_of_frames_equal_those_of_qwen_vl_utils(
    size: tuple[int, int], frames: int, options: dict[str, Any]
) -> None:
    assume(options)
    token = 32 * 32
    low = options.get("min_pixels", 128 * token)
    high = max(
        min(768 * token, options.get("total_pixels", 128000 * token * 0.9) / frames * 2),
        int(low * 1.05),
    )
    high = min(options.get("max_pixels", high), high)
    assume(low <= high and max(size) <= 200 * min(size))
    rules = with_options(RULES, MediumOptions.from_mapping(Kind.VIDEO, options))
    expected = vision_process().smart_resize(*size, 32, low, high)
    # If one side is 0 in qwen-vl-utils, it has the size of a token in relax_hpc.
    assert rules.frame_size(size, frames) == (max(32, expected[0]), max(32, expected[1]))


def test_times_of_a_clip_are_relative_to_the_whole_video() -> None:
    rules = with_options(RULES, MediumOptions(video_start=2.0, video_end=4.0, nframes=4))
    frames = rules.frames(100, 10.0)
    assert frames.tolist() == [20, 27, 33, 40]
    assert rules.times(frames, 100, 10.0) == pytest.approx((2.35, 3.65))


@pytest.mark.parametrize(
    "options", [{}, {"video_start": 0.48}, {"video_start": 0.5, "video_end": 1.2, "nframes": 6}]
)
def test_frames_of_a_file_follow_the_options(options: dict[str, Any], tmp_path: Path) -> None:
    """This holds too if the first frame of the file is not used."""
    requires("ffmpeg")
    path = make_file(tmp_path / "v.mp4", moving("128x96", "25", 48), H264)
    resized = {"resized_height": 96, "resized_width": 128}
    rules = with_options(RULES, MediumOptions.from_mapping(Kind.VIDEO, {**resized, **options}))
    expected = np.stack(decoded_frames(path))[rules.frames(48, 25.0)]
    video = load(Kind.VIDEO, path, rules)
    assert header(Kind.VIDEO, path, rules).grid == video.grid
    assert video.data.shape == expected.shape
    assert np.abs(video.data.astype(int) - expected).mean(axis=(1, 2, 3)).max() < 1
    assert bool((rules.frames(48, 25.0) == 0).any()) != bool("video_start" in options)


URI = "data:image/png;base64," + base64.b64encode(png()).decode()
RAW = base64.b64encode(png()).decode()


@pytest.mark.parametrize(
    ("content_part", "value"),
    [
        ({"type": "image", "image": "p.png"}, "p.png"),
        ({"type": "image", "url": "p.png"}, "p.png"),
        ({"type": "image", "path": "p.png", "text": None}, "p.png"),
        ({"type": "image", "base64": RAW}, f"data:;base64,{RAW}"),
        ({"type": "image", "bytes": b"x"}, b"x"),
        ({"image": "p.png"}, "p.png"),
        ({"type": "image_url", "image_url": {"url": URI, "detail": "auto"}}, URI),
        ({"type": "image_url", "image_url": URI}, URI),
        ({"type": "input_image", "image_url": URI, "detail": "high"}, URI),
        (
            {
                "type": "image",
                "source": {"type": "base64", "media_type": "image/png", "data": RAW},
                "cache_control": {},
            },
            f"data:;base64,{RAW}",
        ),
        ({"type": "image", "image": {"bytes": b"x", "path": "old.png"}}, b"x"),
        ({"type": "image"}, None),
    ],
)
def test_every_form_of_an_image_part_is_read(content_part: dict[str, Any], value: Any) -> None:
    assert reference_in(Kind.IMAGE, content_part) == MediumReference(value)


def test_the_openai_form_of_a_sound_part_is_read() -> None:
    content_part = {"type": "input_audio", "input_audio": {"data": RAW, "format": "wav"}}
    assert reference_in(Kind.AUDIO, content_part) == MediumReference(f"data:;base64,{RAW}")


@pytest.mark.parametrize(
    ("kind", "content_part", "expected"),
    [
        (Kind.IMAGE, {"image": "p.png", "fps": 2}, "image: found 'fps', allowed: min_pixels"),
        (
            Kind.AUDIO,
            {"audio": "a.wav", "sampling_rate": 8000},
            "audio: found 'sampling_rate', allowed: none",
        ),
        (Kind.IMAGE, {"image": "p.png", "image_url": URI}, "found 2 contents in one part"),
        (
            Kind.IMAGE,
            {"image_url": {"url": URI, "detail": "low"}},
            "detail: found 'low', allowed: auto, high",
        ),
        (Kind.IMAGE, {"source": {"type": "file", "file_id": "f1"}}, "image: found 'file_id'"),
        (
            Kind.IMAGE,
            {"image": "p.png", "max_pixels": "many"},
            "max_pixels: found 'many', allowed: a number",
        ),
        (
            Kind.IMAGE,
            {"image": "p.png", "max_pixels": 0},
            "max_pixels: found '0', allowed: a positive number",
        ),
        (
            Kind.IMAGE,
            {"image": "p.png", "resized_height": 64},
            "resized_height and resized_width: found one",
        ),
        (Kind.VIDEO, {"video": "v.mp4", "fps": 2, "nframes": 4}, "fps and nframes: found both"),
        (
            Kind.VIDEO,
            {"video": "v.mp4", "video_start": -1},
            "video_start: found '-1', allowed: a positive number",
        ),
    ],
)
def test_unknown_or_wrong_options_of_a_part_are_refused(
    kind: Kind, content_part: dict[str, Any], expected: str
) -> None:
    with pytest.raises(UnusableMedium) as caught:
        reference_in(kind, content_part)
    assert expected in str(caught.value)


def test_options_of_images_determine_the_tokens_of_a_prompt(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "m", TinyModelConfig(vision_layers=2, chat=True), 0)
    (tmp_path / "big.png").write_bytes(png(512, 512))
    tokenizer = load_tokenizer(tmp_path / "m")
    rules = PromptRules.from_config(
        DataConfig(chat_template="model", max_prompt_tokens=4096), tokenizer, tmp_path
    )
    content_parts = [
        {"type": "image", "image": "big.png"},
        {"type": "image", "image": "big.png", "max_pixels": 16384},
        {"type": "image", "image": "big.png", "resized_height": 64, "resized_width": 128},
        {"type": "image", "image": "big.png", "colour": "grey"},
    ]
    with rules.rendering():
        results = [
            rules.parse_row(
                1,
                {
                    "id": "1",
                    "messages": [{"role": "user", "content": [content_part]}],
                    "answer": "1",
                },
                tokenizer,
            )
            for content_part in content_parts
        ]
    assert [
        sum(medium.tokens for medium in prompt.media)
        for prompt in results
        if isinstance(prompt, Prompt)
    ] == [256, 16, 8]
    assert isinstance(results[3], BadLine) and (
        results[3].reason,
        "'colour'" in results[3].detail,
    ) == (
        "bad_option",
        True,
    )
