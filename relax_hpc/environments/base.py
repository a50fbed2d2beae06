"""Base class of environments, and what goes between them and the policy: values that any process
can be told."""

from __future__ import annotations

import abc
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from relax_hpc.base.error_origin import NO_ORIGIN, ErrorOrigin

Role = Literal["tool", "user"]
FaultReason = Literal[
    "environment_raised",
    "environment_timeout",
    "environment_died",
    "environment_answer",
    "environment_differs",
]
"""Reason why an environment is of no use: it raised, took too long, its process has died, what it
said is not allowed, or it said something else when an episode was played again."""


@dataclass(frozen=True, slots=True)
class MediaPart:
    """A medium of a message."""

    kind: Literal["image", "video", "audio"]
    source: Path | bytes = field(repr=False)
    """A file, or its content."""


Part = str | MediaPart
"""Piece of a message: text, in which no token is special, or a medium."""


@dataclass(frozen=True, slots=True)
class Beginning:
    """A prompt, as an episode begins with it."""

    prompt: str
    """Text of the prompt, as the policy reads it."""
    answer: Any
    metadata: Mapping[str, Any]
    """Further columns of the prompt's row: JSON values."""
    media: tuple[MediaPart, ...] = ()
    """Media of the prompt, in their order."""
    seed: int = 0
    """Seed of all that an environment draws: the same one when an episode is played again."""
    episode: int = 0
    """Number of the episode among those of its prompt."""


@dataclass(frozen=True, slots=True)
class Response:
    """Response of the policy in a turn."""

    text: str
    """Text without special tokens."""
    finish_reason: str
    """End of the turn: stop, or length where the policy was cut."""
    turn: int
    """Number of the turn, from 0."""
    in_thought: bool = False
    """Whether the chat template has opened a thought, `<think>`, before the text."""


@dataclass(frozen=True, slots=True)
class Observation:
    """A message to the policy: one result of a tool, or what a user says."""

    text: str = ""
    media: tuple[MediaPart, ...] = ()
    role: Role = "tool"


@dataclass(frozen=True, slots=True)
class Context:
    """History in which the policy goes on: one of several of an episode, each a row that is trained
    on.

    After a history was compacted: a new name, 0 turns, and the summary as an observation. A branch:
    a new name and the turns before it. A sub-agent: a name of its own, and later that of who waits
    for it, which begins as "".
    """

    name: str
    turns: int = 0
    """Turns of the present history that a new one begins with, behind the prompt. A known one goes
    on as it is."""


@dataclass(frozen=True, slots=True)
class Step:
    """Consequence of a response."""

    observations: tuple[Observation, ...] = ()
    """Messages that the policy reads before its next turn, in their order; at least one unless it
    is ``done``."""
    done: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)
    """JSON values for the reward and for who reads samples."""
    reward: float | None = None
    """Reward of the whole episode so far, if the environment has one; the last one counts."""
    context: Context | None = None
    """History that the observations go to; None: that of the response."""


class Environment(abc.ABC):
    """The world of one episode, made for it alone; in a process of environments, which may be ended
    at any time.

    Arguments of `__init__` are `environment.options`; it may raise ConfigError. Each other method
    may be `async def` as well. What one draws, it draws by the seed of its beginning, and it asks
    nobody who may answer otherwise: an episode whose rollout has died is played again, and has to
    be the same.

    >>> class Echo(Environment):
    ...     def step(self, response):
    ...         return Step((Observation(response.text),), done=response.turn == 1)
    >>> Echo().step(Response("hi", "stop", 0)).observations[0].text
    'hi'
    """

    @property
    def signatures(self) -> Sequence[Mapping[str, Any]]:
        """Signatures, as OpenAI's, of the tools that a chat template shows with each prompt whose
        row has no column `tools`; known before `reset`."""
        return ()

    def reset(
        self, beginning: Beginning
    ) -> Sequence[Observation] | Awaitable[Sequence[Observation]]:
        """Begin; messages that go behind the prompt, if there are any."""
        return ()

    @abc.abstractmethod
    def step(self, response: Response) -> Step | Awaitable[Step]:
        """Go on after a response of the policy."""

    def format_observation(
        self, observation: Observation
    ) -> Sequence[Part] | Awaitable[Sequence[Part]]:
        """Content of the message that ``observation`` is to the policy: here its media, and its
        text. What is around a message of its role comes from the run's chat template."""
        return (*observation.media, observation.text) if observation.text else observation.media

    def close(self) -> Awaitable[None] | None:
        """Give back what it holds; the process may as well end without it."""
        return None


class EnvironmentFault(Exception):
    """Error of an environment, which ends its episode. `reason` is what callers count."""

    def __init__(self, reason: FaultReason, detail: str, origin: ErrorOrigin = NO_ORIGIN) -> None:
        """``origin``: place in the environment's code that failed, if one did."""
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail, self.origin = reason, detail, origin


@dataclass(frozen=True, slots=True)
class Message:
    """An observation as the policy reads it: what `Environment.format_observation` makes of one."""

    role: Role
    parts: tuple[Part, ...]
