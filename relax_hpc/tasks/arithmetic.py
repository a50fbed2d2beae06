"""A verifiable task for small models that call a calculator twice ("47*86, +12?" -> "4054").

The second call has the result of the first in it, the answer that of the second. None of them can be guessed.
"""

from __future__ import annotations

import json
import operator
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import TYPE_CHECKING, Any

from relax_hpc.rewards.answers import answer_partial
from relax_hpc.tasks.base import Task

if TYPE_CHECKING:
    from relax_hpc.config.schema import DataConfig
    from relax_hpc.data.prompts import Tokenizer

_SIZES = {"train": 4096, "heldout": 256}
_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


@dataclass(frozen=True, slots=True)
class Operation:
    """Operation on a number: its sign, and the other number."""

    sign: str
    by: int

    def of(self, number: int) -> int:
        """Result for ``number``."""
        return _OPERATIONS[self.sign](number, self.by)

    def __str__(self) -> str:
        return f"{self.sign}{self.by}"


@dataclass(frozen=True, slots=True)
class Problem:
    """A number, and two operations one after the other."""

    number: int
    first: Operation
    second: Operation

    @classmethod
    def drawn(cls, name: str, digits: int) -> Problem:
        """The problem called ``name``, of numbers of so many ``digits``: the same on every machine."""
        rng = random.Random(name)
        number, *others = (rng.randrange(10 ** (digits - 1), 10**digits) for _ in range(3))
        return cls(number, *(Operation(rng.choice(list(_OPERATIONS)), other) for other in others))

    @property
    def results(self) -> tuple[int, int]:
        """Result of the first operation, and of both.

        >>> Problem(47, Operation("*", 86), Operation("+", 12)).results
        (4042, 4054)
        """
        result = self.first.of(self.number)
        return result, self.second.of(result)

    def __str__(self) -> str:
        return f"{self.number}{self.first}, {self.second}?"


class Arithmetic(Task):
    """Problems of numbers of `data.digits` digits, for the environment `tools` with its calculator; a fifth of all are
    held out."""

    evaluations = ("heldout",)
    environment = "tools"
    reward = staticmethod(answer_partial)

    def rows(self, split: str, data: DataConfig) -> Iterator[dict[str, Any]]:
        for number, problem in enumerate(islice(_problems(split, data.digits), _SIZES[split])):
            yield {"id": f"{split}-{number}", "prompt": str(problem), "answer": str(problem.results[1])}

    def demonstrations(self, data: DataConfig, tokenizer: Tokenizer, noise: float, seed: int) -> Iterator[dict]:
        """Chats about problems of their own. Each of what the policy says is, in a share ``noise`` of them, that of
        another problem."""
        rng, problems = random.Random(f"noise {seed}"), _problems(f"warm start {seed}", data.digits)
        for problem, other in zip(problems, problems, strict=False):
            one, two, three = (other if rng.random() < noise else problem for _ in range(3))
            first = one.first.of(one.number)
            second = two.second.of(first)
            yield {
                "messages": [
                    {"role": "user", "content": str(problem)},
                    {"role": "assistant", "content": _call(f"{one.number}{one.first}")},
                    {"role": "tool", "content": str(first)},
                    {"role": "assistant", "content": _call(f"{first}{two.second}")},
                    {"role": "tool", "content": str(second)},
                    {"role": "assistant", "content": str(second if three is problem else other.results[1])},
                ]
            }


def _problems(split: str, digits: int) -> Iterator[Problem]:
    """Problems of a ``split``; those of `heldout` are in no other."""
    for number in count():
        problem = Problem.drawn(f"{split} {number}", digits)
        if (zlib.crc32(str(problem).encode()) % 5 == 0) == (split == "heldout"):
            yield problem


def _call(expression: str) -> str:
    call = {"name": "calculator", "arguments": {"expression": expression}}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
