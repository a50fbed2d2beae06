"""A request for one response, and the response: types that tasks, episodes and engines share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from relax_hpc.data.media import PromptMedium

FinishReason = Literal[
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
"""Reason for the end of a response or an episode; `partial`: it has not ended yet."""
CUT_REASONS: frozenset[str] = frozenset(
    ("length", "turn_budget", "sampled_budget", "episode_budget")
)
"""Reasons for which a response ended before the policy chose to end it."""
NO_EXTRAS: Mapping[str, Sequence[np.ndarray]] = MappingProxyType({})


@dataclass(slots=True, frozen=True)
class Sampling:
    """Settings by which the tokens of a response are sampled."""

    temperature: float
    """Sampling temperature; 0: the most probable token."""
    top_p: float
    stop_token_ids: tuple[int, ...]
    """Tokens that end the response and belong to it; the end tokens of the model count too."""
    seed: int
    """Seed for engines that can reproduce a sample; SGLang's CPU backends cannot."""
    stop: tuple[str, ...] = ()
    """Texts that end a response. Generation stops after the token that completes a text; that
    token belongs to the response."""
    top_k: int = 0
    """Sample from this number of most probable tokens; 0: from all."""
    min_p: float = 0.0
    """A token must have at least this share of the most probable token's probability."""
    is_trained: bool = True
    """Whether the log-probabilities are trained on. If not, an engine may return those before
    top_k, top_p and min_p are applied."""

    @property
    def is_cut(self) -> bool:
        """Whether top_k, top_p or min_p exclude a part of the vocabulary."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


@dataclass(slots=True)
class Generation:
    """One response: three entries a token, the first token after the prompt at index 0."""

    token_ids: list[int]
    logprobs: list[float]
    """Log-probabilities in nats under the distribution that the token was sampled from: at the
    sampling temperature (at 1 if that is 0), renormalized if a part of the vocabulary was
    excluded."""
    token_versions: np.ndarray
    """int32 [tokens]: `Version.encode()` of the weights that sampled each token. 0: the token was
    not sampled, for example the text of a tool between turns; its log-probability is 0."""
    finish_reason: FinishReason
    extras: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Further values of each token by the engine: name -> [tokens, ...]. Values that the class of
    the engine or `relax_hpc.base.fields` declares go into the queue under their name; others are
    discarded."""
    before: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Values of the tokens in the request: name -> [tokens of the request, ...]. Without them, the
    `pad` of the field is stored."""
    cached: int | None = None
    """Tokens of the request whose keys and values the engine had in its cache; None: it does not
    report them."""

    def concat_turns(self, between: Sequence[int], answer: Generation) -> Generation:
        """One response of several turns: this one, the tokens ``between`` (of a tool or a user),
        and the ``answer`` to all of them.

        An engine knows the values of a token when it first reads it. The values of this response's
        last token and of the tokens in between therefore come from ``answer.before``.
        """
        not_sampled = np.zeros(len(between), np.int32)
        count = len(between) + 1
        extras = {}
        for name, values in self.extras.items():
            if name in answer.extras and name in answer.before:
                read_later = answer.before[name][-count:]
                extras[name] = np.concatenate([values[:-1], read_later, answer.extras[name]])
        return Generation(
            [*self.token_ids, *between, *answer.token_ids],
            [*self.logprobs, *[0.0] * len(between), *answer.logprobs],
            np.concatenate([self.token_versions, not_sampled, answer.token_versions]),
            answer.finish_reason,
            extras,
            self.before,
        )

    going_on = concat_turns  # Name in release 0.1.


@dataclass(frozen=True, slots=True)
class EpisodeRow:
    """One training sequence of an episode: its prompt, and all tokens after it."""

    prompt: Sequence[int]
    """The tokens that the policy was given at the beginning of the row."""
    generation: Generation
    media: tuple[PromptMedium, ...] | None = None
    """Stored media whose placeholders are in the row, in their order. None: the media of the
    ticket's prompt, if the row begins with that prompt."""
    turns: tuple[int, ...] | None = None
    """Ends of the turns, counted in tokens after the prompt. None: the row was not played against
    an environment."""

    @property
    def made(self) -> Generation:
        """The generation."""
        return self.generation  # Name in release 0.1.


@dataclass(frozen=True, slots=True)
class Episode:
    """One attempt at a prompt that needs several rows, because its history was compacted or
    branched, or that was played against an environment."""

    rows: Sequence[EpisodeRow]
    """The rows in their order, at least one. An episode with one row that begins with the ticket's
    prompt may be a `Generation` instead."""
    outcome: Mapping[str, Any] | None = None
    """Result of the environment for the whole episode: `info`, `reward`, and the number of the
    `row` in which it ended. None: there was no environment, or the episode has not ended."""

    @property
    def finish_reason(self) -> FinishReason:
        """`abort` if a row has that reason, else the reason of the last row."""
        reasons = [row.generation.finish_reason for row in self.rows]
        return "abort" if "abort" in reasons else reasons[-1]


