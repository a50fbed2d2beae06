r"""Reward of multiple-choice questions: whether the answer's letter is chosen.

Of a response counts, in this order, what its last `\boxed{...}` holds, what stands behind its last "answer is",
"answer:" or "####", and the letter that is all of its last line.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from relax_hpc.rewards.maths import LAST, boxed

if TYPE_CHECKING:
    from relax_hpc.rewards import RewardInput

_LETTER = r"[(\[{*\s$]*+(?:\\(?:text|textbf|mathrm|mathbf)\s*\{\s*)?[(\[]?([A-Z])(?![A-Za-z0-9'\u2019])"
_BEHIND = re.compile(
    r"(?:####|\b(?:answer|choice|option)\b[^.\n]{0,30}?(?:\bis\b|:|=))\s*+(?:\b(?:option|choice)\b\s*+)?" + _LETTER,
    re.IGNORECASE,
)
_ALL = re.compile(_LETTER + r"[)\]}.*\s$]*")
_FIRST = re.compile(_LETTER)


def multiple_choice(sample: RewardInput) -> float:
    """1 if the response chooses the answer's letter, else 0; also if it was cut off before its end.

    >>> from relax_hpc.rewards import RewardInput
    >>> multiple_choice(RewardInput("?", "B", "A is too small, so the answer is (B).", "stop"))
    1.0
    """
    if sample.finish_reason != "stop":
        return 0.0
    right = _FIRST.match(sample.answer.strip())
    if not right:
        raise ValueError(f"answer: found {sample.answer[:40]!r}, allowed: a letter from A to Z")
    return float(choice_of(sample.response_text) == right[1])


def choice_of(text: str) -> str:
    """The letter that a response chooses; empty: it chooses none.

    >>> choice_of("The answer is C: Paris."), choice_of("A dog is an animal.")
    ('C', '')
    """
    text = text[-LAST:]
    if "\\boxed" in text:
        found = _FIRST.match(boxed(text))
        return found[1] if found else ""
    behind = [match[1] for match in _BEHIND.finditer(text) if match[1].isupper()]
    if behind:
        return behind[-1]
    lines = text.strip().splitlines()
    last = _ALL.fullmatch(lines[-1].strip()) if lines else None
    return last[1] if last else ""
