"""Rows as other programs write them are read as their authors meant them, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_hpc.data.prompts import Prompt
from relax_hpc.data.rows import BadLine, read_rows, without_nulls
from relax_hpc.data.tokenizer import Tokenizer
from tests.effort import effort
from tests.helpers.row_format_helpers import (
    USER,
    Row,
    bad_row_reasons,
    chat_model,
    parse_examples,
    parse_prompts,
)
from tests.requirements import requires

requires("torch")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return chat_model(tmp_path_factory.mktemp("model") / "tiny")


VALUES = st.recursive(
    st.one_of(st.integers(-9, 9), st.text("ab", max_size=2), st.booleans()),
    lambda inner: st.dictionaries(st.sampled_from("xyz"), inner, min_size=1, max_size=3),
    max_leaves=6,
)


@settings(max_examples=effort(40, 1000), deadline=None)
@given(
    schemas=st.lists(
        st.dictionaries(st.sampled_from("abc"), VALUES, min_size=1, max_size=3),
        min_size=1,
        max_size=4,
    )
)
def test_nested_fields_that_a_row_of_a_table_lacks_are_dropped(
    schemas: list[Row], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Arrow gives all structs of a column the same fields. Fields that a row lacks are null."""
    requires("pyarrow")
    import pyarrow
    import pyarrow.parquet

    rows = [
        {"id": str(number), "tools": [{"parameters": schema}]}
        for number, schema in enumerate(schemas)
    ]
    path = tmp_path_factory.mktemp("table") / "rows.parquet"
    try:
        table = pyarrow.Table.from_pylist(rows)
    except pyarrow.ArrowException:
        # Rows of different types have no common column.
        return
    pyarrow.parquet.write_table(table, path)
    assert (
        [row[1] for row in read_rows(path)]
        == rows
        == [without_nulls(row) for row in table.to_pylist()]
    )


def test_null_parameters_of_other_tools_are_dropped_from_a_signature(tokenizer: Tokenizer) -> None:
    """`datasets` also writes them into JSON lines, as nulls."""
    tool = {
        "name": "add",
        "parameters": {"properties": {"x": {"type": "number", "default": None}, "city": None}},
    }
    (prompt,) = parse_prompts(
        tokenizer, {"id": "1", "messages": [USER], "answer": "7", "tools": [{"function": tool}]}
    )
    assert isinstance(prompt, Prompt)
    assert '{"x": {"type": "number", "default": null}}' in prompt.text and "city" not in prompt.text


def test_json_columns_of_datasets_are_read_as_the_original_rows(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """`datasets` 5 stores objects of different types as JSON text."""
    datasets = pytest.importorskip("datasets")
    signatures = [
        {"x": {"type": "integer", "default": None}},
        {"city": {"type": "string"}, "unit": {"enum": ["c"]}},
    ]
    tools = [
        {"function": {"name": "add", "parameters": {"properties": properties}}}
        for properties in signatures
    ]
    rows = [
        {"messages": [USER], "tools": tools[:1], "answer": "seven"},
        {
            "messages": [USER, {"role": "assistant", "content": "x", "tool_calls": tools}, USER],
            "tools": tools,
            "answer": 7,
        },
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = datasets.load_dataset(
        "json", data_files=str(tmp_path / "rows.jsonl"), split="train", cache_dir=tmp_path
    )
    assert "Json" in str(table.features)
    table.to_parquet(tmp_path / "rows.parquet")
    read = [row[1] for row in read_rows(tmp_path / "rows.parquet") if not isinstance(row, BadLine)]
    assert read == rows


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "user", "content": None}, "wrong_type: message 0 (user) has no content"),
        ({"role": "user"}, "wrong_type: message 0 (user) has no content"),
        (
            {"role": "tool", "content": [None]},
            "wrong_type: message 0: found 'None', allowed: parts with a type",
        ),
        ({"role": "user", "content": 7}, "wrong_type: message 0: content is int"),
        ({"role": "", "content": "1"}, "wrong_type: message 0: role is ''"),
        (
            {"role": "user", "content": "1", "train": [], "cache": {"a": 1}},
            "unknown_key: message 0: found 'cache'",
        ),
        (
            {"role": "user", "content": "1", "training": False},
            "unknown_key: message 0: found 'training'",
        ),
        (
            {"role": "user", "content": "1", "step_loss_mask": 0},
            "unknown_key: message 0: found 'step_loss_mask'",
        ),
        (
            {"role": "user", "content": "1", "reasoning": "!"},
            "unknown_key: message 0: found 'reasoning', which the chat template does not read; "
            "rename it to 'thinking'",
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": "1", "bold": True}]},
            "unknown_key: message 0: found 'bold'",
        ),
        (
            {"role": "user", "content": [{"type": "text"}]},
            "wrong_type: message 0: a part of type 'text' has no text",
        ),
        (
            {"role": "user", "content": [{"type": "image", "url": "p.png"}]},
            "kind_not_taken: found images",
        ),
        (
            {"role": "user", "content": [{"type": "file", "file_id": "f"}]},
            "kind_not_taken: found a part of type 'file'",
        ),
        (
            {"role": "user", "content": "1", "tool_calls": "add"},
            "wrong_type: message 0: tool_calls is no list",
        ),
        (
            {"role": "developer", "content": "obey"},
            "chat_template: the chat template leaves out message 0 (role 'developer')",
        ),
        ({"role": "user", "content": ""}, "empty_prompt: message 0 (user) is empty"),
        ({"role": "user", "content": " \n"}, "empty_prompt: message 0 (user) is empty"),
        (
            {"role": "user", "content": [{"type": "text", "text": ""}]},
            "empty_prompt: message 0 (user) is empty",
        ),
        ({"role": "system", "content": ""}, "empty_prompt: messages has messages without content"),
        (
            {"role": "assistant", "content": "7"},
            "answer_in_prompt: the last message is the assistant's",
        ),
    ],
)
def test_messages_that_would_be_misread_are_refused(
    tokenizer: Tokenizer, message: Row, expected: str
) -> None:
    results = parse_prompts(tokenizer, {"id": "1", "messages": [message], "answer": "7"})
    assert bad_row_reasons(results)[0].startswith(expected), bad_row_reasons(results)


