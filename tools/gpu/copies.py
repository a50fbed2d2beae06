"""Copies between the device and the host. Each one alternates with a raw copy of as many bytes in
pinned memory, in one piece.

`slab`: the copy of a publish, and whether a training step takes longer while it runs. `readers`:
the copy of a version in a node's memory to the parameters of actor_fwd, or to an engine by the
loader in its process; also to actor_fwd from a file that was not mapped before. `checkpoint`: how
long the first checkpoint blocks the trainer.
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
from policies import Section, new_batch, policy, settings_of, trainer

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
"""Deadline of collectives and of a checkpoint."""


def raw_copy(size: int, device: str, to_device: bool) -> Callable[[], object]:
    """Function that copies ``size`` bytes in one piece."""
    device_memory = torch.ones(size, dtype=torch.uint8, device=device)
    host_memory = allocate_host_memory(size, device == "cuda", "raw copy")
    if to_device:
        return partial(device_memory.copy_, host_memory, non_blocking=True)
    return partial(host_memory.copy_, device_memory, non_blocking=True)


def slab(
    device: str, shape: str, actor: Section, count: int, length: int, rounds: int
) -> dict[str, float]:
    """Figures of a publish. The step trains ``count`` rows of ``length`` tokens."""
    ours = trainer(shape, actor, device)
    model = ours.model
    ring = SlabRing(
        SlabPool(), (), model.tensors(), model.slices(), 2, RECORD_BYTES, device == "cuda"
    )

    def publish() -> None:
        ring.copy()
        ring.settle()

    batches = new_batch(ours, count, length)

    def step(during_copy: bool) -> None:
        if during_copy:
            ring.copy()
        ours.accumulate(batches)
        ring.await_copy()
        ours.step(1e-6)

    raw = raw_copy(ring.bytes, device, to_device=False)
    times = in_turns({"slab": publish, "raw": raw}, rounds, device)
    steps = {"step": partial(step, False), "step during copy": partial(step, True)}
    times |= in_turns(steps, rounds, device)
    ring.settle()
    ring.close()
    seconds = {name: middle(values) for name, values in times.items()}
    return {
        "bytes": float(ring.bytes),
        "of_raw": seconds["raw"] / seconds["slab"],
        "bytes_per_s": ring.bytes / seconds["slab"],
        "step_s": seconds["step"],
        "slowed": seconds["step during copy"] / seconds["step"] - 1,
    }


def create_slab(folder: Path, tensors: Mapping[str, TensorInfo]) -> Path:
    """Write a version of zeros to ``folder``, in the format of a node's memory."""
    folder.mkdir(mode=0o700)
    with SafetensorsFile(folder / TENSORS, tensors):
        pass
    pieces = []
    size = 0
    for name, info in tensors.items():
        pieces.append(TensorPart(name, 0, 0, info.shape[0], size))
        size += info.bytes
    chunk = Chunk("all", size, "", tuple(pieces))
    (folder / MARK).write_bytes(Manifest(folder.name, dict(tensors), (chunk,)).encode())
    return folder


def readers(device: str, shape: str, actor: Section, rounds: int) -> dict[str, float]:
    """Figures of the readers of a version."""
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
        # A new version reuses the memory of the version before the last, so both stay mapped.
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
    seconds = {name: middle(values) for name, values in times.items()}
    of_raw = {f"{name}_of_raw": seconds["raw"] / seconds[name] for name in acts}
    return {"bytes": float(size), **of_raw, **{f"{name}_s": seconds[name] for name in seconds}}


def checkpoint(
    device: str, shape: str, actor: Section, count: int, length: int
) -> dict[str, float]:
    """Figures of the first two checkpoints.

    As in a run, memory for the copies is allocated at the start. Then a step is trained, and then
    the first checkpoint is saved.
    """
    from relax_hpc.net.rendezvous.channel import RankChannel
    from relax_hpc.training.checkpoint.saver import Saver

    ours = trainer(shape, actor, device)
    # As a role does at its start, so that the garbage collector ignores the objects of modules.
    gc.freeze()
    saver = Saver(ours, RankChannel(PATIENCE_S), PATIENCE_S)
    started = time.perf_counter()
    saver.prepare()
    saver.ready()
    prepared_s = time.perf_counter() - started
    ours.accumulate(new_batch(ours, count, length))
    ours.step(1e-6)
    blocked_s, written_s, size = [], 0.0, 0
    with tempfile.TemporaryDirectory() as folder:
        for number in (1, 2):
            sync(device)
            target = Path(folder) / f"i000001-step-{number:06d}"
            blocked_s.append(timed(partial(saver.save, target, {"step": number}), device))
            started = time.perf_counter()
            saver.settle()
            written_s = time.perf_counter() - started
            size = sum(path.stat().st_size for path in target.iterdir())
    times = in_turns({"raw": raw_copy(size, device, to_device=False)}, 5, device)
    raw_s = middle(times["raw"])
    return {
        "bytes": float(size),
        "first_s": blocked_s[0],
        "second_s": blocked_s[1],
        "raw_s": raw_s,
        "written_s": written_s,
        "first_of_raw": blocked_s[0] / raw_s,
        "second_of_raw": blocked_s[1] / raw_s,
        "prepared_s": prepared_s,
    }


def measure(device: str, what: str, **arguments: Any) -> dict[str, float]:
    """``what``: slab, readers or checkpoint."""
    programs = {"slab": slab, "readers": readers, "checkpoint": checkpoint}
    return programs[what](device, **arguments)


if __name__ == "__main__":
    answer(measure)
