"""Model families: published config.json files are accepted, and keys that may change the
computation are refused."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.transformers_hook import install_transformers_hook
from relax_hpc.training.models import families
from relax_hpc.training.models.families import (
    FAMILIES,
    HARMLESS,
    checked_config,
    config_problems,
    spec_from_config,
)
from tests.effort import effort
from tests.helpers.media_helpers import QWEN3_VL, QWEN3_VL_MOE, SPEAKING

QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
"""As published. The other sizes have other values of the same keys."""
SIZES = {
    "0.6B": (1024, 3072, 28, 16, True),
    "1.7B": (2048, 6144, 28, 16, True),
    "4B": (2560, 9728, 36, 32, True),
    "8B": (4096, 12288, 36, 32, False),
    "14B": (5120, 17408, 40, 40, False),
    "32B": (5120, 25600, 64, 64, False),
}
QWEN3_30B_A3B = QWEN3_8B | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}


LLAMA_3_2_1B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
LLAMA_2_7B = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.31.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}


def published(size: str) -> dict[str, Any]:
    hidden, inner, layers, heads, tied = SIZES[size]
    return QWEN3_8B | {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_window_layers": layers,
        "tie_word_embeddings": tied,
    }


@pytest.mark.parametrize("size", SIZES)
def test_published_models_are_accepted(size: str):
    from transformers import Qwen3Config

    config = published(size)
    written = Qwen3Config(**config).to_dict()
    assert written["transformers_version"].startswith("5.") and "rope_theta" not in written
    changed = config | {"sliding_window": 32768, "rope_theta": 5000000, "unsloth_version": "1"}
    for accepted in (config, written, changed):
        assert_accepted(accepted)
    assert spec_from_config(config) == spec_from_config(written)
    assert spec_from_config(config).rope_base == 1e6


def assert_accepted(config: dict[str, Any]) -> None:
    """The model can be trained and converted."""
    assert list(config_problems(config)) == list(config_problems(config, use="convert")) == []


def test_published_mixtures_are_accepted():
    from transformers import Qwen3MoeConfig

    written = Qwen3MoeConfig(**QWEN3_30B_A3B).to_dict()
    assert "num_local_experts" in written
    for config in (QWEN3_30B_A3B, written):
        assert_accepted(config)
        assert spec_from_config(config).experts == 128 and spec_from_config(config).inner == 768


@pytest.mark.parametrize("kind", ["Qwen3", "Qwen3Moe", "Llama"])
def test_missing_keys_have_the_defaults_of_transformers(kind: str):
    """A missing key is refused if the engine and the trainer would have different defaults."""
    install_transformers_hook()
    import transformers

    mixture = QWEN3_30B_A3B | {"num_attention_heads": 16}
    config = {"Qwen3": published("0.6B"), "Qwen3Moe": mixture, "Llama": LLAMA_3_2_1B}[kind]
    optional_keys = set()
    for key in sorted(config.keys() & FAMILIES[config["model_type"]].rules().keys()):
        without_key = {name: value for name, value in config.items() if name != key}
        if not list(config_problems(without_key)):
            written = getattr(transformers, f"{kind}Config")(**deepcopy(without_key)).to_dict()
            assert spec_from_config(without_key) == spec_from_config(written), key
            optional_keys.add(key)
    assert ("num_key_value_heads" in optional_keys) == (kind == "Llama")
    assert "rope_theta" in optional_keys


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"rope_theta": None}, "rope_theta"),
        ({"rope_theta": None, "rope_parameters": {"rope_type": "default"}}, "rope_theta"),
        ({"rope_theta": None, "rope_parameters": {}}, "rope_theta"),
        ({"rope_parameters": {"rope_theta": None}}, "rope_parameters.rope_theta"),
        ({"rope_scaling": {"rope_theta": None}}, "rope_scaling.rope_theta"),
        ({"rope_theta": None, "rope_scaling": {"rope_theta": 1e6}}, ""),
        ({"rope_theta": 1e6, "rope_parameters": None}, ""),
    ],
)
def test_a_rope_base_of_null_is_not_replaced_by_the_default(change: dict[str, Any], key: str):
    """transformers does not replace it either, so the engine computes with null."""
    from transformers import Qwen3Config

    # The constructor changes its arguments.
    base = Qwen3Config(**deepcopy(QWEN3_8B | change)).rope_parameters["rope_theta"]
    assert (base is None) == bool(key)
    problems = list(config_problems(QWEN3_8B | change))
    keys = [line.partition(" is null, with which no engine starts")[0] for line in problems]
    assert keys == ([key] if key else [])
    assert not key or list(config_problems(QWEN3_8B | change, [key])) == []


@pytest.mark.parametrize(("config", "factor"), [(LLAMA_3_2_1B, 32.0), (LLAMA_2_7B, 1.0)])
def test_published_llamas_are_accepted(config: dict[str, Any], factor: float):
    install_transformers_hook()
    from transformers import LlamaConfig

    written = LlamaConfig(**deepcopy(config)).to_dict()
    for accepted in (config, written):
        assert_accepted(accepted)
    assert spec_from_config(config) == spec_from_config(written)
    assert spec_from_config(config).rope_factor == factor


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"rope_scaling": {**LLAMA_3_2_1B["rope_scaling"], "low_freq_factor": 2.0}},
            "factor is 2.0, supported",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "low_freq_factor is missing with the rope_type",
        ),
        (
            {"rope_scaling": {"rope_type": "default", "factor": 8.0}},
            "rope_scaling.factor is 8.0 with the rope_type",
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
            "is 'linear', supported is 'default' or 'llama3'",
        ),
        ({"mlp_bias": True}, "mlp_bias is True"),
        (
            {"head_dim": None, "num_attention_heads": 24, "num_key_value_heads": 8},
            "twice the 24 heads",
        ),
        ({"qk_norm": True}, "qk_norm is True, an unknown key"),
    ],
)
def test_other_llamas_are_refused(change: dict[str, Any], message: str):
    problems = list(config_problems(LLAMA_3_2_1B | change))
    assert any(message in line for line in problems), problems


YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}
REFUSED = [
    (
        {"rope_scaling": {"type": "yarn", **YARN}},
        "rope_scaling.type is 'yarn', supported is 'default'",
    ),
    ({"rope_scaling": {"rope_type": "yarn", **YARN}}, "rope_scaling.rope_type is 'yarn'"),
    (
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        "rope_scaling.factor is 2.0, an unknown key",
    ),
    (
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e6}},
        "rope_parameters.rope_type is 'llama3'",
    ),
    (
        {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
        "rope_parameters.full_attention is",
    ),
    (
        {"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}},
        "partial_rotary_factor is 0.5",
    ),
    ({"rope_parameters": {"rope_theta": 5e5}}, "rope_theta is 1000000, and 500000.0 in a mapping"),
    (
        {"rope_scaling": {"rope_theta": 1e6}, "rope_parameters": {"rope_type": "default"}},
        "differs from",
    ),
    ({"rope_scaling": ["yarn"]}, "rope_scaling is ['yarn'], supported is a mapping"),
    ({"rope_theta": "big"}, "rope_theta is 'big', supported is a positive number"),
    ({"rope_theta": True}, "rope_theta is True"),
    ({"partial_rotary_factor": 0.25}, "partial_rotary_factor is 0.25, supported is 1.0"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0, an unknown key"),
    (
        {"quantization_config": {"quant_method": "fp8"}},
        "quantization_config is {'quant_method': 'fp8'}",
    ),
    ({"auto_map": {"AutoModel": "x.Model"}}, "auto_map is"),
    ({"layer_types": ["full_attention"] * 35 + ["sliding_attention"]}, "layer_types is"),
    ({"layer_types": ["full_attention"]}, "layer_types has 1 entries, supported is one for each"),
    ({"use_sliding_window": True}, "use_sliding_window is True, supported is False"),
    ({"attention_bias": True}, "attention_bias is True"),
    ({"attention_bias": 0}, "attention_bias is 0"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ({"num_key_value_heads": 5}, "num_key_value_heads is 5, supported is a divisor of 32 heads"),
    ({"head_dim": 127}, "head_dim is 127"),
    ({"head_dim": None}, "head_dim is missing"),
    ({"hidden_size": 4096.0}, "hidden_size is 4096.0, supported is a positive integer"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
    (
        {"architectures": ["Qwen3ForSequenceClassification"]},
        "architectures is ['Qwen3ForSequenceClassification']",
    ),
    (
        {"model_type": "no_family"},
        "model_type is 'no_family', supported to train: qwen3, qwen3_moe, llama",
    ),
    ({"model_type": None}, "model_type is missing"),
    ({"vocab_size": 10**400}, "supported is a positive integer, at most 2147483647"),
    (
        {"num_hidden_layers": 10**6},
        "num_hidden_layers is 1000000, supported is a positive integer, at most 1024",
    ),
]


@pytest.mark.parametrize(
    ("change", "message"), REFUSED, ids=[str(change)[:60] for change, _ in REFUSED]
)
def test_keys_that_may_change_the_computation_are_refused_by_name(
    change: dict[str, Any], message: str
):
    problems = list(config_problems(QWEN3_8B | change))
    assert any(message in line for line in problems), problems
    assert all("\n" not in line for line in problems)


def test_one_error_has_all_problems():
    wrong = QWEN3_8B | {
        "hidden_act": "gelu",
        "attention_bias": True,
        "logit_scale": 0.5,
        "rms_norm_eps": None,
    }
    with pytest.raises(ConfigError) as error:
        checked_config(wrong)
    texts = ("hidden_act", "attention_bias", "logit_scale is 0.5", "rms_norm_eps is missing")
    for text in texts:
        assert text in str(error.value)


def test_ignored_keys_are_not_checked():
    wrong = QWEN3_8B | {
        "logit_scale": 1.0,
        "rope_scaling": {"type": "default", "factor": 1.0, "rope_theta": 1e6},
    }
    assert len(list(config_problems(wrong))) == 2
    config = checked_config(wrong, ["logit_scale", "rope_scaling.factor"])
    assert "logit_scale" not in config
    assert config["rope_scaling"] == {"type": "default", "rope_theta": 1e6}
    problems = list(config_problems(wrong, ["hidden_size", "logit_scale", "rope_scaling"]))
    assert problems == ["hidden_size is missing; is this a qwen3 model?"]
    assert "model_type is missing" in next(config_problems(wrong, ["model_type"]))


def test_transformers_reads_type_as_rope_type():
    """So both names are checked. Otherwise the engine would use a type that the trainer ignores."""
    from transformers import Qwen3Config

    written = Qwen3Config(**QWEN3_8B | {"rope_scaling": {"type": "yarn", **YARN}}).to_dict()
    assert written["rope_parameters"]["rope_type"] == "yarn"
    assert any("rope_parameters.rope_type is 'yarn'" in line for line in config_problems(written))


def test_an_entry_may_be_the_import_path_of_a_class() -> None:
    """A family of another package needs only this path."""
    family = families._load_family("relax_hpc.examples.model_family:BiasedDecoder")
    assert family.model_type == "qwen2" and families._load_family(family) is family
    with pytest.raises(ConfigError, match=r"^FAMILIES: 'no_module:Family': importing 'no_module'"):
        families._load_family("no_module:Family")


def test_required_keys_have_rules():
    for family in FAMILIES.values():
        assert {*family.required_keys} <= {*family.rules()}


@pytest.mark.parametrize("number", range(effort(2, 6)))
def test_a_null_that_transformers_does_not_load_is_refused_by_name(
    number: int, tmp_path: Path
) -> None:
    """Each key of its sections is set to null, also if the published file has no such key."""
    install_transformers_hook()
    from transformers import AutoConfig

    config = (QWEN3_8B, LLAMA_3_2_1B, QWEN3_30B_A3B, QWEN3_VL, QWEN3_VL_MOE, SPEAKING)[number]
    (tmp_path / "config.json").write_text(json.dumps(config))
    AutoConfig.from_pretrained(tmp_path)
    accepted_keys = []
    for prefix, section in FAMILIES[config["model_type"]].sections().items():
        for key in {*section.rules, *HARMLESS}:
            if "." in key:
                continue
            changed = deepcopy(config)
            mapping = changed
            for name in prefix.split(".")[:-1]:
                mapping = mapping[name]
            mapping[key] = None
            if any(line.startswith(f"{prefix}{key} is") for line in config_problems(changed)):
                continue
            (tmp_path / "config.json").write_text(json.dumps(changed))
            if not can_load(tmp_path):
                accepted_keys.append(f"{prefix}{key}")
    assert not accepted_keys


def can_load(directory: Path) -> bool:
    """Whether transformers loads the config.json in ``directory``."""
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(directory)
    except Exception:  # Validators raise several types.
        return False
    return True
