"""What is known of families with towers: real config.json are taken, and what may change the
arithmetic is refused."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch

from relax_hpc.base.transformers_hook import install_transformers_hook
from relax_hpc.training.models.families import config_problems, spec_from_config
from relax_hpc.training.models.hf_files import read_config
from relax_hpc.training.models.hf_mapping import all_pieces
from tests.helpers.media_helpers import QWEN3_OMNI_THINKER, QWEN3_VL, QWEN3_VL_MOE
from tests.helpers.pages import ROOT

PUBLISHED = {
    path.name: read_config(path)
    for path in sorted((ROOT / "configs/models").iterdir())
    if path.name.startswith(("Qwen3-VL", "Qwen3-Omni"))
}
QWEN3_VL_2B = PUBLISHED["Qwen3-VL-2B"]
ROPE, VISION = QWEN3_VL_2B["text_config"]["rope_scaling"], QWEN3_VL_2B["vision_config"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_are_understood(name: str):
    config = PUBLISHED[name]
    for use in ("train", "convert"):
        assert list(config_problems(config, use=use)) == []
    spec = spec_from_config(config)
    assert (
        spec.rope_base == 5e6
        and spec.rotary_sections == (24, 20, 20)
        and spec.towers[0].levels == 3
    )
    assert len(spec.placeholders) == 1 + len(spec.towers)


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_transformers_writes_of_them_means_the_same(name: str):
    config = PUBLISHED[name]
    install_transformers_hook()
    from transformers import AutoConfig

    written = AutoConfig.for_model(**deepcopy(config)).to_dict()
    assert list(config_problems(written)) == [] and spec_from_config(written) == spec_from_config(
        config
    )


@pytest.mark.parametrize(
    "config", [QWEN3_VL, QWEN3_VL_MOE, QWEN3_OMNI_THINKER], ids=lambda one: one["model_type"]
)
def test_every_tensor_of_transformers_model_has_its_name_and_shape(config: dict[str, Any]):
    """Experts apart, which it has in one tensor."""
    install_transformers_hook()
    import transformers

    kind = getattr(transformers, config["architectures"][0])
    with torch.device("meta"):
        theirs = kind(kind.config_class(**deepcopy(config)))
    expected = {
        name: tuple(value.shape)
        for name, value in theirs.named_parameters()
        if ".experts." not in name
    }
    found = {
        name: piece.shape
        for name, piece in all_pieces(spec_from_config(config)).items()
        if ".experts." not in name
    }
    assert found == expected


@pytest.mark.parametrize(
    ("place", "change", "says"),
    [
        (
            "text_config",
            {"rope_scaling": ROPE | {"mrope_interleaved": False}},
            "mrope_interleaved is False",
        ),
        (
            "text_config",
            {"rope_scaling": ROPE | {"mrope_section": [16, 24, 20]}},
            "whose sum is half of head_dim, 128",
        ),
        ("text_config", {"rope_theta": None}, "text_config.rope_theta is missing"),
        (
            "text_config",
            {"model_type": "qwen3_next"},
            "text_config.model_type is 'qwen3_next', supported is",
        ),
        ("text_config", {"attention_bias": True}, "text_config.attention_bias is True"),
        ("vision_config", {"hidden_act": "silu"}, "vision_config.hidden_act is 'silu'"),
        (
            "vision_config",
            {"window_size": 112},
            "vision_config.window_size is 112, an unknown key",
        ),
        (
            "vision_config",
            {"deepstack_visual_indexes": None},
            "vision_config.deepstack_visual_indexes is missing",
        ),
        (
            "vision_config",
            {"out_hidden_size": 1024},
            "is 1024, supported is text_config.hidden_size, 2048",
        ),
    ],
)
def test_others_are_refused(place: str, change: dict[str, Any], says: str):
    found = list(config_problems(QWEN3_VL_2B | {place: QWEN3_VL_2B[place] | change}))
    assert any(says in line for line in found), found
    ignored = list(
        config_problems(
            QWEN3_VL_2B | {"vision_config": VISION | {"window_size": 112}},
            ["vision_config.window_size"],
        )
    )
    assert ignored == []
