"""A right answer is right and a wrong answer is wrong, whatever stands around it: numbers and
expressions."""

from __future__ import annotations

import os
import signal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_hpc.config.load import load
from relax_hpc.ops.checks.rewards import check_rewards
from relax_hpc.rewards import RewardError, RewardInput, Score, get_reward
from relax_hpc.rewards.number_text import read_number
from relax_hpc.rewards.scoring import scores
from tests.effort import effort
from tests.requirements import requires
from tests.rewards.answer_helpers import ANYTHING, EXAMPLES, no_process_left_fixture, safe, total  # noqa: F401

NUMBERS = st.fractions(-1000, 1000, max_denominator=50)


def written(number: Fraction) -> str:
    if number.denominator == 1:
        return str(number)
    return rf"\frac{{{number.numerator}}}{{{number.denominator}}}"


@EXAMPLES
@given(NUMBERS, ANYTHING, ANYTHING)
def test_a_boxed_number_is_right(number: Fraction, before: str, behind: str) -> None:
    text = f"{safe(before)} \\boxed{{{written(number)}}} {safe(behind)}"
    assert total("math_answer", text, str(number)) == 1.0
    assert total("math_answer_strict", text, str(number)) == 1.0
    assert total("math_answer", text, str(number + 1)) == 0.0


@EXAMPLES
@given(NUMBERS, st.integers(-99, 99), ANYTHING)
def test_only_the_last_box_counts(number: Fraction, other: int, between: str) -> None:
    text = f"\\boxed{{{other}}}\n\nWait, {safe(between)}\n\\boxed{{{written(number)}}}"
    assert total("math_answer", text, str(number)) == 1.0
    assert total("math_answer", text, str(other)) == float(number == other)


TAILS = [
    r"\sqrt{3}",
    "^{2}",
    "^2",
    "²",
    "x",
    "x+1",
    "+1",
    "-1",
    "*2",
    "!",
    ":30",
    r"\pi",
    " pi",
    ", 6",
    ",6",
    ";6",
    " or 6",
]
TAILS += [
    " and 6",
    "/0",
    "e",
    "ab",
    " 6",
    r"\text{ or }6",
    r"\cdot 2",
    " = 6",
    "..6",
    "_2",
    "(2)",
    r"\frac{1}{2}x",
    "th",
]
TAILS += [" to 6", "%6", r"\times 10^2", "e2", " thousand", r"\frac12", " 1/2"]
HEADS = [
    "-",
    "2",
    "1.",
    r"\sqrt",
    r"\pi",
    "x^",
    "10^",
    "x+",
    "3*",
    "1/",
    "6, ",
    "6 or ",
    "not ",
    r"\neq ",
    "<",
    "2-",
    r"\pm ",
]
HEADS += ["6 = ", "|", "f", r"\log ", "x > ", "x=6, x="]


@pytest.mark.parametrize("answer", ["5", "12", "0.5"])
def test_a_number_within_something_larger_is_not_that_number(answer: str) -> None:
    for content in [*(answer + tail for tail in TAILS), *(head + answer for head in HEADS)]:
        for text in (rf"\boxed{{{content}}}", f"#### {content}"):
            assert total("math_answer", text, answer) == 0.0, text
            assert total("math_answer_strict", text, answer) == 0.0, text
        # In a sentence an exclamation mark is no factorial.
        for text in (f"The answer is {content}", f"<answer>{content}</answer>"):
            assert total("math_answer", text, answer) == float(content == f"{answer}!"), text


