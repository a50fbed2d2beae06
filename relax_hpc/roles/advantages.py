"""The advantages role: rewards become per-token advantages, as the run's algorithm says. CPU
only."""

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

_EVERYTHING = 1 << 40


def advantages_of(rows: Sequence[Row], algorithm: Algorithm, seed: int) -> list[Row]:
    """Ids of ``rows`` with what the algorithm gives them; rows come as whole prompt groups, in the
    order of their ids."""
    prompts = nest_rows(rows)
    if algorithm.shuffle_rewards:
        prompts = shuffled(prompts, seed)
    return [
        {"row_id": row["row_id"], **made}
        for row, made in zip(rows, algorithm.given(prompts), strict=True)
    ]


def require_finite(rows: Sequence[Row], made: Sequence[Row], algorithm: Algorithm) -> None:
    """ConfigError: what the algorithm gives is not finite. The same rewards would give it again."""
    for row, given in zip(rows, made, strict=True):
        for name in algorithm.gives:
            if name in given and not np.isfinite(given[name]).all():
                raise ConfigError(
                    f"algorithm.name: {algorithm.name} gives {name} that are not finite, of row "
                    f"{row['row_id']} with "
                    f"reward {row.get('reward')}; mend it (does it divide by a spread or a count "
                    "that may be 0?)"
                )


def shuffled(prompts: Sequence[Prompt], seed: int) -> list[list[list[Row]]]:
    """``prompts`` whose episodes have each other's rewards, the same for the same step."""
    rewards = rewards_of(prompts, fewest=1)
    drawn = np.random.default_rng([seed, prompts[0][0][0]["ticket"]]).permutation(rewards.ravel())
    pairs = zip(prompts, drawn.reshape(rewards.shape), strict=True)
    return [
        [
            [{**row, "reward": reward} for row in episode]
            for episode, reward in zip(prompt, line, strict=True)
        ]
        for prompt, line in pairs
    ]


def run(context: Context) -> None:
    """Serve until the run is finished."""
    client, config = context.client, context.config
    placeholders = read_placeholders(context.run.model)
    context.report_phase("")
    while True:
        with context.spans("wait", cause=HUB) as waiting:
            claim = client.claim("advantages", _EVERYTHING)
            waiting.set_causes(claim.waited if claim else END)
        if claim is None:
            return
        with context.spans("queue", step=claim.step):
            if not check_claim(client, claim, placeholders):
                continue
            rows = client.rows(claim)
            made = advantages_of(rows, config.algorithm, config.seed)
            require_finite(rows, made, config.algorithm)
            client.put(claim.without_results(made), config.algorithm.gives, claim)
        context.report(claim.step, client.store.plane_counts.take_metrics())
