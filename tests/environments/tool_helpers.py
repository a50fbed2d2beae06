"""Responses with tool calls, and texts of observations, for tests of tools."""

from __future__ import annotations

import json
from typing import Any

from relax_hpc.environments.base import Response, Step


def call_text(name: str, **arguments: Any) -> str:
    """A tool call as the policy writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def response_of(text: str) -> Response:
    """A response with `text` as the first turn."""
    return Response(text, "stop", 0)


def texts(step: Step) -> list[str]:
    """Texts of the observations of a step."""
    return [observation.text for observation in step.observations]
