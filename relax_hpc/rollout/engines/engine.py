"""Interface between rollout and inference engines, whatever generates the tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol

import numpy as np

from relax_hpc.base.error_origin import NO_ORIGIN, ErrorOrigin
from relax_hpc.base.errors import ConfigError
from relax_hpc.base.versions import Version
from relax_hpc.data.media import PromptMedium

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
Ended = Literal[
    "stop",
    "length",
    "abort",
    "partial",
    "env_done",
    "max_turns",
    "turn_budget",
    "sampled_budget",
    "episode_budget",
    "program_failed",
]
"""Reason why a response ended, or an episode of several turns; `partial`: it has not ended yet."""
CUT: frozenset[str] = frozenset(("length", "turn_budget", "sampled_budget", "episode_budget"))
"""Reasons that cut what the policy would have said."""
NOTHING_BESIDE: Mapping[str, Sequence[np.ndarray]] = MappingProxyType({})
_LOGPROB_ROUNDING = 1e-3


@dataclass(slots=True, frozen=True)
class Sampling:
    """Settings by which the tokens of a response are drawn."""

    temperature: float
    """Sampling temperature; 0: the most probable token."""
    top_p: float
    stop_token_ids: tuple[int, ...]
    """Tokens after which generation ends, and which belong to the response; the model's own end
    tokens count too."""
    seed: int
    """Seed of the draws, for engines that can reproduce a sample; SGLang's CPU backends cannot."""
    stop: tuple[str, ...] = ()
    """Texts that end a response: generation stops after the token that completes one, which belongs
    to the response."""
    top_k: int = 0
    """Number of most probable tokens that are drawn from; 0: all."""
    min_p: float = 0.0
    """Share of the most probable token's probability that a token must have to be drawn from."""
    is_trained: bool = True
    """Whether log-probabilities are learned from. Else an engine may give those of before top_k,
    top_p and min_p."""

    @property
    def is_cut(self) -> bool:
        """Whether less than the whole vocabulary is drawn from, otherwise than by temperature 0."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


@dataclass(slots=True)
class Generation:
    """One response: three entries a token, the first token after the prompt at index 0."""

    token_ids: list[int]
    logprobs: list[float]
    """Log-probabilities, nats, of what the token was drawn from: at the sampling temperature (at 1
    if that is 0), and, where a part of the vocabulary was left out, of the rest alone."""
    token_versions: np.ndarray
    """int32 [tokens]: `Version.encode()` of the weights that sampled each token; 0: nobody did, and
    its entry in `logprobs` is 0 too, as of what a tool or a user says between turns."""
    finish_reason: Ended
    extras: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Further values of each token by the engine: name -> [tokens, ...]. One that its class, or
    `relax_hpc.base.fields`, declares is put into the queue under its name; others are left out."""
    before: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Values of the tokens that the engine was asked with: name -> [those tokens, ...]; without
    them, a field's `pad`."""
    cached: int | None = None
    """Tokens that the engine was asked with whose keys and values it had; None: it does not
    tell."""

    def going_on(self, between: Sequence[int], answer: Generation) -> Generation:
        """One response of several turns: itself, what others said then, ``between``, and the
        ``answer`` to all that.

        What the engine knows of a token is of when it first read it: of the last one so far, and of
        those in between, that is with the answer.
        """
        nobody, said = np.zeros(len(between), np.int32), len(between) + 1
        extras = {
            name: np.concatenate([mine[:-1], answer.before[name][-said:], answer.extras[name]])
            for name, mine in self.extras.items()
            if name in answer.extras and name in answer.before
        }
        return Generation(
            [*self.token_ids, *between, *answer.token_ids],
            [*self.logprobs, *[0.0] * len(between), *answer.logprobs],
            np.concatenate([self.token_versions, nobody, answer.token_versions]),
            answer.finish_reason,
            extras,
            self.before,
        )


@dataclass(frozen=True, slots=True)
class EpisodeRow:
    """One training sequence of an episode: what the policy was given first, and all that came after
    it."""

    prompt: Sequence[int]
    made: Generation
    media: tuple[PromptMedium, ...] | None = None
    """Media whose places are in the row, in their order, stored. None: those of the ticket's
    prompt, if the row begins with that."""
    turns: tuple[int, ...] | None = None
    """Ends of its turns: tokens behind the prompt. None: it was not played against an
    environment."""


