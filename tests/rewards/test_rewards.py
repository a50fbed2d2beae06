"""Built-in rewards, how rewards are found, what shapes they have, and what becomes of broken
ones."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch

from relax_hpc.base.errors import ConfigError
from relax_hpc.rewards import REWARDS, RewardError, RewardInput, Score, get_reward
from relax_hpc.rewards.maths import math_answer
from relax_hpc.rewards.scoring import is_async, scores, scores_soon


def sample(text: str, answer: str = "1234", finish: str = "stop") -> RewardInput:
    return RewardInput(prompt="4312?", answer=answer, response_text=text, finish_reason=finish)


@pytest.mark.parametrize(
    ("response", "right"),
    [
        (r"\boxed{42}", "42"),
        (r"first \boxed{1}, then \boxed{\text{x}=\frac{1}{2}}", "0.5"),
        (r"so \boxed{\$1,080.50} a year", "1080.5"),
        (r"\boxed{1{,}000}", "1,000"),
        (r"\boxed{70\%}", "70"),
        ("16 - 3 - 4 = 9 eggs. 9 * 2 = $18.\n#### 18", "18"),
        ("The answer is 18 dollars, for 9 eggs.", "Some reasoning, 3 * 6.\n#### 18"),
        ("The final answer is: **$1,080.50**.", "1080.50"),
        ("The answer is 5. No: the answer is 6.", "6"),
        ("Of 12 apples 3 are left, so 9.", "9"),
        ("16-3", None),
        ("10 - 12 = -2", "-2"),
        ("it fell to \u22123 degrees", "-3"),
        ("v1,2 and 3,4", None),
        ("it is .5 or 1/2", "1/2"),
        ("", None),
        ("I cannot say; the answer is none", None),
        (r"\boxed{}, although 7 seems right", None),
        ("1/0", None),
        ("9" * 10_000, None),
        (r"\boxed{" * 5_000, None),
    ],
)
def test_a_number_is_compared_by_value(response: str, right: str | None):
    ours = [sample(response, answer, "stop") for answer in (right or "7", "12345")]
    assert [math_answer(one) for one in ours] == [float(right is not None), 0.0]
    assert math_answer(sample(response, right or "7", "length")) == 0.0, "cut off"
    with pytest.raises(ValueError, match="answer: found 'none', allowed: one number"):
        math_answer(sample(response, "none", "stop"))


def asked(reward: Callable, *texts: str) -> list[Score] | RewardError:
    return scores(reward, [sample(text) for text in texts or [""]])


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


OWN = """
from dataclasses import dataclass

def length(sample):
    return len(sample.response_text)

class Offset:
    def __init__(self):
        self.offset = 10

    def __call__(self, sample):
        return self.offset + len(sample.response_text)

    async def ranked(self, samples):
        return [self.offset + place for place, _ in enumerate(samples)]

@dataclass
class Ranked:
    offset: int = 10

    def __call__(self, samples):
        return [self.offset + place for place, _ in enumerate(samples)]

class Needy:
    def __init__(self, more): ...

