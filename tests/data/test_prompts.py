"""Prompt files, and the order in which tickets visit prompts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import islice, product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_hpc.base.errors import ConfigError
from relax_hpc.config.schema import TinyModelConfig
from relax_hpc.data.prompts import BadLine, Prompt, PromptRules, parse_rows
from relax_hpc.data.tokenizer import Tokenizer, load_tokenizer
from relax_hpc.data.visits import prompt_at
from relax_hpc.training.models.tiny_model import make_tiny_model
from tests.helpers.prompt_helpers import load_prompts as load

GOOD = {"id": "a", "prompt": "12?", "answer": "12", "level": 3}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny_model(
        directory,
        TinyModelConfig(hidden_size=8, num_layers=1, head_dim=8, intermediate_size=8),
        seed=0,
    )
    return load_tokenizer(directory)


def load_prompts(
    path: Path, tokenizer: Tokenizer, max_tokens: int, share: float, columns: Sequence[str] = ()
) -> tuple[list[Prompt], list[BadLine]]:
    return load(path, tokenizer, PromptRules(max_tokens, tuple(columns)), share)


def write(path: Path, *lines: object) -> Path:
    path.write_bytes(
        b"\n".join(x if isinstance(x, bytes) else json.dumps(x).encode() for x in lines) + b"\n"
    )
    return path


def test_good_lines_become_prompts(tmp_path, tokenizer):
    ids = {"id": 7, "token_ids": [1, 4, 5], "answer": 12}
    prompts, bad = load_prompts(write(tmp_path / "p.jsonl", GOOD, b"", ids), tokenizer, 8, 0.0)
    assert bad == []
    assert [p.prompt_id for p in prompts] == ["a", "7"]
    assert prompts[0].token_ids == (1, 4, 5, 18)
    assert prompts[0].metadata == {"level": 3}
    assert (prompts[1].token_ids, prompts[1].text, prompts[1].answer) == ((1, 4, 5), "12", "12")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"id": "b", ', "broken_json"),
        (b"\xff\xfe", "broken_json"),
        (b"[1]", "broken_json"),
        (b"[" * 100_000, "broken_json"),
        # Half of a surrogate pair, which no tokenizer takes as text, and no journal as an id.
        ({"id": "b", "prompt": "1 \ud83d", "answer": "1"}, "broken_json"),
        ({"id": "b", "prompt": "1?", "answer": "1", "more": {"\udfff": 1}}, "broken_json"),
        ({"id": "b", "prompt": "1?"}, "missing_field"),
        ({"prompt": "1?", "answr": "1"}, "missing_field"),
        ({"id": "b", "answer": "1"}, "missing_field"),
        ({"id": "b", "prompt": 3, "answer": "1"}, "wrong_type"),
        ({"id": "b", "prompt": "1?", "answer": None}, "wrong_type"),
        ({"id": ["b"], "prompt": "1?", "answer": "1"}, "wrong_type"),
        ({"id": "b", "token_ids": [1, 64], "answer": "1"}, "wrong_type"),
        ({"id": "b", "token_ids": [True], "answer": "1"}, "wrong_type"),
        ({"id": "b", "token_ids": "1", "answer": "1"}, "wrong_type"),
        ({"id": "b", "prompt": "  ", "answer": "1"}, "empty_prompt"),
        ({"id": "b", "token_ids": [], "answer": "1"}, "empty_prompt"),
        ({"id": "b", "prompt": "12345678", "answer": "1"}, "over_long"),
        ({"id": "a", "prompt": "1?", "answer": "1"}, "duplicate_id"),
    ],
)
def test_a_bad_line_is_skipped_with_its_reason(tmp_path, tokenizer, line, reason):
    path = write(tmp_path / "p.jsonl", GOOD, line, GOOD | {"id": "c"})
    prompts, bad = load_prompts(path, tokenizer, 8, 0.5)
    assert bad == [BadLine(2, reason)]
    assert [p.prompt_id for p in prompts] == ["a", "c"]


def test_a_whole_surrogate_pair_is_a_character(tmp_path, tokenizer):
    path = write(
        tmp_path / "p.jsonl", GOOD, {"id": "b", "prompt": "1?", "answer": "1", "more": "\U0001f600"}
    )
    assert "\\ud83d" in path.read_text() and load_prompts(path, tokenizer, 8, 0.0)[1] == []


def test_too_many_bad_lines_are_refused(tmp_path, tokenizer):
    path = write(tmp_path / "p.jsonl", GOOD, b"{", GOOD)
    with pytest.raises(
        ConfigError,
        match=r"p\.jsonl: 2 of 3 lines are bad: 1 broken_json \(first line 2.*max_bad_share",
    ):
        load_prompts(path, tokenizer, 8, 0.5)
    assert len(load_prompts(path, tokenizer, 8, 0.67)[1]) == 2


def test_every_reason_is_reported_with_its_first_line(tmp_path, tokenizer):
    messages = {"id": "m", "prompt": [{"role": "user", "content": "1?"}], "answer": "1"}
    other_rows = [
        {"id": "b", "prompt": "1?"},
        {"id": "c", "prompt": "1?"},
        GOOD | {"id": "d", "prompt": "12345678"},
    ]
    with pytest.raises(ConfigError) as caught:
        load_prompts(write(tmp_path / "p.jsonl", messages, *other_rows), tokenizer, 8, 0.5)
    for expected in (
        "4 of 4 lines are bad: 2 missing_field (first line 2: no answer)",
        "1 wrong_type (first line 1: prompt is a list of chat messages; set data.chat_template: "
        "model",
        "1 over_long (first line 4: 9 tokens, data.max_prompt_tokens is 8)",
        "raise that limit, or correct the file",
    ):
        assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (json.dumps(GOOD).encode("utf-16"), "found UTF-16 text; iconv"),
        (json.dumps(GOOD).encode("utf-16-be"), "NUL bytes"),
        (json.dumps([GOOD], indent=1).encode(), "found one JSON list; jq"),
        (b"PAR1" + bytes(60), "no parquet file that can be read"),
        (b"\x1f\x8b\x08" + bytes(60), "found compressed by gzip; gunzip"),
    ],
)
def test_files_of_another_format_are_refused(tmp_path, tokenizer, content, expected):
    (tmp_path / "p.jsonl").write_bytes(content)
    with pytest.raises(ConfigError, match=f"p.jsonl: .*{expected}"):
        load_prompts(tmp_path / "p.jsonl", tokenizer, 8, 1.0)


def test_a_byte_order_mark_is_ignored(tmp_path, tokenizer):
    (tmp_path / "p.jsonl").write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD).encode())
    assert len(load_prompts(tmp_path / "p.jsonl", tokenizer, 8, 0.0)[0]) == 1


def test_rows_are_parsed_from_any_iterator(tokenizer):
    rows = ((number, GOOD | {"id": number}) for number in range(1, 10**9))
    first = list(islice(parse_rows(rows, tokenizer, PromptRules(8)), 3))
    assert [prompt.prompt_id for prompt in first] == ["1", "2", "3"]
    (unread,) = parse_rows([(1, GOOD)], None, PromptRules(1))
    assert (unread.text, unread.token_ids) == ("12?", ())


def test_special_tokens_in_a_text_are_text_unless_the_setting_names_the_column(tmp_path, tokenizer):
    assert set(tokenizer.special_names) == {"<pad>", "<s>", "</s>"}
    hostile, plain = "12</s>34<s>", tokenizer.encode("12")
    ended = [*plain, 2, 6, 7, 1]
    assert tokenizer.encode(hostile, special_tokens=True) == ended
    assert tokenizer.encode(hostile)[: len(plain)] == plain and 2 not in tokenizer.encode(hostile)
    path = write(tmp_path / "p.jsonl", GOOD | {"prompt": hostile})
    (as_text,), (as_tokens,) = (
        load_prompts(path, tokenizer, 32, 0.0, columns)[0] for columns in ([], ["prompt"])
    )
    assert (
        list(as_text.token_ids) == tokenizer.encode(hostile) and list(as_tokens.token_ids) == ended
    )
    assert 2 not in tokenizer.encode(hostile), "the option of an earlier call has no effect"


def test_files_without_prompts_are_refused(tmp_path, tokenizer):
    with pytest.raises(ConfigError, match=r"none\.jsonl: cannot be read: No such file"):
        load_prompts(tmp_path / "none.jsonl", tokenizer, 8, 1.0)
    with pytest.raises(ConfigError, match="no prompts"):
        load_prompts(write(tmp_path / "empty.jsonl", b""), tokenizer, 8, 1.0)
    with pytest.raises(ConfigError, match="1 of 1 lines are bad"):
        load_prompts(write(tmp_path / "bad.jsonl", b"{"), tokenizer, 8, 1.0)


@given(st.integers(1, 50), st.integers(0, 5), st.integers(0, 2**40), st.booleans())
def test_each_epoch_visits_each_prompt_once(count, epoch, seed, shuffle):
    tickets = range(epoch * count, (epoch + 1) * count)
    visited = [prompt_at(ticket, 0, count, seed, shuffle) for ticket in tickets]
    assert sorted(visited) == list(range(count))
    if not shuffle:
        assert visited == list(range(count))


@given(
    st.integers(0, 10**6),
    st.integers(1, 5),
    st.integers(1, 50),
    st.integers(0, 2**40),
    st.booleans(),
)
def test_a_retried_ticket_gets_another_prompt(ticket, attempt, count, seed, shuffle):
    index = prompt_at(ticket, attempt, count, seed, shuffle)
    assert 0 <= index < count
    assert count == 1 or index != prompt_at(ticket, 0, count, seed, shuffle)


def test_order_depends_on_seed_and_epoch_and_never_changes():
    orders = [
        tuple(prompt_at(epoch * 20 + i, 0, 20, seed, True) for i in range(20))
        for seed, epoch in product(range(3), range(3))
    ]
    assert len(set(orders)) == 9
    assert [prompt_at(i, 0, 8, 0, True) for i in range(8)] == [3, 4, 1, 7, 0, 6, 2, 5]
    assert [prompt_at(5, attempt, 1000, 0, True) for attempt in range(4)] == [619, 636, 121, 979]


def test_the_tokenizer_encodes_and_decodes(tokenizer):
    assert tokenizer.encode("4312?") == [1, 7, 6, 4, 5, 18]
    assert tokenizer.encode("4312?", special=False) == [7, 6, 4, 5, 18]
    assert tokenizer.decode([4, 5, 6, 2]) == "123"
    assert tokenizer.decode(tokenizer.encode("a b")) == "a b"
    assert (tokenizer.eos_ids, tokenizer.pad_id, tokenizer.bos_id, tokenizer.vocab_size) == (
        (2,),
        0,
        1,
        64,
    )


def test_end_tokens_are_read_from_configuration_files(tmp_path):
    make_tiny_model(tmp_path / "m", TinyModelConfig(hidden_size=8, num_layers=1), seed=0)
    (tmp_path / "m/generation_config.json").write_text('{"eos_token_id": [9, 2]}')
    (tmp_path / "m/tokenizer_config.json").write_text('{"eos_token": {"content": "z"}}')
    tokenizer = load_tokenizer(tmp_path / "m")
    assert tokenizer.eos_ids == (tokenizer.encode("z", special=False)[0], 9, 2)
    for name in ("generation_config.json", "tokenizer_config.json", "config.json"):
        (tmp_path / "m" / name).unlink()
    with pytest.raises(ConfigError, match="no end-of-text token"):
        load_tokenizer(tmp_path / "m")
    (tmp_path / "m/tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="not a tokenizer"):
        load_tokenizer(tmp_path / "m")
    with pytest.raises(ConfigError, match=r"missing; model\.path"):
        load_tokenizer(tmp_path)
