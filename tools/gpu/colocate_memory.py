"""Device memory that a trainer's state frees for an engine, and the seconds of its moves to host
memory and back."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Any

from child import answer, note, sync, timed

if TYPE_CHECKING:
    from policies import Section
    from torch import Tensor

    from relax_hpc.training.device_offload import DeviceOffload
    from relax_hpc.training.trainer import Trainer

_GIB = 2**30


def choose_allocator(expandable: bool) -> None:
    """Let torch's allocator use `expandable_segments`, or its defaults.

    RuntimeError: torch has been imported and has read the settings of its allocator.
    """
    from relax_hpc.base.cuda_allocator import VARIABLES, expand_segments

    if "torch" in sys.modules:
        raise RuntimeError("torch was imported before the settings of its allocator")
    for name in VARIABLES:
        os.environ.pop(name, None)
    if expandable:
        expand_segments(os.environ)


def weight_copies(trained: Trainer) -> dict[str, Tensor]:
    """Copies of all weights in host memory."""
    parameters = trained.model.module.named_parameters()
    return {name: value.detach().to("cpu", copy=True) for name, value in parameters}


def count_changed(trained: Trainer, before: dict[str, Tensor]) -> float:
    """Number of weights that differ in a bit from their copies ``before``."""
    import torch

    changed = 0
    for name, value in trained.model.module.named_parameters():
        # As bytes, because a comparison of numbers treats 0.0 and -0.0 as equal.
        now = value.detach().cpu().view(torch.uint8)
        changed += not torch.equal(now, before[name].view(torch.uint8))
    return float(changed)


def device_memory(device: str) -> dict[str, float]:
    """GiB of the device that are free, and that torch has reserved or filled with tensors."""
    if device != "cuda":
        return {"free_gib": 0.0, "reserved_gib": 0.0, "allocated_gib": 0.0}
    import torch

    return {
        "free_gib": torch.cuda.mem_get_info()[0] / _GIB,
        "reserved_gib": torch.cuda.memory_reserved() / _GIB,
        "allocated_gib": torch.cuda.memory_allocated() / _GIB,
    }


def is_expandable(device: str) -> float:
    """1.0 if torch's allocator has expandable segments, else 0.0."""
    if device != "cuda":
        return 0.0
    import torch

    segments = torch.cuda.memory_snapshot()
    return float(any(segment.get("is_expandable", False) for segment in segments))


def measure(
    device: str,
    shape: str,
    actor: Section,
    count: int,
    length: int,
    expandable: bool = False,
    turns: int = 3,
) -> dict[str, Any]:
    """``count`` rows of ``length`` tokens are trained before each turn. ``expandable``: see
    `choose_allocator`."""
    choose_allocator(expandable)
    from policies import new_batch, trainer

    from relax_hpc.training.device_offload import DeviceOffload

    trained = trainer(shape, actor, device)
    batches = new_batch(trained, count, length)
    trained.accumulate(batches)
    trained.step(1e-5)
    sync(device)
    started = time.perf_counter()
    offload = DeviceOffload(trained)
    figures: dict[str, Any] = {
        "pinned_in_s": time.perf_counter() - started,
        "state_gib": offload.bytes / _GIB,
        "expandable": is_expandable(device),
    }
    note(figures)
    for turn in range(1, turns + 1):
        for name, value in move_state(trained, offload, device).items():
            figures[f"turn_{turn}_{name}"] = value
        note(figures)
        trained.accumulate(batches)
        figures[f"turn_{turn}_grad_norm"] = trained.step(1e-5)["grad_norm"]
    figures["given_back_of_state"] = figures[f"turn_{turns}_given_back_gib"] / figures["state_gib"]
    return figures


def move_state(trained: Trainer, offload: DeviceOffload, device: str) -> dict[str, float]:
    """Figures of one move of the trainer's state to host memory and back."""
    before = weight_copies(trained)
    full = device_memory(device)
    leave_s = timed(offload.offload, device)
    empty = device_memory(device)
    return_s = timed(offload.restore, device)
    return {
        "leave_s": leave_s,
        "return_s": return_s,
        "given_back_gib": empty["free_gib"] - full["free_gib"],
        "reserved_before_gib": full["reserved_gib"],
        "still_reserved_gib": empty["reserved_gib"],
        "still_allocated_gib": empty["allocated_gib"],
        "changed_weights": count_changed(trained, before),
    }


if __name__ == "__main__":
    answer(measure)
