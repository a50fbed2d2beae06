"""Calls of tools in what the policy says, as Qwen3 writes them: one JSON object between two marks, each call."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, NoReturn

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_CALL = re.compile(f"{OPEN}(.*?){CLOSE}", re.DOTALL)
_FORM = f'{OPEN}\n{{"name": ..., "arguments": {{...}}}}\n{CLOSE}'
_SHOWN = 80


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool."""

    name: str
    arguments: dict[str, Any]

    @property
    def text(self) -> str:
        """Text of the call, as the policy writes it.

        >>> calls_of(ToolCall("add", {"to": 1}).text)
        [ToolCall(name='add', arguments={'to': 1})]
        """
        return f"{OPEN}\n{json.dumps({'name': self.name, 'arguments': self.arguments})}\n{CLOSE}"


class ToolError(Exception):
    """Error of a call, in words that tell the policy what to do about it."""


def calls_of(text: str) -> list[ToolCall | ToolError]:
    """Calls in ``text``, in their order; what is none, but begins or ends like one, as the error that it is.

    >>> calls_of('Let me see. <tool_call>{"name": "add", "arguments": {"to": 1}}</tool_call>')
    [ToolCall(name='add', arguments={'to': 1})]
    >>> calls_of("The answer is 4.")
    []
    """
    found: list[ToolCall | ToolError] = [_call_or_error(body) for body in _CALL.findall(text)]
    rest = _CALL.sub("", text)
    for mark, missing in ((OPEN, CLOSE), (CLOSE, OPEN)):
        if mark in rest:
            found.append(ToolError(f"found {mark} without {missing}; a call is written {_FORM}"))
    return found


def _call_or_error(body: str) -> ToolCall | ToolError:
    try:
        call = json.loads(body, parse_constant=_refuse, object_pairs_hook=_without_doubles)
        return _checked(call)
    except ToolError as error:
        return error
    except (ValueError, RecursionError) as error:
        return ToolError(f"this call is not JSON: {error}; a call is written {_FORM}")


def _checked(call: Any) -> ToolCall:
    if not isinstance(call, dict) or set(call) != {"name", "arguments"}:
        found = ", ".join(map(repr, call)) if isinstance(call, dict) else type(call).__name__
        raise ToolError(f"a call has name and arguments, found {found[:_SHOWN]}; it is written {_FORM}")
    if not isinstance(call["name"], str) or not isinstance(call["arguments"], dict):
        raise ToolError(f"the name of a call is a text, and its arguments are an object; it is written {_FORM}")
    return ToolCall(**call)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"found {constant}")


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("a key stands twice in an object")
    return found
