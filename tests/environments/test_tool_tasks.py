"""Tasks with tools: what is demonstrated is what an episode becomes, token by token, against the
environment itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby, islice
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
def test_what_is_demonstrated_is_what_an_episode_becomes(tmp_path: Path, name: str) -> None:
    """Its turns, said to the environment, are answered as the demonstration has it; what it answers
    is not learned."""
    config = load([RUNS / f"{name}.yaml"])
    make_tiny_model(tmp_path / "model", config.model.tiny, seed=0)
    tokenizer = load_tokenizer(tmp_path / "model")
    how = PromptRules.from_config(config.data, tokenizer, tmp_path)
    made = get_task(config.data.task).demonstrations(config.data, tokenizer, noise=0.0, seed=5)
    demonstrations = list(islice(made, COUNT))
    (tmp_path / "lines").write_text("".join(json.dumps(one) + "\n" for one in demonstrations))
    with how.rendering():
        rows, media = read_demonstrations(tmp_path / "lines", how, tokenizer)
        for one, row in zip(demonstrations, rows, strict=True):
            tokens, shown = played(one, row, config, how, tokenizer)
            assert tokens == row["token_ids"]
            assert shown == [span["media_id"] for span in row["spans"]]
    assert len(media) == sum(len(one.get("images", ())) for one in demonstrations)


def played(
    demonstration: dict[str, Any], row: Row, config: Config, how: PromptRules, tokenizer: Tokenizer
) -> tuple[list[int], list[str]]:
    """Tokens of an episode in which the policy says what ``row`` has it say, and ids of the media
    in it."""
    bridge = TurnTokenizer(
        tokenizer, how.template, dict(how.media.placeholders) if how.media else {}
    )
    first = {name: demonstration[name][:1] for name in ("images",) if name in demonstration}
    prompt = how.read(
        1,
        {"id": "0", "prompt": demonstration["messages"][0]["content"], "answer": "", **first},
        tokenizer,
    )
    tokens, shown = list(prompt.token_ids), [medium.source for medium in prompt.media]
    environment = make_environment(
        environment_class(environment_name(config)), config.environment.options
    )
    environment.reset(
        Beginning(prompt.text, "", {}, tuple(MediaPart("image", source) for source in shown))
    )
    for turn in turns(row):
        tokens += turn
        step = environment.step(Response(turn_text(turn, tokenizer), "stop", 0))
        if not step.done:
            messages = [
                Message(said.role, tuple(environment.format_observation(said)))
                for said in step.observations
            ]
            sources = [
                part.source for one in messages for part in one.parts if isinstance(part, MediaPart)
            ]
            _, heard = bridge.tokens(tokens, messages, is_prompt=False)
            tokens += (
                how.media.expand_placeholders(heard, {Kind.IMAGE: sources}, list)[0]
                if how.media
                else heard
            )
            shown += sources
    assert step.done
    return tokens, [
        how.media.pool.load(Kind.IMAGE, source).media_id for source in shown
    ] if how.media else []


def turns(row: Row) -> Iterator[list[int]]:
    """Turns of the policy in a row."""
    for learned, some in groupby(
        zip(row["loss_mask"], row["token_ids"], strict=True), itemgetter(0)
    ):
        turn = [token for _, token in some]
        if learned:
            yield turn


def test_the_small_models_template_shows_calls_as_the_policy_writes_them(tmp_path: Path) -> None:
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
