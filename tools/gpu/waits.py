"""Calls of a training step that wait for the device, and steps with packs of new lengths, which may
compile kernels again."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from child import answer, middle, note, timed
from policies import new_batch, trainer

if TYPE_CHECKING:
    from policies import Section

    from relax_hpc.training.trainer import Trainer

_WARMUP_STEPS = 2
_REPEATED_STEPS = 3
_SHOWN = 12
"""Largest number of locations in a figure."""


def find_waits(act: Callable[[], object], device: str) -> list[str]:
    """Locations where ``act`` waits for the device, as "file:line count", the most frequent first.

    torch 2.13 reports calls that copy to the host or ask for sizes, but no explicit
    synchronization of a stream. A wait in a backward pass has the line that called `backward`.
    """
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        try:
            act()
        finally:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    locations: Counter[str] = Counter()
    for record in records:
        if "called a synchronizing" in str(record.message):
            locations[f"{Path(record.filename).name}:{record.lineno}"] += 1
    return [f"{location} {count}" for location, count in locations.most_common()]


def count_waits(locations: list[str]) -> float:
    """Number of waits at ``locations``, see `find_waits`."""
    return float(sum(int(location.rpartition(" ")[2]) for location in locations))


def train_step(trained: Trainer, batches: list[Any]) -> None:
    trained.accumulate(batches)
    trained.step(1e-6)


def measure(
    device: str, shape: str, actor: Section, count: int, length: int, growth: int, steps: int = 8
) -> dict[str, Any]:
    """``count`` rows of ``length`` tokens. In each further step, each row is ``growth`` tokens
    longer."""
    with tempfile.TemporaryDirectory() as cache:
        # An empty directory, so that the compilations of this process can be counted. Triton reads
        # the variable at each compilation.
        os.environ["TRITON_CACHE_DIR"] = cache
        trained = trainer(shape, actor, device)
        figures: dict[str, Any] = {"compared_s": trained.model.compared_s}
        batches = new_batch(trained, count, length)
        time_repeated_steps(trained, batches, device, figures)
        acts: dict[str, Callable[[], object]] = {
            "collate": partial(new_batch, trained, count, length),
            "accumulate": partial(trained.accumulate, batches),
            "step": partial(trained.step, 1e-6),
        }
        for name, act in acts.items():
            locations = find_waits(act, device)
            figures[f"waits_in_{name}"] = count_waits(locations)
            figures[f"waits_in_{name}_at"] = locations[:_SHOWN]
            note(figures)
        lengths = [length + number * growth for number in range(1, steps + 1)]
        time_new_lengths(trained, count, lengths, Path(cache), figures)
        figures["compiled"] = float(_compiled_kernels(Path(cache)))
        return figures


def time_repeated_steps(
    trained: Trainer, batches: list[Any], device: str, figures: dict[str, Any]
) -> None:
    """Add seconds of the first step, and of a step after the warm-up, to ``figures``."""
    act = partial(train_step, trained, batches)
    figures["first_step_s"] = timed(act, device)
    for _ in range(_WARMUP_STEPS):
        act()
    figures["repeated_step_s"] = middle([timed(act, device) for _ in range(_REPEATED_STEPS)])
    note(figures)


def time_new_lengths(
    trained: Trainer, count: int, lengths: list[int], cache: Path, figures: dict[str, Any]
) -> None:
    """Add seconds of a step of ``count`` rows for each length, and the number of kernels that these
    steps compile into ``cache``, to ``figures``."""
    compiled = _compiled_kernels(cache)
    seconds = []
    for length in lengths:
        batches = new_batch(trained, count, length)
        seconds.append(timed(partial(train_step, trained, batches), trained.model.device.type))
        figures["new_length_steps_s"] = [round(value, 4) for value in seconds]
        figures["slowest_of_repeated"] = max(seconds) / figures["repeated_step_s"]
        figures["compiled_in_new_lengths"] = float(_compiled_kernels(cache) - compiled)
        note(figures)


def _compiled_kernels(cache: Path) -> int:
    """Number of kernels that Triton has compiled into its ``cache``, one directory for each."""
    return sum(1 for _ in cache.glob("*/*.cubin"))


if __name__ == "__main__":
    answer(measure)
