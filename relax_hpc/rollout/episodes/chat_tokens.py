"""Tokens of messages that a chat template renders. No text of a message becomes a special token.

A template renders whole messages: a filter such as `trim` or `tojson` gets the text of a message.
Names of special tokens in messages are therefore replaced by random marks before rendering, and
become plain text when the result is tokenized.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from relax_hpc.data.chat import ChatTemplate, TemplateError
from relax_hpc.data.tokenizer import Tokenizer

Tools = Sequence[Mapping[str, Any]]


def random_mark() -> str:
    """A text that no message contains. It consists of digits, which no filter of letters
    changes."""
    return str(10**30 + secrets.randbelow(10**30))


class ChatTokens:
    """A chat template and its tokenizer. A call may take some milliseconds. Threads may share
    it."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        self._template, self._tokenizer = template, tokenizer
        self._answer = random_mark()
        self._marks = {name: random_mark() for name in tokenizer.special_names}
        self._names = {mark: name for name, mark in self._marks.items()}
        longest_first = sorted(map(re.escape, self._marks), key=len, reverse=True)
        self._special = re.compile("|".join(longest_first) or r"(?!)")
        self._ends = tuple(filter(None, map(tokenizer.name_of, tokenizer.eos_ids)))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Tools = (),
        add_generation_prompt: bool = True,
    ) -> str:
        """Text of a chat. ``add_generation_prompt``: including the opening of the policy's turn.
        TemplateError: the template does not accept it."""
        return self._template.render(
            self._protect(messages), add_generation_prompt, self._protect(tools)
        )

    def render_between(
        self,
        before: Sequence[Mapping[str, Any]],
        after: Sequence[Mapping[str, Any]],
        last: int,
        tools: Tools = (),
    ) -> str:
        """Text between two turns of the policy. The first turn follows the messages ``before`` and
        ends with the token ``last``; the second follows the messages ``after``.

        The template never gets the first turn, so the tokens of that turn do not change.
        TemplateError: the template does not accept these messages, or the turn cannot be located.
        """
        answer = {"role": "assistant", "content": self._answer}
        text = self.render([*before, answer, *after], tools)
        if text.count(self._answer) != 1:
            raise TemplateError("the template does not show the last answer once")
        text = text.partition(self._answer)[2]
        if last in self._tokenizer.eos_ids:
            end = next((name for name in self._ends if text.startswith(name)), "")
            text = text.removeprefix(end)
        return text

    def tokens(
        self, text: str, last: int | None = None, media: Mapping[str, Sequence[int]] | None = None
    ) -> list[int]:
        """Tokens of a rendered ``text`` after the token ``last``, if there is one. ``media``: mark
        in the text -> tokens of the medium."""
        media = media or {}
        marks = "|".join([*self._names, *media])
        before = self._name(last)
        ids: list[int] = []
        for piece in filter(None, re.split(f"({marks})", text) if marks else [text]):
            if piece in media:
                ids += media[piece]
                before = self._name(media[piece][-1])
            elif piece in self._names:
                ids += self._tokenizer.encode_after(before, self._names[piece])
                # In a message, the name of a special token is plain text.
                before = " "
            else:
                ids += self._tokenizer.encode_after(before, piece, special_tokens=True)
                before = piece
        return ids

    def _name(self, token: int | None) -> str:
        """Name of a ``token``; empty: no token, or one without a name."""
        return "" if token is None else self._tokenizer.name_of(token) or ""

    def _protect(self, value: Any) -> Any:
        """A JSON value with marks instead of the names of special tokens."""
        if isinstance(value, str):
            return self._special.sub(lambda name: self._marks[name[0]], value)
        if isinstance(value, list | tuple):
            return [self._protect(item) for item in value]
        if isinstance(value, Mapping):
            return {self._protect(key): self._protect(item) for key, item in value.items()}
        return value
