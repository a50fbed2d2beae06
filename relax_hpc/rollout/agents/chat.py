"""Requests for an answer, whatever interface they come by, and what is wrong with those that are
none."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from relax_hpc.environments.plain_values import clean_texts

Message = dict[str, Any]
"""Message as chat templates have it: role, content (a text), of an assistant tool_calls whose
arguments are objects."""
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
"""Fields whose values are the run's in every request: the policy itself has to draw the tokens that
are trained on."""


class Refused(Exception):
    """A request that is not answered: its HTTP status, a code that is counted, and what is wrong
    with it."""

    def __init__(self, status: int, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.status, self.code, self.detail = status, code, detail


class TooLong(Refused):
    """A chat of ``tokens`` tokens, where there is room for ``limit`` and one token of an answer."""

    def __init__(self, tokens: int, limit: int) -> None:
        super().__init__(
            400, "context_length_exceeded", f"a chat of {tokens} tokens, allowed: {limit}"
        )
        self.tokens, self.limit = tokens, limit


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """Request for an answer. Refused: it has no message, or the last one is an assistant's."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    """Functions as OpenAI describes them: {"type": "function", "function": {"name", ...}}."""
    may_call: bool = False
    """Whether a call of a tool in the answer is one, rather than text."""
    max_tokens: int = 0
    """Tokens of the answer at most; 0: it does not say."""
    stop: tuple[str, ...] = ()
    streams: bool = False
    tells_usage: bool = True
    """Whether a stream says how many tokens there were."""
    apart: int = 0
    """Messages at the beginning that are no part of the chat which a later request may go on
    with."""

    def __post_init__(self) -> None:
        if not self.messages:
            raise wrong("messages", "none", "at least one with text")
        if self.messages[-1]["role"] == "assistant":
            # The words by which Anthropic's newer models refuse it.
            raise Refused(
                400,
                "wrong_field",
                "messages: the last one is an assistant's. This model does not support assistant "
                "message prefill. The "
                "conversation must end with a user message, or with the result of a tool.",
            )
        # Templates such as Qwen3's show no names of calls, so the order is all that the policy
        # sees.
        object.__setattr__(self, "messages", _in_order_of_calls(self.messages))


@dataclass(frozen=True, slots=True)
class Fields:
    """Fields of an interface's requests. Any other field with a value is refused by its name: a
    program that asks for JSON and gets prose would score 0 without a visible reason."""

    read: frozenset[str]
    """Fields that the interface reads."""
    hints: frozenset[str]
    """Fields that change nothing about which answers are right: they are accepted and not looked
    at."""
    neutral: Mapping[str, Sequence[Any]]
    """Values by which other fields ask for nothing."""

    def check(self, request: Mapping[str, Any]) -> None:
        """Refused: a field asks for what there is not."""
        for name, value in request.items():
            if value is None or name in self.read or name in self.hints or name in SAMPLING:
                continue
            allowed = self.neutral.get(name, ())
            # 1 and true are equal in Python.
            if not any(value == each and type(value) is type(each) for each in allowed):
                raise wrong(name, value, " or ".join([*map(json.dumps, allowed), "nothing"]))


def _in_order_of_calls(messages: Sequence[Message]) -> list[Message]:
    """``messages`` with the results of an answer's calls in the order of the calls.

    A program that runs calls in parallel may send the results in the order in which the calls have
    ended. A result that names no call of the answer stays where it is, and so do the results behind
    it.
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
    """The JSON object in ``body``, its texts as of `clean_text`. Refused: it is none."""
    try:
        request = clean_texts(json.loads(body))
    except (ValueError, RecursionError) as error:
        raise Refused(400, "not_json", str(error)) from None
    if not isinstance(request, dict):
        raise wrong("body", request, "an object")
    return request


def wrong(field: str, value: Any, allowed: str) -> Refused:
    """Refusal of the ``value`` of a field."""
    return Refused(400, "wrong_field", f"{field}: found {str(value)[:80]!r}, allowed: {allowed}")


def number_in(request: Mapping[str, Any], *fields: str) -> int:
    """Number of tokens in the first of ``fields`` that has one; 0: none has. Refused: it is none,
    or 0."""
    field = next((field for field in fields if request.get(field) is not None), "")
    if not field:
        return 0
    number = request[field]
    if type(number) is not int or number < 1:
        raise wrong(field, number, "a number of tokens from 1")
    return number


def flag_in(request: Mapping[str, Any], field: str) -> bool:
    """Whether ``field`` is true; it is false where it is absent. Refused: it is neither true nor
    false."""
    value = request.get(field)
    if value is not None and type(value) is not bool:
        raise wrong(field, value, "true or false")
    return bool(value)


def texts_in(request: Mapping[str, Any], field: str) -> tuple[str, ...]:
    """Texts in ``field``: one, or a list. Refused: it has others."""
    texts = request.get(field) or []
    texts = [texts] if isinstance(texts, str) else texts
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise wrong(field, texts, "texts")
    return tuple(texts)


def list_in(request: Mapping[str, Any], field: str) -> list[dict[str, Any]]:
    """Objects in ``field``. Refused: it has others, or none."""
    items = request.get(field)
    if (
        not isinstance(items, list)
        or not items
        or not all(isinstance(item, dict) for item in items)
    ):
        raise wrong(field, items, "a list of objects")
    return items


def text_in(request: Mapping[str, Any], field: str) -> str:
    """Text in ``field``; empty: it has none. Refused: it has something else."""
    text = request.get(field)
    if text is not None and not isinstance(text, str):
        raise wrong(field, text, "a text")
    return text or ""


def role_in(message: Mapping[str, Any], field: str, roles: Mapping[str, str]) -> str:
    """The chat template's role of a message whose ``field`` is its ``role``. Refused: it is none of
    ``roles``."""
    role = message.get("role")
    if not isinstance(role, str) or role not in roles:
        raise wrong(field, role, ", ".join(roles))
    return roles[role]


def text_of(content: Any, kinds: Sequence[str] = ("text",)) -> str:
    """Text of a message's content: one, or a list of parts of these ``kinds``. Refused: it has
    others."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    texts = [
        part.get("text") if isinstance(part, dict) and part.get("type") in kinds else None
        for part in parts
    ]
    if not all(isinstance(text, str) for text in texts):
        raise wrong("content", content, "text")
    return "".join(texts)


def tool_of(name: Any, description: Any, parameters: Any) -> dict[str, Any]:
    """A function as OpenAI describes it. Refused: it has no name."""
    if not isinstance(name, str) or not name:
        raise wrong("tools", name, "functions with names")
    function = {"name": name, "description": description or "", "parameters": parameters or {}}
    return {"type": "function", "function": function}


def call_of(name: Any, arguments: Any, number: Any = None) -> dict[str, Any]:
    """A call as messages have it; ``arguments``: an object, or JSON. Refused: it has no name."""
    if not isinstance(name, str) or not name:
        raise wrong("calls", name, "calls of functions")
    if isinstance(arguments, str):
        try:
            arguments = clean_texts(json.loads(arguments))
        except (ValueError, RecursionError):
            arguments = {"text": arguments}
    call = {"id": number} if isinstance(number, str) else {}
    return {**call, "type": "function", "function": {"name": name, "arguments": arguments or {}}}
