r"""Reward of mathematical problems whose answer is one number, compared by value.

The answer of a response is the first of these that it has: the content of its last `\boxed{...}`,
the line after its last `####` (as in GSM8K), the clause after its last "answer is", its last
number. A boxed or marked text is read as a whole: `2\sqrt{3}` is not 2, and `5 or 6` is not a
number.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import TYPE_CHECKING

from relax_hpc.rewards.final_answer import BOX, answer_end, boxed
from relax_hpc.rewards.number_text import has_words, last_number, read_number, read_statement

if TYPE_CHECKING:
    from relax_hpc.rewards import RewardInput

GSM8K_MARK = "####"
STATEMENT = re.compile(
    r"\banswer\b[^.\n\d]{0,40}?(?:\bis\b|:|=)|答案[^\u3002\n\d\u4e0d]{0,10}?(?:是|为|為|\uff1a|:|=)",
    re.IGNORECASE,
)
_HEADING = re.compile(r"\W*\d{1,2}[.)] +\W*[^\W\d_]{2}")
"""A numbered heading of words, as in "#### 3. Add the numbers"."""


def math_answer(sample: RewardInput) -> float:
    r"""1 if the final number of the response equals the answer and it was not cut off, else 0.

    ValueError: the right answer is not a number.

    >>> from relax_hpc.rewards import RewardInput
    >>> math_answer(RewardInput("?", "1200", r"So it is \boxed{\$1,200.00}.", "stop"))
    1.0
    """
    right = _right(sample.answer)
    return float(sample.finish_reason == "stop" and answer_of(answer_end(sample)) == right)


def math_answer_strict(sample: RewardInput) -> float:
    r"""Like `math_answer`, but 0 if the response does not mark its answer by `\boxed{...}` or
    `####`.

    >>> from relax_hpc.rewards import RewardInput
    >>> [math_answer_strict(RewardInput("?", "7", text, "stop")) for text in ("#### 7", "It is 7")]
    [1.0, 0.0]
    """
    right = _right(sample.answer)
    return float(sample.finish_reason == "stop" and _marked(answer_end(sample)) == right)


def answer_of(text: str) -> Fraction | None:
    """The final number of a response; None if it has none.

    >>> answer_of("3 apples and 4 pears make 7 pieces of fruit."), answer_of("I cannot say.")
    (Fraction(7, 1), None)
    """
    if BOX in text or gsm8k_line(text):
        return _marked(text)
    statements = list(STATEMENT.finditer(text))
    if statements:
        return read_statement(text[statements[-1].end() :])
    return last_number(text)


def _right(answer: str) -> Fraction:
    right = read_number(answer.rpartition(GSM8K_MARK)[2])
    if right is None:
        allowed = f"one number, also behind {GSM8K_MARK}"
        raise ValueError(f"answer: found {answer[-100:]!r}, allowed: {allowed}")
    return right


def _marked(text: str) -> Fraction | None:
    """The number in the last box, or, without a box, after the last `####`."""
    return read_number(boxed(text)) if BOX in text else read_number(gsm8k_line(text))


def gsm8k_line(text: str) -> str:
    """Line after the last `####`; empty without that mark, or if the line is a heading of words."""
    _, mark, following = text.rpartition(GSM8K_MARK)
    line = following.strip(" ").split("\n", 1)[0] if mark else ""
    if _HEADING.match(line):
        return ""
    is_answer = read_number(line) is not None or not has_words(line) or re.match(r"\W*\d", line)
    return line if is_answer else ""
