"""Answers that clients may ask for again, because the first one, or their controller, was lost on
the way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from relax_hpc.queue.records import Owner

REMEMBERED = 256
"""Latest answers that are kept for each client: more than it ever waits for at a time."""


@dataclass(slots=True)
class ReplyCache:
    """The latest answers to each client's requests. A request's key is ``<client>#<number>``.

    >>> cache = ReplyCache()
    >>> cache.remember("engine#7", ("rollout", 1), [3, 4])
    >>> cache.recall("engine#7"), cache.recall("engine#8")
    ([3, 4], None)
    """

    clients: dict[str, tuple[Owner, dict[str, Any]]] = field(default_factory=dict)

    def recall(self, key: str) -> Any:
        """Answer that was given to the request; None: it is new."""
        known = self.clients.get(key.rpartition("#")[0])
        return known[1].get(key) if known else None

    def remember(self, key: str, owner: Owner, answer: Any) -> None:
        _, answers = self.clients.setdefault(key.rpartition("#")[0], (owner, {}))
        answers[key] = answer
        if len(answers) > REMEMBERED:
            answers.pop(next(iter(answers)))

    def forget(self, group: str, below: int) -> None:
        """Incarnations of ``group`` before incarnation ``below`` ask for nothing any more."""
        over = [
            name
            for name, ((who, incarnation), _) in self.clients.items()
            if who == group and incarnation < below
        ]
        for name in over:
            del self.clients[name]

    def dump(self) -> Any:
        return self.clients

    def load(self, values: Any) -> None:
        self.clients = {
            name: ((who[0], who[1]), answers) for name, (who, answers) in values.items()
        }
