"""Tool calls in the text of the policy, in Qwen3's format: each call is a JSON object between two
marks."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any, NoReturn

from relax_hpc.base.foreign_files import unique_members
from relax_hpc.environments.plain_values import clean_texts

OPEN, CLOSE = "<tool_call>", "</tool_call>"
THINK, THOUGHT = "<think>", "</think>"
"""Marks around a thought. A thought contains neither calls nor answers."""
_PIECE = re.compile(f"{OPEN}(?P<call>.*?){CLOSE}|{THINK}.*?(?:{THOUGHT}|\\Z)", re.DOTALL)
"""A call, or a thought, which may be cut off."""
_FORM = f'{OPEN}\n{{"name": ..., "arguments": {{...}}}}\n{CLOSE}'
_MAX_SHOWN_CHARS = 80


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool."""

    name: str
    arguments: dict[str, Any]

    @property
    def text(self) -> str:
        """Text of the call in the policy's format.

        >>> calls_of(ToolCall("add", {"to": 1}).text)
        [ToolCall(name='add', arguments={'to': 1})]
        """
        return f"{OPEN}\n{json.dumps({'name': self.name, 'arguments': self.arguments})}\n{CLOSE}"


class ToolError(Exception):
    """Error of a call. Its text is shown to the policy, and says how to correct the call."""


def calls_of(text: str, in_thought: bool = False) -> list[ToolCall | ToolError]:
    """Calls in ``text`` outside of thoughts, in their order. A malformed call becomes an error.
    ``in_thought``: the chat template has opened a thought before the text.

    >>> calls_of('Let me see. <tool_call>{"name": "add", "arguments": {"to": 1}}</tool_call>')
    [ToolCall(name='add', arguments={'to': 1})]
    >>> calls_of("<think>Not <tool_call>{}</tool_call>.</think>The answer is 4.")
    []
    """
    return read_turn(text, in_thought).calls


@dataclass(frozen=True, slots=True)
class Turn:
    """A parsed turn of the policy."""

    spoken: str
    """Text of the turn outside of thoughts."""
    calls: list[ToolCall | ToolError]
    first_call: int
    """Index in the text at which the first call begins; without a call, the length of the text."""


def read_turn(text: str, in_thought: bool = False) -> Turn:
    """Parse a turn.

    A thought extends from `<think>` to `</think>`, or to the end if it was cut off. A `</think>`
    without a beginning ends a thought that the chat template has opened. Marks within a call belong
    to its arguments. Marks of calls within a thought belong to the thought.

    >>> read_turn("so </think> Paris").spoken
    ' Paris'
    """
    spoken, calls, first_call, begin = list[str](), list[ToolCall | ToolError](), len(text), 0
    if in_thought:
        thought, mark, _ = text.partition(THOUGHT)
        begin = len(thought) + len(mark)
    for piece in [*_PIECE.finditer(text, begin), None]:
        between = text[begin : piece.start() if piece else len(text)]
        if THOUGHT in between:
            # The chat template has opened a thought, which extends up to here.
            spoken, calls, first_call = [], [], len(text)
            between = between.rpartition(THOUGHT)[2]
        spoken.append(between)
        if piece:
            begin = piece.end()
        if piece and piece["call"] is not None:
            calls.append(_call_or_error(piece["call"]))
            first_call = min(first_call, piece.start())
    for mark, missing in ((OPEN, CLOSE), (CLOSE, OPEN)):
        if any(mark in text_between for text_between in spoken):
            calls.append(ToolError(f"found {mark} without {missing}; a call is written {_FORM}"))
    return Turn("".join(spoken), calls, first_call)


def opens_thought(text: str) -> bool:
    """Whether a turn after ``text``, the end of a prompt, begins in a thought.

    >>> opens_thought("<|im_start|>assistant\\n<think>\\n")
    True
    >>> opens_thought("<think>\\n\\n</think>\\n\\n")
    False
    """
    return text.rstrip().endswith(THINK)


def _call_or_error(body: str) -> ToolCall | ToolError:
    try:
        call = json.loads(
            body, parse_constant=_refuse, parse_float=_finite, object_pairs_hook=unique_members
        )
        return _check_call(clean_texts(call))
    except ToolError as error:
        return error
    except (ValueError, RecursionError) as error:
        return ToolError(f"this call is not JSON: {error}; a call is written {_FORM}")


def _check_call(call: Any) -> ToolCall:
    if not isinstance(call, dict) or set(call) != {"name", "arguments"}:
        keys = ", ".join(map(repr, call)) if isinstance(call, dict) else type(call).__name__
        raise ToolError(
            f"a call has name and arguments, found {keys[:_MAX_SHOWN_CHARS]}; it is written {_FORM}"
        )
    if not isinstance(call["name"], str) or not isinstance(call["arguments"], dict):
        raise ToolError(
            f"the name of a call is a text, and its arguments are an object; it is written {_FORM}"
        )
    return ToolCall(**call)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"found {constant}")


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"found {number[:_MAX_SHOWN_CHARS]}")
    return value
