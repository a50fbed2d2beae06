"""The synchronous run in one process: what a distributed run at max_staleness 0 must equal bit for
bit.

There is no queue, publisher, shard or role here, only a loop over the steps that says what each of
them is: `python tests/runs/reference_loop.py CONFIG.yaml --run_dir D [--steps N]`. It prints one JSON
line a step and leaves D/weights.safetensors (Hugging Face names) and D/rows.h5. One rank; the
engine is `transformers`. With `--serve` lines of standard input, "CONFIG.yaml D", name the runs,
which are made one after the other; "D" ends what is printed of each.
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
    """One training step: its rows in ticket and sample order, and the metrics of each optimizer
    step."""

    step: int
    rows: list[Row]
    updates: list[dict[str, float]] = field(default_factory=list)

    def line(self) -> dict[str, object]:
        """What is printed: the mean reward, SHA-256 of all token ids, and means over the optimizer
        steps, of losses by their tokens."""
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
    """The whole run."""

    steps: list[StepRecord]
    weights: dict[str, Tensor]
    """Final ones, on the CPU, by Hugging Face name."""


def reference_run(config: Config, directory: Path, steps: int | None = None) -> ReferenceResult:
    """Train `config` for its first `steps` (all) in this process, which becomes a megatron-core
    group of one rank.

    Model, data and the engine's copy of the weights go to `directory`.
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
        """Weights `number` generate, are scored and become weights `number` + 1."""
        size = self.config.prompts_per_step
        groups = [self.generate(ticket) for ticket in range(number * size, (number + 1) * size)]
        self.judge(groups)
        self.score(groups)
        record, actor = (
            StepRecord(number, [row for group in groups for row in group]),
            self.config.actor,
        )
        for mini_batch in self.config.algorithm.passes * split(
            groups, self.config.algorithm.mini_batches
        ):
            for micro_batch in micro_batches(
                mini_batch, actor.max_tokens_per_micro_batch, actor.balance_window
            ):
                self.trainer.accumulate([tensors(micro_batch, self.config)])
            lr = learning_rate(self.config.actor.optimizer, number, self.config.steps)
            record.updates.append(self.trainer.step(lr))
        save_file(
            self.trainer.model.export_hf(),
            self.copies / "model.safetensors",
            metadata={"format": "pt"},
        )
        asyncio.run(self.engine.update_weights(self.copies, Version(1, number + 1)))
        return record

    def generate(self, ticket: int) -> Group:
        """The samples of the first attempt at a ticket that the filter lets pass."""
        keeps = get_filter(self.config.rollout.filter)
        groups = (self.attempt(ticket, number) for number in itertools.count())
        return next(group for group in groups if keeps([row["reward"] for row in group]))

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
        """Advantages, of whole steps: what follows from a prompt group alone is the same in
        them."""
        made = iter(
            self.config.algorithm.token_advantages([[[row] for row in group] for group in groups])
        )
        for row in itertools.chain(*groups):
            row["advantages"] = next(made)

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


def split(groups: Sequence[Group], parts: int) -> list[Sequence[Group]]:
    """`parts` mini-batches of as many consecutive groups each."""
    size = len(groups) // parts
    return [groups[start : start + size] for start in range(0, len(groups), size)]


def micro_batches(groups: Sequence[Group], budget: int, window: int = 1) -> Iterator[list[Row]]:
    """Rows that go through the model together, of windows of whole groups, each in few parts of
    about equal size."""
    for window_groups in windows(groups, window * budget):
        yield from split_rows([row for group in window_groups for row in group], budget)


def windows(groups: Sequence[Group], budget: int) -> Iterator[list[Group]]:
    """Runs of consecutive groups whose rows have at most `budget` tokens together; a larger group
    stands alone."""
    start = 0
    for end in range(1, len(groups) + 1):
        following = sum(len(row["token_ids"]) for group in groups[start : end + 1] for row in group)
        if end == len(groups) or following > budget:
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
        "--steps", type=int, help="only the first ones; the learning rate still follows the config"
    )
    parser.add_argument("--serve", action="store_true", help="runs that standard input names")
    args = parser.parse_args(argv)
    if args.serve:
        for line in sys.stdin:
            config, directory = map(Path, line.split())
            leave(reference_run(load([config]), directory), directory)
            print(directory, flush=True)
    elif args.config and args.run_dir:
        leave(reference_run(load([args.config]), args.run_dir, args.steps), args.run_dir)
    else:
        parser.error("a configuration and --run_dir, or --serve")
    return 0


def leave(result: ReferenceResult, directory: Path) -> None:
    """Print the steps, write weights and rows."""
    for record in result.steps:
        print(json.dumps(record.line()))
    save_file(result.weights, directory / "weights.safetensors", metadata={"format": "pt"})
    rows = [row for record in result.steps for row in record.rows]
    ShardFiles(directory).write("rows.shard", pack(rows, FIELDS, {"by": "reference_loop"}))


if __name__ == "__main__":
    sys.exit(main())