@pytest.mark.parametrize(
    ("content", "value"),
    [
        ("1.5e3", "1500"),
        (r"1.5\times10^3", "1500"),
        (r"5\cdot 10^{-2}", "0.05"),
        ("10^{3}", "1000"),
        (r"2\frac12", "2.5"),
        ("2 1/2", "2.5"),
        (r"-\frac{1}{2}", "-0.5"),
        (r"\frac{-1}{2}", "-0.5"),
        (r"\dfrac{3}{4}", "0.75"),
        ("x = 5", "5"),
        ("10/2 = 5", "5"),
        ("(5)", "5"),
        (r"5\text{ cm}^2", "5"),
        ("5 square meters", "5"),
        ("5cm", "5"),
        (r"\$5", "5"),
        (r"90^\circ", "90"),
        (r"70\%", "70"),
        (r"1{,}000", "1000"),
        (r"12\,500", "12500"),
        ("5 million", "5000000"),
        ("+5", "5"),
        ("\u22125", "-5"),
        ("5.", "5"),
        (".5", "0.5"),
    ],
)
def test_forms_of_a_number(content: str, value: str) -> None:
    assert read_number(content) == Fraction(value)
    assert total("math_answer", rf"So \boxed{{{content}}}.", value) == 1.0
    assert total("math_answer", f"The answer is {content}\nDone", value) == 1.0


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("The answer is:\n\n$$\n5\n$$", "5"),
        ("**Answer:** 5", "5"),
        ("The answer is 5 (five).", "5"),
        ("<b>The answer is 5</b>", "5"),
        ("The answer is 5 because 6 and 7 are too large", "5"),
        ("The answer is 5 eggs from 6 hens and 3 ducks", "5"),
        ("The answer is 5!", "5"),
        ("#### Step 2: add\nThe answer is 5", "5"),
        ("The answer is x = 5.", "5"),
        ("It fell to -5 degrees", "-5"),
        ("\u7b54\u6848\u662f5\u4e2a", "5"),
        ("The answer is (5)", "5"),
        ("\u7b54\u6848\uff1a5", "5"),
        ("\u7b54\u6848\u4e3a 5 \u5143\u3002", "5"),
        ("\u56e0\u6b64\uff0c\u4e00\u5171\u662f 5 \u4e2a\u3002", "5"),
        ("#### 3. Add the numbers\n2 + 3 = 5\n\nThe total is 5.", "5"),
        ("Final answer: 5 \u2705", "5"),
        ("\u51715\u500b", "5"),
        ("She makes $5 every day at the farmers' market.", "5"),
        ("It is 0.5 or 1/2", "0.5"),
    ],
)
def test_numbers_in_sentences(text: str, value: str) -> None:
    assert total("math_answer", text, value) == 1.0
    assert total("math_answer", text, "7") == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "The answer is 5 or 6",
        "The answer is 5, or maybe 6",
        "The answer is 5. Or 6.",
        "The answer is 5, 6",
        "The answer is 5 dollars or 6 dollars",
        "The answer is either 5 or 6",
        "The answer is between 5 and 6",
        "The answer is not 5. The answer is not 6",
        "The answer is less than 6, more than 5",
        "It is 5 or 6",
        "It is 5, 6",
        "It is 5-6",
        "It is 6 - 5",
        r"\boxed{5} or \boxed{6}",
        r"\boxed{5}, \boxed{6}",
        r"\boxed{5 \text{ or } 6}",
        "#### 5 or 6",
    ],
)
@pytest.mark.parametrize("name", ["math_answer", "math"])
def test_several_numbers_are_no_answer(name: str, text: str) -> None:
    requires("math_verify")
    assert total(name, text, "5") == total(name, text, "6") == 0.0


@pytest.mark.parametrize("text", ["twice 5", "the square of 5", "at least 5", "at most 5"])
def test_a_number_of_which_a_statement_takes_more_is_no_answer(text: str) -> None:
    assert total("math_answer", f"The answer is {text}", "5") == 0.0


@pytest.mark.parametrize(
    "text",
    ["\u4e0d\u662f5\u3002", "\u662f5\u62166", "\u662f6\u4e2a\u62165\u4e2a", "\u662f5\u548c6"],
)
def test_a_number_that_is_refused_or_joined_in_chinese_is_no_answer(text: str) -> None:
    assert total("math_answer", f"\u7b54\u6848{text}", "5") == 0.0
    assert total("math_answer", f"\u7b54\u6848{text}", "6") == 0.0


def test_a_long_text_behind_a_number_takes_no_exponential_time() -> None:
    # A search that tries every division of the letters would not end.
    assert read_number(f"5 {'a' * 60}#") is None
    assert read_number(f"5 {'a' * 60}") == 5


def test_a_multiple_at_the_end_of_a_sentence_is_no_answer() -> None:
    assert total("math_answer", "It is the square root of 5.", "5") == 0.0
    assert total("math_answer", "The answer is a square garden of 10 meters.", "10") == 1.0


