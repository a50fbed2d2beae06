"""One play of an episode of several turns: the policy speaks, its environment answers, until one of
them or a budget ends it.

Tokens in, tokens out: a request is all of a row so far, and what its engine draws stays as it is.
What others say is tokenised once, by `Bridge`, and has version 0. The environment is told of each
response, the last one included.
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
from relax_hpc.rollout.engines.engine import (
    BadAnswer,
    Draft,
    Episode,
    FinishReason,
    GenerateRequest,
    Generation,
    Sampling,
)
from relax_hpc.rollout.episodes.history import POLICY_ROLE, History, OpenRow
from relax_hpc.rollout.episodes.observed_media import ObservedMedia
from relax_hpc.rollout.episodes.play import Repeat
from relax_hpc.rollout.episodes.recorded_episode import Tape
from relax_hpc.rollout.episodes.turn_budget import room
from relax_hpc.rollout.episodes.turn_tokens import Bridge
from relax_hpc.rollout.media import UNUSABLE
from relax_hpc.rollout.samples import TAIL, begins_in_thought, turn_text

Ask = Callable[[GenerateRequest], Awaitable[Generation | BadAnswer]]
"""Has the engine go on with the draft of a request. Repeat: it failed."""
Placed = tuple[list[int], tuple[PromptMedium, ...]]
"""Tokens, and the media with places in them."""


class Session(Protocol):
    """An environment that is open, see `relax_hpc.environments.host`."""

    opening: tuple[Message, ...]

    async def step(self, response: Response) -> tuple[Step, tuple[Message, ...]]: ...


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules by which all episodes of a process are played."""

    bridge: Bridge
    tokenizer: Tokenizer
    limits: EnvironmentConfig
    media: ObservedMedia | None = None
    """Media of messages; None: the model takes text alone."""


@dataclass(frozen=True, slots=True)
class Start:
    """Beginning of one episode, and whom it asks."""

    prompt: Prompt
    request: GenerateRequest
    """Request for its first turn, without a draft; its budget is that of each row."""
    ask: Ask
    ticket: int | None = None
    """Ticket whose media are stored; None: of an evaluation."""
    asks_again: bool = True
    """Whether the engine is asked again where it failed."""
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext
    """Context of waits, such as for a place among environments, that are no time of the episode's
    own."""

    @property
    def beginning(self) -> Beginning:
        """The same for the environment."""
        prompt, request = self.prompt, self.request
        media = tuple(MediaPart(medium.kind.value, medium.source) for medium in prompt.media)
        seed = zlib.crc32(f"{request.sampling.seed}/{request.prompt_id}/{request.sample}".encode())
        return Beginning(prompt.text, prompt.answer, prompt.metadata, media, seed, request.sample)

    async def draw_turn(
        self, row: OpenRow, budget: int, sampling: Sampling | None = None
    ) -> Generation:
        """All of ``row``, at most ``budget`` tokens behind its prompt, with a turn that the engine
        has drawn, by ``sampling`` if that is another. BadAnswer: it is none. Repeat: the engine
        failed, and is not asked again."""
        session = f"{self.request.prompt_id}/{self.request.sample}"
        about = {
            "media": row.media,
            "budget": budget,
            "sampling": sampling or self.request.sampling,
        }
        request = replace(self.request, prompt_ids=row.prompt, session=session, **about)
        while True:
            row.draft = row.draft.fresh_copy()
            try:
                answer = await self.ask(replace(request, draft=row.draft))
            except Repeat:
                if not self.asks_again:
                    raise
                continue
            if isinstance(answer, BadAnswer):
                raise answer
            return answer


