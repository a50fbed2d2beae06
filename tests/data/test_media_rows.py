"""Rows with media: how they name files, placeholders of their prompts, and reasons of bad rows."""

from __future__ import annotations

import base64
import functools
import json
import os
import re
import tracemalloc
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_hpc.base.errors import ConfigError
from relax_hpc.config.schema import Config, DataConfig, ModelConfig, MultimodalConfig
from relax_hpc.data.media import MediaRules, read_placeholder_tokens, spans_of
from relax_hpc.data.multimodal.bad_media import UnusableMedium
from relax_hpc.data.multimodal.image import load
from relax_hpc.data.multimodal.medium import Kind
from relax_hpc.data.named_media import source_of, split_at_marks
from relax_hpc.data.prompt_file import open_prompts
from relax_hpc.data.prompts import Prompt, PromptRules
from relax_hpc.data.rows import BadLine, data_uri
from relax_hpc.data.tokenizer import Tokenizer, load_tokenizer
from relax_hpc.examples.tasks.moving_squares import filmed
from relax_hpc.ops.checks.files import read_prompts
from relax_hpc.ops.doctor.media import check_media
from relax_hpc.tasks import get_task
from tests.helpers.media_files import CRASHES, HANGS, avi, clip, have_own_pillow, tone
from tests.helpers.media_prompts import END, IMAGE, START, VIDEO, hearing_model, png, seeing_model
from tests.helpers.prompt_helpers import load_prompts, row_set
from tests.requirements import requires

requires("pyarrow")

DATA = DataConfig(max_prompt_tokens=64)
HEARS = "qwen3_omni_moe, qwen3_omni_moe_thinker"
URI = f"data:image/png;base64,{base64.b64encode(png()).decode()}"
FOUR = [START, *[IMAGE] * 4, END]
"""Placeholder tokens for an image of 64 x 64 pixels."""
CHAT = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in "
    "m.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else "
    "%}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(seeing_model(tmp_path_factory.mktemp("model") / "m"))


def read(
    rows: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, folder: Path, **data: Any
) -> tuple[list[Prompt], list[BadLine]]:
    """Prompts and bad lines of a file of `rows`; `folder` also has an image of 96 x 64 pixels."""
    (folder / "pictures").mkdir(exist_ok=True)
    (folder / "pictures" / "one.png").write_bytes(png(96, 64))
    path = folder / "rows.jsonl"
    complete_rows = ({"id": str(number), "answer": "a", **row} for number, row in enumerate(rows))
    path.write_text("".join(f"{json.dumps(row)}\n" for row in complete_rows))
    rules = PromptRules.from_config(DataConfig(max_prompt_tokens=64, **data), tokenizer, folder)
    return load_prompts(path, tokenizer, rules, 1.0)


