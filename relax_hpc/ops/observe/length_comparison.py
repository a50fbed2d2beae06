"""Lengths of the episodes that were trained, compared with those that were generated.

They differ if a filter, a bound on staleness or failures drop episodes of some lengths more often
than others. Training then sees another distribution than the policy has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from relax_hpc.base.metrics.length_counts import LengthCounts
from relax_hpc.base.metrics.read import Metrics
from relax_hpc.ops.observe.text_table import Column, aligned

_QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9, "p99": 0.99}
_NOTABLE = 0.05
"""Relative difference of the means from which on the report says which lengths are missing."""
_COLUMNS = (
    Column("LENGTHS, TOKENS"),
    Column("EPISODES", is_number=True),
    Column("MEAN", is_number=True),
    *(Column(name.upper(), is_number=True) for name in _QUANTILES),
)


def compare_lengths(metrics: Metrics, first: int | None, last: int | None) -> dict[str, Any] | None:
    """{"generated", "trained"}: episodes, mean and quantiles in tokens, of steps ``first`` to
    ``last``. None: the run has not counted them.

    Generated are all episodes that ended, also of steps that were rolled back.
    """
    if first is None or last is None:
        return None
    lines = [line for line in metrics.lines if first <= line["step"] <= last]
    rows = [row for row in metrics.rows if first <= row["step"] <= last]
    generated = LengthCounts.from_metrics("generated", lines)
    trained = LengthCounts.from_metrics("trained", rows)
    if not generated.episodes or not trained.episodes:
        return None
    return {"generated": _summary(generated), "trained": _summary(trained)}


def _summary(counts: LengthCounts) -> dict[str, float]:
    quantiles = {name: counts.quantile(share) for name, share in _QUANTILES.items()}
    return {"episodes": counts.episodes, "mean": counts.mean, **quantiles}


def length_lines(lengths: Mapping[str, Any] | None) -> Iterator[str]:
    """Table of `compare_lengths`, and a sentence if the means differ."""
    if not lengths:
        return
    yield ""
    yield from aligned(_COLUMNS, [list(_cells(name, values)) for name, values in lengths.items()])
    generated, trained = lengths["generated"]["mean"], lengths["trained"]["mean"]
    difference = trained / generated - 1 if generated else 0.0
    if abs(difference) >= _NOTABLE:
        kind, missing = ("longer", "short") if difference > 0 else ("shorter", "long")
        yield (
            f"trained episodes are {abs(difference):.0%} {kind} than generated ones: {missing} "
            "ones are dropped or still wait"
        )


def _cells(name: str, values: Mapping[str, float]) -> Iterable[str]:
    numbers = [values["mean"], *(values[quantile] for quantile in _QUANTILES)]
    return [name, f"{values['episodes']:.0f}", *(f"{number:.1f}" for number in numbers)]
