"""Rows as other programs write them: read as their authors meant them, or refused by name."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_hpc.base.errors import ConfigError
from relax_hpc.config import load
from relax_hpc.config.schema import DataConfig, TinyModelConfig
from relax_hpc.data.examples import Example, rules_of
from relax_hpc.data.prompt_file import PromptSets, open_prompts
from relax_hpc.data.prompts import Prompt, PromptRules
from relax_hpc.data.row_files import RowFiles
from relax_hpc.data.rows import BadLine, read_rows, without_nulls
from relax_hpc.data.tokenizer import Tokenizer, load_tokenizer
from relax_hpc.data.visits import CYCLE, Visits
from relax_hpc.ops.checks.data import check_data
from relax_hpc.rollout.prompt_source import PromptSource
from relax_hpc.training.models.tiny_model import make_tiny_model
from tests.effort import effort
from tests.helpers.media_prompts import png
from tests.requirements import requires

requires("torch")

TEMPLATE = """{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.role in ['system', 'user', 'assistant', 'tool'] %}{{- m.content }}{% endif %}
{%- if m.thinking is defined %}{{- m.thinking }}{% endif %}
{%- for call in m.tool_calls or [] %}{{- call.function.name }}{% endfor %}{{- '<|im_end|>\n' }}{% endfor %}
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""
USER = {"role": "user", "content": "3+4="}
Row = dict[str, Any]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    shape = TinyModelConfig(hidden_size=8, num_layers=1, head_dim=8, intermediate_size=8, chat=True)
    make_tiny_model(directory, shape, seed=0)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return load_tokenizer(directory)


def prompts(tokenizer: Tokenizer, *rows: Row, **data: Any) -> list[Prompt | BadLine]:
    """What each row becomes with the model's template."""
    rules = PromptRules.from_config(DataConfig(**{"chat_template": "model", **data}), tokenizer)
    with rules.rendering():
        return [rules.parse_row(number, row, tokenizer) for number, row in enumerate(rows, start=1)]


def examples(
    tokenizer: Tokenizer, *rows: Row, algorithm: str = "sft", **data: Any
) -> list[Example | BadLine]:
    over = {"algorithm.name": algorithm, "data.chat_template": "model"}
    rules = rules_of(
        load([], over | {f"data.{key}": value for key, value in data.items()}), tokenizer
    )
    with rules.rendering():
        return [rules.parse_row(number, row, tokenizer) for number, row in enumerate(rows, start=1)]