def test_a_medium_is_a_path_a_file_a_data_uri_or_bytes(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    file = (tmp_path / "pictures" / "one.png").as_uri()
    rows = [
        {"prompt": "<image>?", "images": value}
        for value in (["pictures/one.png"], file, {"path": file}, [URI])
    ]
    (path, uri, mapping, data), bad = read(rows, tokenizer, tmp_path)
    assert not bad and path.media[0].source == uri.media[0].source == mapping.media[0].source
    assert data.media[0].source == png()
    question = tokenizer.encode("?", special=False)
    assert list(path.token_ids) == [*tokenizer.encode(""), START, *[IMAGE] * 6, END, *question]
    assert list(data.token_ids) == [*tokenizer.encode(""), *FOUR, *question] and data.media[
        0
    ].spans == ((2, 4),)


def test_bytes_of_media_in_parquet_are_read_as_datasets_writes_them(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    import pyarrow as arrow
    from pyarrow import parquet

    columns = {"id": ["a", "b"], "prompt": ["<image>"] * 2, "answer": ["x"] * 2}
    columns["picture"] = [
        {"bytes": png(), "path": None},
        {"bytes": png(seed=1), "path": "lost.png"},
    ]
    parquet.write_table(arrow.table(columns), tmp_path / "rows.parquet")
    rules = PromptRules.from_config(
        DataConfig(multimodal_keys={"image": "picture"}), tokenizer, tmp_path
    )
    prompts = open_prompts(tmp_path / "rows.parquet", tmp_path / "index", tokenizer, rules, 0.0)
    assert [prompt.media[0].source for prompt in prompts] == [png(), png(seed=1)]


def test_content_parts_and_marks_become_placeholders(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text(CHAT)
    content_parts = [
        {"type": "text", "text": "a<image>b"},
        {"type": "image_url", "image_url": {"url": URI}},
        {"type": "image"},
    ]
    rows = [
        {
            "messages": [{"role": "user", "content": content_parts}],
            "images": ["pictures/one.png", URI],
        },
        {"messages": [{"role": "user", "content": "x<image>"}], "images": [URI]},
        {"messages": [{"role": "user", "content": "x<image>"}]},
        {"prompt": "<image>y", "images": [URI]},
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "audio", "audio": "a.wav"}, {"type": "text", "text": "z"}],
                }
            ]
        },
    ]
    prompts, bad = read(rows, tokenizer, tmp_path, chat_template=str(tmp_path / "chat.jinja"))
    assert [(line.line, line.reason) for line in bad] == [(5, "kind_not_taken")]
    assert [[medium.tokens for medium in prompt.media] for prompt in prompts] == [
        [6, 4, 4],
        [4],
        [],
        [4],
    ]
    first = prompts[0]
    assert [first.media[0].source, first.media[2].source] == [
        tmp_path / "pictures" / "one.png",
        png(),
    ]
    for medium in first.media:
        ((start, length),) = medium.spans
        assert first.token_ids[start - 1] == START and first.token_ids[start + length] == END
        assert set(first.token_ids[start : start + length]) == {IMAGE}
    # A mark is text in a row that names no image.
    assert prompts[2].text == "x<image>" and IMAGE not in prompts[2].token_ids


def test_tokens_have_one_placeholder_for_each_medium(tokenizer: Tokenizer, tmp_path: Path) -> None:
    rows = [
        {
            "token_ids": [1, START, IMAGE, END, 9, IMAGE],
            "images": [URI, "pictures/one.png"],
            "level": 3,
        }
    ]
    (prompt,), _ = read(rows, tokenizer, tmp_path)
    assert list(prompt.token_ids) == [1, *FOUR, 9, *[IMAGE] * 6]
    assert [medium.spans for medium in prompt.media] == [((2, 4),), ((8, 6),)]
    assert prompt.metadata == {"level": 3}


def test_bad_rows_are_reported_with_line_and_reason(tokenizer: Tokenizer, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "<image>?", "images": ["pictures/none.png"]},
        {"prompt": "<image>?", "images": [URI, URI]},
        {"prompt": "no place", "images": [URI]},
        {"prompt": "<image>?", "images": ["https://example.org/a.png"]},
        {"prompt": "<image>?", "images": ["data:image/png;base64,?"]},
        {"prompt": "<image>?", "images": [7]},
        {"prompt": "<image>?", "images": ["rows.jsonl"]},
        {"token_ids": [1, IMAGE]},
        {"prompt": "<image>" * 20, "images": [URI] * 20},
        {"prompt": "<audio>?", "audios": ["a.wav"]},
        {"prompt": "sound <audio>", "images": [], "audios": []},
    ]
    good, bad = read(rows, tokenizer, tmp_path)
    reasons = {line.line: line.reason for line in bad}
    assert reasons == {
        1: "missing_file",
        **dict.fromkeys((2, 3, 8), "media_mismatch"),
        **dict.fromkeys((4, 5, 6), "bad_uri"),
        7: "mislabelled",
        9: "over_long",
        10: "kind_not_taken",
    }
    assert bad[9].detail.startswith(
        "found audios, which this model does not take; allowed with model_type " + HEARS
    )
    assert bad[9].detail.endswith(
        "data.multimodal_keys: {audio: ''} says that column 'audios' is something else"
    )
    # A mark is text in a row that names no medium.
    assert len(good) == 1 and not good[0].media
    config = Config(data=DATA)
    problem = read_prompts(row_set(tmp_path / "rows.jsonl"), tokenizer, config).problem(DATA)
    assert "missing_file (first line 1: " in problem and "pictures/none.png" in problem


