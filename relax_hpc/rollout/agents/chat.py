"""Requests for an answer, independent of the interface, and the errors of invalid requests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from relax_hpc.environments.plain_values import clean_texts

Message = dict[str, Any]
"""Message in the format of chat templates: `role`, `content` (a text), and in a message of an
assistant `tool_calls`, whose arguments are objects."""
SAMPLING = frozenset(
    (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
    )
)
"""Fields that are ignored. The run's settings apply to every request, because the tokens that are
trained on must be sampled from the policy."""


class Refused(Exception):
    """Error of a request that is not answered: HTTP status, a code that is counted, and detail."""

    def __init__(self, status: int, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.status, self.code, self.detail = status, code, detail


class TooLong(Refused):
    """Error of a chat with ``tokens`` tokens; a chat may have ``limit``, and one token of an
    answer."""

    def __init__(self, tokens: int, limit: int) -> None:
        super().__init__(
            400, "context_length_exceeded", f"a chat of {tokens} tokens, allowed: {limit}"
        )
        self.tokens, self.limit = tokens, limit


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """Request for an answer. Refused: it has no message, or the last message is an assistant's."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    """Functions as OpenAI describes them: {"type": "function", "function": {"name", ...}}."""
    may_call: bool = False
    """Whether calls in the answer are returned as calls, and not as text."""
    max_tokens: int = 0
    """Most tokens of the answer; 0: the request sets no limit."""
    stop: tuple[str, ...] = ()
    streams: bool = False
    reports_usage: bool = True
    """Whether a stream reports the number of tokens."""
    instructions: int = 0
    """Number of messages at the beginning that a request which continues this one does not get:
    it sends its own instructions."""

    def __post_init__(self) -> None:
        if not self.messages:
            raise wrong_field("messages", "none", "at least one with text")
        if self.messages[-1]["role"] == "assistant":
            # The message with which Anthropic's newer models refuse it.
            raise Refused(
                400,
                "wrong_field",
                "messages: the last one is an assistant's. This model does not support assistant "
                "message prefill. The conversation must end with a user message, or with the "
                "result of a tool.",
            )
        # Templates such as Qwen3's do not show the ids of calls, so the policy recognizes results
        # only by their order.
        object.__setattr__(self, "messages", _in_order_of_calls(self.messages))


@dataclass(frozen=True, slots=True)
class RequestFields:
    """Fields of the requests of an interface. A request with any other field is refused: a program
    that requires JSON and gets prose would get reward 0 without a visible reason."""

    read: frozenset[str]
    """Fields that the interface reads."""
    hints: frozenset[str]
    """Fields that do not affect which answers are right. They are accepted and ignored."""
    neutral: Mapping[str, Sequence[Any]]
    """Values of further fields with which they have no effect."""

    def check(self, request: Mapping[str, Any]) -> None:
        """Refused: a field requires something that is not supported."""
        for name, value in request.items():
            if value is None or name in self.read or name in self.hints or name in SAMPLING:
                continue
            allowed = self.neutral.get(name, ())
            # Types are compared too, because 1 and true are equal in Python.
            if not any(value == each and type(value) is type(each) for each in allowed):
                raise wrong_field(name, value, " or ".join([*map(json.dumps, allowed), "nothing"]))


