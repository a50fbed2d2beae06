"""Converted checkpoints in real models: the logits of transformers, under every split, and what
runs have saved."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.transformers_hook import install_transformers_hook
from relax_hpc.commands.program import main
from relax_hpc.config.schema import ModelConfig, ParallelConfig
from relax_hpc.convert import verify
from relax_hpc.convert.hf_tensors import HfTensors
from relax_hpc.convert.to_hf import MegatronTensors
from relax_hpc.convert.torch_dist import StoredState
from relax_hpc.examples.model_family import BiasedDecoder
from relax_hpc.training.checkpoint import store
from relax_hpc.training.model import PolicyModel
from relax_hpc.training.models.families import FAMILIES, spec_from_config
from relax_hpc.training.models.hf_files import SafetensorFiles, read_config
from tests.convert.convert_rank import CASES
from tests.helpers.convert_helpers import BIASED, DENSE, LLAMA, MIXED, content, model, to
from tests.helpers.media_helpers import QWEN3_VL, QWEN3_VL_MOE, SPEAKING
from tests.helpers.training_helpers import (  # noqa: F401
    batch,
    launch,
    load,
    one_rank_fixture,
    rows,
    save,
    tiny_model,
    trainer,
)

pytestmark = [pytest.mark.run, pytest.mark.usefixtures("one_rank")]


@pytest.mark.parametrize(
    ("config", "packed"),
    [
        (DENSE | {"tie_word_embeddings": True}, False),
        (MIXED, True),
        (MIXED | {"norm_topk_prob": False}, False),
        (LLAMA, False),
        (QWEN3_VL, False),
        (QWEN3_VL_MOE, True),
    ],
)
def test_logits_equal_those_of_transformers(tmp_path: Path, config: dict, packed: bool):
    source = model(tmp_path / "hf", config, packed=packed)
    logits = to(source, tmp_path / "megatron", verify="all", prompt="5,6,7,8,9,10,11,12")["logits"]
    assert (
        logits["tokens"] == 8
        and logits["largest"] > 1.0
        and logits["largest_difference"] < 1e-4 * logits["largest"]
    )
    back_logits = to(
        tmp_path / "megatron", tmp_path / "again", verify="all", prompt="5,6,7,8,9,10,11,12"
    )["logits"]
    assert back_logits == logits
    assert (tmp_path / "again/model.safetensors").read_bytes() == (
        source / "model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize("config", [QWEN3_VL_MOE, SPEAKING], ids=lambda one: one["model_type"])
def test_files_of_transformers_convert_there_and_back(tmp_path: Path, config: dict):
    """Models with untransposed experts in one tensor, and with a talker; transformers loads the
    result again."""
    original, source = save_with_transformers(tmp_path / "hf", config), tmp_path / "hf"
    assert len(list(source.glob("*.safetensors"))) > 2
    logits = to(source, tmp_path / "megatron", verify="all", prompt="5,6,7,8,9,10,11,12")["logits"]
    assert logits["largest_difference"] < 1e-4 * logits["largest"]
    to(tmp_path / "megatron", tmp_path / "again", verify="digests")
    tensors_before, tensors_after = (content(tmp_path / name) for name in ("hf", "again"))
    assert {
        name: data for name, data in tensors_after.items() if name in tensors_before
    } == tensors_before
    # In its own files the model has the published form.
    to(tmp_path / "megatron", tmp_path / "published", shard_bytes=200_000)
    published = type(original).from_pretrained(tmp_path / "published").state_dict()
    assert published.keys() == original.state_dict().keys()
    assert all(torch.equal(published[name], value) for name, value in original.state_dict().items())
    experts = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    with SafetensorFiles(tmp_path / "published") as files:
        assert files.shapes().get(experts) in (None, (4, 32, 48)) and (experts in files) == (
            config is QWEN3_VL_MOE
        )


def save_with_transformers(directory: Path, config: dict) -> torch.nn.Module:
    """A model of transformers with random weights, saved in `directory`."""
    install_transformers_hook()
    import transformers

    model_class = getattr(transformers, config["architectures"][0])
    torch.manual_seed(3)
    model = model_class(
        model_class.config_class(
            **deepcopy({key: value for key, value in config.items() if key != "model_type"})
        )
    )
    for value in model.parameters():
        value.data.normal_(std=0.1)
    model.save_pretrained(directory, max_shard_size="100KB")
    return model


def test_every_split_loads_a_model_and_can_be_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(FAMILIES, "qwen2", BiasedDecoder)
    tokens = torch.arange(8)[None]
    configs = {
        "dense": DENSE,
        "tied": DENSE | {"tie_word_embeddings": True},
        "mixed": MIXED,
        "biased": BIASED,
    }
    for name, config in configs.items():
        source = model(tmp_path / name, config)
        to(source, tmp_path / f"{name}-megatron", shard_bytes=20_000)
        logits = verify.hf_logits(source, tokens[0].tolist())[None]
        save_file({"tokens": tokens, "logits": logits}, tmp_path / f"{name}.logits")
    launch(2, tmp_path, module="tests.convert.convert_rank")
    for name, split in CASES:
        to(
            tmp_path / f"{name}-{split}",
            tmp_path / f"{name}-{split}-hf",
            model=tmp_path / name,
            verify="digests",
        )
        assert content(tmp_path / f"{name}-{split}-hf") == content(tmp_path / name)
    padded = StoredState(tmp_path / "dense-tensor").tensors["output_layer.weight"].size
    assert tuple(padded) == (62, 32)
    state = StoredState(tmp_path / "biased-megatron").tensors
    bias = "decoder.layers.self_attention.linear_qkv.bias"
    # 4 heads of queries, 2 of keys and 2 of values, each of 16 rows, in 2 layers.
    assert tuple(state[bias].size) == (2, 128)
    assert not [key for key in state if key.startswith(f"{bias}_")]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_converted_checkpoint_equals_the_export_of_the_run(tmp_path: Path, dtype: str, capsys):
    run = tmp_path / "run"
    tiny_model(tmp_path, tied=True).rename(tmp_path / "model")
    run.mkdir()
    (run / "model").symlink_to(tmp_path / "model")
    ours = trainer(run / "model", dtype=dtype, optimizer={"distributed": dtype == "bfloat16"})
    ours.accumulate([batch(rows(4))])
    ours.step(1e-3)
    save_with_transformers = run / "checkpoints" / "i000001-step-000001"
    save(save_with_transformers, ours, {"step": 1})
    assert (
        main(
            [
                "convert",
                str(save_with_transformers),
                str(tmp_path / "hf"),
                "--verify",
                "--prompt",
                "3+4=",
            ]
        )
        == 0
    )
    assert "logits of 5 tokens differ" in capsys.readouterr().out
    tensors, expected = load_file(tmp_path / "hf/model.safetensors"), ours.model.export_hf()
    assert sorted(tensors) == sorted(expected)
    assert all(torch.equal(value, expected[name]) for name, value in tensors.items())
    assert read_config(tmp_path / "hf")["torch_dtype"] == dtype
    assert (tmp_path / "hf/tokenizer.json").read_bytes() == (
        run / "model/tokenizer.json"
    ).read_bytes()
    save_with_transformers.joinpath(store.MARKER).unlink()
    assert main(["convert", str(save_with_transformers), str(tmp_path / "other")]) == 78
    assert "COMPLETE.json: missing" in capsys.readouterr().err


def test_a_run_does_not_resume_from_a_converted_model(tmp_path: Path):
    source = tiny_model(tmp_path, tied=True)
    to(source, tmp_path / "megatron")
    with pytest.raises(ConfigError, match="a converted model, without optimizer"):
        load(tmp_path / "megatron", trainer(source))


def test_a_policy_loads_a_converted_model_in_its_dtype(tmp_path: Path):
    source = tiny_model(tmp_path, tied=False)
    to(source, tmp_path / "megatron", dtype="bfloat16")
    policy = PolicyModel(read_config(source), ModelConfig(), ParallelConfig())
    verify.load_module(policy.module, tmp_path / "megatron")
    expected = load_file(source / "model.safetensors")
    for name, value in policy.export_hf().items():
        assert value.dtype == torch.float32 and torch.equal(
            value, expected[name].bfloat16().float()
        )


def test_verification_detects_a_difference(tmp_path: Path):
    source, other = model(tmp_path / "one", DENSE), tmp_path / "other"
    to(source, tmp_path / "megatron")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.weight"][3, 2] += 1e-3
    model(other, DENSE)
    save_file(tensors, other / "model.safetensors")
    spec = spec_from_config(DENSE)
    with pytest.raises(
        ConfigError, match=r"1 of 25 tensors differ: model\.layers\.1\.self_attn\.k_proj\.weight"
    ):
        verify.compare_tensors(
            MegatronTensors(StoredState(tmp_path / "megatron"), spec), HfTensors(other, spec), spec
        )
    ids = verify.prompt_ids("", source, DENSE["vocab_size"])
    theirs, ours = (
        verify.hf_logits(other, ids),
        verify.megatron_logits(tmp_path / "megatron", spec, ids),
    )
    assert (theirs - ours).abs().max() > 1e-5
