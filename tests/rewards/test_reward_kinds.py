"""Rewards that are built in, against known answers, and what composed ones make of theirs."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.reward_settings import ByRowSettings, FormatSettings, RewardSettings
from relax_hpc.config.load import load
from relax_hpc.ops.checks.rewards import check_rewards
from relax_hpc.rewards import RewardError, RewardInput, Score, Scores, get_reward
from relax_hpc.rewards.dapo import normal_form
from relax_hpc.rewards.placement import make_rewards
from relax_hpc.rewards.scoring import scores
from tests.requirements import requires


@pytest.fixture(scope="module", autouse=True)
def no_process_left() -> Iterator[None]:
    yield
    requires("math_verify")
    from relax_hpc.rewards import symbolic

    symbolic.close()


def sample(text: str, answer: str = "4", finish: str = "stop", **metadata: Any) -> RewardInput:
    return RewardInput("2+2?", answer, text, finish, metadata)


def total(name: str, text: str, answer: str, **more: Any) -> float:
    [score] = scores(get_reward(name), [sample(text, answer, **more)])
    return score.total


# The cases of Math-Verify's own page, and of the datasets that it is for.
SAME = [
    ("${1,3} \\cup {2,4}$", "${1,2,3,4}$"),
    (r"$\{1,2,3,4\}$", r"$\{4,2,1,3\}$"),
    ("1/2", r"So it is $\frac{1}{2}$."),
    ("1/2", "The answer is 0.5"),
    (r"\sqrt{8}", r"\boxed{2\sqrt{2}}"),
    (r"\frac{\pi}{4}", r"\boxed{0.25\pi}"),
    (r"(1, 2)", r"$(1,2)$"),
    ("x = 5", r"\boxed{5}"),
    ("x^2 + 2x + 1", r"\boxed{(x+1)^2}"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\boxed{\begin{pmatrix}1&2\\3&4\end{pmatrix}}"),
    (r"70\%", r"\boxed{70\%}"),
    ("1,000", r"\boxed{1000}"),
    ("It is 6 * 3.\n#### 18", "6 * 3 = 18\n#### 18"),
    (r"\boxed{42}", "The final answer is 42. I hope it is correct."),
]


@pytest.mark.parametrize(("answer", "text"), SAME)
def test_the_same_in_mathematics_is_right(answer: str, text: str) -> None:
    requires("math_verify")
    assert total("math", text, answer) == 1.0
    assert total("math", text, answer, finish="length") == 0.0, "cut off"
    assert total("math_boxed", text, answer) == float("boxed" in text)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("42", "41"),
        ("42", ""),
        ("42", r"\boxed{(((}"),
        ("42", "9" * 10_000),
        (r"\{1,2\}", r"\boxed{\{1,3\}}"),
        ("1", "x"),
    ],
)
def test_another_answer_or_none_is_wrong(answer: str, text: str) -> None:
    requires("math_verify")
    assert total("math", text, answer) == total("math_boxed", text, answer) == 0.0


def test_a_right_answer_that_is_no_expression_is_an_error() -> None:
    requires("math_verify")
    failure = scores(get_reward("math"), [sample("4", "")])
    assert failure == RewardError(
        "reward_exception", "ValueError: answer: found '', allowed: a mathematical expression"
    )


def test_math_is_computed_in_a_thread_as_in_a_worker() -> None:
    requires("math_verify")

    async def main() -> tuple[Scores, Scores]:
        rewards = make_rewards("math", 0, 60.0)
        try:
            in_thread = await asyncio.to_thread(scores, get_reward("math"), [sample("4")])
            return in_thread, await rewards.score([sample("The answer is $4$."), sample("5")])
        finally:
            await rewards.close()

    judged = {"unjudged": 0.0}
    assert asyncio.run(main()) == ([Score(1.0, judged)], [Score(1.0, judged), Score(0.0, judged)])


@pytest.mark.parametrize(
    ("text", "strict"),
    [
        ("#### 4", 1.0),
        (r"\boxed{4}", 1.0),
        ("The answer is 4", 0.0),
        ("2 + 2 = 4", 0.0),
        ("#### 5", 0.0),
    ],
)
def test_a_strict_number_is_marked(text: str, strict: float) -> None:
    assert total("math_answer_strict", text, "4") == strict
    assert total("math_answer", text, "4") == float("5" not in text)


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [
        ("So.\nAnswer: 34", "34", True),
        ("Answer: 33\nNo.\nanswer : $34$", "34", True),
        ("Answer: $x = 34$", "34", True),
        ("Answer: \\boxed{34}.", "34", True),
        ("Answer: 1,234 dollars", "1234", True),
        (r"Answer: $\dfrac12$", r"\frac{1}{2}", True),
        (r"Answer: \text{Evelyn}", "Evelyn", True),
        (r"Answer: $\sqrt3$", r"\sqrt{3}", True),
        ("Answer: 34\n" + "x" * 300, "34", False),
        (r"\boxed{34}", "34", False),
        ("Answer: 0.5", "1/2", False),
        ("", "34", False),
    ],
)
def test_dapos_rule(text: str, answer: str, right: bool) -> None:
    [found] = scores(get_reward("dapo"), [sample(text, answer, "length")])
    assert found == Score(1.0 if right else -1.0, {"acc": float(right)})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("10\\%", "10"),
        ("90^\\circ", "90"),
        (r"\left(1, 2\right)", "(1,2)"),
        ("12 square units", "12"),
        ("1,2", "1, 2"),
    ],
)
def test_one_answer_has_one_normal_form(one: str, other: str) -> None:
    assert normal_form(one) == normal_form(other)


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [
        ("The answer is (B).", "B", True),
        ("Answer: B", "B", True),
        (r"\boxed{B}", "B", True),
        (r"\boxed{\text{(B)}}", "B", True),
        ("It is not A. The correct option is B: Paris", "B. Paris", True),
        ("A or B?\nB", "B", True),
        ("**B**", "B", True),
        ("#### B", "(B)", True),
        ("The answer is option B.", "B", True),
        ("The answer is A. No: the answer is B.", "B", True),
        ("The answer is C", "B", False),
        ("The answer is Because", "B", False),
        ("A B", "B", False),
        ("A big house", "A", False),
        (r"\boxed{}, B", "B", False),
        ("", "B", False),
    ],
)
def test_multiple_choice(text: str, answer: str, right: bool) -> None:
    assert total("multiple_choice", text, answer) == float(right)
    assert total("multiple_choice", text, answer, finish="length") == 0.0


def test_a_question_whose_answer_is_no_letter_is_an_error() -> None:
    found = scores(get_reward("multiple_choice"), [sample("B", "both")])
    assert found == RewardError(
        "reward_exception", "ValueError: answer: found 'both', allowed: a letter from A to Z"
    )


REPEATED = [
    " ",
    "\n",
    "(",
    "answer is ",
    "Answer: ",
    "\\boxed{",
    "{",
    "$",
    "1,",
    "\\text{",
    "<think>",
    "</think>",
]
REPEATED += [
    "<answer>",
    "or 5 ",
    "5 or ",
    "####",
    "A, ",
    "\\frac1",
    "1.",
    "-1",
    "\\(",
    "= 5",
    "aA ",
    "**",
    "\\boxed{5} ",
]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("name", "answer"), [("multiple_choice", "B"), ("math_answer", "4"), ("dapo", "B"), ("f1", "B")]
)
def test_no_response_takes_long(name: str, answer: str) -> None:
    for text in REPEATED:
        total(name, text * (200_000 // len(text)), answer)


@pytest.mark.parametrize(
    ("text", "answer", "f1", "exact"),
    [
        ("the Eiffel Tower", "Eiffel tower!", 1.0, 1.0),
        ("Paris, France", "Paris", 2 / 3, 0.0),
        ("in the city of Paris", "Paris", 0.4, 0.0),
        ("Rome", "Paris", 0.0, 0.0),
        ("", "Paris", 0.0, 0.0),
        ("the", "a", 1.0, 1.0),
        ("no no yes", "no", 0.5, 0.0),
        ("\u201cEiffel Tower\u201d", "Eiffel Tower", 1.0, 1.0),
        ("O\u2019Neil", "O'Neil", 1.0, 1.0),
        ("\u5317\u4eac\u3002", "\u5317\u4eac", 1.0, 1.0),
        ("cafe\u0301", "caf\u00e9", 1.0, 1.0),
        ("\u5317\u4eac", "\u4e0a\u6d77", 0.0, 0.0),
    ],
)
def test_words_as_in_squad(text: str, answer: str, f1: float, exact: float) -> None:
    assert total("f1", text, answer) == pytest.approx(f1)
    assert total("exact", text, answer) == exact


def test_of_several_right_answers_the_nearest_counts() -> None:
    several = ["Paris", "the city of Paris"]
    assert (
        total("f1", "city of paris", "?", answers=several)
        == total("exact", "city of paris", "?", answers=several)
        == 1
    )
    for broken in ([], "Paris", [1]):
        found = scores(get_reward("f1"), [sample("Paris", answers=broken)])
        assert isinstance(found, RewardError) and "answers: found" in found.detail


@pytest.mark.parametrize(
    ("text", "well"),
    [
        ("<think>2+2</think><answer>4</answer>", 1.0),
        (" <think>2\n+2</think>\n\n<answer>\n4</answer>\n", 1.0),
        ("<think></think><answer>4</answer>", 0.0),
        ("<answer>4</answer>", 0.0),
        ("So: <think>2</think><answer>4</answer>", 0.0),
        ("<think>2</think><answer>4</answer> Done.", 0.0),
        ("<think>1</think><think>2</think><answer>4</answer>", 0.0),
        ("<think>2<answer>4</answer></think><answer>4</answer>", 0.0),
    ],
)
def test_format(text: str, well: float) -> None:
    assert total("format", text, "4") == well


def test_a_thought_that_the_prompt_opens_is_of_the_format() -> None:
    reward = get_reward("format", RewardSettings())
    response = "2+2</think>\n<answer>4</answer>"
    for prompt, expected in (("2+2?<think>\n", 1.0), ("2+2?", 0.0), ("2+2?<think></think>\n", 0.0)):
        assert reward(RewardInput(prompt, "4", response, "stop")) == expected


def test_another_format() -> None:
    digits = RewardSettings(format=FormatSettings(pattern=r"\d+"))
    assert [get_reward("format", digits)(sample(text)) for text in ("12", "a")] == [1.0, 0.0]
    with pytest.raises(ConfigError, match=r"reward.format.pattern: found '\(': missing \)"):
        get_reward("format", RewardSettings(format=FormatSettings(pattern="(")))


def composed(name: str, settings: RewardSettings, *groups: list[RewardInput]) -> list[Scores]:
    async def main() -> list[Scores]:
        rewards = make_rewards(name, 1, 60.0, settings)
        try:
            await rewards.start()
            return [await rewards.score(group) for group in groups]
        finally:
            await rewards.close()

    return asyncio.run(main())


def test_a_weighted_sum_has_its_parts_as_components() -> None:
    """One part at once, one in a worker; a part that fails fails the group."""
    settings = RewardSettings(weighted={"dapo": 0.5, "format": 0.25, "multiple_choice": 1.0})
    good = [sample("<think>?</think><answer>Answer: B</answer>", "B"), sample("B", "B")]
    found, failed = composed("weighted", settings, good, [sample("B", "both")])
    parts = {"dapo": -1.0, "dapo.acc": 0.0, "format": 1.0, "multiple_choice": 1.0}
    assert found == [Score(0.75, parts), Score(0.5, parts | {"format": 0.0})]
    assert failed == RewardError(
        "reward_exception",
        "multiple_choice: ValueError: answer: found 'both', allowed: a letter from A to Z",
    )
    [too_large] = composed(
        "weighted", RewardSettings(weighted={"answer_exact": 1e39}), [sample("4")]
    )
    assert isinstance(too_large, RewardError) and too_large.reason == "reward_not_finite"


def test_a_prompts_line_chooses_its_reward() -> None:
    by_row = ByRowSettings(
        column="source", rewards={"aime": "dapo", "quiz": "multiple_choice", "both": "weighted"}
    )
    settings = RewardSettings(by_row=by_row, weighted={"answer_exact": 2.0})
    groups = [
        [sample("Answer: B", "B", source=source)]
        for source in ("aime", "quiz", "both", "law", None, ["aime"])
    ]
    *found, law, nothing, listed = composed("by_row", settings, *groups)
    assert [scores[0].total for scores in found] == [1.0, 1.0, 0.0]
    assert law == RewardError("reward_exception", "source: found 'law', allowed: aime, quiz, both")
    assert nothing == RewardError(
        "reward_exception", "source: found nothing, allowed: aime, quiz, both"
    )
    assert isinstance(listed, RewardError)


def findings(**values: Any) -> list[str]:
    return list(
        check_rewards(load([], {key.replace("__", "."): value for key, value in values.items()}))
    )


def test_a_sound_choice_of_rewards_has_no_findings() -> None:
    both = {
        "reward.weighted": {"dapo": 1.0, "format": 0.1},
        "reward.by_row.rewards": {"a": "weighted", "b": "f1"},
    }
    assert findings(rollout__reward="by_row", eval__reward="exact", **both) == []
    assert findings(rollout__reward="code", samples_per_prompt=8) == []


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"rollout.reward": "weighted"}, "reward.weighted: found nothing, or the reward itself"),
        ({"rollout.reward": "by_row"}, "reward.by_row: found nothing, or the reward itself"),
        (
            {"rollout.reward": "weighted", "reward.weighted": {"weighted": 1.0}},
            "reward.weighted: found nothing, or the reward itself",
        ),
        (
            {"rollout.reward": "weighted", "reward.weighted": {"mathe": 1.0}},
            "reward.weighted.mathe: found 'mathe', allowed answer_partial",
        ),
        (
            {
                "rollout.reward": "exact",
                "eval.reward": "by_row",
                "reward.by_row.rewards": {"a": "no:such"},
            },
            "reward.by_row.rewards.a: 'no:such': importing 'no' failed",
        ),
        (
            {"rollout.reward": "format", "reward.format.pattern": "("},
            "reward.format.pattern: found '('",
        ),
        ({"rollout.reward": "remote"}, "reward.remote.url: found ''"),
        (
            {"rollout.reward": "code", "reward.code.timeout_s": 10.0, "samples_per_prompt": 8},
            "reward.code.timeout_s: found 10, allowed: at most 7.5 (rollout.reward_timeout_s "
            "60 / samples_per_prompt 8)",
        ),
    ],
)
def test_what_cannot_be_is_found_before_anything_is_started(
    values: dict[str, Any], expected: str
) -> None:
    [found] = findings(**values)
    assert found.startswith(expected)


def test_settings_reach_a_worker_whole() -> None:
    settings = RewardSettings(format=FormatSettings(pattern=r"\d+"))
    assert dataclasses.asdict(settings)["format"] == {"pattern": r"\d+"}
    assert composed("format", settings, [sample("12"), sample("a")]) == [[Score(1.0), Score(0.0)]]
