"""The interface of an inference engine, its errors, and checks of its requests and responses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from relax_hpc.base.error_origin import NO_ORIGIN, ErrorOrigin
from relax_hpc.base.errors import ConfigError
from relax_hpc.base.versions import Version
from relax_hpc.config.schema import ProfileConfig
from relax_hpc.data.generation import (
    CUT_REASONS,
    Draft,
    Episode,
    EpisodeRow,
    FinishReason,
    GenerateRequest,
    Generation,
    Sampling,
)

__all__ = [
    "CUT_REASONS",
    "BadAnswer",
    "BatchedEngine",
    "Draft",
    "DrawsTogether",
    "Engine",
    "EngineFault",
    "Episode",
    "EpisodeRow",
    "FaultReason",
    "FinishReason",
    "GenerateRequest",
    "Generation",
    "ProfiledEngine",
    "PromptScorer",
    "PromptScores",
    "Sampling",
    "checked",
    "refuse_media",
    "require_model",
]

FaultReason = Literal[
    "http_error",
    "timeout",
    "connection",
    "wrong_count",
    "nan_logprob",
    "bad_routes",
    "unknown_version",
    "old_version",
    "dead",
    "update_failed",
    "unsupported",
    "bad_media",
    "other_prompt",
    "episode_exception",
    "episode_timeout",
    "environment_raised",
    "environment_timeout",
    "environment_died",
    "environment_answer",
    "environment_differs",
]
"""Reason why an engine or an environment gave no usable response."""
_LOGPROB_ROUNDING = 1e-3
"""Rounding may make a log-probability this much larger than 0."""


class EngineFault(Exception):
    """Error of an engine that did not answer. None of its requests in flight can be trusted; a
    retry may succeed. `reason` is counted by callers."""

    def __init__(self, reason: FaultReason, detail: str, origin: ErrorOrigin = NO_ORIGIN) -> None:
        """``origin``: line of a user's code that failed, if that is the cause."""
        super().__init__(f"{reason}: {detail}")
        self.reason, self.origin = reason, origin
        self.start_error = ""
        """Error message of an engine that did not start; see `errors.find_start_error`."""
        self.status = 0
        """HTTP status of the answer that is the fault; 0: there was none."""


class BadAnswer(EngineFault):
    """Error of one response that cannot be used. The engine itself works."""


@runtime_checkable
class BatchedEngine(Protocol):
    """An engine that may be asked for all responses to a prompt in one call. An asyncio task for
    each response costs more than all other work for a short response."""

    async def generate_all(
        self, requests: Sequence[GenerateRequest]
    ) -> list[Generation | BadAnswer]:
        """Generate each of ``requests``: the response, or the error of one that cannot be used.
        EngineFault: not all requests have a response; tokens so far are in their drafts."""


DrawsTogether = BatchedEngine  # Name in release 0.1.


@runtime_checkable
class ProfiledEngine(Protocol):
    """An engine with a profiler."""

    async def start_profile(self, folder: Path, name: str, profile: ProfileConfig) -> None:
        """Start to record a trace, which becomes a file in ``folder`` whose name begins with
        ``name``. EngineFault: it cannot be started."""

    async def stop_profile(self) -> None:
        """Write the trace. It is no error if it was written already."""


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log-probabilities of given tokens."""

    version: Version
    """Version whose weights computed them."""
    logprobs: list[list[float]]
    """For each prompt: the log-probability of each token after the first one, at temperature 1."""


@runtime_checkable
class PromptScorer(Protocol):
    """An engine that computes the log-probabilities of given tokens. Engines that join from outside
    are compared with it, see `relax_hpc.rollout.external`."""

    async def score(self, prompts: Sequence[Sequence[int]]) -> PromptScores:
        """Score ``prompts``, each of at least two tokens. EngineFault: there is no answer."""


class Engine(Protocol):
    """An inference engine that serves one version of the policy at a time.

    Its class may have `fields`, a sequence of `relax_hpc.base.fields.FieldSpec`: the values of each
    token that it gives in `Generation.extras`.
    """

    name: str
    phase: str
    """Phase of the engine's start, shown to users."""
    pause_s: float
    """Seconds for which the last update interrupted generation."""

    async def start(self) -> None:
        """Return when the engine serves requests. ConfigError: it can never start.
        EngineFault("dead"): this start failed; the message names the log."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """The response to one request. Calls may run concurrently; the engine batches them.

        BadAnswer: this response cannot be used. EngineFault: there is no response. When a cancelled
        call returns, a working engine no longer generates the response.
        """

    async def update_weights(self, directory: Path, version: Version) -> None:
        """Load the weights in `directory` (config.json, tokenizer, model.safetensors). After this
        returns, no new request is sampled with older weights or reads their keys and values.
        Allocates the memory again after a `release`. EngineFault: the weights are unknown now."""

    async def release(self) -> None:
        """Free the device memory until the next `update_weights`. No request is in flight."""

    async def wait_dead(self) -> str:
        """Return a description of the first process of the engine that ended. An engine without
        processes never returns."""

    async def close(self) -> None:
        """End the engine and all its processes. May be called twice."""


def require_model(model_dir: Path, key: str = "model.path") -> None:
    """ConfigError unless `model_dir` looks like a Hugging Face model."""
    if not (model_dir / "config.json").is_file():
        raise ConfigError(
            f"{key}: {model_dir} has no config.json; give a Hugging Face model directory"
        )


def refuse_media(request: GenerateRequest) -> None:
    """BadAnswer if the prompt has media. For engines that take text only."""
    if request.media:
        raise BadAnswer(
            "unsupported",
            f"{len(request.media)} media in the prompt of an engine that takes text only",
        )


def checked(generation: Generation, budget: int) -> Generation:
    """Return `generation`. BadAnswer: its counts or its log-probabilities are impossible."""
    tokens = len(generation.token_ids)
    logprobs = len(generation.logprobs)
    versions = len(generation.token_versions)
    if versions != tokens:
        raise BadAnswer("wrong_count", f"found {versions} versions for {tokens} tokens")
    if not 0 < tokens <= budget or tokens != logprobs:
        raise BadAnswer(
            "wrong_count",
            f"found {tokens} tokens and {logprobs} log-probs, allowed 1 to {budget} of both",
        )
    for position, value in enumerate(generation.logprobs):
        if not math.isfinite(value) or value > _LOGPROB_ROUNDING:
            raise BadAnswer(
                "nan_logprob",
                f"found {value} at response token {position}, allowed finite and <= 0",
            )
    for name, values in generation.extras.items():
        if len(values) != tokens:
            raise BadAnswer(
                "wrong_count", f"found {len(values)} entries of {name} for {tokens} tokens"
            )
    return generation
