"""Chat messages of rows, checked and brought into the form that chat templates take.

A message is {"role", "content", ...} as OpenAI and Hugging Face have them. Keys and parts that
neither this package nor the chat template reads are refused by name: a template would ignore them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from relax_hpc.data.rows import BadRecord, is_empty

Message = dict[str, Any]
ASSISTANT = "assistant"
TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of parts that are text, in OpenAI's two interfaces and in Hugging Face's."""
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
_KEYS = frozenset(["role", "content", "name", "tool_call_id", "weight", *_THOUGHTS])
"""Keys of a message that are read here, or that the template may ignore without loss."""
_PART_KEYS = frozenset(["type", "text", "cache_control", "annotations"])
"""Keys of a part that is text. The last two concern a service's cache and citations alone."""
_WORD = re.compile(r"\w+")
_TAG = re.compile(r"</?\w+>")
"""A tag such as `<think>`, which a template may write in another form."""


def check_messages(
    messages: Sequence[Message], reads: Callable[[str], bool], ignored: Sequence[str] = ()
) -> list[Message]:
    """``messages`` as templates take them: without nulls, texts as parts of type `text`, and a
    content in each. Media are left as they are.

    ``reads``: whether the template reads a key of messages. ``ignored``: keys to leave out.
    BadRecord: a message has no content, or has something that would be ignored.
    """
    return [_checked(number, message, reads, ignored) for number, message in enumerate(messages)]


def _checked(
    number: int, message: Message, reads: Callable[[str], bool], ignored: Sequence[str]
) -> Message:
    fields = {
        key: value for key, value in message.items() if value is not None and key not in ignored
    }
    where = f"message {number}"
    role = fields.get("role")
    if not isinstance(role, str) or not role:
        raise BadRecord("wrong_type", f"{where}: role is {str(role)[:40]!r}, allowed: a text")
    for key in sorted(fields.keys() - _KEYS):
        # An empty value, such as `annotations: []`, has nothing to be ignored. False is no such
        # value.
        if not is_empty(fields[key]) and not reads(key):
            raise _unread(where, key)
    _check_thoughts(where, fields, reads)
    _check_tool_calls(where, fields)
    content = _content(where, role, fields)
    if role == "user" and not says_something(content):
        raise BadRecord("empty_prompt", f"{where} (user) is empty")
    return fields | {"content": content}


def _unread(where: str, key: str, advice: str = "remove it") -> BadRecord:
    return BadRecord(
        "unknown_key",
        f"{where}: found {key!r}, which the chat template does not read; {advice}, or list it in "
        "data.ignore_keys",
    )


def _check_thoughts(where: str, message: Message, reads: Callable[[str], bool]) -> None:
    """BadRecord: the template reads thoughts, but under another key. A template that reads none
    drops the thoughts of earlier turns, as it is meant to."""
    named = [key for key in _THOUGHTS if message.get(key)]
    read = [key for key in _THOUGHTS if reads(key)]
    if named and read and not set(named) & set(read):
        raise _unread(where, named[0], f"rename it to {' or '.join(map(repr, read))}")


def _content(where: str, role: str, message: Message) -> Any:
    content = message.get("content")
    if content is None:
        # An assistant that calls a tool need not say anything. SGLang makes an empty text of it
        # too.
        if role == ASSISTANT and any(message.get(key) for key in ("tool_calls", *_THOUGHTS)):
            return ""
        raise BadRecord("wrong_type", f"{where} ({role}) has no content, allowed: a text or parts")
    if isinstance(content, list):
        return [_part(where, part) for part in content]
    # Templates show what a tool returned as JSON where it is an object.
    if isinstance(content, str) or (role != ASSISTANT and isinstance(content, Mapping)):
        return content
    kind = type(content).__name__
    raise BadRecord("wrong_type", f"{where}: content is {kind}, allowed: a text or a list of parts")


