"""A session: what the program of an episode asks, answered by the engine, and kept as rows that grow turn by turn.

A request has the whole chat each time. The longest part of it that ends with an answer of this session is known by its
tokens, and what is new behind that is all that is made into tokens. Its row goes on; where it has gone on already, or
is just drawn, a row begins that has the same history for its prompt. So nothing is trained on twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from relax_hpc.data.chat import TemplateError
from relax_hpc.data.tokenizer import Tokenizer
from relax_hpc.engines.engine import BadAnswer, Draft, Ended
from relax_hpc.engines.stops import with_stops
from relax_hpc.gateway.exchange import Gone
from relax_hpc.gateway.front import Reply
from relax_hpc.rollout.agents.answers import MODEL, Answer
from relax_hpc.rollout.agents.bounds import Bounds
from relax_hpc.rollout.agents.chat import ChatRequest, Message, Refused, read_object
from relax_hpc.rollout.agents.dialects import DIALECTS
from relax_hpc.rollout.agents.dialects.responses import name_of
from relax_hpc.rollout.agents.recorded import Recorded
from relax_hpc.rollout.agents.rendering import Renderer, Tools
from relax_hpc.rollout.history import History, OpenRow
from relax_hpc.rollout.turns import Start

MODELS = "/v1/models"
_MODELS = json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "run"}]}).encode()
_MOST_REFUSED = 32
"""Requests of a program that may be refused: one that goes on asking would do so for ever."""


@dataclass(frozen=True, slots=True)
class _Point:
    """End of an answer in a row."""

    row: OpenRow
    length: int
    """Tokens of the row up to there, behind its prompt."""

    @property
    def is_end(self) -> bool:
        """Whether the row ends there."""
        return self.row.length == self.length

    @property
    def tokens(self) -> list[int]:
        """Tokens of the row up to there, which stay as they are."""
        return [*self.row.prompt, *self.row.draft.token_ids[: self.length]]


class Session:
    """One episode's; for one event loop."""

    def __init__(
        self,
        start: Start,
        history: History,
        renderer: Renderer,
        tokenizer: Tokenizer,
        bounds: Bounds,
        count: Callable[[str], None],
    ) -> None:
        """``history``: what a log has of the episode, which is there to be asked for again. ``count`` is called with
        the reason of each request that is refused."""
        self._start, self._history, self._bounds = start, history, bounds
        self._renderer, self._tokenizer, self._count = renderer, tokenizer, count
        self._recorded, history.rows = Recorded(history.rows), []
        self._points: dict[str, _Point] = {}
        """Ends of answers, by the chat up to there."""
        self._drawing: list[OpenRow] = []
        """Rows in which an answer is just being drawn."""
        self._chats: dict[str, list[Message]] = {}
        """Chats so far, each by the name of its last answer."""
        self._replies: dict[bytes, asyncio.Future[Reply]] = {}
        """Replies by path and body: a client that has lost one asks again."""
        self.refused: Counter[str] = Counter()
        """Requests that were not answered, by reason."""
        self.error: Exception | None = None
        """Error because of which there is no answer: of the engine, or of whoever asks it."""
        self.last: OpenRow | None = None
        """Row of the newest answer."""
        self._cut: Ended | None = None
        """Bound that has cut the newest answer."""
        self.over = asyncio.Event()
        """Event that is set when nothing will be answered any more."""

    async def reply(self, path: str, body: bytes, repeats: int) -> Reply:
        """Reply to a request; to one that its client ``repeats``, the same. Gone: the episode has ended."""
        key = hashlib.sha256(path.encode() + b"\n" + body).digest()
        if not repeats or key not in self._replies:
            self._replies[key] = asyncio.ensure_future(self._reply(path, body))
        reply = self._replies[key]
        await asyncio.wait([reply])
        if reply.cancelled():
            raise Gone("the episode has ended")
        return reply.result()

    @property
    def reason(self) -> Ended:
        """Reason why the episode has ended, if its program has."""
        return self._bounds.met or self._cut or "env_done"

    async def close(self) -> None:
        """Answer nobody any more; nothing is added to rows then."""
        for reply in self._replies.values():
            reply.cancel()
        await asyncio.gather(*self._replies.values(), return_exceptions=True)

    async def _reply(self, path: str, body: bytes) -> Reply:
        try:
            if path == MODELS:
                return Reply(200, _MODELS)
            if not (dialect := DIALECTS.get(path)):
                raise Refused(404, "unknown_path", f"found {path!r}, allowed: {', '.join([*DIALECTS, MODELS])}")
            request = dialect.parse(read_object(body), self._chats)
            answer = await self._answer(request)
            self._chats[name_of(answer)] = [*request.messages[request.apart :], answer.message]
            return dialect.reply(request, answer)
        except Refused as refused:
            self.refused[refused.code] += 1
            self._count(refused.code)
            if self.refused.total() >= _MOST_REFUSED:
                self.over.set()
            return Reply.error(refused.status, refused.code, refused.detail)
        except Exception as error:  # whoever plays the episode is to hear of it
            self.error = self.error or error
            self.over.set()
            return Reply.error(500, "no_answer", "the episode has ended, as there is no answer")

    async def _answer(self, request: ChatRequest) -> Answer:
        keys = _keys(request.messages, request.tools)
        point, tokens = await asyncio.to_thread(self._tokens, request, keys)
        if goes_on := bool(point and point.is_end and not any(point.row is one for one in self._drawing)):
            row = point.row
        else:
            row = OpenRow(tuple(tokens))
        number = self._bounds.asked
        room, limit = self._bounds.next_turn(self._history.rows, row, len(tokens))
        if not goes_on:
            self._history.rows.append(row)
        self._drawing.append(row)
        try:
            if not self._known(row, tokens):
                await self._draw(
                    row, len(tokens) - len(row.prompt) + min(room, request.max_tokens or room), request.stop
                )
        finally:
            self._drawing.remove(row)
        row.turns.append(row.length)
        self.last = row
        turn = row.draft.token_ids[len(tokens) - len(row.prompt) :]
        answer = Answer.of(number, turn, len(tokens), request, self._tokenizer)
        self._cut = limit if answer.is_cut and len(turn) == room else None
        self._points[_key(keys[-1], answer.message)] = _Point(row, row.length)
        return answer

    def _tokens(self, request: ChatRequest, keys: Sequence[str]) -> tuple[_Point | None, list[int]]:
        """Tokens of a whole chat, up to where the policy speaks, and the last answer in it. Refused."""
        known = (count for count in range(len(keys) - 1, 0, -1) if keys[count - 1] in self._points)
        try:
            if count := next(known, 0):
                point = self._points[keys[count - 1]]
                # If not, it shows the policy something else than what it has said.
                with contextlib.suppress(TemplateError):
                    more = self._renderer.between(request.messages, count - 1, request.tools, point.tokens[-1])
                    return point, [*point.tokens, *more]
            return None, self._renderer.prompt(request.messages, request.tools)
        except TemplateError as error:
            raise Refused(400, "chat_template", str(error)) from None

    def _known(self, row: OpenRow, tokens: Sequence[int]) -> bool:
        """Have ``row`` go on to its first ``tokens``, and further as a log has it; whether that is a whole turn."""
        number, start = self._history.rows.index(row), len(tokens) - len(row.prompt)
        if found := self._recorded.turn(number, tokens):
            row.draft, is_over = found
            return is_over
        if self._recorded.has_more(number, start):
            self._history.is_other = True
        if row.length:
            row.draft.hear(tokens[len(row.prompt) + row.length :])
        return False

    async def _draw(self, row: OpenRow, budget: int, stop: tuple[str, ...]) -> None:
        """Add a turn to ``row``, which has at most ``budget`` tokens behind its prompt then. BadAnswer, Repeat."""
        sampling = self._start.request.sampling
        answer = await self._start.drawn(row, budget, with_stops(sampling, stop, self._tokenizer))
        if answer.finish_reason == "abort":
            raise BadAnswer("dead", "the engine gave an answer up")
        row.draft = Draft.after(answer)


def _keys(messages: Sequence[Message], tools: Tools) -> list[str]:
    """Keys of all beginnings of a chat: each follows from the one before."""
    key, found = hashlib.sha256(json.dumps(tools, sort_keys=True).encode()).hexdigest(), []
    for message in messages:
        key = _key(key, message)
        found.append(key)
    return found


def _key(before: str, message: Message) -> str:
    """Key of a chat that goes on by ``message``. Names of calls are the client's, and many a client strips what the
    policy has said."""
    content = message["content"]
    about = [message["role"], content.strip() if message["role"] == "assistant" else content]
    about += [call["function"] for call in message.get("tool_calls", ())]
    return hashlib.sha256(f"{before}{json.dumps(about, sort_keys=True)}".encode()).hexdigest()
