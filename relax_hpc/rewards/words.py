"""Rewards of question answering: overlap of words (F1), and exact match.

Texts are compared as in SQuAD (P. Rajpurkar et al., arXiv 1606.05250, section 6.1): in lower case,
without punctuation, without the articles a, an and the, and with any white space as one blank.
Punctuation of all scripts is removed, such as curly quotes and the Chinese full stop. Accents may
be in any form of Unicode. Only the answer of a response is read, without thoughts, see
`final_answer`.
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
    """Harmonic mean of precision and recall of the response's words, for the answer with the
    highest value.

    >>> from relax_hpc.rewards import RewardInput
    >>> f1(RewardInput("?", "the Eiffel Tower", "Eiffel tower, Paris", "stop"))
    {'total': 0.8, 'precision': 0.6666666666666666, 'recall': 1.0}
    """
    response = _words(answer_text(sample))
    scores = [_overlap(response, _words(answer)) for answer in answers(sample)]
    total, precision, recall = max(scores)
    return {"total": total, "precision": precision, "recall": recall}


def exact(sample: RewardInput) -> float:
    """1 if the response has exactly the words of an answer, else 0.

    >>> from relax_hpc.rewards import RewardInput
    >>> exact(RewardInput("?", "the Eiffel Tower", "Eiffel tower.", "stop"))
    1.0
    """
    response = _words(answer_text(sample))
    return float(any(response == _words(answer) for answer in answers(sample)))


def answers(sample: RewardInput) -> list[str]:
    """All right answers: the column `answers` if the row has it, otherwise `answer`. TypeError:
    `answers` is not a list of texts."""
    listed = sample.metadata.get("answers")
    if listed is None:
        return [sample.answer]
    is_list = isinstance(listed, list) and bool(listed)
    if not is_list or not all(isinstance(answer, str) for answer in listed):
        raise TypeError(f"answers: found {str(listed)[:100]!r}, allowed: a list of texts")
    return listed


def _words(text: str) -> list[str]:
    text = unicodedata.normalize("NFC", text).lower().translate(_NO_PUNCTUATION)
    if not text.isascii():
        text = "".join(letter for letter in text if unicodedata.category(letter)[0] != "P")
    return _ARTICLES.sub(" ", text).split()


def _overlap(response: list[str], right: list[str]) -> tuple[float, float, float]:
    """F1, precision and recall; all 1 if neither text has words, and all 0 if only one of them
    has."""
    if not response or not right:
        value = float(response == right)
        return value, value, value
    common = (Counter(response) & Counter(right)).total()
    if not common:
        return 0.0, 0.0, 0.0
    precision, recall = common / len(response), common / len(right)
    return 2 * precision * recall / (precision + recall), precision, recall