def _part(where: str, part: Any) -> Any:
    """A part of a content; a text in one form, others as they are."""
    if not isinstance(part, Mapping):
        raise BadRecord(
            "wrong_type", f"{where}: found {str(part)[:40]!r}, allowed: parts with a type"
        )
    kind = part.get("type", "text" if "text" in part else None)
    if kind not in TEXT_PARTS:
        return dict(part)
    if not isinstance(part.get("text"), str):
        raise BadRecord("wrong_type", f"{where}: a part of type {kind!r} has no text")
    unknown = [key for key, value in part.items() if value is not None and key not in _PART_KEYS]
    if unknown:
        raise BadRecord(
            "unknown_key", f"{where}: found {unknown[0]!r} in a part of text; remove it"
        )
    return {"type": "text", "text": part["text"]}


def _check_tool_calls(where: str, message: Message) -> None:
    calls = message.get("tool_calls")
    if calls is None:
        return
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise BadRecord("wrong_type", f"{where}: tool_calls is no list of objects")


def says_something(content: Any) -> bool:
    """Whether a content that `check_messages` returned has a text that is not blank, or a
    medium."""
    if isinstance(content, str):
        return bool(content.strip())
    if not isinstance(content, list):
        return bool(content)
    return any(part.get("type") != "text" or part["text"].strip() for part in content)


def left_out_message(messages: Sequence[Message], text: str) -> int | None:
    """Number of a message of which ``text``, which a template made of ``messages``, lacks a text,
    or None. Templates ignore roles that they do not know, such as `developer`, and some show the
    first of several parts alone. The longest word of each text is looked for, as often as all these
    messages have it. Messages of the assistant are not looked for: templates drop its thoughts."""
    texts: list[tuple[int, str]] = []
    for number, message in enumerate(messages):
        if message["role"] != ASSISTANT:
            texts += [(number, message_text) for message_text in _texts_in(message["content"])]
    all_texts = "\n".join(message_text for _, message_text in texts)
    for number, message_text in texts:
        word = _longest_word(message_text)
        if word and text.count(word) < all_texts.count(word):
            return number
    return None


def left_out_of_turn(message: Message, turn: str) -> str:
    """Name of a part of the assistant's ``message`` that ``turn``, the text which a template made
    of it, does not show: `content`, a key of thoughts, or a call; empty: it shows all. The longest
    word of each is looked for. A content may begin with thoughts, which some templates cut off."""
    parts: list[tuple[str, str]] = []
    for content in _texts_in(message["content"]):
        parts += [("content", text) for text in content.split("</think>")]
    parts += [(key, message[key]) for key in _THOUGHTS if isinstance(message.get(key), str)]
    for call in message.get("tool_calls") or []:
        function = call.get("function") or call
        parts += [(f"a call of {function.get('name')}", text) for text in _texts_of_call(function)]
    return next(
        (name for name, text in parts if _longest_word(_TAG.sub(" ", text)) not in turn), ""
    )


def says_nothing(message: Message) -> bool:
    """Whether the assistant's ``message`` has no text, no thoughts and no calls."""
    return not says_something(message["content"]) and not any(
        message.get(key) for key in ("tool_calls", *_THOUGHTS)
    )


def _texts_of_call(function: Mapping[str, Any]) -> Iterator[str]:
    """Name of a function that is called, and the texts among its arguments."""
    yield str(function.get("name", ""))
    waiting = [function.get("arguments")]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


def _longest_word(text: str) -> str:
    return max(_WORD.findall(text), key=len, default="")


def _texts_in(content: Any) -> list[str]:
    """Texts of a content that `check_messages` returned."""
    if isinstance(content, str):
        return [content]
    parts = content if isinstance(content, list) else []
    return [part["text"] for part in parts if part.get("type") == "text"]


def without_null_fields(tools: Any) -> Any:
    """Signatures of ``tools`` without fields that are null, which `datasets` writes for parameters
    that only other tools have. Values that may be null, such as a default, stay.

    >>> without_null_fields({"properties": {"x": {"default": None}, "city": None}})
    {'properties': {'x': {'default': None}}}
    """
    if isinstance(tools, list):
        return [without_null_fields(entry) for entry in tools]
    if not isinstance(tools, dict):
        return tools
    kept = {key: value for key, value in tools.items() if value is not None or key in _NULLABLE}
    return {
        key: value if key in _NULLABLE else without_null_fields(value)
        for key, value in kept.items()
    }


_NULLABLE = ("default", "const", "enum", "examples")
"""Keywords of a JSON schema whose values may be null."""