@dataclass(frozen=True, slots=True)
class Episode:
    """One attempt at a prompt that takes several rows, as its history was compacted or has
    branches; or that was played against an environment."""

    rows: Sequence[EpisodeRow]
    """Rows of the episode, at least one, in their order. An episode whose only row has the ticket's
    prompt is as well a `Generation`."""
    outcome: Mapping[str, Any] | None = None
    """Words of its environment on the whole: `info` and `reward`, and the number of the `row` in
    which it ended. None: there was no environment, or it has not ended."""

    @property
    def finish_reason(self) -> str:
        """`abort`, if a row has it, or else the last one's."""
        reasons = [row.made.finish_reason for row in self.rows]
        return "abort" if "abort" in reasons else reasons[-1]


@dataclass(slots=True)
class Draft:
    """Response so far, while an engine adds to it; any thread may look."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    token_versions: list[int] = field(default_factory=list)
    extras: dict[str, list[np.ndarray]] = field(default_factory=dict)
    """Further values by name, an entry a token, of an engine that gives them as it draws. They may
    end before the tokens do, at the last one of a turn and what was said after it, which the engine
    is to read first: it gives those with what it adds."""
    before: Mapping[str, np.ndarray] = field(default_factory=dict)
    """See `Generation.before`."""
    ended: Generation | Episode | None = None
    """The whole response, or what a task has made of several."""

    @classmethod
    def of(cls, made: Generation | Episode) -> Draft:
        ended = None if made.finish_reason == "partial" else made
        if isinstance(made, Episode):
            return cls(ended=made)
        extras = {name: list(values) for name, values in made.extras.items()}
        known = list(made.token_ids), list(made.logprobs), made.token_versions.tolist(), extras
        return cls(*known, made.before, ended)

    @classmethod
    def after(cls, turn: Generation) -> Draft:
        """Draft of an episode that goes on after a ``turn``."""
        draft = cls.of(turn)
        draft.ended = None
        return draft

    def hear(self, token_ids: Sequence[int]) -> None:
        """Add what others say after a turn. Nothing was fed with the turn's last token before, so
        that what the engine knows of it comes with theirs."""
        known = max(0, len(self.token_versions) - 1)
        self.extras = {name: values[:known] for name, values in self.extras.items()}
        self.add(token_ids, [0.0] * len(token_ids), [0] * len(token_ids))

    def add(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        versions: Sequence[int],
        extras: Mapping[str, Sequence[np.ndarray]] = NOTHING_BESIDE,
    ) -> None:
        """Add tokens after which it goes on, and what the engine knows of them beside, if it ever
        does before the end."""
        for name, values in extras.items():
            self.extras.setdefault(name, []).extend(values)
        self.token_ids += token_ids
        self.logprobs += logprobs
        # Last: they say how much there is.
        self.token_versions += versions

    @property
    def turn(self) -> int:
        """Place of the first token of the turn that is drawn: behind what others said last."""
        for index in range(len(self.token_versions), 0, -1):
            if not self.token_versions[index - 1]:
                return index
        return 0

    def so_far(self) -> Generation | Episode:
        """All that there is, or a copy of it."""
        return self.ended or self._part(0, len(self.token_versions))

    def again(self) -> Draft:
        """Copy to go on from, as if it had not ended: an engine that has failed may still add to
        what it was given."""
        return Draft.of(self._part(0, len(self.token_versions)))

    def since(self, start: int) -> Generation:
        """Copy of one response without its first ``start`` tokens, as far as all is known of it."""
        if not isinstance(ended := self.ended, Generation):
            return self.drawn(start)
        extras = {name: values[start:] for name, values in ended.extras.items()}
        about = (
            ended.token_versions[start:],
            ended.finish_reason,
            extras,
            {} if start else ended.before,
        )
        return Generation(ended.token_ids[start:], ended.logprobs[start:], *about)

    def drawn(self, start: int) -> Generation:
        """The same, as if it had not ended: what ends may be a turn of an episode that goes on."""
        return self._part(start, min([len(self.token_versions), *map(len, self.extras.values())]))

    def _part(self, start: int, stop: int) -> Generation:
        versions = np.array(self.token_versions[start:stop], np.int32)
        extras = {
            name: np.array(values[start:stop])
            for name, values in self.extras.items()
            if len(values) > start
        }
        made = self.token_ids[start:stop], self.logprobs[start:stop], versions
        return Generation(*made, "partial", extras, {} if start else self.before)


@dataclass(slots=True, frozen=True)
class GenerateRequest:
    """One response to draw. (sampling.seed, prompt_id, sample, position) keys the draws of an
    engine that is seeded."""

    prompt_ids: tuple[int, ...]
    prompt_id: str
    sample: int
    sampling: Sampling
    budget: int
    """Tokens that the response may have, those of the draft included."""
    media: tuple[PromptMedium, ...] = ()
    """Media whose places are in the prompt, in their order, stored."""
    session: str = ""
    """Session of the request, whose keys and values an engine may keep: its requests go on where
    others ended. Empty: none."""
    draft: Draft | None = field(default=None, compare=False)
    """Response so far: the engine goes on from it, adds what it is sure of, and at last the whole
    response."""

    @property
    def so_far(self) -> tuple[int, ...]:
        """The prompt, and what there is of the response."""
        return (*self.prompt_ids, *(self.draft.token_ids if self.draft else ()))


class EngineFault(Exception):
    """Error of an engine that failed to answer, so that all that was asked of it is in doubt;
    trying again may help. `reason` is what callers count."""

    def __init__(self, reason: FaultReason, detail: str, origin: ErrorOrigin = NO_ORIGIN) -> None:
        """``origin``: line of a user's code that failed, if one did."""
        super().__init__(f"{reason}: {detail}")
        self.reason, self.origin = reason, origin
        self.start_error = ""
        """Error message of an engine that did not start; see `errors.start_error_of`."""


