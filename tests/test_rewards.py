"""Built-in rewards, how rewards are found, and what becomes of broken ones."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
import torch

from relax_hpc.errors import ConfigError
from relax_hpc.rewards import REWARDS, RewardError, RewardInput, get_reward, safe_reward


def sample(text: str, answer: str = "1234", finish: str = "stop") -> RewardInput:
    return RewardInput(prompt="4312?", answer=answer, response_text=text, finish_reason=finish)


@pytest.mark.parametrize(
    ("text", "finish", "partial", "exact"),
    [
        ("1234", "stop", 1.0, 1.0),
        ("1243", "stop", 0.5, 0.0),
        ("12", "stop", 0.5, 0.0),
        ("12345678", "stop", 0.5, 0.0),
        ("", "stop", 0.0, 0.0),
        ("4321", "stop", 0.0, 0.0),
        ("1234", "length", 0.0, 0.0),
        ("1234", "abort", 0.0, 0.0),
    ],
)
def test_answer_rewards(text, finish, partial, exact):
    assert get_reward("answer_partial")(sample(text, finish=finish)) == partial
    assert get_reward("answer_exact")(sample(text, finish=finish)) == exact


def test_empty_answer_and_response():
    assert REWARDS["answer_partial"](sample("", answer="")) == 0.0


def test_own_reward_is_imported(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text("def length(sample):\n    return len(sample.response_text)\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert get_reward("my_rewards:length")(sample("12")) == 2
    with pytest.raises(ConfigError, match="no function 'lenght'; did you mean 'length'"):
        get_reward("my_rewards:lenght")


def test_reward_that_does_not_exist(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="did you mean 'answer_exact'"):
        get_reward("answer_exakt")
    with pytest.raises(ConfigError, match=r"package\.module:function"):
        get_reward("zzz")
    with pytest.raises(ConfigError, match="importing 'no_such_module' failed: ModuleNotFoundError"):
        get_reward("no_such_module:f")
    (tmp_path / "broken_rewards.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="'broken_rewards' failed: ZeroDivisionError"):
        get_reward("broken_rewards:f")
    with pytest.raises(ConfigError, match="''"):
        get_reward(":f")


NUMBERS = [1, 0.5, True, np.float32(0.25), np.int64(3), np.array(0.5), np.array(2), np.bool_(True)]
NUMBERS += [torch.tensor(0.5), torch.tensor(True), torch.tensor(1.5, dtype=torch.bfloat16, requires_grad=True)]


@pytest.mark.parametrize("value", NUMBERS, ids=repr)
def test_numbers_of_any_kind_are_rewards(value):
    found = safe_reward(lambda _: value, sample(""))
    assert type(found) is float
    assert found == value


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "reward_not_a_number"),
        ("1", "reward_not_a_number"),
        ([1.0], "reward_not_a_number"),
        (math.nan, "reward_not_finite"),
        (-math.inf, "reward_not_finite"),
        (1e39, "reward_not_finite"),
        (10**400, "reward_not_finite"),
        (np.array([0.5]), "reward_not_a_number"),
        (torch.tensor([0.5, 1.0]), "reward_not_a_number"),
        (torch.tensor(1j), "reward_not_a_number"),
        (np.array("1"), "reward_not_a_number"),
        (torch.tensor(math.nan), "reward_not_finite"),
        (torch.empty((), device="meta"), "reward_exception"),
    ],
)
def test_other_values_become_a_named_reason(value, reason):
    found = safe_reward(lambda _: value, sample(""))
    assert isinstance(found, RewardError)
    assert found.reason == reason


def test_an_exception_becomes_a_named_reason():
    found = safe_reward(lambda s: s.metadata["weight"], sample(""))
    assert found == RewardError("reward_exception", "KeyError: 'weight'")


@pytest.mark.parametrize("code", [3, None, "no grader on this node"])
def test_a_reward_that_would_end_the_process_is_named_like_another_that_fails(code):
    found = safe_reward(lambda _: sys.exit(code), sample(""))
    assert isinstance(found, RewardError)
    assert (found.reason, found.detail) == ("reward_exception", f"SystemExit: {code or ''}")


def test_what_came_instead_of_a_number_is_said():
    found = safe_reward(lambda _: torch.zeros(2, 1), sample(""))
    assert found == RewardError("reward_not_a_number", "returned Tensor of shape (2, 1), expected one number")
