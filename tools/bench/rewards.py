"""What rewards cost a rollout process, by where they are computed, and what prompts cost it by
their index.

The reward itself is a comparison of two texts: all else is the way to it. A group has 8 samples.

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
OWN = "def exact(sample):\n    return float(sample.response_text == sample.answer)\n"
LIMIT_S = 60.0
AT_ONCE = 128
_WARM_UP = 20


async def cost(rewards: Rewards, groups: int) -> tuple[float, float]:
    """Microseconds of a group, with many under way: of the clock, and of the role's processor
    time."""
    try:
        for _ in range(_WARM_UP):
            await rewards.score(SAMPLES)
        begun, spent = time.perf_counter(), time.process_time()
        for _ in range(groups // AT_ONCE):
            await asyncio.gather(*(rewards.score(SAMPLES) for _ in range(AT_ONCE)))
        count = groups // AT_ONCE * AT_ONCE
        return 1e6 * (time.perf_counter() - begun) / count, 1e6 * (
            time.process_time() - spent
        ) / count
    finally:
        await rewards.close()


def rewards(folder: Path, groups: int) -> Iterator[Figure]:
    """Of one that is built in, and of one's own in this process and in others."""
    (folder / "own_reward.py").write_text(OWN)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    ways = [
        ("built in", "answer_partial", 0),
        ("own, in a thread", "relax_hpc.rewards.answers:answer_exact", 0),
    ]
    ways += [(f"own, {count} workers", "own_reward:exact", count) for count in (1, 2, 4)]
    for title, name, count in ways:
        wall, cpu = asyncio.run(cost(make_rewards(name, count, LIMIT_S), groups))
        yield Figure(f"{title}: a group", wall, "us")
        yield Figure(f"{title}: CPU of the role", cpu, "us/group")


def prompts(folder: Path, count: int) -> Iterator[Figure]:
    """Of a file with so many prompts of 1 kB: the index made once a run, its opening, and a
    prompt."""
    path, where = folder / "prompts.jsonl", folder / "prompts.index"
    write_tokenizer(folder)
    with path.open("w") as file:
        for number in range(count):
            row = {"id": str(number), "prompt": f"{number}?", "answer": "1", "more": "x" * 900}
            file.write(json.dumps(row) + "\n")
    tokenizer, how = load_tokenizer(folder), PromptRules(64)
    for what, unit in (("index made", "s"), ("index opened", "s")):
        begun = time.process_time()
        made = open_prompts(path, where, tokenizer, how, 0.0)
        yield Figure(f"{count} prompts: {what}, CPU", time.process_time() - begun, unit)
    source, begun = PromptSource(made, Config()), time.process_time()
    tickets = range(min(count, 10_000))
    for ticket in tickets:
        source.prompt(ticket, 0)
    yield Figure(
        f"{count} prompts: one of them, CPU",
        1e6 * (time.process_time() - begun) / len(tickets),
        "us",
    )
    yield Figure(f"{count} prompts: index", where.stat().st_size / 1e6, "MB")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--groups", type=int, default=2560, help="prompt groups that are given rewards"
    )
    parser.add_argument("--prompts", type=int, default=100_000, help="of the file, 1 kB each")
    parser.add_argument("--folder", type=Path, help="where the file of prompts is made")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        parts = rewards(Path(folder), options.groups), prompts(Path(folder), options.prompts)
        print_figures(
            itertools.chain(*parts),
            {"groups": options.groups, "prompts": options.prompts},
            options.json,
        )


if __name__ == "__main__":
    main()
