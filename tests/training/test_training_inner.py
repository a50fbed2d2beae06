"""Forward roles inside of the actor: other weights take the model's place, and leave no trace."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from relax_hpc.algorithms import DrGrpo, Grpo, M2po
from relax_hpc.base.errors import ConfigError
from relax_hpc.base.rundir import RunDir
from relax_hpc.config.schema import Config, OptimizerConfig
from relax_hpc.roles.forward import Scorer
from relax_hpc.roles.inner_forward import InnerRoles
from relax_hpc.training.model import PolicyModel
from relax_hpc.training.swap_weights import SwappedWeights
from relax_hpc.training.trainer import Trainer
from tests.helpers.training_helpers import (  # noqa: F401
    LR,
    batch,
    inner_roles,
    one_rank_fixture,
    policy,
    rows,
    tiny_fixture,
    trainer,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_rank")]


def weights_of(model: PolicyModel) -> list[torch.Tensor]:
    return [value.detach().clone() for value in model.module.parameters()]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


def trained(directory: Path) -> Trainer:
    """Two optimizer steps away from the weights in `directory`."""
    ours = trainer(directory)
    for seed in (1, 2):
        ours.accumulate([batch(rows(4, seed))])
        ours.step(LR)
    return ours


@pytest.mark.parametrize(
    ("dtype", "distributed"), [("float32", False), ("float32", True), ("bfloat16", False)]
)
def test_a_swap_scores_with_the_other_weights_and_leaves_no_trace(
    tiny: Path, dtype: str, distributed: bool
) -> None:
    """To the bit: log-probs, weights after it, and a step whose gradient was half gathered before
    it."""
    samples = [batch(rows(3, seed=5)), batch(rows(2, seed=6))]
    initial = policy(tiny, dtype=dtype).forward_logprobs(samples, 0.9)
    runs = []
    for swaps in (False, True):
        ours = trainer(tiny, dtype=dtype, optimizer={"distributed": distributed})
        weights = SwappedWeights(ours.model.module)
        weights.store("initial")
        for seed in (1, 2):
            ours.accumulate([batch(rows(4, seed))])
            ours.step(LR)
        before = weights_of(ours.model)
        ours.accumulate([batch(rows(4, seed=3))])
        if swaps:
            with weights.in_place("initial"):
                found = ours.model.forward_logprobs(samples, 0.9)
            assert all(map(np.array_equal, found, initial))
            assert same(weights_of(ours.model), before)
        ours.accumulate([batch(rows(4, seed=4))])
        runs.append((ours.step(LR), weights_of(ours.model)))
    assert runs[0][0] == runs[1][0] and same(runs[0][1], runs[1][1])


def test_an_error_meanwhile_brings_the_own_weights_back(tiny: Path) -> None:
    model = policy(tiny)
    weights = SwappedWeights(model.module)
    initial = weights_of(model)
    weights.store("initial")
    with torch.no_grad():
        for value in model.module.parameters():
            value += 1.0
    changed = weights_of(model)
    with pytest.raises(RuntimeError, match="lost"), weights.in_place("initial"):
        assert same(weights_of(model), initial)
        raise RuntimeError("a peer is lost")
    assert same(weights_of(model), changed)
    with weights.in_place("initial"):
        assert same(weights_of(model), initial)
    weights.store("initial")
    with weights.in_place("initial"):
        assert same(weights_of(model), changed)
    with pytest.raises(KeyError), weights.in_place("nothing"):
        pass


@pytest.mark.parametrize(
    ("passes", "number", "scored"), [(1, 0, False), (1, 1, True), (2, 0, True), (2, 1, True)]
)
def test_old_log_probs_are_those_before_the_step(
    tiny: Path, passes: int, number: int, scored: bool
) -> None:
    """In whichever mini-batch; the first one of a single pass needs none."""
    ours = trained(tiny)
    inner, samples = (
        inner_roles(ours.model, passes=passes),
        [batch(rows(3, seed=5)), batch(rows(2, seed=6))],
    )
    for one in samples:
        one.fields.pop("old_logprobs")
    expected = ours.model.batch_logprobs(samples, 0.9)
    inner.begin_step()
    if number:
        ours.accumulate([batch(rows(4, seed=8))])
        ours.step(LR)
    inner.score(number, samples)
    for one, values in zip(samples, expected, strict=True):
        assert torch.equal(one.fields["ref_logprobs"], values)
        assert (
            torch.equal(one.fields["old_logprobs"], values)
            if scored
            else "old_logprobs" not in one.fields
        )
    inner.score(number, [])


def test_a_mini_batch_without_old_log_probs_trains_as_with_them(tiny: Path) -> None:
    """What a single update makes of them: the trainer's own, detached, against those of a forward
    pass before it."""
    found = []
    for scored in (False, True):
        ours = Trainer(trained(tiny).model, Grpo(), OptimizerConfig(lr=LR), 0.9)
        one = batch(
            [
                {name: value for name, value in row.items() if name != "old_logprobs"}
                for row in rows(6)
            ]
        )
        if scored:
            (one.fields["old_logprobs"],) = ours.model.batch_logprobs([one], 0.9)
        ours.accumulate([one])
        found.append(ours.step(LR))
    assert found[0] == pytest.approx(found[1], rel=1e-5, abs=1e-6)
    assert found[0]["correction_weight"] != 1.0


def test_which_roles_have_anything_to_score(tiny: Path) -> None:
    model = policy(tiny)
    assert inner_roles(model).roles == {"actor_fwd", "reference"}
    assert inner_roles(model, mini_batches=1, passes=2).roles == {"actor_fwd", "reference"}
    assert inner_roles(model, mini_batches=1).roles == {"reference"}, (
        "one update: its own are the old ones"
    )
    assert InnerRoles(model, Config(), tiny).roles == set()
    config = Config(algorithm=M2po(passes=2))
    config.actor.forward = ["actor_fwd"]
    assert InnerRoles(model, config, tiny).roles == set(), "its ratio is to the engine's own"


def test_a_reference_of_its_own(tiny: Path, tmp_path: Path) -> None:
    model = policy(tiny)
    with torch.no_grad():
        for value in model.module.parameters():
            value *= 1.5
    model.save_hf(tmp_path / "saved")
    samples = [batch(rows(3, seed=5))]
    (expected,) = model.batch_logprobs(samples, 1.0)
    model.load_hf(tiny)
    before, config = weights_of(model), Config()
    config.actor.forward, config.model.reference_path = ["reference"], str(tmp_path / "saved")
    inner = InnerRoles(model, config, tiny)
    inner.score(0, samples)
    assert torch.equal(samples[0].fields["ref_logprobs"], expected) and same(
        weights_of(model), before
    )


@pytest.mark.parametrize("kl_in_reward", [0.0, 0.1])
def test_a_reference_group_scores_masked_tokens_if_they_pay_for_their_divergence(
    tiny: Path, kl_in_reward: float
) -> None:
    """An episode that was cut is not trained, but its reward counts for others, less the divergence
    of all it drew."""
    config = Config(algorithm=DrGrpo(kl_in_reward=kl_in_reward))
    samples = rows(2, seed=5)
    for row in samples:
        row |= {
            "token_versions": row["loss_mask"].astype(np.int32),
            "loss_mask": np.zeros_like(row["loss_mask"]),
        }
    ranks = SimpleNamespace(
        assign_micro_batches=lambda rows, settings: [list(range(len(rows)))],
        media=lambda rows: None,
        collect=lambda rows, numbers, values, tail: values,
    )
    context = SimpleNamespace(
        run=RunDir(tiny.parent / "run"),
        config=config,
        group="reference",
        role="reference",
        world=SimpleNamespace(rank=0),
        model=tiny,
    )
    for row, scores in zip(samples, Scorer(context, ranks, tiny).score(samples), strict=True):
        assert np.array_equal(scores != 0, row["token_versions"] > 0) == bool(kl_in_reward)
        assert not row["loss_mask"].any(), "the mask of the loss does not change"


@pytest.mark.parametrize(
    ("key", "value"), [("num_hidden_layers", 1), ("rms_norm_eps", 1e-5), ("rope_theta", 5.0)]
)
def test_a_reference_of_another_architecture_is_refused(
    tiny: Path, tmp_path: Path, key: str, value: float
) -> None:
    shutil.copytree(tiny, tmp_path / "other")
    path = tmp_path / "other" / "config.json"
    changed = json.loads(path.read_text()) | {key: value}
    if key == "rope_theta":
        changed["rope_parameters"] = {"rope_theta": value, "rope_type": "default"}
    path.write_text(json.dumps(changed))
    config = Config()
    config.actor.forward, config.model.reference_path = ["reference"], str(tmp_path / "other")
    with pytest.raises(ConfigError, match="another architecture than the policy's"):
        InnerRoles(policy(tiny), config, tiny)
