"""Chat completions as OpenAI's clients ask for them (platform.openai.com/docs/api-reference/chat)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_OTHERS = ("n", "best_of")
"""Fields of which only 1 is allowed."""
Message = dict[str, Any]


class Refused(Exception):
    """A request that is not answered: its HTTP status, a code that is counted, and what is wrong with it."""

    def __init__(self, status: int, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.status, self.code, self.detail = status, code, detail


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """Request for an answer. Temperature, top_p and seed are the run's, whatever it says of them: what is trained on
    is drawn by the policy itself."""

    messages: list[Message]
    """Messages as chat templates have them: content is text, arguments of tool calls are objects."""
    tools: list[dict[str, Any]]
    may_call: bool
    """Whether a call of a tool in the answer is one, rather than text."""
    max_tokens: int
    """Tokens of the answer at most; 0: it does not say."""
    stop: tuple[str, ...]
    streams: bool
    tells_usage: bool
    """Whether the last event of a stream says how many tokens there were."""


def parse(body: bytes) -> ChatRequest:
    """The request in ``body``. Refused: it is none, or asks for what there is not."""
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(400, "not_json", str(error)) from None
    if not isinstance(asked, dict):
        raise _wrong("body", asked, "an object")
    for name in _OTHERS:
        if asked.get(name) not in (None, 1):
            raise _wrong(name, asked[name], "1")
    given, tools = asked.get("messages"), asked.get("tools") or []
    if not isinstance(given, list) or not given:
        raise _wrong("messages", given, "a list of messages")
    if not isinstance(tools, list) or not all(_is_tool(tool) for tool in tools):
        raise _wrong("tools", tools, "a list of functions")
    stop = asked.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(one, str) and one for one in stop):
        raise _wrong("stop", stop, "texts")
    options = asked.get("stream_options") or {}
    return ChatRequest(
        [_message(one) for one in given],
        tools,
        bool(tools) and asked.get("tool_choice") != "none",
        _most_tokens(asked),
        tuple(stop),
        bool(asked.get("stream")),
        isinstance(options, dict) and bool(options.get("include_usage")),
    )


def _most_tokens(asked: Mapping[str, Any]) -> int:
    found = asked.get("max_completion_tokens") or asked.get("max_tokens") or 0
    if type(found) is not int or found < 0:
        raise _wrong("max_tokens", found, "a number of tokens")
    return found


def _is_tool(tool: Any) -> bool:
    function = isinstance(tool, dict) and tool.get("type") == "function" and tool.get("function")
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _message(given: Any) -> Message:
    role = given.get("role") if isinstance(given, dict) else None
    if not isinstance(role, str) or role not in _ROLES:
        raise _wrong("messages.role", role, ", ".join(_ROLES))
    found: Message = {"role": _ROLES[role], "content": _text(given.get("content"))}
    if isinstance(name := given.get("tool_call_id"), str):
        found["tool_call_id"] = name
    if calls := given.get("tool_calls"):
        if role != "assistant" or not isinstance(calls, list):
            raise _wrong("messages.tool_calls", calls, "a list, of an assistant")
        found["tool_calls"] = [_call(call) for call in calls]
    return found


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise _wrong("messages.content", content, "text")
    return "".join(texts)


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _wrong("messages.tool_calls", call, "a call of a function")
    arguments = function.get("arguments")
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        arguments = {"text": arguments}
    about = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**about, "type": "function", "function": {"name": function["name"], "arguments": arguments or {}}}


def _wrong(field: str, found: Any, allowed: str) -> Refused:
    return Refused(400, "wrong_field", f"{field}: found {str(found)[:80]!r}, allowed: {allowed}")