@pytest.mark.timeout(60)
def test_a_row_with_an_unreadable_file_name_is_reported(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "zeros.png").symlink_to("/dev/zero")
    names = [
        "pipe.png",
        "zeros.png",
        "pictures",
        "x" * 5000,
        "a\0b",
        "file://[x",
        "file:///\0",
        "data:,",
        "data:",
        "\ud83d",
    ]
    rows = [{"prompt": "<image>?", "images": [name]} for name in (*names, URI)]
    good, bad = read(rows, tokenizer, tmp_path)
    assert len(good) == 1 and [line.line for line in bad] == [*range(1, len(names) + 1)]
    assert {line.reason for line in bad} == {"missing_file", "bad_uri", "broken_json"}


def test_a_long_data_uri_is_refused_before_it_is_decoded(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    content = base64.b64encode(bytes(20_000_000)).decode()
    rows = [
        {"prompt": "<image>?", "images": [f"data:image/png;base64,{content}"]},
        {"prompt": "<image>?", "images": [URI]},
    ]
    limits = MultimodalConfig(max_file_mb=1)
    tracemalloc.start()
    try:
        with pytest.raises(UnusableMedium, match="large_file: 1999999"):
            source_of(rows[0]["images"][0], tmp_path, 1_000_000)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    good, bad = read(rows, tokenizer, tmp_path, multimodal=limits)
    assert len(good) == 1 and [(line.line, line.reason) for line in bad] == [(1, "large_file")]
    for size in range(9):
        uri = f"data:;base64,{base64.b64encode(bytes(size)).decode()}"
        assert source_of(uri, tmp_path, size) == bytes(size)
        with pytest.raises(UnusableMedium):
            source_of(uri, tmp_path, size - 3)


def test_the_index_reads_only_the_header_of_an_image(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "cut.png").write_bytes(png()[:200])
    (prompt,), bad = read([{"prompt": "<image>", "images": ["cut.png"]}], tokenizer, tmp_path)
    assert not bad and prompt.media[0].tokens == 4
    media_rules = PromptRules.from_config(DATA, tokenizer, tmp_path).media
    assert isinstance(media_rules, MediaRules)
    with pytest.raises(UnusableMedium):
        load(prompt.media[0].source, media_rules.rules)


def test_the_doctor_decodes_media_completely(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "cut.png").write_bytes(png()[:200])
    rows = [{"prompt": "<image>", "images": [name]} for name in (URI, "cut.png", "gone.png")] + [
        {"prompt": "text"}
    ]
    read(rows, tokenizer, tmp_path)
    data = DataConfig(max_prompt_tokens=64, max_bad_share=0.5, train=str(tmp_path / "rows.jsonl"))
    config = Config(model=ModelConfig(path=str(tokenizer.directory)), data=data)
    assert read_prompts(row_set(data.train), tokenizer, config).tally.counts == {"missing_file": 1}
    (finding,) = check_media(config)
    assert finding.severity == "warning"
    assert re.match(
        r"data\.train: media of 2 of 4 rows .* line 2: truncated: .*; line 3: missing_file: ",
        finding.text,
    )
    data.max_bad_share = 0.4
    assert [finding.severity for finding in check_media(config)] == ["error"]
    read(rows[:1], tokenizer, tmp_path)
    assert [finding.text for finding in check_media(config)] == [
        "data.train: 1 media of 1 rows were decoded"
    ]


def test_a_file_removed_after_indexing_fails_only_its_prompt(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    rows = [
        {"id": "a", "prompt": "<image>", "answer": "x", "images": [name]} for name in ("one.png",)
    ]
    rows.append({"id": "b", "prompt": "b", "answer": "x", "images": []})
    (tmp_path / "one.png").write_bytes(png())
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    rules = PromptRules.from_config(DATA, tokenizer, tmp_path)
    prompts = open_prompts(tmp_path / "rows.jsonl", tmp_path / "index", tokenizer, rules, 0.0)
    (tmp_path / "one.png").unlink()
    missing_image, text = prompts
    assert missing_image.prompt_id == "a" and not text.media_error
    assert missing_image.media_error and missing_image.media_error.reason == "missing_file"


def test_a_file_that_kills_its_decoder_fails_only_its_row(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When an index is built, when a configuration is checked, and when a prompt is read."""
    have_own_pillow(tmp_path, monkeypatch)
    sizes = {"hangs": HANGS, "good": 32, "crashes": CRASHES, "later": 36}
    for name, width in sizes.items():
        (tmp_path / f"{name}.png").write_bytes(png(32, width))
    rows = [
        {"id": name, "prompt": "<image>", "answer": "x", "images": [f"{name}.png"]}
        for name in sizes
    ]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    data = DataConfig(
        max_prompt_tokens=64, max_bad_share=0.5, multimodal=MultimodalConfig(file_timeout_s=8.0)
    )
    rules = PromptRules.from_config(data, tokenizer, tmp_path)
    prompts = open_prompts(tmp_path / "rows.jsonl", tmp_path / "index", tokenizer, rules, 0.5)
    assert {bad.line: bad.reason for bad in prompts.bad} == {1: "decoder_hung", 3: "decoder_died"}
    checked = read_prompts(row_set(tmp_path / "rows.jsonl"), tokenizer, Config(data=data)).tally
    assert checked.counts == {"decoder_hung": 1, "decoder_died": 1} and checked.rows == 4
    (tmp_path / "later.png").write_bytes(png(32, CRASHES))
    good, later = prompts
    assert not good.media_error and later.media_error and later.media_error.reason == "decoder_died"


def test_a_video_has_a_time_stamp_before_each_temporal_patch(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """The time stamps are between the tokens that the template writes around a placeholder."""
    uri = data_uri(filmed("film")[0], "video/x-msvideo")
    (prompt,), bad = read(
        [{"prompt": "<video>?<image>", "videos": [uri], "images": [URI]}], tokenizer, tmp_path
    )
    assert not bad

    def stamped(seconds: str) -> list[int]:
        return [*tokenizer.encode(f"<{seconds} seconds>", special=False), START, *[VIDEO] * 4, END]

    question = tokenizer.encode("?", special=False)
    expected = [
        *tokenizer.encode(""),
        START,
        *stamped("0.2"),
        *stamped("1.2"),
        END,
        *question,
        *FOUR,
    ]
    assert list(prompt.token_ids) == expected
    video, image = prompt.media
    assert (
        [length for _, length in video.spans] == [4, 4] and video.tokens == 8 and image.tokens == 4
    )
    assert all(set(prompt.token_ids[start : start + 4]) == {VIDEO} for start, _ in video.spans)


def test_use_audio_in_video_interleaves_sound_and_frames(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    hearing_tokenizer = load_tokenizer(hearing_model(tmp_path / "omni"))
    loud, silent = (
        avi(clip(20, 64, 64), 10, tone(2) if sound else None) for sound in (True, False)
    )
    rows = [
        {"prompt": "<video>?", "videos": [data_uri(film, "video/x-msvideo")]}
        for film in (loud, silent)
    ]
    media_settings = MultimodalConfig(
        use_audio_in_video=True, audio_sample_rate=16000, video_max_token_num=4
    )
    (with_sound, silent_video), bad = read(
        rows, hearing_tokenizer, tmp_path, multimodal=media_settings
    )
    assert not bad
    assert [medium.kind for medium in with_sound.media] == ["video", "audio"]
    assert [medium.kind for medium in silent_video.media] == ["video"]
    placeholders = read_placeholder_tokens(hearing_tokenizer.directory)
    video, audio = placeholders[Kind.VIDEO], placeholders[Kind.AUDIO]
    text_length = len(hearing_tokenizer.encode(""))
    video_tokens = with_sound.token_ids[text_length + 2 : -3]
    assert with_sound.token_ids[text_length : text_length + 2] == (*video.before, *audio.before)
    assert with_sound.token_ids[-3:-1] == (*audio.after, *video.after)
    # 13 tokens for each of 2 s of sound, and 4 tokens for each of 2 pairs of frames.
    assert video_tokens.count(audio.placeholder) == 26
    assert video_tokens.count(video.placeholder) == 8 and len(video_tokens) == 34
    blob = tmp_path / "blob"
    spans = spans_of([replace(medium, blob=blob) for medium in with_sound.media])
    assert [span["kind"] for span in spans] == ["video", "audio", "video", "audio"]
    assert [span["start"] for span in spans] == sorted(span["start"] for span in spans)
    assert [with_sound.token_ids[span["start"]] for span in spans] == [
        video.placeholder,
        audio.placeholder,
    ] * 2
    with pytest.raises(
        ConfigError, match=r"use_audio_in_video: found true, allowed: false; .* does not hear"
    ):
        read(rows, tokenizer, tmp_path, multimodal=media_settings)
    with pytest.raises(ConfigError, match="audio_sample_rate: found 8000, allowed: 0, or 16000"):
        read(rows, hearing_tokenizer, tmp_path, multimodal=MultimodalConfig(audio_sample_rate=8000))


def test_a_text_model_has_no_media_rules(tokenizer: Tokenizer, tmp_path: Path) -> None:
    rules = PromptRules.from_config(DATA, None, tmp_path)
    assert rules.media is None


@given(st.lists(st.sampled_from(["<image>", "<video>", "a", "<", ""])))
def test_splitting_at_marks_keeps_all_text(text_pieces: list[str]) -> None:
    text = "".join(text_pieces)
    pieces = list(split_at_marks(text, {Kind.IMAGE: [URI]}))
    assert "".join(f"<{piece}>" if isinstance(piece, Kind) else piece for piece in pieces) == text
    assert pieces.count(Kind.IMAGE) == text.count("<image>")


def test_only_stored_media_have_spans(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (prompt,), _ = read([{"prompt": "<image>", "images": [URI]}], tokenizer, tmp_path)
    assert spans_of(prompt.media) == []


@pytest.mark.parametrize(
    "name",
    [
        "coloured_shapes:ColouredShapes",
        "moving_squares:MovingSquares",
        "beeps:Beeps",
        "beeps:Pitches",
        "mixed_media:MixedMedia",
    ],
)
def test_demonstrations_of_a_task_have_the_prompts_of_its_rows(name: str, tmp_path: Path) -> None:
    """Prompts of demonstrations, with their media, equal prompts of rows."""
    small_videos = {"multimodal": MultimodalConfig(video_min_token_num=4)}
    tokenizer, data = load_tokenizer(hearing_model(tmp_path / "m")), DataConfig(**small_videos)
    task = get_task(f"relax_hpc.examples.tasks.{name}")
    media_rules = PromptRules.from_config(data, tokenizer, tmp_path).media
    assert media_rules
    prompts, bad = read(
        list(islice(task.rows("train", DATA), 24)), tokenizer, tmp_path, **small_videos
    )
    assert not bad and len({prompt.prompt_id for prompt in prompts}) == 24

    def prompt_tokens(demonstration: dict[str, Any]) -> tuple[int, ...]:
        ids, prompt_length = demonstration["token_ids"], demonstration["prompt_len"]
        expanded, _ = media_rules.expand_placeholders(
            ids[:prompt_length],
            media_rules.take_columns(demonstration),
            functools.partial(tokenizer.encode, special=False),
        )
        return tuple(expanded)

    demonstrations = islice(task.demonstrations(DATA, tokenizer, 0.0, 1), 24)
    demonstrated = {prompt_tokens(demonstration) for demonstration in demonstrations}
    with_media = {prompt.token_ids for prompt in prompts if prompt.media}
    assert with_media and with_media <= demonstrated
    evaluation_ids: set[str] = set()
    for split in task.evaluations:
        evaluation_ids |= {row["id"] for row in task.rows(split, DATA)}
    assert not evaluation_ids & {row["id"] for row in islice(task.rows("train", DATA), 400)}
