"""Rows with media: where they may name them, what places a prompt has, and what is said of rows
that are none."""

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
"""Place for 64 x 64 pixels."""
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
    """Prompts and bad lines of a file of ``rows``, beside which lies one picture of 96 x 64
    pixels."""
    (folder / "pictures").mkdir(exist_ok=True)
    (folder / "pictures" / "one.png").write_bytes(png(96, 64))
    path = folder / "rows.jsonl"
    named = ({"id": str(number), "answer": "a", **row} for number, row in enumerate(rows))
    path.write_text("".join(f"{json.dumps(row)}\n" for row in named))
    how = PromptRules.from_config(DataConfig(max_prompt_tokens=64, **data), tokenizer, folder)
    return load_prompts(path, tokenizer, how, 1.0)


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


def test_parquet_holds_bytes_as_data_sets_do(tokenizer: Tokenizer, tmp_path: Path) -> None:
    import pyarrow as arrow
    from pyarrow import parquet

    columns = {"id": ["a", "b"], "prompt": ["<image>"] * 2, "answer": ["x"] * 2}
    columns["picture"] = [
        {"bytes": png(), "path": None},
        {"bytes": png(seed=1), "path": "lost.png"},
    ]
    parquet.write_table(arrow.table(columns), tmp_path / "rows.parquet")
    how = PromptRules.from_config(
        DataConfig(multimodal_keys={"image": "picture"}), tokenizer, tmp_path
    )
    found = open_prompts(tmp_path / "rows.parquet", tmp_path / "index", tokenizer, how, 0.0)
    assert [one.media[0].source for one in found] == [png(), png(seed=1)]


