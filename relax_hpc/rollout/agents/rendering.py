"""Tokens of chats: of a whole one where it begins, later of what is new alone, so that no token is made twice."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from typing import Any

from relax_hpc.data.chat import ChatTemplate, TemplateError
from relax_hpc.data.tokenizer import Tokenizer
from relax_hpc.rollout.agents.chat import Message

Tools = Sequence[dict[str, Any]]


class Renderer:
    """A run's chat template and tokenizer. Texts of messages never become special tokens, whatever stands in them.

    Each method may take some milliseconds, and threads may share it.
    """

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        self._template, self._tokenizer = template, tokenizer
        # Nobody who writes messages knows these words.
        self._answer = f"answer{secrets.token_hex(8)}"
        self._names = {f"name{secrets.token_hex(8)}": name for name in tokenizer.special_names}
        self._cut = re.compile(f"({'|'.join(self._names)})") if self._names else None

    def prompt(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """Tokens of a chat, up to where the policy speaks. TemplateError: the template does not take it."""
        return self._tokens(self._text(messages, tools))

    def between(self, messages: Sequence[Message], answer: int, tools: Tools, last: int) -> list[int]:
        """Tokens between ``messages[answer]``, the last token of which is ``last``, and where the policy speaks again.

        They follow from all other messages, and not from what it has said: the template never sees that again.
        TemplateError: the template does not take it, or shows no such place.
        """
        said = {"role": "assistant", "content": self._answer}
        parts = self._text([*messages[:answer], said, *messages[answer + 1 :]], tools).split(self._answer)
        if len(parts) != 2:
            raise TemplateError("the template does not show the last answer once")
        after = parts[1]
        if last in self._tokenizer.eos_ids:
            after = after.removeprefix(self._tokenizer.name_of(last))
        return self._tokens(after)

    def _text(self, messages: Sequence[Message], tools: Tools) -> str:
        dumped = json.dumps([list(messages), list(tools)], ensure_ascii=False)
        for word, name in self._names.items():
            dumped = dumped.replace(name, word)
        shown, offered = json.loads(dumped)
        return self._template.render(shown, tools=offered)

    def _tokens(self, text: str) -> list[int]:
        pieces = self._cut.split(text) if self._cut else [text]
        found: list[int] = []
        for piece in filter(None, pieces):
            name = self._names.get(piece)
            found += self._tokenizer.encode(name or piece, special=False, special_tokens=name is None)
        return found
