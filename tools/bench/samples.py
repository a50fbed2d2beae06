"""What keeping samples costs a rollout rank: its time, bytes on disk and memory.

python tools/bench/samples.py --tokens 2048 --json
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import numpy as np
from figures import Figure, print_figures

from relax_hpc.config.schema import Config
from relax_hpc.data.tokenizer import load_tokenizer
from relax_hpc.queue.row_ids import row_id
from relax_hpc.queue.row_schema import Row
from relax_hpc.rollout.sample_keeper import SampleKeeper
from relax_hpc.rollout.sample_log import SampleLog, read_samples
from relax_hpc.training.models.tiny_tokenizer import write_tokenizer


def rows_of(config: Config, step: int, tokens: int, vocabulary: int) -> list[Row]:
    """The rows of a step, of random tokens: nothing is harder to compress."""
    random = np.random.default_rng(step)
    size, samples = config.prompts_per_step, config.samples_per_prompt
    return [
        {
            "row_id": row_id(ticket, k),
            "prompt_id": str(ticket),
            "ticket": ticket,
            "token_ids": random.integers(0, vocabulary, tokens, dtype=np.int32),
            "prompt_len": tokens // 4,
            "token_versions": np.full(tokens, 1, np.int32),
            "loss_mask": np.ones(tokens, np.uint8),
            "spans": [],
            "reward": 0.5,
            "finish_reason": "stop",
        }
        for ticket in range(step * size, (step + 1) * size)
        for k in range(samples)
    ]


def measure(folder: Path, steps: int, tokens: int) -> Iterator[Figure]:
    """Of ``steps`` steps whose rows have so many tokens, a quarter of them their prompt's."""
    config = Config(steps=steps, prompts_per_step=128)
    write_tokenizer(folder)
    tokenizer = load_tokenizer(folder)
    path = folder / "samples" / "rollout-inc-000001-rank-0.jsonl.gz"
    keeper = SampleKeeper(SampleLog(path, config.samples, steps), config, tokenizer)
    spent = []
    for step in range(steps):
        rows = rows_of(config, step, tokens, tokenizer.vocab_size)
        started = time.thread_time()
        keeper.put(rows, "shard")
        spent.append(1e3 * (time.thread_time() - started))
    keeper.log.close()
    kept = sum(1 for _ in read_samples(path.parent))
    yield Figure("CPU time a step, in a thread", median(spent), "ms", rounds=spent)
    tracemalloc.start()
    SampleKeeper(SampleLog(folder / "again", config.samples, steps), config, tokenizer).put(
        rows, "shard"
    )
    yield Figure("memory beyond the rows, at most", tracemalloc.get_traced_memory()[1] / 1e6, "MB")
    tracemalloc.stop()
    yield Figure("bytes on disk a step", path.stat().st_size / steps / 1e3, "kB")
    yield Figure(
        "episodes kept a step", kept / steps, "", f"{config.samples.per_step}", kept == 16 * steps
    )
    started = time.perf_counter()
    sum(1 for _ in read_samples(path.parent))
    yield Figure(
        "reading them all again, an episode", 1e3 * (time.perf_counter() - started) / kept, "ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=2048, help="of each row")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print_figures(measure(Path(folder), args.steps, args.tokens), vars(args), args.json)


if __name__ == "__main__":
    sys.exit(main())