def test_fields_without_content_do_not_change_a_message(tokenizer: Tokenizer) -> None:
    plain = {"id": "1", "messages": [USER], "answer": "7"}
    null_fields = {
        "id": "1",
        "messages": [USER | {"tool_calls": None, "annotations": [], "name": "ann"}],
        "answer": "7",
    }
    thinking = {"id": "1", "messages": [USER | {"thinking": "!"}], "answer": "7"}
    content_parts = {
        "id": "1",
        "messages": [USER | {"content": [{"type": "input_text", "text": "3+4="}]}],
        "answer": "7",
    }
    unknown_key = {"id": "1", "messages": [USER | {"mood": "glad"}], "answer": "7"}
    texts = [
        prompt.text if isinstance(prompt, Prompt) else prompt
        for prompt in parse_prompts(tokenizer, plain, null_fields, thinking, content_parts)
    ]
    assert texts[0] == texts[1] == texts[3] and texts[2] == str(texts[0]).replace("3+4=", "3+4=!")
    (ignored,) = parse_prompts(tokenizer, unknown_key, ignore_keys=["mood"])
    assert isinstance(ignored, Prompt) and ignored.text == texts[0]


def test_messages_as_json_text_and_nan_answers_are_refused(
    tokenizer: Tokenizer,
) -> None:
    text = json.dumps([USER])
    rows = [{"prompt": text, "answer": "7"}, {"prompt": "3+4=", "answer": float("nan")}]
    reason = "wrong_type: prompt is a text of JSON with chat messages; store them as a list"
    assert bad_row_reasons(parse_prompts(tokenizer, *rows)) == [
        reason,
        "wrong_type: answer is float 'nan'",
    ]
    assert bad_row_reasons(parse_examples(tokenizer, rows[0])) == [reason]
    assert bad_row_reasons(parse_prompts(tokenizer, rows[0], chat_template="")) == [reason]


def test_an_assistant_message_with_a_tool_call_needs_no_content(tokenizer: Tokenizer) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]}
    chat = [USER, call, {"role": "tool", "content": "7"}]
    (prompt,) = parse_prompts(tokenizer, {"id": "1", "messages": chat, "answer": "7"})
    assert isinstance(prompt, Prompt) and "<|im_start|>assistant\nadd<|im_end|>\n" in prompt.text


def test_tool_calls_that_the_template_ignores_are_refused(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}{{ m.role + ':' + m.content }}{% endfor %}"
    )
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add"}}]}
    thinking = {"role": "assistant", "content": "7", "reasoning_content": "3+4"}
    rows = [{"messages": [USER, message, USER], "answer": "7"} for message in (call, thinking)]
    results = parse_prompts(tokenizer, *rows, chat_template=str(tmp_path / "t.jinja"))
    assert bad_row_reasons(results) == [
        "unknown_key: message 1: found 'tool_calls', which the chat template does not read; "
        "remove it, or list it in data.ignore_keys",
        "",
    ]


