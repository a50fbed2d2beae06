"""Cost of rewards for a rollout process, by the process that computes them, and cost of prompts
that are read by an index.

The reward compares two texts, so almost all of the cost is that of the call. A group has 8 samples.

    python tools/bench/rewards.py --prompts 1000000 --json
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from figures import Figure, print_figures

from relax_hpc.config.schema import Config
from relax_hpc.data.prompt_file import open_prompts
from relax_hpc.data.prompts import PromptRules
from relax_hpc.data.tokenizer import load_tokenizer
from relax_hpc.rewards import RewardInput
from relax_hpc.rewards.placement import Rewards, make_rewards
from relax_hpc.rollout.prompt_source import PromptSource
from relax_hpc.training.models.tiny_tokenizer import write_tokenizer

SAMPLES = [RewardInput("4312?" * 10, "1234", "1243 " * 20, "stop", {"level": 3})] * 8
REWARD = "def exact(sample):\n    return float(sample.response_text == sample.answer)\n"
LIMIT_S = 60.0
CONCURRENCY = 128
_WARM_UP = 20


async def cost(rewards: Rewards, groups: int) -> tuple[float, float]:
    """Microseconds per group with many groups in progress: elapsed time, and CPU of the role."""
    try:
        for _ in range(_WARM_UP):
            await rewards.score(SAMPLES)
        started, cpu_started = time.perf_counter(), time.process_time()
        for _ in range(groups // CONCURRENCY):
            await asyncio.gather(*(rewards.score(SAMPLES) for _ in range(CONCURRENCY)))
        seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
        count = groups // CONCURRENCY * CONCURRENCY
        return 1e6 * seconds / count, 1e6 * cpu_s / count
    finally:
        await rewards.close()


def rewards(folder: Path, groups: int) -> Iterator[Figure]:
    """Cost of a built-in reward, and of a user's reward in this process and in workers."""
    (folder / "own_reward.py").write_text(REWARD)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    placements = [
        ("built in", "answer_partial", 0),
        ("own, in a thread", "relax_hpc.rewards.answers:answer_exact", 0),
    ]
    placements += [(f"own, {count} workers", "own_reward:exact", count) for count in (1, 2, 4)]
    for title, name, count in placements:
        wall, cpu = asyncio.run(cost(make_rewards(name, count, LIMIT_S), groups))
        yield Figure(f"{title}: a group", wall, "us")
        yield Figure(f"{title}: CPU of the role", cpu, "us/group")


def prompts(folder: Path, count: int) -> Iterator[Figure]:
    """Cost of a file with ``count`` prompts of 1 kB: of its index, which is made once per run, of
    opening the index, and of a prompt."""
    path, index = folder / "prompts.jsonl", folder / "prompts.index"
    write_tokenizer(folder)
    with path.open("w") as file:
        for number in range(count):
            row = {"id": str(number), "prompt": f"{number}?", "answer": "1", "more": "x" * 900}
            file.write(json.dumps(row) + "\n")
    tokenizer, rules = load_tokenizer(folder), PromptRules(64)
    for action in ("index made", "index opened"):
        started = time.process_time()
        opened = open_prompts(path, index, tokenizer, rules, 0.0)
        yield Figure(f"{count} prompts: {action}, CPU", time.process_time() - started, "s")
    source = PromptSource(opened, Config())
    tickets = range(min(count, 10_000))
    started = time.process_time()
    for ticket in tickets:
        source.prompt(ticket, 0)
    prompt_us = 1e6 * (time.process_time() - started) / len(tickets)
    yield Figure(f"{count} prompts: one of them, CPU", prompt_us, "us")
    yield Figure(f"{count} prompts: index", index.stat().st_size / 1e6, "MB")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", type=int, default=2560, help="prompt groups with rewards")
    parser.add_argument(
        "--prompts", type=int, default=100_000, help="prompts of the file, 1 kB each"
    )
    parser.add_argument("--folder", type=Path, help="folder for the file of prompts")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        figures = itertools.chain(
            rewards(Path(folder), options.groups), prompts(Path(folder), options.prompts)
        )
        settings = {"groups": options.groups, "prompts": options.prompts}
        print_figures(figures, settings, options.json)


if __name__ == "__main__":
    main()
