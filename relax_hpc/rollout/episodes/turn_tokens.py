"""Tokens between two turns of the policy: the messages of an environment, in the format of the
run's chat template.

The template renders the new messages after placeholder texts for the earlier ones. The tokens of
earlier messages do not change: history is never tokenized again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from relax_hpc.data.chat import ChatTemplate, TemplateError
from relax_hpc.data.media import PlaceholderTokens
from relax_hpc.data.multimodal.medium import Kind
from relax_hpc.data.tokenizer import Tokenizer
from relax_hpc.environments.base import EnvironmentFault, Message, Part
from relax_hpc.rollout.episodes.chat_tokens import ChatTokens, random_mark

_CUT_NOTE = "\n[cut here: {} more tokens]"
"""Appended to a text that was cut to the maximum length of an observation."""
_MAX_CHARACTER_BYTES = 4
"""Most bytes of a character in UTF-8."""
_PROMPT_ROLES = ("user",)
"""Roles of a prompt's messages, if they are unknown."""
ChatMessage = dict[str, str]


class TurnTokenizer:
    """Tokenizes the messages between two turns, for one run."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        placeholders: Mapping[Kind, PlaceholderTokens] | None = None,
        max_tokens: int = 1 << 20,
        note_cut: Callable[[], None] = lambda: None,
    ) -> None:
        """``template``: None if prompts are plain texts, so that nothing is added between turns.
        ``placeholders``: those of media by kind. ``max_tokens``: most tokens of the texts of a
        message; ``note_cut`` is called for each message with more."""
        self._tokenizer, self._placeholders = tokenizer, dict(placeholders or {})
        self._max_tokens, self._note_cut = max_tokens, note_cut
        self._marks = {kind: random_mark() for kind in self._placeholders}
        """Texts that represent media in the texts of messages."""
        self._chat = ChatTokens(template, tokenizer) if template else None
        self._opening = self._render_opening(self._chat) if self._chat else []

    def tokens(
        self,
        before: Sequence[int],
        messages: Sequence[Message],
        is_prompt: bool,
        roles: Sequence[str] = _PROMPT_ROLES,
    ) -> tuple[int, list[int]]:
        """Number of the tokens ``before`` to keep, and the tokens of ``messages`` after them,
        with one placeholder for each medium.

        ``is_prompt``: ``before`` is a prompt without any turn. The opening of the policy's turn at
        its end is removed then. ``roles``: roles of all messages so far without the policy's last
        turn, which a template may use. EnvironmentFault: the messages are empty, or the template
        does not accept them.
        """
        contents = [
            {"role": message.role, "content": self._content(message.parts)} for message in messages
        ]
        media = {self._marks[kind]: rules.tokens for kind, rules in self._placeholders.items()}
        kept = len(before)
        if not self._chat:
            text = "".join(message["content"] for message in contents)
            ids = self._plain_tokens(text, self._tokenizer.name_of(before[-1]) or "", media)
        elif is_prompt and self._opening and list(before[-len(self._opening) :]) == self._opening:
            kept -= len(self._opening)
            text = self._render_after_prompt(self._chat, contents, roles)
            ids = self._chat.tokens(text, before[kept - 1], media)
        else:
            text = self._render_after_turn(self._chat, contents, roles, before[-1])
            ids = self._chat.tokens(text, before[-1], media)
        if not ids:
            raise EnvironmentFault(
                "environment_answer", "found an empty observation, allowed: text or media"
            )
        return kept, ids

    def _plain_tokens(
        self, text: str, before: str, media: Mapping[str, Sequence[int]]
    ) -> list[int]:
        """Tokens of ``text`` after a token with the name ``before``, none of them special.
        ``media``: mark in the text -> tokens of the medium."""
        ids = list[int]()
        for piece in filter(None, re.split(f"({'|'.join(media)})", text) if media else [text]):
            tokens = media[piece] if piece in media else self._tokenizer.encode_after(before, piece)
            if tokens:
                before = self._tokenizer.name_of(tokens[-1]) or ""
            ids += tokens
        return ids

    def _render_after_turn(
        self, chat: ChatTokens, after: Sequence[ChatMessage], roles: Sequence[str], last: int
    ) -> str:
        try:
            return chat.render_between(_placeholder_messages(roles), after, last)
        except TemplateError as error:
            names = " and ".join(message["role"] for message in after)
            raise EnvironmentFault(
                "environment_answer", f"the chat template takes no messages of {names}: {error}"
            ) from error

    def _render_after_prompt(
        self, chat: ChatTokens, after: Sequence[ChatMessage], roles: Sequence[str]
    ) -> str:
        """Text of messages after a prompt without its opening."""
        before = _placeholder_messages(roles)
        try:
            prompt, text = (
                chat.render(before, add_generation_prompt=False),
                chat.render([*before, *after]),
            )
            if text.startswith(prompt):
                return text.removeprefix(prompt)
        except TemplateError:
            pass
        # The template requires a turn of the policy between two messages of users. Render as after
        # such a turn, without the line break that ends it.
        text = self._render_after_turn(chat, after, roles, self._tokenizer.eos_ids[0])
        return text.removeprefix("\n")

    def _content(self, content: Sequence[Part]) -> str:
        """Text of a message, with a mark for each medium."""
        for piece in content:
            if isinstance(piece, str):
                _check_text(piece)
        texts = list[str]()
        for piece in self._cut(content):
            if isinstance(piece, str):
                texts.append(piece)
            elif Kind(piece.kind) in self._placeholders:
                texts.append(self._marks[Kind(piece.kind)])
            else:
                raise EnvironmentFault(
                    "environment_answer", f"found {piece.kind}, which the model does not take"
                )
        return "".join(texts)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, special=False) if text else []

    def _cut(self, content: Sequence[Part]) -> Sequence[Part]:
        """``content`` with its texts cut to the maximum number of tokens, and a note where a text
        was cut."""
        texts = [piece for piece in content if isinstance(piece, str)]
        # A text has at most as many tokens as bytes, which is cheaper to compute.
        max_bytes = sum(map(len, texts)) * _MAX_CHARACTER_BYTES
        if max_bytes <= self._max_tokens:
            return content
        if sum(len(self._encode(text)) for text in texts) <= self._max_tokens:
            return content
        self._note_cut()
        cut_content, remaining = list[Part](), self._max_tokens
        for piece in content:
            if isinstance(piece, str):
                ids = self._encode(piece)
                if len(ids) > remaining:
                    note = _CUT_NOTE.format(len(ids) - remaining)
                    piece = self._tokenizer.decode(ids[:remaining]) + note
                remaining = max(0, remaining - len(ids))
            cut_content.append(piece)
        return cut_content

    def _render_opening(self, chat: ChatTokens) -> list[int]:
        """Tokens at the end of a prompt that open the policy's turn."""
        prompt = _placeholder_messages(_PROMPT_ROLES)
        text, without = chat.render(prompt), chat.render(prompt, add_generation_prompt=False)
        opening = text.removeprefix(without)
        return chat.tokens(opening) if opening != text else []


Bridge = TurnTokenizer  # Name in release 0.1.


def _placeholder_messages(roles: Sequence[str]) -> list[ChatMessage]:
    return [{"role": role, "content": "text"} for role in roles]


def _check_text(text: str) -> None:
    """EnvironmentFault: ``text`` cannot be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise EnvironmentFault(
            "environment_answer", f"found a text that is not Unicode: {error}"
        ) from error
