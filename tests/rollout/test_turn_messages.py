"""Inputs of the environment and of the template in an episode of several turns, and the reward of an
episode that ends too early."""

from __future__ import annotations

import asyncio
import re
from typing import ClassVar

import pytest

from relax_hpc.data.chat import ChatTemplate
from relax_hpc.data.prompts import Prompt
from relax_hpc.environments.base import Environment, Observation, Response, Step
from relax_hpc.rewards.environment_reward import environment
from relax_hpc.rollout.engines.engine import Episode
from relax_hpc.rollout.episodes.history import History
from relax_hpc.rollout.rows import reward_input
from tests.helpers.turn_episodes import BUDGET, PROMPT, TOKENIZER, Contexts, decode_all
from tests.helpers.turns_helpers import TEMPLATE, DeterministicEngine, player, start


def play(
    kind: type[Environment], source: str = TEMPLATE, text: str = PROMPT, **limits: int
) -> tuple[Episode, list[str]]:
    """An episode, and the reasons for which it ended before it had a reward."""
    counted, chat = list[str](), ChatTemplate(source, {"enable_thinking": True}, "")
    playing = player(kind, TOKENIZER, chat, **limits)
    playing._note_unrewarded = counted.append
    try:
        episode = asyncio.run(
            playing.play(History(), start(TOKENIZER, DeterministicEngine(TOKENIZER), text, BUDGET))
        )
    finally:
        chat.close()
    assert isinstance(episode, Episode)
    return episode, counted


class RewardingLate(Environment):
    """Gives a reward only when it is done."""

    def step(self, response: Response) -> Step:
        done = response.turn == 5
        return Step((Observation("more"),), done, reward=1.0 if done else None)


@pytest.mark.parametrize(
    ("limits", "ended"),
    [({"max_turns": 2}, "max_turns"), ({"episode_tokens": 30}, "episode_budget")],
)
def test_an_episode_that_ends_before_its_reward_has_reward_0_and_is_counted(
    limits: dict[str, int], ended: str
) -> None:
    episode, counted = play(RewardingLate, **limits)
    assert (
        episode.finish_reason == ended and episode.outcome["reward"] is None and counted == [ended]
    )
    assert environment(reward_input(Prompt("p", (), "go", "answer"), episode, TOKENIZER)) == 0.0


class NotingThoughts(Environment):
    """Notes whether its turns begin in thoughts."""

    flags: ClassVar[list[bool]] = []

    def step(self, response: Response) -> Step:
        self.flags.append(response.in_thought)
        return Step((Observation("ok"),), done=response.turn == 1)


@pytest.mark.parametrize("opened", ["", "<think>\\n"])
def test_an_environment_knows_whether_the_template_has_opened_a_thought(opened: str) -> None:
    NotingThoughts.flags.clear()
    opening = "<|im_start|>assistant\\n"
    assert opening in TEMPLATE
    play(
        NotingThoughts,
        TEMPLATE.replace(opening, opening + opened),
        PROMPT + opened.replace("\\n", "\n"),
    )
    assert NotingThoughts.flags == [bool(opened)] * 2


def test_a_template_sees_the_roles_of_all_messages_so_far() -> None:
    """Also of a branch, and of a history that continues after another one."""
    source = (
        "{% for m in messages %}<|im_start|>{{ loop.index }}{{ m.role }} {{ m.content "
        "}}<|im_end|>{% endfor %}"
    )
    source += "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
    episode, _ = play(Contexts, source, "<|im_start|>1user go<|im_end|><|im_start|>assistant ")
    texts = [decode_all(row.prompt, row.generation) for row in episode.rows]
    numbers = [
        [int(number) for number in re.findall(r"<\|im_start\|>(\d+)", text)] for text in texts
    ]
    # A turn of the policy has no number, and each step has two messages.
    assert numbers == [[1, 3, 4, 6, 7], [1, 2, 3], [1, 2, 3, 5, 6], [1, 2, 3]]
