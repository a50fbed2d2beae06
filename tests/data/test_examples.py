"""Rows of files that are learned from as they are: which of their tokens are learned, and which
rows are of no use."""

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
FORGETS = TEMPLATE.replace(
    "message.content +", "(message.content if loop.last else message.content.split('=') | last) +"
)
"""As templates of models that think: of an earlier turn the thoughts are left out."""
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
    """Each of ``rows`` as it is learned from, and the tokenizer."""
    # One that was read is not read again.
    (path := model / f"{zlib.crc32(template.encode())}.jinja").write_text(template)
    over = {"algorithm.name": algorithm, "data.chat_template": str(path) if template else ""}
    tokenizer = load_tokenizer(model)
    rules = rules_of(
        load([], over | {f"data.{key}": value for key, value in data.items()}), tokenizer
    )
    with rules.rendering():
        return tokenizer, [
            rules.parse_row(number, {"id": number, **row}, tokenizer)
            for number, row in enumerate(rows)
        ]


def learned(tokenizer: Tokenizer, one: Learned) -> list[str]:
    """Texts that are learned, by themselves, special tokens included."""
    parts, before = [], 0
    for token, mask in zip(one.token_ids, one.loss_mask, strict=True):
        parts += [""] if mask > before else []
        parts[-1:] = [parts[-1] + tokenizer.name_of(token)] if mask else parts[-1:]
        before = mask
    return parts


def test_what_the_assistant_says_is_learned_as_transformers_masks_it(model: Path) -> None:
    requires("transformers")
    from relax_hpc.base.transformers_hook import install_transformers_hook

    install_transformers_hook()
    from transformers import AutoTokenizer

    _, (found,) = read(model, {"messages": CHAT})
    theirs = AutoTokenizer.from_pretrained(model).apply_chat_template(
        CHAT,
        chat_template=TEMPLATE,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    assert [*found.sequences[0].token_ids] == theirs["input_ids"]
    assert [*found.sequences[0].loss_mask] == theirs["assistant_masks"]


def test_a_turn_is_what_would_be_drawn_also_where_the_template_forgets_of_earlier_ones(
    model: Path,
) -> None:
    tokenizer, (found,) = read(model, {"messages": CHAT}, template=FORGETS)
    assert learned(tokenizer, found.sequences[0]) == ["12</s>", "4,3=34</s>"]


def test_of_a_prompt_and_an_answer_the_answer_alone_is_learned(model: Path) -> None:
    rows = (
        {"messages": CHAT[:3], "answer": "34"},
        {"prompt": CHAT[:1], "answer": "12"},
        {"prompt": "21?", "answer": "12"},
    )
    tokenizer, found = read(model, *rows)
    assert [learned(tokenizer, one.sequences[0]) for one in found] == [
        ["34</s>"],
        ["12</s>"],
        ["12</s>"],
    ]
    assert found[1].sequences == found[2].sequences
    tokenizer, (plain, tokens) = read(
        model, rows[2], {"token_ids": [1, 5, 6, 2], "prompt_len": 2}, template=""
    )
    assert (
        learned(tokenizer, plain.sequences[0]) == ["12</s>"]
        and plain.sequences[0].token_ids[0] == tokenizer.bos_id
    )
    assert (
        tokens.sequences == (Learned((1, 5, 6, 2), (0, 0, 1, 1)),)
        and tokens.sequences[0].prompt_len == 2
    )


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
def test_of_a_pair_what_differs_is_learned_however_it_is_written(
    model: Path, row: dict[str, Any]
) -> None:
    tokenizer, (found,) = read(model, row, algorithm="dpo")
    assert [learned(tokenizer, one) for one in found.sequences] == [["12</s>"], ["21</s>"]]
    assert len({one.token_ids[: one.prompt_len] for one in found.sequences}) == 1


def reasons(found: Sequence[Example | BadLine]) -> list[str]:
    return [one.reason if isinstance(one, BadLine) else "" for one in found]


def test_rows_of_no_use_have_a_reason(model: Path) -> None:
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
    greedy = TEMPLATE.replace("'<s>assistant>'", "'<s>model>'")
    endless = TEMPLATE.replace("message.content + '</s>'", "message.content")
    for template in (greedy, endless):
        assert reasons(read(model, {"messages": CHAT}, template=template)[1]) == ["chat_template"]


def test_an_answer_that_repeats_its_prompt_is_refused(model: Path) -> None:
    """Whole texts beside their prompts, as some sets of pairs have them: the prompt would stand
    twice."""
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


def test_a_file_is_indexed_by_what_is_learned_of_its_rows(model: Path, tmp_path: Path) -> None:
    good = [{"id": n, "prompt": f"{n}?", "answer": str(n)} for n in range(9)]
    (path := tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in [*good, {"id": "bad"}])
    )
    tokenizer = load_tokenizer(model)
    sft, dpo = (rules_of(load([], {"algorithm.name": name}), tokenizer) for name in ("sft", "dpo"))
    rows = open_prompts(path, tmp_path / "i.index", tokenizer, sft, 0.2)
    assert [one.prompt_id for one in rows] == [str(n) for n in range(9)] and reasons(rows.bad) == [
        "missing_field"
    ]
    with pytest.raises(
        ConfigError, match=r"10 of 10 lines are bad: 10 missing_field .*no chosen, no rejected"
    ):
        open_prompts(path, tmp_path / "j.index", tokenizer, dpo, 0.2)