MATH_CASES = [
    ("2x+1", "The answer is 2x+1", "2"),
    (r"\frac{1}{2}", "The answer is:\n\\[\n\\frac{1}{2}\n\\]", "1"),
    ("1500", r"\boxed{1.5e3}", "1.5"),
    ("5", r"\boxed{5 dollars}", "6"),
    ("1, 2", r"\boxed{1} and \boxed{2}", "2"),
    (r"\{1,2\}", "$1$ and $2$", "2"),
    ("7", "With $x=2$ we get 7.", "2"),
    ("7", "First $x=2$, then $y=7$.", "2"),
    (r"\frac{1}{3}", r"\boxed{\frac{1}{3} \approx 0.333}", "0.333"),
    ("18", "The answer is 18 dollars, for 9 eggs.", "9"),
    ("(1,2)", "The answer is (1,2).", "1"),
    ("6", r"\boxed{5}. No, \boxed{6}", "5"),
    (r"\sqrt{8}", "The final answer is $2\\sqrt{2}$. I hope it is correct.", "2"),
    (r"5 \to 6", r"\boxed{5 \to 6}", "5"),
    (r"0.\overline{3}", r"\boxed{\frac{1}{3}}", "0"),
    ("1/6", r"\boxed{0.1\overline{6}}", "0.1"),
    ("1.5e-3", r"\boxed{0.0015}", "1.5"),
    (r"\frac{\pi}{4}", r"\boxed{\frac\pi4}", "4"),
    (r"2\sqrt{13}", "The answer is 2√13.", "2"),
    (r"16\pi", "The answer is 16π.", "16"),
    (r"x^2-\frac{1}{2}", "\\boxed{x² \u2212 ½}", "2"),
    (r"(-\infty, 2)\cup(3, \infty)", "\\boxed{(\u2212∞, 2) \u222a (3, ∞)}", "2"),
    ("5", r"\boxed{5}", r"\boxed{\leq 5}"),
    (r"5", r"\boxed{5 \text{ apples}}", r"\boxed{5 \text{ million}}"),
    ("5", r"\boxed{5 \text{ more months}}", r"\boxed{5 \text{ or more}}"),
    (r"5 \text{ thirds}", r"\boxed{5 \text{ thirds}}", "6"),
    ("5", "The answer is 5", r"\boxed{5 \text{ thousandths}}"),
    ("5", r"The answer is $\$5$.", "6"),
    ("50000", "\\boxed{5\u4e07\u5143}", "5"),
    ("5", r"\boxed{x = 5}", r"\boxed{> 5}"),
]


@pytest.mark.parametrize(("right", "text", "wrong"), MATH_CASES)
def test_the_expression_that_a_response_ends_at(right: str, text: str, wrong: str) -> None:
    requires("math_verify")
    assert total("math", text, right) == 1.0
    if "boxed" in wrong:
        assert total("math", wrong, right) == 0.0
    else:
        assert total("math", text, wrong) == 0.0


@pytest.mark.parametrize(
    "answer",
    ["5.", "**5**", "Answer: 5", "The answer is $5$.", "$2+3=5$, so $\\boxed{5}$.", "0.5e1"],
)
def test_forms_of_a_right_answer(answer: str) -> None:
    requires("math_verify")
    assert total("math", r"\boxed{5}", answer) == 1.0
    assert total("math", r"\boxed{6}", answer) == 0.0


@pytest.mark.parametrize(
    ("name", "answer", "allowed"),
    [("math", "^5C_2", "a mathematical expression"), ("math_answer", "16π", "one number")],
)
def test_a_right_answer_that_is_read_in_part_is_an_error(
    name: str, answer: str, allowed: str
) -> None:
    requires("math_verify")
    error = scores(get_reward(name), [RewardInput("?", answer, r"\boxed{5}", "stop")])
    assert isinstance(error, RewardError)
    assert f"allowed: {allowed}" in error.detail


@pytest.mark.parametrize("content", [r"5 \lor 6", r"5 \to 6", "5 = 6", "x = 5 = 6", r"5 \equiv 6"])
def test_two_values_in_a_box_are_neither(content: str) -> None:
    requires("math_verify")
    text = rf"\boxed{{{content}}}"
    assert total("math", text, "5") == total("math", text, "6") == 0.0


