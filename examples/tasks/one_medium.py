"""Base class of tasks whose prompts have one medium each, which the task makes, and a question
about it."""

from __future__ import annotations

import abc
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from relax_hpc.data.rows import data_uri
from relax_hpc.rewards.answers import answer_partial
from relax_hpc.tasks.base import Task

if TYPE_CHECKING:
    from relax_hpc.config.schema import DataConfig
    from relax_hpc.data.tokenizer import Tokenizer

_SIZES = {"train": 2048, "heldout": 256}


class OneMedium(Task, abc.ABC):
    """Media that are made by name, the same on every machine; those held out have other names."""

    evaluations = ("heldout",)
    reward = staticmethod(answer_partial)
    kind: ClassVar[str]
    """Kind of the media: `image`, `video`, `audio`."""
    type: ClassVar[str]
    """Media type of their files, such as `image/png`."""
    tokens: ClassVar[str]
    """Tokens of a prompt that are its place for the medium."""
    questions: ClassVar[Mapping[str, Sequence[str]]]
    """Question -> its answers, of which media have each equally often."""

    @classmethod
    @abc.abstractmethod
    def made(cls, name: str) -> tuple[bytes, str, str]:
        """The file of the medium called ``name``, a question, and its answer."""

    def rows(self, split: str, data: DataConfig) -> Iterator[dict[str, Any]]:
        for number in range(_SIZES[split]):
            file, question, answer = self.made(f"{split} {number}")
            prompt = {
                "id": f"{split}-{number}",
                "prompt": f"<{self.kind}>{question}",
                "answer": answer,
            }
            yield prompt | self._column(file)

    def demonstrations(
        self, data: DataConfig, tokenizer: Tokenizer, noise: float, seed: int
    ) -> Iterator[dict]:
        """Demonstrations of media of their own; wrong ones have any answer to their question."""
        rng = random.Random(f"warm start {seed}")
        place = tokenizer.encode(self.tokens, special_tokens=True)
        for number in itertools.count():
            file, question, answer = self.made(f"warm start {seed} {number}")
            said = rng.choice(self.questions[question]) if rng.random() < noise else answer
            prompt = [*place, *tokenizer.encode(question, special=False)]
            response = [*tokenizer.encode(said, special=False), tokenizer.eos_ids[0]]
            yield {"token_ids": [*prompt, *response], "prompt_len": len(prompt)} | self._column(
                file
            )

    def _column(self, file: bytes) -> dict[str, list[str]]:
        return {f"{self.kind}s": [data_uri(file, self.type)]}
