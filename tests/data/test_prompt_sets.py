"""Columns and ids of rows, the order in which sets are visited, and splits of a folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_hpc.base.errors import ConfigError
from relax_hpc.config import load
from relax_hpc.config.schema import DataConfig
from relax_hpc.data.examples import Example
from relax_hpc.data.prompt_file import PromptSets, open_prompts
from relax_hpc.data.prompts import Prompt, PromptRules
from relax_hpc.data.row_files import RowFiles
from relax_hpc.data.tokenizer import Tokenizer
from relax_hpc.data.visits import CYCLE, Visits
from relax_hpc.ops.checks.data import check_data
from relax_hpc.rollout.prompt_source import PromptSource
from tests.effort import effort
from tests.helpers.row_format_helpers import (
    Row,
    bad_row_reasons,
    chat_model,
    parse_examples,
    parse_prompts,
    write_rows,
)
from tests.requirements import requires

requires("torch")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return chat_model(tmp_path_factory.mktemp("model") / "tiny")


def test_columns_can_be_renamed(tokenizer: Tokenizer) -> None:
    row = {"question": "3+4=", "reward_model": {"style": "rule", "ground_truth": 7}, "level": 2}
    names = {"prompt": "question", "answer": "reward_model.ground_truth"}
    (prompt,) = parse_prompts(tokenizer, row, columns=names)
    assert isinstance(prompt, Prompt)
    assert (prompt.prompt_id, prompt.answer, "3+4=" in prompt.text) == ("train/1", "7", True)
    assert prompt.metadata == {"reward_model": row["reward_model"], "level": 2}
    (missing,) = parse_prompts(tokenizer, {"answer": "7"}, columns=names)
    assert bad_row_reasons([missing]) == [
        "missing_field: no question, which data.columns.prompt names"
    ]
    (demonstration,) = parse_examples(
        tokenizer, {"q": "3+4=", "a": "7"}, columns={"prompt": "q", "answer": "a"}
    )
    assert isinstance(demonstration, Example) and demonstration.prompt_id == "train/1"


def test_an_id_is_made_of_set_and_row_number_if_it_is_missing(tokenizer: Tokenizer) -> None:
    results = parse_prompts(
        tokenizer, {"prompt": "1", "answer": "1"}, {"id": None, "prompt": "2", "answer": "2"}
    )
    assert [prompt.prompt_id for prompt in results if isinstance(prompt, Prompt)] == [
        "train/1",
        "train/2",
    ]
    assert bad_row_reasons(parse_prompts(tokenizer, {"id": 1.5, "prompt": "1", "answer": "1"})) == [
        "wrong_type: id is float '1.5'"
    ]


def sets_of(tokenizer: Tokenizer, folder: Path, counts: dict[str, int], **data: Any) -> PromptSets:
    """Prompt sets by name; `counts` are their numbers of rows. Prompts are numbers."""
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


def test_sets_are_visited_by_weight_and_each_set_in_complete_passes(
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
        set_visits = [prompt_id for prompt_id in visited if prompt_id.startswith(name)]
        passes = [
            set_visits[start : start + count] for start in range(0, len(set_visits) - count, count)
        ]
        assert all(len(set(visits)) == count for visits in passes)
        assert len({tuple(visits) for visits in passes}) > 1


@settings(max_examples=effort(50, 500), deadline=None)
@given(
    counts=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    weights=st.lists(st.floats(0.01, 10.0), min_size=5, max_size=5),
    seed=st.integers(0, 99),
    shuffle=st.booleans(),
)
def test_visits_of_a_cycle_are_proportional_to_the_weights(
    counts: list[int], weights: list[float], seed: int, shuffle: bool
) -> None:
    visits = Visits(counts, weights[: len(counts)], seed, shuffle)
    set_of_row: list[int] = []
    for number, count in enumerate(counts):
        set_of_row += [number] * count
    visit_counts = Counter(set_of_row[visits.prompt_at(ticket, 0)] for ticket in range(CYCLE))
    for number, weight in enumerate(weights[: len(counts)]):
        assert abs(visit_counts[number] - CYCLE * weight / sum(weights[: len(counts)])) <= 1
    retried = visits.prompt_at(7, 1)
    first = visits.prompt_at(7, 0)
    assert set_of_row[retried] == set_of_row[first] and (
        retried != first or counts[set_of_row[first]] == 1
    )


@pytest.mark.parametrize("shuffle", [True, False])
def test_rows_are_visited_in_the_order_of_order_by(
    tokenizer: Tokenizer, tmp_path: Path, shuffle: bool
) -> None:
    overrides = {
        "data.train_sets": {"a": "a", "b": "b"},
        "data.order_by": "level",
        "data.shuffle": shuffle,
    }
    sets = sets_of(tokenizer, tmp_path, {"a": 6, "b": 6}, order_by="level")
    source = PromptSource(sets, load([], overrides))
    passes = [
        [source.prompt(12 * number + position, 0) for position in range(12)] for number in range(3)
    ]
    for one_pass in passes:
        assert [prompt.metadata["level"] for prompt in one_pass] == [0] * 4 + [1] * 4 + [2] * 4
        assert len({prompt.prompt_id for prompt in one_pass}) == 12
    orders = {tuple(prompt.prompt_id for prompt in one_pass) for one_pass in passes}
    assert len(orders) == (3 if shuffle else 1)
    assert source.prompt(0, 1).prompt_id == passes[0][1].prompt_id, (
        "the second attempt gets the next row"
    )


def test_a_row_without_a_number_in_order_by_is_bad(tokenizer: Tokenizer) -> None:
    results = parse_prompts(
        tokenizer, {"prompt": "1", "answer": "1", "level": "hard"}, order_by="level"
    )
    assert bad_row_reasons(results) == [
        "wrong_type: level is 'hard', allowed: a number, see data.order_by"
    ]


@pytest.mark.parametrize(
    ("data", "expected"),
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
def test_errors_in_row_settings_are_reported(data: Row, expected: str) -> None:
    findings = list(check_data(DataConfig(**data)))
    assert any(finding.startswith(expected) for finding in findings), findings


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
def test_splits_of_a_folder_equal_those_of_datasets(
    names: set[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Or the folder is refused: a file without a split would not be read, or no split is `train`."""
    requires("datasets")
    folder = tmp_path_factory.mktemp("set") / "data"
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_rows(folder / name, {"id": name, "prompt": "1", "answer": "1"})
    expected_splits = set(splits(folder))
    try:
        files = RowFiles.from_path(folder, "train")
    except ConfigError as error:
        has_unread_files = len(expected_splits) == 1 and "would not be read" in str(error)
        assert has_unread_files or len(expected_splits) > 1 or "train" not in expected_splits, error
        return
    assert (
        expected_splits == {"train"}
        and {str(path.relative_to(folder)) for path in files.paths} == names
    )


def test_a_folder_with_only_another_split_is_refused_unless_the_split_is_named(
    tmp_path: Path,
) -> None:
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
