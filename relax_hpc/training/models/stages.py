"""Layers of pipeline stages. The stages with the embedding and with the output layer may have fewer
layers.

megatron-core divides layers in the same way by `num_layers_in_first_pipeline_stage` and
`num_layers_in_last_pipeline_stage`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise

from relax_hpc.config.schema import ParallelConfig


def stage_layers(layers: int, parallel: ParallelConfig) -> list[range]:
    """Layers of each stage. ``parallel`` must have no `stage_errors`.

    >>> stage_layers(28, ParallelConfig(pipeline=4, first_stage_layers=6, last_stage_layers=4))
    [range(0, 6), range(6, 15), range(15, 24), range(24, 28)]
    """
    stages, shared = _shared_layers(layers, parallel)
    first, last = parallel.first_stage_layers, parallel.last_stage_layers
    counts = [shared // max(stages, 1)] * stages
    if first:
        counts.insert(0, first)
    if last:
        counts.append(last)
    return [range(start, stop) for start, stop in pairwise(accumulate(counts, initial=0))]


def stage_errors(layers: int, parallel: ParallelConfig) -> Iterator[str]:
    """Reason why the stages cannot share ``layers``, a line that begins with the field.

    >>> error = next(stage_errors(28, ParallelConfig(pipeline=4, last_stage_layers=5)))
    >>> error.partition(", allowed: ")[0]
    'last_stage_layers: found 5, which leaves 23 of 28 layers to 3 stages'
    """
    names = ("first_stage_layers", "last_stage_layers")
    set_names = [name for name in names if getattr(parallel, name)]
    stages, shared = _shared_layers(layers, parallel)
    if not set_names and shared % stages:
        allowed = (
            f"a divisor of the model's num_hidden_layers, {layers}, or any with last_stage_layers"
        )
        yield f"pipeline: found {parallel.pipeline}, allowed: {allowed}"
    elif set_names and parallel.pipeline == 1:
        name = set_names[0]
        yield f"{name}: found {getattr(parallel, name)} without a pipeline, allowed: 0"
    elif shared < stages or shared % max(stages, 1) or (shared and not stages):
        name = set_names[-1]
        leaves = f"which leaves {shared} of {layers} layers to {stages} stages"
        allowed = "the same number for each, 1 or more" if stages else "a value that leaves none"
        yield f"{name}: found {getattr(parallel, name)}, {leaves}, allowed: {allowed}"


def _shared_layers(layers: int, parallel: ParallelConfig) -> tuple[int, int]:
    """Number of the stages whose layers are not set, and of the layers that they share."""
    counts = parallel.first_stage_layers, parallel.last_stage_layers
    return parallel.pipeline - sum(count > 0 for count in counts), layers - sum(counts)