def test_parts_of_messages_and_marks_in_them_are_places(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / "chat.jinja").write_text(CHAT)
    parts = [
        {"type": "text", "text": "a<image>b"},
        {"type": "image_url", "image_url": {"url": URI}},
        {"type": "image"},
    ]
    rows = [
        {"messages": [{"role": "user", "content": parts}], "images": ["pictures/one.png", URI]},
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
    found, bad = read(rows, tokenizer, tmp_path, chat_template=str(tmp_path / "chat.jinja"))
    assert [(line.line, line.reason) for line in bad] == [(5, "kind_not_taken")]
    assert [[medium.tokens for medium in one.media] for one in found] == [[6, 4, 4], [4], [], [4]]
    first = found[0]
    assert [first.media[0].source, first.media[2].source] == [
        tmp_path / "pictures" / "one.png",
        png(),
    ]
    for medium in first.media:
        ((start, length),) = medium.spans
        assert first.token_ids[start - 1] == START and first.token_ids[start + length] == END
        assert set(first.token_ids[start : start + length]) == {IMAGE}
    # A mark is text in a row that names no image.
    assert found[2].text == "x<image>" and IMAGE not in found[2].token_ids


def test_tokens_have_one_placeholder_for_each_medium(tokenizer: Tokenizer, tmp_path: Path) -> None:
    rows = [
        {
            "token_ids": [1, START, IMAGE, END, 9, IMAGE],
            "images": [URI, "pictures/one.png"],
            "level": 3,
        }
    ]
    (found,), _ = read(rows, tokenizer, tmp_path)
    assert list(found.token_ids) == [1, *FOUR, 9, *[IMAGE] * 6]
    assert [medium.spans for medium in found.media] == [((2, 4),), ((8, 6),)]
    assert found.metadata == {"level": 3}


def test_bad_rows_are_named_by_line_and_reason(tokenizer: Tokenizer, tmp_path: Path) -> None:
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
def test_a_row_that_names_no_file_that_can_be_read_is_named(
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


def test_a_data_uri_is_refused_by_its_length_before_it_is_decoded(
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


def test_a_header_is_enough_for_the_index(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "cut.png").write_bytes(png()[:200])
    (found,), bad = read([{"prompt": "<image>", "images": ["cut.png"]}], tokenizer, tmp_path)
    assert not bad and found.media[0].tokens == 4
    how = PromptRules.from_config(DATA, tokenizer, tmp_path).media
    assert isinstance(how, MediaRules)
    with pytest.raises(UnusableMedium):
        load(found.media[0].source, how.rules)


def test_the_doctor_decodes_what_a_check_reads_the_header_of(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / "cut.png").write_bytes(png()[:200])
    rows = [{"prompt": "<image>", "images": [name]} for name in (URI, "cut.png", "gone.png")] + [
        {"prompt": "text"}
    ]
    read(rows, tokenizer, tmp_path)
    data = DataConfig(max_prompt_tokens=64, max_bad_share=0.5, train=str(tmp_path / "rows.jsonl"))
    config = Config(model=ModelConfig(path=str(tokenizer.directory)), data=data)
    assert read_prompts(row_set(data.train), tokenizer, config).tally.counts == {"missing_file": 1}
    (found,) = check_media(config)
    assert found.severity == "warning"
    assert re.match(
        r"data\.train: media of 2 of 4 rows .* line 2: truncated: .*; line 3: missing_file: ",
        found.text,
    )
    data.max_bad_share = 0.4
    assert [one.severity for one in check_media(config)] == ["error"]
    read(rows[:1], tokenizer, tmp_path)
    assert [one.text for one in check_media(config)] == [
        "data.train: 1 media of 1 rows were decoded"
    ]


def test_a_medium_that_is_gone_when_it_is_drawn_costs_its_prompt_alone(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    rows = [
        {"id": "a", "prompt": "<image>", "answer": "x", "images": [name]} for name in ("one.png",)
    ]
    rows.append({"id": "b", "prompt": "b", "answer": "x", "images": []})
    (tmp_path / "one.png").write_bytes(png())
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    how = PromptRules.from_config(DATA, tokenizer, tmp_path)
    found = open_prompts(tmp_path / "rows.jsonl", tmp_path / "index", tokenizer, how, 0.0)
    (tmp_path / "one.png").unlink()
    gone, text = found
    assert (
        gone.prompt_id == "a"
        and gone.media_error
        and gone.media_error.reason == "missing_file"
        and not text.media_error
    )


def test_a_file_that_ends_its_decoder_costs_its_row_alone(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where an index is made, where a configuration is checked, and where a prompt is drawn."""
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
    how = PromptRules.from_config(data, tokenizer, tmp_path)
    found = open_prompts(tmp_path / "rows.jsonl", tmp_path / "index", tokenizer, how, 0.5)
    assert {bad.line: bad.reason for bad in found.bad} == {1: "decoder_hung", 3: "decoder_died"}
    checked = read_prompts(row_set(tmp_path / "rows.jsonl"), tokenizer, Config(data=data)).tally
    assert checked.counts == {"decoder_hung": 1, "decoder_died": 1} and checked.rows == 4
    (tmp_path / "later.png").write_bytes(png(32, CRASHES))
    good, later = found
    assert not good.media_error and later.media_error and later.media_error.reason == "decoder_died"


def test_a_video_has_a_time_stamp_before_each_patch_in_time(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Within what the template has put around its placeholder."""
    uri = data_uri(filmed("film")[0], "video/x-msvideo")
    (found,), bad = read(
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
    assert list(found.token_ids) == expected
    video, image = found.media
    assert (
        [length for _, length in video.spans] == [4, 4] and video.tokens == 8 and image.tokens == 4
    )
    assert all(set(found.token_ids[start : start + 4]) == {VIDEO} for start, _ in video.spans)


def test_a_video_is_heard_too_where_that_is_wanted_in_turns_with_its_frames(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    hearing = load_tokenizer(hearing_model(tmp_path / "omni"))
    loud, silent = (
        avi(clip(20, 64, 64), 10, tone(2) if sound else None) for sound in (True, False)
    )
    rows = [
        {"prompt": "<video>?", "videos": [data_uri(film, "video/x-msvideo")]}
        for film in (loud, silent)
    ]
    wanted = MultimodalConfig(
        use_audio_in_video=True, audio_sample_rate=16000, video_max_token_num=4
    )
    (heard, seen), bad = read(rows, hearing, tmp_path, multimodal=wanted)
    assert not bad and [[one.kind for one in found.media] for found in (heard, seen)] == [
        ["video", "audio"],
        ["video"],
    ]
    places = read_placeholder_tokens(hearing.directory)
    video, audio = places[Kind.VIDEO], places[Kind.AUDIO]
    known = len(hearing.encode(""))
    inside = heard.token_ids[known + 2 : -3]
    assert heard.token_ids[known : known + 2] == (*video.before, *audio.before)
    assert heard.token_ids[-3:-1] == (*audio.after, *video.after)
    # 13 tokens a second of sound, and those of 4 frames, which are a second apart by two.
    assert (inside.count(audio.placeholder), inside.count(video.placeholder)) == (26, 8) and len(
        inside
    ) == 34
    blob = tmp_path / "blob"
    spans = spans_of([replace(one, blob=blob) for one in heard.media])
    assert [span["kind"] for span in spans] == ["video", "audio", "video", "audio"]
    assert [span["start"] for span in spans] == sorted(span["start"] for span in spans)
    assert [heard.token_ids[span["start"]] for span in spans] == [
        video.placeholder,
        audio.placeholder,
    ] * 2
    with pytest.raises(
        ConfigError, match=r"use_audio_in_video: found true, allowed: false; .* does not hear"
    ):
        read(rows, tokenizer, tmp_path, multimodal=wanted)
    with pytest.raises(ConfigError, match="audio_sample_rate: found 8000, allowed: 0, or 16000"):
        read(rows, hearing, tmp_path, multimodal=MultimodalConfig(audio_sample_rate=8000))


def test_a_model_of_text_has_no_media(tokenizer: Tokenizer, tmp_path: Path) -> None:
    plain = PromptRules.from_config(DATA, None, tmp_path)
    assert plain.media is None


@given(st.lists(st.sampled_from(["<image>", "<video>", "a", "<", ""])))
def test_marks_cut_a_text_without_loss(pieces: list[str]) -> None:
    text = "".join(pieces)
    found = list(split_at_marks(text, {Kind.IMAGE: [URI]}))
    assert "".join(f"<{piece}>" if isinstance(piece, Kind) else piece for piece in found) == text
    assert found.count(Kind.IMAGE) == text.count("<image>")


def test_spans_are_of_media_that_are_stored(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (found,), _ = read([{"prompt": "<image>", "images": [URI]}], tokenizer, tmp_path)
    assert spans_of(found.media) == []


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
def test_tasks_demonstrate_the_prompts_that_they_have(name: str, tmp_path: Path) -> None:
    """With media and all: what a warm start learns from is what is asked for."""
    small = {"multimodal": MultimodalConfig(video_min_token_num=4)}
    tokenizer, data = load_tokenizer(hearing_model(tmp_path / "m")), DataConfig(**small)
    task, how = (
        get_task(f"relax_hpc.examples.tasks.{name}"),
        PromptRules.from_config(data, tokenizer, tmp_path).media,
    )
    assert how
    found, bad = read(list(islice(task.rows("train", DATA), 24)), tokenizer, tmp_path, **small)
    assert not bad and len({one.prompt_id for one in found}) == 24

    def asked(shown: dict[str, Any]) -> tuple[int, ...]:
        ids, known = shown["token_ids"], shown["prompt_len"]
        expanded, _ = how.expand_placeholders(
            ids[:known], how.take_columns(shown), functools.partial(tokenizer.encode, special=False)
        )
        return tuple(expanded)

    shown = {asked(one) for one in islice(task.demonstrations(DATA, tokenizer, 0.0, 1), 24)}
    with_media = {one.token_ids for one in found if one.media}
    assert with_media and with_media <= shown
    held = {row["id"] for split in task.evaluations for row in task.rows(split, DATA)}
    assert not held & {row["id"] for row in islice(task.rows("train", DATA), 400)}