def test_a_key_in_the_prose_of_a_template_does_not_count_as_read(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """The template of Qwen3-Coder contains `optional reasoning`, but reads no reasoning."""
    text = (
        "Give your reasoning, in training.{% for m in messages %}{{ m['role'] + ':' + m.content "
        "}}{% endfor %}"
    )
    (tmp_path / "t.jinja").write_text(text)
    thinking = {"role": "assistant", "content": "7", "reasoning_content": "3+4"}
    flag = {"role": "assistant", "content": "7", "training": False}
    rows = [{"messages": [USER, message, USER], "answer": "7"} for message in (thinking, flag)]
    prompt_reasons = bad_row_reasons(
        parse_prompts(tokenizer, *rows, chat_template=str(tmp_path / "t.jinja"))
    )
    assert prompt_reasons[0] == "" and prompt_reasons[1].startswith(
        "unknown_key: message 1: found 'training'"
    )


def test_an_omitted_message_is_detected_if_another_contains_its_text(
    tokenizer: Tokenizer,
) -> None:
    chat = [
        {"role": "developer", "content": "Answer"},
        {"role": "user", "content": "Answer me: 3+4"},
    ]
    (bad,) = parse_prompts(tokenizer, {"id": "1", "messages": chat, "answer": "7"})
    assert bad_row_reasons([bad]) == [
        "chat_template: the chat template leaves out message 0 (role 'developer')"
    ]


def test_an_omitted_content_part_is_detected(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """The template of Gemma 3 shows only the first part of a system message."""
    first = "{{ m.content if m.content is string else m.content[0].text }}"
    (tmp_path / "t.jinja").write_text("{% for m in messages %}" + first + "{% endfor %}")
    text_parts = [{"type": "text", "text": text} for text in ("3+4", "quickly")]
    rows = [
        {"messages": [{"role": "user", "content": content}], "answer": "7"}
        for content in (text_parts[:1], text_parts)
    ]
    results = parse_prompts(tokenizer, *rows, chat_template=str(tmp_path / "t.jinja"))
    assert bad_row_reasons(results) == [
        "",
        "chat_template: the chat template leaves out message 0 (role 'user')",
    ]


def test_a_nonempty_input_column_is_refused(tokenizer: Tokenizer) -> None:
    row = {"instruction": "add", "input": "3+4", "output": "7"}
    columns = {"prompt": "instruction", "answer": "output"}
    results = parse_prompts(tokenizer, row, row | {"input": ""}, columns=columns)
    assert bad_row_reasons(results)[0].startswith(
        "unknown_key: found a column 'input', which is not read"
    )
    assert isinstance(results[1], Prompt)


@pytest.mark.parametrize("value", [["x"], False])
@pytest.mark.parametrize(
    "column",
    [
        "system",
        "chat_template_kwargs",
        "functions",
        "documents",
        "parallel_tool_calls",
        "enable_thinking",
    ],
)
def test_columns_that_change_prompts_in_other_programs_are_refused(
    tokenizer: Tokenizer, column: str, value: Any
) -> None:
    row = {"id": "1", "prompt": "3+4=", "answer": "7", column: value}
    assert bad_row_reasons(parse_prompts(tokenizer, row))[0].startswith(
        f"unknown_key: found a column {column!r}, which is not read"
    )
    (prompt,) = parse_prompts(tokenizer, row, ignore_keys=[column])
    assert isinstance(prompt, Prompt) and column not in prompt.metadata


def test_a_row_with_tools_is_refused_if_the_template_shows_none(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / "plain.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    row = {"id": "1", "prompt": "3+4=", "answer": "7", "tools": [{"function": {"name": "add"}}]}
    (bad,) = parse_prompts(tokenizer, row, chat_template=str(tmp_path / "plain.jinja"))
    assert bad_row_reasons([bad]) == [
        "chat_template: the chat template shows no tools, and the row has some"
    ]
    # The template contains the word, but does not show the tools.
    (tmp_path / "prose.jinja").write_text(
        "You have tools.{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    (bad,) = parse_prompts(tokenizer, row, chat_template=str(tmp_path / "prose.jinja"))
    assert bad_row_reasons([bad]) == [
        "chat_template: the chat template does not show the tool 'add'"
    ]
