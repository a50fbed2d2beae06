"""Windows of rows, each claimed, checked and read by a thread while the actor trains on the one before."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from relax_hpc.background import Background
from relax_hpc.errors import DeadlineError
from relax_hpc.roles.context import Context
from relax_hpc.roles.ranks import Ranks
from relax_hpc.transfer_queue.claims import check_claim
from relax_hpc.transfer_queue.client import Claim
from relax_hpc.transfer_queue.schema import Row


@dataclass(frozen=True, slots=True)
class Window:
    """Prompt groups that are trained on together: the claim, and all its rows."""

    claim: Claim
    rows: list[Row]


class Prefetch:
    """One rank's. Its calls are collective: the threads of the ranks follow the leader's by a channel of their own.

    >>> prefetch.ask(batch=0)                                                    # doctest: +SKIP
    >>> window = prefetch.asked.result()
    """

    def __init__(self, context: Context, ranks: Ranks, placeholders: Mapping[str, int]) -> None:
        self.context, self.ranks, self.placeholders = context, ranks, placeholders
        self.channel = ranks.channel()
        self.asked: Future[Window] | None = None
        """What was last asked for; None once `taken`."""
        self._until = math.inf
        """When the actor has waited for too long."""
        self._work = Background("windows", self._answer)

    def ask(self, batch: int) -> None:
        """Have the next window fetched, as number ``batch`` of its mini-batch. One is asked for at a time."""
        self.asked, self._until = Future(), math.inf
        self._work.put((batch, self.asked))

    def await_it(self) -> Future[Window]:
        """What was asked for is needed now; from here on there is a deadline."""
        assert self.asked is not None
        self._until = time.monotonic() + self.context.config.queue.wait_timeout_s
        return self.asked

    def taken(self) -> None:
        """The window that was asked for has its user."""
        self.asked = None

    # -- in the thread -----------------------------------------------------------------------------------------

    def _answer(self, job: tuple[int, Future[Window]]) -> None:
        batch, asked = job
        try:
            asked.set_result(self._fetch(batch))
        except Exception as error:
            asked.set_exception(error)

    def _fetch(self, batch: int) -> Window:
        message = None
        while message is None:
            message = self.channel.tell(self._claim(batch) if self.ranks.leader else None)
        claim = Claim.of(message)
        with self.context.spans("queue", step=claim.step):
            return Window(claim, self.ranks.rows(claim))

    def _claim(self, batch: int) -> dict[str, Any] | None:
        """The leader's part: a claim all of whose rows are sound; None if there is none yet, and time left."""
        config, client, ranks = self.context.config, self.context.client, self.ranks.layout.data_size
        most, size = config.actor.max_tokens_per_micro_batch, config.groups_per_step // config.algorithm.mini_batches
        budget, about = config.actor.balance_window * most * ranks, {"ranks": ranks, "max_tokens": most, "batch": batch}
        patience = min(config.queue.wait_timeout_s, max(0.0, self._until - time.monotonic()))
        try:
            claim = client.claim_later("actor", budget, size, patience, **about).result()
        except DeadlineError:
            if time.monotonic() < self._until:
                return None
            raise
        with self.context.spans("queue", step=claim.step):
            return claim.message() if check_claim(client, claim, self.placeholders) else None
