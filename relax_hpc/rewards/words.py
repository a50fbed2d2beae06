"""Rewards of question answering: words in common, and the same words.

Texts are compared as SQuAD does (P. Rajpurkar et al., arXiv 1606.05250, section 6.1): in lower
case, without punctuation, without the articles a, an and the, and with any white space as one
blank. Punctuation is that of all scripts, such as curly quotes and the Chinese full stop, and
accents may be written in any form of Unicode. Of a response only the answer is read, without its
thoughts; see `final_answer`.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from typing import TYPE_CHECKING

from relax_hpc.rewards.final_answer import answer_text

if TYPE_CHECKING:
    from relax_hpc.rewards import RewardInput

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def f1(sample: RewardInput) -> dict[str, float]:
    """Harmonic mean of precision and recall of the response's words, against the answer that it is
    nearest to.

    >>> from relax_hpc.rewards import RewardInput
    >>> f1(RewardInput("?", "the Eiffel Tower", "Eiffel tower, Paris", "stop"))
    {'total': 0.8, 'precision': 0.6666666666666666, 'recall': 1.0}
    """
    response = _words(answer_text(sample))
    scores = [_overlap(response, _words(answer)) for answer in answers(sample)]
    total, precision, recall = max(scores)
    return {"total": total, "precision": precision, "recall": recall}


def exact(sample: RewardInput) -> float:
    """1 for the words of an answer and no others, else 0.

    >>> from relax_hpc.rewards import RewardInput
    >>> exact(RewardInput("?", "the Eiffel Tower", "Eiffel tower.", "stop"))
    1.0
    """
    response = _words(answer_text(sample))
    return float(any(response == _words(answer) for answer in answers(sample)))


def answers(sample: RewardInput) -> list[str]:
    """All that are right: the row's `answers`, where it has that, or its one `answer`. TypeError:
    they are no texts."""
    several = sample.metadata.get("answers")
    if several is None:
        return [sample.answer]
    if (
        not isinstance(several, list)
        or not several
        or not all(isinstance(answer, str) for answer in several)
    ):
        raise TypeError(f"answers: found {str(several)[:100]!r}, allowed: a list of texts")
    return several


def _words(text: str) -> list[str]:
    text = unicodedata.normalize("NFC", text).lower().translate(_NO_PUNCTUATION)
    if not text.isascii():
        text = "".join(letter for letter in text if unicodedata.category(letter)[0] != "P")
    return _ARTICLES.sub(" ", text).split()


def _overlap(response: list[str], right: list[str]) -> tuple[float, float, float]:
    """F1, precision and recall; all 1 if neither has words, and all 0 if only one of both has."""
    if not response or not right:
        same = float(response == right)
        return same, same, same
    common = (Counter(response) & Counter(right)).total()
    if not common:
        return 0.0, 0.0, 0.0
    precision, recall = common / len(response), common / len(right)
    return 2 * precision * recall / (precision + recall), precision, recall
