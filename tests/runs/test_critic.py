"""The critic of a run: it scores rows before it trains on them, and goes back to a cut like any
trainer."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from relax_hpc.base.errors import ConfigError
from relax_hpc.config.schema import Config, TinyModelConfig
from relax_hpc.queue.client import Claim
from relax_hpc.queue.inspect.journal_copy import journal_records
from relax_hpc.roles.critic import Values
from relax_hpc.training.models.tiny_model import make_tiny_model
from tests.helpers.audit import audit
from tests.helpers.convert_helpers import to
from tests.helpers.engine_helpers import reference_model
from tests.helpers.run_helpers import LIGHT, merged, running, trained_steps
from tests.helpers.training_helpers import (  # noqa: F401
    DEVICE,
    LR,
    batch,
    critic,
    one_rank_fixture,
    rows,
    tiny_fixture,
    valued,
)
from tests.requirements import requires

requires("mpi", "torch", "megatron", "transformers")

pytestmark = pytest.mark.run

STEPS, WAIT_S = 6, 120.0
OVER = merged(
    LIGHT,
    {
        "steps": STEPS,
        "actor": {"forward": []},
        "rollout": {"reward": "tests.runs.twin_role:reward"},
        "algorithm": {"name": "ppo", "critic_warmup_steps": 2, "gae_lambda": 0.95},
        "critic": {"optimizer": {"lr": 1e-3}},
        # By time alone: after each step but the first two.
        "checkpoint": {"every": 1000, "every_s": 0.001, "keep_last": 2},
    },
)


def test_values_are_hidden_states_times_the_head(one_rank: None, tiny: Path) -> None:
    """Against transformers; the value of a token is of the state before it."""
    samples, trainer = valued(rows(3)), critic(tiny)
    model = reference_model(tiny).model
    assert not any(line.any() for line in trainer.model.forward_values([batch(samples)])), (
        "it begins by saying 0"
    )
    head = torch.linspace(-1, 1, model.config.hidden_size)
    trainer.model.module.output_layer.weight.data.copy_(head)
    for row, line in zip(samples, trainer.model.forward_values([batch(samples)]), strict=True):
        with torch.no_grad():
            states = model(torch.tensor(row["token_ids"][None].astype(np.int64))).last_hidden_state[
                0
            ]
        expected = torch.cat([torch.zeros(1), (states @ head)[:-1]]).numpy() * row["loss_mask"]
        assert line == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("max_staleness", "step_of_rows", "is_due"),
    [(0, 3, True), (0, 4, False), (1, 4, True), (0, None, False), (1, None, False)],
)
def test_at_staleness_0_rows_of_a_later_step_wait_for_the_update_before_it(
    max_staleness: int, step_of_rows: int | None, is_due: bool
) -> None:
    """The critic is about to train step 3. Rows of step 4 that came already get their values after
    that update, so a run is the same bit for bit. ``step_of_rows`` None: the run is at its end, and
    no rows come."""
    claim = None if step_of_rows is None else Claim(1, step_of_rows, (), (), 0)
    values, answer = Values.__new__(Values), Future[Claim | None]()
    values.context = SimpleNamespace(config=Config(max_staleness=max_staleness))
    values.pending = answer
    assert values.due(3) is answer, "it is waited for, whatever comes"
    answer.set_result(claim)
    assert (values.due(3) is answer) == is_due
    if claim:
        assert values.due(4) is answer, "now it is that step's turn"


def test_a_critic_learns_what_it_is_told(one_rank: None, tiny: Path) -> None:
    samples, trainer = (
        [row | {"values": 0 * row["values"]} for row in valued(rows(8))],
        critic(tiny),
    )
    trainer.algorithm.value_clip, losses = 0.0, []
    for _ in range(30):
        trainer.accumulate([batch(samples)])
        losses.append(trainer.step(LR)["loss/value"])
    assert losses[-1] < 0.5 * losses[0]


def test_a_run_with_a_critic_comes_back_from_its_death(tmp_path: Path) -> None:
    """Rows have values before they have advantages; while the critic, of another size here, warms
    up, the policy's weights stay."""
    make_tiny_model(
        tmp_path / "critic", TinyModelConfig(hidden_size=48, num_layers=1, head_dim=16), seed=5
    )
    with running(
        tmp_path, merged(OVER, {"model": {"critic_path": str(tmp_path / "critic")}})
    ) as live:
        live.wait_until(lambda: len(trained_steps(live.run)) >= 3, "steps are trained", WAIT_S)
        live.kill("critic")
        live.finish(WAIT_S)
    steps = trained_steps(live.run)
    assert [row["step"] for row in steps] == list(range(STEPS)) and live.incarnations("critic") == 2
    result = audit(live.run)
    assert result.problems == [] and set(result.dropped) <= {"lost"}
    assert any("trainer/critic_value_explained_variance" in row for row in steps)
    assert [row["loss/lr"] > 0 for row in steps] == [False] * 2 + [True] * (STEPS - 2)
    claims = [record for record in journal_records(live.run) if record["op"] == "claim"]
    assert {"critic_values", "critic", "actor", "advantages"} <= {
        record["task"] for record in claims
    }
    parts: dict[int, set[str]] = {}
    for record in journal_records(live.run):
        if record["op"] == "checkpoint":
            parts.setdefault(record["step"], set()).add(record["task"])
    whole = {step for step, trainers in parts.items() if trainers == {"actor", "critic"}}
    assert STEPS in whole and whole - {STEPS}, "both have saved steps that are due by time"
    saved = dict(live.run.saved("critic"))
    with pytest.raises(
        ConfigError, match="found a critic, which returns values and is not a language model"
    ):
        to(max(saved.items())[1], tmp_path / "hf", model=tmp_path / "critic")
