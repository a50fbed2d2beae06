"""The whole algorithm in one process. Read this file first. Three steps of the quickstart:

    python -m relax_hpc.examples.one_process configs/runs/quickstart.yaml runs/one_process 3

A run gives the parts of this loop to roles: `rollout` generates and rewards, `advantages` compares,
`actor_fwd` scores, `actor` trains and publishes. At `max_staleness: 0` its weights are bit-equal to
those of this loop, if a mini-batch fits in one micro-batch (`max_tokens_per_micro_batch`).
"""

import asyncio
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from relax_hpc.base.rundir import RunDir
from relax_hpc.base.versions import Version
from relax_hpc.config import load
from relax_hpc.data.tokenizer import load_tokenizer
from relax_hpc.rewards import get_reward
from relax_hpc.rewards.scoring import scores_soon
from relax_hpc.roles.advantages import advantages_of
from relax_hpc.roles.prepare import prepare
from relax_hpc.rollout.engines import make_engine
from relax_hpc.rollout.engines.engine import Sampling
from relax_hpc.rollout.prompt_source import PromptSource
from relax_hpc.rollout.rows import group_rows, requests_for, reward_input
from relax_hpc.tasks import files, train_reward
from relax_hpc.training import parallel
from relax_hpc.training.model import PolicyModel
from relax_hpc.training.models.batches import PAD, collate, split_rows
from relax_hpc.training.models.hf_files import read_config
from relax_hpc.training.optimizer import learning_rate
from relax_hpc.training.trainer import Trainer


class Loop:
    """State between steps: prompts, reward function, policy, optimizer and engine."""

    def __init__(self, config, run, folder):
        """``run`` has model and data. The engine reads new weights from ``folder``, a new one."""
        self.config, self.folder, actor = config, folder, config.actor
        self.tokenizer = load_tokenizer(run.model)
        temperature, stop_ids = config.rollout.temperature, self.tokenizer.eos_ids
        self.prompts = PromptSource(files.open_train(run, config, self.tokenizer), config)
        self.reward_function = get_reward(train_reward(config))
        self.model = PolicyModel(read_config(run.model), config.model, actor.parallel)
        self.model.load_hf(run.model)
        self.trainer = Trainer.from_settings(self.model, config.algorithm, actor, temperature)
        # The engine has a copy of the policy, in a form that generates fast.
        shutil.copytree(run.model, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
        self.engine = make_engine(config, 0, run.model, Version(1, 0), folder)
        self.sampling = Sampling(temperature, config.rollout.top_p, stop_ids, config.seed)

    async def generate(self, step):
        """Sample several responses to each prompt of the step: [(ticket, prompt, responses)]."""
        config, size, groups = self.config, self.config.prompts_per_step, []
        # A ticket is the number of a prompt within the run; it also seeds the sampling.
        for ticket in range(step * size, (step + 1) * size):
            prompt, count = self.prompts.prompt(ticket, attempt=0), config.samples_per_prompt
            shape = self.sampling, config.rollout.max_new_tokens
            calls = map(self.engine.generate, requests_for(prompt, ticket, count, *shape))
            groups.append((ticket, prompt, asyncio.gather(*calls)))
        return [(ticket, prompt, await responses) for ticket, prompt, responses in groups]

    async def reward(self, groups):
        """Reward each response, and compare it with the others to its prompt: rows to train on."""
        rows = []
        for ticket, prompt, responses in groups:
            samples = [reward_input(prompt, response, self.tokenizer) for response in responses]
            rewards = await scores_soon(self.reward_function, samples)
            rows += group_rows(prompt, ticket, responses, [np.float32(r.total) for r in rewards])
        advantages = advantages_of(rows, self.config.algorithm, self.config.seed)
        return [row | fields for row, fields in zip(rows, advantages, strict=True)]

    def score(self, rows):
        """Add the log-probabilities before the step, around which the loss clips the updates."""
        for part in split_rows(rows, self.config.actor_fwd.max_tokens_per_micro_batch):
            batch, temperature = collate(part, PAD, self.model.device), self.sampling.temperature
            for number, logprobs in enumerate(self.model.forward_logprobs([batch], temperature)):
                part[number]["old_logprobs"] = logprobs

    def train(self, rows, step):
        """Update the policy once for each mini-batch of each pass over the rows."""
        config, size = self.config, len(rows) // self.config.algorithm.mini_batches
        for start in [*range(0, len(rows), size)] * config.algorithm.passes:
            parts = split_rows(rows[start : start + size], config.actor.max_tokens_per_micro_batch)
            self.trainer.accumulate([collate(part, PAD, self.model.device) for part in parts])
            self.trainer.step(learning_rate(config.actor.optimizer, step, config.steps))

    async def publish(self, step):
        """Give the new weights to the engine, which generates the next step with them."""
        save_file(self.model.export_hf(), self.folder / "model.safetensors", {"format": "pt"})
        await self.engine.update_weights(self.folder, Version(1, step + 1))


async def main(config_file, directory, steps):
    """Reinforcement learning of a language model: generate, reward, train, publish, repeat."""
    config, run = load([config_file]), RunDir(Path(directory))
    run.create()
    prepare(run, config)  # Model and data as in a run, with its supervised warm start.
    torch.set_num_threads(config.threads)
    parallel.initialize_alone(config.model.device, config.seed, timeout_s=60.0)
    loop = Loop(config, run, run.weights / "model")
    await loop.engine.start()
    for step in range(steps):
        rows = await loop.reward(await loop.generate(step))
        if "old_logprobs" in config.algorithm.loss_needs():
            loop.score(rows)
        loop.train(rows, step)
        await loop.publish(step)
        print(f"step {step}: reward {np.mean([row['reward'] for row in rows]):.3f}", flush=True)
    await loop.engine.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
