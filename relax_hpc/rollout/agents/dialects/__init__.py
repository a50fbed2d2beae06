"""Interfaces for clients, one file each. An interface parses the body of a request into a
`ChatRequest`, and formats a `PolicyAnswer` as the reply that its clients expect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from relax_hpc.rollout.agents.answers import PolicyAnswer
from relax_hpc.rollout.agents.chat import ChatRequest, Message
from relax_hpc.rollout.agents.dialects import completions, messages, responses
from relax_hpc.rollout.agents.gateway.front import MESSAGES, Reply


class Dialect(Protocol):
    """The module of an interface."""

    TOO_LONG: str
    """Error message that its clients recognize as "the chat is too long", a format string with
    ``tokens`` and ``limit``."""

    def parse(
        self, body: Mapping[str, Any], chats: Mapping[str, Sequence[Message]], /
    ) -> ChatRequest:
        """The request in ``body``. ``chats``: id of an answer -> the chat that ends with it.
        Refused: the request is invalid."""

    def reply(self, request: ChatRequest, answer: PolicyAnswer) -> Reply:
        """The reply to a client: an object, or all events of a stream together."""


DIALECTS: dict[str, Dialect] = {
    "/v1/chat/completions": completions,
    "/v1/responses": responses,
    MESSAGES: messages,
}
"""Interfaces by the path of a request."""
COUNTERS: dict[str, Dialect] = {
    "/v1/responses/input_tokens": responses,
    f"{MESSAGES}/count_tokens": messages,
}
"""Interfaces by the path of a request for the number of tokens of a chat."""
