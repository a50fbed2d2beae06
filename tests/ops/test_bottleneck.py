"""The first sentence of a report, and the comparison of lengths."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_hpc.base.metrics.length_counts import LengthCounts, bounds_of, count_lengths
from relax_hpc.config import load
from relax_hpc.ops.observe.bottleneck import bottleneck_sentence

SPLIT = {
    "unit": "node",
    "present": {"rollout": 4, "actor": 4},
    "suggested": {"rollout": 6, "actor": 2},
}
FOR_TRAINING = {**SPLIT, "suggested": {"rollout": 2, "actor": 6}}


def report_values(
    seconds: dict[str, float], waits_by_peer: dict[str, float], **fields: Any
) -> dict[str, Any]:
    """A report whose actor has these seconds by kind, and waits by peer."""
    actor_waits = [
        {"role": "actor", "peer": peer, "reason": "rows", "seconds": spent}
        for peer, spent in waits_by_peer.items()
    ]
    return {
        "last_step": 9,
        "hours": {"unit": "node", "asked": 10.0, "lost_restarting": 1.0, "lost_again": 1.0},
        "roles": {
            "actor": {"seconds": {**seconds, "wait": sum(waits_by_peer.values()), "start": 99.0}}
        },
        "waits": actor_waits,
        "pace": {"step_s": 10.0, "rollout_s": 8.0, "actor_s": 3.0},
        "split": SPLIT,
    } | fields


@pytest.mark.parametrize(
    ("values", "settings", "expected"),
    [
        (
            report_values({"train": 2.0}, {"rollout": 8.0}),
            {"max_staleness": 2},
            "Generation limits this run: the actor waits 80% of its time for rows; 6 instead of 4 "
            "of the 8 nodes for rollout would make both sides equally busy.",
        ),
        (
            report_values({"train": 2.0}, {"rollout": 8.0}, split=None),
            {"max_staleness": 2},
            "more engines would remove it.",
        ),
        (
            report_values({"train": 2.0}, {"rollout": 8.0}, split=None),
            {"max_staleness": 0},
            "max_staleness 1 would let engines generate while the actor trains.",
        ),
        (
            report_values({"train": 2.0}, {"rollout": 8.0}),
            {"colocate": True},
            "separate groups with max_staleness 1",
        ),
        (
            report_values(
                {"train": 2.0},
                {"rollout": 8.0},
                pace={"step_s": 10.0, "rollout_s": 2.0, "actor_s": 2.0},
                waits=[
                    {"role": "actor", "peer": "rollout", "reason": "rows", "seconds": 8.0},
                    {"role": "rollout", "peer": "genrm", "reason": "answers", "seconds": 7.0},
                ],
            ),
            {"max_staleness": 2},
            "engines are busy for only 20% of a step: they wait for genrm (answers)",
        ),
        (
            report_values({"train": 7.0, "forward": 1.0}, {"rollout": 2.0}, split=FOR_TRAINING),
            {"max_staleness": 2},
            "Training limits this run: the actor computes 80% of its time; 6 instead of 4 of the 8 "
            "nodes for training would make both sides equally busy.",
        ),
        (
            report_values(
                {"train": 9.0}, {"rollout": 1.0}, pace={"step_s": 10.0, "rollout_s": 9.5}
            ),
            {"max_staleness": 2},
            "only more devices for both would make it faster.",
        ),
        (
            report_values({"train": 2.0}, {"reference": 8.0}),
            {},
            "Role reference limits this run: the actor waits 80% of its time for its fields; more "
            "ranks (reference.parallel) for group reference would remove it, or reference inside "
            "the actor (actor.forward).",
        ),
        (report_values({"train": 2.0}, {"disk": 8.0}), {}, "The disk limits this run"),
        (report_values({"train": 2.0}, {"hub": 8.0}), {}, "The queue limits this run"),
        (
            report_values({"train": 2.0, "checkpoint": 5.0}, {}),
            {},
            "Saving checkpoints limits this run: the actor saves them 71% of its time; a larger "
            "checkpoint.every would remove it.",
        ),
        (
            report_values(
                {"train": 2.0},
                {},
                hours={"unit": "GPU", "asked": 4.0, "lost_restarting": 1.0, "lost_again": 1.0},
            ),
            {},
            "Faults limit this run: they cost 50% of its GPU-hours",
        ),
        (report_values({}, {}), {}, "What limits this run is not known yet"),
    ],
)
def test_the_largest_part_of_the_actors_time_is_named(
    values: dict[str, Any], settings: dict[str, Any], expected: str
) -> None:
    sentence = bottleneck_sentence(values, load([], settings))
    assert expected in sentence
    assert sentence.endswith(".") and sentence.count(". ") == 0


@given(
    lengths=st.lists(st.integers(0, 300), min_size=1, max_size=200),
    budget=st.integers(1, 256),
    cut=st.integers(0, 200),
)
def test_counts_of_parts_give_quantiles_of_all(lengths: list[int], budget: int, cut: int) -> None:
    """Counts of two reports add up, and each quantile is in the bin of the exact one."""
    parts = [count_lengths("trained", part, budget) for part in (lengths[:cut], lengths[cut:])]
    counts = LengthCounts.from_metrics("trained", parts)
    assert counts.episodes == len(lengths) and counts.tokens == sum(lengths)
    bounds = [0, *bounds_of(budget)]
    for share in (0.1, 0.5, 0.9, 1.0):
        exact = sorted(lengths)[math.ceil(share * len(lengths)) - 1]
        upper = next((bound for bound in bounds[1:] if exact <= bound), bounds[-1])
        lower = max((bound for bound in bounds if bound < upper), default=0)
        assert lower <= counts.quantile(share) <= upper
