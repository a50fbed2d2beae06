"""How idle an engine is while environments are slow: a run of real processes, but for what the
engine and the trainer compute. Steps of environments take lognormal times, whose tail is long."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from agentic_parts import CONTEXT, TURNS, make_model
from figures import Figure

from relax_hpc.base.versions import Version
from relax_hpc.config.schema import Config, SimulatedConfig
from relax_hpc.rollout.engines.engine import BadAnswer, GenerateRequest, Generation
from relax_hpc.rollout.engines.simulated_engine import SimulatedEngine

PLACES, TOKEN_S = 16, 0.003
TIMES = {"median_s": 0.3, "sigma": 1.5, "most_s": 30.0}
"""Of the seconds that a step of an environment takes: 0.9 s in the mean, 1 in 100 more than 10 s, 1
in 1000 30 s."""
_BUDGET = CONTEXT - 32
_MIDDLE = 0.1, 0.6
"""Part of a run that counts: it begins with all episodes at their first turns, and ends with the
last ones."""
_RUN_S = 600.0
_TOLD = "places.json"


class Watched(SimulatedEngine):
    """Notes how many responses it is at, whenever that changes."""

    def __init__(
        self, config: Config, number: int, model: Path, version: Version, logs: Path, place: int
    ) -> None:
        config.rollout.engine.simulated = SimulatedConfig(
            response_s=TOKEN_S * _BUDGET, concurrency=PLACES
        )
        super().__init__(config, number, model, version)
        self._inside, self._file = 0, logs / _TOLD
        self._noted: list[tuple[float, int]] = []

    async def generate_all(
        self, requests: Sequence[GenerateRequest]
    ) -> list[Generation | BadAnswer]:
        self._note(len(requests))
        try:
            return await super().generate_all(requests)
        finally:
            self._note(-len(requests))

    async def close(self) -> None:
        self._file.write_text(json.dumps(self._noted))

    def _note(self, change: int) -> None:
        self._inside += change
        self._noted.append((time.monotonic(), self._inside))


def settings(steps: int, model: Path) -> dict[str, Any]:
    """Of a run whose trainer is quick. There are enough episodes: 64 times as many as the engine
    has places, and as far ahead of training as the longest of them takes."""
    return {
        "steps": steps,
        "prompts_per_step": 16,
        "samples_per_prompt": 8,
        "max_staleness": 8,
        "model": {"path": str(model)},
        "data": {
            "task": "relax_hpc.examples.tasks.sort_digits:SortDigits",
            "digits": 4,
            "max_prompt_tokens": 32,
        },
        "environment": {
            "kind": "agentic_parts:Slow",
            "options": TIMES,
            "max_turns": TURNS,
            "processes": 2,
            "per_process": 512,
            "memory_mb": 16384,
        },
        "rollout": {
            "groups_per_request": 16,
            "requests_in_flight": 8,
            "max_new_tokens": _BUDGET,
            "engine": {"kind": f"{Path(__file__).stem}:Watched"},
        },
        "actor": {"simulated_step_s": 0.1},
        "checkpoint": {"every": 1_000_000},
        "weights": {"file_every": 0},
        "eval": {"every": 0},
        "groups": {"actor_fwd": None, "reference": None},
    }


def measure(folder: Path, steps: int) -> Iterator[Figure]:
    """Shares of places, and of the engine as a whole, that nothing was drawn in, in the middle of a
    run."""
    (folder / "run.yaml").write_text(yaml.safe_dump(settings(steps, make_model(folder / "model"))))
    words = [sys.executable, "-m", "relax_hpc", "run", "--config", str(folder / "run.yaml")]
    words += ["--run_dir", str(folder / "run")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=_RUN_S)
    if done.returncode:
        raise RuntimeError(f"the run ended with {done.returncode}: {done.stderr[-1000:]}")
    (told,) = (folder / "run" / "logs").rglob(_TOLD)
    busy, some, seconds = shares(json.loads(told.read_text()), PLACES)
    yield Figure(
        "slow environments: idle places of the engine", 100 * (1 - busy), "%", "< 5 %", busy > 0.95
    )
    yield Figure("slow environments: engine without any request", 100 * (1 - some), "%")
    yield Figure("slow environments: time looked at", seconds, "s")


def shares(noted: Sequence[tuple[float, int]], places: int) -> tuple[float, float, float]:
    """Share of the places that had a request, share of time in which one had, and the time, in the
    middle."""
    begun, ended = noted[0][0], noted[-1][0]
    first, last = (begun + part * (ended - begun) for part in _MIDDLE)
    busy = some = 0.0
    for (start, inside), (end, _) in itertools.pairwise(noted):
        spent = max(0.0, min(end, last) - max(start, first))
        busy += spent * min(inside, places) / places
        some += spent * (inside > 0)
    return busy / (last - first), some / (last - first), last - first
