"""Evaluations: several responses to a prompt, pass@k, and rewards that could not be had."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_hpc.base.metrics.read import read_metrics
from relax_hpc.config.schema import EvalConfig, TinyModelConfig
from relax_hpc.queue.inspect.audit import audit, read_events
from relax_hpc.rewards import RewardError, Score
from relax_hpc.rollout.evaluation import EvaluationResults, pass_at
from relax_hpc.rollout.sample_log import read_samples
from relax_hpc.training.models.tiny_model import make_tiny_model
from tests.helpers.run_helpers import LIGHT, SMALL, merged, running, trained_steps
from tests.requirements import requires

WAIT_S = 120.0


@given(
    st.integers(1, 7).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n)))
)
def test_pass_at_k_is_the_share_of_all_choices_that_hold_a_right_one(
    drawn: tuple[int, int, int],
) -> None:
    count, right, k = drawn
    chosen = list(itertools.combinations(range(count), k))
    assert pass_at(k, count, right) == pytest.approx(
        sum(min(one) < right for one in chosen) / len(chosen)
    )


def test_pass_at_k_of_the_paper() -> None:
    """n = 200 as there, in exact integers: a product of floats, as its listing has, gives the
    same."""
    product = 1.0
    for i in range(200 - 13 + 1, 200 + 1):
        product *= 1 - 100 / i
    assert pass_at(100, 200, 13) == pytest.approx(1 - product, abs=1e-12)


def test_what_has_no_reward_counts_for_nothing() -> None:
    tally = EvaluationResults(
        EvalConfig(responses=3, temperature=1.0, pass_at=[1, 2, 3], pass_reward=0.5, reward="f1")
    )
    tally.add([Score(1.0), Score(0.5), Score(0.0)])
    tally.add([Score(0.0), RewardError("reward_timeout", ""), Score(0.0)])
    tally.add([RewardError("http_error", "")] * 3)
    values = dict(tally.values("set"))
    assert values == pytest.approx(
        {
            "eval/set/f1": 0.3,
            "eval/set/pass@1": 1 / 3,
            "eval/set/pass@2": 0.5,
            "eval/set/pass@3": 1.0,
        }
    )
    assert tally.failed == {"reward_timeout": 1, "http_error": 3}
    assert dict(EvaluationResults(EvalConfig()).values("set")) == {}, "nobody can say"


def test_a_run_with_composed_rewards_and_evaluations_of_several_responses(tmp_path: Path) -> None:
    """A prompt whose line names no reward is drawn again under its ticket in training, and left out
    of evaluations."""
    requires("mpi", "torch", "megatron", "transformers")
    names = ["quiz", "words", "law", *["words"] * 13]
    rows = [
        {"id": f"p{number}", "prompt": f"{number:03d}?", "answer": "0123456789", "kind": name}
        for number, name in enumerate(names)
    ]
    for name, part in (("train", rows), ("held", rows[1:5])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    make_tiny_model(tmp_path / "model", TinyModelConfig(**SMALL["model"]["tiny"]), 3)
    over = {
        "steps": 2,
        "model": {"path": str(tmp_path / "model")},
        "data": {
            "task": "",
            "train": str(tmp_path / "train.jsonl"),
            "eval": {"held": str(tmp_path / "held.jsonl")},
        },
        "rollout": {"reward": "weighted", "max_new_tokens": 4},
        "reward": {
            "weighted": {"by_row": 1.0, "format": 0.5},
            "by_row": {
                "column": "kind",
                "rewards": {"quiz": "answer_exact", "words": "answer_partial"},
            },
            "format": {"pattern": r"[0-9]+"},
        },
        "eval": {
            **{
                "every": 2,
                "reward": "by_row",
                "responses": 3,
                "temperature": 1.0,
                "max_new_tokens": 8,
            },
            **{"pass_at": [1, 3], "pass_reward": 0.05},
        },
    }
    over["data"] |= {"shuffle": False, "max_prompt_tokens": 8}
    with running(tmp_path, merged(LIGHT, over)) as live:
        live.finish(WAIT_S)
    last = trained_steps(live.run)[-1]
    assert {"reward/component_by_row", "reward/component_format"} <= last.keys()
    failed = [event for event in read_events(live.run) if event["what"] == "eval_failed"]
    assert len(failed) == 6 and {event["reason"] for event in failed} == {"reward_exception"}, (
        "of two evaluations"
    )
    result = audit(live.run)
    assert result.problems == [] and set(result.failed) == {"reward_exception"}

    rewards = defaultdict(list)
    for sample in read_samples(live.run.samples):
        if sample.get("eval") == "held" and sample["step"] == 2:
            rewards[sample["prompt_id"]].append(None if "failed" in sample else sample["reward"])
            assert sample["tokens"] <= 8
    assert {name: len(found) for name, found in rewards.items()} == {
        "p1": 3,
        "p2": 3,
        "p3": 3,
        "p4": 3,
    }
    assert rewards.pop("p2") == [None] * 3
    [row] = [
        row for row in read_metrics(live.run.root) if row["step"] == 2 and "eval/held/by_row" in row
    ]
    means = [sum(found) / 3 for found in rewards.values()]
    assert row["eval/held/by_row"] == pytest.approx(sum(means) / 3)
    for k in (1, 3):
        passes = [
            pass_at(k, 3, sum(value >= 0.05 for value in found)) for found in rewards.values()
        ]
        assert row[f"eval/held/pass@{k}"] == pytest.approx(sum(passes) / 3)
