"""Model files that are made to harm their reader: a file is refused, or a row is left out."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_hpc.base.errors import EXIT_RETRY, ConfigError
from relax_hpc.base.weight_files import read_header
from relax_hpc.commands.program import main
from relax_hpc.config.schema import Config, DataConfig, ModelConfig
from relax_hpc.convert.verify import prompt_ids
from relax_hpc.data.examples import ExampleRules
from relax_hpc.data.multimodal.rules import Rules
from relax_hpc.data.prompts import PromptRules, parse_rows
from relax_hpc.data.rows import BadLine
from relax_hpc.data.template_files import find_templates
from relax_hpc.data.tokenizer import Tokenizer, TokenizerError, load_tokenizer
from relax_hpc.ops.checks.model_files import find_model
from relax_hpc.training.models.families import config_problems, spec_from_config
from relax_hpc.training.models.tiny_model import make_tiny_model
from relax_hpc.training.models.tiny_tokenizer import write_tokenizer
from tests.effort import effort

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.just(10**400),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
FAILING_SPLIT = {
    "type": "Split",
    "pattern": {"Regex": "(x+x+)+y"},
    "behavior": "Isolated",
    "invert": False,
}
"""Pre-tokenizer whose expression fails on a long text of x, so that the library panics."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model."""
    path = tmp_path_factory.mktemp("hostile") / "model"
    make_tiny_model(path, Config().model.tiny, seed=0)
    return path


def changed_tokenizer(folder: Path, **changes: Any) -> Path:
    """A directory with a tiny tokenizer, whose tokenizer.json has other entries."""
    write_tokenizer(folder)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def replacements(
    count: int, pattern: dict[str, str], content: str, name: str = "normalizers"
) -> dict[str, Any]:
    step = {"type": "Replace", "pattern": pattern, "content": content}
    return {"type": "Sequence", name: [step] * count}


PADDING = {
    "direction": "Right",
    "pad_to_multiple_of": None,
    "pad_id": 0,
    "pad_type_id": 0,
    "pad_token": "x",
}
REFUSED = {
    "padding.strategy.Fixed: found 1099511627776": {
        "padding": PADDING | {"strategy": {"Fixed": 2**40}}
    },
    "padding.pad_to_multiple_of": {
        "padding": PADDING | {"strategy": "BatchLongest", "pad_to_multiple_of": 2**40}
    },
    "truncation.stride": {
        "truncation": {
            "direction": "Right",
            "max_length": 1,
            "strategy": "LongestFirst",
            "stride": 2**40,
        }
    },
    "replacements lengthen a text 1e\\+12 times": {
        "normalizer": replacements(6, {"String": "x"}, "x" * 100)
    },
    "replacements lengthen a text 1.07e\\+09 times": {
        "normalizer": replacements(30, {"Regex": ""}, "x")
    },
    "decoder: replacements lengthen": {
        "decoder": replacements(9, {"String": "x"}, "x" * 99, "decoders")
    },
    "its trie has 4294967295 bytes, found 11": {
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": "//////////////8="}
    },
    "no base64": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/"}},
    "FixedLength.length: found 0": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "decoder.stop: found 18446744073709551615": {
        "decoder": {"type": "Strip", "content": "x", "start": 0, "stop": 2**64 - 1}
    },
    "prepends 1002 characters": {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{"type": "Prepend", "prepend": "x" * 501}] * 2,
        }
    },
    "pre_tokenizer: found 1002 steps": {
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}] * 1001,
        }
    },
    "puts 2000 tokens around a text": {
        "post_processor": {
            "type": "Sequence",
            "processors": [
                {
                    "type": "TemplateProcessing",
                    "single": [{"SpecialToken": {"id": "s", "type_id": 0}}] * 2,
                    "pair": [],
                    "special_tokens": {"s": {"id": "s", "ids": [1] * 1000, "tokens": ["x"] * 1000}},
                }
            ],
        }
    },
    "the tokenizer has failed": {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "none", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [
                {"Sequence": {"id": "A", "type_id": 0}},
                {"Sequence": {"id": "B", "type_id": 1}},
            ],
            "special_tokens": {},
        }
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_tokenizer_that_would_abort_or_hang_is_refused(tmp_path: Path, message: str) -> None:
    folder = changed_tokenizer(tmp_path, **REFUSED[message])
    with pytest.raises(ConfigError, match=message) as error:
        load_tokenizer(folder)
    assert str(folder) in str(error.value) and "\n" not in str(error.value)


def test_published_tokenizers_are_within_the_bounds(tmp_path: Path) -> None:
    """Normalizers of converted SentencePiece models, and padding of a saved tokenizer."""
    steps = [
        {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "\u2581"} for _ in range(12)
    ]
    prepend = {"type": "Prepend", "prepend": "\u2581"}
    normalizer = {"type": "Sequence", "normalizers": [prepend, *steps, *steps]}
    padding = PADDING | {"strategy": {"Fixed": 8192}, "pad_to_multiple_of": 64}
    assert load_tokenizer(
        changed_tokenizer(tmp_path, normalizer=normalizer, padding=padding)
    ).encode("a  b")


@pytest.fixture
def panicking(tmp_path: Path) -> Tokenizer:
    return load_tokenizer(changed_tokenizer(tmp_path, pre_tokenizer=FAILING_SPLIT))


