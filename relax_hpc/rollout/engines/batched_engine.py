"""Interface that an engine may have beside `Engine`: several responses in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from relax_hpc.rollout.engines.engine import BadAnswer, GenerateRequest, Generation


@runtime_checkable
class DrawsTogether(Protocol):
    """An engine that is asked for all responses to a prompt at once: a task for each of them costs
    the event loop more than all else that is done for a short one."""

    async def generate_all(
        self, requests: Sequence[GenerateRequest]
    ) -> list[Generation | BadAnswer]:
        """Generate each of ``requests``: the response, or why it is none. EngineFault: not all have
        an answer; tokens of the others so far are in their drafts."""
