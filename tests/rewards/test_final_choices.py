"""The letter that a response chooses, and the part of a response that is read: no thoughts, and the
last box."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from relax_hpc.rewards import REWARDS, RewardError, RewardInput, get_reward
from relax_hpc.rewards.final_answer import boxed, without_thoughts
from relax_hpc.rewards.scoring import scores
from tests.requirements import requires
from tests.rewards.answer_helpers import ANYTHING, EXAMPLES, no_process_left_fixture, safe, total  # noqa: F401

THOUGHT_TAGS = [
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<reasoning>", "</reasoning>"),
]
THOUGHT_TAGS += [("[THINK]", "[/THINK]"), ("◁think▷", "◁/think▷"), ("<Think>", "</Think>")]
THOUGHT_TAGS += [
    ("<seed:think>", "</seed:think>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
]


@EXAMPLES
@given(ANYTHING, ANYTHING, st.sampled_from("ABCDE"), st.sampled_from("ABCDE"))
@example("", "", "A", "B")
def test_a_boxed_letter_is_right(before: str, behind: str, right: str, wrong: str) -> None:
    text = f"{wrong}. {safe(before)} \\boxed{{{right}}} {safe(behind)} {wrong}"
    assert total("multiple_choice", text, right) == 1.0
    assert total("multiple_choice", text, wrong) == float(right == wrong)


CHOSEN = [
    "{}",
    "({})",
    "**{}**",
    "{}.",
    "{})",
    "Answer: {}",
    "**Answer:** {}",
    "**Answer: ({}) Paris**",
    "#### {}",
]
CHOSEN += [
    r"\boxed{{\text{{{}}}}}",
    r"$\boxed{{\mathrm{{{}}}}}$",
    r"\boxed{{\textbf{{({})}}\ 5}}",
    r"\boxed{{{}. Paris}}",
]
CHOSEN += [
    "<answer>{}</answer>",
    "<answer>Option {}</answer>",
    "<answer>\n({}) Paris\n</answer>",
    "Option {}",
    "{}) Paris",
]
CHOSEN += [
    "The answer is clearly ({}): Paris",
    "The answer is {}. A and C are wrong.",
    "The answer is {}, not A",
    "'{}'",
]
CHOSEN += [
    "The correct answer would be {}!",
    "The answer is {} because A is wrong",
    "The answer is \\({}\\)",
]
CHOSEN += [
    "The answer is ({}) A dog barks",
    "A or C?\n\n{}",
    "Answer:\n\n{}",
    "So the answer: option ({})",
]
CHOSEN += [
    "B或C?\n正确答案为\uff08{}\uff09\u3002",
    "{}\n\nExplanation: A is wrong.",
    "{}. Paris\n\nExplanation: Paris is a capital.",
    "**{}** is the answer.",
    "The correct answer is\n\n### {}",
    "- {}",
    "Ans: {}",
]
CHOSEN += [
    "I think it's {}.",
    "Hence ({}).",
    "I believe {} is correct.",
    "A is too small. I'm going with {}.",
    "Statement {} is correct.",
]
CHOSEN += [
    "Option {} is correct.",
    "A is too small.\nTherefore ({}) is the correct answer, not C",
    "**{}** is clearly the best choice.",
    "I choose {}.",
    "I'd go with option {} because A is wrong",
    "正确答案是{}。",
    "C不对, 故选{}。",
]


@pytest.mark.parametrize("form", CHOSEN)
def test_forms_of_a_choice(form: str) -> None:
    assert total("multiple_choice", form.format("B"), "B") == 1.0
    assert total("multiple_choice", form.format("D"), "D") == 1.0
    for other in "AC":
        assert total("multiple_choice", form.format("B"), other) == 0.0


HEDGES = [
    "{0} or {1}",
    "{0}, {1}",
    "{0}/{1}",
    "{0} and {1}",
    "{0} & {1}",
    "{0}; {1}",
    "({0}) ({1})",
    "{0} {1}",
    "{0}{1}",
    "{0}-{1}",
]
HEDGES += [
    "{0}. Or maybe {1}.",
    "{0} (or {1})",
    "{0}, possibly {1}",
    "{0} but maybe {1}",
    "{0}. Or {1}.",
    "either {0} or {1}",
    "both {0} and {1}",
]
HEDGES += [
    "{0} as well as {1}",
    "({0}), ({1})",
    "{0} or the letter {1}",
    "{0}? {1}?",
    "{0} | {1}",
    "{0}, {1}, or C",
    "{0}. {1}.",
    "{0} or {1} is correct",
    "I choose {0} or {1}",
]


@pytest.mark.parametrize(
    "form", ["answer: {}", "The answer is {}.", "The correct option is ({}) red."]
)
def test_a_small_letter_is_a_choice(form: str) -> None:
    assert total("multiple_choice", form.format("b"), "B") == 1.0
    assert total("multiple_choice", form.format("b"), "A") == 0.0


@pytest.mark.parametrize(
    "text",
    ["The wrong answer is A.", "The answer is a dog.", "B\nA", "A. red\nB. blue", "A\nmaybe B"],
)
def test_a_letter_that_is_no_choice(text: str) -> None:
    assert total("multiple_choice", text, "A") == 0.0


@pytest.mark.parametrize("form", HEDGES)
def test_several_letters_are_no_choice(form: str) -> None:
    for hedge in (form.format("A", "B"), form.format("B", "A")):
        for text in (
            f"The answer is {hedge}",
            f"Answer: {hedge}",
            rf"\boxed{{{hedge}}}",
            f"<answer>{hedge}</answer>",
            hedge,
        ):
            assert total("multiple_choice", text, "A") == 0.0, text
            assert total("multiple_choice", text, "B") == 0.0, text


def test_a_long_row_of_joining_words_takes_no_exponential_time() -> None:
    # A search that tries every division of the commas would not end.
    hedge = " or,," * 60
    assert total("multiple_choice", f"The answer is A{hedge} x", "A") == 1.0
    assert total("multiple_choice", f"The answer is A{hedge} B", "A") == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "If B is correct, then so is C.",
        "Neither A nor B is correct.",
        "Is it that B is correct?",
        "B is correct only if x",
        "选项B错误",
    ],
)
def test_a_letter_that_may_be_right_is_no_choice(text: str) -> None:
    assert total("multiple_choice", text, "B") == 0.0


@pytest.mark.parametrize("answer", ["A or B", "A, C", "AB", "A big house", "", "5"])
def test_an_answer_that_is_not_one_letter_is_an_error(answer: str) -> None:
    sample = RewardInput("?", answer, "A", "stop")
    assert isinstance(scores(get_reward("multiple_choice"), [sample]), RewardError)


@EXAMPLES
@given(ANYTHING, ANYTHING, st.sampled_from(THOUGHT_TAGS))
def test_thoughts_are_not_read(thought: str, answer: str, tags: tuple[str, str]) -> None:
    opening, closing = tags
    thought, answer = safe(thought), safe(answer)
    assert without_thoughts(f"{opening}{thought}{closing}{answer}") == answer
    assert without_thoughts(f"{thought}{closing}{answer}") == answer
    assert without_thoughts(f"{answer}{opening}{thought}{closing}") == answer
    assert without_thoughts(f"{answer}{opening}{thought}") == answer
    assert without_thoughts(f"{thought}{closing}{answer}", is_open=True) == answer
    assert without_thoughts(f"{thought}", is_open=True) == ""


READERS = [
    ("math_answer", "5", "The answer is 5", "4"),
    ("math_answer_strict", "5", "#### 5", "4"),
    ("math", "5", r"\boxed{5}", "4"),
    ("math_boxed", "5", r"\boxed{5}", "4"),
    ("multiple_choice", "B", "The answer is B", "C"),
    ("dapo", "5", "Answer: 5", "4"),
    ("exact", "Paris", "Paris", "Rome"),
    ("f1", "Paris", "Paris", "Rome"),
]


@pytest.mark.parametrize(("name", "answer", "says", "other"), READERS)
def test_what_is_only_thought_is_no_answer(name: str, answer: str, says: str, other: str) -> None:
    requires("math_verify")
    wrong = -1.0 if name == "dapo" else 0.0
    assert total(name, f"<think>{other}?</think>\n{says}", answer) == 1.0
    assert total(name, f"{other}?</think>\n{says}", answer, prompt="2+3?<think>\n") == 1.0
    assert total(name, says, answer, prompt="2+3?<think>\n\n</think>\n\n") == 1.0
    for text in (
        f"<think>{says}</think>\nI cannot tell.",
        f"{says}</think>\nNo idea.",
        f"<think>{says}",
        f"So <think>\n{says}",
    ):
        assert total(name, text, answer) == wrong, text
    assert total(name, says, answer, prompt="2+3?<think>\n") == wrong, "never closed"


def test_the_prompt_of_the_last_row_opens_a_thought() -> None:
    rows = [["?", "5"], ["? <think>\n", "The answer is 5"]]
    sample = RewardInput("?", "5", "The answer is 5", "stop", rows=rows)
    assert [score.total for score in scores(REWARDS["math_answer"], [sample])] == [0.0]


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{1}, no: \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{19}... wait, no: ... \boxed{18}", "18"),
        (r"\boxed{19} ... \boxed{18}", "18"),
        (r"\boxed 5 is it", "5"),
        (r"\boxed{5", "5"),
        (r"\boxed{5} $\boxed{5}$", "5"),
        (r"$\boxed{5}$ or $\boxed{6}$", ""),
        (r"\boxed{5}\text{ or }\boxed{6}", ""),
        ("nothing", ""),
    ],
)
def test_the_content_of_the_last_box(text: str, content: str) -> None:
    assert boxed(text) == content
