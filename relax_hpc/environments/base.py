"""Base class of environments, and the values that environments and the policy exchange. All of them
can be sent to another process."""

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
"""Reasons why an environment failed: it raised, took too long, its process died, it returned an
invalid value, or it returned another value when an episode was replayed."""


@dataclass(frozen=True, slots=True)
class MediaPart:
    """A medium of a message."""

    kind: Literal["image", "video", "audio"]
    source: Path | bytes = field(repr=False)
    """A file, or its content."""


Part = str | MediaPart
"""Part of a message: a medium, or a text, whose names of special tokens are ordinary text."""


@dataclass(frozen=True, slots=True)
class Beginning:
    """The prompt of an episode, with which an environment begins."""

    prompt: str
    """Text of the prompt that the policy gets."""
    answer: Any
    metadata: Mapping[str, Any]
    """Further columns of the prompt's row: JSON values."""
    media: tuple[MediaPart, ...] = ()
    """Media of the prompt, in their order."""
    seed: int = 0
    """Seed for all random values of the environment. A replay of the episode has the same seed."""
    episode: int = 0
    """Number of the episode within its prompt group."""


@dataclass(frozen=True, slots=True)
class Response:
    """Response of the policy in a turn."""

    text: str
    """Text without special tokens."""
    finish_reason: str
    """End of the turn: stop, or length if it was cut off."""
    turn: int
    """Number of the turn, from 0."""
    in_thought: bool = False
    """Whether the chat template has opened a thought, `<think>`, before the text."""


@dataclass(frozen=True, slots=True)
class Observation:
    """A message to the policy: the result of a tool, or a text of a user."""

    text: str = ""
    media: tuple[MediaPart, ...] = ()
    role: Role = "tool"


@dataclass(frozen=True, slots=True)
class Context:
    """A history of an episode, in which the policy continues. An episode may have several, and each
    becomes a row for training.

    - To compact a history: a new name, 0 turns, and the summary as an observation.
    - To branch: a new name, and the number of turns before the branch.
    - For a sub-agent: a new name; later the name of the history that waits for it. The first
      history of an episode has the name "".
    """

    name: str
    turns: int = 0
    """Number of turns of the present history with which a new history begins, after the prompt. If
    the name is known, that history is continued, and this number has no effect."""


@dataclass(frozen=True, slots=True)
class Step:
    """Result of a response."""

    observations: tuple[Observation, ...] = ()
    """Messages to the policy before its next turn; at least one unless ``done``."""
    done: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)
    """JSON values for the reward and for readers of samples."""
    reward: float | None = None
    """Reward of the whole episode so far, if the environment has one. The last one is used."""
    context: Context | None = None
    """History to which the observations are appended; None: the history of the response."""


class Environment(abc.ABC):
    """The environment of one episode. It runs in a process with other environments, which may be
    ended at any time.

    `__init__` gets `environment.options`, and may raise ConfigError. Each other method may be
    `async def`.

    An environment must be deterministic: it draws random values only with the seed of its
    `Beginning`, and uses no service whose answers may change. If the rollout process of an episode
    dies, the episode is replayed and must give the same messages.

    >>> class Echo(Environment):
    ...     def step(self, response):
    ...         return Step((Observation(response.text),), done=response.turn == 1)
    >>> Echo().step(Response("hi", "stop", 0)).observations[0].text
    'hi'
    """

    @property
    def signatures(self) -> Sequence[Mapping[str, Any]]:
        """Signatures, in OpenAI's format, of the tools that a chat template shows. Prompts whose
        rows have a column `tools` show those instead. It is called before `reset`."""
        return ()

    def reset(
        self, beginning: Beginning
    ) -> Sequence[Observation] | Awaitable[Sequence[Observation]]:
        """Begin an episode. Returns messages that follow the prompt; may be empty."""
        return ()

    @abc.abstractmethod
    def step(self, response: Response) -> Step | Awaitable[Step]:
        """Continue after a response of the policy."""

    def format_observation(
        self, observation: Observation
    ) -> Sequence[Part] | Awaitable[Sequence[Part]]:
        """Content of the message to the policy for an ``observation``; by default its media, then
        its text. The run's chat template adds the text around a message of that role."""
        return (*observation.media, observation.text) if observation.text else observation.media

    def close(self) -> Awaitable[None] | None:
        """Release resources. The process may also end without a call of this method."""
        return None


class EnvironmentFault(Exception):
    """Error of an environment. It ends the episode. Callers count it under `reason`."""

    def __init__(self, reason: FaultReason, detail: str, origin: ErrorOrigin = NO_ORIGIN) -> None:
        """``origin``: line in the environment's code that failed, if known."""
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail, self.origin = reason, detail, origin


@dataclass(frozen=True, slots=True)
class Message:
    """A message to the policy, made from an observation by `Environment.format_observation`."""

    role: Role
    parts: tuple[Part, ...]
