"""Answers of the policy, as chats have them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from relax_hpc.data.tokenizer import Tokenizer
from relax_hpc.environments.tool_calls import ToolCall, read_turn
from relax_hpc.rollout.agents.chat import ChatRequest, Message, call_of
from relax_hpc.rollout.agents.gateway.front import Reply
from relax_hpc.rollout.samples import begins_in_thought

MODEL = "policy"
"""Name of the only model; what a request names does not matter."""
_LINE_ENDS = re.compile("[\x85\u2028\u2029]")
"""Characters that JSON need not escape, and that end a line to readers of streams such as
`str.splitlines`, httpx's `iter_lines` (0.28) and JavaScript's."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer of the policy: a turn."""

    number: int
    """Number of the turn."""
    content: str
    calls: Sequence[ToolCall]
    is_cut: bool
    """Whether a limit has cut it."""
    known: int
    """Tokens before it."""
    tokens: int
    stops: tuple[str, ...] = ()
    """Texts of the request's of which one has ended it. The policy has drawn that, and the content
    is without it."""

    @classmethod
    def from_turn(
        cls,
        number: int,
        turn: Sequence[int],
        before: Sequence[int],
        limit: int,
        request: ChatRequest,
        tokenizer: Tokenizer,
    ) -> Answer:
        """Answer of the tokens of a ``turn``, at most ``limit``, behind all tokens ``before``."""
        text = tokenizer.decode(list(turn))
        positions = {stop: text.find(stop) for stop in request.stop if stop in text}
        # The longest of those that begin first.
        stops = sorted(positions, key=lambda stop: (positions[stop], -len(stop)))[:1]
        text = text[: positions[stops[0]]] if stops else text
        has_ended = bool(stops) or turn[-1] in tokenizer.eos_ids
        if not has_ended and len(turn) < limit:
            # The engine has seen one of them, which the text does not show, as of special tokens.
            stops, has_ended = list(request.stop), True
        sizes = {
            "is_cut": not has_ended,
            "known": len(before),
            "tokens": len(turn),
            "stops": tuple(stops),
        }
        if request.may_call:
            read = read_turn(text, begins_in_thought(before, tokenizer))
            calls = [call for call in read.calls if isinstance(call, ToolCall)]
            # One that is no call leaves all of them text: the program hears of none that it could
            # not see whole.
            if calls and len(calls) == len(read.calls):
                return cls(number, text[: read.first_call].strip(), calls, **sizes)
        return cls(number, text, (), **sizes)

    @property
    def message(self) -> Message:
        """The message as it is when it comes back."""
        calls = [call_of(call.name, call.arguments) for call in self.calls]
        return {
            "role": "assistant",
            "content": self.content,
            **({"tool_calls": calls} if calls else {}),
        }

    @property
    def messages(self) -> list[Message]:
        """The same in all forms in which clients send it back: smolagents and ReAct agents put the
        text that has stopped it behind it again."""
        contents = [self.content]
        for stop in self.stops if not self.calls else ():
            contents += [self.content + stop, self.content.strip() + stop]
        return [{**self.message, "content": content} for content in contents]

    @property
    def named_calls(self) -> list[tuple[str, ToolCall]]:
        """Calls of it, each with a name by which its result may be told."""
        return [(f"call_{self.number}_{place}", call) for place, call in enumerate(self.calls)]


def as_json(value: Any) -> bytes:
    """``value`` as JSON, in one line."""
    text = json.dumps(value, ensure_ascii=False)
    return _LINE_ENDS.sub(lambda end: f"\\u{ord(end[0]):04x}", text).encode()


def arguments_of(call: ToolCall) -> str:
    """Arguments of a call, as JSON."""
    return as_json(call.arguments).decode()


def streamed(events: Iterable[tuple[str, Mapping[str, Any] | None]]) -> Reply:
    """Reply of events, by name and content; without names, the end of the stream has no content."""
    stream = b""
    for name, content in events:
        stream += (b"event: %b\n" % name.encode() if name else b"") + b"data: "
        stream += (b"[DONE]" if content is None else as_json(content)) + b"\n\n"
    return Reply(200, stream, "text/event-stream")
