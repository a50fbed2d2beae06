"""A run whose model sees and has experts: tokens, of images too, are trained with the experts that
the engine chose."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.effort import effort
from tests.requirements import requires

requires("sglang", "mpi", "torch", "megatron")

from safetensors.torch import load_file  # noqa: E402

from relax_hpc.base.metrics.read import read_metrics  # noqa: E402
from relax_hpc.base.routes import NAME, NONE, RouteShape  # noqa: E402
from relax_hpc.base.rundir import RunDir  # noqa: E402
from relax_hpc.base.versions import Version  # noqa: E402
from relax_hpc.data.multimodal.medium import Medium  # noqa: E402
from relax_hpc.data.multimodal.rules import Rules  # noqa: E402
from relax_hpc.queue.row_schema import Row  # noqa: E402
from relax_hpc.queue.storage.media import MediaStore, media_ids  # noqa: E402
from relax_hpc.training.models.batches import collate  # noqa: E402
from relax_hpc.training.models.towers.media import RowMedia  # noqa: E402
from tests.helpers.audit import audit  # noqa: E402
from tests.helpers.media_engine import SEEING_EXPERTS, strong  # noqa: E402
from tests.helpers.routes_helpers import declared_fixture, routed_policy  # noqa: E402, F401
from tests.helpers.run_helpers import final_weights, queue_rows, running  # noqa: E402
from tests.helpers.training_helpers import one_rank_fixture  # noqa: E402, F401

pytestmark = [pytest.mark.run, pytest.mark.usefixtures("one_rank", "declared")]

STEPS, RUN_S = 2, 600.0
SHAPE = RouteShape(
    SEEING_EXPERTS.num_layers, SEEING_EXPERTS.num_experts, SEEING_EXPERTS.num_experts_per_tok
)


def settings(model: Path) -> dict[str, Any]:
    """An engine of a lower precision than the trainer's, which chooses others for some tokens."""
    flags = {"max_total_tokens": 8192, "log_level": "error"}
    engine = {"kind": "sglang", "dtype": "bfloat16", "flags": flags}
    return {
        "steps": STEPS,
        "prompts_per_step": 8,
        "samples_per_prompt": 4,
        "model": {"path": str(model), "routing_replay": "on"},
        "data": {
            "task": "relax_hpc.examples.tasks.coloured_shapes:ColouredShapes",
            "max_prompt_tokens": 32,
        },
        "algorithm": {"entropy_coefficient": 0.01},
        "rollout": {"groups_per_request": 8, "max_new_tokens": 12, "engine": engine},
        "actor": {"optimizer": {"lr": 1e-3}},
        "queue": {"keep_steps": 100},
        "eval": {"every": 0},
    }


@pytest.mark.skipif(
    not effort(0, 1),
    reason="test_replay_run.py has text, test_engines_media.py images: env/test.sh --all",
)
def test_experts_that_saw_an_image_for_the_engine_see_it_for_the_trainer(tmp_path: Path) -> None:
    with running(tmp_path, {}, settings(strong(tmp_path / "m", SEEING_EXPERTS, 0))) as live:
        live.finish(RUN_S)
    run, rows = live.run, queue_rows(live.run)
    steps = [row for row in read_metrics(run.root) if "reward/mean" in row]
    assert [row["step"] for row in steps] == list(range(STEPS))
    assert all(0.8 < row["r3/routes_equal"] < 1.0 for row in steps), steps
    assert all(1.0 <= row["parity/ratio_p99"] <= row["parity/ratio_p999"] < 1.5 for row in steps)
    assert audit(run).problems == []
    for row in rows.values():
        (span,) = row["spans"]
        assert (
            SHAPE.find_fault(row) == ""
            and (row[NAME][span["start"] :][: span["length"]] != NONE).all()
        )
    # Each version was loaded by the engine, whose tokens are of it.
    versions = {int(one) for row in rows.values() for one in row["token_versions"]} - {0}
    assert versions == {Version(1, number).encode() for number in range(STEPS)}
    before, after = load_file(run.model / "model.safetensors"), final_weights(run)
    tower = [name for name in before if "visual" in name]
    assert (
        len(tower) > 20
        and sum(bool((before[name] != after[name]).any()) for name in tower) > len(tower) * 0.7
    )
    first = [
        row for row in rows.values() if set(row["token_versions"]) <= {0, Version(1, 0).encode()}
    ]
    replayed, free = differences(run, first)
    assert replayed.mean() < 0.9 * free.mean(), (replayed.mean(), free.mean())


def differences(run: RunDir, rows: Sequence[Row]) -> list[np.ndarray]:
    """Differences to the engine's log-probabilities of those that the trainer has by its routes,
    and by its own."""
    policy, store = routed_policy(run.model), MediaStore(run.media)
    media = {name: Medium.from_bytes(store.read(name)) for name in media_ids(rows)}
    plain = [{name: value for name, value in row.items() if name != "loss_mask"} for row in rows]
    seen = RowMedia.from_media(media, Rules.from_model(run.model))
    given = collate(plain, 0, "cpu", policy.pack_split, policy.row_fields, media=seen)
    trained = [row["loss_mask"] > 0 for row in rows]
    drawn = np.concatenate(
        [row["rollout_logprobs"][mask] for row, mask in zip(rows, trained, strict=True)]
    )
    found = []
    for routed in (True, False):
        (values,) = policy.batch_logprobs([given], 1.0, routed)
        lines = [
            line[: len(mask)][mask] for line, mask in zip(values.numpy(), trained, strict=True)
        ]
        found.append(np.abs(np.concatenate(lines) - drawn))
    return found
