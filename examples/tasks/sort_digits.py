"""A verifiable task for small models: sort the digits of the prompt ("4312?" -> "1234")."""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

from relax_hpc.rewards.answers import answer_partial
from relax_hpc.tasks.base import Task

if TYPE_CHECKING:
    from relax_hpc.config.schema import DataConfig
    from relax_hpc.data.tokenizer import Tokenizer


def sort_answer(digits: str) -> str:
    """The right response to ``digits + "?"``."""
    return "".join(sorted(digits))


@functools.lru_cache(maxsize=1)
def sets_of(digits: int) -> dict[str, list[str]]:
    """Every number of `digits` digits in one of three disjoint sets, the same on every machine.

    `heldout_multisets`: no permutation of the prompt is in `train` (a fifth of the multisets);
    `heldout_prompts`: a fifth of the rest, other permutations of which may be. Each list is in the
    order of a hash, so that any prefix of it is a fair sample.
    """
    sets: dict[str, list[str]] = {"train": [], "heldout_multisets": [], "heldout_prompts": []}
    for number in range(10**digits):
        text = f"{number:0{digits}d}"
        if _hash("m" + sort_answer(text)) % 5 == 0:
            sets["heldout_multisets"].append(text)
        else:
            sets["heldout_prompts" if _hash("p" + text) % 5 == 0 else "train"].append(text)
    for texts in sets.values():
        texts.sort(key=lambda text: _hash("o" + text))
    trained = {sort_answer(text) for text in sets["train"]}
    assert not trained & {sort_answer(text) for text in sets["heldout_multisets"]}
    assert not set(sets["train"]) & set(sets["heldout_prompts"])
    return sets


class SortDigits(Task):
    """Numbers of `data.digits` digits, see `sets_of`. A prompt's id is the number."""

    evaluations = ("heldout_multisets", "heldout_prompts")
    reward = staticmethod(answer_partial)

    def rows(self, split: str, data: DataConfig) -> Iterator[dict[str, str]]:
        for text in sets_of(data.digits)[split]:
            yield {"id": text, "prompt": f"{text}?", "answer": sort_answer(text)}

    def demonstrations(
        self, data: DataConfig, tokenizer: Tokenizer, noise: float, seed: int
    ) -> Iterator[dict]:
        """Demonstrations of prompts drawn from `train`; wrong ones have the answer to another of
        its prompts."""
        train, rng = sets_of(data.digits)["train"], random.Random(f"warm start {seed}")
        while True:
            yield _demonstration(tokenizer, train, noise, rng)


class SortDigitPairs(SortDigits):
    """Pairs for dpo: the sorted digits are preferred to those of another prompt of the set, sorted
    too."""

    def rows(self, split: str, data: DataConfig) -> Iterator[dict[str, str]]:
        texts = sets_of(data.digits)[split]
        answers = [sort_answer(text) for text in texts]
        for number, (text, answer) in enumerate(zip(texts, answers, strict=True)):
            others = (answers[(number + step) % len(answers)] for step in range(1, len(answers)))
            wrong = next((other for other in others if other != answer), "")
            yield {
                "id": text,
                "prompt": f"{text}?",
                "answer": answer,
                "chosen": answer,
                "rejected": wrong,
            }


def _demonstration(
    tokenizer: Tokenizer, train: list[str], noise: float, rng: random.Random
) -> dict[str, object]:
    text = rng.choice(train)
    answered = rng.choice(train) if rng.random() < noise else text
    prompt = tokenizer.encode(f"{text}?")
    answer = tokenizer.encode(sort_answer(answered), special=False)
    return {"token_ids": [*prompt, *answer, tokenizer.eos_ids[0]], "prompt_len": len(prompt)}


def _hash(text: str) -> int:
    return int(hashlib.sha256(text.encode()).hexdigest()[:8], 16)
