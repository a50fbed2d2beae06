"""Rows of demonstrations and preference pairs: tokens that are learned, and unusable rows."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.base.errors import ConfigError
from relax_hpc.config import load
from relax_hpc.config.schema import TinyModelConfig
from relax_hpc.data.examples import Example, Learned, rules_of
from relax_hpc.data.prompt_file import open_prompts
from relax_hpc.data.rows import BadLine
from relax_hpc.data.tokenizer import Tokenizer, load_tokenizer
from relax_hpc.training.models.tiny_model import make_tiny_model
from tests.requirements import requires

requires("torch")

TEMPLATE = """{%- for message in messages %}
{{- '<s>' + message.role + '>' }}
{%- if message.role == 'assistant' %}
{%- generation %}{{ message.content + '</s>' }}{% endgeneration %}
{%- else %}{{ message.content + '</s>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<s>assistant>' }}{% endif %}"""
OMITS_REASONING = TEMPLATE.replace(
    "message.content +", "(message.content if loop.last else message.content.split('=') | last) +"
)
"""Omits the reasoning of earlier turns, as templates of reasoning models do."""
CHAT = [
    {"role": "user", "content": "21?"},
    {"role": "assistant", "content": "2,1=12"},
    {"role": "user", "content": "43?"},
    {"role": "assistant", "content": "4,3=34"},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny_model(
        directory,
        TinyModelConfig(hidden_size=8, num_layers=1, head_dim=8, intermediate_size=8),
        seed=0,
    )
    return directory


def read(
    model: Path,
    *rows: dict[str, Any],
    algorithm: str = "sft",
    template: str = TEMPLATE,
    **data: Any,
) -> tuple[Tokenizer, list[Example | BadLine]]:
    """The tokenizer, and each of `rows` as an example or a bad line."""
    # Templates are cached by path, so each template needs its own file.
    (path := model / f"{zlib.crc32(template.encode())}.jinja").write_text(template)
    overrides = {"algorithm.name": algorithm, "data.chat_template": str(path) if template else ""}
    tokenizer = load_tokenizer(model)
    rules = rules_of(
        load([], overrides | {f"data.{key}": value for key, value in data.items()}), tokenizer
    )
    with rules.rendering():
        return tokenizer, [
            rules.parse_row(number, {"id": number, **row}, tokenizer)
            for number, row in enumerate(rows)
        ]


def learned_texts(tokenizer: Tokenizer, sequence: Learned) -> list[str]:
    """Text of each learned span, special tokens included."""
    texts, previous_mask = [], 0
    for token, mask in zip(sequence.token_ids, sequence.loss_mask, strict=True):
        texts += [""] if mask > previous_mask else []
        texts[-1:] = [texts[-1] + tokenizer.name_of(token)] if mask else texts[-1:]
        previous_mask = mask
    return texts


def test_loss_masks_equal_those_of_transformers(model: Path) -> None:
    requires("transformers")
    from relax_hpc.base.transformers_hook import install_transformers_hook

    install_transformers_hook()
    from transformers import AutoTokenizer

    _, (example,) = read(model, {"messages": CHAT})
    expected = AutoTokenizer.from_pretrained(model).apply_chat_template(
        CHAT,
        chat_template=TEMPLATE,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    assert [*example.sequences[0].token_ids] == expected["input_ids"]
    assert [*example.sequences[0].loss_mask] == expected["assistant_masks"]


def test_turns_have_the_tokens_of_generation_if_the_template_omits_earlier_reasoning(
    model: Path,
) -> None:
    tokenizer, (example,) = read(model, {"messages": CHAT}, template=OMITS_REASONING)
    assert learned_texts(tokenizer, example.sequences[0]) == ["12</s>", "4,3=34</s>"]


def test_only_the_answer_of_a_prompt_is_learned(model: Path) -> None:
    rows = (
        {"messages": CHAT[:3], "answer": "34"},
        {"prompt": CHAT[:1], "answer": "12"},
        {"prompt": "21?", "answer": "12"},
    )
    tokenizer, examples = read(model, *rows)
    assert [learned_texts(tokenizer, example.sequences[0]) for example in examples] == [
        ["34</s>"],
        ["12</s>"],
        ["12</s>"],
    ]
    assert examples[1].sequences == examples[2].sequences
    tokenizer, (text_example, token_example) = read(
        model, rows[2], {"token_ids": [1, 5, 6, 2], "prompt_len": 2}, template=""
    )
    assert learned_texts(tokenizer, text_example.sequences[0]) == ["12</s>"]
    assert text_example.sequences[0].token_ids[0] == tokenizer.bos_id
    assert token_example.sequences == (Learned((1, 5, 6, 2), (0, 0, 1, 1)),)
    assert token_example.sequences[0].prompt_len == 2


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "21?", "chosen": "12", "rejected": "21"},
        {
            "prompt": CHAT[:1],
            "chosen": [CHAT[1] | {"content": "12"}],
            "rejected": [CHAT[1] | {"content": "21"}],
        },
        {
            "chosen": [CHAT[0], CHAT[1] | {"content": "12"}],
            "rejected": [CHAT[0], CHAT[1] | {"content": "21"}],
        },
        {"prompt": "21?", "chosen": [CHAT[0], CHAT[1] | {"content": "12"}], "rejected": "21"},
    ],
)
def test_the_differing_turns_of_a_pair_are_learned_in_every_format(
    model: Path, row: dict[str, Any]
) -> None:
    tokenizer, (example,) = read(model, row, algorithm="dpo")
    assert [learned_texts(tokenizer, sequence) for sequence in example.sequences] == [
        ["12</s>"],
        ["21</s>"],
    ]
    assert len({sequence.token_ids[: sequence.prompt_len] for sequence in example.sequences}) == 1


def reasons(results: Sequence[Example | BadLine]) -> list[str]:
    return [result.reason if isinstance(result, BadLine) else "" for result in results]


def test_unusable_rows_have_a_reason(model: Path) -> None:
    rows = {
        "missing_field": {"prompt": "21?"},
        "wrong_type": {"prompt": "21?", "answer": 12},
        "empty_answer": {"token_ids": [1, 2], "prompt_len": 2},
        "over_long": {"prompt": "2" * 60, "answer": "12"},
        "special_token": {"prompt": "21?", "answer": "1</s>2"},
    }
    assert reasons(read(model, *rows.values(), max_row_tokens=60)[1]) == [*rows]
    pairs = {
        "missing_field": {"chosen": "1"},
        "no_preference": {"prompt": "1", "chosen": "1", "rejected": "1"},
    }
    assert reasons(read(model, *pairs.values(), algorithm="dpo")[1]) == [*pairs]
    assert reasons(
        read(model, {"messages": CHAT}, {"prompt": "21?", "answer": ""}, template="")[1]
    ) == [
        "wrong_type",
        "empty_answer",
    ]
    wrong_start = TEMPLATE.replace("'<s>assistant>'", "'<s>model>'")
    no_end = TEMPLATE.replace("message.content + '</s>'", "message.content")
    for template in (wrong_start, no_end):
        assert reasons(read(model, {"messages": CHAT}, template=template)[1]) == ["chat_template"]


def test_an_answer_that_repeats_its_prompt_is_refused(model: Path) -> None:
    """Answers of some pair data sets contain the prompt, which would then appear twice."""
    tokenizer = load_tokenizer(model)
    sft, dpo = (rules_of(load([], {"algorithm.name": name}), tokenizer) for name in ("sft", "dpo"))
    prompt = "1+2, 3+4, and 5+6?"
    refused = [
        sft.read(1, {"prompt": prompt, "answer": f"{prompt} 3"}, tokenizer),
        dpo.read(
            1, {"prompt": prompt, "chosen": f"{prompt} 3", "rejected": f"{prompt} 4"}, tokenizer
        ),
    ]
    assert [bad.reason for bad in refused] == ["answer_in_prompt"] * 2
    assert not isinstance(sft.read(1, {"prompt": "12", "answer": "123"}, tokenizer), BadLine)


def test_an_index_of_examples_has_the_rows_of_its_algorithm(model: Path, tmp_path: Path) -> None:
    good = [{"id": number, "prompt": f"{number}?", "answer": str(number)} for number in range(9)]
    (path := tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in [*good, {"id": "bad"}])
    )
    tokenizer = load_tokenizer(model)
    sft, dpo = (rules_of(load([], {"algorithm.name": name}), tokenizer) for name in ("sft", "dpo"))
    rows = open_prompts(path, tmp_path / "i.index", tokenizer, sft, 0.2)
    assert [example.prompt_id for example in rows] == [str(number) for number in range(9)]
    assert reasons(rows.bad) == ["missing_field"]
    with pytest.raises(
        ConfigError, match=r"10 of 10 lines are bad: 10 missing_field .*no chosen, no rejected"
    ):
        open_prompts(path, tmp_path / "j.index", tokenizer, dpo, 0.2)
