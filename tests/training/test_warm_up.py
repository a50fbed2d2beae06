"""A warmed trainer computes the same as a fresh one, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from relax_hpc.queue.row_schema import Row
from relax_hpc.training.trainer import Trainer
from relax_hpc.training.warm_up import LENGTHS, connect_ranks, warm_up_batches
from tests.helpers.training_helpers import (  # noqa: F401
    batch,
    critic,
    one_rank_fixture,
    rows,
    tiny_fixture,
    trainer,
    valued,
)

Make = Callable[..., Trainer]


@pytest.mark.parametrize(
    ("make", "prepare"), [(trainer, lambda rows: rows), (critic, valued)], ids=["actor", "critic"]
)
def test_a_warm_up_leaves_no_trace(
    one_rank: None, tiny: Path, make: Make, prepare: Callable[[list[Row]], list[Row]]
) -> None:
    def results(warms: bool) -> tuple[list[dict[str, float]], list[torch.Tensor]]:
        torch.manual_seed(5)
        subject: Any = make(tiny)
        if warms:
            state = torch.get_rng_state()
            assert connect_ranks(subject.model.device) == 0, "one rank has no other to connect to"
            subject.warm_up(warm_up_batches(subject.model, 10_000))
            assert torch.equal(torch.get_rng_state(), state)
        metrics = []
        for seed in range(2):
            subject.accumulate([batch(prepare(rows(4, seed)))], last=True)
            metrics.append(subject.step(1e-2))
        return metrics, [parameter.detach().clone() for parameter in subject.module.parameters()]

    cold, warm = results(False), results(True)
    assert cold[0] == warm[0]
    assert all(map(torch.equal, cold[1], warm[1]))


def test_the_rows_fit_a_micro_batch(one_rank: None, tiny: Path) -> None:
    model = trainer(tiny).model
    assert [made.lengths for made in warm_up_batches(model, 10_000)] == [[n] for n in LENGTHS]
    assert [made.lengths for made in warm_up_batches(model, 40)] == [[40], [40]]
    ids = warm_up_batches(model, 10_000)[0].tokens
    assert int(ids.min()) >= 0 and int(ids.max()) < model.spec.vocab
