"""Processes that train, save and die at a named point of it; `python -m tests.training.killed_saves MODEL
FOLDER [POINT ...]`.

For each point a child of this process trains to step 3, saving after step 2 and dying there;
another one goes on from the newest checkpoint that verifies. Prints a line of JSON for each: what
the weights at step 3 are, and the step from which they were reached. Without a point nothing dies.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from relax_hpc.base import parallel_copies
from relax_hpc.net.rendezvous.channel import RankChannel
from relax_hpc.training import parallel
from relax_hpc.training.checkpoint import saver, store, strategy
from tests.helpers.training_helpers import LR, batch, rows, trainer

LAST, SAVED = 3, (1, 2)
POINTS = {
    "before the directory": (saver, "_create", False),
    "after the directory": (saver, "_create", True),
    "before the shards": (strategy.torch_checkpoint, "save", False),
    "after the shards": (strategy.torch_checkpoint, "save", True),
    "before the random states": (saver, "save_random_state", False),
    "before the checksums": (saver, "checksums_of", False),
    "after the checksums": (saver, "checksums_of", True),
    "before the marker": (saver, "write_json", False),
    "before the rename": (saver, "marker_digest", True),
    "before the journal": (saver, "_finish", True),
    "before it is copied": (saver, "sharded_state", True),
    "while it is copied": (parallel_copies, "_numbers", True),
}
"""Name -> where, which function, whether when it has returned."""


def die_at(point: str) -> None:
    """The next save ends this process there, with SIGKILL."""
    where, name, after = POINTS[point]
    act: Callable[..., Any] = getattr(where, name)

    def dies(*args: Any, **kwargs: Any) -> None:
        if after:
            act(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(where, name, dies)


def train(model: Path, folder: Path, point: str) -> dict[str, Any]:
    """From the newest whole checkpoint to the last step; dying while step 2 is saved, if a
    ``point`` is named."""
    torch.set_num_threads(1)
    parallel.initialize_alone("cpu", 0, 60.0)
    ours, channel = trainer(model), RankChannel(60.0)
    keeper, journal = saver.Saver(ours, RankChannel(60.0), 60.0), folder / "journal"
    begun = first = resume(folder, ours, channel)
    for step in range(first, LAST):
        ours.accumulate([batch(rows(4, seed=step))])
        ours.step(LR)
        if step + 1 in SAVED:
            name = f"i{os.getpid():06d}-step-{step + 1:06d}"
            if point and step + 1 == SAVED[-1]:
                keeper.settle()
                die_at(point)
            keeper.save(
                folder / name,
                {"step": step + 1},
                lambda digest, name=name: add(journal, name, digest),
            )
    keeper.settle()
    whole = sorted(ours.model.export_hf().items())
    return {
        "from": begun,
        "weights": {name: sha256(tensor.numpy()).hexdigest() for name, tensor in whole},
    }


def add(journal: Path, name: str, digest: str) -> None:
    with journal.open("a") as file:
        file.write(f"{name} {digest}\n")


def resume(folder: Path, ours: Any, channel: RankChannel) -> int:
    """Load the newest checkpoint that was journaled; its step."""
    journal = folder / "journal"
    for line in reversed(journal.read_text().splitlines() if journal.exists() else []):
        name, digest = line.split()
        return int(store.load(folder / name, ours, channel, digest)["step"])
    return 0


def in_child(act: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What ``act`` returns in a process of its own; {"signal"} if that was killed."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.write(write, json.dumps(act()).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        found = file.read()
    _, status = os.waitpid(child, 0)
    return {"signal": os.WTERMSIG(status)} if os.WIFSIGNALED(status) else json.loads(found)


def main() -> None:
    model, folder, *points = sys.argv[1:]
    for number, point in enumerate(points or [""]):
        own = Path(folder) / str(number)
        own.mkdir(parents=True)
        died = in_child(partial(train, Path(model), own, point))
        left = len(list(own.glob(".*.partial")))
        again = in_child(partial(train, Path(model), own, "")) if point else died
        print(
            json.dumps({"point": point, "died": died.get("signal"), "partial": left, **again}),
            flush=True,
        )


if __name__ == "__main__":
    main()