@pytest.mark.parametrize("answer", ["(3,4)", "12:30", "2x+1", "", "five", "3 or 4"])
def test_an_answer_that_is_not_one_number_is_an_error(answer: str) -> None:
    sample = RewardInput("?", answer, "5", "stop")
    assert isinstance(scores(get_reward("math_answer"), [sample]), RewardError)


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [
        ("Answer: 1,2", "12", False),
        ("Answer: 1,234", "1234", True),
        ("Answer: 5 or x = 6", "6", False),
        ("Answer: x=5, x=6", "6", False),
        ("Answer: 2*3 = 6", "6", True),
        ("Answer: 1,2", "1, 2", True),
        ("**Answer:** 34", "34", True),
        ("**Answer**: **34**", "34", True),
        (r"Answer: \(34\)", "34", True),
        ("Answer: `34`", "34", True),
        ("Answer: 1{,}234", "1234", True),
        ("Answer: \u221234", "-34", True),
        (r"Answer: \frac 1 2", r"\frac{1}{2}", True),
        ("Answer: 2 1/2", "21/2", False),
        ("Answer: 3  4", "34", False),
        ("Answer: 2**3", "23", False),
        ("Answer: 2**-3", "2-3", False),
        ("**Answer: 34**cm", "34", True),
        ("Answer:** 34", "34", True),
    ],
)
def test_dapo_takes_the_whole_line(text: str, answer: str, right: bool) -> None:
    assert total("dapo", text, answer) == (1.0 if right else -1.0)


BOMBS = [
    r"9^{9^{9^9}}",
    "9!!!!!!",
    r"\sum_{i=1}^{10^9} \sin(i)",
    "{" * 3000 + "9" + "}" * 3000,
    r"(10^{9})!",
]


def test_an_expression_that_takes_too_long_costs_only_its_response(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requires("math_verify")
    from relax_hpc.rewards import symbolic

    monkeypatch.setattr(symbolic, "MATH_LIMIT_S", 0.5)
    texts = [rf"\boxed{{{content}}}" for content in ("9", *BOMBS[: effort(2, 5)], "9")]
    samples = [RewardInput("?", "9", text, "stop") for text in texts]
    judged = scores(get_reward("math"), samples)
    right, unjudged = Score(1.0, {"unjudged": 0.0}), Score(0.0, {"unjudged": 1.0})
    assert judged == [right, *[unjudged] * (len(texts) - 2), right]


@pytest.mark.parametrize(
    ("signals", "deaths", "starts", "total"),
    [
        ([signal.SIGSTOP, signal.SIGKILL], 2, 3, 1.0),
        ([signal.SIGSTOP, signal.SIGKILL], 9, 4, 0.0),
        ([signal.SIGSTOP], 1, 2, 1.0),
    ],
)
def test_a_process_that_is_killed_or_suspended_is_replaced(
    signals: list[int], deaths: int, starts: int, total: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    requires("math_verify")
    from relax_hpc.rewards import symbolic, symbolic_process

    symbolic.close()
    # The process is stopped before it reads a request, so that it cannot answer before its death.
    write, pids = symbolic_process._write_all, list[int]()

    def write_and_signal(fd: int, data: bytes) -> None:
        is_response = b"null" not in data
        pids.append(symbolic._process._pid)
        for number in signals if is_response and len(set(pids)) <= deaths else ():
            os.kill(pids[-1], number)
        write(fd, data)

    monkeypatch.setattr(symbolic_process, "_write_all", write_and_signal)
    if signals == [signal.SIGSTOP]:
        monkeypatch.setattr(symbolic, "MATH_LIMIT_S", 0.5)
    samples = [RewardInput("?", "9", text, "stop") for text in (r"\boxed{9}", r"\boxed{3}")]
    judged = scores(get_reward("math"), samples[:1])
    assert judged == [Score(total, {"unjudged": 1.0 - total})]
    monkeypatch.setattr(symbolic_process, "_write_all", write)
    assert scores(get_reward("math"), samples)[1] == Score(0.0, {"unjudged": 0.0})
    assert len({*pids, symbolic._process._pid}) == starts


def test_a_right_answer_that_takes_too_long_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    requires("math_verify")
    from relax_hpc.rewards import symbolic

    monkeypatch.setattr(symbolic, "MATH_LIMIT_S", 0.3)
    answer = "(" * 3000 + "9" + ")" * 3000
    failure = scores(get_reward("math"), [RewardInput("?", answer, "9", "stop")])
    assert isinstance(failure, RewardError) and failure.reason == "reward_exception"
    assert "TimeoutError: answer: reading" in failure.detail


def test_a_limit_of_a_group_below_that_of_its_expressions_is_refused() -> None:
    values = {"rollout.reward": "math", "rollout.reward_timeout_s": 20.0}
    [finding] = check_rewards(load([], values))
    assert finding.startswith(
        "rollout.reward_timeout_s: found 20, allowed with reward math: at least"
    )
