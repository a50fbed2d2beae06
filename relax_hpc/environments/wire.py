"""Messages between a process of environments and who plays with them, as JSON, and bounds of what
these may say."""

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

MOST_CHARACTERS = 1 << 20
"""Characters of the texts of a step, and of its `info` as JSON, at most."""
MOST_MEDIA_BYTES = 1 << 28
"""Bytes of the media of a step."""
_KINDS = ("image", "video", "audio")
Wire = dict[str, Any]


def beginning_to_wire(beginning: Beginning) -> Wire:
    """``beginning`` as JSON has it."""
    fields = {field.name: getattr(beginning, field.name) for field in dataclasses.fields(beginning)}
    return fields | {
        "metadata": dict(beginning.metadata),
        "media": [_part_to_wire(part) for part in beginning.media],
    }


def beginning_from_wire(wire: Wire) -> Beginning:
    """The beginning that `beginning_to_wire` has made ``wire`` of."""
    return Beginning(**wire | {"media": tuple(_part_from_wire(part) for part in wire["media"])})


def step_to_wire(step: Step, messages: Iterable[Message]) -> Wire:
    """``step``, with ``messages`` in the place of its observations."""
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
    """The step that `step_to_wire` has made ``wire`` of, without observations, and the messages."""
    messages = (
        Message(role, tuple(map(_part_from_wire, parts))) for role, parts in wire["messages"]
    )
    context = Context(*wire["context"]) if wire["context"] else None
    return Step((), wire["done"], wire["info"], wire["reward"], context), tuple(messages)


def digest_of(wire: Wire) -> str:
    """Hash of what has to be the same when an episode is played again: all of a step but its
    `info`."""
    told = {name: value for name, value in wire.items() if name != "info"}
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def checked_step(step: Any) -> Step:
    """``step`` with Python's own numbers in the place of numpy's. EnvironmentFault: an environment
    may not answer that."""
    _expect(step, Step, "step()")
    checked_observations(step.observations)
    done, reward, context = plain_number(step.done), step.reward, step.context
    _expect(done, bool, "done")
    if reward is not None and (reward := finite_number(_as_integer(plain_number(reward)))) is None:
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


def checked_observations(found: Any) -> tuple[Observation, ...]:
    """``found`` as a tuple. EnvironmentFault: those are no observations."""
    if not isinstance(found, list | tuple):
        raise _bad(f"observations: found {type(found).__name__}, allowed: a tuple of Observation")
    for observation in found:
        _expect(observation, Observation, "observation")
        if observation.role not in get_args(Role):
            raise _bad(f"role: found {observation.role!r}, allowed: {', '.join(get_args(Role))}")
    return tuple(found)


def checked_messages(messages: Iterable[tuple[Role, Any]]) -> list[Message]:
    """Messages of roles and parts. EnvironmentFault: some are none, or all together are too
    long."""
    found = [Message(role, _checked_parts(parts)) for role, parts in messages]
    parts = [part for message in found for part in message.parts]
    characters = sum(len(part) for part in parts if isinstance(part, str))
    size = sum(
        len(part.source)
        for part in parts
        if isinstance(part, MediaPart) and isinstance(part.source, bytes)
    )
    if characters > MOST_CHARACTERS or size > MOST_MEDIA_BYTES:
        limits = f"allowed {MOST_CHARACTERS} and {MOST_MEDIA_BYTES}"
        raise _bad(
            f"observations: found {characters} characters and {size} bytes of media, {limits}"
        )
    return found


def _checked_parts(parts: Any) -> tuple[Part, ...]:
    if not isinstance(parts, list | tuple):
        raise _bad(
            f"format_observation(): found {type(parts).__name__}, allowed: a tuple of texts and "
            "MediaPart"
        )
    for part in parts:
        if isinstance(part, MediaPart):
            _check_medium(part)
        else:
            _expect(part, str, "part of a message")
            if not _is_text(part):
                raise _bad(
                    "text: found half of a surrogate pair, such as \\ud800, which is no text"
                )
    return tuple(parts)


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
    """``info`` as JSON values. EnvironmentFault: it is too long, or has what JSON has no word
    for."""
    _expect(info, Mapping, "info")
    try:
        values = plain_values(info)
        text = json.dumps(values, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise _bad(f"info: found what JSON has no word for: {error}") from error
    if len(text) > MOST_CHARACTERS:
        raise _bad(f"info: found {len(text)} characters of JSON, allowed {MOST_CHARACTERS}")
    return values


def _as_integer(value: Any) -> Any:
    """A truth value as a number, as Python counts it."""
    return int(value) if isinstance(value, bool) else value


def _expect(value: Any, kind: type, what: str) -> None:
    if not isinstance(value, kind):
        raise _bad(f"{what}: found {type(value).__name__}, allowed: {kind.__name__}")


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
    return MediaPart(
        wire["kind"], Path(wire["path"]) if "path" in wire else base64.b64decode(wire["base64"])
    )
