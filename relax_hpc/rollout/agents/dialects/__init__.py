"""Interfaces by which clients ask for answers, one file each: what they send is read as a `ChatRequest`, and what they
get is an `Answer` as they expect it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from relax_hpc.gateway.front import Reply
from relax_hpc.rollout.agents.answers import Answer
from relax_hpc.rollout.agents.chat import ChatRequest, Message
from relax_hpc.rollout.agents.dialects import completions, messages, responses


class Dialect(Protocol):
    """Module of an interface."""

    def parse(self, asked: Mapping[str, Any], chats: Mapping[str, Sequence[Message]]) -> ChatRequest:
        """The request in ``asked``; ``chats`` so far, by the names of their last answers. Refused: it is none."""

    def reply(self, request: ChatRequest, answer: Answer) -> Reply:
        """The reply to a client: an object, or the events of a stream, all at once."""


DIALECTS: dict[str, Dialect] = {
    "/v1/chat/completions": completions,
    "/v1/responses": responses,
    "/v1/messages": messages,
}
"""Interfaces by the path of a request."""
