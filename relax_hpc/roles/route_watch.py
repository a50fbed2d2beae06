"""Check of routes: rows whose routes differ too much from the trainer's own routes are never
trained on."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from relax_hpc.base.routes import OTHER_ROUTES
from relax_hpc.queue.process_context import Context
from relax_hpc.queue.row_ids import ticket_of
from relax_hpc.roles.prefetch import Window
from relax_hpc.roles.ranks import Ranks
from relax_hpc.roles.step_report import StepTally
from relax_hpc.training.model import PolicyModel
from relax_hpc.training.models.batches import Batch
from relax_hpc.training.route_agreement import RouteAgreement

Computed = Sequence[tuple[Window, Sequence[Batch]]]
"""Windows whose forward passes are done, with the micro-batches of this rank."""


class RouteWatch:
    """Checks routes in one rank. Its calls are collective."""

    def __init__(self, context: Context, ranks: Ranks, model: PolicyModel) -> None:
        self.context, self.ranks, self.model = context, ranks, model
        self.min_share = context.config.model.min_equal_routes

    def agree(self, computed: Computed, tally: StepTally) -> bool:
        """Whether all rows have valid routes; the result is the same in every rank. Prompt groups
        with other routes are dropped and generated again. The leader's ``tally`` counts routes."""
        if not self.model.routed:
            return True
        agreements = [self._agreement(window, batches) for window, batches in computed]
        judge = partial(self._judge, computed, agreements, tally)
        return self.ranks.control.run_on_leader(judge)

    def _agreement(self, window: Window, batches: Sequence[Batch]) -> RouteAgreement:
        """Return the agreement of a window's routes, complete in the leader."""
        agreement = RouteAgreement([len(row["token_ids"]) for row in window.rows])
        split = self.model.pack_split
        assigned = window.claim.assignment[self.ranks.layout.data_rank]
        for batch, rows in zip(batches, assigned, strict=True):
            agreement.add(batch, rows, split, self.model.router_tokens(batch))
        self.ranks.control.reduce_sum(agreement.table)
        return agreement

    def _judge(
        self, computed: Computed, agreements: Sequence[RouteAgreement], tally: StepTally
    ) -> bool:
        """Return whether all rows are valid. Drop the prompt groups of others. It runs in the
        leader."""
        sound = True
        for (window, _), agreement in zip(computed, agreements, strict=True):
            tally.routes += agreement.table.sum(1).numpy()
            shares = zip(window.rows, agreement.shares(), strict=True)
            wrong = [(row["row_id"], share) for row, share in shares if share < self.min_share]
            for name, share in wrong:
                allowed = f"at least {self.min_share:g} (model.min_equal_routes)"
                print(
                    f"quarantined: {name}: {share:.3f} of its routes are the trainer's own routes, "
                    f"allowed {allowed}",
                    flush=True,
                )
            if wrong:
                tickets = sorted({ticket_of(name) for name, _ in wrong})
                assert self.context.client is not None
                self.context.client.quarantine(window.claim, tickets, OTHER_ROUTES)
                sound = False
        return sound
