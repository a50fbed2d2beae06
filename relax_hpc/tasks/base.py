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
"""Has the engine draw one response. BadAnswer: what it gave is none."""


class Task:
    """A data source, an episode, a reward; each has a default. Objects are made without arguments,
    one or more in each process that has use for one, and keep nothing from one call to the next.

    >>> class Echo(Task):
    ...     def rows(self, split, data):
    ...         return ({"id": word, "prompt": word, "answer": word} for word in ("a", "b", "ab"))
    >>> [row["id"] for row in Echo().rows("train", None)]
    ['a', 'b', 'ab']
    """

    evaluations: ClassVar[tuple[str, ...]] = ()
    """Evaluation sets that `rows` has rows of."""

    environment: ClassVar[str] = ""
    """Environment that episodes are played against where the configuration names none, as
    `environment.kind` has it; empty: none."""

    reward: Reward = staticmethod(answer_partial)
    """Reward of a sample or, if its parameter is called `samples`, of a prompt group; see
    `relax_hpc.rewards`. Where the configuration names another, that one counts."""

    def rows(self, split: str, data: DataConfig) -> Iterable[Mapping[str, Any]]:
        """Rows of `train`, or of one of ``evaluations``: {"id", "prompt" (or "messages",
        "token_ids"), "answer", ...}, with columns of media as files have them.

        They are written to the run directory when a run is prepared, once, and read there. It is
        not asked for what the configuration names files of (`data.train`, `data.eval`).
        """
        raise NotImplementedError

    def demonstrations(
        self, data: DataConfig, tokenizer: Tokenizer, noise: float, seed: int
    ) -> Iterator[dict]:
        """Right answers to learn from before (`warm_start`), any number, as rows of sft:
        {"token_ids" (whole), "prompt_len"}, or chats in "messages", of whose turns those of the
        assistant are learned; and columns of media, each with one place among the tokens, or in the
        messages.

        A share ``noise`` of them should be wrong.
        """
        raise NotImplementedError

    async def episode(self, request: GenerateRequest, ask: Ask) -> Generation | Episode:
        """One attempt at a prompt, as ``request`` has it: here one turn.

        What ``ask`` returns is a response; one that goes on from it is asked for by a request with
        a longer prompt. Of several turns with what others say between them one `Generation` is
        made, whose tokens of version 0 nobody sampled; where no sequence holds all of it, as after
        a history was compacted, an `Episode` of several rows.
        """
        return await ask(request)

    def makes(self, what: str) -> bool:
        """Whether the class of the task, or a base class of it below `Task`, defines ``what``:
        `rows`, `demonstrations`, `episode`, `reward`.

        >>> Task().makes("rows")
        False
        """
        mro = type(self).__mro__
        return any(what in vars(base) for base in mro[: mro.index(Task)])
