"""Windows of rows. A thread claims, checks and reads the next window while a trainer role trains on
the present one."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from relax_hpc.base.background import BackgroundThread
from relax_hpc.config.schema import TrainerConfig
from relax_hpc.queue.client import Claim
from relax_hpc.queue.client.claims import check_claim
from relax_hpc.queue.process_context import Context
from relax_hpc.queue.row_schema import Row
from relax_hpc.roles.ranks import Ranks
from relax_hpc.training.models.families import route_shape_of_model
from relax_hpc.training.models.towers.media import RowMedia

_AHEAD_S = 30 * 86400.0


@dataclass(frozen=True, slots=True)
class Window:
    """Prompt groups that are trained together: the claim, and all its rows."""

    claim: Claim
    rows: list[Row]
    media: RowMedia | None = None
    """Media of the rows that this rank trains on; None if they have none."""
    last: bool = False
    """Whether it is the last window of its mini-batch. It is set when the window is taken."""


class Prefetch:
    """Prefetched windows of one rank. Its calls are collective: the threads of the ranks follow the
    leader's thread by their own channel.

    ::

        prefetch.ask(batch=0)
        window = prefetch.asked.result()
    """

    def __init__(
        self,
        context: Context,
        ranks: Ranks,
        settings: TrainerConfig,
        placeholders: Mapping[str, int],
    ) -> None:
        self.context = context
        self.ranks = ranks
        self.settings = settings
        self.placeholders = placeholders
        self.routes = route_shape_of_model(context.model, context.config.model)
        self.channel = ranks.channel()
        self.asked: Future[Window] | None = None
        """The requested window; None after `taken`."""
        self._work = BackgroundThread("windows", self._answer)

    def ask(self, batch: int) -> None:
        """Request the next window, as number ``batch`` of its mini-batch. Only one window may be
        requested at a time."""
        self.asked = Future()
        self._work.put((batch, self.asked))

    def taken(self) -> None:
        """Forget the requested window, because the trainer has taken it."""
        self.asked = None

    # -- in the thread -----------------------------------------------------------------------------

    def _answer(self, job: tuple[int, Future[Window]]) -> None:
        batch, future = job
        try:
            future.set_result(self._fetch(batch))
        except Exception as error:
            future.set_exception(error)

    def _fetch(self, batch: int) -> Window:
        while True:
            claim = Claim.from_message(self.channel.run_on_leader(partial(self._claim, batch)))
            with self.context.spans("queue", step=claim.step):
                rows = self.ranks.rows(claim, self.channel)
                media = self._media(claim, rows) if rows is not None else None
            if rows is not None:
                return Window(claim, rows, media)

    def _media(self, claim: Claim, rows: list[Row]) -> RowMedia | None:
        if not claim.with_media:
            return None
        micro_batches = claim.assignment[self.ranks.layout.data_rank]
        own_rows = chain.from_iterable(micro_batches)
        return self.ranks.media([rows[number] for number in own_rows])

    def _claim(self, batch: int) -> dict[str, Any]:
        """Return a claim whose rows are all valid, as a message. It runs in the leader.

        The request has no timeout, because its answer is a lease: after a timeout no process would
        own the lease. The trainer that waits for the window has the timeout.
        """
        config, client = self.context.config, self.context.client
        assert client is not None
        settings, ranks = self.settings, self.ranks.layout.data_size
        size = config.prompts_per_step // config.algorithm.mini_batches
        budget = settings.balance_window * settings.pack_tokens * ranks
        limits = {"ranks": ranks, "max_tokens": settings.pack_tokens, "batch": batch}
        if settings.pack_media_tokens:
            limits["max_media"] = settings.pack_media_tokens
        while True:
            answer = client.submit_claim(self.context.role, budget, size, _AHEAD_S, **limits)
            claim = answer.result()
            assert claim is not None
            with self.context.spans("queue", step=claim.step):
                if check_claim(client, claim, self.placeholders, self.routes):
                    return claim.message()
