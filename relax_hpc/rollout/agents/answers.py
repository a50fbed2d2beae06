"""Answers of the policy, as chats have them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from relax_hpc.data.tokenizer import Tokenizer
from relax_hpc.environments.tool_calls import OPEN, ToolCall, calls_of
from relax_hpc.gateway.front import Reply
from relax_hpc.rollout.agents.chat import ChatRequest, Message, call_of

MODEL = "policy"
"""Name of the only model; what a request names does not matter."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer of the policy: a turn."""

    number: int
    """Number of the turn."""
    content: str
    calls: Sequence[ToolCall]
    is_cut: bool
    """Whether it came to no end by itself."""
    known: int
    """Tokens before it."""
    tokens: int

    @classmethod
    def of(cls, number: int, turn: Sequence[int], known: int, request: ChatRequest, tokenizer: Tokenizer) -> Answer:
        """Answer of the tokens of a ``turn`` that ``known`` tokens were before."""
        text = tokenizer.decode(list(turn))
        places = [place for stop in request.stop if (place := text.find(stop)) >= 0]
        is_cut = not places and turn[-1] not in tokenizer.eos_ids
        text = text[: min(places, default=len(text))]
        found = calls_of(text) if request.may_call else []
        calls = [call for call in found if isinstance(call, ToolCall)]
        if calls and len(calls) == len(found):
            return cls(number, text.partition(OPEN)[0].strip(), calls, is_cut, known, len(turn))
        return cls(number, text, (), is_cut, known, len(turn))

    @property
    def message(self) -> Message:
        """The message as it is when it comes back."""
        calls = [call_of(call.name, call.arguments) for call in self.calls]
        return {"role": "assistant", "content": self.content, **({"tool_calls": calls} if calls else {})}

    @property
    def named_calls(self) -> list[tuple[str, ToolCall]]:
        """Calls of it, each with a name by which its result may be told."""
        return [(f"call_{self.number}_{place}", call) for place, call in enumerate(self.calls)]


def as_json(value: Any) -> bytes:
    """``value`` as JSON."""
    return json.dumps(value, ensure_ascii=False).encode()


def arguments_of(call: ToolCall) -> str:
    """Arguments of a call, as JSON."""
    return as_json(call.arguments).decode()


def streamed(events: Iterable[tuple[str, Mapping[str, Any] | None]]) -> Reply:
    """Reply of events, by name and content; without names, the end of the stream has no content."""
    found = b""
    for name, about in events:
        found += (b"event: %b\n" % name.encode() if name else b"") + b"data: "
        found += (b"[DONE]" if about is None else as_json(about)) + b"\n\n"
    return Reply(200, found, "text/event-stream")