@dataclass(slots=True)
class Draft:
    """The response so far, while an engine adds to it. Any thread may read it."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    token_versions: list[int] = field(default_factory=list)
    extras: dict[str, list[np.ndarray]] = field(default_factory=dict)
    """Further values by name, one entry a token, from an engine that gives them while it samples.
    They may be shorter than the tokens: the engine has not read the last token of a turn and the
    observation after it yet. It gives their values together with the next tokens that it adds."""
    before: Mapping[str, np.ndarray] = field(default_factory=dict)
    """See `Generation.before`."""
    ended: Generation | Episode | None = None
    """The whole response, or the episode that a task made of several responses."""

    @classmethod
    def from_response(cls, response: Generation | Episode) -> Draft:
        """A draft with all tokens of ``response``. An `Episode` is only stored in `ended`."""
        if isinstance(response, Episode):
            return cls(ended=response)
        return cls(
            list(response.token_ids),
            list(response.logprobs),
            response.token_versions.tolist(),
            {name: list(values) for name, values in response.extras.items()},
            response.before,
            None if response.finish_reason == "partial" else response,
        )

    @classmethod
    def after_turn(cls, turn: Generation) -> Draft:
        """Draft of an episode that continues after a ``turn``."""
        draft = cls.from_response(turn)
        draft.ended = None
        return draft

    def append_observation(self, token_ids: Sequence[int]) -> None:
        """Append the tokens of an observation after a turn. The engine has not processed the last
        token of the turn yet, so the extras of that token arrive with those of the observation."""
        count = max(0, len(self.token_versions) - 1)
        self.extras = {name: values[:count] for name, values in self.extras.items()}
        self.add(token_ids, [0.0] * len(token_ids), [0] * len(token_ids))

    def add(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        versions: Sequence[int],
        extras: Mapping[str, Sequence[np.ndarray]] = NO_EXTRAS,
    ) -> None:
        """Append tokens that do not end the response. ``extras`` are the values of these tokens,
        if the engine knows them before the end of the response."""
        for name, values in extras.items():
            self.extras.setdefault(name, []).extend(values)
        self.token_ids += token_ids
        self.logprobs += logprobs
        # Last, because readers in other threads take the length of the draft from the versions.
        self.token_versions += versions

    @property
    def turn_start(self) -> int:
        """Index of the first token of the present turn: the one after the last observation."""
        for index in range(len(self.token_versions), 0, -1):
            if not self.token_versions[index - 1]:
                return index
        return 0

    def snapshot(self) -> Generation | Episode:
        """The whole response if it has ended, else a copy of all tokens so far."""
        return self.ended or self.partial()

    def partial(self) -> Generation:
        """Copy of all tokens so far, as a response that has not ended."""
        return self._slice(0, len(self.token_versions))

    def fresh_copy(self) -> Draft:
        """Copy to continue from, as if the response had not ended. An engine that has failed may
        still add tokens to the original."""
        return Draft.from_response(self.partial())

    def suffix(self, start: int) -> Generation:
        """Copy of one response without its first ``start`` tokens, up to the last token whose
        extras are all known."""
        ended = self.ended
        if not isinstance(ended, Generation):
            return self.partial_suffix(start)
        return Generation(
            ended.token_ids[start:],
            ended.logprobs[start:],
            ended.token_versions[start:],
            ended.finish_reason,
            {name: values[start:] for name, values in ended.extras.items()},
            {} if start else ended.before,
        )

    def partial_suffix(self, start: int) -> Generation:
        """The same, as if the response had not ended: it may be a turn of an episode that
        continues."""
        counts = [len(values) for values in self.extras.values()]
        return self._slice(start, min([len(self.token_versions), *counts]))

    def _slice(self, start: int, stop: int) -> Generation:
        extras = {
            name: np.array(values[start:stop])
            for name, values in self.extras.items()
            if len(values) > start
        }
        return Generation(
            self.token_ids[start:stop],
            self.logprobs[start:stop],
            np.array(self.token_versions[start:stop], np.int32),
            "partial",
            extras,
            {} if start else self.before,
        )

    # Names in release 0.1.
    so_far = snapshot
    since = suffix


@dataclass(slots=True, frozen=True)
class GenerateRequest:
    """A request for one response. (sampling.seed, prompt_id, sample, position) is the key of each
    random number of an engine that is seeded."""

    prompt_ids: tuple[int, ...]
    prompt_id: str
    sample: int
    sampling: Sampling
    budget: int
    """Most tokens of the response, including those of the draft."""
    media: tuple[PromptMedium, ...] = ()
    """Stored media whose placeholders are in the prompt, in their order."""
    session: str = ""
    """Session of the request. An engine may keep the keys and values of a session, because each of
    its requests begins with the tokens of an earlier one. Empty: none."""
    draft: Draft | None = field(default=None, compare=False)
    """Response so far. The engine continues it, adds tokens that are final, and stores the whole
    response in `Draft.ended` at the end."""

    @property
    def context_ids(self) -> tuple[int, ...]:
        """The prompt, followed by the tokens of the response so far."""
        return (*self.prompt_ids, *(self.draft.token_ids if self.draft else ()))

    @property
    def so_far(self) -> tuple[int, ...]:
        """See `context_ids`."""
        return self.context_ids  # Name in release 0.1.
