"""The critic of a run: it scores rows before it trains on them, and goes back to a cut like any trainer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from relax_hpc.config.schema import TinyModelConfig
from relax_hpc.errors import ConfigError
from relax_hpc.models.tiny_model import make_tiny_model
from relax_hpc.transfer_queue.inspect.audit import journal_records
from tests.audit import audit
from tests.convert_helpers import to
from tests.engine_helpers import reference_model
from tests.requirements import requires
from tests.run_helpers import LIGHT, merged, running, trained_steps
from tests.training_helpers import DEVICE, LR, batch, critic, one_rank_fixture, rows, tiny_fixture, valued  # noqa: F401

requires("mpi", "torch", "megatron", "transformers")

pytestmark = pytest.mark.run

STEPS, WAIT_S = 6, 120.0
OVER = merged(
    LIGHT,
    {
        "steps": STEPS,
        "actor": {"forward": []},
        "rollout": {"reward": "tests.twin_role:reward"},
        "algorithm": {"name": "ppo", "critic_warmup_steps": 2, "gae_lambda": 0.95},
        "critic": {"optimizer": {"lr": 1e-3}},
        "checkpoint": {"every": 2, "keep_last": 2},
    },
)


def test_values_are_hidden_states_times_the_head(one_rank: None, tiny: Path) -> None:
    """Against transformers; the value of a token is of the state before it."""
    samples, trainer = valued(rows(3)), critic(tiny)
    model = reference_model(tiny).model
    assert not any(line.any() for line in trainer.model.forward_values([batch(samples)])), "it begins by saying 0"
    head = torch.linspace(-1, 1, model.config.hidden_size)
    trainer.model.module.output_layer.weight.data.copy_(head)
    for row, line in zip(samples, trainer.model.forward_values([batch(samples)]), strict=True):
        with torch.no_grad():
            states = model(torch.tensor(row["token_ids"][None].astype(np.int64))).last_hidden_state[0]
        expected = torch.cat([torch.zeros(1), (states @ head)[:-1]]).numpy() * row["loss_mask"]
        assert line == pytest.approx(expected, abs=1e-4)


def test_a_critic_learns_what_it_is_told(one_rank: None, tiny: Path) -> None:
    samples, trainer = [row | {"values": 0 * row["values"]} for row in valued(rows(8))], critic(tiny)
    trainer.algorithm.value_clip, losses = 0.0, []
    for _ in range(30):
        trainer.accumulate([batch(samples)])
        losses.append(trainer.step(LR)["loss/value"])
    assert losses[-1] < 0.5 * losses[0]


def test_a_run_with_a_critic_comes_back_from_its_death(tmp_path: Path) -> None:
    """Rows have values before they have advantages; while the critic, of another size here, warms up, the policy's
    weights stay."""
    make_tiny_model(tmp_path / "critic", TinyModelConfig(hidden_size=48, num_layers=1, head_dim=16), seed=5)
    with running(tmp_path, merged(OVER, {"model": {"critic_path": str(tmp_path / "critic")}})) as live:
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
    assert {"critic_values", "critic", "actor", "advantages"} <= {record["task"] for record in claims}
    saved = dict(live.run.saved("critic"))
    assert saved.keys() & {STEPS - 2, STEPS}
    with pytest.raises(ConfigError, match="found a critic, which says a value of a text and is no language model"):
        to(max(saved.items())[1], tmp_path / "hf", model=tmp_path / "critic")
