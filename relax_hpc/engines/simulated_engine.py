"""An engine that draws tokens evenly and takes as long as it is told: to measure and to break what is around engines.

It runs no model, needs no GPU and imports no torch. Log-probabilities are those of a policy that has learned nothing.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist

from relax_hpc.config.schema import Config
from relax_hpc.data.prompts import load_tokenizer
from relax_hpc.engines.deadline import Silence
from relax_hpc.engines.draws import keyed_uniform
from relax_hpc.engines.engine import (
    Draft,
    EngineFault,
    GenerateRequest,
    Generation,
    checked,
    refuse_media,
    require_model,
)
from relax_hpc.engines.gate import UpdateGate
from relax_hpc.engines.stops import Stops
from relax_hpc.versions import Version

_PACE = -1
"""In the place of a token's position, keys the draw of how long a response takes."""


class SimulatedEngine:
    """`Engine` without a model: tokens and times depend on (seed, prompt_id, sample) alone."""

    name = "simulated"
    phase = "the engine is starting"
    pause_s = 0.0

    def __init__(self, config: Config, _: int, model_dir: Path, version: Version, *__: object) -> None:
        self._settings = config.rollout.engine.simulated
        self._silence = Silence(config.rollout.engine.request_timeout_s)
        self._model_dir, self._version = model_dir, version
        self._places, self._gate = asyncio.Semaphore(self._settings.concurrency), UpdateGate()
        self._free = [0.0] * self._settings.concurrency
        """Since when each of the places that are free is, a heap; of the event loop's clock."""
        self._waits = config.rollout.partial_rollout == "off"

    async def start(self) -> None:
        """See `Engine.start`."""
        require_model(self._model_dir)
        self._tokenizer = load_tokenizer(self._model_dir)

    async def generate(self, request: GenerateRequest) -> Generation:
        """See `Engine.generate`."""
        refuse_media(request)
        await self._gate.enter()
        try:
            async with self._silence.limited():
                return checked(await self._draw(request), request.budget)
        except TimeoutError as error:
            raise EngineFault("timeout", f"no token for {self._silence.seconds} s") from error
        finally:
            self._gate.leave()

    async def update_weights(self, directory: Path, version: Version) -> None:
        """See `Engine.update_weights`; what is being drawn goes on under the new version, if not waited for."""
        if not any(directory.glob("*.safetensors")):
            raise EngineFault("update_failed", f"{version}: {directory} has no *.safetensors")
        async with self._gate.update(when_empty=self._waits):
            self._version = version

    async def release(self) -> None:
        """There is nothing to give back."""

    async def wait_dead(self) -> str:
        """Never returns: there is no process but this one."""
        return await asyncio.get_running_loop().create_future()

    async def close(self) -> None:
        """Nothing to end."""

    async def _draw(self, request: GenerateRequest) -> Generation:
        tokens, draft = self.tokens(request), request.draft or Draft()
        drawn, pause_s = Draft.of(draft.so_far()), self.seconds(request) / request.budget
        logprob, asked = -math.log(self._tokenizer.vocab_size), (clock := asyncio.get_running_loop().time)()
        async with self._places:
            # Each pause is a little longer than asked for, which must not add up, nor from one response to the next.
            due = max(asked, heapq.heappop(self._free))
            try:
                for position in range(len(drawn.token_ids), len(tokens)):
                    due += pause_s
                    await asyncio.sleep(due - clock())
                    self._silence.heard()
                    made = [tokens[position]], [logprob], [self._version.encode()]
                    drawn.add(*made)
                    if position + 1 < len(tokens):
                        draft.add(*made)
            finally:
                heapq.heappush(self._free, min(due, clock()))
        reason = "stop" if self._stops(request).met(tokens) else "length"
        draft.ended = replace(drawn.so_far(), finish_reason=reason)
        return draft.ended

    def tokens(self, request: GenerateRequest) -> list[int]:
        """The whole response."""
        size, stops, found = self._tokenizer.vocab_size, self._stops(request), []
        for position in range(request.budget):
            found.append(int(keyed_uniform(request.sampling.seed, request.prompt_id, request.sample, position) * size))
            if stops.met(found):
                break
        return found

    def _stops(self, request: GenerateRequest) -> Stops:
        return Stops.of(request.sampling, self._tokenizer.eos_ids, self._tokenizer)

    def seconds(self, request: GenerateRequest) -> float:
        """What a response of the whole budget takes: lognormal, its median and sigma from the configuration."""
        uniform = keyed_uniform(request.sampling.seed, request.prompt_id, request.sample, _PACE)
        deviation = NormalDist().inv_cdf(min(max(uniform, 1e-12), 1 - 1e-12))
        return self._settings.response_s * math.exp(self._settings.sigma * deviation)
