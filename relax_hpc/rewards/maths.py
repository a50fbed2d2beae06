r"""Reward of mathematical problems whose answer is one number: what a response says at its end is compared by value.

Of a response counts, in this order, what its last `\boxed{...}` holds, what stands behind its last `####` (as in
GSM8K), what stands behind its last "answer is", and its last number.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from relax_hpc.rewards import RewardInput

_DIGITS = 64
"""Digits of a number at most: exact arithmetic over thousands of digits takes time, and a policy may write them."""
LAST = 10_000
"""Characters of a response at its end that are looked at."""
_NUMBER = re.compile(
    r"(?P<sign>[-+\u2212\u2013]?) ?[$€£]? ?"
    r"(?:\\d?frac ?\{ ?(?P<top>\d+) ?\} ?\{ ?(?P<bottom>\d+) ?\}"
    r"|(?P<whole>\d+)?(?P<decimals>\.\d+)?(?: ?/ ?(?P<over>\d+))?)"
)
_COMMAS = re.compile(r"(?<!\d)\d{1,64}(?:,\d{1,64})+")
_THOUSANDS = re.compile(r"\d{1,3}(?:,\d{3})+")
_TYPESET_COMMA = re.compile(r"\{,\}|,\\!")
_MINUS = ("-", "\u2212", "\u2013")
"""Minus signs: as on a keyboard, as typeset, and as an en dash."""
_TYPESET = re.compile(
    r"\\(?:text|mathrm|mathbf|mbox)\s*\{[^{}]*\}|\\[,;:! ]|\\left|\\right|[{}]|\*\*|__|~|\\?\$|\\(?=%)"
)
_BOX = "\\boxed"
_MARKS = re.compile(r"####|\banswer\b[^.\n\d]{0,40}?(?:\bis\b|:|=)", re.IGNORECASE)


def math_answer(sample: RewardInput) -> float:
    r"""1 if the response ends at a number that equals the answer, else 0; also if it was cut off before its end.

    >>> from relax_hpc.rewards import RewardInput
    >>> math_answer(RewardInput("?", "1200", r"So it is \boxed{\$1,200.00}.", "stop"))
    1.0
    """
    if sample.finish_reason != "stop":
        return 0.0
    right = number_in(sample.answer.rpartition("####")[2])
    return float(right is not None and answer_of(sample.response_text) == right)


def math_answer_strict(sample: RewardInput) -> float:
    r"""Return `math_answer` for a response that marks its answer by `\boxed{...}` or `####`; 0 without such a mark.

    >>> from relax_hpc.rewards import RewardInput
    >>> [math_answer_strict(RewardInput("?", "7", text, "stop")) for text in ("#### 7", "It is 7")]
    [1.0, 0.0]
    """
    text = sample.response_text[-LAST:]
    return math_answer(sample) if _BOX in text or "####" in text else 0.0


def answer_of(text: str) -> Fraction | None:
    """The number that a response ends at; None: it gives none.

    >>> answer_of("3 apples and 4 pears make 7 pieces of fruit."), answer_of("I cannot say.")
    (Fraction(7, 1), None)
    """
    text = text[-LAST:]
    if _BOX in text:
        return number_in(boxed(text))
    marks = list(_MARKS.finditer(text))
    if marks:
        return number_in(text[marks[-1].end() :])
    numbers = _numbers(text)
    return numbers[-1] if numbers else None


def number_in(text: str) -> Fraction | None:
    """The first number of ``text``, by value, whatever units, currency or typesetting stand around it.

    >>> number_in("$1,234.50 dollars") == number_in(r"\\frac{2469}{2}") == Fraction("1234.5")
    True
    """
    return next(iter(_numbers(text)), None)


def _numbers(text: str) -> list[Fraction]:
    """Numbers in a text, in order; as many as can be told apart."""
    plain = _COMMAS.sub(_without_commas, _TYPESET_COMMA.sub(",", text))
    if "frac" not in plain:
        plain = _TYPESET.sub(" ", plain)
    plain = " ".join(plain.split())
    found = (_value(match) for match in _NUMBER.finditer(plain) if match["whole"] or match["decimals"] or match["top"])
    return [value for value in found if value is not None]


def _without_commas(match: re.Match[str]) -> str:
    """Numbers of a text with commas: one, or several."""
    return match[0].replace(",", "" if _THOUSANDS.fullmatch(match[0]) else ", ")


def _value(match: re.Match[str]) -> Fraction | None:
    whole, top, over = (match[name] or "" for name in ("whole", "top", "over"))
    bottom = match["bottom"] or over
    if len(match[0]) > _DIGITS or (bottom and int(bottom) == 0):
        return None
    value = Fraction(int(top)) if top else Fraction((whole or "0") + (match["decimals"] or ""))
    negative = match["sign"] in _MINUS and not _is_operand(match.string[max(0, match.start() - 2) : match.start()])
    return (-value if negative else value) / (int(bottom) if bottom else 1)


def _is_operand(before: str) -> bool:
    """Whether a minus behind these characters subtracts, or is a hyphen, as in 16-3, 16 - 3, (2) - 1 and top-3."""
    return before[-1:].isalnum() or before.rstrip()[-1:].isdigit() or before.rstrip()[-1:] == ")"


def boxed(text: str) -> str:
    r"""Content of the last `\boxed`: between braces that match, or behind it.

    >>> boxed(r"\boxed{1}, no: \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    inside = text.rpartition(_BOX)[2].lstrip()
    if not inside.startswith("{"):
        return inside[:_DIGITS]
    depth = 0
    for place, character in enumerate(inside):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return inside[1:place]
    return inside[1:]
