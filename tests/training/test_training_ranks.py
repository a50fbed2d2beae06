"""Two and four ranks, split in every way, agree with one; their checkpoints load into one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from relax_hpc.base.errors import ConfigError
from relax_hpc.config.schema import ParallelConfig
from relax_hpc.training import parallel
from relax_hpc.training.models.hf_files import read_config
from relax_hpc.training.trainer import Trainer
from tests.effort import effort
from tests.helpers.convert_helpers import to
from tests.helpers.training_helpers import (  # noqa: F401
    LR,
    batch,
    one_rank_fixture,
    rows,
    save,
    tiny_model,
    trainer,
)
from tests.training.rank_layouts import (
    Layouts,
    check_agrees,
    check_critic_agrees,
    check_distillation_agrees,
    check_learned_from_files_agrees,
    launched,
)

pytestmark = [pytest.mark.run, pytest.mark.usefixtures("one_rank")]

LAYOUTS: Layouts = {
    "tensor and sequence": {
        "parallel": {"tensor": 2, "sequence_parallel": True},
        "recompute": "full",
    },
    "data, sharded optimizer": {
        "parallel": {"data": 2},
        "optimizer": {"distributed": True, "offload": True},
    },
    # Of three layers: the stage with the output layer has one.
    "pipeline": {"parallel": {"pipeline": 2, "last_stage_layers": 1}, "recompute": "selective"},
}
"""What of the `actor` section two ranks have; one rank shards its optimizer as they do, and has
nothing else of it."""
OF_FOUR: Layouts = {
    "context and tensor": {"parallel": {"context": 2, "tensor": 2, "sequence_parallel": True}},
    "context and pipeline": {"parallel": {"context": 2, "pipeline": 2}, "recompute": "full"},
    "context and data": {"parallel": {"context": 2, "data": 2}, "optimizer": {"distributed": True}},
    "data and pipeline": {
        "parallel": {"data": 2, "pipeline": 2},
        "optimizer": {"distributed": True},
    },
    # More ranks than key-value heads: two share each.
    "tensor over heads": {"parallel": {"tensor": 4, "sequence_parallel": True}},
    "one head, pipeline": {"parallel": {"tensor": 2, "pipeline": 2}},
    "one head, data": {"parallel": {"tensor": 2, "data": 2}, "optimizer": {"distributed": True}},
    "one head, context": {
        "parallel": {"tensor": 2, "context": 2, "sequence_parallel": True},
        "recompute": "full",
    },
}
"""The same of four."""
DAILY = ("data and pipeline", "tensor over heads", "one head, context")
"""Layouts of four ranks in every test run. Each way to split is in one of them."""
if not effort(0, 1):
    OF_FOUR = {name: OF_FOUR[name] for name in DAILY}


STAGES = ("pipeline", "first_stage_layers", "last_stage_layers")
FROM_ONE = "from a checkpoint of one rank"


def trained(model: Path) -> Trainer:
    """After one step, in this process."""
    ours = trainer(model)
    ours.accumulate([batch(rows(4, seed=1))])
    ours.step(LR)
    return ours


@pytest.fixture(scope="module")
def several(
    one_rank: None, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Path], dict[str, Path]]:
    """Models, and by case the folder in which two or four processes left what they found."""
    root = tmp_path_factory.mktemp("ranks")
    models = {
        "tied": tiny_model(root, True),
        "untied": tiny_model(root, False),
        "llama": one_headed_llama(root),
    }
    models["three layers"], outs = tiny_model(root / "three", True, num_layers=3), {}
    save(root / "i000001-step-000005", trained(models["untied"]), {"step": 5})
    from_one = {FROM_ONE: root / "i000001-step-000005"}
    for world, cases in ((2, LAYOUTS), (4, OF_FOUR | {FROM_ONE: OF_FOUR["tensor over heads"]})):
        outs |= launched(root, world, cases, lambda name: models[model_of(name)], from_one)
    return models, outs


def model_of(case: str) -> str:
    if case.startswith("one head"):
        return "llama"
    if case == "pipeline":
        return "three layers"
    return "untied" if "tensor" in case or case == FROM_ONE else "tied"


def one_headed_llama(root: Path) -> Path:
    (folder := root / "llama").mkdir()
    directory = tiny_model(folder, False, num_key_value_heads=1)
    config = read_config(directory) | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (directory / "config.json").write_text(json.dumps(config))
    weights = load_file(directory / "model.safetensors")
    plain = {
        name: value
        for name, value in weights.items()
        if not name.endswith(("q_norm.weight", "k_norm.weight"))
    }
    save_file(plain, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize("name", LAYOUTS | OF_FOUR)
def test_several_ranks_agree_with_one(several, name: str):
    check_agrees((LAYOUTS | OF_FOUR)[name], several[0][model_of(name)], several[1][name])


@pytest.mark.parametrize("name", LAYOUTS | OF_FOUR)
def test_a_critic_of_several_ranks_agrees_with_one(several, name: str):
    check_critic_agrees((LAYOUTS | OF_FOUR)[name], several[0][model_of(name)], several[1][name])


@pytest.mark.parametrize("name", LAYOUTS | OF_FOUR)
def test_several_ranks_learn_from_files_as_one(several, name: str):
    check_learned_from_files_agrees(
        (LAYOUTS | OF_FOUR)[name], several[0][model_of(name)], several[1][name]
    )


@pytest.mark.parametrize("name", LAYOUTS | OF_FOUR)
def test_teacher_and_student_of_several_ranks_agree_with_one(several, name: str):
    check_distillation_agrees(
        (LAYOUTS | OF_FOUR)[name], several[0][model_of(name)], several[1][name]
    )


def test_a_checkpoint_of_one_rank_goes_on_in_four(several):
    models, outs = several
    ours = trained(models["untied"])
    ours.accumulate([batch(rows(4, seed=9))])
    ours.step(LR)
    first = load_file(outs[FROM_ONE] / "first.safetensors")
    for key, value in ours.model.export_hf().items():
        torch.testing.assert_close(first[key], value, atol=1e-5, rtol=0)


def test_a_checkpoint_of_uneven_stages_is_converted(several, tmp_path: Path):
    directory, out = several[0][model_of("pipeline")], several[1]["pipeline"]
    to(out / "i000001-step-000001", tmp_path / "hf", model=directory)
    found, expected = (
        load_file(tmp_path / "hf/model.safetensors"),
        load_file(out / "first.safetensors"),
    )
    assert sorted(found) == sorted(expected) and all(
        torch.equal(value, expected[name]) for name, value in found.items()
    )


def test_a_split_that_does_not_fit_the_processes_is_refused():
    with pytest.raises(ConfigError, match="= 4 ranks, found 2 processes"):
        parallel.initialize(ParallelConfig(tensor=2, data=2), 0, 2, 0, None, "cpu", 0, 1.0)


def test_a_split_that_does_not_fit_the_model_is_refused():
    from relax_hpc.training.models.megatron import check_split
    from relax_hpc.training.models.qwen3 import Qwen3
    from relax_hpc.training.models.qwen3_moe import Qwen3Moe

    sizes = {
        "hidden": 8,
        "inner": 12,
        "layers": 3,
        "heads": 8,
        "groups": 2,
        "head_dim": 2,
        "vocab": 13,
        "tied": False,
    }
    dense, mixed = Qwen3(**sizes), Qwen3Moe(**sizes, experts=4, chosen=2, normalizes_topk=True)
    check_split(dense, ParallelConfig(tensor=2, pipeline=3))
    check_split(dense, ParallelConfig(tensor=4, pipeline=3))
    check_split(dense, ParallelConfig(pipeline=2, first_stage_layers=1))
    check_split(dense, ParallelConfig(pipeline=3, first_stage_layers=1, last_stage_layers=1))
    with pytest.raises(
        ConfigError, match="a divisor or a multiple of the model's num_key_value_heads, 2"
    ):
        check_split(dataclasses.replace(dense, hidden=12, heads=6), ParallelConfig(tensor=3))
    with pytest.raises(ConfigError, match="a divisor of the model's num_hidden_layers, 3"):
        check_split(dense, ParallelConfig(pipeline=2))
    check_split(
        mixed, ParallelConfig(tensor=2, sequence_parallel=True, pipeline=3, data=2, expert=4)
    )
    refused = {
        "a qwen3 model has no experts": (dense, ParallelConfig(data=2, expert=2)),
        "expert: found 3, allowed: a divisor of the model's num_experts, 4": (
            mixed,
            ParallelConfig(data=3, expert=3),
        ),
        "expert: found 4, allowed: a divisor of tensor .* data, 6": (
            mixed,
            ParallelConfig(data=6, expert=4),
        ),
        "sequence_parallel: found false with tensor 2, allowed: true": (
            mixed,
            ParallelConfig(tensor=2),
        ),
        # Whole experts are not cut, whatever their width.
        "moe_intermediate_size, 12": (mixed, ParallelConfig(tensor=8, sequence_parallel=True)),
    }
    leaves = "which leaves {} of 3 layers to {} stages, allowed: {}"
    uneven = {
        "first_stage_layers: found 3, "
        + leaves.format(0, 1, "the same number for each, 1 or more"): (2, 3, 0),
        "first_stage_layers: found 4, "
        + leaves.format(-1, 1, "the same number for each, 1 or more"): (
            2,
            4,
            0,
        ),
        "last_stage_layers: found 1, " + leaves.format(1, 0, "a value that leaves none"): (2, 1, 1),
        "last_stage_layers: found 2, "
        + leaves.format(1, 2, "the same number for each, 1 or more"): (3, 0, 2),
        "first_stage_layers: found 3 without a pipeline, allowed: 0": (1, 3, 0),
        "first_stage_layers: found 2 without a pipeline, allowed: 0": (1, 2, 1),
    }
    refused |= {
        why: (dense, ParallelConfig(**dict(zip(STAGES, how, strict=True))))
        for why, how in uneven.items()
    }
    for why, (spec, split) in refused.items():
        with pytest.raises(ConfigError, match=why):
            check_split(spec, split)
    check_split(mixed, ParallelConfig(tensor=8, sequence_parallel=True, expert=2))
