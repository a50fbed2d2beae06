"""Tokens between two turns of the policy: what others say, as the run's chat template has it.

The template renders each message itself, behind placeholders for the messages before it. Tokens of
these stay as they are: history is never tokenised again.
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

_NOTE = "\n[cut here: {} more tokens]"
"""End of a text that is longer than an observation may be."""
_BYTES = 4
"""Bytes of a character, at most."""
_PROMPT = ("user",)
"""Roles of a prompt's messages, where more is not known."""
ChatMessage = dict[str, str]


class Bridge:
    """Bridge from turn to turn of one run."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        places: Mapping[Kind, PlaceholderTokens] | None = None,
        most: int = 1 << 20,
        note_cut: Callable[[], None] = lambda: None,
    ) -> None:
        """``template``: None where prompts are texts as they stand, between which nothing is put.
        ``places``: those of media, by kind. ``most``: tokens of the texts of a message;
        ``note_cut`` is called for each that has more."""
        self._tokenizer, self._places, self._most = tokenizer, dict(places or {}), most
        self._note_cut = note_cut
        self._marks = {kind: random_mark() for kind in self._places}
        """Words that stand for media in the texts of messages."""
        self._chat = ChatTokens(template, tokenizer) if template else None
        self._opening = self._render_opening(self._chat) if self._chat else []

    def tokens(
        self,
        before: Sequence[int],
        messages: Sequence[Message],
        is_prompt: bool,
        roles: Sequence[str] = _PROMPT,
    ) -> tuple[int, list[int]]:
        """Number of the tokens ``before`` that stay, and those that follow, a medium's placeholder
        once for each.

        ``is_prompt``: nothing of it was sampled, so that what would have the policy speak at its
        end is left out. ``roles``: of all messages so far without the policy's last turn. A
        template may look at them. EnvironmentFault: nothing follows, or the template takes no such
        messages.
        """
        contents = [
            {"role": message.role, "content": self._content(message.parts)} for message in messages
        ]
        media = {self._marks[kind]: rules.tokens for kind, rules in self._places.items()}
        kept = len(before)
        if not self._chat:
            text = "".join(message["content"] for message in contents)
            ids = self._join(text, self._tokenizer.name_of(before[-1]) or "", media)
        elif is_prompt and self._opening and list(before[-len(self._opening) :]) == self._opening:
            kept -= len(self._opening)
            text = self._render_behind_prompt(self._chat, contents, roles)
            ids = self._chat.tokens(text, before[kept - 1], media)
        else:
            text = self._render_behind_turn(self._chat, contents, roles, before[-1])
            ids = self._chat.tokens(text, before[-1], media)
        if not ids:
            raise EnvironmentFault(
                "environment_answer", "found an empty observation, allowed: text or media"
            )
        return kept, ids

    def _join(self, text: str, before: str, media: Mapping[str, Sequence[int]]) -> list[int]:
        """Tokens of ``text`` behind a token that is called ``before``, none of them special, and
        those of ``media`` by the words that stand for them."""
        ids = list[int]()
        for piece in filter(None, re.split(f"({'|'.join(media)})", text) if media else [text]):
            tokens = media[piece] if piece in media else self._tokenizer.encode_after(before, piece)
            before = self._tokenizer.name_of(tokens[-1]) or "" if tokens else before
            ids += tokens
        return ids

    def _render_behind_turn(
        self, chat: ChatTokens, after: Sequence[ChatMessage], roles: Sequence[str], last: int
    ) -> str:
        try:
            return chat.render_between(_placeholders(roles), after, last)
        except TemplateError as error:
            names = " and ".join(message["role"] for message in after)
            raise EnvironmentFault(
                "environment_answer", f"the chat template takes no messages of {names}: {error}"
            ) from error

    def _render_behind_prompt(
        self, chat: ChatTokens, after: Sequence[ChatMessage], roles: Sequence[str]
    ) -> str:
        """Text of messages behind a prompt without its opening."""
        before = _placeholders(roles)
        try:
            prompt, text = chat.render(before, whole=True), chat.render([*before, *after])
            if text.startswith(prompt):
                return text.removeprefix(prompt)
        except TemplateError:
            pass
        # A template that wants the policy between two users' messages: as if it had said something,
        # and without the line break that ends its turn.
        return self._render_behind_turn(
            chat, after, roles, self._tokenizer.eos_ids[0]
        ).removeprefix("\n")

    def _content(self, content: Sequence[Part]) -> str:
        """Text of a message, with a word in the place of each medium."""
        for piece in content:
            if isinstance(piece, str):
                _check_text(piece)
        texts = list[str]()
        for piece in self._shortened(content):
            if isinstance(piece, str):
                texts.append(piece)
            elif Kind(piece.kind) in self._places:
                texts.append(self._marks[Kind(piece.kind)])
            else:
                raise EnvironmentFault(
                    "environment_answer", f"found {piece.kind}, of which the model takes none"
                )
        return "".join(texts)

    def _plain(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, special=False) if text else []

    def _shortened(self, parts: Sequence[Part]) -> Sequence[Part]:
        """``parts`` with texts of as many tokens as are allowed together; where they had more, a
        note says so."""
        texts = [part for part in parts if isinstance(part, str)]
        # A character of any language has no more tokens than bytes.
        if (
            sum(map(len, texts)) * _BYTES <= self._most
            or sum(len(self._plain(text)) for text in texts) <= self._most
        ):
            return parts
        self._note_cut()
        short, left = list[Part](), self._most
        for part in parts:
            if isinstance(part, str):
                ids = self._plain(part)
                part = (
                    part
                    if len(ids) <= left
                    else self._tokenizer.decode(ids[:left]) + _NOTE.format(len(ids) - left)
                )
                left = max(0, left - len(ids))
            short.append(part)
        return short

    def _render_opening(self, chat: ChatTokens) -> list[int]:
        """Tokens at the end of a prompt by which the policy is to speak."""
        prompt = _placeholders(_PROMPT)
        text, without = chat.render(prompt), chat.render(prompt, whole=True)
        opening = text.removeprefix(without)
        return chat.tokens(opening) if opening != text else []


def _placeholders(roles: Sequence[str]) -> list[ChatMessage]:
    return [{"role": role, "content": "text"} for role in roles]


def _check_text(text: str) -> None:
    """EnvironmentFault: ``text`` is none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise EnvironmentFault(
            "environment_answer", f"found a text that is not Unicode: {error}"
        ) from error
