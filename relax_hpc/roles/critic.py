"""The critic: a trainer role that gives rows their values before it trains on them.

Rows that wait for values are scored whenever the critic waits for rows to train on, by the weights
that it has then: advantages, which those have, follow from the values. At staleness 0 rows of step
t are scored by the critic as it is before its first update of that step.
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
from relax_hpc.roles.trainer_role import Beside, TrainerRole
from relax_hpc.training.critic import CriticModel, CriticTrainer
from relax_hpc.training.models.hf_files import read_config


class Values(Beside):
    """Duties of the critic beside its training: rows to score."""

    def __init__(self, context: Context, ranks: Ranks, model: CriticModel) -> None:
        self.context, self.ranks, self.model = context, ranks, model
        self.settings = context.config.critic
        self.placeholders = read_placeholders(context.model)
        self.asked: Future[Claim | None] | None = None
        """Claim of the next rows without values, in the leader."""

    def due(self, step: int) -> Future | None:
        """See `Aside`. At staleness 0 rows of a later step wait until the weights are that
        step's."""
        if self.asked is None:
            budget = self.settings.pack_tokens * self.settings.parallel.data
            self.asked = self.context.client.submit_claim(ROLES["critic"].scores, budget)
        if not self.asked.done():
            return self.asked
        claim = self.asked.result()
        early = claim is not None and self.context.config.max_staleness == 0 and claim.step > step
        return None if claim is None or early else self.asked

    def take(self) -> dict[str, Any]:
        """See `Aside`; nothing, if the rows were given back."""
        claim, self.asked = self.asked.result(), None
        client = self.context.client
        sound = self.ranks.control.run_while_others_wait(
            lambda: check_claim(client, claim, self.placeholders)
        )
        return {"claim": claim.message() if sound else None}

    def do(self, told: dict[str, Any]) -> None:
        """Give the rows of a claim their values."""
        if not told["claim"]:
            return
        claim = Claim.from_message(told["claim"])
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
        made = [
            {"row_id": row["row_id"], "values": value}
            for row, value in zip(rows, values, strict=True)
        ]
        self.context.client.put(made, fields_by("critic"), claim)

    def values(self, result: StepResult, answer: StepTrained) -> dict[str, float]:
        """See `Beside`."""
        return result.values() | {
            "value/explained_variance": explained_variance(result.of_first_pass())
        }


def run(context: Context) -> None:
    """Train to the last step; asked to stop, or out of time, save at a step's edge."""
    config = context.config
    context.report_phase("meeting its ranks")
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