class BadAnswer(EngineFault):
    """Error of one response that is none, of an engine that is well otherwise."""


class Engine(Protocol):
    """An inference engine that serves one version of the policy at a time.

    Its class may have `fields`, a sequence of `relax_hpc.base.fields.FieldSpec`: what it gives of
    each token in `extras`.
    """

    name: str
    phase: str
    """Phase of the engine's start, for people."""
    pause_s: float
    """Seconds for which the last update kept it from generating."""

    async def start(self) -> None:
        """Return when requests are served. ConfigError: it can never start. EngineFault("dead"): it
        did not, this time; the message names its log."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """The response to one request. Any number may be under way; what is best done together the
        engine batches.

        BadAnswer: this response is none. EngineFault: there is no answer. When a call that was
        cancelled ends, the engine's process has given its request up, if it is well.
        """

    async def update_weights(self, directory: Path, version: Version) -> None:
        """Serve the weights in `directory` (config.json, tokenizer, model.safetensors) from now on:
        when this returns, no new request is sampled by, or sees keys and values of, older weights.
        Takes memory again after a `release`. EngineFault: state unknown."""

    async def release(self) -> None:
        """Give its memory on the device back until the next `update_weights`; nothing is being
        generated."""

    async def wait_dead(self) -> str:
        """Return which of the engine's processes has ended and how, once one has; never where there
        is none."""

    async def close(self) -> None:
        """End the engine and every process of it; safe to call twice."""


def require_model(model_dir: Path, key: str = "model.path") -> None:
    """ConfigError unless `model_dir` looks like a Hugging Face model."""
    if not (model_dir / "config.json").is_file():
        raise ConfigError(
            f"{key}: {model_dir} has no config.json; give a Hugging Face model directory"
        )


def refuse_media(request: GenerateRequest) -> None:
    """BadAnswer if there are media in the prompt: of engines that take none yet."""
    if request.media:
        raise BadAnswer(
            "unsupported",
            f"{len(request.media)} media in the prompt of an engine that takes text alone",
        )


def checked(generation: Generation, budget: int) -> Generation:
    """`generation` itself. BadAnswer: its counts or log-probabilities cannot be."""
    tokens, logprobs, versions = map(
        len, (generation.token_ids, generation.logprobs, generation.token_versions)
    )
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
