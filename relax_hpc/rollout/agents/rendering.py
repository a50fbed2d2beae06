"""Tokens of chats: of a whole one where it begins, later of what is new alone, so that no token is made twice."""

from __future__ import annotations

from collections.abc import Sequence

from relax_hpc.rollout.agents.chat import Message
from relax_hpc.rollout.chat_tokens import ChatTokens, Tools


class Renderer(ChatTokens):
    """A run's chat template and tokenizer, for chats that programs send."""

    def prompt(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """Tokens of a chat, up to where the policy speaks. TemplateError: the template does not take it."""
        return self.tokens(self.render(messages, tools))

    def between(self, messages: Sequence[Message], answer: int, tools: Tools, last: int) -> list[int]:
        """Tokens between ``messages[answer]``, the last token of which is ``last``, and where the policy speaks again.
        TemplateError: see `render_between`."""
        text = self.render_between(messages[:answer], messages[answer + 1 :], last, tools)
        return self.tokens(text, last)
