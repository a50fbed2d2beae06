r"""DAPO's rule for mathematics (Q. Yu et al., arXiv 2503.14476, section 4.1): 1 for a right answer,
-1 for any other.

Prompts ask for a last line `Answer: ...`. Answers are compared as texts in a normal form, after
that of Minerva (A. Lewkowycz et al., arXiv 2206.14858, appendix D): the text behind the last `=`,
without units, words and typesetting, and fractions and roots with braces.

Unlike the authors' code, it takes no notice of Markdown's emphasis and code, keeps a blank between
two digits (`2 1/2` is not 21/2), removes commas from a number only where they separate thousands
(`1,2` is not 12), keeps the text in front of `=` if that offers something else (`5 or x = 6`), and
does not look into thoughts.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from relax_hpc.rewards.final_answer import boxed, final_text

if TYPE_CHECKING:
    from relax_hpc.rewards import RewardInput

_LAST = 300
"""Characters of a response at its end that are looked at."""
_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_INSIDE = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox|overline)\s*\{([^{}]*)\}")
_UNITS = re.compile(
    r"(?:square|cubic)?(?:units?|cm|km|meters?|feet|foot|inch(?:es)?|mph|degrees?|percent|points?|dollars?|cents?"
    r"|seconds?|minutes?|hours?|days?|weeks?|months?|years?|edges?|sides?|students|pounds?|bees|meals|cards|integers)$",
    re.IGNORECASE,
)
_EMPHASIS = re.compile(r"(?<![\w)\]}])\*\*(?:(.+?)\*\*)?|\*\*(?![\w(\[{\\.+-])")
"""Markdown's emphasis, or one end of it; between two operands ** is a power."""
_MARKDOWN = re.compile(r"`|\\[()\[\]]")
"""Signs of code and of LaTeX around an answer."""
_NOISE = re.compile(
    r"\\(?:left|right|[,;:! "
    r"%$])|\s(?!(?<=\d\s)\d)|[$%]|\\?\^\{?\\circ\}?|\\(?:dots|ldots|cdots)|\.$"
)
_FRACTION = re.compile(r"\\[dt]?frac(?:([^{\\])|(\{[^{}]*\})) ?(?:([^{\\])|(\{[^{}]*\}))")
_ROOT = re.compile(r"\\sqrt([^{\[\\])")
_GROUPED = re.compile(r"(?<=\d)(?:\{,\}|,\\!|\\[,:;! ])(?=\d{3}(?!\d))")
"""A separator of thousands in LaTeX."""
_THOUSANDS = re.compile(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_OFFERS_ANOTHER = re.compile(r"[,;]|\b(?:or|and)\b", re.IGNORECASE)
_ARTICLE = re.compile(r"\b(?:an?|the)\s+", re.IGNORECASE)


def dapo(sample: RewardInput) -> dict[str, float]:
    """1 or -1, and `acc`, 1 or 0, whatever ended the response.

    >>> from relax_hpc.rewards import RewardInput
    >>> dapo(RewardInput("?", "34", "2 * 17 = 34.\\nAnswer: $34$", "stop"))
    {'total': 1.0, 'acc': 1.0}
    """
    text = _EMPHASIS.sub(r"\1", final_text(sample)[-_LAST:])
    answers = _ANSWER.findall(text)
    right = bool(answers) and normal_form(answers[-1]) == normal_form(sample.answer)
    return {"total": 1.0 if right else -1.0, "acc": float(right)}


def normal_form(answer: str) -> str:
    r"""``answer`` so that the same answer is the same text.

    >>> normal_form(r"$x = \dfrac12$ cm"), normal_form("1,234 dollars")
    ('\\frac{1}{2}', '1234')
    """
    text = boxed(answer) if "\\boxed" in answer else answer
    text = _MARKDOWN.sub("", _EMPHASIS.sub(r"\1", text))
    text = _GROUPED.sub("", text.replace("\u2212", "-"))
    label, _, value = text.rpartition("=")
    text = _ARTICLE.sub("", text if _OFFERS_ANOTHER.search(label) else value)
    text = _NOISE.sub("", " ".join(_INSIDE.sub(r"\1", text).split()))
    text = _UNITS.sub("", text) if any(map(str.isdigit, text)) else text
    text = _ROOT.sub(r"\\sqrt{\1}", _FRACTION.sub(_with_braces, text))
    return text.replace(",", "") if _THOUSANDS.fullmatch(text) else text


def _with_braces(match: re.Match[str]) -> str:
    top, top_inside, bottom, bottom_inside = match.groups()
    return f"\\frac{top_inside or f'{{{top}}}'}{bottom_inside or f'{{{bottom}}}'}"
