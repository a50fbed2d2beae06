"""Rows parsed as prompts or examples with the chat template of a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from relax_hpc.config import load
from relax_hpc.config.schema import DataConfig, TinyModelConfig
from relax_hpc.data.examples import Example, rules_of
from relax_hpc.data.prompts import Prompt, PromptRules
from relax_hpc.data.rows import BadLine
from relax_hpc.data.tokenizer import Tokenizer, load_tokenizer
from relax_hpc.training.models.tiny_model import make_tiny_model

TEMPLATE = """{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.role in ['system', 'user', 'assistant', 'tool'] %}{{- m.content }}{% endif %}
{%- if m.thinking is defined %}{{- m.thinking }}{% endif %}
{%- for call in m.tool_calls or [] %}{{- call.function.name }}{% endfor %}{{- '<|im_end|>\n' }}{% endfor %}
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""
USER = {"role": "user", "content": "3+4="}
Row = dict[str, Any]


def chat_model(directory: Path) -> Tokenizer:
    """Write a tiny chat model to `directory`, and return its tokenizer."""
    shape = TinyModelConfig(hidden_size=8, num_layers=1, head_dim=8, intermediate_size=8, chat=True)
    make_tiny_model(directory, shape, seed=0)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return load_tokenizer(directory)


def parse_prompts(tokenizer: Tokenizer, *rows: Row, **data: Any) -> list[Prompt | BadLine]:
    """Parse `rows` as prompts, with the model's template."""
    rules = PromptRules.from_config(DataConfig(**{"chat_template": "model", **data}), tokenizer)
    with rules.rendering():
        return [rules.parse_row(number, row, tokenizer) for number, row in enumerate(rows, start=1)]


def parse_examples(
    tokenizer: Tokenizer, *rows: Row, algorithm: str = "sft", **data: Any
) -> list[Example | BadLine]:
    """Parse `rows` as examples of `algorithm`, with the model's template."""
    overrides = {"algorithm.name": algorithm, "data.chat_template": "model"}
    rules = rules_of(
        load([], overrides | {f"data.{key}": value for key, value in data.items()}), tokenizer
    )
    with rules.rendering():
        return [rules.parse_row(number, row, tokenizer) for number, row in enumerate(rows, start=1)]


def bad_row_reasons(results: list[Any]) -> list[str]:
    """`reason: detail` of each bad line; an empty string for a good row."""
    return [
        f"{result.reason}: {result.detail}" if isinstance(result, BadLine) else ""
        for result in results
    ]


def write_rows(path: Path, *rows: Row) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
