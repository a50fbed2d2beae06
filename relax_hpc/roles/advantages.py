"""The advantages role: rewards of whole prompt groups become per-token advantages. CPU only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from relax_hpc.algorithms.advantages import group_advantages, token_advantages
from relax_hpc.config.schema import AlgorithmConfig
from relax_hpc.roles.context import END, HUB, Context
from relax_hpc.transfer_queue.client.claims import check_claim
from relax_hpc.transfer_queue.row_schema import Row
from relax_hpc.transfer_queue.storage.media import placeholders_of

_EVERYTHING = 1 << 40


def advantages_of(rows: Sequence[Row], samples: int, algorithm: AlgorithmConfig, seed: int) -> list[Row]:
    """``rows`` with `advantages` [tokens] float32; rows come as whole prompt groups of ``samples``."""
    rewards = np.array([row["reward"] for row in rows], dtype=np.float64).reshape(-1, samples)
    if algorithm.shuffle_rewards:
        shuffled = np.random.default_rng([seed, rows[0]["ticket"]]).permutation(rewards.reshape(-1))
        rewards = shuffled.reshape(rewards.shape)
    values = group_advantages(rewards, algorithm.advantage).reshape(-1)
    return [
        {"sample_id": row["sample_id"], "advantages": token_advantages(value, row["loss_mask"])}
        for row, value in zip(rows, values, strict=True)
    ]


def run(context: Context) -> None:
    """Serve until the run is finished."""
    client, config = context.client, context.config
    placeholders = placeholders_of(context.run.model)
    context.says("")
    while True:
        with context.spans("wait", cause=HUB) as waiting:
            claim = client.claim("advantages", _EVERYTHING)
            waiting.because(claim.waited if claim else END)
        if claim is None:
            return
        with context.spans("queue", step=claim.step):
            if not check_claim(client, claim, placeholders):
                continue
            rows = client.rows(claim)
            client.put(
                advantages_of(rows, config.samples_per_prompt, config.algorithm, config.seed), ("advantages",), claim
            )
        context.report(claim.step, client.store.ways.since_last())
