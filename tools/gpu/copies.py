"""Copies between the device and the host, each in turns with a raw one of as many bytes in pinned
memory, in one piece.

`slab`: what a publish copies, and whether a step beside it takes longer. `readers`: from the slab
of a version in a node's memory into the live parameters of actor_fwd, and by the loader that is in
an engine's process; and into the former from a file that was not mapped before. `checkpoint`: how
long the first one keeps the trainer.
"""

from __future__ import annotations

import gc
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from child import answer, in_turns, middle, sync, timed
from policies import policy, settings_of, trainer
from shapes import rows

from relax_hpc.base.host_memory import allocate_host_memory
from relax_hpc.net.transport import SlabPool
from relax_hpc.rollout.engines.sglang.slab_loader import copying
from relax_hpc.training.weights.manifest import Chunk, Manifest
from relax_hpc.training.weights.ring import SlabRing
from relax_hpc.training.weights.slab import MARK, open_slab
from relax_hpc.training.weights.tensors import SafetensorsFile, TensorInfo, TensorPart
from relax_hpc.training.weights.transfers import Transfers
from relax_hpc.training.weights.version_files import TENSORS

RECORD_BYTES = 1 << 30
PATIENCE_S = 600.0


def raw_copy(size: int, device: str, to_device: bool) -> Callable[[], object]:
    """One of ``size`` bytes in one piece."""
    there, room = (
        torch.ones(size, dtype=torch.uint8, device=device),
        allocate_host_memory(size, device == "cuda", "raw copy"),
    )
    return (
        partial(there.copy_, room, non_blocking=True)
        if to_device
        else partial(room.copy_, there, non_blocking=True)
    )


def slab(
    device: str, shape: str, actor: dict[str, Any], count: int, length: int, rounds: int
) -> dict[str, float]:
    from relax_hpc.training.models.batches import collate

    ours = trainer(shape, actor, device)
    model = ours.model
    ring = SlabRing(
        SlabPool(), (), model.tensors(), model.slices(), 2, RECORD_BYTES, device == "cuda"
    )

    def publish() -> None:
        ring.copy()
        ring.settle()

    found = in_turns(
        {"slab": publish, "raw": raw_copy(ring.bytes, device, to_device=False)}, rounds, device
    )
    batches = [collate(rows(count, length, model.spec.vocab), 0, device)]

    def step(beside: bool) -> None:
        if beside:
            ring.copy()
        ours.accumulate(batches)
        ring.await_copy()
        ours.step(1e-6)

    found |= in_turns(
        {"step": partial(step, False), "step beside": partial(step, True)}, rounds, device
    )
    ring.settle()
    ring.close()
    taken = {name: middle(times) for name, times in found.items()}
    return {
        "bytes": float(ring.bytes),
        "of_raw": taken["raw"] / taken["slab"],
        "bytes_per_s": ring.bytes / taken["slab"],
        "step_s": taken["step"],
        "slowed": taken["step beside"] / taken["step"] - 1,
    }


def create_slab(folder: Path, tensors: Mapping[str, TensorInfo]) -> Path:
    """A version of zeros, as a node has it in memory."""
    folder.mkdir(mode=0o700)
    with SafetensorsFile(folder / TENSORS, tensors):
        pass
    ends = itertools.accumulate((info.bytes for info in tensors.values()), initial=0)
    parts = [
        TensorPart(name, 0, 0, info.shape[0], start)
        for (name, info), start in zip(tensors.items(), ends, strict=False)
    ]
    chunk = Chunk("all", sum(info.bytes for info in tensors.values()), "", tuple(parts))
    (folder / MARK).write_bytes(Manifest(folder.name, dict(tensors), (chunk,)).encode())
    return folder


def readers(device: str, shape: str, actor: dict[str, Any], rounds: int) -> dict[str, float]:
    model = policy(shape, settings_of(actor, device), device)
    tensors, transfers = model.tensors(), Transfers(torch.device(device))
    engine = {
        name: torch.zeros(info.shape, dtype=torch.bfloat16, device=device)
        for name, info in tensors.items()
    }
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as name:
        slabs = [create_slab(Path(name) / f"slab-{number}", tensors) for number in range(2)]
        size = (slabs[0] / TENSORS).stat().st_size
        # A version has the memory of the one before the last, so both stay mapped.
        for slab in slabs:
            model.load_tensors(open_slab(slab))
        turns = itertools.cycle(slabs)

        def into_engine() -> None:
            views = open_slab(next(turns))
            with copying(transfers, list(views.values())):
                for name, view in views.items():
                    engine[name].copy_(view)

        acts = {
            "actor_fwd": lambda: model.load_tensors(open_slab(next(turns))),
            "engine": into_engine,
            "unmapped": lambda: model.load_hf(slabs[0]),
        }
        times = in_turns(acts | {"raw": raw_copy(size, device, to_device=True)}, rounds, device)
    taken = {name: middle(seconds) for name, seconds in times.items()}
    of_raw = {f"{name}_of_raw": taken["raw"] / taken[name] for name in acts}
    return {"bytes": float(size), **of_raw, **{f"{name}_s": taken[name] for name in taken}}


def checkpoint(
    device: str, shape: str, actor: dict[str, Any], count: int, length: int
) -> dict[str, float]:
    """As in a run: memory for copies is made at start, then a step is trained, then the first one
    is saved."""
    from relax_hpc.net.rendezvous.channel import RankChannel
    from relax_hpc.training.checkpoint.saver import Saver
    from relax_hpc.training.models.batches import collate

    ours = trainer(shape, actor, device)
    # As a role does at its start: the collector leaves the objects of modules alone.
    gc.freeze()
    saver = Saver(ours, RankChannel(PATIENCE_S), PATIENCE_S)
    started = time.perf_counter()
    saver.prepare()
    saver.ready()
    prepared = time.perf_counter() - started
    ours.accumulate([collate(rows(count, length, ours.model.spec.vocab), 0, device)])
    ours.step(1e-6)
    stalls, written = [], 0.0
    with tempfile.TemporaryDirectory() as folder:
        for number in (1, 2):
            sync(device)
            target = Path(folder) / f"i000001-step-{number:06d}"
            stalls.append(timed(partial(saver.save, target, {"step": number}), device))
            started = time.perf_counter()
            saver.settle()
            written = time.perf_counter() - started
            size = sum(path.stat().st_size for path in target.iterdir())
    times = in_turns({"raw": raw_copy(size, device, to_device=False)}, 5, device)
    raw = middle(times["raw"])
    found = {
        "bytes": float(size),
        "first_s": stalls[0],
        "second_s": stalls[1],
        "raw_s": raw,
        "written_s": written,
    }
    return found | {
        "first_of_raw": stalls[0] / raw,
        "second_of_raw": stalls[1] / raw,
        "prepared_s": prepared,
    }


def measure(device: str, what: str, **about: Any) -> dict[str, float]:
    """``what``: slab, readers or checkpoint."""
    return {"slab": slab, "readers": readers, "checkpoint": checkpoint}[what](device, **about)


if __name__ == "__main__":
    answer(measure)
