"""Environments of other libraries."""

from __future__ import annotations

import io
import json
from typing import Any, ClassVar

import numpy as np
import pytest
from PIL import Image

from relax_hpc.base.errors import ConfigError
from relax_hpc.environments import environment_class
from relax_hpc.environments.base import Beginning, Environment, Response
from tests.requirements import requires

requires("gymnasium")

import gymnasium  # noqa: E402


def begun(environment: Environment, *draws: int, **columns: Any) -> tuple[Environment, Any]:
    return environment, environment.reset(Beginning("", "", columns, (), *draws))


class TestGymnasium:
    LAKE = ("FrozenLake-v1", ["left", "down", "right", "up"], "text", {"is_slippery": False})

    def made(self, *arguments: Any) -> Environment:
        return environment_class("gymnasium")(*arguments)

    def registered(self, name: str, space: Any, observation: Any) -> list[int]:
        """Register a game that shows ``observation`` and rewards each action by 1; the actions that
        it gets."""
        played = list[int]()

        class Game(gymnasium.Env):
            metadata: ClassVar = {"render_modes": ["rgb_array", "ansi"], "render_fps": 1}
            action_space, observation_space = space, gymnasium.spaces.Text(100)

            def __init__(self, render_mode: str | None = None) -> None:
                self.render_mode = render_mode

            def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
                return observation, {}

            def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
                played.append(int(action))
                return observation, np.float32(1.0), np.bool_(False), False, {}

            def render(self) -> Any:
                return np.zeros((2, 2, 3), np.uint8) if self.render_mode == "rgb_array" else "###"

        gymnasium.register(name, Game, disable_env_checker=True)
        return played

    def test_a_game_is_played_by_the_names_of_its_actions(self) -> None:
        lake, [first] = begun(self.made(*self.LAKE))
        assert first.text.split() == ["SFFF", "FHFH", "FFFH", "HFFG"] and first.role == "user"
        wrong = lake.step(Response("<action>jump</action>", "stop", 0))
        assert (
            wrong.observations[0].text == "Error: found 'jump', allowed: left, down, right, up"
            and not wrong.done
        )
        ways = ("down", "down", "right", "right", "down", "right")
        steps = [lake.step(Response(f"I go <action>{way}</action>", "stop", 1)) for way in ways]
        assert [(step.done, step.reward) for step in steps] == [(False, 0.0)] * 5 + [(True, 1.0)]
        assert (
            "Down" in steps[0].observations[0].text and "\x1b" not in steps[0].observations[0].text
        )

    def test_the_column_seed_of_a_row_begins_all_its_episodes_alike(self) -> None:
        begins = [
            begun(self.made("CartPole-v1"), episode, seed=7)[1][0].text for episode in range(2)
        ]
        assert begins[0] == begins[1] and len(json.loads(begins[0])) == 4
        assert begun(self.made("CartPole-v1"), 8)[1][0].text != begins[0]
        own = [
            begun(self.made("CartPole-v1"), 8, **columns)[1][0].text
            for columns in ({}, {"seed": None})
        ]
        assert own[0] == own[1]

    @pytest.mark.parametrize(
        "said", ["2", "[0]", "left", "1e999", "NaN", "null", "", "0.7", "true", '"1"']
    )
    def test_an_action_that_there_is_not_is_told_of(self, said: str) -> None:
        cart, _ = begun(self.made("CartPole-v1"))
        step = cart.step(Response(said, "stop", 0))
        assert step.observations[0].text.startswith(f"Error: found {said!r}, allowed: Discrete(2)")
        assert cart.step(Response("1", "stop", 1)).reward == 1.0

    @pytest.mark.parametrize(
        ("space", "allowed", "others"),
        [
            (gymnasium.spaces.Discrete(3), ["1", "1.0"], ["1.5", "false"]),
            (gymnasium.spaces.MultiDiscrete([2, 3]), ["[1, 2]"], ["[0.9, 2]", "[true, false]"]),
            (
                gymnasium.spaces.MultiBinary(2),
                ["[1, 0]", "[true, false]"],
                ["[0.5, 1]", '["1", "0"]'],
            ),
            (
                gymnasium.spaces.Box(-np.inf, np.inf, (2,)),
                ["[0.1, 2]"],
                ["[1e39, 0]", "[Infinity, 0]", '["1", "2"]', "[true, false]"],
            ),
        ],
        ids=str,
    )
    def test_an_action_is_played_as_it_was_written_or_refused(
        self, space: Any, allowed: list[str], others: list[str]
    ) -> None:
        self.registered("Written-v0", space, "go")
        game, _ = begun(self.made("Written-v0"))
        for said in allowed:
            assert np.array_equal(
                game._read_action(said), np.asarray(json.loads(said), space.dtype)
            )
        for said in others:
            assert game.step(Response(said, "stop", 0)).info == {
                "invalid_actions": 1 + others.index(said)
            }

    def test_a_game_may_be_seen(self) -> None:
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
        assert np.array_equal(
            np.asarray(Image.open(io.BytesIO(first.media[0].source))), stripes._game.render()
        )

    def test_names_count_from_where_the_games_actions_do(self) -> None:
        played = self.registered("From1-v0", gymnasium.spaces.Discrete(3, start=1), "go")
        game, _ = begun(self.made("From1-v0", ["a", "b", "c"]))
        steps = [game.step(Response(name, "stop", 0)) for name in ("b", "A", "C")]
        assert played == [2, 1, 3] and [step.reward for step in steps] == [1.0, 2.0, 3.0]

    @pytest.mark.parametrize(
        ("space", "actions", "says"),
        [
            (
                gymnasium.spaces.Discrete(4),
                "abcde",
                "found a, b, c, d, e, allowed: 4 different names",
            ),
            (gymnasium.spaces.Discrete(4), "abc", "allowed: 4 different names"),
            (gymnasium.spaces.Discrete(3), "aAb", "allowed: 3 different names"),
            (gymnasium.spaces.MultiDiscrete([2, 2]), "abcd", "found names, allowed: none"),
            (gymnasium.spaces.Box(0, 1), "ab", "found names, allowed: none"),
        ],
    )
    def test_names_of_other_actions_than_the_games_are_refused(
        self, space: Any, actions: str, says: str
    ) -> None:
        self.registered("Other-v0", space, "go")
        with pytest.raises(ConfigError, match=says):
            self.made("Other-v0", list(actions))

    def test_a_turn_without_an_action_has_the_reward_so_far(self) -> None:
        self.registered("Plain-v0", gymnasium.spaces.Discrete(2), "go")
        game, _ = begun(self.made("Plain-v0", ["a", "b"]))
        steps = [
            game.step(Response(text, "stop", 0))
            for text in ("I go a", "a", "nonsense", "<action>b</action>")
        ]
        assert [step.reward for step in steps] == [0.0, 1.0, 1.0, 2.0]
        assert [step.info.get("invalid_actions") for step in steps] == [1, None, 2, None]

    @pytest.mark.parametrize(
        ("text", "in_thought", "valid"),
        [
            ("<think><action>a</action></think><action>b</action>", False, True),
            ("<think>or <action>a</action> or", False, False),
            ("maybe <action>a</action>", True, False),
            ("maybe <action>a</action></think>b", True, True),
        ],
    )
    def test_an_action_in_a_thought_is_none(self, text: str, in_thought: bool, valid: bool) -> None:
        played = self.registered("Thoughtful-v0", gymnasium.spaces.Discrete(2), "go")
        game, _ = begun(self.made("Thoughtful-v0", ["a", "b"]))
        game.step(Response(text, "stop", 0, in_thought))
        assert played == ([1] if valid else [])

    @pytest.mark.parametrize("shown", ["picture", "text"])
    def test_texts_that_no_picture_shows_are_told_with_it(self, shown: str) -> None:
        """MiniGrid's mission."""
        self.registered(
            "Mission-v0",
            gymnasium.spaces.Discrete(2),
            {"image": np.zeros(3), "mission": "go to the ball"},
        )
        _, [first] = begun(self.made("Mission-v0", (), shown))
        assert first.text.endswith("mission: go to the ball") and len(first.media) == (
            shown == "picture"
        )

    @pytest.mark.parametrize(
        "arguments",
        [("No-v0",), ("CartPole-v1", (), "smell"), ("CartPole-v1", (), "values", {"x": 1})],
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

    def test_puzzles_are_judged_by_the_library_that_made_them(
        self, rows: list[dict[str, Any]]
    ) -> None:
        for row in rows:
            expression = row["prompt"].split(":")[1].strip(" =")
            assert eval(expression) == int(row["answer"])
            puzzle, _ = begun(environment_class("reasoning_gym")(attempts=2), puzzle=row["puzzle"])
            first = puzzle.step(Response("<answer>x</answer>", "stop", 0))
            assert not first.done and first.reward == 0.0 and first.observations[0].role == "user"
            last = puzzle.step(Response(f"No: <answer> {row['answer']} </answer>", "stop", 1))
            assert last.done and last.reward == 1.0 and last.info == {"score": 1.0}

    def test_a_row_without_a_puzzle_and_a_set_that_there_is_not_are_said(
        self, rows: list[dict[str, Any]]
    ) -> None:
        from relax_hpc.environments.reasoning_gym import data_set

        with pytest.raises(ValueError, match="the prompt's row has no column puzzle"):
            begun(environment_class("reasoning_gym")())
        with pytest.raises(ConfigError, match="no_such"):
            data_set("no_such", 0, 1)

    def test_an_answer_that_the_library_cannot_judge_scores_0(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from relax_hpc.environments import reasoning_gym

        class Puzzles:
            entry: ClassVar = {"question": "?", "answer": "1"}

            def __getitem__(self, index: int) -> dict[str, str]:
                return self.entry

            def score_answer(self, answer: str, entry: dict[str, str]) -> float:
                return float(int(answer) == 1)

        monkeypatch.setattr(reasoning_gym, "library", lambda: None)
        monkeypatch.setattr(reasoning_gym, "data_set", lambda *key: Puzzles())
        row = {"name": "sums", "seed": 0, "size": 1, "index": 0}
        puzzle, _ = begun(reasoning_gym.ReasoningGym(attempts=3), puzzle=row)
        odd = puzzle.step(Response("<answer>one</answer>", "stop", 0))
        assert (
            odd.reward == 0.0
            and not odd.done
            and odd.info["unjudged"].startswith("ValueError: invalid literal")
        )
        thought = puzzle.step(
            Response("<think><answer>1</answer></think><answer>2</answer>", "stop", 1)
        )
        assert thought.reward == 0.0 and thought.info == {"score": 0.0}
        assert puzzle.step(Response("<answer>1</answer>", "stop", 2)).reward == 1.0
