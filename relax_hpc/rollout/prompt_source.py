"""Source of the training prompts, by ticket and attempt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from relax_hpc.config.schema import Config
from relax_hpc.data.prompt_file import PromptFile, PromptSets
from relax_hpc.data.prompts import Prompt
from relax_hpc.data.visits import Visits

_MAX_FETCHED = 4096
"""Most prompts in memory that were fetched and not used yet."""


class PromptSource:
    """Source of training prompts. The prompt of a ticket depends only on the seed, the ticket and
    the attempt."""

    def __init__(self, prompts: Sequence[Prompt], config: Config) -> None:
        self.prompts = prompts
        self._visits = visits_of(prompts, config)
        self._fetched: dict[int, Prompt] = {}

    def prompt(self, ticket: int, attempt: int) -> Prompt:
        """Prompt of an attempt at a ticket, read from its file unless it was fetched. Errors as of
        `PromptFile`."""
        index = self._index(ticket, attempt)
        return self._fetched.pop(index, None) or self.prompts[index]

    def fetch(self, attempts: Iterable[tuple[int, int]]) -> None:
        """Read the prompts of ``attempts``, pairs of ticket and attempt. Any thread may call it."""
        for ticket, attempt in attempts:
            index = self._index(ticket, attempt)
            if index not in self._fetched:
                self._fetched[index] = self.prompts[index]
        for index in list(self._fetched)[:-_MAX_FETCHED]:
            self._fetched.pop(index, None)

    def following(self, ticket: int, count: int) -> list[Prompt]:
        """Prompts of the first attempts at the ``count`` tickets after ``ticket``. They are
        fetched; any thread may call this."""
        attempts = [(number, 0) for number in range(ticket + 1, ticket + 1 + count)]
        self.fetch(attempts)
        prompts = (self._fetched.get(self._index(*attempt)) for attempt in attempts)
        return [prompt for prompt in prompts if prompt]

    def _index(self, ticket: int, attempt: int) -> int:
        return self._visits.prompt_at(ticket, attempt)


def visits_of(prompts: Sequence[Prompt], config: Config) -> Visits:
    """Order in which a run visits ``prompts``."""
    data = config.data
    order = None
    if data.order_by and isinstance(prompts, PromptFile | PromptSets):
        order = prompts.order
    if isinstance(prompts, PromptSets):
        counts = {name: len(file) for name, file in prompts.sets.items()}
    else:
        counts = {"train": len(prompts)}
    weights = [data.train_weights[name] for name in counts] if data.train_weights else []
    return Visits(list(counts.values()), weights, config.seed, data.shuffle, order)
