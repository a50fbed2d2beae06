"""Environments of other libraries."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import pytest
from PIL import Image

from relax_hpc.environments import environment_class
from relax_hpc.environments.base import Beginning, Environment, Response
from relax_hpc.errors import ConfigError
from tests.requirements import requires


def begun(environment: Environment, *draws: int, **columns: Any) -> tuple[Environment, Any]:
    return environment, environment.reset(Beginning("", "", columns, (), *draws))


class TestGymnasium:
    LAKE = ("FrozenLake-v1", ["left", "down", "right", "up"], "text", {"is_slippery": False})

    @pytest.fixture(autouse=True)
    def installed(self) -> None:
        requires("gymnasium")

    def made(self, *arguments: Any) -> Environment:
        return environment_class("gymnasium")(*arguments)

    def test_a_game_is_played_by_the_names_of_its_actions(self) -> None:
        lake, [first] = begun(self.made(*self.LAKE))
        assert first.text.split() == ["SFFF", "FHFH", "FFFH", "HFFG"] and first.role == "user"
        wrong = lake.step(Response("<action>jump</action>", "stop", 0))
        assert wrong.observations[0].text == "Error: found 'jump', allowed: left, down, right, up" and not wrong.done
        ways = ("down", "down", "right", "right", "down", "right")
        steps = [lake.step(Response(f"I go <action>{way}</action>", "stop", 1)) for way in ways]
        assert [(step.done, step.reward) for step in steps] == [(False, 0.0)] * 5 + [(True, 1.0)]
        assert "Down" in steps[0].observations[0].text and "\x1b" not in steps[0].observations[0].text

    def test_the_column_seed_of_a_row_begins_all_its_episodes_alike(self) -> None:
        begins = [begun(self.made("CartPole-v1"), episode, seed=7)[1][0].text for episode in range(2)]
        assert begins[0] == begins[1] and len(json.loads(begins[0])) == 4
        assert begun(self.made("CartPole-v1"), 8)[1][0].text != begins[0]

    @pytest.mark.parametrize("said", ["2", "[0]", "left", "1e999", "NaN", "null", ""])
    def test_an_action_that_there_is_not_is_told_of(self, said: str) -> None:
        cart, _ = begun(self.made("CartPole-v1"))
        step = cart.step(Response(said, "stop", 0))
        assert step.observations[0].text.startswith(f"Error: found {said!r}, allowed: Discrete(2)")
        assert cart.step(Response("1", "stop", 1)).reward == 1.0

    def test_a_game_may_be_seen(self) -> None:
        import gymnasium

        class Stripes(gymnasium.Env):
            render_mode, metadata = "rgb_array", {"render_modes": ["rgb_array"]}
            action_space = observation_space = gymnasium.spaces.Discrete(2)

            def __init__(self, render_mode: str) -> None: ...

            def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict]:
                return 0, {}

            def render(self) -> np.ndarray:
                return np.arange(60, dtype=np.uint8).reshape(4, 5, 3)

        gymnasium.register("Stripes-v0", Stripes)
        stripes, [first] = begun(self.made("Stripes-v0", (), "picture"))
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(first.media[0].source))), stripes._game.render())

    @pytest.mark.parametrize(
        "arguments", [("No-v0",), ("CartPole-v1", (), "smell"), ("CartPole-v1", (), "values", {"x": 1})]
    )
    def test_a_game_that_cannot_be_had_is_said_at_once(self, arguments: tuple) -> None:
        with pytest.raises(ConfigError, match=r"environment\.options"):
            self.made(*arguments)


class TestReasoningGym:
    @pytest.fixture
    def rows(self) -> list[dict[str, Any]]:
        requires("reasoning_gym")
        from relax_hpc.environments.reasoning_gym import rows_of

        return json.loads(json.dumps(list(rows_of("chain_sum", 3, 5))))

    def test_puzzles_are_judged_by_the_library_that_made_them(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            expression = row["prompt"].split(":")[1].strip(" =")
            assert eval(expression) == int(row["answer"])
            puzzle, _ = begun(environment_class("reasoning_gym")(attempts=2), puzzle=row["puzzle"])
            first = puzzle.step(Response("<answer>x</answer>", "stop", 0))
            assert not first.done and first.reward == 0.0 and first.observations[0].role == "user"
            last = puzzle.step(Response(f"No: <answer> {row['answer']} </answer>", "stop", 1))
            assert last.done and last.reward == 1.0 and last.info == {"score": 1.0}

    def test_a_row_without_a_puzzle_and_a_set_that_there_is_not_are_said(self, rows: list[dict[str, Any]]) -> None:
        from relax_hpc.environments.reasoning_gym import data_set

        with pytest.raises(ValueError, match="the prompt's row has no column puzzle"):
            begun(environment_class("reasoning_gym")())
        with pytest.raises(ConfigError, match="no_such"):
            data_set("no_such", 0, 1)
