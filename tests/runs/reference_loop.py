"""A synchronous run in one process. A distributed run at max_staleness 0 must equal it bit for bit.

It has no queue, publisher, shard or role, only a loop that defines each step:
`python tests/runs/reference_loop.py CONFIG.yaml --run_dir D [--steps N]`. It prints one JSON line
per step and writes D/weights.safetensors (Hugging Face names) and D/rows.shard. It has one rank and
the engine `transformers`. With `--serve`, each line of standard input is "CONFIG.yaml D". Their
runs are made one after the other, and the line "D" ends the output of each.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from relax_hpc.base.rundir import RunDir
from relax_hpc.base.versions import Version
from relax_hpc.config import Config, load
from relax_hpc.config.schema import ParallelConfig
from relax_hpc.data.prompts import Prompt, PromptRules, parse_rows
from relax_hpc.data.rows import read_rows
from relax_hpc.data.tokenizer import load_tokenizer
from relax_hpc.data.visits import prompt_at
from relax_hpc.queue.row_ids import row_id
from relax_hpc.queue.row_schema import Row
from relax_hpc.queue.storage.shard import pack
from relax_hpc.queue.storage.shard_files import ShardFiles
from relax_hpc.rewards import get_reward
from relax_hpc.roles.prepare import prepare
from relax_hpc.rollout.engines import make_engine
from relax_hpc.rollout.engines.engine import GenerateRequest, Generation, Sampling
from relax_hpc.rollout.filters import get_filter
from relax_hpc.rollout.rows import reward_input
from relax_hpc.tasks import train_reward
from relax_hpc.training import parallel
from relax_hpc.training.model import PolicyModel
from relax_hpc.training.models.batches import PAD, Batch, collate, split_rows
from relax_hpc.training.models.hf_files import read_config
from relax_hpc.training.optimizer import learning_rate
from relax_hpc.training.trainer import Trainer

FIELDS = (
    "prompt_id",
    "ticket",
    "token_ids",
    "prompt_len",
    "loss_mask",
    "rollout_logprobs",
    "reward",
    "finish_reason",
)
FIELDS += ("old_logprobs", "ref_logprobs", "advantages")
Group = list[Row]
"""The samples of one prompt."""


@dataclass(slots=True)
class StepRecord:
    """Rows of a training step in the order of tickets and samples, and metrics of each optimizer
    step."""

    step: int
    rows: list[Row]
    updates: list[dict[str, float]] = field(default_factory=list)

    def line(self) -> dict[str, object]:
        """Line of the output: the mean reward, SHA-256 of all token ids, and means over the
        optimizer steps. Losses are weighted by their tokens."""
        tokens = hashlib.sha256(
            b"".join(row["token_ids"].tobytes() for row in self.rows)
        ).hexdigest()
        reward = sum(float(row["reward"]) for row in self.rows) / len(self.rows)
        sizes = [update["tokens"] for update in self.updates]
        means = {
            name: float(np.average([update[name] for update in self.updates], weights=sizes))
            for name in self.updates[0]
        }
        means["grad_norm"] = float(np.mean([update["grad_norm"] for update in self.updates]))
        return {"step": self.step, "reward": reward, "token_digest": tokens, **means}


@dataclass(slots=True)
class ReferenceResult:
    """Results of a run."""

    steps: list[StepRecord]
    weights: dict[str, Tensor]
    """Final weights on the CPU, by their Hugging Face names."""


def reference_run(config: Config, directory: Path, steps: int | None = None) -> ReferenceResult:
    """Train the first `steps` (default: all) of `config`.

    This process becomes a megatron-core group of one rank. Model, data and the engine's copy of the
    weights are in `directory`.
    """
    if (
        config.max_staleness
        or config.algorithm.shuffle_rewards
        or config.rollout.engine.kind != "transformers"
    ):
        raise ValueError(
            "the reference is on-policy, keeps rewards in order, and samples with engine kind "
            "transformers"
        )
    run = RunDir(directory)
    run.create()
    prepare(run, config)
    torch.set_num_threads(config.threads)
    parallel.initialize_alone(config.model.device, config.seed, 60.0)
    try:
        loop = Loop(config, run)
        records = [loop.step(number) for number in range(config.steps if steps is None else steps)]
        return ReferenceResult(records, loop.trainer.model.export_hf())
    finally:
        parallel.destroy()


class Loop:
    """The state between steps: the policy, the reference, and the engine with a copy of the
    policy's weights."""

    def __init__(self, config: Config, run: RunDir) -> None:
        self.config = config
        self.tokenizer = load_tokenizer(run.model)
        train, data = Path(config.data.train or run.data / "train.jsonl"), config.data
        rows = parse_rows(
            read_rows(train), self.tokenizer, PromptRules.from_config(data, self.tokenizer)
        )
        self.prompts = [row for row in rows if isinstance(row, Prompt)]
        self.reward = get_reward(train_reward(config))
        initial = Path(config.model.reference_path or run.model)
        self.reference = policy(config, initial)
        self.trainer = Trainer(
            policy(config, run.model),
            config.algorithm,
            config.actor.optimizer,
            config.rollout.temperature,
        )
        self.engine = make_engine(config, 0, run.model, Version(0, 0), run.root)
        asyncio.run(self.engine.start())
        self.copies = run.weights

    def step(self, number: int) -> StepRecord:
        """Generate rows with weights `number`, score them, and train weights `number` + 1."""
        size = self.config.prompts_per_step
        groups = [self.generate(ticket) for ticket in range(number * size, (number + 1) * size)]
        self.judge(groups)
        self.score(groups)
        record = StepRecord(number, rows_of(groups))
        actor, algorithm = self.config.actor, self.config.algorithm
        for mini_batch in algorithm.passes * split(groups, algorithm.mini_batches):
            for micro_batch in micro_batches(
                mini_batch, actor.max_tokens_per_micro_batch, actor.balance_window
            ):
                self.trainer.accumulate([tensors(micro_batch, self.config)])
            lr = learning_rate(actor.optimizer, number, self.config.steps)
            record.updates.append(self.trainer.step(lr))
        save_file(
            self.trainer.model.export_hf(),
            self.copies / "model.safetensors",
            metadata={"format": "pt"},
        )
        asyncio.run(self.engine.update_weights(self.copies, Version(1, number + 1)))
        return record

    def generate(self, ticket: int) -> Group:
        """The samples of the first attempt at a ticket that passes the filter."""
        passes = get_filter(self.config.rollout.filter)
        for number in itertools.count():
            group = self.attempt(ticket, number)
            if passes([row["reward"] for row in group]):
                return group
        raise AssertionError

    def attempt(self, ticket: int, number: int) -> Group:
        """The samples of an attempt, one after the other, with rewards."""
        config, shape = self.config, self.config.rollout
        prompt = self.prompts[
            prompt_at(ticket, number, len(self.prompts), config.seed, config.data.shuffle)
        ]
        stops = tuple(self.tokenizer.eos_ids)
        sampling = Sampling(shape.temperature, shape.top_p, stops, config.seed)
        group = []
        for k in range(config.samples_per_prompt):
            key = f"{ticket}/{prompt.prompt_id}"
            request = GenerateRequest(prompt.token_ids, key, k, sampling, shape.max_new_tokens)
            answer = asyncio.run(self.engine.generate(request))
            reward = self.reward(reward_input(prompt, answer, self.tokenizer))
            group.append(row_of(prompt, ticket, k, answer, reward))
        return group

    def judge(self, groups: Sequence[Group]) -> None:
        """Set the advantages of a whole step. Those that depend on one prompt group only are the same
        in a whole step."""
        episodes = [[[row] for row in group] for group in groups]
        advantages = self.config.algorithm.token_advantages(episodes)
        for row, values in zip(rows_of(groups), advantages, strict=True):
            row["advantages"] = values

    def score(self, groups: Sequence[Group]) -> None:
        """Log-probabilities by the policy before the step and by the reference."""
        scorers = (
            ("old_logprobs", self.trainer.model, "actor_fwd"),
            ("ref_logprobs", self.reference, "reference"),
        )
        for name, model, role in scorers:
            for micro_batch in micro_batches(
                groups, getattr(self.config, role).max_tokens_per_micro_batch
            ):
                batch = tensors(micro_batch, self.config)
                scores = model.forward_logprobs([batch], self.config.rollout.temperature)
                for row, values in zip(micro_batch, scores, strict=True):
                    row[name] = values


