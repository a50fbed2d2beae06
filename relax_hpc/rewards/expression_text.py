r"""The final expression of a response, as LaTeX text: a set, an equation, a matrix, or a number."""

from __future__ import annotations

import re

from relax_hpc.rewards.final_answer import BOX, boxed
from relax_hpc.rewards.maths import STATEMENT, gsm8k_line
from relax_hpc.rewards.number_text import (
    expand_repeating,
    first_line,
    has_words,
    last_number,
    read_number,
    read_statement,
)

_LATEX = re.compile(r"\$\$(.+?)\$\$|(?<!\\)\$(.+?)(?<!\\)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_JOINS = re.compile(
    r"[ ,;/&(]*(?:(?:or|and|maybe|perhaps|possibly|but|also)\b[ ,(]*)*",
    re.IGNORECASE,
)
"""Text between two expressions that are offered together."""
_SENTENCE_END = re.compile(r"[.;!?](?=\s|$)")
_TWO_VALUES = re.compile(
    r"\\(?:lor|vee|to|(?:long)?(?:left)?rightarrow|implies|iff)(?![A-Za-z])",
    re.IGNORECASE,
)
"""Signs between two expressions. Of these, Math-Verify 0.9.0 reads only the last one."""
_EQUALITY = re.compile(r"=|\\equiv|\\approx|≈")
_RELATION = re.compile(r"\s*(?:[<>≤≥≠]|\\(?:leq?|geq?|leqslant|geqslant|neq?|lt|gt)(?![A-Za-z]))")
_QUALIFIER = re.compile(
    r"\\(?:text|textbf|mathrm|mbox) ?\{(?:[^{}]*\b(?:squared|cubed|halves|thirds?"
    r"|(?:ten|hundred|thousand|million)ths?|trillion|or (?:more|less|fewer|greater|higher|lower)"
    r"|at (?:least|most))\b| ?k ?\})"
)
_FRACTION_OF_COMMAND = re.compile(r"(\\[dtc]?frac) ?(\\pi|\\[A-Za-z]+(?= ))")
_SIGNS = {
    "π": r"\pi ",
    "∞": r"\infty ",
    "\u222a": r"\cup ",
    "\u2229": r"\cap ",
    "≤": r"\le ",
    "≥": r"\ge ",
    "≠": r"\ne ",
    "±": r"\pm ",
    "\u00d7": r"\times ",
    "\u00b7": r"\cdot ",
    "\u2212": "-",
    "°": r"^\circ",
    "½": r"\frac{1}{2}",
    "⅓": r"\frac{1}{3}",
    "⅔": r"\frac{2}{3}",
    "¼": r"\frac{1}{4}",
    "¾": r"\frac{3}{4}",
}
_SIGN_CODES = str.maketrans(_SIGNS)
_RAISED = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-", strict=True))
_EXPONENT = re.compile(f"[{''.join(_RAISED)}]+")
_ROOT = re.compile(r"√ ?(?:(\d+(?:\.\d+)?|[A-Za-z])|\(([^()]*)\))")
_ROUNDING = 0.01
"""Relative difference of two sides of an equation that may be due to rounding, as in 1/3 = 0.33."""


def final_expression(text: str) -> str:
    r"""The final expression of ``text``; empty if it has none, or offers several.

    It is the first of these that the text has: the content of the last box, the line after the last
    `####`, the expression after the last "answer is", the last expression between LaTeX marks, the
    last number.

    >>> final_expression(r"So it is $\frac{1}{2}$."), final_expression("The answer is 2x + 1.")
    ('\\frac{1}{2}', '2x + 1')
    >>> final_expression("5 or 6")
    ''
    """
    if BOX in text:
        return boxed(text).strip()
    line = gsm8k_line(text)
    if line:
        return line
    statements = list(STATEMENT.finditer(text))
    if statements:
        return _stated_expression(text[statements[-1].end() :])
    return _last_expression(text)


def latex_of(text: str) -> str:
    r"""``text`` in which signs that Math-Verify 0.9.0 cannot read are replaced by LaTeX.

    >>> latex_of("2√3 + x²"), latex_of(r"0.\overline{3}")
    ('2\\sqrt{3} + x^{2}', '\\frac{3}{9}')
    """
    text = _ROOT.sub(lambda match: rf"\sqrt{{{match[1] or match[2]}}}", text)
    text = _EXPONENT.sub(_exponent, text).translate(_SIGN_CODES)
    text = _FRACTION_OF_COMMAND.sub(r"\1{\2}", text)
    return expand_repeating(text)


def is_bound(expression: str) -> bool:
    r"""Whether ``expression`` is a relation without a left side. Math-Verify 0.9.0 would read only
    its right side.

    >>> is_bound(r"\leq 5"), is_bound(r"x \leq 5")
    (True, False)
    """
    return _RELATION.match(expression) is not None


def is_qualified(expression: str) -> bool:
    r"""Whether ``expression`` has words that change its value. Math-Verify 0.9.0 ignores them.

    >>> is_qualified(r"5 \text{ or more}"), is_qualified(r"5 \text{ months}")
    (True, False)
    """
    return _QUALIFIER.search(expression) is not None


def contradicts_itself(expression: str) -> bool:
    r"""Whether ``expression`` has two values, such as `5 = 6`.

    >>> contradicts_itself("x = 5 = 6"), contradicts_itself(r"\frac{1}{3} = 0.333")
    (True, False)
    >>> contradicts_itself(r"5 \lor 6")
    True
    """
    values = map(read_number, _EQUALITY.split(expression))
    sides = [value for value in values if value is not None]
    if sides and max(sides) - min(sides) > _ROUNDING * max(map(abs, sides)):
        return True
    return _TWO_VALUES.search(expression) is not None


def _exponent(match: re.Match[str]) -> str:
    return f"^{{{''.join(map(_RAISED.__getitem__, match[0]))}}}"


def _stated_expression(following: str) -> str:
    """Expression at the beginning of ``following``, the text after "the answer is"."""
    latex = _LATEX.search(following)
    before = following[: latex.start()] if latex else ""
    if latex and not re.search(r"\d", before) and not _SENTENCE_END.search(before):
        return "" if _offers_another(following, latex.end()) else _content(latex)
    number = read_statement(following)
    if number is not None:
        return str(number)
    clause = _SENTENCE_END.split(first_line(following))[0].strip(" :*")
    # `read_statement` has refused a number that stands here: the text takes it back, as in
    # "5. Or 6."
    return "" if has_words(clause) or read_number(clause) is not None else clause


def _last_expression(text: str) -> str:
    """The last expression of a ``text`` without a box, `####` or statement."""
    pieces = list(_LATEX.finditer(text))
    if pieces and not re.search(r"\d", text[pieces[-1].end() :]):
        between = text[pieces[-2].end() : pieces[-1].start()] if len(pieces) > 1 else "."
        return "" if _JOINS.fullmatch(between) else _content(pieces[-1])
    number = last_number(text)
    if number is not None:
        return str(number)
    return "" if has_words(text) else text.strip()


def _offers_another(text: str, start: int) -> bool:
    """Whether another expression or number is offered at ``start``."""
    joint = _JOINS.match(text, start)
    if not joint or not joint[0].strip():
        return False
    return re.match(r"[-+.]?[\d$\\]", text[joint.end() :]) is not None


def _content(latex: re.Match[str]) -> str:
    return next(group for group in latex.groups() if group is not None).strip()
