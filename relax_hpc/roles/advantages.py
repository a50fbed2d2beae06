"""The advantages role: computes per-token advantages from rewards with the run's algorithm. It
needs no GPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from relax_hpc.algorithms import Algorithm
from relax_hpc.algorithms.base import Prompt, rewards_of
from relax_hpc.base.errors import ConfigError
from relax_hpc.queue.client.claims import check_claim
from relax_hpc.queue.process_context import END, HUB, Context
from relax_hpc.queue.row_schema import Row, nest_rows
from relax_hpc.queue.storage.media import read_placeholders

_ALL_TOKENS = 1 << 40
"""Budget of a claim without a limit."""


def advantages_of(rows: Sequence[Row], algorithm: Algorithm, seed: int) -> list[Row]:
    """Return the ids of ``rows`` with the fields that the algorithm gives. ``rows`` are whole
    prompt groups in the order of their ids."""
    prompts = nest_rows(rows)
    if algorithm.shuffle_rewards:
        prompts = shuffled(prompts, seed)
    return [
        {"row_id": row["row_id"], **fields}
        for row, fields in zip(rows, algorithm.given(prompts), strict=True)
    ]


def require_finite(rows: Sequence[Row], row_fields: Sequence[Row], algorithm: Algorithm) -> None:
    """ConfigError: the algorithm gives values that are not finite. A retry would give the same."""
    for row, fields in zip(rows, row_fields, strict=True):
        for name in algorithm.gives:
            if name in fields and not np.isfinite(fields[name]).all():
                raise ConfigError(
                    f"algorithm.name: {algorithm.name} gives {name} that are not finite, for row "
                    f"{row['row_id']} with reward {row.get('reward')}; correct the algorithm "
                    "(does it divide by a standard deviation or a count that may be 0?)"
                )


def shuffled(prompts: Sequence[Prompt], seed: int) -> list[list[list[Row]]]:
    """Return ``prompts`` with rewards permuted over all episodes. The permutation depends only on
    ``seed`` and the step."""
    rewards = rewards_of(prompts, fewest=1)
    generator = np.random.default_rng([seed, prompts[0][0][0]["ticket"]])
    permuted = generator.permutation(rewards.ravel()).reshape(rewards.shape)
    result = []
    for prompt, prompt_rewards in zip(prompts, permuted, strict=True):
        pairs = zip(prompt, prompt_rewards, strict=True)
        result.append([[{**row, "reward": reward} for row in episode] for episode, reward in pairs])
    return result


def run(context: Context) -> None:
    """Serve until the run is finished."""
    client, config = context.client, context.config
    assert client is not None
    placeholders = read_placeholders(context.run.model)
    context.report_phase("")
    while True:
        with context.spans("wait", cause=HUB) as waiting:
            claim = client.claim("advantages", _ALL_TOKENS)
            waiting.set_causes(claim.waited if claim else END)
        if claim is None:
            return
        with context.spans("queue", step=claim.step):
            if not check_claim(client, claim, placeholders):
                continue
            rows = client.rows(claim)
            row_fields = advantages_of(rows, config.algorithm, config.seed)
            require_finite(rows, row_fields, config.algorithm)
            client.put(claim.without_results(row_fields), config.algorithm.gives, claim)
        context.report(claim.step, client.store.plane_counts.take_metrics())
