"""Experts dealt out to two and four ranks, in every way, agree with one rank that has all."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.effort import effort
from tests.helpers.convert_helpers import MIXED, model
from tests.helpers.training_helpers import ends, one_rank_fixture  # noqa: F401
from tests.training import expert_rank
from tests.training.rank_layouts import (
    Layouts,
    check_agrees,
    check_learned_from_files_agrees,
    launched,
)

pytestmark = [pytest.mark.run, pytest.mark.usefixtures("one_rank")]

SHARDED = {"optimizer": {"distributed": True}}
OF_TWO: Layouts = {
    "over data ranks": {"parallel": {"data": 2, "expert": 2}},
    "over data ranks, sharded": {
        "parallel": {"data": 2, "expert": 2},
        "recompute": "full",
        **SHARDED,
    },
    "over tensor ranks": {"parallel": {"tensor": 2, "expert": 2, "sequence_parallel": True}},
    "over context ranks": {"parallel": {"context": 2, "expert": 2}, "recompute": "selective"},
    "cut by tensor ranks": {
        "parallel": {"tensor": 2, "sequence_parallel": True},
        "experts": "grouped",
        **SHARDED,
    },
    "of two stages": {"parallel": {"pipeline": 2}, "recompute": "full"},
}
OF_FOUR: Layouts = {
    "over half of the data ranks": {
        "parallel": {"data": 4, "expert": 2},
        "experts": "grouped",
        **SHARDED,
    },
    "one each": {"parallel": {"data": 4, "expert": 4}, "optimizer": {"offload": True}},
    "over tensor and data ranks": {
        "parallel": {"tensor": 2, "data": 2, "expert": 4, "sequence_parallel": True}
    },
    "over tensor ranks of two replicas": {
        "parallel": {"tensor": 2, "data": 2, "expert": 2, "sequence_parallel": True},
        **SHARDED,
    },
    "over half of the tensor ranks": {
        "parallel": {"tensor": 4, "expert": 2, "sequence_parallel": True}
    },
    "of two stages, over data ranks": {
        "parallel": {"pipeline": 2, "data": 2, "expert": 2},
        "recompute": "selective",
    },
    "of two stages, over tensor ranks": {
        "parallel": {"pipeline": 2, "tensor": 2, "expert": 2, "sequence_parallel": True},
        "recompute": "full",
    },
    "of two stages, over context ranks": {
        "parallel": {"pipeline": 2, "context": 2, "expert": 2},
        **SHARDED,
    },
    "over tensor and context ranks": {
        "parallel": {"tensor": 2, "context": 2, "expert": 4, "sequence_parallel": True}
    },
    "over context and data ranks": {"parallel": {"context": 2, "data": 2, "expert": 4}},
    "cut by tensor ranks of two replicas": {
        "parallel": {"tensor": 2, "data": 2, "sequence_parallel": True}
    },
}
DAILY = (
    "over data ranks, sharded",
    "over tensor ranks",
    "over context ranks",
    "cut by tensor ranks",
    "over half of the data ranks",
    "of two stages, over tensor ranks",
    "over context and data ranks",
)
"""Layouts in every test run. Each way to split is in one of them."""
if not effort(0, 1):
    OF_TWO = {name: layout for name, layout in OF_TWO.items() if name in DAILY}
    OF_FOUR = {name: layout for name, layout in OF_FOUR.items() if name in DAILY}
WORLDS = ((2, OF_TWO), (4, OF_FOUR))
WHOLE = [*OF_TWO, *OF_FOUR] if effort(0, 1) else ["over data ranks, sharded"]
"""What differs from one layout of experts to the next is in the steps of all; the rest is as
without experts."""


@pytest.fixture(scope="module", name="mixed")
def mixed_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with four experts a layer, two a token."""
    return model(tmp_path_factory.mktemp("model") / "mixed", MIXED | {"vocab_size": 64})


@pytest.fixture(scope="module")
def steps(one_rank: None, mixed: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By case, the folder in which the processes left what a step of theirs made."""
    root = tmp_path_factory.mktemp("steps")
    outs = [
        launched(root, world, cases, lambda _: mixed, module="tests.training.expert_rank")
        for world, cases in WORLDS
    ]
    return outs[0] | outs[1]


@pytest.fixture(scope="module")
def of_one_rank(one_rank: None, mixed: Path) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """What the step says where one rank has everything, and the weights after it."""
    metrics, weights = expert_rank.step(expert_rank.trainer(mixed, {}))
    assert weights is not None
    return metrics, weights


@pytest.mark.parametrize("name", OF_TWO | OF_FOUR)
def test_a_step_is_that_of_one_rank_however_experts_are_dealt_out(steps, of_one_rank, name: str):
    """With uneven micro-batches, idle ones and padded packs, none of which takes part in the
    balance of experts."""
    metrics, weights = of_one_rank
    found = load_file(steps[name] / "weights.safetensors")
    assert found.keys() == weights.keys()
    for key, value in weights.items():
        torch.testing.assert_close(found[key], value, atol=1e-5, rtol=0)
    assert json.loads((steps[name] / "metrics.json").read_text()) == pytest.approx(
        metrics, rel=1e-4, abs=1e-5
    )
    assert metrics["loss/balance"] > 0.1 and 1.0 < metrics["experts/load_max"] < 4.0


@pytest.fixture(scope="module")
def runs(one_rank: None, mixed: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same, of all that `training_rank` does: checkpoints, forward roles, what is published."""
    root, found = tmp_path_factory.mktemp("runs"), {}
    for world, cases in WORLDS:
        some = {name: layout for name, layout in cases.items() if name in WHOLE}
        found |= launched(root, world, some, lambda _: mixed)
    return found


@pytest.mark.parametrize("name", WHOLE)
def test_experts_of_several_ranks_are_published_scored_and_saved(runs, mixed: Path, name: str):
    check_agrees((OF_TWO | OF_FOUR)[name], mixed, runs[name])
    check_learned_from_files_agrees((OF_TWO | OF_FOUR)[name], mixed, runs[name])


def test_a_rank_that_goes_missing_ends_the_others_with_what_is_the_matter(
    mixed: Path, tmp_path: Path
) -> None:
    """It is killed in the midst of a layer, while others wait for its tokens."""
    layout = json.dumps({"parallel": {"data": 2, "expert": 2}})
    codes, outputs = ends(
        2, layout, mixed, tmp_path, "lost", timeout_s=120.0, module="tests.training.expert_rank"
    )
    assert codes == [1, -signal.SIGKILL], outputs
    assert "LostRankError: a rank of this group is gone" in outputs[0]
