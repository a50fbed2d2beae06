"""`relax-hpc check`: directories of models."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.weight_files import weight_files
from relax_hpc.config import load
from relax_hpc.config.schema import TinyModelConfig
from relax_hpc.convert.hf_tensors import HfTensors
from relax_hpc.ops.checks import files
from relax_hpc.ops.checks.settings import check
from relax_hpc.training.models.families import spec_from_config
from relax_hpc.training.models.hf_files import SafetensorFiles
from relax_hpc.training.models.tiny_model import make_tiny_model
from tests.helpers.model_files import model_directory
from tests.helpers.run_helpers import QUICKSTART
from tests.ops.check_helpers import SEEING_EXPERTS, model_findings


def test_of_another_run_it_is_said_what_to_start_from(tmp_path: Path) -> None:
    run, checkpoint = tmp_path / "other", tmp_path / "other" / "checkpoints" / "i000001-step-000012"
    checkpoint.mkdir(parents=True)
    (run / "config.yaml").touch()
    for number in (0, 12):
        (run / "weights" / f"i000001-v{number:06d}" / "model").mkdir(parents=True)
        (run / "weights" / f"i000001-v{number:06d}" / "model" / "config.json").touch()
    for path, text in (
        (
            checkpoint,
            f"found a checkpoint of a run; run `relax-hpc convert {checkpoint} "
            f"{run}/i000001-step-000012-hf`, and",
        ),
        (
            run,
            f"found a run, which is not a model; name {run}/weights/i000001-v000012/model, its newest "
            "weights",
        ),
    ):
        over = {"run_dir": str(tmp_path / "run"), "model.path": str(path)}
        assert any(f"model.path: {text}" in finding for finding in check(load([QUICKSTART], over)))


def test_a_name_on_the_hub_says_how_to_download_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hint = "hf download Qwen/Qwen3-0.6B --local-dir models/Qwen3-0.6B"
    finding = check(load([QUICKSTART], {"model.path": "Qwen/Qwen3-0.6B"}))[0]
    assert finding.startswith("model.path: found ") and hint in finding
    (tmp_path / "Qwen").mkdir()
    finding = check(load([QUICKSTART], {"model.path": "Qwen/Qwen3-0.6B"}))[0]
    assert finding.startswith("model.path: found ")
    assert hint not in finding, "a folder of the user's own"


@pytest.mark.parametrize(
    ("file", "text"), [("", "its weights are missing"), ("a.bin", "found a.bin, which is pickled")]
)
def test_a_model_without_readable_weights_says_why(tmp_path: Path, file: str, text: str) -> None:
    if file:
        (tmp_path / file).touch()
    with pytest.raises(ConfigError, match=re.escape(text)):
        weight_files(tmp_path)


BROKEN = [
    ("model.safetensors", b"", "model.safetensors: not a whole safetensors file"),
    (
        "model.safetensors",
        lambda data: data[: len(data) // 2],
        "model.safetensors: not a whole safetensors file",
    ),
    ("tokenizer.json", b"", "tokenizer.json: not a tokenizer"),
    ("tokenizer.json", b"{}", "tokenizer.json: not a tokenizer"),
    ("tokenizer_config.json", b"{", "tokenizer_config.json: not JSON"),
    (
        "config.json",
        lambda data: data.replace(b'"vocab_size": 64', b'"vocab_size": 32'),
        "found 64 tokens, allowed: vocab_size",
    ),
    (
        "config.json",
        lambda data: data.replace(b'_layers": 4', b'_layers": 5'),
        "model.layers.4.input_layernorm.weight is missing",
    ),
    (
        "config.json",
        lambda data: data.replace(b'_layers": 4', b'_layers": 3'),
        "unknown tensor model.layers.3.",
    ),
    (
        "config.json",
        lambda data: data.replace(b'"vocab_size": 64', b'"vocab_size": 8, "vocab_size": 64'),
        "config.json: not JSON: found 'vocab_size' twice in one object",
    ),
    ("model.safetensors.index.json", b"{", "index.json: not JSON"),
]


@pytest.mark.parametrize(
    ("name", "content", "says"), BROKEN, ids=[f"{case[0]} {case[2][-20:]}" for case in BROKEN]
)
def test_files_of_a_model_are_read(tmp_path: Path, name: str, content: Any, says: str) -> None:
    path = model_directory(tmp_path / "model")
    file = path / name
    file.write_bytes(content if isinstance(content, bytes) else content(file.read_bytes()))
    findings = model_findings(path)
    assert findings and all(
        line.startswith("model.path: ") and "\n" not in line for line in findings
    )
    assert any(says in line for line in findings)


def test_a_pipe_in_the_place_of_weights_is_not_waited_for(tmp_path: Path) -> None:
    path = model_directory(tmp_path / "model")
    (path / "model.safetensors").unlink()
    os.mkfifo(path / "model.safetensors")
    assert "found no *.safetensors" in model_findings(path)[0]


def test_model_directories(tmp_path: Path) -> None:
    good = model_directory(tmp_path / "good")
    layout = {"actor.parallel.tensor": 2, "actor.parallel.pipeline": 4}
    assert model_findings(good, **layout) == []
    (good / "tokenizer.json").unlink()
    (good / "model.safetensors").unlink()
    findings = model_findings(good)
    assert (
        len(findings) == 2
        and "no *.safetensors" in findings[0]
        and "no tokenizer.json" in findings[1]
    )
    (good / "config.json").unlink()
    assert "model.path: found no config.json in" in model_findings(good)[0]


@pytest.mark.parametrize("text", ["{", "[]", "\xff", "{}", '{"model_type": 5}'])
def test_broken_model_config(tmp_path: Path, text: str) -> None:
    path = model_directory(tmp_path / "model")
    (path / "config.json").write_text(text, encoding="latin-1")
    findings = model_findings(path)
    assert (
        len(findings) == 1
        and findings[0].startswith("model.path: ")
        and "config.json" in findings[0]
    )


def test_index_that_names_a_missing_file(tmp_path: Path) -> None:
    path = model_directory(tmp_path / "model")
    (path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "model-2.safetensors"}}'
    )
    assert "no model-2.safetensors" in model_findings(path)[0]


def test_models_that_cannot_be_trained_are_named_with_every_reason(tmp_path: Path) -> None:
    path = model_directory(tmp_path / "model", rope_scaling={"type": "yarn"}, logit_scale=0.5)
    findings = model_findings(path)
    assert len(findings) == 2 and all(
        f"model.path: {path}/config.json: " in finding for finding in findings
    )
    assert (
        "rope_scaling.type is 'yarn'" in findings[0] or "rope_scaling.type is 'yarn'" in findings[1]
    )
    assert model_findings(path, **{"model.ignore_keys": ["rope_scaling", "logit_scale"]}) == []
    other = model_directory(tmp_path / "other", model_type="llama")
    assert (
        "architectures is ['Qwen3ForCausalLM'], supported is ['LlamaForCausalLM']"
        in model_findings(other)[0]
    )


def test_every_family_is_sound_or_says_how_its_ranks_may_split_it(tmp_path: Path) -> None:
    llama = model_directory(
        tmp_path / "llama", model_type="llama", architectures=["LlamaForCausalLM"], head_dim=None
    )
    assert model_findings(llama, **{"actor.parallel.tensor": 4, "actor.parallel.pipeline": 2}) == []
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    settings = {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "intermediate_size": None,
    } | experts
    mixed = model_directory(tmp_path / "mixed", **settings)
    assert model_findings(mixed, **{"actor.parallel.data": 2}) == []
    assert model_findings(mixed, **{"actor.parallel.data": 2, "actor.parallel.expert": 2}) == []
    assert model_findings(mixed, **{"actor.parallel.expert": 2}) == [
        "actor.parallel.expert: found 2, allowed: a divisor of tensor * context * data, 1"
    ]
    grouped = {"actor.experts": "grouped", "model.device": "cuda"}
    assert not any("experts" in text for text in model_findings(mixed, **grouped))
    assert any(
        text.startswith("actor.experts: found grouped with model.dtype float32, allowed: sequen")
        for text in model_findings(mixed, **grouped, **{"model.dtype": "float32"})
    )


def test_experts_that_sglang_cannot_read_are_named(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shape = {
        key.removeprefix("model.tiny."): value
        for key, value in SEEING_EXPERTS.items()
        if "tiny" in key
    }
    make_tiny_model(directory, TinyModelConfig(**shape), 0)
    assert model_findings(directory) == []
    tensors = load_file(directory / "model.safetensors")
    straight = {
        name: tensor.transpose(0, 2, 1).copy()
        for name, tensor in tensors.items()
        if ".experts." in name
    }
    save_file(tensors | straight, directory / "model.safetensors")
    (finding,) = model_findings(directory)
    assert (
        finding.startswith("model.path: found model.language_model.layers.0.mlp.experts.")
        and "transposed" in finding
    )


def weight_findings(directory: Path, **over: Any) -> list[str]:
    """What `check` says of the model in ``directory``, and `convert` too, in the same words."""
    config = load(
        [],
        {
            "model.path": str(directory),
            "data.task": "relax_hpc.examples.tasks.sort_digits:SortDigits",
            "data.max_prompt_tokens": 32,
            **over,
        },
    )
    return [
        line.partition(": ")[2]
        for line in files.check_files(config)
        if line.startswith("model.path")
    ]


def test_an_output_layer_that_is_not_the_embedding_it_is_tied_to_is_refused(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "m", TinyModelConfig(), 0)
    weights = load_file(tmp_path / "m" / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    for other, count in ((embedding.copy(), 0), (embedding + 1, 1), (embedding[:8], 1)):
        save_file(
            weights | {"lm_head.weight": other},
            tmp_path / "m" / "model.safetensors",
            metadata={"format": "pt"},
        )
        findings = weight_findings(tmp_path / "m")
        assert len(findings) == count and all("lm_head.weight" in line for line in findings)
        spec = spec_from_config(json.loads((tmp_path / "m" / "config.json").read_text()))
        if findings and other.shape == embedding.shape:
            with pytest.raises(ConfigError) as caught:
                HfTensors(tmp_path / "m", spec)
            assert str(caught.value) == findings[0]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "model.safetensors",
            "found model.safetensors in {}, which its index does not name; remove the file",
        ),
        ("old.safetensors", "found old.safetensors in {}, which its index does not name"),
        ("consolidated.safetensors", ""),
    ],
)
def test_a_file_of_weights_that_the_index_does_not_name_is_refused(
    name: str, says: str, tmp_path: Path
) -> None:
    """Programs differ in which of them they read. Those of a publisher's own format are read by
    none."""
    make_tiny_model(directory := tmp_path / "m", TinyModelConfig(), 0)
    weights = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").rename(directory / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(weights, "model-00001-of-00001.safetensors")}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert weight_findings(directory) == []
    save_file(weights, directory / name, metadata={"format": "pt"})
    findings = weight_findings(directory)
    assert [line.startswith(says.format(directory)) for line in findings] == (
        [True] if says else []
    )
    if says:
        with pytest.raises(ConfigError, match="which its index does not name"):
            SafetensorFiles(directory)
    (directory / "model-00001-of-00001.safetensors").unlink()
    assert weight_findings(directory)[0].startswith("found no model-00001-of-00001.safetensors")


@pytest.mark.parametrize("field", ["reference_path", "teacher_path", "critic_path"])
def test_every_model_that_scores_the_policys_tokens_has_its_tokenizer(
    field: str, tmp_path: Path
) -> None:
    for name in ("policy", "other"):
        make_tiny_model(tmp_path / name, TinyModelConfig(), 0)
    path = tmp_path / "other" / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]
    path.write_text(json.dumps(content))
    over = {
        "model.path": str(tmp_path / "policy"),
        f"model.{field}": str(tmp_path / "other"),
        "data.task": "relax_hpc.examples.tasks.sort_digits:SortDigits",
    }
    findings = list(files.check_files(load([], over)))
    assert any(
        f"model.{field}: found" in line and "whose tokenizer has other ids" in line
        for line in findings
    ), findings
