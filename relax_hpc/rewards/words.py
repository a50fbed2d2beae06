"""Rewards of question answering: words in common, and the same words.

Texts are compared as SQuAD does (P. Rajpurkar et al., arXiv 1606.05250, section 6.1): in lower case, without
punctuation, without the articles a, an and the, and with any white space as one blank.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from relax_hpc.rewards import RewardInput

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def f1(sample: RewardInput) -> dict[str, float]:
    """Harmonic mean of precision and recall of the response's words, against the answer that it is nearest to.

    >>> from relax_hpc.rewards import RewardInput
    >>> f1(RewardInput("?", "the Eiffel Tower", "Eiffel tower, Paris", "stop"))
    {'total': 0.8, 'precision': 0.6666666666666666, 'recall': 1.0}
    """
    found = _words(sample.response_text)
    scores = [_overlap(found, _words(answer)) for answer in answers(sample)]
    total, precision, recall = max(scores)
    return {"total": total, "precision": precision, "recall": recall}


def exact(sample: RewardInput) -> float:
    """1 for the words of an answer and no others, else 0.

    >>> from relax_hpc.rewards import RewardInput
    >>> exact(RewardInput("?", "the Eiffel Tower", "Eiffel tower.", "stop"))
    1.0
    """
    found = _words(sample.response_text)
    return float(any(found == _words(answer) for answer in answers(sample)))


def answers(sample: RewardInput) -> list[str]:
    """All that are right: the row's `answers`, where it has that, or its one `answer`. TypeError: they are no texts."""
    several = sample.metadata.get("answers")
    if several is None:
        return [sample.answer]
    if not isinstance(several, list) or not several or not all(isinstance(one, str) for one in several):
        raise TypeError(f"answers: found {str(several)[:100]!r}, allowed: a list of texts")
    return several


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()


def _overlap(found: list[str], right: list[str]) -> tuple[float, float, float]:
    """F1, precision and recall; of an answer without words, whether there are none."""
    if not found or not right:
        same = float(found == right)
        return same, same, same
    common = (Counter(found) & Counter(right)).total()
    if not common:
        return 0.0, 0.0, 0.0
    precision, recall = common / len(found), common / len(right)
    return 2 * precision * recall / (precision + recall), precision, recall
