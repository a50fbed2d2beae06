"""Chat messages with media over several turns: token ids are those that transformers' processor of
Qwen3-VL makes."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.requirements import requires

requires("transformers", "torch")

from relax_hpc.base.errors import ConfigError  # noqa: E402
from relax_hpc.base.transformers_hook import install_transformers_hook  # noqa: E402
from relax_hpc.config.schema import DataConfig  # noqa: E402
from relax_hpc.data.media import spans_of  # noqa: E402
from relax_hpc.data.prompts import Prompt, PromptRules  # noqa: E402
from relax_hpc.data.tokenizer import load_tokenizer  # noqa: E402
from tests.helpers.media_files import PROCESSOR, avi, encoded, model_files, picture  # noqa: E402
from tests.helpers.prompt_helpers import load_prompts  # noqa: E402

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
SPLIT = r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
"""Pattern of texts beyond which no token goes, nearly as in Qwen's tokenizers: a digit, marks with
a space before."""
TEMPLATE = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content -%}
{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>
{%- else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}<|im_start|>assistant
"""
"""Template that writes what those of the published models write."""
TEXTS = ("What is in this picture? ", "A cat:<", "0.3 seconds> Look: ", "Then")
WIDE, HIGH, SMALL = picture(64, 96, 1), picture(96, 64, 2), picture(32, 32, 3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of a Qwen3-VL with a tokenizer of bytes that were merged, as the published ones are."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    folder = model_files(tmp_path_factory.mktemp("model"), "qwen3_vl")
    tokenizer = Tokenizer(models.BPE())
    pieces = [
        pre_tokenizers.Split(Regex(SPLIT), "isolated"),
        pre_tokenizers.ByteLevel(False, use_regex=False),
    ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(pieces)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=[*SPECIAL, *VISION], initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator([*TEXTS, "<0.3 seconds>", "user\n", "assistant\n"] * 9, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL[2],
        "pad_token": SPECIAL[0],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    places = ("vision_start", "vision_end", "image", "video")
    ids = {
        f"{name}_token_id": tokenizer.token_to_id(token)
        for name, token in zip(places, VISION, strict=True)
    }
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | ids))
    return folder


def frames_of(count: int, seed: int) -> list[Image.Image]:
    return [picture(64, 64, seed + number) for number in range(count)]


def asked(model: Path, folder: Path, messages: list[dict[str, Any]], **columns: Any) -> Prompt:
    """The prompt of a row of a file."""
    row = {"id": "1", "answer": "a", "messages": messages, **columns}
    (folder / "rows.jsonl").write_text(json.dumps(row))
    tokenizer = load_tokenizer(model)
    how = PromptRules.from_config(DataConfig(chat_template="model"), tokenizer, folder)
    with how.rendering():
        (found,), bad = load_prompts(folder / "rows.jsonl", tokenizer, how, 0.0)
    assert not bad
    return found


def processed(
    model: Path, messages: list[dict[str, Any]], images: list[Image.Image], films: list[bytes]
) -> list[int]:
    """Token ids by transformers' processor."""
    import decord
    from transformers import PreTrainedTokenizerFast
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
    from transformers.video_utils import VideoMetadata

    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    pictures = Qwen2VLImageProcessorPil(
        **PROCESSOR, size={"shortest_edge": 1024, "longest_edge": 16777216}
    )
    videos = Qwen3VLVideoProcessor(
        **PROCESSOR, size={"shortest_edge": 4096, "longest_edge": 25165824}, fps=2
    )
    processor = Qwen3VLProcessor(pictures, tokenizer, videos)
    readers = [decord.VideoReader(io.BytesIO(film)) for film in films]
    decoded = [
        reader.get_batch(range(len(reader))).asnumpy().transpose(0, 3, 1, 2) for reader in readers
    ]
    about = [
        VideoMetadata(total_num_frames=len(reader), fps=reader.get_avg_fps()) for reader in readers
    ]
    text = tokenizer.apply_chat_template(messages, chat_template=TEMPLATE, tokenize=False)
    given = {"images": images or None, "videos": decoded or None, "video_metadata": about or None}
    return processor(text=[text], **given)["input_ids"][0]


def test_media_of_several_turns_have_the_ids_of_the_processor(model: Path, tmp_path: Path) -> None:
    """Named by parts, by columns and by both, in the order of their places."""
    install_transformers_hook()
    films = [avi(frames_of(12, 5), 4), avi(frames_of(7, 9), 4)]
    names = {"wide.png": encoded(WIDE), "high.png": encoded(HIGH), "small.png": encoded(SMALL)}
    for name, content in (*names.items(), ("one.avi", films[0]), ("two.avi", films[1])):
        (tmp_path / name).write_bytes(content)

    def text(number: int) -> dict[str, str]:
        return {"type": "text", "text": TEXTS[number]}

    def conversation(*media: dict[str, str]) -> list[dict[str, Any]]:
        first, second, third, fourth, fifth = media
        return [
            {"role": "system", "content": "See."},
            {"role": "user", "content": [text(0), first, text(2), second]},
            {"role": "assistant", "content": TEXTS[1]},
            {"role": "user", "content": [third, fourth, text(3), text(0)]},
            {"role": "assistant", "content": [text(1)]},
            {"role": "user", "content": [text(2), fifth]},
        ]

    kinds = ("image", "video", "image", "video", "image")
    files = ("wide.png", "one.avi", "high.png", "two.avi", "small.png")
    bare = conversation(*({"type": kind} for kind in kinds))
    expected = processed(model, bare, [WIDE, HIGH, SMALL], films)
    named = conversation(
        *({"type": kind, kind: name} for kind, name in zip(kinds, files, strict=True))
    )
    mixed = [*named[:2], *bare[2:]]
    columns = {"images": ["wide.png", "high.png", "small.png"], "videos": ["one.avi", "two.avi"]}
    by_parts = asked(model, tmp_path, named)
    by_columns = asked(model, tmp_path, bare, **columns)
    by_both = asked(
        model, tmp_path, mixed, images=columns["images"][1:], videos=columns["videos"][1:]
    )
    assert (
        list(by_parts.token_ids)
        == list(by_columns.token_ids)
        == list(by_both.token_ids)
        == expected
    )
    for prompt in (by_parts, by_columns, by_both):
        assert [medium.source.name for medium in prompt.media] == list(files)
        starts = [start for medium in prompt.media for start, _ in medium.spans]
        assert starts == sorted(starts) and spans_of(prompt.media) == []
    # Each patch in time of a video has a place of its own.
    assert [len(medium.spans) for medium in by_parts.media] == [1, 3, 1, 2, 1]


def test_what_stands_beside_a_video_may_look_like_its_time_stamps(
    model: Path, tmp_path: Path
) -> None:
    """Text of a message never becomes one token with what is put beside it."""
    install_transformers_hook()
    film = avi(frames_of(4, 1), 4)
    (tmp_path / "a.avi").write_bytes(film)
    parts = [
        {"type": "text", "text": TEXTS[1]},
        {"type": "video"},
        {"type": "text", "text": TEXTS[2]},
    ]
    messages = [{"role": "user", "content": parts}]
    found = asked(model, tmp_path, messages, videos="a.avi")
    assert list(found.token_ids) == processed(model, messages, [], [film])
    (begin,) = load_tokenizer(model).encode("<|vision_start|>", special=False, special_tokens=True)
    assert found.token_ids.count(begin) == 3


def test_a_tokenizer_that_is_published_in_pieces_is_made_by_the_command_that_is_named(
    model: Path, tmp_path: Path
) -> None:
    """As Qwen3-Omni is: vocabulary and merges, and no tokenizer.json."""
    whole = json.loads((model / "tokenizer.json").read_text())
    (tmp_path / "vocab.json").write_text(json.dumps(whole["model"]["vocab"]))
    merges = [" ".join(pair) for pair in whole["model"]["merges"]]
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    added = {str(one.pop("id")): one for one in whole["added_tokens"]}
    about = {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": SPECIAL[2],
        "added_tokens_decoder": added,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(about))
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    with pytest.raises(ConfigError, match=r"tokenizer\.json: missing") as missing:
        load_tokenizer(tmp_path)
    (command,) = re.findall(r'python -c "(.*)" makes', str(missing.value))
    subprocess.run([sys.executable, "-c", command], check=True, capture_output=True)
    made, published = load_tokenizer(tmp_path), load_tokenizer(model)
    for text in (*TEXTS, "<|vision_start|><|image_pad|><|vision_end|>"):
        assert made.encode(text, special_tokens=True) == published.encode(text, special_tokens=True)
