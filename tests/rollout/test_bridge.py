"""Tokens between turns equal those of `renderers`, which goes from turn to turn as Qwen3 was
trained."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from relax_hpc.data.chat import ChatTemplate
from relax_hpc.data.tokenizer import Tokenizer as ProjectTokenizer
from relax_hpc.environments.base import Message
from relax_hpc.rollout.episodes.turn_tokens import TurnTokenizer
from tests.effort import effort
from tests.helpers.turns_helpers import SPECIAL, backend, template, wrap_tokenizer

TOKENIZER = wrap_tokenizer(backend())
END = TOKENIZER.eos_ids[0]
said = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
texts = st.one_of(
    said,
    st.sampled_from(["", "\n\n", " 12,\n", "</tool_response>\n", "<think>", 'über 3 {"a": [1]}']),
)
texts = texts.filter(lambda text: not any(name in text for name in SPECIAL))
messages = st.lists(st.tuples(st.sampled_from(["tool", "user"]), texts), min_size=1, max_size=4)


@pytest.fixture(scope="module")
def bridges():
    # Each asks its template at once, which begins a process: not while tests are collected, by
    # every worker.
    templates = {thinks: template(thinks) for thinks in (True, False)}
    yield {thinks: TurnTokenizer(TOKENIZER, chat) for thinks, chat in templates.items()}
    for chat in templates.values():
        chat.close()


@pytest.fixture(scope="module")
def renderers():
    from renderers.configs import Qwen3RendererConfig
    from renderers.qwen3 import Qwen3Renderer

    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend(), eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    return {
        thinks: Qwen3Renderer(fast, Qwen3RendererConfig(enable_thinking=thinks))
        for thinks in (True, False)
    }


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
        # It would have what was said before rendered once more, without the thoughts: tokens that
        # are drawn stay here.
        assert thinks and any(role == "user" for role, _ in messages)
        return
    ours = [Message(role, (text,)) for role, text in messages]
    kept, heard = bridges[thinks].tokens([*prompt, *turn], ours, is_prompt=False)
    assert kept == len(prompt) + len(turn)
    assert [*prompt, *turn, *heard] == expected.token_ids


# -- whatever a template does to a message ---------------------------------------------------------

QWEN = "{{- '<|im_start|>' + m.role + '\\n' + CONTENT + '<|im_end|>\\n' }}"
NO_END = "{{- m.role + ': ' + CONTENT + '\\n' }}"
LLAMA = (
    "{%- if m.role == 'tool' %}{{- '<|im_start|>ipython\\n\\n{\"output\": ' }}{{- CONTENT }}{{- "
    "'}<|im_end|>' }}"
    "{%- else %}{{- '<|im_start|>' + m.role + '\\n\\n' + CONTENT + '<|im_end|>' }}{%- endif %}"
)
NUMBERED = (
    "{%- if m.role == 'assistant' %}{{- '<|im_start|>assistant\\n' + CONTENT + '<|im_end|>\\n' }}"
    "{%- else %}{{- '<|im_start|>' ~ loop.index0 ~ m.role ~ '\\n' ~ CONTENT ~ '<|im_end|>\\n' "
    "}}{%- endif %}"
)
OPENINGS = {
    QWEN: "<|im_start|>assistant\\n",
    NO_END: "assistant: ",
    LLAMA: "<|im_start|>assistant\\n\\n",
    NUMBERED: "<|im_start|>assistant\\n",
}
FILTERS = (
    "| trim",
    "| tojson",
    "| upper",
    "| replace(' ', '_')",
    "| truncate(20)",
    "| trim | tojson",
    "| indent(2)",
)
CASES = [(QWEN, applied) for applied in ("", *FILTERS)]
CASES += [
    (form, applied) for form in (NO_END, LLAMA, NUMBERED) for applied in ("| trim", "| tojson")
]


def filtered(form: str, applied: str) -> str:
    """A template that applies a filter to what tools and users say, and to nothing that the policy
    does."""
    body = form.replace(
        "CONTENT", f"(m.content if m.role == 'assistant' else (m.content {applied}))"
    )
    opening = f"{{%- if add_generation_prompt %}}{{{{- '{OPENINGS[form]}' }}}}{{%- endif %}}"
    return f"{{%- for m in messages %}}{body}{{%- endfor %}}{opening}"


@pytest.fixture(scope="module")
def filtering():
    templates = {case: ChatTemplate(filtered(*case), {}, "") for case in CASES}
    yield {case: (TurnTokenizer(TOKENIZER, chat), chat) for case, chat in templates.items()}
    for chat in templates.values():
        chat.close()


def tokens_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, special=False, special_tokens=True)


@settings(max_examples=effort(80, 3000), deadline=None)
@given(st.sampled_from(CASES), st.text("abc ", max_size=8), messages, st.booleans())
def test_an_observation_is_what_the_template_makes_of_it(
    filtering, case, turn, messages, is_prompt
) -> None:
    """Tokens equal to those of the whole chat's text, behind a turn of the policy as behind the
    prompt alone."""
    bridge, chat = filtering[case]
    prompt = [{"role": "user", "content": "go"}]
    turns = [] if is_prompt else [{"role": "assistant", "content": turn}]
    whole = chat.render(
        [*prompt, *turns, *({"role": role, "content": text} for role, text in messages)]
    )
    ends = not is_prompt and case[0] != NO_END
    drawn = [] if is_prompt else TOKENIZER.encode(turn, special=False)
    before = [*tokens_of(chat.render(prompt)), *drawn, *([END] if ends else [])]
    kept, heard = bridge.tokens(
        before, [Message(role, (text,)) for role, text in messages], is_prompt
    )
    assert TOKENIZER._backend.decode([*before[:kept], *heard], skip_special_tokens=False) == whole
    if case[0] != NO_END:
        # Behind a token that ends a turn a text's tokens do not depend on the text before.
        assert [*before[:kept], *heard] == tokens_of(whole)


@pytest.mark.parametrize("applied", ["", "| trim", "| tojson"])
@pytest.mark.parametrize("name", SPECIAL)
def test_a_filter_makes_no_special_token_of_what_is_said(filtering, applied, name) -> None:
    bridge, _ = filtering[QWEN, applied]
    _, heard = bridge.tokens([END], [Message("tool", (f" {name}a{name} ",))], is_prompt=False)
    assert heard.count(tokens_of(name)[0]) == {"<|im_start|>": 2, "<|im_end|>": 1}.get(name, 0)
    assert TOKENIZER._backend.decode(heard, skip_special_tokens=False).count(f"{name}a{name}") == 1


def test_behind_a_special_token_a_wrap_tokenizer_sentencepiece_puts_no_blank() -> None:
    """Llama 2 and Mistral: a text's first word gets a blank, but not what follows a special
    token."""
    tokens = ["<s>", "</s>", *"abc▁:", "▁a", "ab"]
    raw = Tokenizer(
        models.BPE({token: number for number, token in enumerate(tokens)}, [("▁", "a"), ("a", "b")])
    )
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    raw.decoder = decoders.Metaspace(prepend_scheme="first")
    raw.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in tokens[:2]]
    )
    tokenizer = ProjectTokenizer(raw, None, False, (1,), 1)
    body = "{% if m.role == 'assistant' %}{{ m.content }}</s>{% else %}a:{{ m.content }}{% endif %}"
    chat = ChatTemplate(f"{{% for m in messages %}}{body}{{% endfor %}}", {}, "")
    try:
        messages = [{"role": role, "content": "ab"} for role in ("user", "assistant", "tool")]
        expected = tokenizer.encode(chat.render(messages), special=False, special_tokens=True)
        end = expected.index(1) + 1
        _, heard = TurnTokenizer(tokenizer, chat).tokens(
            expected[:end], [Message("tool", ("ab",))], is_prompt=False
        )
        assert heard == expected[end:]
    finally:
        chat.close()
