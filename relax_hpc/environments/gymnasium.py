"""The environment `gymnasium`: a game of the library gymnasium. The policy sees it as text or as a
picture, and writes its actions."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np

from relax_hpc.base.errors import ConfigError
from relax_hpc.environments.base import (
    Beginning,
    Environment,
    MediaPart,
    Observation,
    Response,
    Step,
)
from relax_hpc.environments.tool_calls import ToolError, read_turn
from relax_hpc.environments.tools.pictures import png

Shown = Literal["values", "text", "picture"]
_MODES = {"values": None, "text": "ansi", "picture": "rgb_array"}
_ACTION = re.compile(r"<action>(.*?)</action>", re.DOTALL)
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
SEED = "seed"
"""Column of a prompt's row: seed of the game for all episodes of the prompt."""


class Gymnasium(Environment):
    """One game. The action is the text between the last `<action>` and `</action>`, or the whole
    response without these tags: a name of ``actions``, or a number or list as JSON. Thoughts
    (`<think>`) are ignored. The reward is the sum of the game's rewards. A response without a valid
    action does not change the game; `info.invalid_actions` counts such responses."""

    def __init__(
        self,
        id: str,
        actions: Sequence[str] = (),
        shown: Shown = "values",
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        """``id``, ``arguments``: arguments of `gymnasium.make`. ``actions``: names of the actions
        in their order. ``shown``: `values` shows the game's observations, `text` and `picture` its
        rendering.

        ConfigError: the library is not installed, the game does not exist, or it has other actions.
        """
        if shown not in get_args(Shown):
            raise ConfigError(
                f"environment.options.shown: found {shown!r}, allowed: {', '.join(get_args(Shown))}"
            )
        self._names = [name.lower() for name in actions]
        self._shown, self._reward, self._invalid = shown, 0.0, 0
        self._game = _make_game(id, {**(arguments or {}), "render_mode": _MODES[shown]})
        if self._names:
            _check_names(self._names, self._game.action_space)

    def reset(self, beginning: Beginning) -> tuple[Observation, ...]:
        seed = beginning.metadata.get(SEED)
        state, _ = self._game.reset(seed=beginning.seed if seed is None else int(seed))
        return (self._observe(state),)

    def step(self, response: Response) -> Step:
        try:
            action = self._read_action(read_turn(response.text, response.in_thought).spoken)
        except ToolError as error:
            self._invalid += 1
            info = {"invalid_actions": self._invalid}
            message = Observation(f"Error: {error}", role="user")
            return Step((message,), info=info, reward=self._reward)
        state, reward, terminated, truncated, _ = self._game.step(action)
        self._reward += float(reward)
        done = bool(terminated or truncated)
        return Step((self._observe(state),), done, {"ended": bool(truncated)}, self._reward)

    def close(self) -> None:
        self._game.close()

    def _read_action(self, text: str) -> Any:
        """The action in ``text``. ToolError: it is not an action of the game."""
        written = (_ACTION.findall(text) or [text])[-1].strip()
        space = self._game.action_space
        if self._names:
            if written.lower() not in self._names:
                raise ToolError(f"found {written[:80]!r}, allowed: {', '.join(self._names)}")
            return int(space.start) + self._names.index(written.lower())
        try:
            action = _array_of(json.loads(written), space)
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise ToolError(f"found {written[:80]!r}, allowed: {space}, as JSON") from error
        if not space.contains(action if action.ndim else action[()]):
            raise ToolError(f"found {written[:80]!r}, allowed: {space}")
        return action if action.ndim else action[()]

    def _observe(self, state: Any) -> Observation:
        """Observation of the game. ``state``: the last observation that the game returned."""
        if self._shown == "values":
            text = json.dumps(state, default=lambda value: np.asarray(value).tolist())
            return Observation(text, role="user")
        rendered = self._game.render()
        if self._shown == "text":
            lines = [_COLOURS.sub("", str(rendered)), *_texts_in(state)]
            return Observation("\n".join(lines), role="user")
        from PIL import Image

        picture = MediaPart("image", png(Image.fromarray(rendered)))
        return Observation("\n".join(_texts_in(state)), (picture,), role="user")


def _array_of(value: Any, space: Any) -> np.ndarray:
    """A JSON ``value`` as an array of the type of actions in ``space``. ValueError, TypeError,
    OverflowError: it has other values than numbers, or numbers that this type cannot represent:
    1.7 is not an integer action."""
    from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete

    with np.errstate(over="ignore"):
        array = np.asarray(value, space.dtype)
    if not isinstance(space, Discrete | MultiDiscrete | MultiBinary | Box):
        return array
    raw = np.asarray(value)
    # numpy would also convert true and "1" to numbers.
    if raw.dtype.kind not in ("biuf" if isinstance(space, MultiBinary) else "iuf"):
        raise ValueError("no numbers")
    is_same = np.isfinite(array).all() if array.dtype.kind == "f" else np.array_equal(array, raw)
    if not is_same:
        raise ValueError("other numbers")
    return array


def _check_names(names: Sequence[str], space: Any) -> None:
    """ConfigError: ``names`` do not fit a game with this action ``space``."""
    from gymnasium.spaces import Discrete

    if not isinstance(space, Discrete):
        raise ConfigError(
            "environment.options.actions: found names, allowed: none, as the game's space is "
            f"{space}"
        )
    if len(names) != space.n or len(set(names)) != len(names):
        raise ConfigError(
            f"environment.options.actions: found {', '.join(names)}, allowed: {space.n} different "
            f"names, one for each action of {space}"
        )


def _texts_in(observation: Any) -> list[str]:
    """Texts of an observation, such as MiniGrid's `mission`. A picture does not show them."""
    if isinstance(observation, str):
        return [observation]
    if not isinstance(observation, Mapping):
        return []
    return [f"{name}: {value}" for name, value in observation.items() if isinstance(value, str)]


def _make_game(name: str, arguments: Mapping[str, Any]) -> Any:
    try:
        import gymnasium
    except ImportError as error:
        raise ConfigError(
            f"environment.kind: gymnasium cannot be imported: {error}; pip install "
            "'relax_hpc[games]'"
        ) from error
    try:
        return gymnasium.make(name, **arguments)
    except Exception as error:
        # The constructor of a game may raise anything.
        raise ConfigError(
            f"environment.options: {name!r} cannot be made: {type(error).__name__}: {error}"
        ) from error
