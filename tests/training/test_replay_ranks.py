"""Routes that are replayed on several ranks, in every layout: all is as on one rank, and so is what
is found wrong."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from tests.helpers.routes_helpers import declared_fixture, experts_model, own_routes  # noqa: F401
from tests.helpers.training_helpers import actor_settings, launch, one_rank_fixture, rows  # noqa: F401
from tests.training.replay_rank import check

pytestmark = [pytest.mark.run, pytest.mark.usefixtures("one_rank", "declared")]

OF_TWO: dict[str, dict[str, Any]] = {
    "tensor and sequence": {
        "parallel": {"tensor": 2, "sequence_parallel": True},
        "recompute": "full",
    },
    "two stages": {"parallel": {"pipeline": 2}, "recompute": "full"},
    "two stages, experts again": {"parallel": {"pipeline": 2}, "recompute": "selective"},
    "context": {"parallel": {"context": 2}, "recompute": "selective"},
    "experts over data ranks": {"parallel": {"data": 2, "expert": 2}, "recompute": "full"},
    "experts over tensor ranks": {
        "parallel": {"tensor": 2, "expert": 2, "sequence_parallel": True}
    },
}
OF_FOUR: dict[str, dict[str, Any]] = {
    "stages of tensor ranks": {
        "parallel": {"pipeline": 2, "tensor": 2, "expert": 2, "sequence_parallel": True},
        "recompute": "full",
    },
    "context over tensor ranks": {
        "parallel": {"context": 2, "tensor": 2, "expert": 4, "sequence_parallel": True}
    },
    "context and data": {
        "parallel": {"context": 2, "data": 2, "expert": 2},
        "recompute": "selective",
    },
}


@pytest.fixture(scope="module")
def several(
    one_rank: None, declared: None, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """By layout what its ranks found; of "" what one does."""
    root = tmp_path_factory.mktemp("replay")
    directory, found = experts_model(root), {}
    own = [own_routes(directory, row["token_ids"]) for row in rows(2)]
    own[1][:-1] = np.roll(own[1][:-1], 1, axis=0)
    (directory / "own_routes.json").write_text(json.dumps([one.tolist() for one in own]))
    found[""] = check(directory, actor_settings())
    for world, cases in ((2, OF_TWO), (4, OF_FOUR)):
        words, outs = (
            [],
            {name: root / f"{world}-{number}.json" for number, name in enumerate(cases)},
        )
        for name, layout in cases.items():
            words += [json.dumps(layout), directory, outs[name]]
        launch(world, *words, timeout_s=480.0, module="tests.training.replay_rank")
        found |= {name: json.loads(out.read_text()) for name, out in outs.items()}
    return found


@pytest.mark.parametrize("name", OF_TWO | OF_FOUR)
def test_several_ranks_replay_what_one_does(several: dict[str, dict[str, Any]], name: str) -> None:
    found, one = several[name], several[""]
    np.testing.assert_allclose(found["logprobs"], one["logprobs"], atol=1e-5)
    assert found["shares"] == pytest.approx(one["shares"], abs=1e-6)
    for step, expected in zip(found["steps"], one["steps"], strict=True):
        assert step == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_rows_with_routes_of_others_show_at_once(several: dict[str, dict[str, Any]]) -> None:
    right, late, *drawn = several[""]["shares"]
    assert right > 0.9 and max(late, *drawn) < 0.5
