"""Check by the metrics of a step whether rewards have changed the policy."""

from __future__ import annotations

from collections.abc import Mapping


def why_nothing_learned(values: Mapping[str, float | None], updates: int) -> str:
    """Reason why no reward has changed the policy in a step of ``updates`` optimizer updates.

    Empty: a reward has changed it, or the metrics do not tell.

    >>> why_nothing_learned({"loss/zero_advantage_share": 1.0, "reward/zero_std_share": 1.0,
    ...     "reward/mean": 0.0}, 1)
    'all rewards inside each prompt group are equal (reward/zero_std_share 1, reward/mean 0.000)'
    >>> why_nothing_learned({"loss/zero_advantage_share": 0.99}, 1)
    ''
    """
    if (values.get("loss/empty_updates") or 0) >= updates:
        return "no token was trained, all were masked (loss/empty_updates)"
    if (values.get("loss/zero_advantage_share") or 0) < 1:
        return ""
    if (values.get("reward/zero_std_share") or 0) < 1:
        return "all advantages are 0 (loss/zero_advantage_share 1)"
    mean = values.get("reward/mean") or 0.0
    return (
        "all rewards inside each prompt group are equal (reward/zero_std_share 1, reward/mean "
        f"{mean:.3f})"
    )
