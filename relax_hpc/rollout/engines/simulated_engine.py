"""An engine that draws tokens evenly and takes as long as it is told: to measure and to break what
is around engines.

It runs no model, needs no GPU and imports no torch; media it takes, and does not look at.
Log-probabilities are those of a policy that has learned nothing.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist

import numpy as np

from relax_hpc.base.versions import Version
from relax_hpc.config.schema import Config
from relax_hpc.data.media import places_of
from relax_hpc.data.tokenizer import load_tokenizer
from relax_hpc.rollout.engines.deadline import Silence
from relax_hpc.rollout.engines.engine import (
    BadAnswer,
    Draft,
    Ended,
    EngineFault,
    GenerateRequest,
    Generation,
    checked,
    require_model,
)
from relax_hpc.rollout.engines.seeded_draws import keyed_uniform
from relax_hpc.rollout.engines.simulated_slots import Places, Response
from relax_hpc.rollout.engines.stops import Stops
from relax_hpc.rollout.engines.update_gate import UpdateGate

_PACE = -1
"""Key of the draw of a response's time, in the place of a token's position."""


class SimulatedEngine:
    """`Engine` without a model: tokens and times depend on (seed, prompt_id, sample) alone."""

    name = "simulated"
    phase = "the engine is starting"
    pause_s = 0.0

    def __init__(
        self, config: Config, _: int, model_dir: Path, version: Version, *__: object
    ) -> None:
        self._settings = config.rollout.engine.simulated
        self._silence = Silence(config.rollout.engine.request_timeout_s)
        self._model_dir, self._version = model_dir, version
        self._places, self._gate = Places(self._settings.concurrency, self._sample), UpdateGate()
        self._waits = config.rollout.partial_rollout == "off"

    async def start(self) -> None:
        """See `Engine.start`."""
        require_model(self._model_dir)
        self._tokenizer = load_tokenizer(self._model_dir)
        banned = {place.placeholder for place in places_of(self._model_dir).values()}
        self._drawn = [token for token in range(self._tokenizer.vocab_size) if token not in banned]
        """Tokens that may be drawn: all but those that stand for media."""
        self._logprob = -math.log(len(self._drawn))

    async def generate(self, request: GenerateRequest) -> Generation:
        """See `Engine.generate`."""
        (answer,) = await self.generate_all([request])
        if isinstance(answer, BadAnswer):
            raise answer
        return answer

    async def generate_all(
        self, requests: Sequence[GenerateRequest]
    ) -> list[Generation | BadAnswer]:
        """See `DrawsTogether`."""
        await self._gate.enter()
        try:
            with self._silence.limited():
                return await self._draw(requests)
        except TimeoutError as error:
            raise EngineFault("timeout", f"no token for {self._silence.seconds} s") from error
        finally:
            self._gate.leave()

    async def update_weights(self, directory: Path, version: Version) -> None:
        """See `Engine.update_weights`; what is being drawn goes on under the new version, if not
        waited for."""
        if not any(directory.glob("*.safetensors")):
            raise EngineFault("update_failed", f"{version}: {directory} has no *.safetensors")
        async with self._gate.update(when_empty=self._waits):
            self._version = version

    async def release(self) -> None:
        """Nothing to give back."""

    async def wait_dead(self) -> str:
        """Never returns: there is no process but this one."""
        return await asyncio.get_running_loop().create_future()

    async def close(self) -> None:
        """Nothing to end."""

    async def _draw(self, requests: Sequence[GenerateRequest]) -> list[Generation | BadAnswer]:
        responses: list[Response] = []
        for request in requests:
            tokens, end = self._response(request)
            draft = request.draft or Draft()
            responses.append(
                Response(tokens, end, draft, self.seconds(request) / (request.budget - draft.turn))
            )
        await self._places.draw(responses)
        return [self._answer(*pair) for pair in zip(requests, responses, strict=True)]

    @staticmethod
    def _answer(request: GenerateRequest, response: Response) -> Generation | BadAnswer:
        try:
            assert response.made, "drawn by now"
            return checked(response.made, request.budget)
        except BadAnswer as bad:
            return bad

    def _sample(self, response: Response) -> Generation | None:
        """Draw the next token of a response; return the whole response if it was the last one."""
        self._silence.heard()
        draft, version, logprob = response.draft, self._version.encode(), self._logprob
        count = len(draft.token_versions) + 1
        if count < len(response.tokens):
            draft.add([response.tokens[count - 1]], [logprob], [version])
            return None
        tokens, logprobs = [*draft.token_ids, response.tokens[-1]], [*draft.logprobs, logprob]
        draft.ended = Generation(
            tokens,
            logprobs,
            np.array([*draft.token_versions, version], np.int32),
            response.ended_by,
        )
        return draft.ended

    def tokens(self, request: GenerateRequest) -> list[int]:
        """Tokens of the whole response to a request."""
        return self._response(request)[0]

    def _response(self, request: GenerateRequest) -> tuple[list[int], Ended]:
        """Tokens of the whole response to a request, and the reason why it ends."""
        stops = Stops.of(request.sampling, self._tokenizer.eos_ids, self._tokenizer)
        draft = request.draft or Draft()
        found, turn = list(draft.token_ids), draft.turn
        for position in range(len(found), request.budget):
            uniform = keyed_uniform(
                request.sampling.seed, request.prompt_id, request.sample, position
            )
            found.append(self._drawn[int(uniform * len(self._drawn))])
            if stops.met(found, turn):
                return found, "stop"
        return found, "length"

    def seconds(self, request: GenerateRequest) -> float:
        """Seconds that a response of the whole budget takes: lognormal, its median and sigma from
        the configuration."""
        if not self._settings.sigma:
            return self._settings.response_s
        uniform = keyed_uniform(request.sampling.seed, request.prompt_id, request.sample, _PACE)
        deviation = NormalDist().inv_cdf(min(max(uniform, 1e-12), 1 - 1e-12))
        return self._settings.response_s * math.exp(self._settings.sigma * deviation)
