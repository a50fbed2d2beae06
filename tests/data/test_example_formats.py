"""Demonstrations and preference pairs as other programs write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relax_hpc.config import load
from relax_hpc.config.schema import TinyModelConfig
from relax_hpc.data.examples import Example, rules_of
from relax_hpc.data.prompts import PromptRules
from relax_hpc.data.rows import BadLine
from relax_hpc.data.tokenizer import Tokenizer, load_tokenizer
from relax_hpc.training.models.tiny_model import make_tiny_model
from tests.helpers.media_prompts import png
from tests.helpers.row_format_helpers import (
    USER,
    Row,
    bad_row_reasons,
    chat_model,
    parse_examples,
)
from tests.requirements import requires

requires("torch")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return chat_model(tmp_path_factory.mktemp("model") / "tiny")


def learned_text(tokenizer: Tokenizer, example: Example | BadLine) -> str:
    assert isinstance(example, Example), example
    (sequence,) = example.sequences
    pairs = zip(sequence.token_ids, sequence.loss_mask, strict=True)
    return "".join(tokenizer.name_of(token) for token, mask in pairs if mask)


def test_turns_of_weight_0_are_not_in_the_loss(tokenizer: Tokenizer) -> None:
    chat = [
        USER,
        {"role": "assistant", "content": "8", "weight": 0},
        USER,
        {"role": "assistant", "content": "7", "weight": 1},
    ]
    wrong_weight = [*chat[:3], {"role": "assistant", "content": "7", "weight": 0.5}]
    results = parse_examples(
        tokenizer, {"messages": chat}, {"messages": wrong_weight}, {"messages": chat[:2]}
    )
    assert learned_text(tokenizer, results[0]) == "7<|im_end|>"
    assert bad_row_reasons(results[1:]) == [
        "wrong_type: message 3: weight is '0.5', allowed: 0 or 1",
        "empty_answer: nothing in it is learned",
    ]


ENDINGS = """{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content }}
{%- if m.tool_calls %}{{- 'call ' + m.tool_calls[0].function.name + '</s>' }}{% else %}{{- '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% elif not tools %}{{- end or '' }}{% endif %}"""


def test_a_turn_ends_with_the_end_token_of_the_template(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """In this template a call ends with a token that does not end a response of the model."""
    (tmp_path / "t.jinja").write_text(ENDINGS)
    template = str(tmp_path / "t.jinja")
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "w"}}]}
    answer = {"role": "assistant", "content": "sunny"}
    chats = [USER, call, {"role": "tool", "content": "30"}, answer], [USER, call], [USER, answer]
    results = parse_examples(
        tokenizer, *({"messages": chat} for chat in chats), chat_template=template
    )
    texts = [learned_text(tokenizer, example) for example in results]
    assert texts == ["call w</s>sunny<|im_end|>", "call w</s>", "sunny<|im_end|>"]
    # Text that a template writes after a complete chat is not part of the last turn, and is not
    # the end of a call.
    end_after_chat = {"chat_template": template, "chat_template_kwargs": {"end": "<pad>"}}
    results = parse_examples(
        tokenizer, {"messages": chats[2]}, {"messages": chats[0]}, **end_after_chat
    )
    assert learned_text(tokenizer, results[0]) == "sunny<|im_end|>"
    assert bad_row_reasons(results[1:]) == [
        "chat_template: no special token ends message 1 where it stands"
    ]


