"""What is known of families with towers: real config.json are taken, and what may change the arithmetic is refused."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch

from relax_hpc.models.families import problems, spec_of
from relax_hpc.models.hf_mapping import all_pieces
from relax_hpc.transformers_hook import install_transformers_hook
from tests.media_helpers import QWEN3_OMNI_THINKER, QWEN3_VL, QWEN3_VL_MOE

ROPE = {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}
VISION = {
    "deepstack_visual_indexes": [5, 11, 17],
    "depth": 24,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 1024,
    "in_channels": 3,
    "initializer_range": 0.02,
    "intermediate_size": 4096,
    "model_type": "qwen3_vl",
    "num_heads": 16,
    "num_position_embeddings": 2304,
    "out_hidden_size": 2048,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
QWEN3_VL_2B = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "image_token_id": 151655,
    "model_type": "qwen3_vl",
    "text_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "dtype": "bfloat16",
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 6144,
        "max_position_embeddings": 262144,
        "model_type": "qwen3_vl_text",
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": ROPE,
        "rope_theta": 5000000,
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": 151936,
    },
    "tie_word_embeddings": True,
    "transformers_version": "4.57.0.dev0",
    "video_token_id": 151656,
    "vision_config": VISION,
    "vision_end_token_id": 151653,
    "vision_start_token_id": 151652,
}
QWEN3_VL_30B_A3B = QWEN3_VL_2B | {
    "architectures": ["Qwen3VLMoeForConditionalGeneration"],
    "model_type": "qwen3_vl_moe",
    "text_config": QWEN3_VL_2B["text_config"]
    | {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "model_type": "qwen3_vl_moe_text",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
    },
    "tie_word_embeddings": False,
    "vision_config": VISION
    | {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "model_type": "qwen3_vl_moe"},
}
OMNI_30B_A3B = {
    "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
    "assistant_token_id": 77091,
    "enable_audio_output": True,
    "im_end_token_id": 151645,
    "im_start_token_id": 151644,
    "model_type": "qwen3_omni_moe",
    "system_token_id": 8948,
    "thinker_config": {
        "audio_config": {
            "activation_dropout": 0,
            "activation_function": "gelu",
            "attention_dropout": 0,
            "conv_chunksize": 500,
            "d_model": 1280,
            "downsample_hidden_size": 480,
            "dropout": 0,
            "encoder_attention_heads": 20,
            "encoder_ffn_dim": 5120,
            "encoder_layers": 32,
            "initializer_range": 0.02,
            "max_source_positions": 1500,
            "model_type": "qwen3_omni_moe_audio_encoder",
            "n_window": 50,
            "n_window_infer": 800,
            "num_hidden_layers": 32,
            "num_mel_bins": 128,
            "output_dim": 2048,
            "scale_embedding": False,
        },
        "audio_start_token_id": 151669,
        "audio_token_id": 151675,
        "dtype": "bfloat16",
        "image_token_id": 151655,
        "initializer_range": 0.02,
        "model_type": "qwen3_omni_moe_thinker",
        "position_id_per_seconds": 13,
        "text_config": QWEN3_VL_30B_A3B["text_config"]
        | {
            "model_type": "qwen3_omni_moe_text",
            "rope_scaling": ROPE | {"interleaved": True, "type": "default"},
            "shared_expert_intermediate_size": 0,
            "use_qk_norm": True,
            "vocab_size": 152064,
        },
        "user_token_id": 872,
        "video_token_id": 151656,
        "vision_config": VISION | {"image_size": 768, "model_type": "qwen3_omni_moe_vision_encoder"},
    },
    "talker_config": {"accept_hidden_layer": 18},
    "transformers_version": "4.57.0.dev0",
    "tts_bos_token_id": 151672,
}


@pytest.mark.parametrize("config", [QWEN3_VL_2B, QWEN3_VL_30B_A3B, OMNI_30B_A3B], ids=lambda one: one["model_type"])
def test_published_models_are_understood(config: dict[str, Any]):
    for use in ("train", "convert"):
        assert list(problems(config, use=use)) == []
    spec = spec_of(config)
    assert spec.rope_base == 5e6 and spec.rotary_sections == (24, 20, 20) and spec.towers[0].levels == 3
    assert len(spec.placeholders) == 1 + len(spec.towers)


@pytest.mark.parametrize("config", [QWEN3_VL_2B, QWEN3_VL_30B_A3B], ids=lambda one: one["model_type"])
def test_what_transformers_writes_of_them_means_the_same(config: dict[str, Any]):
    install_transformers_hook()
    from transformers import AutoConfig

    written = AutoConfig.for_model(**deepcopy(config)).to_dict()
    assert list(problems(written)) == [] and spec_of(written) == spec_of(config)


@pytest.mark.parametrize("config", [QWEN3_VL, QWEN3_VL_MOE, QWEN3_OMNI_THINKER], ids=lambda one: one["model_type"])
def test_every_tensor_of_transformers_model_has_its_name_and_shape(config: dict[str, Any]):
    """Experts apart, which it has in one tensor."""
    install_transformers_hook()
    import transformers

    kind = getattr(transformers, config["architectures"][0])
    with torch.device("meta"):
        theirs = kind(kind.config_class(**deepcopy(config)))
    expected = {name: tuple(value.shape) for name, value in theirs.named_parameters() if ".experts." not in name}
    found = {name: piece.shape for name, piece in all_pieces(spec_of(config)).items() if ".experts." not in name}
    assert found == expected


@pytest.mark.parametrize(
    ("place", "change", "says"),
    [
        ("text_config", {"rope_scaling": ROPE | {"mrope_interleaved": False}}, "mrope_interleaved is False"),
        ("text_config", {"rope_scaling": ROPE | {"mrope_section": [16, 24, 20]}}, "whose sum is half of head_dim, 128"),
        ("text_config", {"rope_theta": None}, "text_config.rope_theta is missing"),
        ("text_config", {"model_type": "qwen3_next"}, "text_config.model_type is 'qwen3_next', supported is"),
        ("text_config", {"attention_bias": True}, "text_config.attention_bias is True"),
        ("vision_config", {"hidden_act": "silu"}, "vision_config.hidden_act is 'silu'"),
        ("vision_config", {"window_size": 112}, "vision_config.window_size is 112, which is not known here"),
        ("vision_config", {"deepstack_visual_indexes": None}, "vision_config.deepstack_visual_indexes is missing"),
        (
            "vision_config",
            {"out_hidden_size": 1024},
            "is 1024, supported is text_config.hidden_size, 2048",
        ),
    ],
)
def test_others_are_refused(place: str, change: dict[str, Any], says: str):
    found = list(problems(QWEN3_VL_2B | {place: QWEN3_VL_2B[place] | change}))
    assert any(says in line for line in found), found
    ignored = list(
        problems(QWEN3_VL_2B | {"vision_config": VISION | {"window_size": 112}}, ["vision_config.window_size"])
    )
    assert ignored == []
