"""Watch over routes: rows whose routes are not about those that the trainer would take are never
trained on."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from relax_hpc.base.routes import OTHER_ROUTES
from relax_hpc.queue.process_context import Context
from relax_hpc.queue.row_ids import ticket_of
from relax_hpc.roles.prefetch import Window
from relax_hpc.roles.ranks import Ranks
from relax_hpc.roles.step_report import Tally
from relax_hpc.training.model import PolicyModel
from relax_hpc.training.models.batches import Batch
from relax_hpc.training.route_agreement import RouteAgreement

Computed = Sequence[tuple[Window, Sequence[Batch]]]
"""Windows, with the micro-batches of this rank, whose forward passes are done."""


class RouteWatch:
    """Judge of routes in one rank. Its calls are collective."""

    def __init__(self, context: Context, ranks: Ranks, model: PolicyModel) -> None:
        self.context, self.ranks, self.model = context, ranks, model
        self.least = context.config.model.min_equal_routes

    def agree(self, computed: Computed, tally: Tally) -> bool:
        """Whether all rows have about the routes that they should; in every rank. The prompt groups
        of others are dropped, and made again. The leader's ``tally`` counts the routes."""
        if not self.model.routed:
            return True
        found = [self._of(*one) for one in computed]
        return self.ranks.control.run_on_leader(partial(self._judge, computed, found, tally))

    def _of(self, window: Window, batches: Sequence[Batch]) -> RouteAgreement:
        """Agreement of a window's routes; complete in the leader."""
        found, split = (
            RouteAgreement([len(row["token_ids"]) for row in window.rows]),
            self.model.pack_split,
        )
        assigned = window.claim.assignment[self.ranks.layout.data_rank]
        for batch, rows in zip(batches, assigned, strict=True):
            found.add(batch, rows, split, self.model.router_tokens(batch))
        self.ranks.control.reduce_sum(found.table)
        return found

    def _judge(self, computed: Computed, found: Sequence[RouteAgreement], tally: Tally) -> bool:
        """Whether all are sound; the leader's part."""
        sound = True
        for (window, _), agreement in zip(computed, found, strict=True):
            tally.routes += agreement.table.sum(1).numpy()
            wrong = [
                (row["row_id"], share)
                for row, share in zip(window.rows, agreement.shares(), strict=True)
                if share < self.least
            ]
            for name, share in wrong:
                allowed = f"at least {self.least:g} (model.min_equal_routes)"
                print(
                    f"quarantined: {name}: {share:.3f} of its routes are the trainer's own, "
                    f"allowed {allowed}",
                    flush=True,
                )
            if wrong:
                tickets = sorted({ticket_of(name) for name, _ in wrong})
                self.context.client.quarantine(window.claim, tickets, OTHER_ROUTES)
                sound = False
        return sound