class Turns:
    """Turns of one episode."""

    def __init__(self, rules: Rules, start: Start, history: History) -> None:
        """Turns that ``history`` has are taken as they are, and what others said then is
        compared."""
        self.rules, self.start, self.history = rules, start, history
        self.tape = Tape(history.rows)
        history.rows = self.rows = []
        self.names: dict[str, OpenRow] = {}
        """Rows by the names of their contexts."""
        self.sampled = 0
        self.outcome: dict[str, Any] = {"info": {}, "reward": None}

    async def through(self, session: Session) -> Episode:
        """Play to the end. EnvironmentFault: it came to none. BadAnswer: of the engine. Repeat: as
        `Start.ask`."""
        row = OpenRow(self.start.request.prompt_ids, media=self.start.request.media)
        if not session.opening:
            self._add(row, "")
        elif limit := await self._hear(row, session.opening, ""):
            raise EnvironmentFault(
                "environment_answer", f"its opening leaves no room for a turn ({limit})"
            )
        for number in itertools.count():
            begun = row.length
            ended = await self._speak(row)
            if ended == "abort":
                break
            text = turn_text(row.draft.token_ids[begun:], self.rules.tokenizer)
            before = [*row.prompt[-TAIL:], *row.draft.token_ids[max(0, begun - TAIL) : begun]]
            in_thought = begins_in_thought(before, self.rules.tokenizer)
            step, messages = await session.step(
                Response(text, "length" if ended else "stop", number, in_thought)
            )
            self._note(step)
            if step.done:
                ended = ended or "env_done"
            elif number + 1 == self.rules.limits.max_turns:
                ended = ended or "max_turns"
            if not ended:
                row, ended = await self._answered(row, step.context, messages)
            if ended:
                break
        self.tape.check_over(self.rows)
        return self.history.end(ended, row, self.outcome)

    def _note(self, step: Step) -> None:
        self.outcome["info"] |= step.info
        if step.reward is not None:
            self.outcome["reward"] = step.reward

    def _add(self, row: OpenRow, name: str) -> None:
        if len(self.rows) == MAX_ROWS:
            raise EnvironmentFault(
                "environment_answer", f"found more than {MAX_ROWS} contexts in an episode"
            )
        self.rows.append(row)
        self.names[name] = row

    # -- the policy speaks -------------------------------------------------------------------------

    async def _speak(self, row: OpenRow) -> FinishReason | None:
        """Add a turn to ``row``, from the tape or by the engine; why the episode ends with it, if
        it does."""
        begun, (room, limit) = row.length, self._room(row, row.length)
        if turn := self.tape.turn(self.rows.index(row), begun):
            last = turn.token_ids[-1]
            is_cut = (
                len(turn.token_ids) == begun + room and last not in self.rules.tokenizer.eos_ids
            )
            row.draft, finish = turn, "length" if is_cut else "stop"
        else:
            answer = await self._drawn(row, begun + room)
            row.draft, finish = Draft.after_turn(answer), answer.finish_reason
        row.turns.append(row.length)
        row.roles.append(POLICY_ROLE)
        self.sampled += row.length - begun
        return {"length": limit, "abort": "abort"}.get(finish)

    async def _drawn(self, row: OpenRow, budget: int) -> Generation:
        """All of ``row``, with a turn that the engine has drawn."""
        row.draft = self.tape.rest(self.rows.index(row), row.length) or row.draft
        self.tape.check_over(self.rows)
        return await self.start.draw_turn(row, budget)

    def _room(self, row: OpenRow, length: int) -> tuple[int, FinishReason]:
        """Tokens that a turn may have that begins ``length`` tokens behind the prompt of ``row``,
        and what limits it."""
        request, others = self.start.request, sum(one.length for one in self.rows if one is not row)
        # A branch has turns in its prompt, for which the row has to have room too.
        turns = max(0, len(row.prompt) - len(request.prompt_ids))
        return room(self.rules.limits, request.budget, turns + length, others - turns, self.sampled)

    # -- the environment answers -------------------------------------------------------------------

    async def _answered(
        self, row: OpenRow, context: Context | None, messages: Sequence[Message]
    ) -> tuple[OpenRow, FinishReason | None]:
        """The row in which the policy goes on after ``row``, and why the episode ends instead, if
        it does."""
        if not messages:
            raise EnvironmentFault(
                "environment_answer", "found no message, though it is not done; say something"
            )
        if context is None:
            return row, await self._hear(row, messages)
        target = self.names.get(context.name) or self._begun(row, context.turns)
        ended = await self._hear(target, messages, context.name)
        return (row if ended else target), ended

    def _begun(self, row: OpenRow, turns: int) -> OpenRow:
        """A row that begins with the first ``turns`` of ``row``."""
        if not turns:
            return OpenRow(self.start.request.prompt_ids, media=self.start.request.media)
        if turns > len(row.turns):
            raise EnvironmentFault(
                "environment_answer",
                f"found a context of {turns} turns, allowed: up to {len(row.turns)}",
            )
        prompt = (*row.prompt, *row.draft.token_ids[: row.turns[turns - 1]])
        media = (medium for medium in row.media if medium.spans[-1][0] < len(prompt))
        # A branch of a branch has turns in its prompt, which are not among those of its row.
        later = len(row.turns) - turns
        ends = [number for number, role in enumerate(row.roles) if role == POLICY_ROLE]
        return OpenRow(
            prompt, media=tuple(media), roles=row.roles[: ends[len(ends) - later - 1] + 1]
        )

    async def _placed(self, heard: list[int], parts: Sequence[MediaPart]) -> Placed:
        if not parts:
            return heard, ()
        # The bridge has found places for them.
        assert self.rules.media
        try:
            return await self.rules.media.placed(self.start.ticket, heard, parts)
        except (*UNUSABLE, RefusedError) as bad:
            # Refused: the prompt group has too many.
            raise EnvironmentFault("environment_answer", str(bad)) from bad

    async def _hear(
        self, row: OpenRow, messages: Sequence[Message], name: str | None = None
    ) -> FinishReason | None:
        """Add ``messages`` to ``row``, which is one of the episode's then, by ``name`` if it was
        not; why the episode ends instead, if there is no room for an answer."""
        before = [*row.prompt, *row.draft.token_ids]
        roles = row.roles[:-1] if row.roles[-1] == POLICY_ROLE else row.roles
        kept, heard = self.rules.bridge.tokens(before, messages, not row.length, roles)
        if kept < len(row.prompt):
            row.prompt = row.prompt[:kept]
        parts = [
            part for message in messages for part in message.parts if isinstance(part, MediaPart)
        ]
        heard, media = await self._placed(heard, parts)
        room, limit = self._room(row, row.length + len(heard))
        if room <= 0:
            return limit
        if row not in self.rows:
            self._add(row, name or "")
        self.tape.compare(self.rows.index(row), row, heard)
        places = len(row.prompt) + row.length
        row.media += tuple(medium.shifted(places) for medium in media)
        row.draft.append_observation(heard)
        row.roles += [message.role for message in messages]
        return None
