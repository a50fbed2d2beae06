"""Tokens trained a second, rows of lognormal lengths packed against padded to the longest of their
micro-batch.

Both take the same way through the same model: what is padded are rows filled up with tokens that
are not trained on, those of similar length together, as many as fit. Rounds of both alternate.

    python tools/bench/packs.py --budget 4096 --json
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from figures import Figure, print_figures

from relax_hpc.algorithms import Sft
from relax_hpc.config.schema import ModelConfig, OptimizerConfig, ParallelConfig, TinyModelConfig
from relax_hpc.queue.row_schema import Row
from relax_hpc.training import parallel
from relax_hpc.training.model import PolicyModel
from relax_hpc.training.models.batches import PAD, Batch, collate, split_rows
from relax_hpc.training.models.hf_files import read_config
from relax_hpc.training.models.tiny_model import make_tiny_model
from relax_hpc.training.trainer import Trainer

SHAPE = TinyModelConfig(
    hidden_size=128, num_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32
)
START_TIMEOUT_S = 60.0


def lognormal(options: argparse.Namespace) -> list[Row]:
    """Rows that are trained on after their first token."""
    rng = random.Random(0)
    sizes = [
        int(options.median * rng.lognormvariate(0.0, options.sigma)) for _ in range(options.rows)
    ]
    return [row_of(min(max(size, 8), options.longest)) for size in sizes]


def row_of(size: int, width: int = 0) -> Row:
    width = width or size
    return {
        "token_ids": [3 + n % 50 for n in range(width)],
        "loss_mask": [0 < n < size for n in range(width)],
    }


def padded(rows: list[Row], budget: int) -> Iterator[list[Row]]:
    """Micro-batches whose rows, each as long as the longest, fit ``budget``."""
    sizes = sorted((len(row["token_ids"]) for row in rows), reverse=True)
    while sizes:
        count = max(1, budget // sizes[0])
        yield [row_of(size, sizes[0]) for size in sizes[:count]]
        del sizes[:count]


def seconds(trainer: Trainer, batches: list[Batch]) -> float:
    """Of a forward and backward pass over ``batches``."""
    begun = time.perf_counter()
    trainer.accumulate(batches)
    if trainer.model.device.type == "cuda":
        torch.cuda.synchronize()
    trainer.discard()
    return time.perf_counter() - begun


def compare(trainer: Trainer, options: argparse.Namespace) -> Iterator[Figure]:
    rows, device = lognormal(options), trainer.model.device
    parts = {
        "padded": list(padded(rows, options.budget)),
        "packed": split_rows(rows, options.budget),
    }
    batches = {
        way: [collate(part, PAD, device) for part in of_way] for way, of_way in parts.items()
    }
    real, taken = sum(len(row["token_ids"]) for row in rows), {way: list[float]() for way in parts}
    for number in range(options.rounds + 1):
        for way, of_way in batches.items():
            spent = seconds(trainer, of_way)
            if number:
                taken[way].append(spent)
    for way, of_way in batches.items():
        tokens = sum(batch.tokens.shape[1] for batch in of_way)
        speeds = [real / spent for spent in taken[way]]
        yield Figure(f"{way}: micro-batches", len(of_way), "")
        yield Figure(f"{way}: of their tokens padding", 1 - real / tokens, "share")
        yield Figure(
            f"{way}: rows' tokens a second", statistics.median(speeds), "1/s", rounds=speeds
        )
    ratios = [slow / fast for slow, fast in zip(taken["padded"], taken["packed"], strict=True)]
    least = statistics.median(ratios)
    yield Figure("packed against padded", least, "x", ">= 1.2", least >= 1.2, ratios)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, help="Hugging Face directory; a small one is made without it"
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--rows", type=int, default=48)
    parser.add_argument("--median", type=int, default=90, help="tokens of a row")
    parser.add_argument("--sigma", type=float, default=1.0)
    parser.add_argument("--longest", type=int, default=1024)
    parser.add_argument("--budget", type=int, default=2048, help="tokens of a micro-batch")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args()
    parallel.initialize_alone(options.device, 0, START_TIMEOUT_S)
    with tempfile.TemporaryDirectory() as folder:
        path = options.model or Path(folder) / "model"
        if not options.model:
            make_tiny_model(path, SHAPE, seed=0)
        model = PolicyModel(
            read_config(path),
            ModelConfig(device=options.device, dtype=options.dtype),
            ParallelConfig(),
        )
        model.load_hf(path)
        trainer = Trainer(model, Sft(), OptimizerConfig(), 1.0)
        about = {name: str(value) for name, value in vars(options).items() if name != "json"}
        print_figures(compare(trainer, options), about, options.json)
    parallel.destroy()


if __name__ == "__main__":
    main()
