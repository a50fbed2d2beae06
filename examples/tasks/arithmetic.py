"""A verifiable task for small models that call a calculator ("47*86?" -> a call -> "4042").

What the model answers with it has read; it is too small to know products of numbers by heart.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import TYPE_CHECKING, Any

from relax_hpc.environments.tool_calls import ToolCall
from relax_hpc.rewards.answers import answer_partial
from relax_hpc.tasks.base import Task

if TYPE_CHECKING:
    from relax_hpc.config.schema import DataConfig
    from relax_hpc.data.tokenizer import Tokenizer

_SIZES = {"train": 4096, "heldout": 256}
_DEMONSTRATIONS = 4096


@dataclass(frozen=True, slots=True)
class Problem:
    """Two numbers to be multiplied."""

    one: int
    other: int

    @classmethod
    def drawn(cls, name: str, digits: int) -> Problem:
        """The problem called ``name``, of numbers of so many ``digits`` whose product has twice as
        many: the same on every machine."""
        rng = random.Random(name)
        while True:
            one, other = (rng.randrange(10 ** (digits - 1), 10**digits) for _ in range(2))
            if one * other >= 10 ** (2 * digits - 1):
                return cls(one, other)

    @property
    def result(self) -> str:
        """The right answer.

        >>> Problem(47, 86).result
        '4042'
        """
        return str(self.one * self.other)

    def __str__(self) -> str:
        return f"{self.one}*{self.other}"


class Arithmetic(Task):
    """Products of numbers of `data.digits` digits, for the environment `tools` with its calculator;
    a fifth of all are held out."""

    evaluations = ("heldout",)
    environment = "tools"
    reward = staticmethod(answer_partial)

    def rows(self, split: str, data: DataConfig) -> Iterator[dict[str, Any]]:
        for number, problem in enumerate(islice(problems(split, data.digits), _SIZES[split])):
            yield {"id": f"{split}-{number}", "prompt": f"{problem}?", "answer": problem.result}

    def demonstrations(
        self, data: DataConfig, tokenizer: Tokenizer, noise: float, seed: int
    ) -> Iterator[dict]:
        """Chats about problems of their own. A share ``noise`` of them calls for another problem,
        and as large a share answers another one."""
        rng, drawn = random.Random(f"noise {seed}"), problems(f"warm start {seed}", data.digits)
        for problem, other in islice(zip(drawn, drawn, strict=False), _DEMONSTRATIONS):
            called, answered = (rng.random() >= noise for _ in range(2))
            computed = problem if called else other
            yield {
                "messages": [
                    {"role": "user", "content": f"{problem}?"},
                    {
                        "role": "assistant",
                        "content": ToolCall("calculator", {"expression": str(computed)}).text,
                    },
                    {"role": "tool", "content": computed.result},
                    {"role": "assistant", "content": computed.result if answered else other.result},
                ]
            }


def problems(split: str, digits: int) -> Iterator[Problem]:
    """Problems of a ``split``, without an end; those of `heldout` are in no other."""
    for number in count():
        problem = Problem.drawn(f"{split} {number}", digits)
        if (zlib.crc32(str(problem).encode()) % 5 == 0) == (split == "heldout"):
            yield problem
