"""An engine that samples tokens uniformly, with configured response times. It serves to measure and
to test the components around engines.

It runs no model, needs no GPU and does not import torch. It accepts media and ignores them. Its
log-probabilities are those of a uniform distribution.
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
from relax_hpc.data.media import read_placeholder_tokens
from relax_hpc.data.tokenizer import load_tokenizer
from relax_hpc.rollout.engines.deadline import SilenceTimeout
from relax_hpc.rollout.engines.engine import (
    BadAnswer,
    Draft,
    EngineFault,
    FinishReason,
    GenerateRequest,
    Generation,
    PromptScores,
    checked,
    require_model,
)
from relax_hpc.rollout.engines.seeded_draws import keyed_uniform
from relax_hpc.rollout.engines.simulated_slots import SimulatedResponse, Slots
from relax_hpc.rollout.engines.stops import Stops
from relax_hpc.rollout.engines.update_gate import UpdateGate

_PACE = -1
"""Key of the random number for the duration of a response, instead of a token's position."""


class SimulatedEngine:
    """`Engine` without a model: tokens and durations depend only on (seed, prompt_id, sample)."""

    name = "simulated"
    phase = "the engine is starting"
    pause_s = 0.0

    def __init__(
        self, config: Config, _: int, model_dir: Path, version: Version, *__: object
    ) -> None:
        self._settings = config.rollout.engine.simulated
        self._silence = SilenceTimeout(config.rollout.engine.request_timeout_s)
        self._model_dir, self._version = model_dir, version
        self._slots = Slots(self._settings.concurrency, self._sample)
        self._gate = UpdateGate()
        self._updates_when_empty = config.rollout.partial_rollout == "off"

    async def start(self) -> None:
        """See `Engine.start`."""
        require_model(self._model_dir)
        self._tokenizer = load_tokenizer(self._model_dir)
        media_rules = read_placeholder_tokens(self._model_dir).values()
        banned = {rules.placeholder for rules in media_rules}
        vocabulary = range(self._tokenizer.vocab_size)
        self._candidates = [token for token in vocabulary if token not in banned]
        """Tokens that may be sampled: all but the placeholders of media."""
        self._logprob = -math.log(len(self._candidates))

    async def generate(self, request: GenerateRequest) -> Generation:
        """See `Engine.generate`."""
        (answer,) = await self.generate_all([request])
        if isinstance(answer, BadAnswer):
            raise answer
        return answer

    async def generate_all(
        self, requests: Sequence[GenerateRequest]
    ) -> list[Generation | BadAnswer]:
        """See `BatchedEngine`."""
        await self._gate.enter()
        try:
            with self._silence.for_request():
                return await self._generate(requests)
        except TimeoutError as error:
            raise EngineFault("timeout", f"no token for {self._silence.seconds} s") from error
        finally:
            self._gate.leave()

    async def update_weights(self, directory: Path, version: Version) -> None:
        """See `Engine.update_weights`. Unless the update waits for them, running requests continue
        with the new version."""
        if not any(directory.glob("*.safetensors")):
            raise EngineFault("update_failed", f"{version}: {directory} has no *.safetensors")
        async with self._gate.update(when_empty=self._updates_when_empty):
            self._version = version

    async def score(self, prompts: Sequence[Sequence[int]]) -> PromptScores:
        """See `PromptScorer`."""
        return PromptScores(
            self._version, [[self._logprob] * (len(prompt) - 1) for prompt in prompts]
        )

    async def release(self) -> None:
        """Do nothing: the engine holds no device memory."""

    async def wait_dead(self) -> str:
        """Never return: the engine starts no process."""
        return await asyncio.get_running_loop().create_future()

    async def close(self) -> None:
        """Do nothing: the engine starts no process."""

    async def _generate(self, requests: Sequence[GenerateRequest]) -> list[Generation | BadAnswer]:
        responses: list[SimulatedResponse] = []
        for request in requests:
            tokens, finish_reason = self._response(request)
            draft = request.draft or Draft()
            pause_s = self.seconds(request) / (request.budget - draft.turn_start)
            responses.append(SimulatedResponse(tokens, finish_reason, draft, pause_s))
        await self._slots.generate(responses)
        return [self._answer(*pair) for pair in zip(requests, responses, strict=True)]

    @staticmethod
    def _answer(request: GenerateRequest, response: SimulatedResponse) -> Generation | BadAnswer:
        try:
            assert response.generation, "the slots have generated it"
            return checked(response.generation, request.budget)
        except BadAnswer as bad:
            return bad

    def _sample(self, response: SimulatedResponse) -> Generation | None:
        """Add the next token of a response to its draft; return the whole response after its last
        token."""
        self._silence.note_output()
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
            response.finish_reason,
        )
        return draft.ended

    def tokens(self, request: GenerateRequest) -> list[int]:
        """Tokens of the whole response to a request."""
        return self._response(request)[0]

    def _response(self, request: GenerateRequest) -> tuple[list[int], FinishReason]:
        """Tokens of the whole response to a request, and the reason why it ends."""
        stops = Stops.from_sampling(request.sampling, self._tokenizer.eos_ids, self._tokenizer)
        draft = request.draft or Draft()
        tokens, turn_start = list(draft.token_ids), draft.turn_start
        for position in range(len(tokens), request.budget):
            uniform = keyed_uniform(
                request.sampling.seed, request.prompt_id, request.sample, position
            )
            tokens.append(self._candidates[int(uniform * len(self._candidates))])
            if stops.met(tokens, turn_start):
                return tokens, "stop"
        return tokens, "length"

    def seconds(self, request: GenerateRequest) -> float:
        """Seconds for a response of the whole budget: lognormal, with the median and sigma of the
        configuration."""
        if not self._settings.sigma:
            return self._settings.response_s
        uniform = keyed_uniform(request.sampling.seed, request.prompt_id, request.sample, _PACE)
        deviation = NormalDist().inv_cdf(min(max(uniform, 1e-12), 1 - 1e-12))
        return self._settings.response_s * math.exp(self._settings.sigma * deviation)
