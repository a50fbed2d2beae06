"""Chat messages of rows, checked and converted to the form that chat templates expect.

A message is {"role", "content", ...} as in OpenAI's and Hugging Face's formats. A message with a
key or part that neither this package nor the chat template reads is refused, and the error names
the key: a template would silently ignore it.
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
"""Keys of a message that are read here, or that a template may ignore without loss."""
_PART_KEYS = frozenset(["type", "text", "cache_control", "annotations"])
"""Keys of a text part. `cache_control` and `annotations` only concern a service's cache and
citations."""
_WORD = re.compile(r"\w+")
_TAG = re.compile(r"</?\w+>")
"""Pattern of a tag such as `<think>`, which a template may write in another form."""


def check_messages(
    messages: Sequence[Message], reads: Callable[[str], bool], ignored: Sequence[str] = ()
) -> list[Message]:
    """``messages`` in the form that templates expect: without nulls, with a content in each, and
    with text parts of type `text`. Media are not changed.

    ``reads``: whether the template reads a key of messages. ``ignored``: keys to drop. BadRecord:
    a message has no content, or has a value that the template would ignore.
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
        # Nothing is lost if an empty value, such as `annotations: []`, is ignored. False and 0 are
        # not empty.
        if not is_empty(fields[key]) and not reads(key):
            raise _unread_key(where, key)
    _check_thoughts(where, fields, reads)
    _check_tool_calls(where, fields)
    content = _content(where, role, fields)
    if role == "user" and not says_something(content):
        raise BadRecord("empty_prompt", f"{where} (user) is empty")
    return fields | {"content": content}


def _unread_key(where: str, key: str, advice: str = "remove it") -> BadRecord:
    return BadRecord(
        "unknown_key",
        f"{where}: found {key!r}, which the chat template does not read; {advice}, or list it in "
        "data.ignore_keys",
    )


def _check_thoughts(where: str, message: Message, reads: Callable[[str], bool]) -> None:
    """BadRecord: the template reads thoughts, but under another key. A template that reads no
    thoughts may drop them: many templates drop those of earlier turns on purpose."""
    named = [key for key in _THOUGHTS if message.get(key)]
    read = [key for key in _THOUGHTS if reads(key)]
    if named and read and not set(named) & set(read):
        raise _unread_key(where, named[0], f"rename it to {' or '.join(map(repr, read))}")


def _content(where: str, role: str, message: Message) -> Any:
    content = message.get("content")
    if content is None:
        # An assistant's message with a tool call may have no text. SGLang also takes it as an
        # empty text.
        if role == ASSISTANT and any(message.get(key) for key in ("tool_calls", *_THOUGHTS)):
            return ""
        raise BadRecord("wrong_type", f"{where} ({role}) has no content, allowed: a text or parts")
    if isinstance(content, list):
        return [_checked_part(where, part) for part in content]
    # The result of a tool may be an object, which templates show as JSON.
    if isinstance(content, str) or (role != ASSISTANT and isinstance(content, Mapping)):
        return content
    kind = type(content).__name__
    raise BadRecord("wrong_type", f"{where}: content is {kind}, allowed: a text or a list of parts")


def _checked_part(where: str, part: Any) -> Any:
    """A part of a content. A text part gets the type `text`; other parts are not changed."""
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
    """Whether a content from `check_messages` has a text that is not blank, or a medium."""
    if isinstance(content, str):
        return bool(content.strip())
    if not isinstance(content, list):
        return bool(content)
    return any(part.get("type") != "text" or part["text"].strip() for part in content)


def left_out_message(messages: Sequence[Message], text: str) -> int | None:
    """Number of the first message with a text that is missing in ``text``, the output of a
    template for ``messages``; None: no text is missing.

    Templates ignore roles that they do not know, such as `developer`, and some show only the first
    of several parts. The longest word of each text must occur in ``text`` as often as in all these
    messages together. Messages of the assistant are not checked, because templates drop its
    thoughts.
    """
    texts: list[tuple[int, str]] = []
    for number, message in enumerate(messages):
        if message["role"] != ASSISTANT:
            texts += [(number, message_text) for message_text in _texts_in(message["content"])]
    all_texts = "\n".join(message_text for _, message_text in texts)
    for number, message_text in texts:
        longest = _longest_word(message_text)
        if longest and text.count(longest) < all_texts.count(longest):
            return number
    return None


def left_out_of_turn(message: Message, turn: str) -> str:
    """Name of a part of the assistant's ``message`` that is missing in ``turn``, the output of a
    template for it: `content`, a key of thoughts, or a call; empty: no part is missing.

    The longest word of each part must occur in ``turn``. A content may begin with thoughts, which
    some templates cut off: the texts before and after `</think>` are checked separately.
    """
    texts: list[tuple[str, str]] = []
    for content in _texts_in(message["content"]):
        texts += [("content", text) for text in content.split("</think>")]
    texts += [(key, message[key]) for key in _THOUGHTS if isinstance(message.get(key), str)]
    for call in message.get("tool_calls") or []:
        function = call.get("function") or call
        texts += [(f"a call of {function.get('name')}", text) for text in _texts_of_call(function)]
    for name, text in texts:
        if _longest_word(_TAG.sub(" ", text)) not in turn:
            return name
    return ""


def says_nothing(message: Message) -> bool:
    """Whether the assistant's ``message`` has no text, no thoughts and no calls."""
    return not says_something(message["content"]) and not any(
        message.get(key) for key in ("tool_calls", *_THOUGHTS)
    )


def _texts_of_call(function: Mapping[str, Any]) -> Iterator[str]:
    """Name of the called function, and all texts in its arguments."""
    yield str(function.get("name", ""))
    pending = [function.get("arguments")]
    while pending:
        value = pending.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            pending += value.values()
        elif isinstance(value, list):
            pending += value


def _longest_word(text: str) -> str:
    return max(_WORD.findall(text), key=len, default="")


def _texts_in(content: Any) -> list[str]:
    """Texts of a content from `check_messages`."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        return []
    return [part["text"] for part in content if part.get("type") == "text"]


def without_null_fields(tools: Any) -> Any:
    """Signatures of ``tools`` without fields that are null. `datasets` writes a null for each
    parameter that only other tools have. Values that may be null, such as a default, stay.

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
