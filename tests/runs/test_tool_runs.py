"""The run with a calculator, shortened, by its command: the policy learns from episodes of two
turns, and by what its tool says alone."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from statistics import mean

import numpy as np
import pytest
import yaml

from relax_hpc.base.rundir import RunDir
from tests.effort import effort
from tests.helpers.audit import audit
from tests.helpers.run_helpers import merged, queue_rows, read_metrics, running, trained_steps
from tests.requirements import requires

requires("mpi", "torch", "megatron")

pytestmark = pytest.mark.run

TOOLS = Path(__file__).parents[2] / "configs" / "runs" / "tools.yaml"
LEARNS = bool(effort(0, 1))
"""Whether the run is long enough to learn, as in `env/test.sh --all`."""
STEPS = effort(4, 14)
SHORTER = {
    "steps": STEPS,
    "prompts_per_step": 8,
    "data": {"task": "tests.runs.exchanged:FewProblems", "digits": 1},
    "warm_start": {"steps": 140, "batch_size": 32, "noise": 0.3},
    "actor": {"optimizer": {"warmup_steps": 2}},
    "queue": {"keep_steps": 1000},
    "checkpoint": {"every": STEPS},
    "liveness": {"start_ahead_s": 0.0},
    "eval": {"every": STEPS, "samples": effort(16, 64)},
}
RUN_S = 900.0


def test_a_policy_trains_with_a_calculator(tmp_path: Path) -> None:
    base = merged(yaml.safe_load(TOOLS.read_text()), SHORTER)
    # That of the run itself takes longer to start than all of this.
    base["rollout"]["engine"] = {"kind": "transformers"}
    with running(tmp_path, base=base) as live:
        live.finish(RUN_S)
    if LEARNS:
        assert_learned(live.run)

    rows = queue_rows(live.run).values()
    assert all(np.array_equal(row["loss_mask"] > 0, row["token_versions"] > 0) for row in rows)
    turns = [
        sum(int(mine) for mine, _ in groupby(row["loss_mask"][row["prompt_len"] :])) for row in rows
    ]
    assert max(turns) == 2 and mean(turns) > 1.8
    assert {row["finish_reason"] for row in rows} <= {"env_done", "max_turns", "length"}
    found = audit(live.run)
    assert found.problems == [] and not found.dropped and not found.failed


def assert_learned(run: RunDir) -> None:
    """The reward rises, and the policy uses the result of its own tool call."""
    rewards = [row["reward/mean"] for row in trained_steps(run)]
    assert mean(rewards[STEPS // 2 :]) > mean(rewards[:4]) + 0.1, rewards
    last = read_metrics(run.root)[-1]
    # With the result of another episode an answer is right only if both had the same question.
    assert last["eval/exchanged/answer_exact"] < 0.2
    assert last["eval/heldout/answer_exact"] > last["eval/exchanged/answer_exact"] + 0.3
