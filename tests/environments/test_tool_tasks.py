"""Tasks with tools: demonstrations equal episodes with the real environment, token by token."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain, groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.config import Config, load
from relax_hpc.data.chat import ChatTemplate
from relax_hpc.data.multimodal.medium import Kind
from relax_hpc.data.prompts import PromptRules
from relax_hpc.data.tokenizer import Tokenizer, load_tokenizer
from relax_hpc.environments import environment_class, make_environment
from relax_hpc.environments.base import Beginning, MediaPart, Message, Response
from relax_hpc.environments.tool_calls import ToolCall
from relax_hpc.queue.row_schema import Row
from relax_hpc.rollout.episodes.turn_tokens import TurnTokenizer
from relax_hpc.rollout.rows import turn_text
from relax_hpc.tasks import environment_name, get_task
from relax_hpc.training.demonstrations import read_demonstrations
from relax_hpc.training.models.tiny_model import make_tiny_model
from relax_hpc.training.models.tiny_tokenizer import write_tokenizer

RUNS = Path(__file__).parents[2] / "configs" / "runs"
COUNT = 20


@pytest.mark.parametrize("name", ["tools", "zoom"])
def test_an_episode_with_the_demonstrated_turns_equals_the_demonstration(
    tmp_path: Path, name: str
) -> None:
    """The environment answers the demonstrated turns with the demonstrated observations, which are
    not learned."""
    config = load([RUNS / f"{name}.yaml"])
    make_tiny_model(tmp_path / "model", config.model.tiny, seed=0)
    tokenizer = load_tokenizer(tmp_path / "model")
    rules = PromptRules.from_config(config.data, tokenizer, tmp_path)
    all_demonstrations = get_task(config.data.task).demonstrations(
        config.data, tokenizer, noise=0.0, seed=5
    )
    demonstrations = list(islice(all_demonstrations, COUNT))
    (tmp_path / "lines").write_text(
        "".join(json.dumps(demonstration) + "\n" for demonstration in demonstrations)
    )
    with rules.rendering():
        rows, media = read_demonstrations(tmp_path / "lines", rules, tokenizer)
        for demonstration, row in zip(demonstrations, rows, strict=True):
            tokens, shown = play_demonstration(demonstration, row, config, rules, tokenizer)
            assert tokens == row["token_ids"]
            assert shown == [span["media_id"] for span in row["spans"]]
    assert len(media) == sum(
        len(demonstration.get("images", ())) for demonstration in demonstrations
    )


def play_demonstration(
    demonstration: dict[str, Any],
    row: Row,
    config: Config,
    rules: PromptRules,
    tokenizer: Tokenizer,
) -> tuple[list[int], list[str]]:
    """Tokens and media ids of an episode in which the policy writes the learned turns of `row`."""
    bridge = TurnTokenizer(
        tokenizer, rules.template, dict(rules.media.placeholders) if rules.media else {}
    )
    first_images = {name: demonstration[name][:1] for name in ("images",) if name in demonstration}
    prompt = rules.read(
        1,
        {
            "id": "0",
            "prompt": demonstration["messages"][0]["content"],
            "answer": "",
            **first_images,
        },
        tokenizer,
    )
    tokens, shown = list(prompt.token_ids), [medium.source for medium in prompt.media]
    environment = make_environment(
        environment_class(environment_name(config)), config.environment.options
    )
    environment.reset(
        Beginning(prompt.text, "", {}, tuple(MediaPart("image", source) for source in shown))
    )
    for turn in policy_turns(row):
        tokens += turn
        step = environment.step(Response(turn_text(turn, tokenizer), "stop", 0))
        if not step.done:
            messages = [
                Message(observation.role, tuple(environment.format_observation(observation)))
                for observation in step.observations
            ]
            contents = chain.from_iterable(message.parts for message in messages)
            sources = [content.source for content in contents if isinstance(content, MediaPart)]
            _, observation_tokens = bridge.tokens(tokens, messages, is_prompt=False)
            if rules.media:
                observation_tokens, _ = rules.media.expand_placeholders(
                    observation_tokens, {Kind.IMAGE: sources}, list
                )
            tokens += observation_tokens
            shown += sources
    assert step.done
    if not rules.media:
        return tokens, []
    return tokens, [rules.media.pool.load(Kind.IMAGE, source).media_id for source in shown]


def policy_turns(row: Row) -> Iterator[list[int]]:
    """Tokens of each turn of the policy in a row."""
    for learned, tokens in groupby(
        zip(row["loss_mask"], row["token_ids"], strict=True), itemgetter(0)
    ):
        turn = [token for _, token in tokens]
        if learned:
            yield turn


def test_the_tiny_template_renders_calls_as_the_policy_writes_them(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, chat=True)
    template = ChatTemplate((tmp_path / "chat_template.jinja").read_text(), {}, "")
    calls = [ToolCall("add", {"numbers": [1, 2]}), ToolCall("say", {"word": "a"})]
    tool_calls = [
        {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
    ]
    try:
        for content in ("so", ""):
            text = "\n".join([*filter(None, [content]), *(call.text for call in calls)])
            user = {"role": "user", "content": "a"}
            written = template.render(
                [user, {"role": "assistant", "content": text}], add_generation_prompt=False
            )
            rendered = template.render(
                [user, {"role": "assistant", "content": content, "tool_calls": tool_calls}],
                add_generation_prompt=False,
            )
            assert rendered == written
    finally:
        template.close()
