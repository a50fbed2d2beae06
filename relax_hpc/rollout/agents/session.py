"""A session: what the program of an episode asks, answered by the engine, and kept as rows that
grow turn by turn.

A request has the whole chat each time. The longest part of it that ends with an answer of this
session is known by its tokens, and what is new behind that is all that is made into tokens. Its row
goes on; where it has gone on already, or is just drawn, a row begins that has the same history for
its prompt. So nothing is trained on twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from relax_hpc.data.chat import TemplateError
from relax_hpc.data.tokenizer import Tokenizer, TokenizerError
from relax_hpc.environments.tool_calls import THINK, THOUGHT
from relax_hpc.net.transport.exchange import MAX_PAYLOAD_BYTES, PeerGone
from relax_hpc.rollout.agents.answers import MODEL, Answer, as_json
from relax_hpc.rollout.agents.bounds import Bounds
from relax_hpc.rollout.agents.chat import ChatRequest, Message, Refused, TooLong, read_object
from relax_hpc.rollout.agents.dialects import COUNTERS, DIALECTS
from relax_hpc.rollout.agents.dialects.responses import name_of
from relax_hpc.rollout.agents.gateway.front import Reply
from relax_hpc.rollout.agents.recorded_turns import Recorded
from relax_hpc.rollout.agents.rendering import Renderer, Tools
from relax_hpc.rollout.engines.engine import BadAnswer, Draft, FinishReason
from relax_hpc.rollout.engines.stops import with_stops
from relax_hpc.rollout.episodes.history import History, OpenRow
from relax_hpc.rollout.episodes.turns import Start

MODELS = "/v1/models"
_THOUGHT_MARK = re.compile(rf"\s*({THINK}|{THOUGHT})\s*")
_MODEL = {"id": MODEL, "object": "model", "created": 0, "owned_by": "run"}
_MOST_REFUSED = 32
"""Requests in a row that may be refused: a program that repeats them would do so for ever."""
_MOST_REPLY_BYTES = MAX_PAYLOAD_BYTES - (64 << 10)
"""Bytes of a reply, which has to go in one message to the gateway, and from there to a
forwarder."""
_RETRY_S = 30.0
"""Seconds for a client that counts its retries to repeat a request which it has hung up. OpenAI's
and Anthropic's wait 8 seconds at most."""


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


