"""The plain loop that a run is measured against: one trainer process, one engine, no queue and no
other role.

The same engine, model, trainer, prompts and settings as the run whose directory is given; a step
generates, rewards, trains all passes, and hands the weights to the engine through a directory in
memory. Its data and model must be there:

    python tools/bench/plain_loop.py --run_dir runs/quickstart --steps 40 --forward alternate

Prints one JSON line a step, then the medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import save_file

from relax_hpc.base.errors import RelaxError
from relax_hpc.base.rundir import RunDir
from relax_hpc.base.versions import Version
from relax_hpc.config import Config, load_resolved
from relax_hpc.config.schema import ParallelConfig
from relax_hpc.data.tokenizer import load_tokenizer
from relax_hpc.net.rendezvous.process import die_with_parent
from relax_hpc.queue.row_schema import Row
from relax_hpc.rewards import RewardError, get_reward
from relax_hpc.rewards.scoring import scores
from relax_hpc.roles.advantages import advantages_of
from relax_hpc.rollout.engines import make_engine
from relax_hpc.rollout.engines.engine import Engine, Sampling
from relax_hpc.rollout.samples import PromptSource, group_rows, requests_for, reward_input
from relax_hpc.tasks import train_reward
from relax_hpc.tasks.files import open_train
from relax_hpc.training import parallel
from relax_hpc.training.batches import Batch, collate, split_rows
from relax_hpc.training.model import PolicyModel
from relax_hpc.training.models.hf_files import read_config
from relax_hpc.training.optimizer import learning_rate
from relax_hpc.training.trainer import Trainer

WARM_UP_STEPS = 4
"""The first steps fill caches and are left out of the medians."""
_PAD = 0
_START_TIMEOUT_S = 60.0


class Clock:
    """Seconds of a step's parts, one after the other."""

    def __init__(self) -> None:
        self.start = self._last = time.time()
        self.parts: dict[str, float] = {}

    def lap(self, part: str) -> None:
        """What happened since the last lap was ``part``."""
        now = time.time()
        self.parts[part] = self.parts.get(part, 0.0) + now - self._last
        self._last = now

    def line(self, step: int, forward: bool) -> dict[str, Any]:
        """The step as it is printed."""
        return {
            "step": step,
            "forward": forward,
            "start": self.start,
            "end": self._last,
            "seconds": self.parts,
        }


