"""The environment `tools`: the policy calls tools. A turn without a call ends the episode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relax_hpc.environments.base import Environment, Observation, Response, Step
from relax_hpc.environments.tool_calls import ToolCall, ToolError, calls_of
from relax_hpc.environments.tools import tools_of


class WithTools(Environment):
    """Tools by name, each with its options: `{tools: {calculator: {}, search: {corpus:
    texts.sqlite}}}`.

    Each call of a turn gets one observation, in the order of the calls; for a malformed call it is
    an error. A call within a thought (`<think>`) is ignored. `info` has the names of all tools that
    the episode has called, and the number of calls that failed.
    """

    def __init__(self, tools: Mapping[str, Mapping[str, Any] | None], most_calls: int = 8) -> None:
        """``most_calls``: maximum number of calls in a turn. ConfigError: a tool does not exist, or
        cannot be made."""
        self._tools, self._most_calls = tools_of(tools), most_calls
        self._called, self._failed = list[str](), 0

    @property
    def signatures(self) -> list[dict[str, Any]]:
        return [tool.signature for tool in self._tools.values()]

    def step(self, response: Response) -> Step:
        calls = calls_of(response.text, response.in_thought)
        if not calls:
            return Step(done=True)
        if len(calls) > self._most_calls:
            calls = [ToolError(f"found {len(calls)} calls in a turn, allowed {self._most_calls}")]
        answers = [self._answer(call) for call in calls]
        # A reward gets the `info` of the last step only, so that it includes earlier calls.
        self._called += [call.name for call in calls if isinstance(call, ToolCall)]
        self._failed += sum(isinstance(answer, ToolError) for answer in answers)
        info = {"calls": list(self._called), "failed": self._failed}
        return Step(tuple(map(_observation, answers)), info=info)

    def _answer(self, call: ToolCall | ToolError) -> str | Observation | ToolError:
        if isinstance(call, ToolError):
            return call
        if call.name not in self._tools:
            return ToolError(
                f"there is no tool {call.name[:80]!r}; allowed: {', '.join(self._tools)}"
            )
        try:
            return self._tools[call.name].called(call.arguments)
        except ToolError as error:
            return error


def _observation(answer: str | Observation | ToolError) -> Observation:
    if isinstance(answer, Observation):
        return answer
    return Observation(f"Error: {answer}" if isinstance(answer, ToolError) else answer)
