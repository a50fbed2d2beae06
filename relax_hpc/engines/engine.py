"""What a rollout role asks of an inference engine, whatever generates the tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from relax_hpc.config.schema import Config
from relax_hpc.errors import ConfigError
from relax_hpc.versions import Version

FaultReason = Literal[
    "http_error",
    "timeout",
    "connection",
    "wrong_count",
    "nan_logprob",
    "unknown_version",
    "old_version",
    "dead",
    "update_failed",
]
_LOGPROB_ROUNDING = 1e-3


@dataclass(slots=True, frozen=True)
class Sampling:
    """How tokens are drawn; the same for all requests of a call."""

    temperature: float
    """0: the most probable token."""
    top_p: float
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    """Generation ends after one of them, which belongs to the response; the model's own end tokens count too."""
    seed: int
    """Used by engines that can reproduce a sample; SGLang's CPU backends cannot."""


@dataclass(slots=True)
class Generation:
    """One response: three entries a token, the first token after the prompt at index 0."""

    token_ids: list[int]
    logprobs: list[float]
    """Nats, at the sampling temperature (at 1 if that is 0), before top_p."""
    token_versions: np.ndarray
    """int32 [tokens]: `Version.encode()` of the weights that sampled each token."""
    finish_reason: Literal["stop", "length", "abort", "partial"]
    """`partial`: it has not ended yet."""


@dataclass(slots=True)
class Draft:
    """What there is of a response while an engine adds to it; any thread may look."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    token_versions: list[int] = field(default_factory=list)
    ended: Generation | None = None
    """The whole response."""

    @classmethod
    def of(cls, made: Generation) -> Draft:
        ended = None if made.finish_reason == "partial" else made
        return cls(list(made.token_ids), list(made.logprobs), made.token_versions.tolist(), ended)

    def add(self, token_ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int]) -> None:
        """Tokens after which it goes on."""
        self.token_ids += token_ids
        self.logprobs += logprobs
        # Last: they say how much there is.
        self.token_versions += versions

    def so_far(self) -> Generation:
        """All that there is, or a copy of it."""
        count = len(self.token_versions)
        versions = np.array(self.token_versions[:count], np.int32)
        return self.ended or Generation(self.token_ids[:count], self.logprobs[:count], versions, "partial")


@dataclass(slots=True, frozen=True)
class GenerateRequest:
    """One response to draw. (seed, prompt_id, sample, position) keys the draws of an engine that is seeded."""

    prompt_ids: tuple[int, ...]
    prompt_id: str
    sample: int
    draft: Draft | None = field(default=None, compare=False)
    """The engine goes on with what is in it, adds what it is sure of, and at last the whole response."""

    @property
    def so_far(self) -> tuple[int, ...]:
        """The prompt, and what there is of the response."""
        return (*self.prompt_ids, *(self.draft.token_ids if self.draft else ()))


class EngineFault(Exception):
    """An engine failed to answer, or answered nonsense; trying again may help. `reason` is what callers count."""

    def __init__(self, reason: FaultReason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


class Engine(Protocol):
    """An inference engine that serves one version of the policy at a time."""

    name: str
    phase: str
    """What it is at while it starts, for people."""
    pause_s: float
    """How long the last update kept it from generating."""

    async def start(self) -> None:
        """Return when requests are served. ConfigError: it can never start. EngineFault("dead"): it did not, this
        time; the message names its log."""

    async def generate(self, requests: Sequence[GenerateRequest], sampling: Sampling) -> list[Generation | EngineFault]:
        """One answer a request, in order; a bad one is an EngineFault in its place. EngineFault: all failed.

        When a call that was cancelled ends, the engine's process has given its requests up, if it is well.
        """

    async def update_weights(self, directory: Path, version: Version) -> None:
        """Serve the weights in `directory` (config.json, tokenizer, model.safetensors) from now on: when this returns,
        no new request is sampled by, or sees keys and values of, older weights. Takes memory again after a `release`.
        EngineFault: state unknown."""

    async def release(self) -> None:
        """Give its memory on the device back until the next `update_weights`; nothing is being generated."""

    async def wait_dead(self) -> str:
        """Which of the engine's processes has ended and how, when one has; does not return where there is none."""

    async def close(self) -> None:
        """End the engine and every process of it; safe to call twice."""


def make_engine(
    config: Config,
    replica: int,
    model_dir: Path,
    version: Version,
    log_dir: Path,
    place: int | None = None,
) -> Engine:
    """The engine that `config.rollout.engine.kind` names, not started. `model_dir` holds the weights of `version`.

    `place` is the replica's number among those of its node, by which it finds its GPUs; `replica` if left out.
    """
    if config.rollout.engine.kind == "sglang":
        from relax_hpc.engines.sglang.engine import SglangEngine

        return SglangEngine(config, replica, model_dir, version, log_dir, place)
    if config.rollout.engine.kind == "simulated":
        from relax_hpc.engines.simulated_engine import SimulatedEngine

        return SimulatedEngine(config, replica, model_dir, version)
    from relax_hpc.engines.transformers_engine import TransformersEngine

    return TransformersEngine(config, replica, model_dir, version, place)


def require_model(model_dir: Path) -> None:
    """ConfigError unless `model_dir` looks like a Hugging Face model."""
    if not (model_dir / "config.json").is_file():
        raise ConfigError(f"model.path: {model_dir} has no config.json; give a Hugging Face model directory")


def check_generation(generation: Generation, max_new_tokens: int) -> Generation | EngineFault:
    """`generation` itself, or what is wrong with its counts or log-probabilities."""
    tokens, logprobs = len(generation.token_ids), len(generation.logprobs)
    if not 0 < tokens <= max_new_tokens or tokens != logprobs:
        allowed = f"1 to {max_new_tokens} of both"
        return EngineFault("wrong_count", f"found {tokens} tokens and {logprobs} log-probs, allowed {allowed}")
    for position, value in enumerate(generation.logprobs):
        if not math.isfinite(value) or value > _LOGPROB_ROUNDING:
            return EngineFault("nan_logprob", f"found {value} at response token {position}, allowed finite and <= 0")
    return generation
