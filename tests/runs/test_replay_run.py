"""A run of five roles whose mixture of experts is trained with its engine's routes, although the
engine is killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.requirements import requires

requires("sglang", "mpi", "torch", "megatron")

from relax_hpc.base.metrics.read import read_metrics  # noqa: E402
from relax_hpc.base.routes import NAME  # noqa: E402
from relax_hpc.base.rundir import RunDir  # noqa: E402
from relax_hpc.base.versions import Version  # noqa: E402
from relax_hpc.queue.client.segments import START  # noqa: E402
from relax_hpc.queue.inspect.audit import Ledger  # noqa: E402
from relax_hpc.queue.row_schema import Row  # noqa: E402
from relax_hpc.queue.storage import record_file  # noqa: E402
from tests.helpers.routes_helpers import (  # noqa: E402, F401
    SHAPE,
    declared_fixture,
    experts_model,
    routed_batch,
    routed_policy,
)
from tests.helpers.run_helpers import Running, queue_rows, queue_state, running  # noqa: E402
from tests.helpers.training_helpers import one_rank_fixture  # noqa: E402, F401

pytestmark = [pytest.mark.run, pytest.mark.usefixtures("one_rank", "declared")]

STEPS = 3
RUN_S = 300.0


def settings(model: Path) -> dict[str, Any]:
    """Long responses, of which the engine tells token by token; it computes in a lower precision
    than the trainer."""
    flags = {"max_total_tokens": 8192, "log_level": "error", "stream_interval": 4}
    engine = {"kind": "sglang", "dtype": "bfloat16", "flags": flags}
    rollout = {
        "max_new_tokens": 160,
        "save_partial": "tokens",
        "save_partial_every_s": 0.1,
        "engine": engine,
    }
    return {
        "steps": STEPS,
        "model": {"path": str(model), "routing_replay": "on"},
        "algorithm": {"kl": {"coefficient": 0.01}},
        "rollout": rollout,
        "queue": {"keep_steps": 100},
        "eval": {"every": 0},
        "groups": {name: {"roles": [name]} for name in ("actor_fwd", "reference")},
    }


@pytest.fixture(scope="module")
def killed(
    one_rank: None, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, RunDir, list[Row]]:
    """The model, the run, and the segments that were in logs when its rollout was killed."""
    root = tmp_path_factory.mktemp("run")
    model = experts_model(root)
    with running(root, settings(model)) as live:
        live.wait_until(
            lambda: unfinished(segments(live)), "unfinished responses are in logs", RUN_S
        )
        live.kill("rollout")
        logged = segments(live)
        live.finish(RUN_S)
    return model, live.run, logged


def segments(live: Running) -> list[Row]:
    """Those that are in logs."""
    found = [
        row
        for file in live.run.shards.glob("rollout-*.shard")
        for row in record_file.read(file).values()
    ]
    return [row for row in found if START in row]


def unfinished(logged: list[Row]) -> list[Row]:
    """Those that begin a response which goes on."""
    return [one for one in logged if not one[START] and one["finish_reason"] == "partial"]


def test_the_run_is_whole_and_its_routes_are_the_trainers(killed) -> None:
    _, run, _ = killed
    steps = [row for row in read_metrics(run.root) if "reward/mean" in row]
    assert [row["step"] for row in steps] == list(range(STEPS))
    assert all(row["r3/routes_equal"] > 0.9 for row in steps), steps
    assert all(1.0 <= row["parity/ratio_p99"] <= row["parity/ratio_p999"] < 1.5 for row in steps)
    assert Ledger(run).judge(0).problems == []


def test_routes_in_logs_outlive_the_engine_that_gave_them(killed) -> None:
    """Who goes on reads all of it once more, and keeps what the log has."""
    _, run, logged = killed
    rows, counts = queue_rows(run), queue_state(run).segments.counts()
    assert counts["used"] == counts["appended"] > 40
    for one in unfinished(logged):
        row, count = rows[one["row_id"]], len(one["token_ids"])
        assert np.array_equal(row["token_ids"][:count], one["token_ids"])
        assert np.array_equal(row[NAME][:count], one[NAME]) and SHAPE.find_fault(row) == ""


def test_replayed_routes_are_nearer_to_the_engines_log_probabilities(killed) -> None:
    """By the weights that drew them; so is what actor_fwd gave them."""
    model, run, _ = killed
    rows = [
        row
        for row in queue_rows(run).values()
        if {*row["token_versions"]} <= {0, Version(1, 0).encode()}
    ]
    assert len(rows) >= 16
    policy, found = routed_policy(model), {}
    plain = [{name: value for name, value in row.items() if name != "loss_mask"} for row in rows]
    for routed in (True, False):
        (values,) = policy.batch_logprobs([routed_batch(plain, policy)], 1.0, routed)
        lines = [
            line[: len(row["token_ids"])] for line, row in zip(values.numpy(), rows, strict=True)
        ]
        found[routed] = [line[row["loss_mask"] > 0] for line, row in zip(lines, rows, strict=True)]
    drawn, old = (
        [row[name][row["loss_mask"] > 0] for row in rows]
        for name in ("rollout_logprobs", "old_logprobs")
    )
    replayed, free = (
        np.abs(np.concatenate(found[routed]) - np.concatenate(drawn)) for routed in (True, False)
    )
    assert replayed.mean() < 0.9 * free.mean() and replayed.max() < free.max()
    np.testing.assert_allclose(np.concatenate(old), np.concatenate(found[True]), atol=1e-4)