def reasons(made: list[Any]) -> list[str]:
    return [f"{one.reason}: {one.detail}" if isinstance(one, BadLine) else "" for one in made]


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
def test_nested_fields_of_a_table_are_those_that_each_row_has(
    schemas: list[Row], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Arrow gives all structs of a column the same fields; those that a row does not have are
    null."""
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


def test_parameters_that_other_tools_have_are_no_part_of_a_signature(tokenizer: Tokenizer) -> None:
    """`datasets` writes them into lines of JSON too, as nulls."""
    tool = {
        "name": "add",
        "parameters": {"properties": {"x": {"type": "number", "default": None}, "city": None}},
    }
    (prompt,) = prompts(
        tokenizer, {"id": "1", "messages": [USER], "answer": "7", "tools": [{"function": tool}]}
    )
    assert isinstance(prompt, Prompt)
    assert '{"x": {"type": "number", "default": null}}' in prompt.text and "city" not in prompt.text


def test_columns_of_json_are_what_datasets_makes_of_them(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """`datasets` 5 stores objects of several forms as texts of JSON."""
    datasets = pytest.importorskip("datasets")
    signatures = [
        {"x": {"type": "integer", "default": None}},
        {"city": {"type": "string"}, "unit": {"enum": ["c"]}},
    ]
    tools = [
        {"function": {"name": "add", "parameters": {"properties": given}}} for given in signatures
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
    ("message", "says"),
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
def test_messages_that_would_be_misread_are_refused_by_name(
    tokenizer: Tokenizer, message: Row, says: str
) -> None:
    made = prompts(tokenizer, {"id": "1", "messages": [message], "answer": "7"})
    assert reasons(made)[0].startswith(says), reasons(made)


def test_what_is_no_content_of_a_message_does_no_harm(tokenizer: Tokenizer) -> None:
    plain = {"id": "1", "messages": [USER], "answer": "7"}
    null = {
        "id": "1",
        "messages": [USER | {"tool_calls": None, "annotations": [], "name": "ann"}],
        "answer": "7",
    }
    thought = {"id": "1", "messages": [USER | {"thinking": "!"}], "answer": "7"}
    parts = {
        "id": "1",
        "messages": [USER | {"content": [{"type": "input_text", "text": "3+4="}]}],
        "answer": "7",
    }
    listed = {"id": "1", "messages": [USER | {"mood": "glad"}], "answer": "7"}
    texts = [
        one.text if isinstance(one, Prompt) else one
        for one in prompts(tokenizer, plain, null, thought, parts)
    ]
    assert texts[0] == texts[1] == texts[3] and texts[2] == str(texts[0]).replace("3+4=", "3+4=!")
    (ignored,) = prompts(tokenizer, listed, ignore_keys=["mood"])
    assert isinstance(ignored, Prompt) and ignored.text == texts[0]


def test_chat_messages_as_a_text_of_json_and_answers_that_are_no_number_are_refused(
    tokenizer: Tokenizer,
) -> None:
    text = json.dumps([USER])
    rows = [{"prompt": text, "answer": "7"}, {"prompt": "3+4=", "answer": float("nan")}]
    says = "wrong_type: prompt is a text of JSON with chat messages; store them as a list"
    assert reasons(prompts(tokenizer, *rows)) == [says, "wrong_type: answer is float 'nan'"]
    assert reasons(examples(tokenizer, rows[0])) == [says]
    assert reasons(prompts(tokenizer, rows[0], chat_template="")) == [says]


def test_an_assistant_that_calls_a_tool_need_not_say_anything(tokenizer: Tokenizer) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]}
    chat = [USER, call, {"role": "tool", "content": "7"}]
    (prompt,) = prompts(tokenizer, {"id": "1", "messages": chat, "answer": "7"})
    assert isinstance(prompt, Prompt) and "<|im_start|>assistant\nadd<|im_end|>\n" in prompt.text


def test_calls_and_thoughts_that_the_template_does_not_read_are_not_dropped(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}{{ m.role + ':' + m.content }}{% endfor %}"
    )
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add"}}]}
    thought = {"role": "assistant", "content": "7", "reasoning_content": "3+4"}
    rows = [{"messages": [USER, message, USER], "answer": "7"} for message in (call, thought)]
    made = prompts(tokenizer, *rows, chat_template=str(tmp_path / "t.jinja"))
    assert reasons(made) == [
        "unknown_key: message 1: found 'tool_calls', which the chat template does not read; "
        "remove it, or list it in data.ignore_keys",
        "",
    ]


def test_a_key_that_stands_in_the_prose_of_a_template_is_not_read(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Qwen3-Coder's template says `optional reasoning`, and reads no thoughts."""
    text = (
        "Give your reasoning, in training.{% for m in messages %}{{ m['role'] + ':' + m.content "
        "}}{% endfor %}"
    )
    (tmp_path / "t.jinja").write_text(text)
    thought = {"role": "assistant", "content": "7", "reasoning_content": "3+4"}
    flag = {"role": "assistant", "content": "7", "training": False}
    rows = [{"messages": [USER, message, USER], "answer": "7"} for message in (thought, flag)]
    made = reasons(prompts(tokenizer, *rows, chat_template=str(tmp_path / "t.jinja")))
    assert made[0] == "" and made[1].startswith("unknown_key: message 1: found 'training'")


def test_a_message_that_is_left_out_is_missed_though_another_has_its_words(
    tokenizer: Tokenizer,
) -> None:
    chat = [
        {"role": "developer", "content": "Answer"},
        {"role": "user", "content": "Answer me: 3+4"},
    ]
    (bad,) = prompts(tokenizer, {"id": "1", "messages": chat, "answer": "7"})
    assert reasons([bad]) == [
        "chat_template: the chat template leaves out message 0 (role 'developer')"
    ]


def test_a_part_that_is_left_out_is_missed(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Gemma 3's template takes parts, and shows the first part of the system's message alone."""
    first = "{{ m.content if m.content is string else m.content[0].text }}"
    (tmp_path / "t.jinja").write_text("{% for m in messages %}" + first + "{% endfor %}")
    parts = [{"type": "text", "text": text} for text in ("3+4", "quickly")]
    rows = [
        {"messages": [{"role": "user", "content": given}], "answer": "7"}
        for given in (parts[:1], parts)
    ]
    made = prompts(tokenizer, *rows, chat_template=str(tmp_path / "t.jinja"))
    assert reasons(made) == [
        "",
        "chat_template: the chat template leaves out message 0 (role 'user')",
    ]


def test_the_input_of_an_instruction_is_not_dropped(tokenizer: Tokenizer) -> None:
    row = {"instruction": "add", "input": "3+4", "output": "7"}
    columns = {"prompt": "instruction", "answer": "output"}
    made = prompts(tokenizer, row, row | {"input": ""}, columns=columns)
    assert reasons(made)[0].startswith("unknown_key: found a column 'input', which is not read")
    assert isinstance(made[1], Prompt)


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
def test_columns_that_change_prompts_elsewhere_are_refused_by_name(
    tokenizer: Tokenizer, column: str, value: Any
) -> None:
    row = {"id": "1", "prompt": "3+4=", "answer": "7", column: value}
    assert reasons(prompts(tokenizer, row))[0].startswith(
        f"unknown_key: found a column {column!r}, which is not read"
    )
    (prompt,) = prompts(tokenizer, row, ignore_keys=[column])
    assert isinstance(prompt, Prompt) and column not in prompt.metadata


def test_a_template_that_shows_no_tools_is_not_given_a_row_with_some(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / "plain.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    row = {"id": "1", "prompt": "3+4=", "answer": "7", "tools": [{"function": {"name": "add"}}]}
    (bad,) = prompts(tokenizer, row, chat_template=str(tmp_path / "plain.jinja"))
    assert reasons([bad]) == [
        "chat_template: the chat template shows no tools, and the row has some"
    ]
    # It has the word, and does not show the tools.
    (tmp_path / "prose.jinja").write_text(
        "You have tools.{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    (bad,) = prompts(tokenizer, row, chat_template=str(tmp_path / "prose.jinja"))
    assert reasons([bad]) == ["chat_template: the chat template does not show the tool 'add'"]


# -- columns, ids, sets ----------------------------------------------------------------------------


def test_columns_may_have_other_names(tokenizer: Tokenizer) -> None:
    row = {"question": "3+4=", "reward_model": {"style": "rule", "ground_truth": 7}, "level": 2}
    names = {"prompt": "question", "answer": "reward_model.ground_truth"}
    (prompt,) = prompts(tokenizer, row, columns=names)
    assert isinstance(prompt, Prompt)
    assert (prompt.prompt_id, prompt.answer, "3+4=" in prompt.text) == ("train/1", "7", True)
    assert prompt.metadata == {"reward_model": row["reward_model"], "level": 2}
    (missing,) = prompts(tokenizer, {"answer": "7"}, columns=names)
    assert reasons([missing]) == ["missing_field: no question, which data.columns.prompt names"]
    (demonstration,) = examples(
        tokenizer, {"q": "3+4=", "a": "7"}, columns={"prompt": "q", "answer": "a"}
    )
    assert isinstance(demonstration, Example) and demonstration.prompt_id == "train/1"


def test_rows_without_an_id_have_one_of_their_set_and_number(tokenizer: Tokenizer) -> None:
    made = prompts(
        tokenizer, {"prompt": "1", "answer": "1"}, {"id": None, "prompt": "2", "answer": "2"}
    )
    assert [one.prompt_id for one in made if isinstance(one, Prompt)] == ["train/1", "train/2"]
    assert reasons(prompts(tokenizer, {"id": 1.5, "prompt": "1", "answer": "1"})) == [
        "wrong_type: id is float '1.5'"
    ]


def write_rows(path: Path, *rows: Row) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sets_of(tokenizer: Tokenizer, folder: Path, counts: dict[str, int], **data: Any) -> PromptSets:
    """Sets with so many rows, whose prompts are numbers."""
    files = {}
    config = DataConfig(train_sets={name: name for name in counts}, **data)
    for name, count in counts.items():
        rows = [
            {"prompt": f"{number}=", "answer": "", "level": number % 3} for number in range(count)
        ]
        path = write_rows(folder / f"{name}.jsonl", *rows)
        rules = PromptRules.from_config(config, tokenizer, folder, name)
        files[name] = open_prompts(path, folder / f"{name}.index", tokenizer, rules, 0.0)
    return PromptSets(files)


def test_several_sets_are_visited_by_their_weights_each_in_passes_of_its_own(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    weights = {"a": 3.0, "b": 1.0}
    sets = sets_of(tokenizer, tmp_path, {"a": 5, "b": 7})
    assert (len(sets), sets[5].prompt_id, sets[11].prompt_id) == (12, "b/1", "b/7")
    config = load([], {"data.train_sets": {"a": "a", "b": "b"}, "data.train_weights": weights})
    source = PromptSource(sets, config)
    visited = [source.prompt(ticket, 0).prompt_id for ticket in range(2 * CYCLE)]
    assert Counter(name.partition("/")[0] for name in visited) == {"a": 1500, "b": 500}
    assert all(
        abs(sum(name[0] == "b" for name in visited[start : start + 8]) - 2) <= 1
        for start in range(0, 2000, 8)
    )
    for name, count in (("a", 5), ("b", 7)):
        own = [one for one in visited if one.startswith(name)]
        passes = [own[start : start + count] for start in range(0, len(own) - count, count)]
        assert (
            all(len(set(one)) == count for one in passes)
            and len({tuple(one) for one in passes}) > 1
        )


@settings(max_examples=effort(50, 500), deadline=None)
@given(
    counts=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    weights=st.lists(st.floats(0.01, 10.0), min_size=5, max_size=5),
    seed=st.integers(0, 99),
    shuffle=st.booleans(),
)
def test_shares_are_those_of_the_weights(
    counts: list[int], weights: list[float], seed: int, shuffle: bool
) -> None:
    visits = Visits(counts, weights[: len(counts)], seed, shuffle)
    owners = [number for number, count in enumerate(counts) for _ in range(count)]
    found = Counter(owners[visits.prompt_at(ticket, 0)] for ticket in range(CYCLE))
    for number, weight in enumerate(weights[: len(counts)]):
        assert abs(found[number] - CYCLE * weight / sum(weights[: len(counts)])) <= 1
    retried = visits.prompt_at(7, 1)
    first = visits.prompt_at(7, 0)
    assert owners[retried] == owners[first] and (retried != first or counts[owners[first]] == 1)


@pytest.mark.parametrize("shuffle", [True, False])
def test_rows_are_visited_by_the_column_that_orders_them(
    tokenizer: Tokenizer, tmp_path: Path, shuffle: bool
) -> None:
    over = {
        "data.train_sets": {"a": "a", "b": "b"},
        "data.order_by": "level",
        "data.shuffle": shuffle,
    }
    sets = sets_of(tokenizer, tmp_path, {"a": 6, "b": 6}, order_by="level")
    source = PromptSource(sets, load([], over))
    passes = [[source.prompt(12 * number + place, 0) for place in range(12)] for number in range(3)]
    for one in passes:
        assert [prompt.metadata["level"] for prompt in one] == [0] * 4 + [1] * 4 + [2] * 4
        assert len({prompt.prompt_id for prompt in one}) == 12
    orders = {tuple(prompt.prompt_id for prompt in one) for one in passes}
    assert len(orders) == (3 if shuffle else 1)
    assert source.prompt(0, 1).prompt_id == passes[0][1].prompt_id, (
        "a later attempt gets the next row"
    )


def test_a_row_without_a_number_to_order_it_by_is_bad(tokenizer: Tokenizer) -> None:
    made = prompts(tokenizer, {"prompt": "1", "answer": "1", "level": "hard"}, order_by="level")
    assert reasons(made) == ["wrong_type: level is 'hard', allowed: a number, see data.order_by"]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (
            {"train": "x", "train_sets": {"a": "y"}},
            "data.train_sets: found a together with data.train 'x'",
        ),
        ({"train_sets": {"a/b": "y"}}, "data.train_sets: found the name 'a/b'"),
        (
            {"train_sets": {"a": "y"}, "train_weights": {"b": 1.0}},
            "data.train_weights: found b, allowed: the names",
        ),
        (
            {"train_sets": {"a": "y"}, "train_weights": {"a": 0.0}},
            "data.train_weights.a: found 0.0, allowed: a positive",
        ),
        (
            {"columns": {"question": "prompt"}},
            "data.columns: found 'question', allowed: id, prompt",
        ),
        ({"columns": {"prompt": ""}}, "data.columns.prompt: found an empty text"),
        (
            {"template_date": "26.11.2026"},
            "data.template_date: found '26.11.2026', allowed: a date as YYYY-MM-DD",
        ),
    ],
)
def test_mistakes_in_the_settings_of_rows_are_named(data: Row, says: str) -> None:
    findings = list(check_data(DataConfig(**data)))
    assert any(finding.startswith(says) for finding in findings), findings


# -- splits ----------------------------------------------------------------------------------------


def splits(folder: Path) -> Iterator[str]:
    """Splits of a folder as `datasets` finds them."""
    from datasets import load_dataset_builder

    yield from (
        load_dataset_builder(str(folder), cache_dir=str(folder.parent / "cache")).config.data_files
        or {}
    )


NAMES = (
    "train.jsonl",
    "test.jsonl",
    "data/validation-00000-of-00001.jsonl",
    "dev.jsonl",
    "rows.jsonl",
    "my-train.jsonl",
)


@settings(max_examples=effort(15, 60), deadline=None)
@given(names=st.sets(st.sampled_from(NAMES), min_size=1, max_size=3))
def test_a_folder_has_the_splits_that_datasets_finds(
    names: set[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Or it is refused: if files without a split would not be read, or if there is no split to
    train on."""
    requires("datasets")
    folder = tmp_path_factory.mktemp("set") / "data"
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_rows(folder / name, {"id": name, "prompt": "1", "answer": "1"})
    theirs = set(splits(folder))
    try:
        files = RowFiles.from_path(folder, "train")
    except ConfigError as error:
        unread = len(theirs) == 1 and "would not be read" in str(error)
        assert unread or len(theirs) > 1 or "train" not in theirs, error
        return
    assert theirs == {"train"} and {str(path.relative_to(folder)) for path in files.paths} == names


def test_a_folder_of_another_split_is_not_trained_on_unless_it_is_named(tmp_path: Path) -> None:
    write_rows(tmp_path / "test.jsonl", {"id": "1", "prompt": "1", "answer": "1"})
    with pytest.raises(
        ConfigError, match=r"found split 'test' alone, expected 'train'; .* name it: .*#test"
    ):
        RowFiles.from_path(tmp_path, "train")
    assert (
        RowFiles.from_path(f"{tmp_path}#test", "train").count()
        == RowFiles.from_path(tmp_path).count()
        == 1
    )
    (tmp_path / "more.csv").write_text("a,b\n")
    with pytest.raises(ConfigError, match=r"found more\.csv, which would not be read"):
        RowFiles.from_path(tmp_path)


# -- demonstrations --------------------------------------------------------------------------------


def learned_text(tokenizer: Tokenizer, example: Example | BadLine) -> str:
    assert isinstance(example, Example), example
    (sequence,) = example.sequences
    pairs = zip(sequence.token_ids, sequence.loss_mask, strict=True)
    return "".join(tokenizer.name_of(token) for token, mask in pairs if mask)


def test_turns_of_weight_0_are_not_learned(tokenizer: Tokenizer) -> None:
    chat = [
        USER,
        {"role": "assistant", "content": "8", "weight": 0},
        USER,
        {"role": "assistant", "content": "7", "weight": 1},
    ]
    wrong = [*chat[:3], {"role": "assistant", "content": "7", "weight": 0.5}]
    made = examples(tokenizer, {"messages": chat}, {"messages": wrong}, {"messages": chat[:2]})
    assert learned_text(tokenizer, made[0]) == "7<|im_end|>"
    assert reasons(made[1:]) == [
        "wrong_type: message 3: weight is '0.5', allowed: 0 or 1",
        "empty_answer: nothing in it is learned",
    ]


ENDINGS = """{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content }}
{%- if m.tool_calls %}{{- 'call ' + m.tool_calls[0].function.name + '</s>' }}{% else %}{{- '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% elif not tools %}{{- end or '' }}{% endif %}"""


def test_a_turn_ends_with_its_own_token_whichever_that_is(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Here a call ends with a token that ends no response of the model."""
    (tmp_path / "t.jinja").write_text(ENDINGS)
    template = str(tmp_path / "t.jinja")
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "w"}}]}
    answer = {"role": "assistant", "content": "sunny"}
    chats = [USER, call, {"role": "tool", "content": "30"}, answer], [USER, call], [USER, answer]
    made = examples(tokenizer, *({"messages": chat} for chat in chats), chat_template=template)
    texts = [learned_text(tokenizer, one) for one in made]
    assert texts == ["call w</s>sunny<|im_end|>", "call w</s>", "sunny<|im_end|>"]
    # What a template writes behind a whole chat is no part of the last turn, nor is it taken for
    # the end of a call.
    more = {"chat_template": template, "chat_template_kwargs": {"end": "<pad>"}}
    made = examples(tokenizer, {"messages": chats[2]}, {"messages": chats[0]}, **more)
    assert learned_text(tokenizer, made[0]) == "sunny<|im_end|>"
    assert reasons(made[1:]) == ["chat_template: no special token ends message 1 where it stands"]


CUTS = """{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.tool_calls %}{{- m.tool_calls[0].function.name + m.tool_calls[0].function.arguments | string }}
{%- else %}{{- m.content.split('</think>') | last }}{% endif %}{{- '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""
"""A template that shows the first call alone, without what is said beside it, and no thoughts."""
CALL = {"function": {"name": "add", "arguments": {"x": "three", "y": 4}}}


@pytest.mark.parametrize(
    ("message", "left_out"),
    [
        ({"content": "<think>\n3 and 4\n</think>\n\n7"}, "content"),
        ({"content": "<think>\n\n</think>\n\n7"}, ""),
        ({"content": "7", "reasoning_content": "adding"}, "reasoning_content"),
        ({"content": "adding", "tool_calls": [CALL]}, "content"),
        ({"content": "", "tool_calls": [CALL]}, ""),
        (
            {"content": "", "tool_calls": [CALL, {"function": {"name": "sub", "arguments": "{}"}}]},
            "a call of sub",
        ),
        (
            {"content": "", "tool_calls": [CALL, {"name": "add", "arguments": {"x": ["five"]}}]},
            "a call of add",
        ),
    ],
)
def test_a_turn_is_learned_whole_or_not_at_all(
    tokenizer: Tokenizer, tmp_path: Path, message: Row, left_out: str
) -> None:
    (tmp_path / "t.jinja").write_text(CUTS)
    row = {"messages": [USER, {"role": "assistant", **message}]}
    (made,) = examples(tokenizer, row, chat_template=str(tmp_path / "t.jinja"))
    expected = f"chat_template: the chat template leaves out {left_out} of message 1, to be learned"
    assert reasons([made]) == [expected if left_out else ""]


def test_an_answer_beside_a_whole_chat_and_an_empty_turn_are_refused(tokenizer: Tokenizer) -> None:
    chat = [USER, {"role": "assistant", "content": "3+4=7"}]
    empty = [*chat, USER, {"role": "assistant", "content": ""}]
    made = examples(
        tokenizer,
        {"messages": chat, "answer": "7"},
        {"messages": empty},
        {"prompt": "3+4=", "answer": ""},
    )
    assert reasons(made)[0].startswith(
        "answer_in_prompt: the chat ends with the assistant's message, and there is"
    )
    assert reasons(made)[1:] == [
        f"empty_answer: message {n} is empty, and would be learned" for n in (3, 1)
    ]
    (whole,) = examples(tokenizer, {"messages": chat, "answer": "7"}, ignore_keys=["answer"])
    assert learned_text(tokenizer, whole) == "3+4=7<|im_end|>"


def test_the_prompt_of_a_pair_stands_in_its_chats_once(tokenizer: Tokenizer) -> None:
    system = {"role": "system", "content": "add"}
    earlier = [USER | {"content": "1+1="}, {"role": "assistant", "content": "2"}]

    def pair(prompt: Any, *before: Row) -> Row:
        answers = [[*before, {"role": "assistant", "content": content}] for content in ("7", "8")]
        return {"prompt": prompt, "chosen": answers[0], "rejected": answers[1]}

    rows = [pair("3+4=", system, USER), pair([USER], system, USER), pair([system, USER])]
    made = examples(tokenizer, *rows, pair("3+4=", *earlier, USER), algorithm="dpo")
    sequences = [example.sequences for example in made if isinstance(example, Example)]
    assert sequences[0] == sequences[1] == sequences[2] and len(sequences) == 4
    text = tokenizer.decode(list(sequences[3][0].token_ids))
    assert text.count("3+4=") == text.count("1+1=") == 1
    whole = [USER, {"role": "assistant", "content": "7"}]
    wrong = [
        pair([system, USER], USER),
        {
            "messages": whole,
            "chosen": whole,
            "rejected": [USER, {"role": "assistant", "content": "8"}],
        },
        {"chosen": whole, "rejected": [USER | {"content": "3+5="}, *whole[1:]]},
    ]
    says = "an answer is a chat that does not begin with the messages of the prompt"
    assert reasons(examples(tokenizer, *wrong, algorithm="dpo")) == [
        f"answer_in_prompt: {says}",
        f"answer_in_prompt: {says}",
        "no_preference: message 0, where chosen and rejected differ, is not the assistant's",
    ]


def test_both_responses_of_a_pair_see_the_images_of_the_row(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "m", TinyModelConfig(vision_layers=2, chat=True), 0)
    (tmp_path / "p.png").write_bytes(png())
    seeing = load_tokenizer(tmp_path / "m")
    parts = [
        {"type": "image", "image": "p.png", "max_pixels": 1024},
        {"type": "text", "text": "what?"},
    ]
    reply = [{"role": "assistant", "content": "7"}]
    rows = [
        {"messages": [{"role": "user", "content": parts}], "chosen": "7", "rejected": "8"},
        {"prompt": "<image>what?", "images": ["p.png"], "chosen": reply, "rejected": "8"},
        {"prompt": "<image>what?", "image": "none.png", "chosen": reply, "rejected": "8"},
        {"prompt": "what?", "chosen": [{"role": "assistant", "content": parts}], "rejected": "8"},
    ]
    config = load([], {"algorithm.name": "dpo", "data.chat_template": "model"})
    rules = rules_of(config, seeing, tmp_path)
    with rules.rendering():
        made = [rules.parse_row(number, row, seeing) for number, row in enumerate(rows, start=1)]
    for one, tokens in zip(made[:2], (1, 4), strict=True):
        assert isinstance(one, Example) and len(one.sequences) == 2
        for sequence in one.sequences:
            (medium,) = sequence.media
            ((start, length),) = medium.spans
            assert length == tokens and not any(sequence.loss_mask[start : start + length])
            assert len(set(sequence.token_ids[start : start + length])) == 1
    assert reasons(made[2:])[0].startswith("missing_file: ")
    assert (
        reasons(made[2:])[1]
        == "media_mismatch: a medium stands in a turn of the assistant that is learned"
    )


def test_rules_of_examples_have_all_that_rules_of_prompts_have(tokenizer: Tokenizer) -> None:
    config = load(
        [], {"algorithm.name": "sft", "data.chat_template": "model", "data.ignore_keys": ["x"]}
    )
    made = rules_of(config, tokenizer)
    plain = PromptRules.from_config(config.data, tokenizer)
    same = [
        name
        for name in PromptRules.__dataclass_fields__
        if getattr(made, name) == getattr(plain, name)
    ]
    assert set(PromptRules.__dataclass_fields__) - set(same) == {"max_tokens"}
