"""Requests for an answer, whatever interface they come by, and what is wrong with those that are none."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
"""Message as chat templates have it: role, content (a text), of an assistant tool_calls whose arguments are objects."""


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
    """Messages at the beginning that are no part of the chat which a later request may go on with."""


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object in ``body``. Refused: it is none."""
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(400, "not_json", str(error)) from None
    if not isinstance(asked, dict):
        raise wrong("body", asked, "an object")
    return asked


def wrong(field: str, found: Any, allowed: str) -> Refused:
    """Refusal of what was ``found`` in a field."""
    return Refused(400, "wrong_field", f"{field}: found {str(found)[:80]!r}, allowed: {allowed}")


def number_in(asked: Mapping[str, Any], *fields: str) -> int:
    """Number of tokens in the first of ``fields`` that has one; 0: none has. Refused: it is none."""
    found = next((asked[field] for field in fields if asked.get(field)), 0)
    if type(found) is not int or found < 0:
        raise wrong(fields[0], found, "a number of tokens")
    return found


def texts_in(asked: Mapping[str, Any], field: str) -> tuple[str, ...]:
    """Texts in ``field``: one, or a list. Refused: it has others."""
    found = asked.get(field) or []
    found = [found] if isinstance(found, str) else found
    if not isinstance(found, list) or not all(isinstance(one, str) and one for one in found):
        raise wrong(field, found, "texts")
    return tuple(found)


def list_in(asked: Mapping[str, Any], field: str) -> list[dict[str, Any]]:
    """Objects in ``field``. Refused: it has others, or none."""
    found = asked.get(field)
    if not isinstance(found, list) or not found or not all(isinstance(one, dict) for one in found):
        raise wrong(field, found, "a list of objects")
    return found


def text_of(content: Any, kinds: Sequence[str] = ("text",)) -> str:
    """Text of a message's content: one, or a list of parts of these ``kinds``. Refused: it has others."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") in kinds else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise wrong("content", content, "text")
    return "".join(texts)


def tool_of(name: Any, description: Any, parameters: Any) -> dict[str, Any]:
    """A function as OpenAI describes it. Refused: it has no name."""
    if not isinstance(name, str) or not name:
        raise wrong("tools", name, "functions with names")
    about = {"name": name, "description": description or "", "parameters": parameters or {}}
    return {"type": "function", "function": about}


def call_of(name: Any, arguments: Any, number: Any = None) -> dict[str, Any]:
    """A call as messages have it; ``arguments``: an object, or JSON. Refused: it has no name."""
    if not isinstance(name, str) or not name:
        raise wrong("calls", name, "calls of functions")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = {"text": arguments}
    about = {"id": number} if isinstance(number, str) else {}
    return {**about, "type": "function", "function": {"name": name, "arguments": arguments or {}}}
