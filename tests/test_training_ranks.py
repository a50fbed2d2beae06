"""Two and four ranks, split in every way, agree with one; their checkpoints load into one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from relax_hpc.config.schema import ParallelConfig
from relax_hpc.errors import ConfigError
from relax_hpc.models.hf_files import read_config
from relax_hpc.training import parallel
from relax_hpc.training.trainer import Trainer
from tests.rank_layouts import Layouts, check_agrees, launched
from tests.training_helpers import LR, batch, one_rank_fixture, rows, save, tiny_model, trainer  # noqa: F401

pytestmark = [pytest.mark.run, pytest.mark.usefixtures("one_rank")]

LAYOUTS: Layouts = {
    "tensor and sequence": {"parallel": {"tensor": 2, "sequence_parallel": True}, "recompute": "full"},
    "data, sharded optimizer": {"parallel": {"data": 2}, "optimizer": {"distributed": True, "offload": True}},
    "pipeline": {"parallel": {"pipeline": 2}, "recompute": "selective"},
}
"""What of the `actor` section two ranks have; one rank shards its optimizer as they do, and has nothing else of it."""
OF_FOUR: Layouts = {
    "context and tensor": {"parallel": {"context": 2, "tensor": 2, "sequence_parallel": True}},
    "context and pipeline": {"parallel": {"context": 2, "pipeline": 2}, "recompute": "full"},
    "context and data": {"parallel": {"context": 2, "data": 2}, "optimizer": {"distributed": True}},
    "data and pipeline": {"parallel": {"data": 2, "pipeline": 2}, "optimizer": {"distributed": True}},
    # More ranks than key-value heads: two share each.
    "tensor over heads": {"parallel": {"tensor": 4, "sequence_parallel": True}},
    "one key-value head": {"parallel": {"tensor": 2, "pipeline": 2}},
}
"""The same of four."""


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
) -> tuple[dict[bool | None, Path], dict[str, Path]]:
    """Models, tied and not, and by case the folder in which two or four processes left what they found."""
    root = tmp_path_factory.mktemp("ranks")
    models, outs = {tied: tiny_model(root, tied) for tied in (False, True)} | {None: one_headed_llama(root)}, {}
    save(root / "i000001-step-000005", trained(models[False]), {"step": 5})
    from_one = {FROM_ONE: root / "i000001-step-000005"}
    for world, cases in ((2, LAYOUTS), (4, OF_FOUR | {FROM_ONE: OF_FOUR["tensor over heads"]})):
        outs |= launched(root, world, cases, lambda name: models[is_tied(name)], from_one)
    return models, outs


def is_tied(name: str) -> bool | None:
    """None: a Llama."""
    return None if name == "one key-value head" else "tensor" not in name and name != FROM_ONE


def one_headed_llama(root: Path) -> Path:
    (folder := root / "llama").mkdir()
    directory = tiny_model(folder, False, num_key_value_heads=1)
    config = read_config(directory) | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (directory / "config.json").write_text(json.dumps(config))
    weights = load_file(directory / "model.safetensors")
    plain = {name: value for name, value in weights.items() if not name.endswith(("q_norm.weight", "k_norm.weight"))}
    save_file(plain, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize("name", LAYOUTS | OF_FOUR)
def test_several_ranks_agree_with_one(several, name: str):
    check_agrees((LAYOUTS | OF_FOUR)[name], several[0][is_tied(name)], several[1][name])


def test_a_checkpoint_of_one_rank_goes_on_in_four(several):
    models, outs = several
    ours = trained(models[False])
    ours.accumulate([batch(rows(4, seed=9))])
    ours.step(LR)
    first = load_file(outs[FROM_ONE] / "first.safetensors")
    for key, value in ours.model.export_hf().items():
        torch.testing.assert_close(first[key], value, atol=1e-5, rtol=0)


def test_a_split_that_does_not_fit_the_processes_is_refused():
    with pytest.raises(ConfigError, match="= 4 ranks, found 2 processes"):
        parallel.initialize(ParallelConfig(tensor=2, data=2), 0, 2, 0, None, "cpu", 0, 1.0)


def test_a_split_that_does_not_fit_the_model_is_refused():
    from relax_hpc.models.megatron import check_split
    from relax_hpc.models.qwen3 import Qwen3
    from relax_hpc.models.qwen3_moe import Qwen3Moe

    sizes = {"hidden": 8, "inner": 12, "layers": 3, "heads": 8, "groups": 2, "head_dim": 2, "vocab": 13, "tied": False}
    dense, mixed = Qwen3(**sizes), Qwen3Moe(**sizes, experts=4, chosen=2, normalised=True)
    check_split(dense, ParallelConfig(tensor=2, pipeline=3))
    check_split(dense, ParallelConfig(tensor=4, pipeline=3))
    with pytest.raises(ConfigError, match="a divisor or a multiple of the model's num_key_value_heads, 2"):
        check_split(dataclasses.replace(dense, hidden=12, heads=6), ParallelConfig(tensor=3))
    with pytest.raises(ConfigError, match="a divisor of the model's num_hidden_layers, 3"):
        check_split(dense, ParallelConfig(pipeline=2))
    check_split(mixed, ParallelConfig(tensor=2, sequence_parallel=True, pipeline=3, data=2, expert=4))
    refused = {
        "a qwen3 model has no experts": (dense, ParallelConfig(data=2, expert=2)),
        "expert: found 3, allowed: a divisor of the model's num_experts, 4": (mixed, ParallelConfig(data=3, expert=3)),
        "expert: found 4, allowed: a divisor of tensor .* data, 6": (mixed, ParallelConfig(data=6, expert=4)),
        "sequence_parallel: found false with tensor 2, allowed: true": (mixed, ParallelConfig(tensor=2)),
        # Whole experts are not cut, whatever their width.
        "moe_intermediate_size, 12": (mixed, ParallelConfig(tensor=8, sequence_parallel=True)),
    }
    for why, (spec, split) in refused.items():
        with pytest.raises(ConfigError, match=why):
            check_split(spec, split)
    check_split(mixed, ParallelConfig(tensor=8, sequence_parallel=True, expert=2))