class PlainLoop:
    """Everything but the engine; ``folder`` is where the engine finds new weights."""

    def __init__(self, run: RunDir, config: Config, folder: Path) -> None:
        self.config, self.folder = config, folder
        self.tokenizer = load_tokenizer(run.model)
        self.source = PromptSource(open_train(run, config, self.tokenizer), config)
        self.reward = get_reward(train_reward(config))
        shape = config.rollout
        stops = tuple(self.tokenizer.eos_ids)
        self.sampling = Sampling(shape.temperature, shape.top_p, stops, config.seed)
        self.model, self.reference = (_load(run, config) for _ in range(2))
        self.trainer = Trainer(
            self.model, config.algorithm, config.actor.optimizer, shape.temperature
        )
        for file in run.model.iterdir():
            if file.suffix != ".safetensors":
                shutil.copy(file, folder / file.name)

    async def step(self, engine: Engine, step: int, forward: bool) -> dict[str, Any]:
        """One step on-policy; with ``forward`` also the passes of the reference and of the policy
        before the step."""
        clock = Clock()
        size, samples = self.config.prompts_per_step, self.config.samples_per_prompt
        prompts = {
            ticket: self.source.prompt(ticket, 0)
            for ticket in range(step * size, (step + 1) * size)
        }
        drawn = self.sampling, self.config.rollout.max_new_tokens
        requests = [
            r
            for ticket, prompt in prompts.items()
            for r in requests_for(prompt, ticket, samples, *drawn)
        ]
        answers = await asyncio.gather(*map(engine.generate, requests))
        clock.lap("generate")
        groups = zip(prompts.items(), _chunks(answers, samples), strict=True)
        rows = [
            row for (ticket, prompt), group in groups for row in self.rows(prompt, ticket, group)
        ]
        advantages = advantages_of(rows, self.config.algorithm, self.config.seed)
        rows = [row | more for row, more in zip(rows, advantages, strict=True)]
        clock.lap("rows")
        self.score(rows, forward)
        clock.lap("forward")
        self.train(rows, step)
        clock.lap("train")
        save_file(
            self.model.export_hf(), self.folder / "model.safetensors", metadata={"format": "pt"}
        )
        await engine.update_weights(self.folder, Version(1, step + 1))
        clock.lap("engine_update")
        return clock.line(step, forward)

    def rows(self, prompt: Any, ticket: int, answers: list) -> list[Row]:
        """The rows of one prompt group; RelaxError: it failed, which the plain loop does not
        survive."""
        found = scores(
            self.reward, [reward_input(prompt, answer, self.tokenizer) for answer in answers]
        )
        if isinstance(found, RewardError):
            raise RelaxError(f"prompt group {ticket} failed: {found.detail}")
        return group_rows(prompt, ticket, answers, [score.total for score in found])

    def score(self, rows: list[Row], forward: bool) -> None:
        """Add the clip's denominator, and the reference's log-probabilities; without ``forward``
        the engine's do."""
        parts = self.parts(rows)
        rows = [row for part in parts for row in part]
        old, reference = [row["rollout_logprobs"] for row in rows], [None] * len(rows)
        if forward:
            temperature = self.sampling.temperature
            reference = self.reference.forward_logprobs(self.batches(parts), temperature)
            old = self.model.forward_logprobs(self.batches(parts), temperature)
        for row, old_logprobs, ref_logprobs in zip(rows, old, reference, strict=True):
            row |= {"old_logprobs": old_logprobs, "ref_logprobs": ref_logprobs}

    def train(self, rows: list[Row], step: int) -> None:
        """All passes and mini-batches over ``rows``."""
        lr = learning_rate(self.config.actor.optimizer, step, self.config.steps)
        size = len(rows) // self.config.algorithm.mini_batches
        mini_batches = [self.batches(self.parts(mini)) for mini in _chunks(rows, size)]
        for _ in range(self.config.algorithm.passes):
            for batches in mini_batches:
                self.trainer.accumulate(batches)
                self.trainer.step(lr)

    def parts(self, rows: list[Row]) -> list[list[Row]]:
        """Micro-batches within the actor's budget."""
        return split_rows(rows, self.config.actor.max_tokens_per_micro_batch)

    def batches(self, parts: list[list[Row]]) -> list[Batch]:
        """On the device."""
        return [collate(part, _PAD, self.model.device) for part in parts]


def _chunks(items: list, size: int) -> Iterator[list]:
    return (items[at : at + size] for at in range(0, len(items), size))


def _load(run: RunDir, config: Config) -> PolicyModel:
    model = PolicyModel(read_config(run.model), config.model, ParallelConfig())
    model.load_hf(run.model)
    return model


async def loop(run: RunDir, config: Config, steps: int, forward: str) -> list[dict[str, Any]]:
    """``steps`` steps after the warm-up, each printed as it ends."""
    lines = []
    with tempfile.TemporaryDirectory(prefix="plain-loop-", dir=_memory()) as folder:
        plain = PlainLoop(run, config, Path(folder))
        engine = make_engine(config, 0, run.model, Version(0, 0), Path(folder))
        await engine.start()
        try:
            for step in range(WARM_UP_STEPS + steps):
                with_forward = forward == "yes" or (forward == "alternate" and step % 2 == 1)
                lines.append(await plain.step(engine, step, with_forward))
                print(json.dumps(lines[-1]), flush=True)
        finally:
            await engine.close()
    return lines[WARM_UP_STEPS:]


def _memory() -> Path | None:
    path = Path("/dev/shm")
    return path if path.is_dir() else None


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--run_dir", type=Path, required=True, help="a run whose model, data and settings are used"
    )
    parser.add_argument(
        "--steps", type=int, default=40, help=f"steps after {WARM_UP_STEPS} of warm-up"
    )
    parser.add_argument(
        "--forward",
        choices=("no", "yes", "alternate"),
        default="no",
        help="add reference and old log-prob passes",
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the loop; 0."""
    args = parse(argv)
    die_with_parent()
    run = RunDir(args.run_dir)
    config = load_resolved(run.root)
    torch.set_num_threads(config.threads)
    parallel.initialize_alone(config.model.device, config.seed, _START_TIMEOUT_S)
    lines = asyncio.run(loop(run, config, args.steps, args.forward))
    parallel.destroy()
    for forward in (False, True):
        if seconds := [line["end"] - line["start"] for line in lines if line["forward"] == forward]:
            print(
                f"{'with' if forward else 'without'} forward passes: median step "
                f"{median(seconds):.3f} s"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
