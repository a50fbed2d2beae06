"""What a checkpoint costs: the trainer, and the disk.

A real policy of megatron-core with its Adam is saved again and again, by the same code as in a run.
The trainer is kept while its state is copied; a memcpy of as many bytes is done in turns with it.
What goes on beside, until the checkpoint has its name, is measured against a file of as many bytes
that is written and synced to the same file system, with nothing trained meanwhile.

    python tools/bench/checkpoint.py --layers 8 --folder /scratch/me --json
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
from figures import Figure, print_figures

from relax_hpc.algorithms import Grpo
from relax_hpc.config.schema import ModelConfig, OptimizerConfig, ParallelConfig, TinyModelConfig
from relax_hpc.net.rendezvous.channel import RankChannel
from relax_hpc.training import parallel
from relax_hpc.training.checkpoint.saver import Saver
from relax_hpc.training.checkpoint.store import remove_others
from relax_hpc.training.model import PolicyModel
from relax_hpc.training.models.hf_files import read_config
from relax_hpc.training.models.tiny_model import make_tiny_model
from relax_hpc.training.trainer import Trainer

WAIT_S = 600.0
STALL, WRITE = 1.2, 0.6
"""Targets: stall of one memcpy of the state, speed of the write of a raw one's."""
_PIECE_BYTES = 8 << 20


def trainer_of(folder: Path, layers: int, hidden: int) -> Trainer:
    """A policy in float32 with the state of its optimizer, on one rank."""
    shape = TinyModelConfig(
        hidden_size=hidden,
        num_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=hidden // 16,
        intermediate_size=3 * hidden,
    )
    make_tiny_model(folder / "model", shape, 0)
    torch.set_num_threads(1)
    parallel.initialize_alone("cpu", 0, WAIT_S)
    model = PolicyModel(read_config(folder / "model"), ModelConfig(), ParallelConfig())
    model.load_hf(folder / "model")
    return Trainer(model, Grpo(), OptimizerConfig(), 1.0)


def measure(trainer: Trainer, folder: Path, rounds: int) -> list[Figure]:
    """Saves and their yardsticks, in turns; the first round brings memory and is not counted."""
    saver, size = Saver(trainer, RankChannel(WAIT_S), WAIT_S), 0
    times: dict[str, list[float]] = {name: [] for name in ("kept", "copied", "written", "raw")}
    source = room = np.empty(0, np.uint8)
    for turn in range(rounds + 1):
        target = folder / f"i000001-step-{turn:06d}"
        found = {"kept": timed(lambda at=target: saver.save(at, {"step": 0}))}
        found["written"] = timed(saver.settle)
        if not turn:
            size = sum(path.stat().st_size for path in target.iterdir())
            source, room = np.ones(size, np.uint8), np.ones(size, np.uint8)
        found["copied"] = timed(partial(np.copyto, room, source))
        found["raw"] = timed(partial(write_raw, folder / "raw", source))
        remove_others(folder, (), 1)
        times = {name: [*kept, *([found[name]] if turn else [])] for name, kept in times.items()}
    kept, copied, written, raw = map(median, times.values())
    stall, speed = kept / copied, raw / written
    stalls = [one / other for one, other in zip(times["kept"], times["copied"], strict=True)]
    speeds = [one / other for one, other in zip(times["raw"], times["written"], strict=True)]
    writes = [size / one / 1e9 for one in times["written"]]
    return [
        Figure("checkpoint", size / 2**20, "MiB"),
        Figure("trainer kept", kept * 1e3, "ms", rounds=[1e3 * one for one in times["kept"]]),
        Figure(
            "memcpy of as many bytes",
            size / copied / 1e9,
            "GB/s",
            rounds=[size / t / 1e9 for t in times["copied"]],
        ),
        Figure("trainer kept: of one memcpy", stall, "x", f"<= {STALL}", stall <= STALL, stalls),
        Figure("written beside training", size / written / 1e9, "GB/s", rounds=writes),
        Figure("written: of raw write and sync", speed, "x", f">= {WRITE}", speed >= WRITE, speeds),
    ]


def write_raw(path: Path, data: np.ndarray) -> None:
    """Write ``data`` [bytes] to a new file and sync it."""
    with path.open("wb") as file:
        for start in range(0, len(data), _PIECE_BYTES):
            file.write(data[start : start + _PIECE_BYTES])
        file.flush()
        os.fsync(file.fileno())
    path.unlink()


def timed(act: Callable[[], object]) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--folder", type=Path, help="where checkpoints are written (default: the temporary folder)"
    )
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="relax-bench-", dir=args.folder) as name:
        folder = Path(name) / "checkpoints"
        folder.mkdir()
        figures = measure(trainer_of(Path(name), args.layers, args.hidden), folder, args.rounds)
    print_figures(
        figures, {"layers": args.layers, "hidden": args.hidden, "rounds": args.rounds}, args.json
    )


if __name__ == "__main__":
    main()
