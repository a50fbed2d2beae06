"""Tokens of chats that programs send: of a whole chat at its beginning, later only of its new
messages, so that no message is tokenized twice."""

from __future__ import annotations

from collections.abc import Sequence

from relax_hpc.data.chat import TemplateError
from relax_hpc.data.messages import left_out_message
from relax_hpc.rollout.agents.chat import Message
from relax_hpc.rollout.episodes.chat_tokens import ChatTokens, Tools


class Renderer(ChatTokens):
    """A run's chat template and tokenizer, for chats of agent programs."""

    def prompt(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """Tokens of a chat, including the opening of the policy's turn. TemplateError: the template
        does not accept it, or leaves out a message or a tool."""
        text = self.render(messages, tools)
        self._check_messages(messages, text)
        names = [str(tool["function"]["name"]) for tool in self._protect(tools)]
        hidden = [name for name in names if name not in text]
        # If the template shows no tools at all, the policy may still learn the program's tools by
        # trial.
        if hidden and self._template.mentions("tools"):
            raise TemplateError(f"the chat template does not show the tool {hidden[0]!r}")
        return self.tokens(text)

    def between(
        self, messages: Sequence[Message], answer: int, tools: Tools, last: int
    ) -> list[int]:
        """Tokens between the turn ``messages[answer]``, which ends with the token ``last``, and the
        policy's next turn. TemplateError: see `render_between`, or the template leaves out a
        message."""
        after = messages[answer + 1 :]
        text = self.render_between(messages[:answer], after, last, tools)
        self._check_messages(after, text)
        return self.tokens(text, last)

    def _check_messages(self, messages: Sequence[Message], text: str) -> None:
        """TemplateError: the rendered ``text`` lacks the text of one of the ``messages``, so that
        the policy would not see it."""
        number = left_out_message(self._protect(messages), text)
        if number is not None:
            raise TemplateError(
                f"the chat template leaves out a message of the role {messages[number]['role']}"
            )