CUTS = """{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.tool_calls %}{{- m.tool_calls[0].function.name + m.tool_calls[0].function.arguments | string }}
{%- else %}{{- m.content.split('</think>') | last }}{% endif %}{{- '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""
"""A template that shows only the first call of a message, without content and reasoning."""
CALL = {"function": {"name": "add", "arguments": {"x": "three", "y": 4}}}


@pytest.mark.parametrize(
    ("message", "left_out"),
    [
        ({"content": "<think>\n3 and 4\n</think>\n\n7"}, "content"),
        ({"content": "<think>\n\n</think>\n\n7"}, ""),
        ({"content": "7", "reasoning_content": "adding"}, "reasoning_content"),
        ({"content": "adding", "tool_calls": [CALL]}, "content"),
        ({"content": "", "tool_calls": [CALL]}, ""),
        (
            {"content": "", "tool_calls": [CALL, {"function": {"name": "sub", "arguments": "{}"}}]},
            "a call of sub",
        ),
        (
            {"content": "", "tool_calls": [CALL, {"name": "add", "arguments": {"x": ["five"]}}]},
            "a call of add",
        ),
    ],
)
def test_a_turn_is_refused_if_the_template_omits_a_part_of_it(
    tokenizer: Tokenizer, tmp_path: Path, message: Row, left_out: str
) -> None:
    (tmp_path / "t.jinja").write_text(CUTS)
    row = {"messages": [USER, {"role": "assistant", **message}]}
    (result,) = parse_examples(tokenizer, row, chat_template=str(tmp_path / "t.jinja"))
    expected = f"chat_template: the chat template leaves out {left_out} of message 1, to be learned"
    assert bad_row_reasons([result]) == [expected if left_out else ""]


def test_an_answer_after_a_complete_chat_and_an_empty_turn_are_refused(
    tokenizer: Tokenizer,
) -> None:
    chat = [USER, {"role": "assistant", "content": "3+4=7"}]
    empty_turn = [*chat, USER, {"role": "assistant", "content": ""}]
    results = parse_examples(
        tokenizer,
        {"messages": chat, "answer": "7"},
        {"messages": empty_turn},
        {"prompt": "3+4=", "answer": ""},
    )
    assert bad_row_reasons(results)[0].startswith(
        "answer_in_prompt: the chat ends with the assistant's message, and there is"
    )
    assert bad_row_reasons(results)[1:] == [
        f"empty_answer: message {number} is empty, and would be learned" for number in (3, 1)
    ]
    (chat_example,) = parse_examples(
        tokenizer, {"messages": chat, "answer": "7"}, ignore_keys=["answer"]
    )
    assert learned_text(tokenizer, chat_example) == "3+4=7<|im_end|>"


def test_the_prompt_of_a_preference_pair_appears_once_in_each_chat(tokenizer: Tokenizer) -> None:
    system = {"role": "system", "content": "add"}
    earlier_turn = [USER | {"content": "1+1="}, {"role": "assistant", "content": "2"}]

    def pair(prompt: Any, *earlier_messages: Row) -> Row:
        answers = [
            [*earlier_messages, {"role": "assistant", "content": content}] for content in ("7", "8")
        ]
        return {"prompt": prompt, "chosen": answers[0], "rejected": answers[1]}

    rows = [pair("3+4=", system, USER), pair([USER], system, USER), pair([system, USER])]
    results = parse_examples(tokenizer, *rows, pair("3+4=", *earlier_turn, USER), algorithm="dpo")
    sequences = [example.sequences for example in results if isinstance(example, Example)]
    assert sequences[0] == sequences[1] == sequences[2] and len(sequences) == 4
    text = tokenizer.decode(list(sequences[3][0].token_ids))
    assert text.count("3+4=") == text.count("1+1=") == 1
    chat = [USER, {"role": "assistant", "content": "7"}]
    wrong_rows = [
        pair([system, USER], USER),
        {
            "messages": chat,
            "chosen": chat,
            "rejected": [USER, {"role": "assistant", "content": "8"}],
        },
        {"chosen": chat, "rejected": [USER | {"content": "3+5="}, *chat[1:]]},
    ]
    other_start = "an answer is a chat that does not begin with the messages of the prompt"
    assert bad_row_reasons(parse_examples(tokenizer, *wrong_rows, algorithm="dpo")) == [
        f"answer_in_prompt: {other_start}",
        f"answer_in_prompt: {other_start}",
        "no_preference: message 0, where chosen and rejected differ, is not the assistant's",
    ]


def test_both_responses_of_a_pair_have_the_images_of_the_row(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "m", TinyModelConfig(vision_layers=2, chat=True), 0)
    (tmp_path / "p.png").write_bytes(png())
    tokenizer = load_tokenizer(tmp_path / "m")
    content_parts = [
        {"type": "image", "image": "p.png", "max_pixels": 1024},
        {"type": "text", "text": "what?"},
    ]
    reply = [{"role": "assistant", "content": "7"}]
    rows = [
        {"messages": [{"role": "user", "content": content_parts}], "chosen": "7", "rejected": "8"},
        {"prompt": "<image>what?", "images": ["p.png"], "chosen": reply, "rejected": "8"},
        {"prompt": "<image>what?", "image": "none.png", "chosen": reply, "rejected": "8"},
        {
            "prompt": "what?",
            "chosen": [{"role": "assistant", "content": content_parts}],
            "rejected": "8",
        },
    ]
    config = load([], {"algorithm.name": "dpo", "data.chat_template": "model"})
    rules = rules_of(config, tokenizer, tmp_path)
    with rules.rendering():
        results = [
            rules.parse_row(number, row, tokenizer) for number, row in enumerate(rows, start=1)
        ]
    for pair, image_tokens in zip(results[:2], (1, 4), strict=True):
        assert isinstance(pair, Example) and len(pair.sequences) == 2
        for sequence in pair.sequences:
            (medium,) = sequence.media
            ((start, length),) = medium.spans
            assert length == image_tokens and not any(sequence.loss_mask[start : start + length])
            assert len(set(sequence.token_ids[start : start + length])) == 1
    assert bad_row_reasons(results[2:])[0].startswith("missing_file: ")
    assert (
        bad_row_reasons(results[2:])[1]
        == "media_mismatch: a medium stands in a turn of the assistant that is learned"
    )


def test_example_rules_equal_prompt_rules_except_max_tokens(tokenizer: Tokenizer) -> None:
    config = load(
        [], {"algorithm.name": "sft", "data.chat_template": "model", "data.ignore_keys": ["x"]}
    )
    example_rules = rules_of(config, tokenizer)
    prompt_rules = PromptRules.from_config(config.data, tokenizer)
    equal_fields = [
        name
        for name in PromptRules.__dataclass_fields__
        if getattr(example_rules, name) == getattr(prompt_rules, name)
    ]
    assert set(PromptRules.__dataclass_fields__) - set(equal_fields) == {"max_tokens"}
