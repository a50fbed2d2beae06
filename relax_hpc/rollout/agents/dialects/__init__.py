"""Interfaces by which clients ask for answers, one file each: what they send is read as a
`ChatRequest`, and what they get is an `Answer` as they expect it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from relax_hpc.rollout.agents.answers import Answer
from relax_hpc.rollout.agents.chat import ChatRequest, Message
from relax_hpc.rollout.agents.dialects import completions, messages, responses
from relax_hpc.rollout.agents.gateway.front import MESSAGES, Reply


class Dialect(Protocol):
    """Module of an interface."""

    TOO_LONG: str
    """Words by which its clients know that a chat is too long, with places for its ``tokens`` and
    the ``limit``."""

    def parse(
        self, asked: Mapping[str, Any], chats: Mapping[str, Sequence[Message]]
    ) -> ChatRequest:
        """The request in ``asked``; ``chats`` so far, by the names of their last answers. Refused:
        it is none."""

    def reply(self, request: ChatRequest, answer: Answer) -> Reply:
        """The reply to a client: an object, or the events of a stream, all at once."""


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
"""The same by the path of a request for the number of a chat's tokens."""