class Mute: ...
"""


def test_own_reward_is_imported(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    assert get_reward("my_rewards:length")(sample("12")) == 2
    assert get_reward("my_rewards:Offset")(sample("12")) == 12
    for name in ("Offset.ranked", "Ranked"):
        assert asked(get_reward(f"my_rewards:{name}"), "a", "b") == [Score(10.0), Score(11.0)]
    with pytest.raises(ConfigError, match="no function 'lenght'; did you mean 'length'"):
        get_reward("my_rewards:lenght")
    with pytest.raises(
        ConfigError, match=r"'my_rewards:Needy': cannot be made: TypeError: .*'more'"
    ):
        get_reward("my_rewards:Needy")
    with pytest.raises(ConfigError, match="found Mute, allowed: a function, or an object"):
        get_reward("my_rewards:Mute")
    with pytest.raises(ConfigError, match="'my_rewards:Offset' has no method 'rank'"):
        get_reward("my_rewards:Offset.rank")


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


async def soon(sample: RewardInput) -> float:
    await asyncio.sleep(0)
    return float(len(sample.response_text))


async def of_group_soon(samples: list[RewardInput]) -> np.ndarray:
    return np.array([len(sample.response_text) for sample in samples])


SHAPES = {
    "one": lambda sample: len(sample.response_text),
    "group": lambda samples: [len(sample.response_text) for sample in samples],
    "tensor": lambda samples: torch.tensor([len(sample.response_text) for sample in samples]),
    "components": lambda sample: {"total": len(sample.response_text), "form": 0.5},
    "awaitable": lambda sample: soon(sample),
    "async": soon,
    "async group": of_group_soon,
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_reward_may_have_any_of_these_shapes(shape: str) -> None:
    reward = SHAPES[shape]
    parts = {"form": 0.5} if shape == "components" else {}
    expected = [Score(float(n), parts) for n in (1, 0, 3)]
    assert asked(reward, "a", "", "abc") == expected
    assert asyncio.run(scores_soon(reward, [sample(text) for text in ("a", "", "abc")])) == expected
    assert is_async(reward) == shape.startswith("async")


NUMBERS = [1, 0.5, True, np.float32(0.25), np.int64(3), np.array(0.5), np.array(2), np.bool_(True)]
NUMBERS += [
    torch.tensor(0.5),
    torch.tensor(True),
    torch.tensor(1.5, dtype=torch.bfloat16, requires_grad=True),
]


@pytest.mark.parametrize("value", NUMBERS, ids=repr)
def test_numbers_of_any_kind_are_rewards(value):
    [found] = asked(lambda _: value)
    assert type(found.total) is float
    assert found.total == value


BROKEN = [
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
]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        *BROKEN,
        *(({"total": value}, reason) for value, reason in BROKEN),
        ({"total": 1.0, "form": math.nan}, "reward_not_finite"),
        ({"form": 1.0}, "reward_not_a_number"),
        ({"total": 1.0} | {f"c{n}": 0.0 for n in range(33)}, "reward_not_a_number"),
    ],
)
def test_other_values_become_a_named_reason(value, reason):
    found = asked(lambda _: value, "")
    assert isinstance(found, RewardError)
    assert found.reason == reason
    assert asked(lambda samples: [1.0, value], "a", "b") == found


def kind_of(value: object) -> str:
    return type(value).__name__


@pytest.mark.parametrize(
    "values", [None, 1.0, "ab", {"a": 1, "b": 2}, [1.0], [1.0] * 3, iter([1.0, 2.0])], ids=kind_of
)
def test_a_group_has_as_many_rewards_as_samples(values: object) -> None:
    found = asked(lambda samples: values, "a", "b")
    assert isinstance(found, RewardError) and found.reason == "reward_wrong_count"


def test_an_exception_becomes_a_named_reason():
    found = asked(lambda s: s.metadata["weight"])
    assert found == RewardError("reward_exception", "KeyError: 'weight'")


def test_what_a_reward_says_at_length_is_cut():
    found = asked(lambda s: s.metadata["x" * 1_000_000])
    assert len(found.detail) == 1000
    [score] = asked(lambda _: {"total": 1, "y" * 1_000_000: 0})
    assert score == Score(1.0, {"y" * 64: 0.0})


@pytest.mark.parametrize("code", [3, None, "no grader on this node"])
def test_a_reward_that_would_end_the_process_is_named_like_another_that_fails(code):
    async def soon(_: RewardInput) -> float:
        sys.exit(code)

    for reward in (lambda _: sys.exit(code), soon):
        found = asked(reward, "a", "b")
        assert found == RewardError(
            "reward_exception", f"SystemExit: {'' if code is None else code}"
        )


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise KeyError


@pytest.mark.parametrize(
    "error", [asyncio.CancelledError("by a library"), Unspeakable()], ids=kind_of
)
def test_errors_that_are_not_as_others_cost_their_group_alone(error: BaseException) -> None:
    async def soon_raised(_: RewardInput) -> float:
        raise error

    text = "it has no text, because its __str__ raises"
    if isinstance(error, asyncio.CancelledError):
        text = "by a library"
    for found in (
        asked(soon_raised, "a", "b"),
        asyncio.run(scores_soon(soon_raised, [sample("a"), sample("b")])),
    ):
        assert found == RewardError("reward_exception", f"{type(error).__name__}: {text}")


def test_who_is_cancelled_waits_for_no_reward() -> None:
    """A reward that is asked for is cancelled with the one who asks, and says nothing."""

    async def late() -> None:
        async with asyncio.timeout(0.01):
            await scores_soon(lambda sample: asyncio.sleep(1000), [sample("a")])

    with pytest.raises(TimeoutError):
        asyncio.run(late())


def test_what_came_instead_of_a_number_is_said():
    found = asked(lambda _: torch.zeros(2, 1))
    assert found == RewardError(
        "reward_not_a_number", "returned Tensor of shape (2, 1), expected one number"
    )
