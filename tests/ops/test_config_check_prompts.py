"""`relax-hpc check`: files of prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.config import load
from relax_hpc.config.schema import TinyModelConfig
from relax_hpc.data import row_files
from relax_hpc.ops.checks import files
from relax_hpc.ops.checks.settings import check
from relax_hpc.training.models.tiny_model import make_tiny_model
from tests.helpers.model_files import model_directory
from tests.ops.check_helpers import model_findings

PROMPT = {"id": 1, "prompt": "12", "answer": "12"}
PROMPTS = [
    (b"", "no prompts; write one"),
    (
        json.dumps({"id": 1, "prompt": "12"}).encode(),
        "1 of 1 lines are bad: 1 missing_field (first line 1: no answer)",
    ),
    (json.dumps(PROMPT).encode("utf-16"), "UTF-16"),
    (json.dumps([PROMPT]).encode(), "one JSON list"),
    (json.dumps(PROMPT | {"prompt": "1" * 500}).encode(), "over_long (first line 1: 501 tokens"),
    (
        json.dumps(PROMPT | {"prompt": [{"role": "user", "content": "12"}]}).encode(),
        "a list of chat messages",
    ),
]


@pytest.mark.parametrize(("content", "says"), PROMPTS, ids=[says for _, says in PROMPTS])
def test_prompts_are_read(tmp_path: Path, content: bytes, says: str) -> None:
    path = model_directory(tmp_path / "model")
    (tmp_path / "p.jsonl").write_bytes(content)
    over = {
        "data.task": "",
        "warm_start.steps": 0,
        "data.max_prompt_tokens": 200,
        "data.train": str(tmp_path / "p.jsonl"),
    }
    (finding,) = model_findings(path, **over)
    assert finding.startswith(f"data.train: {tmp_path / 'p.jsonl'}: ") and says in finding
    assert not (path / "run").exists()


def prompt_findings(path: Path, **data: Any) -> tuple[list[str], list[str]]:
    """What `check` says of a file of prompts: mistakes, and notes."""
    config = load([], {"data.train": str(path), "model.path": str(path.parent / "model"), **data})
    mistakes = [line for line in files.check_files(config) if line.startswith("data.train")]
    return mistakes, [line for line in files.notes(config) if line.startswith("data.train")]


@pytest.mark.parametrize(
    ("overrides", "is_refused"),
    [
        ({}, True),
        ({"eval.reward": "math"}, True),
        ({"algorithm": {"name": "ppo"}}, True),
        ({"rollout.reward": "math"}, False),
        ({"rollout.reward": "environment"}, False),
        ({"algorithm": {"name": "sft"}}, False),
    ],
    ids=str,
)
def test_prompts_of_files_have_no_reward_that_nobody_has_chosen(
    overrides: dict[str, Any], is_refused: bool
) -> None:
    config = load([], {"data.train": "prompts.jsonl", "model.path": "/nowhere"} | overrides)
    findings = [line for line in check(config) if line.startswith("rollout.reward")]
    expected = (
        "rollout.reward: found nothing with prompts from files, allowed: the reward to learn "
        "from, such as math, "
    )
    assert len(findings) == is_refused and all(line.startswith(expected) for line in findings)


def test_every_row_of_the_prompts_is_judged(tmp_path: Path) -> None:
    model_directory(tmp_path / "model")
    path, good = (
        tmp_path / "p.jsonl",
        [json.dumps(PROMPT | {"id": number}) for number in range(1500)],
    )
    path.write_text("\n".join([*good, "", "{", *["{}"] * 300]))
    says = (
        f"data.train: {path}: 301 of 1801 lines are bad: 300 missing_field (first line 1503: no "
        "prompt"
    )
    mistakes, notes = prompt_findings(path, **{"data.max_bad_share": 0.1})
    assert len(mistakes) == 1 and mistakes[0].startswith(says) and notes == []
    mistakes, notes = prompt_findings(path, **{"data.max_bad_share": 0.2})
    assert mistakes == [] and len(notes) == 1
    assert notes[0].startswith(
        "data.train: 301 of 1801 rows are skipped: 300 missing_field (first line 1503: no prompt"
    )


def test_a_long_file_of_prompts_is_read_in_part_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "READ_S", 0.0)
    monkeypatch.setattr(files, "BLOCK", 10)
    model_directory(tmp_path / "model")
    path, good = tmp_path / "p.jsonl", [json.dumps(PROMPT | {"id": number}) for number in range(40)]
    share = {"data.max_bad_share": 0.05}
    path.write_text("\n".join(["{", *good, *["{"] * 20]))
    begun = "the run reads all of them when it starts"
    assert prompt_findings(path, **share) == (
        [],
        [f"data.train: read 10 of 61 rows in 0 s, 1 of them bad; {begun}"],
    )
    path.write_text("\n".join(["{"] * 4 + good))
    mistakes, _ = prompt_findings(path, **share)
    assert (
        len(mistakes) == 1 and "4 of 44 lines are bad: 4 broken_json (first line 1" in mistakes[0]
    ), "for certain"
    path.write_text("\n".join(good[:10]))
    assert prompt_findings(path, **share) == ([], []), "it was all there was"


def test_prompts_are_read_once_for_mistakes_and_notes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_directory(tmp_path / "model")
    path, read = tmp_path / "p.jsonl", []
    path.write_text(json.dumps(PROMPT | {"prompt": "<s>1"}))
    rows = row_files.read_rows
    monkeypatch.setattr(
        row_files, "read_rows", lambda path, *how: read.append(path) or rows(path, *how)
    )
    for _ in range(2):
        mistakes, notes = prompt_findings(path)
        assert mistakes == [] and len(notes) == 1
    assert len(read) == 1
    path.write_text(json.dumps(PROMPT | {"prompt": "11"}))
    assert prompt_findings(path) == ([], []) and len(read) == 2


def test_names_of_special_tokens_in_prompts_are_said(tmp_path: Path) -> None:
    path, prompts = model_directory(tmp_path / "model"), tmp_path / "p.jsonl"
    prompts.write_text(
        json.dumps(PROMPT | {"prompt": "<s>1"}) + "\n" + json.dumps(PROMPT | {"id": 2})
    )
    over = {"model.path": str(path), "data.train": str(prompts)}
    (note,) = files.notes(load([], over))
    assert "data.train: 1 of 2 prompts contain names of special tokens, such as <s>" in note
    assert not list(files.notes(load([], over | {"data.special_tokens": ["prompt"]})))


def test_a_stop_text_may_be_a_special_token_and_not_have_one_in_it(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "m", TinyModelConfig(chat=True), 0)
    over = {
        "model.path": str(tmp_path / "m"),
        "data.task": "relax_hpc.examples.tasks.sort_digits:SortDigits",
        "rollout.stop": ["<|im_start|>", "a<pad>"],
    }
    findings = [
        line for line in files.check_files(load([], over)) if line.startswith("rollout.stop")
    ]
    assert findings == [
        "rollout.stop: found 'a<pad>', allowed: texts without special tokens, or one special "
        "token alone, such as '<pad>'"
    ]
