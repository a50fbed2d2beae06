"""The critic: a trainer role that gives rows values before it trains on them.

The critic scores rows that lack values whenever it waits for rows to train on, with its present
weights. Advantages are computed from the values. At staleness 0 the rows of step t are scored
before the critic's first update of that step.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from relax_hpc.algorithms.values import explained_variance
from relax_hpc.base.fields import fields_by
from relax_hpc.config.roles import ROLES
from relax_hpc.queue.client import Claim, StepTrained
from relax_hpc.queue.client.claims import check_claim
from relax_hpc.queue.process_context import Context
from relax_hpc.queue.row_schema import Row
from relax_hpc.queue.storage.media import read_placeholders
from relax_hpc.roles.forward import score_rows
from relax_hpc.roles.ranks import Ranks
from relax_hpc.roles.step_report import StepResult
from relax_hpc.roles.trainer_role import TrainerHooks, TrainerRole
from relax_hpc.training.critic import CriticModel, CriticTrainer
from relax_hpc.training.models.hf_files import read_config


class Values(TrainerHooks):
    """Hooks of the critic: it scores rows while it waits."""

    def __init__(self, context: Context, ranks: Ranks, model: CriticModel) -> None:
        self.context, self.ranks, self.model = context, ranks, model
        self.settings = context.config.critic
        self.placeholders = read_placeholders(context.model)
        self.pending: Future[Claim | None] | None = None
        """Claim of the next rows without values, in the leader."""

    def due(self, step: int) -> Future | None:
        """See `IdleWork`. At staleness 0 rows of a later step wait until that step begins."""
        if self.pending is None:
            assert self.context.client is not None
            budget = self.settings.pack_tokens * self.settings.parallel.data
            self.pending = self.context.client.submit_claim(ROLES["critic"].scores, budget)
        if not self.pending.done():
            return self.pending
        claim = self.pending.result()
        if claim is None:
            return None
        is_early = self.context.config.max_staleness == 0 and claim.step > step
        return None if is_early else self.pending

    def take(self) -> dict[str, Any]:
        """See `IdleWork`. The message contains no claim if the rows were given back."""
        assert self.pending is not None and self.context.client is not None
        claim, self.pending = self.pending.result(), None
        assert claim is not None
        client = self.context.client
        sound = self.ranks.control.run_while_others_wait(
            lambda: check_claim(client, claim, self.placeholders)
        )
        return {"claim": claim.message() if sound else None}

    def do(self, message: dict[str, Any]) -> None:
        """Compute the values of the rows of a claim."""
        if not message["claim"]:
            return
        claim = Claim.from_message(message["claim"])
        with self.context.spans("queue", step=claim.step):
            rows = self.ranks.rows(claim, self.ranks.control)
        if rows is None:
            return
        with self.context.spans("forward", step=claim.step):
            values = score_rows(
                rows, self.ranks, self.model, self.settings, self.model.forward_values
            )
        if self.ranks.leader:
            with self.context.spans("queue", step=claim.step):
                self._put(rows, values, claim)

    def _put(self, rows: Sequence[Row], values: Sequence[np.ndarray], claim: Claim) -> None:
        assert self.context.client is not None
        fields = [
            {"row_id": row["row_id"], "values": value}
            for row, value in zip(rows, values, strict=True)
        ]
        self.context.client.put(fields, fields_by("critic"), claim)

    def values(self, result: StepResult, answer: StepTrained) -> dict[str, float]:
        """See `TrainerHooks`."""
        return result.values() | {
            "value/explained_variance": explained_variance(result.of_first_pass())
        }


def run(context: Context) -> None:
    """Train to the last step. On a stop request or at the time limit, save between two steps."""
    config = context.config
    context.report_phase("connecting its ranks")
    ranks = Ranks(context, config.critic.parallel)
    context.report_phase("loading the model")
    directory = Path(config.model.critic_path) if config.model.critic_path else context.model
    model = CriticModel(read_config(directory), config.model, config.critic.parallel, config.critic)
    model.load_hf(directory)
    values = Values(context, ranks, model)
    trainer = CriticTrainer.from_settings(
        model, config.algorithm, config.critic, config.rollout.temperature
    )
    TrainerRole(context, ranks, config.critic, trainer, values, values.placeholders).run()
