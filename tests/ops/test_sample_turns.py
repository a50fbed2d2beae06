"""Episodes of several turns as people see them: who said what, with which media, by which weights,
what is learned."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_hpc.base.versions import Version
from relax_hpc.config.schema import Config, SamplesConfig
from relax_hpc.data.multimodal.medium import Kind, Medium
from relax_hpc.data.prompts import Prompt
from relax_hpc.ops.observe.sample_page import render_page
from relax_hpc.ops.observe.sample_reading import valid_samples
from relax_hpc.ops.observe.sample_text import lines
from relax_hpc.queue.row_schema import split_turns
from relax_hpc.queue.storage.media import MediaStore
from relax_hpc.rewards import Score
from relax_hpc.rollout.engines.engine import Generation
from relax_hpc.rollout.sample_keeper import SampleKeeper, in_tensorboard
from relax_hpc.rollout.sample_log import CUT, CUT_SHORT, Sample, SampleLog, read_samples
from tests.helpers.browser import seen

OLD, NEW = Version(1, 3), Version(1, 4)
CALL = '<tool_call>{"name": "zoom", "arguments": {"at": [4, 4]}}</tool_call>'
SAID = [
    ("I look.", OLD),
    ("\na part\n", None),
    (f"{CALL}<tool_call>", OLD),
    ("again", None),
    ("seven", NEW),
]
"""Turns, and the weights that sampled each."""


class Characters:
    """A tokenizer of a token a character, whichever."""

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


TOKENIZER: Any = Characters()
RESPONSE = "".join(text for text, _ in SAID)
VERSIONS = np.concatenate(
    [np.full(len(text), version.encode() if version else 0, np.int32) for text, version in SAID]
)


def row_of(shown: str) -> dict[str, Any]:
    """A row whose first observation begins with a picture, and of which the newest weights' tokens
    alone are trained on."""
    prompt = "which?"
    versions = np.concatenate([np.zeros(len(prompt), np.int32), VERSIONS])
    start = len(prompt) + len(SAID[0][0])
    return {
        **{
            "row_id": "000000031.00.00",
            "prompt_id": "p",
            "ticket": 31,
            "reward": 0.5,
            "finish_reason": "env_done",
        },
        "token_ids": np.array(TOKENIZER.encode(prompt + RESPONSE), np.int32),
        "token_versions": versions,
        "loss_mask": (versions == NEW.encode()).astype(np.uint8),
        "prompt_len": len(prompt),
        "spans": [{"kind": "image", "start": start, "length": 2, "media_id": shown}],
    }


@pytest.fixture
def sample(tmp_path: Path) -> Sample:
    """What is read of the row once a rollout process has kept it."""
    picture = Medium(Kind.IMAGE, np.full((32, 48, 3), 200, np.uint8), (1, 2, 3))
    shown = MediaStore(tmp_path / "media", durable=False).put(picture.to_bytes())
    log = SampleLog(
        tmp_path / "samples" / "rollout-inc-000001-rank-0.jsonl.gz", SamplesConfig(), steps=1
    )
    config = Config(prompts_per_step=32)
    SampleKeeper(log, config, TOKENIZER, tmp_path / "media").put([row_of(shown)], "shard")
    log.close()
    (found,) = valid_samples(read_samples(tmp_path / "samples"))
    return found | {"fate": "trained"}


def test_a_sample_has_its_turns_with_media_versions_and_masks(sample: Sample) -> None:
    turns = sample["turns"]
    assert [turn["text"] for turn in turns] == [text for text, _ in SAID]
    assert [turn["by"] for turn in turns] == [
        "policy",
        "environment",
        "policy",
        "environment",
        "policy",
    ]
    assert [turn["versions"] for turn in turns] == [[str(OLD)], [], [str(OLD)], [], [str(NEW)]]
    assert [turn["tokens"] for turn in turns] == [len(text) for text, _ in SAID]
    assert [turn["trained"] for turn in turns] == [0, 0, 0, 0, 5]
    assert [len(turn.get("media", [])) for turn in turns] == [
        0,
        1,
        0,
        0,
        0,
    ] and "media" not in sample
    assert (sample["trained"], sample["response"]) == (5, RESPONSE)


def test_calls_of_tools_are_read_as_their_environment_reads_them(sample: Sample) -> None:
    assert [len(turn.get("tool_calls", [])) for turn in sample["turns"]] == [0, 0, 2, 0, 0]
    call, none = sample["turns"][2]["tool_calls"]
    assert call == {"name": "zoom", "arguments": {"at": [4, 4]}} and none.keys() == {"error"}


def test_tensorboard_shows_turn_by_turn(sample: Sample) -> None:
    (text,) = in_tensorboard([sample])
    said = [
        *zip(("policy", "environment"), ("I look.", "a part"), strict=True),
        ("policy", SAID[2][0]),
    ]
    assert text.splitlines()[1:5] == ["prompt: which?", *(f"{who}: {what}" for who, what in said)]
    (text,) = in_tensorboard([sample | {"answer": "a boat"}])
    assert text.endswith("\nanswer: a boat")


def test_a_terminal_shows_turn_by_turn(sample: Sample) -> None:
    shown = list(lines(sample, 400, lambda text, _: text))
    tokens = sample["tokens"]
    assert shown[0].endswith(
        f"env_done  {tokens} tokens  5 trained on  {OLD}  {NEW}  trained  000000031.00.00  p"
    )
    error = sample["turns"][2]["tool_calls"][1]["error"].splitlines()
    assert shown[1:] == [
        "prompt   which?",
        f"policy   7 tokens  0 trained on  {OLD}",
        "         I look.",
        "observed 8 tokens  0 trained on",
        "image    48 x 32",
        "         a part",
        f"policy   {len(SAID[2][0])} tokens  0 trained on  {OLD}",
        f"         {CALL}<tool_call>",
        'call     zoom {"at": [4, 4]}',
        *(f"{'' if number else 'call':<9}{line}" for number, line in enumerate(error)),
        "observed 5 tokens  0 trained on",
        "         again",
        f"policy   5 tokens  {NEW}",
        "         seven",
    ]


def test_a_browser_shows_turns_and_runs_nothing_of_theirs(sample: Sample, tmp_path: Path) -> None:
    evil = "</script><img src=x onerror=\"document.title='evil'\">"
    sample["turns"][0] |= {
        "text": evil,
        "tool_calls": [{"name": evil, "arguments": {"at": [4, evil]}}],
    }
    (tmp_path / "page.html").write_text(
        render_page({"run": "r", "left_out": ""}, [sample | {"environment": {"info": evil}}])
    )
    shown = seen(tmp_path / "page.html")
    article = shown[shown.index("<article>") : shown.index("</article>")]
    assert re.findall(r'<section class="(\w+)"><h3>([^<]*)', article) == [
        ("policy", f"policy \u00b7 7 tokens \u00b7 0 trained on \u00b7 {OLD}"),
        ("environment", "environment \u00b7 8 tokens \u00b7 0 trained on"),
        ("policy", f"policy \u00b7 {len(SAID[2][0])} tokens \u00b7 0 trained on \u00b7 {OLD}"),
        ("environment", "environment \u00b7 5 tokens \u00b7 0 trained on"),
        ("policy", f"policy \u00b7 5 tokens \u00b7 {NEW}"),
    ]
    assert article.count("<img") == 1 and 'alt="image, 48 x 32"' in article
    assert "<title>Samples of r" in shown and article.count("&lt;img src=x") == 4


def test_an_evaluation_is_of_turns_too(tmp_path: Path) -> None:
    log = SampleLog(tmp_path / "samples" / "a.jsonl.gz", SamplesConfig(), steps=1)
    made = Generation(TOKENIZER.encode(RESPONSE), [0.0] * len(RESPONSE), VERSIONS, "env_done")
    prompt = Prompt("p", tuple(TOKENIZER.encode("which?")), "which?", "seven")
    SampleKeeper(log, Config(), TOKENIZER).put_evaluated("held", NEW, [(prompt, made, Score(1.0))])
    log.close()
    (found,) = valid_samples(read_samples(tmp_path / "samples"))
    assert [turn["text"] for turn in found["turns"]] == [text for text, _ in SAID]
    assert found["eval"] == "held" and "trained" not in found and "trained" not in found["turns"][0]


def test_turns_share_the_length_of_a_text(tmp_path: Path) -> None:
    log = SampleLog(tmp_path / "a.jsonl.gz", SamplesConfig(max_text_chars=100), steps=1)
    turns = [{"by": "policy", "text": "x" * count} for count in (10, 90, 1)]
    log.keep([{"id": "fits", "turns": turns[1:]}, {"id": "cut", "turns": turns}], 0)
    log.close()
    fits, cut = read_samples(tmp_path)
    mark = CUT.format(58)
    assert [turn["text"] for turn in fits["turns"]] == ["x" * 90, "x"]
    assert [turn["text"] for turn in cut["turns"]] == ["x" * 10, f"{'x' * 16}{mark}{'x' * 16}", "x"]


def test_what_an_environment_says_last_is_bounded(tmp_path: Path) -> None:
    log = SampleLog(tmp_path / "a.jsonl.gz", SamplesConfig(max_text_chars=100), steps=1)
    log.keep(
        [
            {"id": "fits", "environment": {"info": "x" * 50}},
            {"id": "cut", "environment": {"info": "x" * 100}},
        ],
        0,
    )
    log.close()
    fits, cut = read_samples(tmp_path)
    assert fits["environment"] == {"info": "x" * 50}
    assert (
        cut["environment"].keys() == {CUT_SHORT} and CUT.format(12) in cut["environment"][CUT_SHORT]
    )


def test_turns_that_are_none_are_left_out(sample: Sample) -> None:
    odd = [
        3,
        {"by": "policy"},
        sample["turns"][0] | {"media": ["x"], "tool_calls": [{"name": 1}, {"arguments": 2}]},
    ]
    (found,) = valid_samples([sample | {"turns": odd}])
    assert found["turns"] == [sample["turns"][0]]
    assert "turns" not in next(valid_samples([sample | {"turns": odd[:2]}]))


def test_turns_lie_side_by_side() -> None:
    for codes in itertools.product((0, 7), repeat=5):
        found = list(split_turns(np.array((9, *codes), np.int32), 1))
        assert [place for _, part in found for place in range(part.start, part.stop)] == [
            1,
            2,
            3,
            4,
            5,
        ]
        assert all(
            ((9, *codes)[place] != 0) == sampled
            for sampled, part in found
            for place in range(*part.indices(6))
        )
        assert all(one[0] != other[0] for one, other in itertools.pairwise(found))
    assert list(split_turns(np.array([9], np.int32), 1)) == []
