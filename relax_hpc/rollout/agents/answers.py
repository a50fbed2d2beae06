"""Answers of the policy as the messages that OpenAI's clients read."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from relax_hpc.data.prompts import Tokenizer
from relax_hpc.environments.tool_calls import OPEN, ToolCall, calls_of
from relax_hpc.gateway.front import Reply
from relax_hpc.rollout.agents.chat import ChatRequest, Message

MODEL = "policy"
"""Name of the only model; what a request names does not matter."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer of the policy: a turn."""

    number: int
    """Number of the turn."""
    content: str
    calls: Sequence[ToolCall]
    finish_reason: str
    """OpenAI's word: stop, length or tool_calls."""
    prompt_tokens: int
    tokens: int

    @classmethod
    def of(cls, number: int, turn: Sequence[int], known: int, request: ChatRequest, tokenizer: Tokenizer) -> Answer:
        """Answer of the tokens of a ``turn`` that ``known`` tokens were before."""
        text = tokenizer.decode(list(turn))
        places = [place for stop in request.stop if (place := text.find(stop)) >= 0]
        reason = "stop" if places or turn[-1] in tokenizer.eos_ids else "length"
        text = text[: min(places, default=len(text))]
        found = calls_of(text) if request.may_call else []
        calls = [call for call in found if isinstance(call, ToolCall)]
        if calls and len(calls) == len(found):
            return cls(number, text.partition(OPEN)[0].strip(), calls, "tool_calls", known, len(turn))
        return cls(number, text, (), reason, known, len(turn))

    @property
    def message(self) -> Message:
        """The message as `chat.parse` reads it when it comes back."""
        functions = [{"name": call.name, "arguments": call.arguments} for call in self.calls]
        calls = [{"type": "function", "function": function} for function in functions]
        return {"role": "assistant", "content": self.content, **({"tool_calls": calls} if calls else {})}

    def reply(self, request: ChatRequest) -> Reply:
        """The reply to a client: an object, or the events of a stream, all at once."""
        about = {"id": f"chatcmpl-{self.number}", "created": int(time.time()), "model": MODEL}
        if request.streams:
            events = self._events(about, request.tells_usage)
            return Reply(200, b"".join(b"data: %b\n\n" % event for event in events), "text/event-stream")
        message: dict[str, Any] = {"role": "assistant", "content": self.content or None}
        if self.calls:
            message["tool_calls"] = self._shown_calls
        choice = {"index": 0, "message": message, "finish_reason": self.finish_reason, "logprobs": None}
        return Reply(200, _json(about | {"object": "chat.completion", "choices": [choice], "usage": self._usage}))

    def _events(self, about: Mapping[str, Any], tells_usage: bool) -> Iterator[bytes]:
        def chunk(*choices: Mapping[str, Any], **beside: Any) -> bytes:
            return _json({**about, "object": "chat.completion.chunk", "choices": choices, **beside})

        def delta(said: Mapping[str, Any], reason: str | None = None) -> Mapping[str, Any]:
            return {"index": 0, "delta": said, "finish_reason": reason}

        yield chunk(delta({"role": "assistant", "content": self.content or None}))
        if self.calls:
            calls = [{"index": place, **call} for place, call in enumerate(self._shown_calls)]
            yield chunk(delta({"tool_calls": calls}))
        yield chunk(delta({}, self.finish_reason))
        if tells_usage:
            yield chunk(usage=self._usage)
        yield b"[DONE]"

    @property
    def _shown_calls(self) -> list[dict[str, Any]]:
        return [
            {
                "id": f"call_{self.number}_{place}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
            }
            for place, call in enumerate(self.calls)
        ]

    @property
    def _usage(self) -> dict[str, int]:
        total = self.prompt_tokens + self.tokens
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.tokens, "total_tokens": total}


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()
