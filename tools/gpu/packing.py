"""Rows of lognormal lengths, packed against padded, as tools/bench/packs.py has it, on a shape with
random weights."""

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
    """Rows of ``median`` tokens and ``longest`` at most, in micro-batches of ``budget``."""
    model = policy(shape, settings_of(actor, device), device)
    from relax_hpc.training.trainer import Trainer

    trainer = Trainer(model, Sft(), OptimizerConfig(), 1.0)
    about = Namespace(
        rows=rows, median=median, sigma=1.0, longest=longest, budget=budget, rounds=rounds
    )
    found = {figure.name: figure.value for figure in compare(trainer, about)}
    return {
        "of_padded": found["packed against padded"],
        "padding": found["packed: of their tokens padding"],
        "padding_of_padded": found["padded: of their tokens padding"],
        "tokens_per_s": found["packed: rows' tokens a second"],
        "micro_batches": found["packed: micro-batches"],
        "micro_batches_of_padded": found["padded: micro-batches"],
    }


if __name__ == "__main__":
    answer(measure)
