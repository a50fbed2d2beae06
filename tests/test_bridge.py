"""Tokens between turns equal those of `renderers`, which goes from turn to turn as Qwen3 was trained."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from relax_hpc.environments.base import Message
from relax_hpc.rollout.bridge import Bridge
from tests.effort import effort
from tests.turns_helpers import SPECIAL, backend, template, tokenizer_of

TOKENIZER = tokenizer_of(backend())
END = TOKENIZER.eos_ids[0]
said = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
texts = st.one_of(said, st.sampled_from(["", "\n\n", " 12,\n", "</tool_response>\n", "<think>", 'über 3 {"a": [1]}']))
texts = texts.filter(lambda text: not any(name in text for name in SPECIAL))
messages = st.lists(st.tuples(st.sampled_from(["tool", "user"]), texts), min_size=1, max_size=4)


@pytest.fixture(scope="module")
def bridges():
    # Each asks its template at once, which begins a process: not while tests are collected, by every worker.
    templates = {thinks: template(thinks) for thinks in (True, False)}
    yield {thinks: Bridge(TOKENIZER, chat) for thinks, chat in templates.items()}
    for chat in templates.values():
        chat.close()


@pytest.fixture(scope="module")
def renderers():
    from renderers.configs import Qwen3RendererConfig
    from renderers.qwen3 import Qwen3Renderer

    fast = PreTrainedTokenizerFast(tokenizer_object=backend(), eos_token="<|im_end|>", pad_token="<|endoftext|>")
    return {thinks: Qwen3Renderer(fast, Qwen3RendererConfig(enable_thinking=thinks)) for thinks in (True, False)}


@settings(max_examples=effort(150, 2000), deadline=None)
@given(messages, st.lists(st.integers(0, 255), max_size=12), st.booleans(), st.booleans())
def test_what_is_said_between_turns_is_what_renderers_makes_of_it(
    bridges, renderers, messages, drawn, ended, thinks
) -> None:
    renderer = renderers[thinks]
    prompt = renderer.render_ids([{"role": "user", "content": "go"}], add_generation_prompt=True)
    turn = [*drawn, END] if ended else drawn
    spoken = [{"role": role, "content": text} for role, text in messages]
    expected = renderer.bridge_to_next_turn(prompt, turn, spoken)
    if expected is None:
        # It would have what was said before rendered once more, without the thoughts: tokens that are drawn stay here.
        assert thinks and any(role == "user" for role, _ in messages)
        return
    ours = [Message(role, (text,)) for role, text in messages]
    kept, heard = bridges[thinks].tokens([*prompt, *turn], ours, is_prompt=False)
    assert kept == len(prompt) + len(turn)
    assert [*prompt, *turn, *heard] == expected.token_ids
