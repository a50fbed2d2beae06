"""Answers of the policy in the form of chat messages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from relax_hpc.data.tokenizer import Tokenizer
from relax_hpc.environments.tool_calls import ToolCall, read_turn
from relax_hpc.rollout.agents.chat import ChatRequest, Message, make_call
from relax_hpc.rollout.agents.gateway.front import Reply
from relax_hpc.rollout.rows import begins_in_thought

MODEL = "policy"
"""Name of the only model. The model that a request names is ignored."""
_LINE_ENDS = re.compile("[\x85\u2028\u2029]")
"""Characters that JSON need not escape, but that readers of streams treat as the end of a line:
`str.splitlines`, httpx's `iter_lines` (0.28), and JavaScript."""


@dataclass(frozen=True, slots=True)
class PolicyAnswer:
    """A turn of the policy as the answer to a request."""

    number: int
    """Number of the turn."""
    content: str
    calls: Sequence[ToolCall]
    is_cut: bool
    """Whether a token limit has ended it."""
    context_tokens: int
    """Tokens before the turn."""
    tokens: int
    stops: tuple[str, ...] = ()
    """Stop texts of the request, one of which has ended the turn. The policy has sampled that text,
    and the content does not have it."""

    @classmethod
    def from_turn(
        cls,
        number: int,
        turn: Sequence[int],
        before: Sequence[int],
        limit: int,
        request: ChatRequest,
        tokenizer: Tokenizer,
    ) -> PolicyAnswer:
        """Answer with the tokens of a ``turn``, which follows the tokens ``before``. ``limit``:
        most tokens of the turn."""
        text = tokenizer.decode(list(turn))
        positions = {stop: text.find(stop) for stop in request.stop if stop in text}
        # The stop text that begins first; of several, the longest.
        stops = sorted(positions, key=lambda stop: (positions[stop], -len(stop)))[:1]
        text = text[: positions[stops[0]]] if stops else text
        has_ended = bool(stops) or turn[-1] in tokenizer.eos_ids
        if not has_ended and len(turn) < limit:
            # A stop has ended it that the text does not show, such as a special token.
            stops, has_ended = list(request.stop), True
        content, calls = text, list[ToolCall]()
        if request.may_call:
            read = read_turn(text, begins_in_thought(before, tokenizer))
            valid_calls = [call for call in read.calls if isinstance(call, ToolCall)]
            # If one call is invalid, all calls stay text, so that the program never gets only some
            # of the calls.
            if valid_calls and len(valid_calls) == len(read.calls):
                content, calls = text[: read.first_call].strip(), valid_calls
        return cls(
            number, content, calls, not has_ended, len(before), len(turn), stops=tuple(stops)
        )

    @property
    def message(self) -> Message:
        """The answer as a message of later requests."""
        calls = [make_call(call.name, call.arguments) for call in self.calls]
        return {
            "role": "assistant",
            "content": self.content,
            **({"tool_calls": calls} if calls else {}),
        }

    @property
    def messages(self) -> list[Message]:
        """The answer in all forms in which clients send it back: smolagents and ReAct agents append
        the stop text again."""
        contents = [self.content]
        for stop in self.stops if not self.calls else ():
            contents += [self.content + stop, self.content.strip() + stop]
        return [{**self.message, "content": content} for content in contents]

    @property
    def named_calls(self) -> list[tuple[str, ToolCall]]:
        """Calls of this answer, with the ids that their results refer to."""
        return [(f"call_{self.number}_{index}", call) for index, call in enumerate(self.calls)]


def as_json(value: Any) -> bytes:
    """``value`` as JSON in one line."""
    text = json.dumps(value, ensure_ascii=False)
    return _LINE_ENDS.sub(lambda end: f"\\u{ord(end[0]):04x}", text).encode()


def arguments_of(call: ToolCall) -> str:
    """Arguments of a call as JSON."""
    return as_json(call.arguments).decode()


def streamed(events: Iterable[tuple[str, Mapping[str, Any] | None]]) -> Reply:
    """Reply with a stream of events, pairs of name and content. In OpenAI's format, names are empty
    and the last event has no content."""
    stream = b""
    for name, content in events:
        stream += (b"event: %b\n" % name.encode() if name else b"") + b"data: "
        stream += (b"[DONE]" if content is None else as_json(content)) + b"\n\n"
    return Reply(200, stream, "text/event-stream")
