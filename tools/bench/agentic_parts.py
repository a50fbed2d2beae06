"""What the figures of agents are measured with: environments, whose processes import this, and a
tiny model."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path

from relax_hpc.config.schema import TinyModelConfig
from relax_hpc.environments.base import Beginning, Environment, Observation, Response, Step
from relax_hpc.training.models.tiny_model import make_tiny_model

TURNS = 4
"""Turns of an episode."""
CONTEXT = 4096
"""Tokens of the model's context."""
SHAPE = TinyModelConfig(hidden_size=32, num_layers=1, head_dim=16, intermediate_size=64)
_SAID = "what an environment says between two turns of the policy, again. "


class Instant(Environment):
    """Answers at once."""

    def step(self, response: Response) -> Step:
        return Step((Observation(_SAID),), done=response.turn == TURNS - 1)


class Slow(Environment):
    """Answers after lognormal times, whose tail is long, and bounded."""

    def __init__(self, median_s: float, sigma: float, most_s: float) -> None:
        self._median_s, self._sigma, self._most_s = median_s, sigma, most_s

    def reset(self, beginning: Beginning) -> Sequence[Observation]:
        self._random = random.Random(beginning.seed)
        return ()

    async def step(self, response: Response) -> Step:
        seconds = self._median_s * math.exp(self._random.gauss(0.0, self._sigma))
        await asyncio.sleep(min(self._most_s, seconds))
        return Step((Observation(_SAID),), done=response.turn == TURNS - 1)


def make_model(folder: Path) -> Path:
    """A random model, and a tokenizer of characters, in a new ``folder``."""
    make_tiny_model(folder, SHAPE, 0)
    path = folder / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_bytes()) | {"max_position_embeddings": CONTEXT})
    )
    return folder
