"""Tiny models with towers, rows with media, and what transformers makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from relax_hpc.base.transformers_hook import install_transformers_hook
from relax_hpc.data.multimodal.features import mel, patches
from relax_hpc.data.multimodal.medium import Kind, Medium
from relax_hpc.data.multimodal.rules import Rules
from relax_hpc.queue.row_schema import Row
from relax_hpc.training.models.hf_files import read_config
from relax_hpc.training.models.towers.media import RowMedia

IMAGE, VIDEO, START, END, AUDIO, SOUND = 60, 59, 58, 57, 56, 55
VISION = {
    "model_type": "qwen3_vl",
    "depth": 3,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0, 2],
    "hidden_act": "gelu_pytorch_tanh",
}
TEXT = {
    "model_type": "qwen3_vl_text",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "rope_scaling": {"mrope_interleaved": True, "mrope_section": [4, 2, 2], "rope_type": "default"},
}
QWEN3_VL = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
    "tie_word_embeddings": True,
    "text_config": TEXT,
    "vision_config": VISION,
}
QWEN3_VL_MOE = QWEN3_VL | {
    "architectures": ["Qwen3VLMoeForConditionalGeneration"],
    "model_type": "qwen3_vl_moe",
    "tie_word_embeddings": False,
    "text_config": TEXT
    | {
        "model_type": "qwen3_vl_moe_text",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "vision_config": VISION | {"model_type": "qwen3_vl_moe"},
}
_OMNI_TEXT = QWEN3_VL_MOE["text_config"] | {"model_type": "qwen3_omni_moe_text"}
AUDIO_CONFIG = {
    "model_type": "qwen3_omni_moe_audio_encoder",
    "num_mel_bins": 16,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "d_model": 16,
    "downsample_hidden_size": 4,
    "output_dim": 32,
    "n_window": 50,
    "n_window_infer": 200,
    "conv_chunksize": 500,
    "max_source_positions": 100,
}
QWEN3_OMNI_THINKER = {
    "architectures": ["Qwen3OmniMoeThinkerForConditionalGeneration"],
    "model_type": "qwen3_omni_moe_thinker",
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "audio_token_id": AUDIO,
    "vision_start_token_id": START,
    "audio_start_token_id": SOUND,
    "position_id_per_seconds": 13,
    "text_config": _OMNI_TEXT,
    "vision_config": VISION | {"model_type": "qwen3_omni_moe_vision_encoder"},
    "audio_config": AUDIO_CONFIG,
}
QWEN3_OMNI = {
    "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
    "model_type": "qwen3_omni_moe",
    "thinker_config": {
        key: value for key, value in QWEN3_OMNI_THINKER.items() if key != "architectures"
    },
    "talker_config": {"whatever": 1},
}
_TALKER = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
SPEAKING = QWEN3_OMNI | {
    "enable_audio_output": True,
    "talker_config": {
        "thinker_hidden_size": 32,
        "spatial_merge_size": 2,
        "num_code_groups": 3,
        "text_config": _TALKER
        | {
            "moe_intermediate_size": 12,
            "shared_expert_intermediate_size": 12,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "rope_scaling": {
                "mrope_interleaved": True,
                "mrope_section": [2, 1, 1],
                "rope_type": "default",
            },
        },
        "code_predictor_config": _TALKER | {"num_hidden_layers": 1, "num_code_groups": 3},
    },
    "code2wav_config": {
        "codebook_size": 32,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_quantizers": 3,
        "upsample_rates": [2, 2],
        "upsampling_ratios": [2],
        "decoder_dim": 32,
    },
}
"""A Qwen3-Omni that speaks."""
GRIDS = {"wide": (1, 2, 4), "high": (1, 6, 2), "moving": (2, 4, 2)}
"""Images, and a video of two frames a patch."""
FRAMES = {"beep": 37, "speech": 230, "song": 145}
"""Mel frames of sounds: less than a chunk, and more than a window, beside which another is
encoded."""
RULES = Rules(patch=4, merge=2, temporal=2)
OMNI_RULES = replace(RULES, stamped=False, positions_a_second=13.0, rate=16000, mel_bins=16)
_PLACEHOLDERS = {Kind.IMAGE: IMAGE, Kind.VIDEO: VIDEO, Kind.AUDIO: AUDIO}


def medium(name: str) -> Medium:
    """One of `GRIDS` or `FRAMES`, with content of its own."""
    rng = np.random.default_rng(sum(map(ord, name)))
    if name in FRAMES:
        samples = rng.integers(-9999, 9999, 160 * FRAMES[name]).astype(np.int16)
        return Medium(Kind.AUDIO, samples, (1, 1, FRAMES[name]))
    time, height, width = GRIDS[name]
    frames = rng.integers(0, 256, (2 * time, 4 * height, 4 * width, 3), np.uint8)
    if time > 1:
        return Medium(Kind.VIDEO, frames, GRIDS[name], tuple(map(float, range(time))))
    return Medium(Kind.IMAGE, frames[0], GRIDS[name])


MEDIA = {name: medium(name) for name in (*GRIDS, *FRAMES)}
ROW_MEDIA = RowMedia.from_media({name: MEDIA[name] for name in GRIDS}, RULES)
OMNI_MEDIA = RowMedia.from_media(MEDIA, OMNI_RULES)


def media_row(names: Sequence[str], seed: int, answer: int = 5, rules: Rules = RULES) -> Row:
    """A row of text and media by turns, of whose tokens the last ``answer`` are trained."""
    rng = np.random.default_rng(seed)
    ids, spans = rng.integers(1, 50, 3).tolist(), []
    for name in names:
        one = MEDIA[name]
        parts = one.grid[0] if rules.stamped else 1
        length = rules.tokens(one) // parts
        for _ in range(parts):
            ids += [int(rng.integers(1, 50)), SOUND if one.kind is Kind.AUDIO else START]
            spans.append({"kind": one.kind, "start": len(ids), "length": length, "media_id": name})
            ids += [_PLACEHOLDERS[one.kind]] * length + [END]
    ids += rng.integers(1, 50, answer).tolist()
    mask = (np.arange(len(ids)) >= len(ids) - answer).astype(np.uint8)
    old = (rng.normal(size=len(ids)) * 0.3 - 4).astype(np.float32) * mask
    advantages = rng.normal(size=len(ids)).astype(np.float32) * mask
    return {
        "token_ids": np.array(ids, np.int32),
        "spans": spans,
        "loss_mask": mask,
        "old_logprobs": old,
        "rollout_logprobs": old,
        "ref_logprobs": old,
        "advantages": advantages,
    }


_OF_ROWS = (["wide"], ["high", "wide"], [], ["moving"], ["wide"])
ROWS = [media_row(names, seed) for seed, names in enumerate(_OF_ROWS)]


OMNI_ROWS = [
    media_row(names, seed, rules=OMNI_RULES)
    for seed, names in enumerate(
        (["beep"], ["high", "moving"], [], ["speech", "wide"], ["moving"], ["song"])
    )
]


def transformers_logprobs(model: Any, row: Row, omni: bool = False) -> torch.Tensor:
    """Log-probabilities of a row's tokens but the first, by transformers, where placeholders have
    none."""
    ids = torch.tensor(row["token_ids"][None].astype(np.int64))
    kinds = {"mm_token_type_ids": (ids == IMAGE).int() + 2 * (ids == VIDEO).int()}
    given = _visual(row) | (_omni(row, model.dtype) if omni else kinds)
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **given).logits[0].float()
    banned = torch.tensor([IMAGE, VIDEO, AUDIO] if omni else [IMAGE, VIDEO])
    return (
        logits.index_fill(1, banned, -1e4).log_softmax(-1)[:-1].gather(-1, ids[0, 1:, None])[:, 0]
    )


def _named(row: Row, kind: Kind) -> list[str]:
    return list(dict.fromkeys(span["media_id"] for span in row["spans"] if span["kind"] == kind))


def _visual(row: Row) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for kind, values, grids in (
        (Kind.IMAGE, "pixel_values", "image_grid_thw"),
        (Kind.VIDEO, "pixel_values_videos", "video_grid_thw"),
    ):
        if names := _named(row, kind):
            given[values] = torch.from_numpy(
                np.concatenate([patches(MEDIA[name], RULES) for name in names])
            )
            given[grids] = torch.tensor([GRIDS[name] for name in names])
    return given


def _omni(row: Row, dtype: torch.dtype) -> dict[str, Any]:
    given: dict[str, Any] = {"video_second_per_grid": torch.ones(len(_named(row, Kind.VIDEO)))}
    if names := _named(row, Kind.AUDIO):
        sounds = [torch.from_numpy(mel(MEDIA[name], OMNI_RULES)) for name in names]
        given["input_features"] = torch.stack(sounds).to(dtype)
        given["feature_attention_mask"] = torch.ones(
            len(sounds), sounds[0].shape[1], dtype=torch.long
        )
    return given


def transformers_model(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Transformers' model of a directory."""
    install_transformers_hook()
    import transformers

    kind = getattr(transformers, read_config(directory)["architectures"][0])
    return kind.from_pretrained(directory, dtype=dtype).eval()
