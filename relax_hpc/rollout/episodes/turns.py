"""The turns of an episode: the policy generates, its environment answers, until one of them or a
budget ends the episode.

A request contains the tokens of a row so far, and the sampled tokens are never tokenized again. An
observation is tokenized once, by `TurnTokenizer`, and has version 0. The environment gets each
response, including the last one.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

from relax_hpc.base.errors import RefusedError
from relax_hpc.config.schema import EnvironmentConfig
from relax_hpc.data.generation import (
    Draft,
    Episode,
    FinishReason,
    GenerateRequest,
    Generation,
    Sampling,
)
from relax_hpc.data.media import PromptMedium
from relax_hpc.data.prompts import Prompt
from relax_hpc.data.tokenizer import Tokenizer
from relax_hpc.environments.base import (
    Beginning,
    Context,
    EnvironmentFault,
    MediaPart,
    Message,
    Response,
    Step,
)
from relax_hpc.queue.row_ids import MAX_ROWS
from relax_hpc.rollout.engines.engine import BadAnswer
from relax_hpc.rollout.episodes.history import POLICY_ROLE, History, OpenRow
from relax_hpc.rollout.episodes.observed_media import ObservedMedia
from relax_hpc.rollout.episodes.play import EngineRetry
from relax_hpc.rollout.episodes.recorded_episode import RecordedEpisode
from relax_hpc.rollout.episodes.turn_budget import turn_budget
from relax_hpc.rollout.episodes.turn_tokens import TurnTokenizer
from relax_hpc.rollout.media import UNUSABLE
from relax_hpc.rollout.rows import TAIL, begins_in_thought, turn_text

Ask = Callable[[GenerateRequest], Awaitable[Generation | BadAnswer]]
"""Lets the engine continue the draft of a request. EngineRetry: the engine has failed."""


class EnvironmentSession(Protocol):
    """An open environment, see `relax_hpc.environments.host`."""

    opening: tuple[Message, ...]

    async def step(self, response: Response) -> tuple[Step, tuple[Message, ...]]: ...


@dataclass(frozen=True, slots=True)
class TurnRules:
    """Rules for all episodes of a process."""

    turn_tokenizer: TurnTokenizer
    tokenizer: Tokenizer
    limits: EnvironmentConfig
    media: ObservedMedia | None = None
    """Media of observations; None: the model takes text only."""


@dataclass(frozen=True, slots=True)
class EpisodeStart:
    """Start of an episode: its prompt, and the engine that is asked."""

    prompt: Prompt
    request: GenerateRequest
    """Request of the first turn, without a draft. Its budget is the budget of each row."""
    ask: Ask
    ticket: int | None = None
    """Ticket under which media are stored; None: the episode is an evaluation."""
    asks_again: bool = True
    """Whether the engine is asked again after it has failed."""
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext
    """Context of waits that do not count for the time limit of the episode, for example for a free
    environment."""

    @property
    def beginning(self) -> Beginning:
        """The beginning of the episode for its environment."""
        prompt, request = self.prompt, self.request
        media = tuple(MediaPart(medium.kind.value, medium.source) for medium in prompt.media)
        seed = zlib.crc32(f"{request.sampling.seed}/{request.prompt_id}/{request.sample}".encode())
        return Beginning(prompt.text, prompt.answer, prompt.metadata, media, seed, request.sample)

    async def draw_turn(
        self, row: OpenRow, budget: int, sampling: Sampling | None = None
    ) -> Generation:
        """All tokens of ``row`` after its prompt, at most ``budget``, with a new turn from the
        engine. ``sampling``: other settings than those of the request. BadAnswer: the response
        cannot be used. EngineRetry: the engine has failed, and is not asked again."""
        request = replace(
            self.request,
            prompt_ids=row.prompt,
            session=f"{self.request.prompt_id}/{self.request.sample}",
            media=row.media,
            budget=budget,
            sampling=sampling or self.request.sampling,
        )
        while True:
            row.draft = row.draft.fresh_copy()
            try:
                answer = await self.ask(replace(request, draft=row.draft))
            except EngineRetry:
                if not self.asks_again:
                    raise
                continue
            if isinstance(answer, BadAnswer):
                raise answer
            return answer


Start = EpisodeStart  # Name in release 0.1.


class EpisodeTurns:
    """The turns of one episode."""

    def __init__(self, rules: TurnRules, start: EpisodeStart, history: History) -> None:
        """Turns in ``history`` are used without change, and its observations are compared with
        those of the environment."""
        self.rules, self.start, self.history = rules, start, history
        self.recorded = RecordedEpisode(history.rows)
        self.rows: list[OpenRow] = []
        history.rows = self.rows
        self.row_by_context: dict[str, OpenRow] = {}
        """Rows by the names of their contexts."""
        self.sampled = 0
        """Sampled tokens of all rows."""
        self.outcome: dict[str, Any] = {"info": {}, "reward": None}

    async def play(self, session: EnvironmentSession) -> Episode:
        """Play to the end. EnvironmentFault: the environment has failed. BadAnswer: of the engine.
        EngineRetry: as `EpisodeStart.ask`."""
        row = await self._open(session)
        for number in itertools.count():
            begin = row.length
            ended = await self._generate_turn(row)
            if ended == "abort":
                break
            response = self._response(row, begin, is_cut=ended is not None, number=number)
            step, messages = await session.step(response)
            self._add_outcome(step)
            if step.done:
                ended = ended or "env_done"
            elif number + 1 == self.rules.limits.max_turns:
                ended = ended or "max_turns"
            if not ended:
                row, ended = await self._add_answer(row, step.context, messages)
            if ended:
                break
        assert ended, "the loop ends with a reason"
        self.recorded.check_end(self.rows)
        return self.history.end(ended, row, self.outcome)

    async def _open(self, session: EnvironmentSession) -> OpenRow:
        """The first row, with the opening of the environment."""
        row = OpenRow(self.start.request.prompt_ids, media=self.start.request.media)
        if not session.opening:
            self._add_row(row, "")
            return row
        limit = await self._add_messages(row, session.opening, "")
        if limit:
            raise EnvironmentFault(
                "environment_answer",
                f"the prompt and the environment's opening leave no tokens for a turn ({limit}); "
                "raise rollout.max_new_tokens or data.max_row_tokens",
            )
        return row

    def _response(self, row: OpenRow, begin: int, is_cut: bool, number: int) -> Response:
        """The turn that begins ``begin`` tokens after the prompt, for the environment."""
        tokenizer = self.rules.tokenizer
        text = turn_text(row.draft.token_ids[begin:], tokenizer)
        before = [*row.prompt[-TAIL:], *row.draft.token_ids[max(0, begin - TAIL) : begin]]
        in_thought = begins_in_thought(before, tokenizer)
        return Response(text, "length" if is_cut else "stop", number, in_thought)

    def _add_outcome(self, step: Step) -> None:
        self.outcome["info"] |= step.info
        if step.reward is not None:
            self.outcome["reward"] = step.reward

    def _add_row(self, row: OpenRow, context: str) -> None:
        if len(self.rows) == MAX_ROWS:
            raise EnvironmentFault(
                "environment_answer", f"found more than {MAX_ROWS} contexts in an episode"
            )
        self.rows.append(row)
        self.row_by_context[context] = row

    # -- turns of the policy -----------------------------------------------------------------------

    async def _generate_turn(self, row: OpenRow) -> FinishReason | None:
        """Add a turn to ``row``, from the log or from the engine. Returns the reason if the episode
        ends with this turn."""
        begin, (budget, limit) = row.length, self._turn_budget(row, row.length)
        recorded = self.recorded.completed_turn(self.rows.index(row), begin)
        if recorded:
            has_end_token = recorded.token_ids[-1] in self.rules.tokenizer.eos_ids
            is_cut = len(recorded.token_ids) == begin + budget and not has_end_token
            row.draft, is_aborted = recorded, False
        else:
            answer = await self._draw_turn(row, begin + budget)
            row.draft = Draft.after_turn(answer)
            is_cut = answer.finish_reason == "length"
            is_aborted = answer.finish_reason == "abort"
        row.turns.append(row.length)
        row.roles.append(POLICY_ROLE)
        self.sampled += row.length - begin
        if is_aborted:
            return "abort"
        return limit if is_cut else None

    async def _draw_turn(self, row: OpenRow, budget: int) -> Generation:
        """All of ``row``, with a new turn from the engine."""
        unfinished = self.recorded.unfinished_turn(self.rows.index(row), row.length)
        row.draft = unfinished or row.draft
        self.recorded.check_end(self.rows)
        return await self.start.draw_turn(row, budget)

    def _turn_budget(self, row: OpenRow, length: int) -> tuple[int, FinishReason]:
        """Most tokens of a turn that begins ``length`` tokens after the prompt of ``row``, and the
        limit that applies."""
        request = self.start.request
        other_tokens = sum(other.length for other in self.rows if other is not row)
        # The prompt of a branch contains turns, which count for the budget of its row. They are
        # also in the row that it branched from.
        inherited = max(0, len(row.prompt) - len(request.prompt_ids))
        return turn_budget(
            self.rules.limits,
            request.budget,
            inherited + length,
            other_tokens - inherited,
            self.sampled,
        )

    # -- answers of the environment ----------------------------------------------------------------

    async def _add_answer(
        self, row: OpenRow, context: Context | None, messages: Sequence[Message]
    ) -> tuple[OpenRow, FinishReason | None]:
        """The row in which the policy continues after ``row``, and the reason if the episode ends
        instead."""
        if not messages:
            raise EnvironmentFault(
                "environment_answer", "found no message, though it is not done; say something"
            )
        if context is None:
            return row, await self._add_messages(row, messages)
        target = self.row_by_context.get(context.name) or self._branch(row, context.turns)
        ended = await self._add_messages(target, messages, context.name)
        return (row if ended else target), ended

    def _branch(self, row: OpenRow, turns: int) -> OpenRow:
        """A new row that begins with the first ``turns`` of ``row``."""
        if not turns:
            return OpenRow(self.start.request.prompt_ids, media=self.start.request.media)
        if turns > len(row.turns):
            raise EnvironmentFault(
                "environment_answer",
                f"found a context of {turns} turns, allowed: up to {len(row.turns)}",
            )
        prompt = (*row.prompt, *row.draft.token_ids[: row.turns[turns - 1]])
        media = tuple(medium for medium in row.media if medium.spans[-1][0] < len(prompt))
        # Count from the end: if `row` is a branch too, `row.turns` does not have the turns in its
        # prompt, but `row.roles` has them.
        left_out = len(row.turns) - turns
        policy_roles = [number for number, role in enumerate(row.roles) if role == POLICY_ROLE]
        last_role = policy_roles[len(policy_roles) - left_out - 1]
        return OpenRow(prompt, media=media, roles=row.roles[: last_role + 1])

    async def _add_messages(
        self, row: OpenRow, messages: Sequence[Message], context: str | None = None
    ) -> FinishReason | None:
        """Add ``messages`` to ``row``. A new row is added to the episode under the name
        ``context``. Returns the reason if there is no budget for an answer; then no message is
        added."""
        before = [*row.prompt, *row.draft.token_ids]
        roles = row.roles[:-1] if row.roles[-1] == POLICY_ROLE else row.roles
        kept, ids = self.rules.turn_tokenizer.tokens(before, messages, not row.length, roles)
        if kept < len(row.prompt):
            row.prompt = row.prompt[:kept]
        media_parts: list[MediaPart] = []
        for message in messages:
            media_parts += [piece for piece in message.parts if isinstance(piece, MediaPart)]
        ids, media = await self._expand_media(ids, media_parts)
        budget, limit = self._turn_budget(row, row.length + len(ids))
        if budget <= 0:
            return limit
        if row not in self.rows:
            self._add_row(row, context or "")
        self.recorded.compare(self.rows.index(row), row, ids)
        row_tokens = len(row.prompt) + row.length
        row.media += tuple(medium.shifted(row_tokens) for medium in media)
        row.draft.append_observation(ids)
        row.roles += [message.role for message in messages]
        return None

    async def _expand_media(
        self, ids: list[int], media_parts: Sequence[MediaPart]
    ) -> tuple[list[int], tuple[PromptMedium, ...]]:
        if not media_parts:
            return ids, ()
        assert self.rules.media, "the turn tokenizer accepts only media that the model takes"
        try:
            return await self.rules.media.expand(self.start.ticket, ids, media_parts)
        except (*UNUSABLE, RefusedError) as bad:
            # RefusedError: the prompt group has too many media.
            raise EnvironmentFault("environment_answer", str(bad)) from bad
