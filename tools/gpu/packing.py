"""Rows of lognormal lengths, packed and padded: the comparison of tools/bench/packs.py for a shape
with random weights."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from child import answer
from policies import policy, settings_of

sys.path.append(str(Path(__file__).parents[1] / "bench"))

from packs import compare

from relax_hpc.algorithms import Sft
from relax_hpc.config.schema import OptimizerConfig


def measure(
    device: str,
    shape: str,
    actor: dict[str, Any],
    rows: int,
    median: int,
    longest: int,
    budget: int,
    rounds: int = 3,
) -> dict[str, float]:
    """Compare rows of ``median`` tokens and at most ``longest``, in micro-batches of ``budget``
    tokens."""
    model = policy(shape, settings_of(actor, device), device)
    from relax_hpc.training.trainer import Trainer

    trainer = Trainer(model, Sft(), OptimizerConfig(), 1.0)
    options = Namespace(
        rows=rows, median=median, sigma=1.0, longest=longest, budget=budget, rounds=rounds
    )
    figures = {figure.name: figure.value for figure in compare(trainer, options)}
    return {
        "of_padded": figures["packed against padded"],
        "padding": figures["packed: of their tokens padding"],
        "padding_of_padded": figures["padded: of their tokens padding"],
        "tokens_per_s": figures["packed: rows' tokens a second"],
        "micro_batches": figures["packed: micro-batches"],
        "micro_batches_of_padded": figures["padded: micro-batches"],
    }


if __name__ == "__main__":
    answer(measure)
