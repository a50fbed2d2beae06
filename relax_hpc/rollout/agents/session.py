"""A session: the requests of the program of an episode, answered by the engine, and stored as rows
that grow turn by turn.

Each request has the whole chat. The tokens of its longest beginning that ends with an answer of
this session are known, and only the messages after it are tokenized. They continue the row of that
answer. If the row has other tokens after the answer, or an answer is being generated in it, a new
row begins whose prompt is the history. So no token is trained on twice.
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
from relax_hpc.data.generation import Draft, FinishReason
from relax_hpc.data.tokenizer import Tokenizer, TokenizerError
from relax_hpc.environments.tool_calls import THINK, THOUGHT
from relax_hpc.net.transport.exchange import MAX_PAYLOAD_BYTES, PeerGone
from relax_hpc.rollout.agents.answers import MODEL, PolicyAnswer, as_json
from relax_hpc.rollout.agents.bounds import Bounds
from relax_hpc.rollout.agents.chat import ChatRequest, Message, Refused, TooLong, read_object
from relax_hpc.rollout.agents.dialects import COUNTERS, DIALECTS
from relax_hpc.rollout.agents.dialects.responses import answer_id
from relax_hpc.rollout.agents.gateway.front import Reply
from relax_hpc.rollout.agents.recorded_turns import RecordedTurns
from relax_hpc.rollout.agents.rendering import Renderer, Tools
from relax_hpc.rollout.engines.engine import BadAnswer
from relax_hpc.rollout.engines.stops import with_stops
from relax_hpc.rollout.episodes.history import History, OpenRow
from relax_hpc.rollout.episodes.turns import EpisodeStart

MODELS = "/v1/models"
_THOUGHT_MARK = re.compile(rf"\s*({THINK}|{THOUGHT})\s*")
_MODEL = {"id": MODEL, "object": "model", "created": 0, "owned_by": "run"}
_MAX_REFUSED = 32
"""Consecutive refused requests after which the episode ends. A program might repeat them without
end."""
_MAX_REPLY_BYTES = MAX_PAYLOAD_BYTES - (64 << 10)
"""Most bytes of a reply, which is sent in one message to the gateway and to a forwarder."""
_RETRY_S = 30.0
"""Seconds for a client with a retry count to repeat a request after it has hung up. The clients of
OpenAI and Anthropic wait at most 8 seconds."""


@dataclass(frozen=True, slots=True)
class _AnswerEnd:
    """The end of an answer in a row."""

    row: OpenRow
    length: int
    """Tokens of the row after its prompt, up to this end."""

    @property
    def is_row_end(self) -> bool:
        """Whether the row has no tokens after the answer."""
        return self.row.length == self.length

    @property
    def tokens(self) -> list[int]:
        """All tokens of the row up to this end."""
        return [*self.row.prompt, *self.row.draft.token_ids[: self.length]]


@dataclass(slots=True)
class _Pending:
    """A request and its reply, if there is one."""

    reply: asyncio.Task[Reply] | None = None
    waiting: int = 0
    """Connections that wait for the reply."""
    answer: _AnswerEnd | None = None
    """End of its answer."""
    cut_reason: FinishReason | None = None
    """Bound that has cut its answer."""
    is_read: bool = False
    """Whether a connection has received the reply."""

    @property
    def is_cancelled(self) -> bool:
        """Whether it was cancelled before its reply."""
        return self.reply is not None and self.reply.cancelling() > 0


class AgentSession:
    """The session of one episode; for one event loop."""

    def __init__(
        self,
        start: EpisodeStart,
        history: History,
        renderer: Renderer,
        tokenizer: Tokenizer,
        bounds: Bounds,
        count: Callable[[str], None],
    ) -> None:
        """``history``: the logged part of the episode. Its turns are returned when the program
        sends the same requests again. ``count`` is called with the reason of each refused
        request."""
        self._start, self._history, self._bounds = start, history, bounds
        self._renderer, self._tokenizer, self._count = renderer, tokenizer, count
        self._recorded, history.rows = RecordedTurns(history.rows), []
        self._answer_ends: dict[str, _AnswerEnd] = {}
        """Ends of answers, by the key of the chat up to there."""
        self._generating: list[OpenRow] = []
        """Rows in which an answer is being generated."""
        self._chats: dict[str, list[Message]] = {}
        """Id of an answer -> the chat that ends with it."""
        self._requests: dict[bytes, _Pending] = {}
        """Requests by path, body and idempotency key, for clients that have lost a reply and
        retry."""
        self._answered_requests: list[_Pending] = []
        """Answered requests, in the order of their answers."""
        self._running: set[asyncio.Task[Reply]] = set()
        self._numbers = itertools.count()
        """Numbers of answers."""
        self._is_closing = False
        self.refused: Counter[str] = Counter()
        """Number of refused requests by reason."""
        self.last_refusal = ""
        """Reason and detail of the last refusal."""
        self._refused_in_row = 0
        """Refused requests since the last answer, without those of unknown paths."""
        self.error: Exception | None = None
        """Error because of which a request has no answer: of the engine, or of this code."""
        self.last: OpenRow | None = None
        """Row of the last answer that a client has received."""
        self._cut_reason: FinishReason | None = None
        """Bound that has cut that answer."""
        self.has_ended = asyncio.Event()
        """Event that is set when no further request will be answered."""

    async def reply(
        self, path: str, body: bytes, repeats: int | None, idempotency: str = ""
    ) -> Reply:
        """Reply to a request. A request that its client ``repeats``, or that has the
        ``idempotency`` key of an earlier one, gets the same reply again. If this call is cancelled,
        the client has hung up: the request is cancelled too, unless another connection waits for
        its reply. PeerGone: the episode has ended."""
        name = hashlib.sha256(f"{path}\n{idempotency}\n".encode() + body).digest()
        request = self._requests.get(name) if repeats or idempotency else None
        if not request or request.is_cancelled:
            request = self._requests[name] = self._begin_reply(path, body)
        task = request.reply
        assert task
        request.waiting += 1
        try:
            await asyncio.wait([task])
        finally:
            request.waiting -= 1
            if not request.waiting and not task.done():
                may_retry = repeats is not None or idempotency
                asyncio.get_running_loop().call_later(
                    _RETRY_S if may_retry else 0.0, _cancel_abandoned, request
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
        """Record that a client receives the reply. The last answer is the one that was received
        last."""
        if request.answer and not request.is_read:
            self.last, self._cut_reason = request.answer.row, request.cut_reason
        request.is_read = True

    def drop_unread(self) -> None:
        """Remove turns that no client has received, because it had hung up and did not retry."""
        for request in reversed(self._answered_requests):
            answer = request.answer
            # Another chat with the same messages may have continued the row after this turn.
            if answer and not request.is_read and answer.row.turns[-1:] == [answer.length]:
                answer.row.turns.pop()

    @property
    def reason(self) -> FinishReason:
        """Reason why the episode has ended, once its program has ended."""
        return self._bounds.reached or self._cut_reason or "env_done"

    async def close(self) -> None:
        """Cancel all requests. Nothing is added to rows afterwards."""
        self._is_closing = True
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _reply(self, path: str, body: bytes, pending: _Pending) -> Reply:
        try:
            reply = await self._answer_path(path, body, pending)
            if len(reply.body) > _MAX_REPLY_BYTES:
                raise ValueError(
                    f"an answer takes {len(reply.body)} bytes by {path}, allowed: "
                    f"{_MAX_REPLY_BYTES}; lower rollout.max_new_tokens"
                )
            return reply
        except Refused as refused:
            self._note_refusal(refused)
            detail = refused.detail
            if isinstance(refused, TooLong):
                detail = DIALECTS[path].TOO_LONG.format(tokens=refused.tokens, limit=refused.limit)
            return Reply.error(refused.status, refused.code, detail, path)
        except Exception as error:  # `Agents` raises it in the episode
            self.error = self.error or error
            self.has_ended.set()
            return Reply.error(
                500, "no_answer", "the episode has ended, as there is no answer", path
            )

    async def _answer_path(self, path: str, body: bytes, pending: _Pending) -> Reply:
        """Reply to a request. ``pending`` gets the end of its answer. Refused: the request is not
        answered."""
        if path == MODELS:
            return Reply(200, as_json({"object": "list", "data": [_MODEL]}))
        if path.startswith(f"{MODELS}/"):
            return Reply(200, as_json(_MODEL))
        counter = COUNTERS.get(path)
        if counter:
            request = counter.parse(read_object(body), self._chats)
            keys = _keys(request.messages, request.tools)
            _, tokens = await asyncio.to_thread(self._tokens, request, keys)
            return Reply(
                200, as_json({"object": "response.input_tokens", "input_tokens": len(tokens)})
            )
        dialect = DIALECTS.get(path)
        if not dialect:
            raise Refused(
                404,
                "unknown_path",
                f"found {path!r}, allowed: {', '.join([*DIALECTS, *COUNTERS, MODELS])}",
            )
        request = dialect.parse(read_object(body), self._chats)
        answer = await self._answer(request, pending)
        self._answered_requests.append(pending)
        self._refused_in_row = 0
        chat = [*request.messages[request.instructions :], answer.message]
        self._chats[answer_id(answer)] = chat
        return dialect.reply(request, answer)

    def _note_refusal(self, refused: Refused) -> None:
        self.refused[refused.code] += 1
        self._count(refused.code)
        self.last_refusal = str(refused)
        # Clients try paths that may not exist, such as embeddings, and work without them.
        if refused.code != "unknown_path":
            self._refused_in_row += 1
        if self._refused_in_row >= _MAX_REFUSED:
            self.has_ended.set()

    async def _answer(self, request: ChatRequest, pending: _Pending) -> PolicyAnswer:
        keys = _keys(request.messages, request.tools)
        previous, tokens = await asyncio.to_thread(self._tokens, request, keys)
        row = self._continued_row(previous)
        is_new = row is None
        if row is None:
            row = OpenRow(tuple(tokens))
        budget, limit = self._bounds.next_turn(self._history.rows, row, len(tokens))
        number = next(self._numbers)
        if is_new:
            self._history.rows.append(row)
        turn_limit = min(budget, request.max_tokens or budget)
        self._generating.append(row)
        try:
            if not self._replay_turn(row, tokens):
                row_budget = len(tokens) - len(row.prompt) + turn_limit
                await self._generate_turn(row, row_budget, request.stop)
        except asyncio.CancelledError:
            if not self._is_closing:
                self._remove_turn(row)
            raise
        finally:
            self._generating.remove(row)
        row.turns.append(row.length)
        pending.answer = _AnswerEnd(row, row.length)
        turn = row.draft.token_ids[len(tokens) - len(row.prompt) :]
        answer = PolicyAnswer.from_turn(number, turn, tokens, turn_limit, request, self._tokenizer)
        pending.cut_reason = limit if answer.is_cut and len(turn) == budget else None
        for message in answer.messages:
            self._answer_ends[_key(keys[-1], message)] = pending.answer
        return answer

    def _continued_row(self, previous: _AnswerEnd | None) -> OpenRow | None:
        """The row that the answer after ``previous`` continues; None: it needs a new row."""
        if previous is None or not previous.is_row_end:
            return None
        is_generating = any(previous.row is row for row in self._generating)
        return None if is_generating else previous.row

    def _remove_turn(self, row: OpenRow) -> None:
        """Remove the turn that is being generated in ``row``, because its client has hung up."""
        if row.turns:
            row.draft = row.prefix(row.turns[-1])
        else:
            self._history.rows.remove(row)
        # The log of the episode may have a part of the turn.
        self._history.may_differ_from_log = True
        self._bounds.forget_turn()

    def _tokens(
        self, request: ChatRequest, keys: Sequence[str]
    ) -> tuple[_AnswerEnd | None, list[int]]:
        """The last answer of this session in a chat, and the tokens of the whole chat, including
        the opening of the policy's turn. Refused: the template does not accept the chat."""
        try:
            for count in range(len(keys) - 1, 0, -1):
                answer_end = self._answer_ends.get(keys[count - 1])
                if not answer_end:
                    continue
                # TemplateError: the template changes the answer, so the chat is rendered as a new
                # one.
                with contextlib.suppress(TemplateError):
                    new_tokens = self._renderer.between(
                        request.messages, count - 1, request.tools, answer_end.tokens[-1]
                    )
                    return answer_end, [*answer_end.tokens, *new_tokens]
                break
            return None, self._renderer.prompt(request.messages, request.tools)
        except TemplateError as error:
            raise Refused(400, "chat_template", str(error)) from None
        except TokenizerError as error:
            raise Refused(400, "tokenizer", str(error)) from None

    def _replay_turn(self, row: OpenRow, tokens: Sequence[int]) -> bool:
        """Extend ``row`` to ``tokens``, and by the turn in the log after them, if there is one.
        Returns whether that turn is complete."""
        number, start = self._history.rows.index(row), len(tokens) - len(row.prompt)
        recorded = self._recorded.turn(number, tokens)
        if recorded:
            row.draft, is_complete = recorded
            return is_complete
        if self._recorded.has_more(number, start):
            self._history.may_differ_from_log = True
        if row.length:
            row.draft.append_observation(tokens[len(row.prompt) + row.length :])
        return False

    async def _generate_turn(self, row: OpenRow, budget: int, stop: tuple[str, ...]) -> None:
        """Add a turn to ``row``, which may have ``budget`` tokens after its prompt. BadAnswer,
        EngineRetry: as `EpisodeStart.draw_turn`."""
        sampling = self._start.request.sampling
        answer = await self._start.draw_turn(
            row, budget, with_stops(sampling, stop, self._tokenizer)
        )
        if answer.finish_reason == "abort":
            raise BadAnswer("dead", "the engine aborted an answer")
        row.draft = Draft.after_turn(answer)


def _cancel_abandoned(request: _Pending) -> None:
    """Cancel a request if no connection waits for its reply."""
    if request.reply and not request.waiting:
        request.reply.cancel()


def _keys(messages: Sequence[Message], tools: Tools) -> list[str]:
    """Keys of all beginnings of a chat. Each key depends on the key before."""
    keys: list[str] = []
    key = hashlib.sha256(json.dumps(tools, sort_keys=True).encode()).hexdigest()
    for message in messages:
        key = _key(key, message)
        keys.append(key)
    return keys


def _key(before: str, message: Message) -> str:
    """Key of the chat with the key ``before`` and a further ``message``. It ignores what clients
    change in answers of the policy: ids of calls, and blanks around the text and the thought."""
    content = message["content"]
    if message["role"] == "assistant":
        content = _THOUGHT_MARK.sub(r"\1", content.strip())
    fields = [message["role"], content]
    if "name" in message:
        fields.append(message["name"])
    fields += [call["function"] for call in message.get("tool_calls", ())]
    return hashlib.sha256(f"{before}{json.dumps(fields, sort_keys=True)}".encode()).hexdigest()
