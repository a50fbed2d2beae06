"""The megatron-core policy against transformers, and Hugging Face weights in and out."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.flop_counter import FlopCounterMode

from relax_hpc.base.errors import ConfigError
from relax_hpc.config.schema import ActorConfig, ModelConfig, ParallelConfig
from relax_hpc.convert.verify import hf_logits
from relax_hpc.examples.model_family import BiasedDecoder
from relax_hpc.training.model import PolicyModel
from relax_hpc.training.models.attention import CausalAttention
from relax_hpc.training.models.batches import collate
from relax_hpc.training.models.expert_grouping import groups_experts
from relax_hpc.training.models.families import FAMILIES, spec_from_config
from relax_hpc.training.models.hf_files import read_config
from relax_hpc.training.models.megatron import expert_settings, transformer_config
from relax_hpc.training.models.qwen3 import Qwen3
from tests.helpers.convert_helpers import BIASED, DENSE, LLAMA, MIXED, model
from tests.helpers.training_helpers import (  # noqa: F401
    CLOSE,
    batch,
    one_rank_fixture,
    policy,
    rows,
    tiny_fixture,
    tiny_model,
)
from tests.requirements import DEVICE

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_rank")]


def reference_logprobs(
    directory: Path, tokens: torch.Tensor, temperature: float, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """By transformers on the same device, [1, s - 1] in host memory."""
    from relax_hpc.base.transformers_hook import install_transformers_hook

    install_transformers_hook()
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval().to(DEVICE)
    with torch.no_grad():
        logits = model(tokens.to(DEVICE)).logits[:, :-1].float().cpu() / temperature
    return logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]


@pytest.mark.parametrize("tied", [True, False])
def test_logprobs_match_transformers(tmp_path: Path, tied: bool):
    directory = tiny_model(tmp_path, tied)
    samples = rows(6)
    whole = [{"token_ids": sample["token_ids"]} for sample in samples]
    model = policy(directory)
    scored, trained = (
        model.forward_logprobs([batch(part[:4]), batch(part[4:])], 0.8) for part in (whole, samples)
    )
    for sample, ours, some in zip(samples, scored, trained, strict=True):
        tokens = torch.from_numpy(sample["token_ids"]).long()[None]
        theirs = reference_logprobs(directory, tokens, 0.8)[0]
        assert len(ours) == len(sample["token_ids"]) and ours[0] == 0.0
        torch.testing.assert_close(torch.from_numpy(ours[1:].copy()), theirs, atol=1e-4, rtol=0)
        # Of tokens that are not trained nobody asks for any.
        np.testing.assert_allclose(some, ours * sample["loss_mask"], atol=1e-5)
    assert theirs.std() > 0.5


@pytest.mark.parametrize(
    "config", [DENSE, LLAMA, MIXED, BIASED], ids=["qwen3", "llama", "qwen3_moe", "example"]
)
def test_every_family_has_the_logits_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict
):
    """In float32, as far as sums in another order go; and its weights come back as they were."""
    monkeypatch.setitem(FAMILIES, "qwen2", BiasedDecoder)
    directory = model(tmp_path / "hf", config)
    ours = policy(directory)
    tokens = [(7 * number) % config["vocab_size"] for number in range(24)]
    with torch.no_grad(), FlopCounterMode(display=False) as counted:
        hidden = ours.hidden(collate([{"token_ids": tokens}], 0, DEVICE))
        found = ours.module.logits(hidden)[0, :, : config["vocab_size"]].cpu()
    matrices = sum(
        n for op, n in counted.get_flop_counts()["Global"].items() if "attention" not in str(op)
    )
    assert matrices == 2 * ours.spec.matrix_elements() * len(tokens)
    expected = hf_logits(directory, tokens)
    assert (
        found - expected
    ).abs().max() < 0.2 * CLOSE * expected.abs().max() and expected.std() > 0.1
    weights = load_file(directory / "model.safetensors")
    assert {name: piece.shape for name, piece in ours.tensors().items()} == {
        n: tuple(t.shape) for n, t in weights.items()
    }
    assert all(torch.equal(value, weights[name]) for name, value in ours.export_hf().items())


@pytest.mark.parametrize("tied", [True, False])
def test_round_trip_is_byte_identical(tmp_path: Path, tied: bool):
    directory = tiny_model(tmp_path, tied)
    policy(directory).save_hf(tmp_path / "again", directory)
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (directory / name).read_bytes()


def test_a_model_directory_is_never_overwritten(tiny: Path):
    with pytest.raises(ConfigError, match="exists already"):
        policy(tiny).save_hf(tiny)


def test_new_weights_replace_the_old(tiny: Path):
    model = policy(tiny)
    weights = {name: value + 1.0 for name, value in load_file(tiny / "model.safetensors").items()}
    model.load_tensors(weights)
    exported = model.export_hf()
    assert all(torch.equal(exported[name], value) for name, value in weights.items())
    with pytest.raises(ConfigError, match=r"model\.norm\.weight is missing"):
        model.load_tensors(
            {name: value for name, value in weights.items() if name != "model.norm.weight"}
        )


def test_bfloat16_is_as_near_to_float32_as_that_of_transformers(tiny: Path):
    samples = [{"token_ids": row["token_ids"]} for row in rows(8)]
    errors: dict[str, list[torch.Tensor]] = {"ours": [], "theirs": []}
    ours = policy(tiny, dtype="bfloat16").forward_logprobs([batch(samples)], 1.0)
    for sample, found in zip(samples, ours, strict=True):
        tokens = torch.from_numpy(sample["token_ids"]).long()[None]
        exact, theirs = (
            reference_logprobs(tiny, tokens, 1.0, t)[0] for t in (torch.float32, torch.bfloat16)
        )
        errors["ours"].append(torch.from_numpy(found[1:].copy()) - exact)
        errors["theirs"].append(theirs - exact)
    mean = {name: float(torch.cat(found).abs().mean()) for name, found in errors.items()}
    assert 0 < mean["ours"] < 1.5 * mean["theirs"], mean


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "gemma"}, "model_type is 'gemma'"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0}},
            r"rope_scaling\.type is 'yarn'.*rope_scaling\.factor is 4\.0",
        ),
        ({"attention_bias": True}, "attention_bias is True"),
    ],
)
def test_other_models_are_refused(tiny: Path, change: dict, says: str):
    with pytest.raises(ConfigError, match=says):
        PolicyModel(read_config(tiny) | change, ModelConfig(), ParallelConfig())


@pytest.mark.parametrize("kernels", ["te", "fused"])
def test_kernels_that_are_not_here_are_refused_by_name(
    tiny: Path, kernels: str, monkeypatch: pytest.MonkeyPatch
):
    """On a CPU, whatever is installed; elsewhere if it is not."""
    monkeypatch.setattr("relax_hpc.training.models.kernels.interprets", lambda: False)
    with pytest.raises(
        ConfigError, match=f"actor.kernels: found {kernels}.*(be imported|on a CPU, allowed: plain)"
    ):
        PolicyModel(
            read_config(tiny), ModelConfig(), ParallelConfig(), ActorConfig(kernels=kernels)
        )


def test_a_node_on_which_triton_cannot_compile_is_named(monkeypatch: pytest.MonkeyPatch):
    """By the name of the setting. A fault of the device stays one, which another node may lack."""
    from relax_hpc.training.models import kernels

    faults = [RuntimeError("Failed to find C compiler"), torch.AcceleratorError("an ECC error")]
    layers = SimpleNamespace(install=lambda: None)
    monkeypatch.setitem(sys.modules, "relax_hpc.training.models.triton_layers", layers)
    monkeypatch.setattr("relax_hpc.training.models.triton_layers", layers, raising=False)
    monkeypatch.setitem(kernels._MODULES, "fused", ())

    def fail(device: str) -> None:
        raise faults.pop(0)

    layers.run_small_norm = fail
    with pytest.raises(ConfigError, match=r"found fused, but .*C compiler.*set plain"):
        kernels.prepare("fused", "cuda")
    with pytest.raises(torch.AcceleratorError):
        kernels.prepare("fused", "cuda")


@pytest.mark.parametrize(
    ("change", "model", "parallel", "says"),
    [
        ({}, {"dtype": "float32"}, {}, "model.dtype float32"),
        ({"moe_intermediate_size": 84}, {}, {}, "a moe_intermediate_size of 84"),
        ({}, {}, {"tensor": 8, "sequence_parallel": True}, "a moe_intermediate_size of 12"),
        ({"hidden_size": 60}, {}, {}, "a hidden_size of 60"),
        ({}, {}, {"tensor": 8, "sequence_parallel": True, "expert": 2}, ""),
        ({}, {}, {}, ""),
        ({"moe_intermediate_size": 84}, {"device": "cpu"}, {}, ""),
    ],
)
def test_experts_are_grouped_on_gpus_where_they_can_be(
    change: dict, model: dict, parallel: dict, says: str
):
    """By default. If the setting asks for what torch refuses in the first forward pass, the start
    does."""
    spec = spec_from_config(MIXED | {"moe_intermediate_size": 96} | change)
    where = (
        ModelConfig(**{"device": "cuda", "dtype": "bfloat16"} | model),
        ParallelConfig(**parallel),
    )
    groups = groups_experts("auto", spec, *where)
    assert groups == (not says and where[0].device == "cuda")
    assert expert_settings("auto", spec, *where) == {"moe_grouped_gemm": groups}
    assert not groups_experts("sequential", spec, *where)
    if says:
        with pytest.raises(ConfigError, match=f"^actor.experts: found grouped with {says}") as told:
            expert_settings("grouped", spec, *where)
        assert told.value.exit_code == 78
    else:
        assert expert_settings("grouped", spec, *where) == {"moe_grouped_gemm": True}
        dense = spec_from_config(DENSE)
        assert expert_settings("grouped", dense, *where) == {"moe_grouped_gemm": False}


def test_rope_theta_is_found_where_transformers_5_puts_it(tiny: Path):
    from relax_hpc.training.models.rules import rope_theta

    assert rope_theta({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}) == 5e5
    assert rope_theta(read_config(tiny)) == 1e6


def test_broken_directories_are_named(tiny: Path, tmp_path: Path):
    model = policy(tiny)
    with pytest.raises(ConfigError, match=r"no \*\.safetensors"):
        model.load_hf(tmp_path)
    broken = tmp_path / "broken"
    shutil.copytree(tiny, broken)
    data = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(ConfigError, match="not a whole safetensors file"):
        model.load_hf(broken)
    save_file({"extra": torch.zeros(1)}, broken / "model.safetensors")
    with pytest.raises(ConfigError, match="unknown tensor extra"):
        model.load_hf(broken)


def test_the_saved_config_states_the_type(tiny: Path, tmp_path: Path):
    policy(tiny, dtype="bfloat16").save_hf(tmp_path / "half")
    assert json.loads((tmp_path / "half/config.json").read_text())["torch_dtype"] == "bfloat16"
    assert (
        load_file(tmp_path / "half/model.safetensors")["model.norm.weight"].dtype == torch.bfloat16
    )


class Biased(Qwen3):
    """A family that overrides standard settings."""

    overrides: ClassVar[dict[str, Any]] = {"add_qkv_bias": True}

    def transformer(self, parallel: ParallelConfig) -> dict[str, Any]:
        return super().transformer(parallel) | self.overrides


def transformer_config_of(directory: Path, family: type[Qwen3], **further: Any) -> Any:
    qwen3 = spec_from_config(read_config(directory))
    spec = family(**{field.name: getattr(qwen3, field.name) for field in fields(qwen3)})
    return transformer_config(spec, ModelConfig(), ParallelConfig(), further)


def test_a_family_overrides_a_standard_setting(tiny: Path) -> None:
    config = transformer_config_of(tiny, Biased, persist_layer_norm=True)
    assert config.add_qkv_bias and config.persist_layer_norm
    assert not transformer_config_of(tiny, Qwen3).add_qkv_bias


@pytest.mark.parametrize("further", [{}, {"persist_layer_norm": True}])
@pytest.mark.parametrize(
    ("setting", "value", "why"),
    [
        ("add_qkv_bais", True, "unexpected keyword argument"),
        ("recompute_granularity", "sometimes", "sometimes"),
    ],
)
def test_a_refused_setting_of_a_family_names_the_family(
    setting: str,
    value: Any,
    why: str,
    further: dict[str, Any],
    tiny: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not the user's setting, which megatron-core accepts."""
    monkeypatch.setattr(Biased, "overrides", {setting: value})
    with pytest.raises(ConfigError) as refused:
        transformer_config_of(tiny, Biased, **further)
    text = str(refused.value)
    assert text.startswith(
        "model family tests.training.test_training_model.Biased: megatron-core refuses what its method"
    )
    assert f"({setting}={value!r})" in text and why in text and "actor.megatron" not in text


def test_a_refused_setting_of_the_user_names_the_users_section(tiny: Path) -> None:
    further = {"recompute_granularity": "selective", "recompute_num_layers": 1}
    with pytest.raises(
        ConfigError, match=r"^actor\.megatron: megatron-core refuses it with the other settings: "
    ):
        transformer_config_of(tiny, Biased, **further)


@pytest.mark.parametrize("choice", ["packed", "by_row"])
def test_only_the_setting_computes_long_rows_one_by_one(tiny: Path, choice: str):
    settings = ModelConfig(device=DEVICE, long_row_attention=choice)
    model = PolicyModel(read_config(tiny), settings, ParallelConfig())
    modules = [module for module in model.module.modules() if isinstance(module, CausalAttention)]
    assert modules
    assert {module.computes_long_rows_alone for module in modules} == {choice == "by_row"}
