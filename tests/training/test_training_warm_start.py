"""The supervised steps before RL."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from relax_hpc.base.errors import ConfigError
from relax_hpc.config.schema import Config, DataConfig, WarmStartConfig
from relax_hpc.data.prompts import PromptRules
from relax_hpc.data.tokenizer import Tokenizer, load_tokenizer
from relax_hpc.training.demonstrations import read_demonstrations
from relax_hpc.training.models.tiny_model import make_tiny_model
from relax_hpc.training.models.tiny_tokenizer import write_tokenizer
from relax_hpc.training.warm_start import warm_start


def test_it_learns_the_demonstrations_and_repeats_itself_exactly(tmp_path: Path):
    config = Config(seed=3, warm_start=WarmStartConfig(steps=30, batch_size=8, lr=1e-2))
    make_tiny_model(tmp_path / "model-init", config.model.tiny, seed=3)
    lines = [
        {"token_ids": [1, 5 + index, 20, 5 + index, 2], "prompt_len": 3} for index in range(10)
    ]
    path = tmp_path / "warm_start.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    losses = [
        warm_start(config, tmp_path / "model-init", path, tmp_path / name)
        for name in ("one", "two")
    ]
    assert losses[0] == losses[1] < 0.5
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two")]
    assert weights[0] == weights[1]
    assert (tmp_path / "one" / "tokenizer.json").exists()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "empty"),
        ('{"token_ids": [1]}\n', ":1: wrong_type: prompt_len is None, of 1 tokens"),
        ("[1]\n", ":1: wrong_type: a line is a list"),
        ("{\n", ":1:"),
    ],
)
def test_broken_demonstrations_are_named(tmp_path: Path, text: str, says: str):
    path = tmp_path / "warm_start.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_demonstrations(path, *rules_of_a_model(tmp_path))


def test_missing_demonstrations_are_named(tmp_path: Path):
    with pytest.raises(ConfigError, match="the warm start needs demonstrations"):
        read_demonstrations(tmp_path / "nothing.jsonl", *rules_of_a_model(tmp_path))


def rules_of_a_model(directory: Path) -> tuple[PromptRules, Tokenizer]:
    write_tokenizer(directory)
    tokenizer = load_tokenizer(directory)
    return PromptRules.from_config(DataConfig(), tokenizer), tokenizer
