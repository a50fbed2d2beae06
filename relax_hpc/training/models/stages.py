"""Layers of pipeline stages: those with the embedding and with the output layer may have fewer than
others.

As megatron-core divides them by `num_layers_in_first_pipeline_stage` and
`num_layers_in_last_pipeline_stage`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise

from relax_hpc.config.schema import ParallelConfig


def stage_layers(layers: int, parallel: ParallelConfig) -> list[range]:
    """The layers of each stage of a model that ``parallel`` can cut.

    >>> stage_layers(28, ParallelConfig(pipeline=4, first_stage_layers=6, last_stage_layers=4))
    [range(0, 6), range(6, 15), range(15, 24), range(24, 28)]
    """
    others, left = _left(layers, parallel)
    first, last = parallel.first_stage_layers, parallel.last_stage_layers
    counts = [first] * (first > 0) + [left // max(others, 1)] * others + [last] * (last > 0)
    return [range(start, stop) for start, stop in pairwise(accumulate(counts, initial=0))]


def stage_errors(layers: int, parallel: ParallelConfig) -> Iterator[str]:
    """Reason why stages cannot share ``layers`` so, a line that begins with the field.

    >>> misfit = next(stage_errors(28, ParallelConfig(pipeline=4, last_stage_layers=5)))
    >>> misfit.partition(", allowed: ")[0]
    'last_stage_layers: found 5, which leaves 23 of 28 layers to 3 stages'
    """
    told = [name for name in ("first_stage_layers", "last_stage_layers") if getattr(parallel, name)]
    others, left = _left(layers, parallel)
    if not told and left % others:
        allowed = (
            f"a divisor of the model's num_hidden_layers, {layers}, or any with last_stage_layers"
        )
        yield f"pipeline: found {parallel.pipeline}, allowed: {allowed}"
    elif told and parallel.pipeline == 1:
        yield f"{told[0]}: found {getattr(parallel, told[0])} without a pipeline, allowed: 0"
    elif left < others or left % max(others, 1) or (left and not others):
        leaves = f"which leaves {left} of {layers} layers to {others} stages"
        allowed = "what leaves each as many, 1 or more" if others else "what leaves none"
        yield f"{told[-1]}: found {getattr(parallel, told[-1])}, {leaves}, allowed: {allowed}"


def _left(layers: int, parallel: ParallelConfig) -> tuple[int, int]:
    """The stages that are not told how many layers they have, and the layers that they share."""
    told = parallel.first_stage_layers, parallel.last_stage_layers
    return parallel.pipeline - sum(count > 0 for count in told), layers - sum(told)