def _in_order_of_calls(messages: Sequence[Message]) -> list[Message]:
    """``messages`` with the results of calls in the order of the calls.

    A program that runs calls in parallel may send the results in the order in which the calls have
    ended. A result with an unknown id keeps its position, and so do the results after it.
    """
    ordered, order, first_result = list[Message](), dict[str, int](), 0
    for message in messages:
        ordered.append(message)
        if message["role"] != "tool":
            names = [call.get("id") for call in message.get("tool_calls", ())]
            order = {name: index for index, name in enumerate(names) if name}
            first_result = len(ordered)
        elif message.get("tool_call_id") in order:
            ordered[first_result:] = sorted(
                ordered[first_result:], key=lambda result: order[result["tool_call_id"]]
            )
        else:
            order = {}
    return ordered


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object in ``body``, with texts cleaned by `clean_texts`. Refused: the body is not a
    JSON object."""
    try:
        request = clean_texts(json.loads(body))
    except (ValueError, RecursionError) as error:
        raise Refused(400, "not_json", str(error)) from None
    if not isinstance(request, dict):
        raise wrong_field("body", request, "an object")
    return request


def wrong_field(field: str, value: Any, allowed: str) -> Refused:
    """Error for a ``value`` of a field that is not ``allowed``."""
    return Refused(400, "wrong_field", f"{field}: found {str(value)[:80]!r}, allowed: {allowed}")


def read_count(request: Mapping[str, Any], *fields: str) -> int:
    """Number of tokens in the first of ``fields`` that is present; 0: no field is present. Refused:
    the value is not a positive integer."""
    field = next((field for field in fields if request.get(field) is not None), "")
    if not field:
        return 0
    number = request[field]
    if type(number) is not int or number < 1:
        raise wrong_field(field, number, "a number of tokens from 1")
    return number


def read_flag(request: Mapping[str, Any], field: str) -> bool:
    """Whether ``field`` is true; an absent field is false. Refused: it is neither true nor
    false."""
    value = request.get(field)
    if value is not None and type(value) is not bool:
        raise wrong_field(field, value, "true or false")
    return bool(value)


def read_texts(request: Mapping[str, Any], field: str) -> tuple[str, ...]:
    """Texts in ``field``, which is a text or a list of texts. Refused: it is something else."""
    texts = request.get(field) or []
    texts = [texts] if isinstance(texts, str) else texts
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise wrong_field(field, texts, "texts")
    return tuple(texts)


def read_objects(request: Mapping[str, Any], field: str) -> list[dict[str, Any]]:
    """Objects in the list ``field``. Refused: it is not a list of objects, or empty."""
    items = request.get(field)
    if not isinstance(items, list) or not items:
        raise wrong_field(field, items, "a list of objects")
    if not all(isinstance(item, dict) for item in items):
        raise wrong_field(field, items, "a list of objects")
    return items


def read_text(request: Mapping[str, Any], field: str) -> str:
    """Text in ``field``; empty: the field is absent. Refused: it is not a text."""
    text = request.get(field)
    if text is not None and not isinstance(text, str):
        raise wrong_field(field, text, "a text")
    return text or ""


def read_role(message: Mapping[str, Any], field: str, roles: Mapping[str, str]) -> str:
    """Role of a message for the chat template. ``roles``: role in a request -> role for the
    template. ``field``: name of the role's field in errors. Refused: the role is unknown."""
    role = message.get("role")
    if not isinstance(role, str) or role not in roles:
        raise wrong_field(field, role, ", ".join(roles))
    return roles[role]


def join_text(content: Any, kinds: Sequence[str] = ("text",)) -> str:
    """Text of a message's content, which is a text or a list of blocks of these ``kinds``. Refused:
    it has other blocks."""
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for block in content if isinstance(content, list) else [content]:
        is_text = isinstance(block, dict) and block.get("type") in kinds
        text = block.get("text") if is_text else None
        if not isinstance(text, str):
            raise wrong_field("content", content, "text")
        texts.append(text)
    return "".join(texts)


def make_tool(name: Any, description: Any, parameters: Any) -> dict[str, Any]:
    """A function in OpenAI's format. Refused: it has no name."""
    if not isinstance(name, str) or not name:
        raise wrong_field("tools", name, "functions with names")
    function = {"name": name, "description": description or "", "parameters": parameters or {}}
    return {"type": "function", "function": function}


def make_call(name: Any, arguments: Any, call_id: Any = None) -> dict[str, Any]:
    """A call in the format of messages. ``arguments``: an object, or JSON. Refused: it has no
    name."""
    if not isinstance(name, str) or not name:
        raise wrong_field("calls", name, "calls of functions")
    if isinstance(arguments, str):
        try:
            arguments = clean_texts(json.loads(arguments))
        except (ValueError, RecursionError):
            arguments = {"text": arguments}
    call = {"id": call_id} if isinstance(call_id, str) else {}
    return {**call, "type": "function", "function": {"name": name, "arguments": arguments or {}}}
