"""Windows of rows, each claimed, checked and read by a thread while a trainer role is at the one
before."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
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
    """Prompt groups that are trained on together: the claim, and all its rows."""

    claim: Claim
    rows: list[Row]
    media: RowMedia | None = None
    """Media of the rows that this rank trains on; None: they have none."""
    last: bool = False
    """Whether it is the last window of its mini-batch; not known before it is taken."""


class Prefetch:
    """One rank's. Its calls are collective: the threads of the ranks follow the leader's by a
    channel of their own.

    >>> prefetch.ask(batch=0)                                                    # doctest: +SKIP
    >>> window = prefetch.asked.result()
    """

    def __init__(
        self,
        context: Context,
        ranks: Ranks,
        settings: TrainerConfig,
        placeholders: Mapping[str, int],
    ) -> None:
        self.context, self.ranks, self.settings, self.placeholders = (
            context,
            ranks,
            settings,
            placeholders,
        )
        self.routes = route_shape_of_model(context.model, context.config.model)
        self.channel = ranks.channel()
        self.asked: Future[Window] | None = None
        """Window that was asked for last; None once `taken`."""
        self._work = BackgroundThread("windows", self._answer)

    def ask(self, batch: int) -> None:
        """Have the next window fetched, as number ``batch`` of its mini-batch. One is asked for at
        a time."""
        self.asked = Future()
        self._work.put((batch, self.asked))

    def taken(self) -> None:
        """Forget the window that was asked for: it has its user."""
        self.asked = None

    # -- in the thread -----------------------------------------------------------------------------

    def _answer(self, job: tuple[int, Future[Window]]) -> None:
        batch, asked = job
        try:
            asked.set_result(self._fetch(batch))
        except Exception as error:
            asked.set_exception(error)

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
        mine = (number for part in claim.assignment[self.ranks.layout.data_rank] for number in part)
        return self.ranks.media([rows[number] for number in mine])

    def _claim(self, batch: int) -> dict[str, Any]:
        """The leader's part: a claim all of whose rows are sound, as a message.

        The request is never given up, as its answer, a lease, would come to nobody: who needs it
        has the deadline.
        """
        config, client, task = self.context.config, self.context.client, self.context.role
        settings, ranks = self.settings, self.ranks.layout.data_size
        most, size = settings.pack_tokens, config.prompts_per_step // config.algorithm.mini_batches
        budget, about = (
            settings.balance_window * most * ranks,
            {"ranks": ranks, "max_tokens": most, "batch": batch},
        )
        about |= {"max_media": settings.pack_media_tokens} if settings.pack_media_tokens else {}
        while True:
            claim = client.submit_claim(task, budget, size, _AHEAD_S, **about).result()
            with self.context.spans("queue", step=claim.step):
                if check_claim(client, claim, self.placeholders, self.routes):
                    return claim.message()
