"""The model made offline: its files, and that the Hugging Face classes read them as meant."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from relax_hpc.base.errors import ConfigError
from relax_hpc.config.schema import TinyModelConfig
from relax_hpc.data.tokenizer import load_tokenizer
from relax_hpc.training.models.tiny_model import make_tiny_model, parameter_shapes
from relax_hpc.training.models.tiny_tokenizer import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE

SMALL = TinyModelConfig(hidden_size=16, num_layers=1, head_dim=8, intermediate_size=24)


def test_weights_depend_on_the_seed_alone(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        make_tiny_model(tmp_path / name, SMALL, seed)
    one, two, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert one == two != other
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]


def test_weights_have_the_stated_distribution(tmp_path):
    make_tiny_model(tmp_path / "m", TinyModelConfig(tie_word_embeddings=False), 0)
    weights = load_file(tmp_path / "m/model.safetensors")
    assert {name: tuple(w.shape) for name, w in weights.items()} == parameter_shapes(
        TinyModelConfig(tie_word_embeddings=False)
    )
    assert "lm_head.weight" in weights
    for weight in weights.values():
        assert weight.dtype == torch.float32
        if weight.ndim == 1:
            assert (weight == 1).all()
        else:
            assert weight.std().item() == pytest.approx(0.02, rel=0.1)
            assert abs(weight.mean().item()) < 0.002


def test_a_model_that_is_there_is_kept(tmp_path):
    make_tiny_model(tmp_path / "m", SMALL, 0)
    before = (tmp_path / "m/model.safetensors").stat().st_mtime_ns
    make_tiny_model(tmp_path / "m", SMALL, 0)
    assert (tmp_path / "m/model.safetensors").stat().st_mtime_ns == before
    with pytest.raises(
        ConfigError, match=r"holds a model with hidden_size 16, model\.tiny asks for 64"
    ):
        make_tiny_model(tmp_path / "m", TinyModelConfig(), 0)
    (tmp_path / "other").mkdir()
    with pytest.raises(ConfigError, match=r"found no config\.json in .*; remove the directory"):
        make_tiny_model(tmp_path / "other", SMALL, 0)


def test_impossible_shapes_are_refused(tmp_path):
    with pytest.raises(
        ConfigError, match=r"num_attention_heads: found 3, allowed multiples .* \(2\)"
    ):
        make_tiny_model(
            tmp_path / "m", TinyModelConfig(num_attention_heads=3, num_key_value_heads=2), 0
        )
    with pytest.raises(ConfigError, match="head_dim: found 9"):
        make_tiny_model(tmp_path / "m", TinyModelConfig(head_dim=9), 0)
    with pytest.raises(
        ConfigError, match=r"num_experts_per_tok: found 4, allowed at most num_experts \(3\)"
    ):
        make_tiny_model(tmp_path / "m", TinyModelConfig(num_experts=3, num_experts_per_tok=4), 0)
    assert not list(tmp_path.iterdir())


def test_transformers_loads_a_mixture_of_experts(tmp_path):
    pytest.importorskip(
        "relax_hpc.rollout.engines.sglang.cpu.stand_ins"
    ).install_transformers_hook()
    from transformers import AutoModelForCausalLM

    shape = TinyModelConfig(num_experts=4, num_experts_per_tok=3, moe_intermediate_size=24)
    make_tiny_model(tmp_path / "m", shape, 0)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "m", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(model).__name__ == "Qwen3MoeForCausalLM"
    assert (
        model.config.num_experts,
        model.config.num_experts_per_tok,
        model.config.norm_topk_prob,
    ) == (4, 3, True)
    stored = load_file(tmp_path / "m/model.safetensors")
    assert {name: tuple(weight.shape) for name, weight in stored.items()} == parameter_shapes(shape)


def test_transformers_loads_model_and_tokenizer(tmp_path):
    pytest.importorskip(
        "relax_hpc.rollout.engines.sglang.cpu.stand_ins"
    ).install_transformers_hook()
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    make_tiny_model(tmp_path / "m", TinyModelConfig(), 0)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "m", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert sum(p.numel() for p in model.parameters()) == 102_848
    assert model.config.rope_parameters["rope_theta"] == 1e6
    assert (model.config.rms_norm_eps, model.config.vocab_size) == (1e-6, VOCAB_SIZE)
    stored = load_file(tmp_path / "m/model.safetensors")
    assert all(torch.equal(model.state_dict()[name], weight) for name, weight in stored.items())
    with torch.no_grad():
        logits = model(torch.tensor([[1, 7, 6, 4, 5, 18]])).logits
    assert logits.shape == (1, 6, VOCAB_SIZE)
    assert torch.isfinite(logits).all()

    generation = GenerationConfig.from_pretrained(tmp_path / "m")
    assert (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == (
        BOS_ID,
        EOS_ID,
        PAD_ID,
    )
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path / "m"), load_tokenizer(tmp_path / "m")
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (
        BOS_ID,
        EOS_ID,
        PAD_ID,
    )
    for text in ("4312?", "a b", "1+2=3", "", "É\n"):
        assert theirs(text)["input_ids"] == ours.encode(text)
        assert theirs.encode(text, add_special_tokens=False) == ours.encode(text, special=False)
    ids = [1, 7, 6, 4, 5, 18, 4, 60, 2, 0]
    assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids)
    assert json.loads((tmp_path / "m/config.json").read_text())["architectures"] == [
        "Qwen3ForCausalLM"
    ]


def test_transformers_finds_the_processor_of_a_model_that_hears(tmp_path):
    pytest.importorskip(
        "relax_hpc.rollout.engines.sglang.cpu.stand_ins"
    ).install_transformers_hook()
    from transformers import AutoProcessor

    shape = TinyModelConfig(
        vision_layers=1, audio_layers=1, num_experts=4, tie_word_embeddings=False
    )
    make_tiny_model(tmp_path / "m", shape, 0)
    found = AutoProcessor.from_pretrained(tmp_path / "m")
    assert type(found).__name__ == "Qwen3OmniMoeProcessor"
    assert (found.image_token, found.audio_token, found.audio_bos_token) == (
        "<|image_pad|>",
        "<|audio_pad|>",
        "<|audio_start|>",
    )
