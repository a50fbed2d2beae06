"""Four verifiable tasks at once: coloured shapes, moving squares, beeps, and numbers whose first
digit is asked for."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

from relax_hpc.examples.tasks.beeps import Beeps
from relax_hpc.examples.tasks.coloured_shapes import ColouredShapes
from relax_hpc.examples.tasks.moving_squares import MovingSquares
from relax_hpc.rewards.answers import answer_partial
from relax_hpc.tasks.base import Task

if TYPE_CHECKING:
    from relax_hpc.config.schema import DataConfig
    from relax_hpc.data.tokenizer import Tokenizer


def _numbers() -> list[str]:
    """All numbers of three digits, in the order of a hash, so that any part of them is a fair
    sample."""
    return sorted(
        (f"{number:03d}" for number in range(1000)),
        key=lambda text: hashlib.sha256(text.encode()).digest(),
    )


class FirstDigits(Task):
    """Numbers of three digits, a fifth of them held out ("472?" -> "4")."""

    evaluations = ("heldout",)
    reward = staticmethod(answer_partial)

    def rows(self, split: str, data: DataConfig) -> Iterator[dict[str, Any]]:
        numbers = _numbers()
        for text in numbers[:200] if split == "heldout" else numbers[200:]:
            yield {"id": f"{split}-{text}", "prompt": f"{text}?", "answer": text[0]}

    def demonstrations(
        self, data: DataConfig, tokenizer: Tokenizer, noise: float, seed: int
    ) -> Iterator[dict]:
        """Demonstrations of the prompts that are trained on; wrong ones have any digit."""
        rng, numbers = random.Random(f"warm start {seed}"), _numbers()[200:]
        while True:
            text = rng.choice(numbers)
            said = rng.choice("0123456789") if rng.random() < noise else text[0]
            prompt = tokenizer.encode(f"{text}?")
            response = [*tokenizer.encode(said, special=False), tokenizer.eos_ids[0]]
            yield {"token_ids": [*prompt, *response], "prompt_len": len(prompt)}


PARTS: dict[str, Task] = {
    "images": ColouredShapes(),
    "videos": MovingSquares(),
    "sounds": Beeps(),
    "texts": FirstDigits(),
}
"""Evaluation set -> the task whose held-out prompts it has."""


class MixedMedia(Task):
    """Prompts with an image, with a video, with a sound, and of text alone, by turns."""

    evaluations = tuple(PARTS)
    reward = staticmethod(answer_partial)

    def rows(self, split: str, data: DataConfig) -> Iterator[dict[str, Any]]:
        if split in PARTS:
            yield from PARTS[split].rows("heldout", data)
            return
        for name, row in _by_turns({name: part.rows(split, data) for name, part in PARTS.items()}):
            yield row | {"id": f"{name}-{row['id']}"}

    def demonstrations(
        self, data: DataConfig, tokenizer: Tokenizer, noise: float, seed: int
    ) -> Iterator[dict]:
        """Demonstrations of each of them by turns."""
        made = {
            name: part.demonstrations(data, tokenizer, noise, seed) for name, part in PARTS.items()
        }
        return (one for _, one in _by_turns(made))


def _by_turns(some: dict[str, Iterator[dict[str, Any]]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """One of each, as long as all have another."""
    return chain.from_iterable(
        zip(some, each, strict=True) for each in zip(*some.values(), strict=False)
    )
