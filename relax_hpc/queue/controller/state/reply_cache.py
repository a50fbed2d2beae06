"""Answers of recent requests. A client repeats a request if its answer, or the controller, was
lost."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from relax_hpc.queue.records import Owner

REMEMBERED = 256
"""Number of answers kept for each client: more than it ever waits for at a time."""


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
        """Answer of an earlier request with this key; None: the request is new."""
        client = self.clients.get(key.rpartition("#")[0])
        return client[1].get(key) if client else None

    def remember(self, key: str, owner: Owner, answer: Any) -> None:
        _, answers = self.clients.setdefault(key.rpartition("#")[0], (owner, {}))
        answers[key] = answer
        if len(answers) > REMEMBERED:
            answers.pop(next(iter(answers)))

    def forget(self, group: str, below: int) -> None:
        """Forget clients of incarnations of ``group`` before incarnation ``below``."""
        ended = []
        for name, (owner, _) in self.clients.items():
            if owner[0] == group and owner[1] < below:
                ended.append(name)
        for name in ended:
            del self.clients[name]

    def dump(self) -> Any:
        return self.clients

    def load(self, values: Any) -> None:
        self.clients = {
            name: ((owner[0], owner[1]), answers) for name, (owner, answers) in values.items()
        }
