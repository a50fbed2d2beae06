r"""DAPO's rule for mathematics (Q. Yu et al., arXiv 2503.14476, section 4.1): 1 for a right answer,
-1 for any other.

Prompts ask for a last line `Answer: ...`. Answers are compared as texts in a normal form, which
follows that of Minerva (A. Lewkowycz et al., arXiv 2206.14858, appendix D): the text after the last
`=`, without units, words and typesetting, and fractions and roots with braces.

There are five differences to the authors' code. Markdown's emphasis and code marks are ignored. A
blank between two digits is kept (`2 1/2` is not 21/2). Commas are removed from a number only if
they separate thousands (`1,2` is not 12). The text before `=` is kept if it offers another answer
(`5 or x = 6`). Thoughts are not searched.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from relax_hpc.rewards.final_answer import boxed, final_text

if TYPE_CHECKING:
    from relax_hpc.rewards import RewardInput

_LAST_CHARS = 300
"""Number of characters at the end of a response that are searched."""
_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_INSIDE = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox|overline)\s*\{([^{}]*)\}")
_UNITS = re.compile(
    r"(?:square|cubic)?(?:units?|cm|km|meters?|feet|foot|inch(?:es)?|mph|degrees?|percent|points?|dollars?|cents?"
    r"|seconds?|minutes?|hours?|days?|weeks?|months?|years?|edges?|sides?|students|pounds?|bees|meals|cards|integers)$",
    re.IGNORECASE,
)
_EMPHASIS = re.compile(r"(?<![\w)\]}])\*\*(?:(.+?)\*\*)?|\*\*(?![\w(\[{\\.+-])")
"""Markdown's emphasis, or one end of it. Between two operands ** is a power."""
_MARKDOWN = re.compile(r"`|\\[()\[\]]")
"""Marks of code and of LaTeX around an answer."""
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
    """1 or -1, and `acc`, 1 or 0, also for a response that was cut off.

    >>> from relax_hpc.rewards import RewardInput
    >>> dapo(RewardInput("?", "34", "2 * 17 = 34.\\nAnswer: $34$", "stop"))
    {'total': 1.0, 'acc': 1.0}
    """
    text = _EMPHASIS.sub(r"\1", final_text(sample)[-_LAST_CHARS:])
    answers = _ANSWER.findall(text)
    right = bool(answers) and normal_form(answers[-1]) == normal_form(sample.answer)
    return {"total": 1.0 if right else -1.0, "acc": float(right)}


def normal_form(answer: str) -> str:
    r"""Normal form of ``answer``: equal answers have equal normal forms.

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