@pytest.mark.parametrize("text", ["x" * 34, "\ud800"])
def test_a_text_that_the_tokenizer_cannot_process_fails_only_its_row(
    panicking: Tokenizer, text: str
) -> None:
    with pytest.raises(TokenizerError):
        panicking.encode(text)
    rules = PromptRules.from_config(DataConfig(), panicking)
    rows = [
        (1, {"id": "a", "prompt": "12?", "answer": "1"}),
        (2, {"id": "b", "prompt": text, "answer": "1"}),
    ]
    good, bad = parse_rows(rows, panicking, rules)
    assert good.prompt_id == "a" and isinstance(bad, BadLine) and bad.reason == "tokenizer"
    examples = ExampleRules.from_rules(rules, 100, 1)
    assert (
        examples.read(2, {"id": "b", "prompt": "12?", "answer": text}, panicking).reason
        == "tokenizer"
    )


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"]
)
@pytest.mark.timeout(30)
def test_a_model_with_a_pipe_instead_of_a_file_is_refused(
    model: Path, tmp_path: Path, name: str
) -> None:
    for path in model.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    assert find_model(ModelConfig(path=str(tmp_path))).problems


def test_control_characters_in_names_are_not_printed(model: Path, tmp_path: Path) -> None:
    for path in model.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    name = "a\x1b[2J\nerror: forged"
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {name: 1}))
    problems_of_config = find_model(ModelConfig(path=str(tmp_path))).problems
    assert problems_of_config and all(problem.isprintable() for problem in problems_of_config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    header = json.dumps({name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    problems_of_weights = find_model(ModelConfig(path=str(tmp_path))).problems
    assert problems_of_weights and all(problem.isprintable() for problem in problems_of_weights)


@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.timeout(30)
def test_irregular_files_are_not_read_as_templates_and_not_converted(
    model: Path, tmp_path: Path, kind: str
) -> None:
    source = tmp_path / "source"
    shutil.copytree(model, source)
    (source / "additional_chat_templates").mkdir()
    for path in (source / "additional_chat_templates" / "tool_use.jinja", source / "merges.txt"):
        os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    with pytest.raises(
        ConfigError, match=f"a {'FIFO' if kind == 'pipe' else 'device'}, expected a regular file"
    ):
        find_templates("model", source)
    assert main(["convert", str(source), str(tmp_path / "target")]) == EXIT_RETRY
    assert not (tmp_path / "target").exists()


def test_a_comparison_with_an_unprocessable_prompt_is_an_error(
    panicking: Tokenizer,
) -> None:
    with pytest.raises(ConfigError, match="--prompt: the tokenizer has failed"):
        prompt_ids("x" * 34, panicking.directory, 100)
    with pytest.raises(TokenizerError):
        panicking.encode_after("12", "x" * 34)


@pytest.mark.parametrize("layers", [10**6, 10**9, 1025])
@pytest.mark.timeout(30)
def test_a_model_of_a_million_layers_is_refused(model: Path, tmp_path: Path, layers: int) -> None:
    for path in model.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    findings = find_model(ModelConfig(path=str(tmp_path))).problems
    assert (
        f"num_hidden_layers is {layers}, supported is a positive integer, at most 1024"
        in findings[0]
    )


EXPERTS = {
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "num_key_value_heads": 1,
    "norm_topk_prob": True,
}


def test_experts_of_all_layers_are_bounded_together(model: Path) -> None:
    config = json.loads((model / "config.json").read_text()) | EXPERTS
    config |= {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 4096,
    }
    problem = "num_hidden_layers is 1000, supported is at most 131072 experts of all layers"
    assert problem in list(config_problems(config | {"num_hidden_layers": 1000}))


@settings(max_examples=effort(40, 1000))
@given(key=st.integers(0), value=JSON)
def test_a_config_with_random_values_is_a_model_or_is_refused(
    model: Path, key: int, value: Any
) -> None:
    config = json.loads((model / "config.json").read_text())
    changed = config | {list(config)[key % len(config)]: value}
    try:
        spec_from_config(changed)
    except ConfigError:
        assert list(config_problems(changed))
    with pytest.raises(ConfigError):
        Rules.from_model(model)


@settings(max_examples=effort(30, 1000))
@given(
    name=st.sampled_from(
        ["tokenizer_config.json", "added_tokens.json", "config.json", "generation_config.json"]
    ),
    key=st.sampled_from(
        [
            "added_tokens_decoder",
            "eos_token",
            "extra_special_tokens",
            "eos_token_id",
            "pad_token_id",
            "x",
        ]
    ),
    value=JSON,
)
def test_tokenizer_settings_with_random_values_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, name: str, key: str, value: Any
) -> None:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    (folder / name).write_text(json.dumps({"eos_token": "</s>", key: value}))
    try:
        load_tokenizer(folder)
    except ConfigError as error:
        assert str(folder) in str(error) or "tokenizer_config.json" in str(error)


@settings(max_examples=effort(30, 1000))
@given(content=JSON)
def test_a_header_with_random_values_is_refused(
    tmp_path_factory: pytest.TempPathFactory, content: Any
) -> None:
    path = tmp_path_factory.mktemp("header") / "model.safetensors"
    entry = {"dtype": "F32", "shape": content, "data_offsets": [0, 5]}
    for value in (content, {"weight": content}, {"weight": entry}):
        text = json.dumps(value).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(5))
        with pytest.raises(ConfigError, match="not a whole safetensors file"):
            read_header(path)
