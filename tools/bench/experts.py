"""Tokens trained a second by two ranks that share the experts of each layer, against the same two
with all of them.

Whole steps of the same rows: forward and backward passes, gradients summed, the optimizer. Both
take turns, a step each.

    python tools/bench/experts.py --json
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from figures import Figure, print_figures

from relax_hpc.algorithms import Sft
from relax_hpc.config.schema import ActorConfig, ModelConfig, ParallelConfig, TinyModelConfig
from relax_hpc.net.rendezvous.process import clean_environment
from relax_hpc.queue.row_schema import Row
from relax_hpc.training import parallel
from relax_hpc.training.model import PolicyModel
from relax_hpc.training.models.batches import PAD, Batch, collate, idle_batch, split_rows
from relax_hpc.training.models.hf_files import read_config
from relax_hpc.training.models.tiny_model import make_tiny_model
from relax_hpc.training.trainer import Trainer

ATTENTION = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
SHAPE = TinyModelConfig(
    hidden_size=512, num_layers=2, num_experts=16, moe_intermediate_size=512, **ATTENTION
)
RANKS = 2
LAYOUTS = {"DP=2": ParallelConfig(data=RANKS), "EP=2": ParallelConfig(data=RANKS, expert=RANKS)}
HIDDEN = ("json", "layout", "rank", "meeting")
WARM_UP = 2
LR = 1e-5
TIMEOUT_S = 300.0


def main() -> None:
    options = parse()
    if options.rank is not None:
        run_rank(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        if not options.model:
            options.model = Path(folder) / "model"
            make_tiny_model(options.model, SHAPE, seed=0)
        about = {name: str(value) for name, value in vars(options).items() if name not in HIDDEN}
        print_figures(figures(options, Path(folder)), about, options.json)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, help="Hugging Face directory; a small one is made without it"
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument(
        "--experts",
        default="sequential",
        choices=("sequential", "grouped"),
        help="as actor.experts",
    )
    parser.add_argument("--rows", type=int, default=32, help="of a step")
    parser.add_argument(
        "--length", type=int, default=192, help="tokens of the longest row, the shortest has half"
    )
    parser.add_argument("--budget", type=int, default=1024, help="tokens of a micro-batch")
    parser.add_argument("--rounds", type=int, default=20, help="steps of each")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--layout", choices=LAYOUTS, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meeting", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def figures(options: argparse.Namespace, folder: Path) -> Iterator[Figure]:
    speeds = measured(options, folder)
    for name, found in speeds.items():
        yield Figure(f"{name}: tokens a second", statistics.median(found), "1/s", rounds=found)
    ratios = [shared / whole for whole, shared in zip(*speeds.values(), strict=True)]
    ratio = statistics.median(ratios)
    yield Figure("EP=2 against DP=2", ratio, "x", ">= 0.9", ratio >= 0.9, ratios)


def measured(options: argparse.Namespace, folder: Path) -> dict[str, list[float]]:
    """Tokens a second of each round by layout. The ranks of one wait while those of the other make
    a step."""
    tokens = sum(len(row["token_ids"]) for row in rows_of(options))
    speeds: dict[str, list[float]] = {name: [] for name in LAYOUTS}
    groups = {
        name: [started(options, name, rank, folder) for rank in range(RANKS)] for name in LAYOUTS
    }
    try:
        for number in range(options.rounds + WARM_UP):
            for name, ranks in groups.items():
                seconds = a_step(ranks)
                if number >= WARM_UP:
                    speeds[name].append(tokens / seconds)
    finally:
        for rank in (rank for ranks in groups.values() for rank in ranks):
            rank.kill()
    return speeds


def started(
    options: argparse.Namespace, layout: str, rank: int, folder: Path
) -> subprocess.Popen[str]:
    words = [sys.executable, "-W", "ignore", __file__, *sys.argv[1:], "--model", str(options.model)]
    words += ["--layout", layout, "--rank", str(rank), "--meeting", str(folder / layout)]
    environment = clean_environment() | {"OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True, env=environment)


def a_step(ranks: list[subprocess.Popen[str]]) -> float:
    """Seconds, of the slowest rank. RuntimeError: one has ended, and has said why."""
    for rank in ranks:
        print("step", file=rank.stdin, flush=True)
    told = [rank.stdout.readline() for rank in ranks if rank.stdout]
    if not all(told):
        raise RuntimeError("a rank has ended; see above")
    return max(map(float, told))


def run_rank(options: argparse.Namespace) -> None:
    """A step for every line of the input, and a line for every step."""
    torch.set_num_threads(1)
    layout, meeting = LAYOUTS[options.layout], dist.FileStore(str(options.meeting), RANKS)
    parallel.initialize(
        layout, options.rank, RANKS, options.rank, meeting, options.device, 0, TIMEOUT_S
    )
    actor = ActorConfig(parallel=layout, experts=options.experts)
    settings = ModelConfig(device=options.device, dtype=options.dtype)
    model = PolicyModel(read_config(options.model), settings, layout, actor)
    model.load_hf(options.model)
    trainer = Trainer(model, Sft(), actor.optimizer, 1.0)
    batches = micro_batches(rows_of(options), options, model)
    for _ in sys.stdin:
        begun = time.perf_counter()
        trainer.accumulate(batches, last=True)
        trainer.step(LR)
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        print(time.perf_counter() - begun, flush=True)


def rows_of(options: argparse.Namespace) -> list[Row]:
    """Of lengths between half of the longest and the longest."""
    return [
        row_of(options.length - number * options.length // (2 * options.rows))
        for number in range(options.rows)
    ]


def row_of(length: int) -> Row:
    """Trained on after its first token."""
    return {
        "token_ids": [3 + n * length % 50 for n in range(length)],
        "loss_mask": [n > 0 for n in range(length)],
    }


def micro_batches(rows: list[Row], options: argparse.Namespace, model: PolicyModel) -> list[Batch]:
    """Of this data rank, as many as of the other."""
    parts = [split_rows(rows[rank::RANKS], options.budget) for rank in range(RANKS)]
    mine = [collate(part, PAD, model.device) for part in parts[model.layout.data_rank]]
    return mine + [
        idle_batch(rows[0], str(model.device)) for _ in range(max(map(len, parts)) - len(mine))
    ]


if __name__ == "__main__":
    main()