@dataclass(slots=True)
class _Pending:
    """A request that is being answered, or was."""

    reply: asyncio.Task[Reply] | None = None
    waiting: int = 0
    """Connections that wait for the reply."""
    answer: _Point | None = None
    """End of its answer."""
    cut: FinishReason | None = None
    """Bound that has cut its answer."""
    is_read: bool = False
    """Whether a connection got the reply."""

    @property
    def is_taken_back(self) -> bool:
        """Whether it was cancelled before there was a reply."""
        return self.reply is not None and self.reply.cancelling() > 0


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
        """``history``: what a log has of the episode, which is there to be asked for again.
        ``count`` is called with the reason of each request that is refused."""
        self._start, self._history, self._bounds = start, history, bounds
        self._renderer, self._tokenizer, self._count = renderer, tokenizer, count
        self._recorded, history.rows = Recorded(history.rows), []
        self._points: dict[str, _Point] = {}
        """Ends of answers, by the chat up to there."""
        self._drawing: list[OpenRow] = []
        """Rows in which an answer is just being drawn."""
        self._chats: dict[str, list[Message]] = {}
        """Chats so far, each by the name of its last answer."""
        self._requests: dict[bytes, _Pending] = {}
        """Requests by path, body and idempotency key: a client that has lost a reply asks again."""
        self._answered_requests: list[_Pending] = []
        """Requests that have got an answer, in the order of their answers."""
        self._running: set[asyncio.Task[Reply]] = set()
        self._numbers = itertools.count()
        """Numbers of answers."""
        self._is_closing = False
        self.refused: Counter[str] = Counter()
        """Requests that were not answered, by reason."""
        self.last_refusal = ""
        """Reason and detail of the last one."""
        self._refused_in_row = 0
        """Refused requests since the last answer; those of unknown paths are left out."""
        self.error: Exception | None = None
        """Error because of which there is no answer: of the engine, or of whoever asks it."""
        self.last: OpenRow | None = None
        """Row of the newest answer that a client has read."""
        self._cut: FinishReason | None = None
        """Bound that has cut that answer."""
        self.over = asyncio.Event()
        """Event that is set when nothing will be answered any more."""

    async def reply(
        self, path: str, body: bytes, repeats: int | None, idempotency: str = ""
    ) -> Reply:
        """Reply to a request; to one that its client ``repeats``, or that has the ``idempotency``
        key of another one, the same. If this is cancelled, the client has hung up: without anybody
        else who waits, the request is taken back. PeerGone: the episode has ended."""
        name = hashlib.sha256(f"{path}\n{idempotency}\n".encode() + body).digest()
        request = self._requests.get(name) if repeats or idempotency else None
        if not request or request.is_taken_back:
            request = self._requests[name] = self._begin_reply(path, body)
        task = request.reply
        assert task
        request.waiting += 1
        try:
            await asyncio.wait([task])
        finally:
            request.waiting -= 1
            if not request.waiting and not task.done():
                may_repeat = repeats is not None or idempotency
                asyncio.get_running_loop().call_later(
                    _RETRY_S if may_repeat else 0.0, _take_back, request
                )
        if task.cancelled():
            raise PeerGone("the episode has ended")
        self._note_read(request)
        return task.result()

    def _begin_reply(self, path: str, body: bytes) -> _Pending:
        request = _Pending()
        task = request.reply = asyncio.create_task(self._reply(path, body, request))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return request

    def _note_read(self, request: _Pending) -> None:
        """Record that a client gets the reply. The last answer is the one whose reply was read
        last."""
        if request.answer and not request.is_read:
            self.last, self._cut = request.answer.row, request.cut
        request.is_read = True

    def drop_unread(self) -> None:
        """Remove the turns that no client has read, because it had hung up before and did not
        retry."""
        for request in reversed(self._answered_requests):
            answer = request.answer
            # A chat with the same words may have continued the row.
            if answer and not request.is_read and answer.row.turns[-1:] == [answer.length]:
                answer.row.turns.pop()

    @property
    def reason(self) -> FinishReason:
        """Reason why the episode has ended, if its program has."""
        return self._bounds.met or self._cut or "env_done"

    async def close(self) -> None:
        """Answer nobody any more; nothing is added to rows then."""
        self._is_closing = True
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _reply(self, path: str, body: bytes, pending: _Pending) -> Reply:
        try:
            reply = await self._answered(path, body, pending)
            if len(reply.body) > _MOST_REPLY_BYTES:
                raise ValueError(
                    f"an answer takes {len(reply.body)} bytes by {path}, allowed: "
                    f"{_MOST_REPLY_BYTES}; lower rollout.max_new_tokens"
                )
            return reply
        except Refused as refused:
            self._note_refusal(refused)
            detail = refused.detail
            if isinstance(refused, TooLong):
                detail = DIALECTS[path].TOO_LONG.format(tokens=refused.tokens, limit=refused.limit)
            return Reply.error(refused.status, refused.code, detail, path)
        except Exception as error:  # the player of the episode raises it
            self.error = self.error or error
            self.over.set()
            return Reply.error(
                500, "no_answer", "the episode has ended, as there is no answer", path
            )

    async def _answered(self, path: str, body: bytes, pending: _Pending) -> Reply:
        """Reply to a request that is answered; ``pending`` gets the end of an answer. Refused: it
        is not."""
        if path == MODELS:
            return Reply(200, as_json({"object": "list", "data": [_MODEL]}))
        if path.startswith(f"{MODELS}/"):
            return Reply(200, as_json(_MODEL))
        if counter := COUNTERS.get(path):
            request = counter.parse(read_object(body), self._chats)
            _, tokens = await asyncio.to_thread(
                self._tokens, request, _keys(request.messages, request.tools)
            )
            return Reply(
                200, as_json({"object": "response.input_tokens", "input_tokens": len(tokens)})
            )
        if not (dialect := DIALECTS.get(path)):
            raise Refused(
                404,
                "unknown_path",
                f"found {path!r}, allowed: {', '.join([*DIALECTS, *COUNTERS, MODELS])}",
            )
        request = dialect.parse(read_object(body), self._chats)
        answer = await self._answer(request, pending)
        self._answered_requests.append(pending)
        self._refused_in_row = 0
        self._chats[name_of(answer)] = [*request.messages[request.apart :], answer.message]
        return dialect.reply(request, answer)

    def _note_refusal(self, refused: Refused) -> None:
        self.refused[refused.code] += 1
        self._count(refused.code)
        self.last_refusal = str(refused)
        # Clients ask for what there may not be, such as embeddings, and do without.
        if refused.code != "unknown_path":
            self._refused_in_row += 1
        if self._refused_in_row >= _MOST_REFUSED:
            self.over.set()

    async def _answer(self, request: ChatRequest, pending: _Pending) -> Answer:
        keys = _keys(request.messages, request.tools)
        point, tokens = await asyncio.to_thread(self._tokens, request, keys)
        goes_on = (
            point is not None
            and point.is_end
            and not any(point.row is row for row in self._drawing)
        )
        row = point.row if point and goes_on else OpenRow(tuple(tokens))
        room, limit = self._bounds.next_turn(self._history.rows, row, len(tokens))
        number = next(self._numbers)
        if not goes_on:
            self._history.rows.append(row)
        turn_limit = min(room, request.max_tokens or room)
        self._drawing.append(row)
        try:
            if not self._known(row, tokens):
                await self._draw(row, len(tokens) - len(row.prompt) + turn_limit, request.stop)
        except asyncio.CancelledError:
            if not self._is_closing:
                self._take_back_turn(row)
            raise
        finally:
            self._drawing.remove(row)
        row.turns.append(row.length)
        pending.answer = _Point(row, row.length)
        turn = row.draft.token_ids[len(tokens) - len(row.prompt) :]
        answer = Answer.from_turn(number, turn, tokens, turn_limit, request, self._tokenizer)
        pending.cut = limit if answer.is_cut and len(turn) == room else None
        for message in answer.messages:
            self._points[_key(keys[-1], message)] = pending.answer
        return answer

    def _take_back_turn(self, row: OpenRow) -> None:
        """Leave out the turn that is being drawn in ``row``: its client has hung up and will not
        read it."""
        if row.turns:
            row.draft = row.prefix(row.turns[-1])
        else:
            self._history.rows.remove(row)
        # The log of the episode may have a part of it.
        self._history.is_other = True
        self._bounds.forget_turn()

    def _tokens(self, request: ChatRequest, keys: Sequence[str]) -> tuple[_Point | None, list[int]]:
        """Tokens of a whole chat, up to where the policy speaks, and the last answer in it.
        Refused."""
        known = (count for count in range(len(keys) - 1, 0, -1) if keys[count - 1] in self._points)
        try:
            if count := next(known, 0):
                point = self._points[keys[count - 1]]
                # If not, it shows the policy something else than what it has said.
                with contextlib.suppress(TemplateError):
                    more = self._renderer.between(
                        request.messages, count - 1, request.tools, point.tokens[-1]
                    )
                    return point, [*point.tokens, *more]
            return None, self._renderer.prompt(request.messages, request.tools)
        except TemplateError as error:
            raise Refused(400, "chat_template", str(error)) from None
        except TokenizerError as error:
            raise Refused(400, "tokenizer", str(error)) from None

    def _known(self, row: OpenRow, tokens: Sequence[int]) -> bool:
        """Have ``row`` go on to its first ``tokens``, and further as a log has it; whether that is
        a whole turn."""
        number, start = self._history.rows.index(row), len(tokens) - len(row.prompt)
        if found := self._recorded.turn(number, tokens):
            row.draft, is_over = found
            return is_over
        if self._recorded.has_more(number, start):
            self._history.is_other = True
        if row.length:
            row.draft.append_observation(tokens[len(row.prompt) + row.length :])
        return False

    async def _draw(self, row: OpenRow, budget: int, stop: tuple[str, ...]) -> None:
        """Add a turn to ``row``, which has at most ``budget`` tokens behind its prompt then.
        BadAnswer, EngineRetry."""
        sampling = self._start.request.sampling
        answer = await self._start.draw_turn(
            row, budget, with_stops(sampling, stop, self._tokenizer)
        )
        if answer.finish_reason == "abort":
            raise BadAnswer("dead", "the engine gave an answer up")
        row.draft = Draft.after_turn(answer)


def _take_back(request: _Pending) -> None:
    """Cancel a request for which no connection waits any more."""
    if request.reply and not request.waiting:
        request.reply.cancel()


def _keys(messages: Sequence[Message], tools: Tools) -> list[str]:
    """Keys of all beginnings of a chat: each follows from the one before."""
    key, keys = hashlib.sha256(json.dumps(tools, sort_keys=True).encode()).hexdigest(), []
    for message in messages:
        key = _key(key, message)
        keys.append(key)
    return keys


def _key(before: str, message: Message) -> str:
    """Key of a chat that goes on by ``message``. Names of calls are the client's, and many a client
    strips what the policy has said and thought."""
    content = message["content"]
    if message["role"] == "assistant":
        content = _THOUGHT_MARK.sub(r"\1", content.strip())
    fields = [message["role"], content]
    if "name" in message:
        fields.append(message["name"])
    fields += [call["function"] for call in message.get("tool_calls", ())]
    return hashlib.sha256(f"{before}{json.dumps(fields, sort_keys=True)}".encode()).hexdigest()
