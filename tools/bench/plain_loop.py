"""The plain loop that a run is measured against, step by step and by its parts.

It is the loop of examples/one_process.py: one trainer process, one engine, no queue and no other
role. The engine, model, prompts and settings are those of the run whose directory is given; its
data and model must be there:

    python tools/bench/plain_loop.py --run_dir runs/quickstart --steps 40 --forward alternate

Prints one JSON line a step, then the medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from relax_hpc.base.rundir import RunDir
from relax_hpc.config import Config, load_resolved
from relax_hpc.examples.one_process import Loop
from relax_hpc.net.rendezvous.process import die_with_parent
from relax_hpc.queue.row_schema import Row
from relax_hpc.training import parallel
from relax_hpc.training.model import PolicyModel
from relax_hpc.training.models.batches import PAD, collate, split_rows
from relax_hpc.training.models.hf_files import read_config

WARM_UP_STEPS = 4
"""The first steps fill caches and are left out of the medians."""
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


class PlainLoop(Loop):
    """The loop with a clock, and with a reference model whose forward pass can be added."""

    def __init__(self, config: Config, run: RunDir, folder: Path) -> None:
        super().__init__(config, run, folder)
        self.reference = PolicyModel(read_config(run.model), config.model, config.actor.parallel)
        self.reference.load_hf(run.model)

    async def step(self, step: int, forward: bool) -> dict[str, Any]:
        """One step on-policy; ``forward``: with passes of the reference and of the policy before
        the step."""
        clock = Clock()
        groups = await self.generate(step)
        clock.lap("generate")
        rows = await self.reward(groups)
        clock.lap("rows")
        if forward:
            self.score(rows)
            self.score_by_reference(rows)
        else:
            # The log-probabilities of the engine cost nothing.
            for row in rows:
                row |= {"old_logprobs": row["rollout_logprobs"], "ref_logprobs": None}
        clock.lap("forward")
        self.train(rows, step)
        clock.lap("train")
        await self.publish(step)
        clock.lap("engine_update")
        return clock.line(step, forward)

    def score_by_reference(self, rows: list[Row]) -> None:
        """Add the log-probabilities of the reference."""
        for part in split_rows(rows, self.config.actor.max_tokens_per_micro_batch):
            batch = collate(part, PAD, self.model.device)
            scores = self.reference.forward_logprobs([batch], self.config.rollout.temperature)
            for row, logprobs in zip(part, scores, strict=True):
                row["ref_logprobs"] = logprobs


async def loop(run: RunDir, config: Config, steps: int, forward: str) -> list[dict[str, Any]]:
    """``steps`` steps after the warm-up, each printed as it ends."""
    lines = []
    with tempfile.TemporaryDirectory(prefix="plain-loop-", dir=_memory()) as folder:
        plain = PlainLoop(config, run, Path(folder) / "model")
        await plain.engine.start()
        try:
            for step in range(WARM_UP_STEPS + steps):
                with_forward = forward == "yes" or (forward == "alternate" and step % 2 == 1)
                lines.append(await plain.step(step, with_forward))
                print(json.dumps(lines[-1]), flush=True)
        finally:
            await plain.engine.close()
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
