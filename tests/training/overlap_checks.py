"""What `tests.training.training_rank` proves of gradients that ranks sum while the last backward pass goes
on."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import torch

from relax_hpc.net.rendezvous.channel import RankChannel
from relax_hpc.training.checkpoint import store
from relax_hpc.training.device_offload import DeviceOffload
from relax_hpc.training.models.batches import Batch, idle_batch
from relax_hpc.training.reduction import OverlappedReduction
from relax_hpc.training.trainer import Trainer
from tests.helpers import training_helpers as helpers

SMALL = {"bucket_size": 4000}
"""Parameters; the model has some twenty times as many."""
_names = count()


def check_overlap(model: Path, settings: dict[str, Any], out: Path) -> None:
    """The same weights as without it, whatever windows a step has: rows for all, idle ranks, none;
    also on from their checkpoints, after the device was somebody else's and after a step that was
    lost."""
    usual = helpers.trainer(model, **settings)
    ours = overlapped(model, settings)
    begun = watched(ours)
    buckets = len(ours._reduction._starts)
    assert buckets > 3 or not ours.model.layout.first_stage
    for seed, windows in enumerate((streamed, one_idles, one_has_none)):
        metrics = (
            learn(usual, windows(usual, seed), last=False),
            learn(ours, windows(ours, seed), last=True),
        )
        # In the first step it is not known yet how often a parameter has a gradient, nor where
        # nothing was passed back.
        passed = seed > 0 and bool(windows(ours, seed)[-1])
        assert begun == [(number, passed) for number in range(buckets)], begun
        begun.clear()
        agree(usual, ours, *metrics)
    again = [overlapped(model, settings), helpers.trainer(model, **settings)]
    for source, target in zip((usual, ours), again, strict=True):
        folder = out / f"i000009-step-{next(_names):06d}"
        helpers.save(folder, source, {})
        store.load(folder, target, RankChannel(60.0))
    if not usual.settings.offload:
        # On a CPU moments of the host are on the device too, which cannot have their memory.
        away = DeviceOffload(again[0])
        away.offload()
        away.restore()
    learn(again[0], streamed(again[0], 6), last=True, is_lost=True)
    for seed in (7, 8):
        metrics = [
            learn(one, streamed(one, seed), last=one is again[0] and seed == 7)
            for one in (usual, *again)
        ]
    agree(usual, again[0], *metrics[:2])
    agree(usual, again[1], *metrics[::2])
    refused(again[0])


def overlapped(model: Path, settings: dict[str, Any]) -> Trainer:
    optimizer = settings.get("optimizer", {}) | {"overlap_gradients": True}
    trainer = helpers.trainer(model, **settings | {"optimizer": optimizer, "megatron": SMALL})
    assert isinstance(trainer._reduction, OverlappedReduction)
    return trainer


def watched(trainer: Trainer) -> list[tuple[int, bool]]:
    """Which bucket's sum has begun, in that order, and whether autograd was at work then."""
    begun: list[tuple[int, bool]] = []
    begins = trainer._reduction._starts

    def watch(number: int) -> None:
        begun.append((number, torch._C._current_graph_task_id() != -1))
        plain[number]()

    plain = list(begins)
    begins[:] = [lambda number=number: watch(number) for number in range(len(begins))]
    return begun


def learn(
    trainer: Trainer, windows: list[list[Batch]], last: bool, is_lost: bool = False
) -> dict[str, float]:
    """A step's metrics; none of one that is lost. ``last``: whether the last window is said to be
    that."""
    for number, window in enumerate(windows):
        trainer.accumulate(window, last=last and number == len(windows) - 1)
    if is_lost:
        trainer.discard()
        return {}
    return trainer.step(helpers.LR)


def streamed(trainer: Trainer, seed: int) -> list[list[Batch]]:
    """Windows of this rank; a pipeline runs them in one go."""
    layout, split = trainer.model.layout, trainer.model.pack_split
    dealt = helpers.streamed(helpers.rows(8, seed), layout.data_size, helpers.ARRIVAL)
    windows = [
        [helpers.batch(rows, split) for rows in window[layout.data_rank]] for window in dealt
    ]
    return windows if layout.pipeline_size == 1 else [[one for window in windows for one in window]]


def one_idles(trainer: Trainer, seed: int) -> list[list[Batch]]:
    """All rows of the last window are the first replica's."""
    layout, split = trainer.model.layout, trainer.model.pack_split
    rows = helpers.rows(3, 100 + seed)
    mine = (
        [helpers.batch(rows, split)]
        if layout.data_rank == 0
        else [idle_batch(rows[0], "cpu", split)]
    )
    windows = [*streamed(trainer, seed), mine]
    return windows if layout.pipeline_size == 1 else [[one for window in windows for one in window]]


def one_has_none(trainer: Trainer, seed: int) -> list[list[Batch]]:
    """The last window of all but the first replica is empty."""
    windows = one_idles(trainer, seed)
    return windows if trainer.model.layout.data_rank == 0 else [*windows, []]


def agree(left: Trainer, right: Trainer, *metrics: dict[str, float]) -> None:
    """To the bit, unless ranks have other shards of which the gradient's norm is made: its rounding
    differs then, and Adam makes some thousandths of a step of it where a gradient is all but
    zero."""
    distributed = left.settings.distributed
    for one, other in zip(left.module.parameters(), right.module.parameters(), strict=True):
        torch.testing.assert_close(
            one, other, atol=helpers.LR / 100 if distributed else 0.0, rtol=0
        )
    assert distributed or metrics[0] == metrics[1], metrics


def refused(trainer: Trainer) -> None:
    """What comes after the last window of a step."""
    window = streamed(trainer, 3)[0]
    trainer.accumulate(window, last=True)
    try:
        trainer.accumulate(window)
    except RuntimeError as error:
        assert "after the last of a step" in str(error)
    else:
        raise AssertionError("more was added")
    trainer.discard()


def unsharded(settings: dict[str, Any]) -> dict[str, Any]:
    """The same with an optimizer that every rank has all of."""
    return settings | {"optimizer": settings.get("optimizer", {}) | {"distributed": False}}