def policy(config: Config, directory: Path) -> PolicyModel:
    model = PolicyModel(read_config(directory), config.model, ParallelConfig())
    model.load_hf(directory)
    return model


def row_of(prompt: Prompt, ticket: int, k: int, answer: Generation, reward: float) -> Row:
    """A sample's row; the reward counts as the float32 that rows carry."""
    before = np.zeros(len(prompt.token_ids))
    return {
        "row_id": row_id(ticket, k),
        "prompt_id": prompt.prompt_id,
        "ticket": ticket,
        "token_ids": np.array([*prompt.token_ids, *answer.token_ids], np.int32),
        "prompt_len": len(before),
        "loss_mask": np.array([*before, *(1 for _ in answer.token_ids)], np.uint8),
        "rollout_logprobs": np.array([*before, *answer.logprobs], np.float32),
        "reward": np.float32(reward),
        "finish_reason": answer.finish_reason,
    }


def rows_of(groups: Sequence[Group]) -> list[Row]:
    return list(itertools.chain(*groups))


def split(groups: Sequence[Group], count: int) -> list[Sequence[Group]]:
    """`count` mini-batches with equal numbers of consecutive groups."""
    size = len(groups) // count
    return [groups[start : start + size] for start in range(0, len(groups), size)]


def micro_batches(groups: Sequence[Group], budget: int, window: int = 1) -> Iterator[list[Row]]:
    """Rows that go through the model together. Each window of whole groups is divided into few
    micro-batches of about equal size."""
    for window_groups in windows(groups, window * budget):
        yield from split_rows(rows_of(window_groups), budget)


