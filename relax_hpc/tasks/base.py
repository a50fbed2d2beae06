"""Base class of tasks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from relax_hpc.rewards import Reward
from relax_hpc.rewards.answers import answer_partial

if TYPE_CHECKING:
    from relax_hpc.config.schema import DataConfig
    from relax_hpc.data.generation import Episode, GenerateRequest, Generation
    from relax_hpc.data.tokenizer import Tokenizer

    Ask = Callable[[GenerateRequest], Awaitable[Generation]]
else:
    Ask = Callable
"""Lets the engine generate one response. BadAnswer: the engine's answer is invalid."""


class Task:
    """A data source, an episode, a reward; each has a default.

    A process creates one or more objects of the class without arguments. They must not keep state
    between calls.

    >>> class Echo(Task):
    ...     def rows(self, split, data):
    ...         return ({"id": word, "prompt": word, "answer": word} for word in ("a", "b", "ab"))
    >>> [row["id"] for row in Echo().rows("train", None)]
    ['a', 'b', 'ab']
    """

    evaluations: ClassVar[tuple[str, ...]] = ()
    """Evaluation sets for which `rows` returns rows."""

    environment: ClassVar[str] = ""
    """Environment of episodes if the configuration has no `environment.kind`; empty: none."""

    reward: Reward = staticmethod(answer_partial)
    """Reward of a sample or, if its parameter is called `samples`, of a prompt group.

    See `relax_hpc.rewards`. A reward in the configuration replaces it.
    """

    def rows(self, split: str, data: DataConfig) -> Iterable[Mapping[str, Any]]:
        """Rows of the split `train`, or of one of ``evaluations``.

        A row has {"id", "prompt" (or "messages", "token_ids"), "answer", ...} and columns of media,
        as in files. A run calls this once, when it is prepared, and writes the rows to the run
        directory. It is not called for sets that have a file in the configuration (`data.train`,
        `data.eval`).
        """
        raise NotImplementedError

    def demonstrations(
        self, data: DataConfig, tokenizer: Tokenizer, noise: float, seed: int
    ) -> Iterator[dict]:
        """Examples for a warm start (`warm_start`), any number of them.

        They are rows of sft: {"token_ids" (prompt and response), "prompt_len"}, or chats in
        "messages", of which the assistant's turns are trained. Columns of media have one place
        each among the tokens or in the messages. A share ``noise`` of the examples should be wrong.
        """
        raise NotImplementedError

    async def episode(self, request: GenerateRequest, ask: Ask) -> Generation | Episode:
        """One attempt at the prompt of ``request``; the default is one turn.

        ``ask`` generates one response; a request with a longer prompt continues it. Return one
        `Generation` for all turns: tokens that were not sampled, such as observations, have version
        0. If no single sequence holds all turns, for example because the history was compacted,
        return an `Episode` of several rows.
        """
        return await ask(request)

    def makes(self, name: str) -> bool:
        """Whether the task's class, or a base class of it below `Task`, defines ``name``.

        Names are `rows`, `demonstrations`, `episode` and `reward`.

        >>> Task().makes("rows")
        False
        """
        mro = type(self).__mro__
        return any(name in vars(base) for base in mro[: mro.index(Task)])
