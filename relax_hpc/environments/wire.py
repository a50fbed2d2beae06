"""JSON messages between a process of environments and the rollout process, and checks of the values
that environments return."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

from relax_hpc.environments.base import (
    Beginning,
    Context,
    EnvironmentFault,
    MediaPart,
    Message,
    Observation,
    Part,
    Role,
    Step,
)
from relax_hpc.environments.plain_values import finite_number, plain_number, plain_values

MAX_CHARACTERS = 1 << 20
"""Maximum number of characters of all texts of a step, and of its `info` as JSON."""
MAX_MEDIA_BYTES = 1 << 28
"""Maximum number of bytes of all media of a step."""
_KINDS = ("image", "video", "audio")
Wire = dict[str, Any]


def beginning_to_wire(beginning: Beginning) -> Wire:
    """``beginning`` as JSON values."""
    fields = {field.name: getattr(beginning, field.name) for field in dataclasses.fields(beginning)}
    return fields | {
        "metadata": dict(beginning.metadata),
        "media": [_part_to_wire(part) for part in beginning.media],
    }


def beginning_from_wire(wire: Wire) -> Beginning:
    """The `Beginning` from which `beginning_to_wire` made ``wire``."""
    return Beginning(**wire | {"media": tuple(_part_from_wire(part) for part in wire["media"])})


def step_to_wire(step: Step, messages: Iterable[Message]) -> Wire:
    """``step`` as JSON values, with ``messages`` instead of its observations."""
    return {
        "messages": [
            [message.role, [_part_to_wire(part) for part in message.parts]] for message in messages
        ],
        "done": step.done,
        "info": dict(step.info),
        "reward": step.reward,
        "context": step.context and [step.context.name, step.context.turns],
    }


def step_from_wire(wire: Wire) -> tuple[Step, tuple[Message, ...]]:
    """The step from which `step_to_wire` made ``wire``, without observations, and its messages."""
    messages = [
        Message(role, tuple(map(_part_from_wire, content))) for role, content in wire["messages"]
    ]
    context = Context(*wire["context"]) if wire["context"] else None
    return Step((), wire["done"], wire["info"], wire["reward"], context), tuple(messages)


def digest_of(wire: Wire) -> str:
    """Hash of the values of a step that must be equal in a replay: all except `info`."""
    replayed = {name: value for name, value in wire.items() if name != "info"}
    return hashlib.sha256(json.dumps(replayed, sort_keys=True).encode()).hexdigest()


def checked_step(step: Any) -> Step:
    """``step`` with numpy numbers converted to Python numbers. EnvironmentFault: a value is
    invalid."""
    _expect(step, Step, "step()")
    checked_observations(step.observations)
    done, reward, context = plain_number(step.done), step.reward, step.context
    _expect(done, bool, "done")
    if reward is not None:
        reward = finite_number(_as_integer(plain_number(reward)))
        if reward is None:
            raise _bad(f"reward: found {step.reward!r}, allowed: a finite number or None")
    if context is not None:
        _expect(context, Context, "context")
        _expect(context.name, str, "context.name")
        context = dataclasses.replace(context, turns=plain_number(context.turns))
        _expect(context.turns, int, "context.turns")
    if not (step.observations or done):
        raise _bad("observations: found none, allowed: at least one unless the episode is done")
    return dataclasses.replace(
        step, done=done, info=_checked_info(step.info), reward=reward, context=context
    )


def checked_observations(observations: Any) -> tuple[Observation, ...]:
    """``observations`` as a tuple. EnvironmentFault: they are not observations."""
    if not isinstance(observations, list | tuple):
        kind = type(observations).__name__
        raise _bad(f"observations: found {kind}, allowed: a tuple of Observation")
    for observation in observations:
        _expect(observation, Observation, "observation")
        if observation.role not in get_args(Role):
            raise _bad(f"role: found {observation.role!r}, allowed: {', '.join(get_args(Role))}")
    return tuple(observations)


def checked_messages(contents: Iterable[tuple[Role, Any]]) -> list[Message]:
    """Messages from roles and parts. EnvironmentFault: a part is invalid, or all messages together
    are too long."""
    messages = [Message(role, _checked_content(content)) for role, content in contents]
    characters = size = 0
    for message in messages:
        for part in message.parts:
            if isinstance(part, str):
                characters += len(part)
            elif isinstance(part.source, bytes):
                size += len(part.source)
    if characters > MAX_CHARACTERS or size > MAX_MEDIA_BYTES:
        limits = f"allowed {MAX_CHARACTERS} and {MAX_MEDIA_BYTES}"
        raise _bad(
            f"observations: found {characters} characters and {size} bytes of media, {limits}"
        )
    return messages


def _checked_content(content: Any) -> tuple[Part, ...]:
    if not isinstance(content, list | tuple):
        raise _bad(
            f"format_observation(): found {type(content).__name__}, allowed: a tuple of texts and "
            "MediaPart"
        )
    for part in content:
        if isinstance(part, MediaPart):
            _check_medium(part)
        else:
            _expect(part, str, "part of a message")
            if not _is_text(part):
                raise _bad(
                    "text: found half of a surrogate pair, such as \\ud800, which is no text"
                )
    return tuple(content)


def _check_medium(part: MediaPart) -> None:
    if part.kind not in _KINDS:
        raise _bad(f"media: found kind {part.kind!r}, allowed: {', '.join(_KINDS)}")
    if not isinstance(part.source, bytes | Path):
        raise _bad(
            f"media: found a source of {type(part.source).__name__}, allowed: bytes or a Path"
        )


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _checked_info(info: Any) -> dict[str, Any]:
    """``info`` as JSON values. EnvironmentFault: it is too long, or has a value that JSON cannot
    represent."""
    _expect(info, Mapping, "info")
    try:
        values = plain_values(info)
        text = json.dumps(values, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise _bad(f"info: found a value that JSON cannot represent: {error}") from error
    if len(text) > MAX_CHARACTERS:
        raise _bad(f"info: found {len(text)} characters of JSON, allowed {MAX_CHARACTERS}")
    return values


def _as_integer(value: Any) -> Any:
    """A bool as 0 or 1; other values unchanged."""
    return int(value) if isinstance(value, bool) else value


def _expect(value: Any, kind: type, name: str) -> None:
    if not isinstance(value, kind):
        raise _bad(f"{name}: found {type(value).__name__}, allowed: {kind.__name__}")


def _bad(detail: str) -> EnvironmentFault:
    return EnvironmentFault("environment_answer", detail)


def _part_to_wire(part: Part) -> str | Wire:
    if isinstance(part, str):
        return part
    if isinstance(part.source, bytes):
        return {"kind": part.kind, "base64": base64.b64encode(part.source).decode()}
    return {"kind": part.kind, "path": str(part.source)}


def _part_from_wire(wire: str | Wire) -> Any:
    if isinstance(wire, str):
        return wire
    if "path" in wire:
        return MediaPart(wire["kind"], Path(wire["path"]))
    return MediaPart(wire["kind"], base64.b64decode(wire["base64"]))