def windows(groups: Sequence[Group], budget: int) -> Iterator[list[Group]]:
    """Consecutive groups whose rows have at most `budget` tokens together. A larger group is one
    window."""
    start = 0
    for end in range(1, len(groups) + 1):
        rows = rows_of(groups[start : end + 1])
        tokens = sum(len(row["token_ids"]) for row in rows)
        if end == len(groups) or tokens > budget:
            yield list(groups[start:end])
            start = end


def tensors(rows: Sequence[Row], config: Config) -> Batch:
    return collate(rows, PAD, config.model.device)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="reference_loop.py", description=__doc__)
    parser.add_argument("config", type=Path, nargs="?")
    parser.add_argument("--run_dir", type=Path)
    parser.add_argument(
        "--steps",
        type=int,
        help="train only the first steps, with the learning rates of the config",
    )
    parser.add_argument("--serve", action="store_true", help="make the runs in standard input")
    args = parser.parse_args(argv)
    if args.serve:
        for line in sys.stdin:
            config, directory = map(Path, line.split())
            write_results(reference_run(load([config]), directory), directory)
            print(directory, flush=True)
    elif args.config and args.run_dir:
        result = reference_run(load([args.config]), args.run_dir, args.steps)
        write_results(result, args.run_dir)
    else:
        parser.error("a configuration and --run_dir, or --serve")
    return 0


def write_results(result: ReferenceResult, directory: Path) -> None:
    """Print the steps, and write weights and rows to `directory`."""
    for record in result.steps:
        print(json.dumps(record.line()))
    save_file(result.weights, directory / "weights.safetensors", metadata={"format": "pt"})
    rows = rows_of([record.rows for record in result.steps])
    ShardFiles(directory).write("rows.shard", pack(rows, FIELDS, {"by": "reference_loop"}))


if __name__ == "__main__":
    sys.exit(main())
