"""Two ranks of a model with towers, split in every way, agree with one, with rows that have media
and rows of text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.convert_helpers import model, to
from tests.helpers.media_helpers import QWEN3_OMNI_THINKER, QWEN3_VL, QWEN3_VL_MOE
from tests.helpers.training_helpers import load, one_rank_fixture, trainer  # noqa: F401
from tests.training import tower_rank
from tests.training.rank_layouts import Layouts, launched, sharded_as

pytestmark = [pytest.mark.run, pytest.mark.usefixtures("one_rank")]

SHARDED = {"distributed": True}
DENSE: Layouts = {
    "tensor": {"parallel": {"tensor": 2}},
    "tensor and sequence": {
        "parallel": {"tensor": 2, "sequence_parallel": True},
        "recompute": "full",
    },
    # In one bucket: that of the rank without media is ready too when the backward pass is through.
    "data": {"parallel": {"data": 2}, "optimizer": SHARDED | {"overlap_gradients": True}},
    "pipeline": {"parallel": {"pipeline": 2}, "recompute": "selective"},
    "context": {"parallel": {"context": 2}},
}
MIXED: Layouts = {
    "experts over data": {"parallel": {"data": 2, "expert": 2}, "optimizer": SHARDED},
    "experts over tensor": {
        "parallel": {"tensor": 2, "expert": 2, "sequence_parallel": True},
        "recompute": "full",
    },
}
OMNI: Layouts = {
    "sights and sounds": {
        "parallel": {"tensor": 2, "expert": 2, "sequence_parallel": True},
        "recompute": "full",
    },
    "sights and sounds of two stages": {"parallel": {"pipeline": 2}},
}
LAYOUTS = DENSE | MIXED | OMNI


@pytest.fixture(scope="module", name="models")
def models_fixture(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A dense model, one with experts, and one that takes sounds, by the names of layouts."""
    root = tmp_path_factory.mktemp("models")
    dense, mixed = model(root / "dense", QWEN3_VL), model(root / "mixed", QWEN3_VL_MOE)
    omni = model(root / "omni", QWEN3_OMNI_THINKER)
    return dict.fromkeys(DENSE, dense) | dict.fromkeys(MIXED, mixed) | dict.fromkeys(OMNI, omni)


@pytest.fixture(scope="module", name="outs")
def outs_fixture(
    one_rank: None, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """By layout, the folder in which two processes left what they found."""
    return launched(
        tmp_path_factory.mktemp("ranks"),
        2,
        LAYOUTS,
        models.__getitem__,
        module="tests.training.tower_rank",
    )


@pytest.mark.parametrize("name", LAYOUTS)
def test_two_ranks_agree_with_one(models: dict[str, Path], outs: dict[str, Path], name: str):
    """Log-probabilities at all positions, two steps, and where a checkpoint between them leads one
    rank."""
    layout, out = LAYOUTS[name], outs[name]
    ours = trainer(models[name], **sharded_as(layout))
    expected, replicas = tower_rank.scores(ours), layout["parallel"].get("data", 1)
    by_pack = [torch.cat(expected[:2]), expected[2], torch.cat(expected[3:])]
    for replica in range(replicas):
        found = load_file(out / f"logprobs-{replica}.safetensors")["logprobs"]
        torch.testing.assert_close(found, torch.cat(by_pack[replica::replicas]), atol=2e-5, rtol=0)
    metrics = [tower_rank.step(ours, number) for number in range(2)]
    weights = ours.model.export_hf()
    assert json.loads((out / "metrics.json").read_text()) == [
        pytest.approx(one, rel=1e-4, abs=1e-5) for one in metrics
    ]
    assert_near(load_file(out / "weights.safetensors"), weights)
    again = trainer(models[name], **sharded_as(layout))
    load(out / "i000001-step-000001", again)
    tower_rank.step(again, 1)
    assert_near(again.model.export_hf(), weights)


def assert_near(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert sorted(found) == sorted(expected)
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, atol=1e-5, rtol=0, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_a_checkpoint_with_towers_is_converted(
    models: dict[str, Path], outs: dict[str, Path], tmp_path: Path
):
    """Of two stages, of which one has them."""
    to(outs["pipeline"] / "i000001-step-000001", tmp_path / "hf", model=models["pipeline"])
    again = trainer(models["pipeline"])
    load(outs["pipeline"] / "i000001-step-000001", again)
    expected = again.model.export_hf()
    found = load_file(tmp_path / "hf/model.safetensors")
    assert found.keys() == expected.keys() and all(
        torch.equal(value, expected[name]) for name, value in found.items()
    )
