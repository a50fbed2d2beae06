"""Adam's states in bfloat16, in host memory, or both: what they lose, and that nothing else is
lost."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relax_hpc.base.errors import ConfigError
from relax_hpc.config.schema import Kernels
from relax_hpc.training import adam
from relax_hpc.training.adam import PiecewiseAdamW, Update, update_with_torch
from relax_hpc.training.rounding import round_stochastically
from relax_hpc.training.trainer import Trainer
from tests.helpers.training_helpers import (  # noqa: F401
    ALGORITHM,
    LR,
    actor_settings,
    batch,
    load,
    one_rank_fixture,
    policy,
    rows,
    save,
    tiny_fixture,
    trainer,
)
from tests.requirements import DEVICE, requires

requires("torch", "megatron")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_rank")]
BFLOAT16 = 2.0**-7
"""The most that a number is off if it is rounded to one of its two neighbours, relative to it."""


def train(ours: Trainer, steps: range) -> list[dict[str, float]]:
    metrics = []
    for step in steps:
        ours.accumulate([batch(rows(4, seed=step))])
        metrics.append(ours.step(LR))
    return metrics


def states_of(ours: Trainer) -> list[torch.Tensor]:
    """Moments and main parameters."""
    adams = [part.optimizer for part in ours.optimizer.chained_optimizers]
    mains = [one for each in adams for group in each.param_groups for one in group["params"]]
    return [
        each.state[one][name] for each in adams for one in each.state for name in adam.MOMENTS
    ] + mains


# -- rounding --------------------------------------------------------------------------------------


def test_rounding_is_right_in_the_mean_and_never_further_than_a_neighbour():
    """Over elements at one step, and over steps for one value: as often up as the value is near the
    upper neighbour."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(200_000, generator=generator) * 10.0 ** torch.randint(
        -12, 8, (200_000,), generator=generator
    )
    rounded = round_stochastically(values, 7).float()
    assert ((rounded - values).abs() < BFLOAT16 * values.abs()).all()
    assert float(((rounded - values) / values).mean()) == pytest.approx(
        0, abs=4 * BFLOAT16 / 200_000**0.5
    )
    for value in (1.0001, -3.14159, 2e-13, 7.5e7, 0.99999):
        low = torch.tensor([value]).view(torch.int32).bitwise_and(-0x10000).view(torch.float32)
        high = (low.view(torch.int32) + 0x10000).view(torch.float32)
        share = float((value - low) / (high - low))
        up = np.mean(
            [
                float(round_stochastically(torch.tensor([value]), step)) != float(low)
                for step in range(4000)
            ]
        )
        assert up == pytest.approx(share, abs=4 * (share * (1 - share) / 4000) ** 0.5), value


def test_what_bfloat16_has_is_left_as_it_is():
    exact = torch.tensor([0.0, -0.0, 1.0, -2.5, float("inf"), 2.0**-133, 2.0**127])
    for step in range(50):
        assert torch.equal(
            round_stochastically(exact, step).float().view(torch.int32), exact.view(torch.int32)
        )


# -- moments in bfloat16 ---------------------------------------------------------------------------


def updates() -> list[Any]:
    found = [pytest.param(update_with_torch, id="plain")]
    try:
        requires("triton")
        from relax_hpc.training.triton_adam import update
    except pytest.skip.Exception:
        return found
    return [*found, pytest.param(update, id="fused")]


def optimizer_of(
    gradient: torch.Tensor, dtype: torch.dtype, update: Update, **group: Any
) -> PiecewiseAdamW:
    """Of one parameter, 1 everywhere, with ``gradient`` at every step."""
    parameter = torch.ones_like(gradient)
    parameter.grad = gradient
    about = {
        "params": [parameter],
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
    }
    return PiecewiseAdamW(
        [about | group],
        {parameter: [torch.zeros_like(gradient, dtype=dtype) for _ in "mv"]},
        update,
    )


@pytest.mark.parametrize("update", updates())
def test_the_second_moment_converges_to_the_square_of_a_constant_gradient(update: Update):
    """E[v_t] = (1 - beta2^t) g^2, at beta2 0.999, where a step changes less than bfloat16 can tell:
    to the nearest it stands still where (1 - beta2)(g^2 - v) is half of bfloat16's last bit of v,
    far below."""
    # Equal values are rounded alike at the same step.
    gradient = torch.linspace(0.1, 3.0, 4096, device=DEVICE)
    ours = optimizer_of(gradient, torch.bfloat16, update)
    nearest = torch.zeros_like(gradient, dtype=torch.bfloat16)
    [state] = ours.state.values()
    steps = (
        (10, 100, 300, 1000, 3000) if update is update_with_torch or DEVICE != "cpu" else (10, 100)
    )
    for step in range(1, steps[-1] + 1):
        ours.step()
        nearest = (0.999 * nearest.float() + 0.001 * gradient**2).bfloat16()
        if step in steps:
            square = (state["exp_avg_sq"].float() / gradient**2).mean() / (1 - 0.999**step)
            average = (state["exp_avg"].float() / gradient).mean() / (1 - 0.9**step)
            # Each of 4096 errs by itself.
            assert [float(square), float(average)] == pytest.approx([1, 1], abs=2e-3), step
    assert step < 3000 or float((nearest.float() / gradient**2).mean()) < 0.5


@pytest.mark.parametrize("update", updates())
def test_a_step_from_the_same_moments_is_as_exact_as_in_float32(
    update: Update, monkeypatch: pytest.MonkeyPatch
):
    """What is rounded is what is kept, and by no more than to a neighbour."""
    monkeypatch.setattr(adam, "PIECE", 700)
    gradient = torch.randn(3000, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    ours, exact = (
        optimizer_of(gradient, dtype, how, weight_decay=0.1)
        for dtype, how in ((torch.bfloat16, update), (torch.float32, update_with_torch))
    )
    for _ in range(3):
        for (one, state), (other, wide) in zip(
            ours.state.items(), exact.state.items(), strict=True
        ):
            other.copy_(one)
            for name in adam.MOMENTS:
                wide[name].copy_(state[name])
        ours.step()
        exact.step()
        for (one, state), (other, wide) in zip(
            ours.state.items(), exact.state.items(), strict=True
        ):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)
            for name in adam.MOMENTS:
                error = (state[name].float() - wide[name]).abs()
                # The interpreter of Triton may have float32 ones that differ in the last bit.
                assert (error <= (1 + 1e-5) * BFLOAT16 * wide[name].abs()).all(), name


# -- a trainer's -----------------------------------------------------------------------------------


def with_adam(directory: Path, dtype: str, kernels: Kernels, **optimizer: Any) -> Trainer:
    """Of plain layers, which Triton's interpreter does not slow down, with the Adam of
    ``kernels``."""
    model = policy(directory, dtype=dtype)
    model.kernels = kernels
    return Trainer(model, ALGORITHM, actor_settings(optimizer=optimizer).optimizer, temperature=0.9)


@pytest.mark.parametrize(
    ("dtype", "distributed", "states", "kernels"),
    [
        ("float32", True, "float32", "plain"),
        ("float32", False, "bfloat16", "plain"),
        ("bfloat16", False, "float32", "plain"),
        ("bfloat16", True, "float32", "plain"),
        ("bfloat16", True, "bfloat16", "plain"),
        ("bfloat16", False, "bfloat16", "fused"),
    ],
)
def test_in_host_memory_they_are_the_same_to_the_bit(
    tiny: Path,
    tmp_path: Path,
    dtype: str,
    distributed: bool,
    states: str,
    kernels: Kernels,
    monkeypatch: pytest.MonkeyPatch,
):
    """Also from a checkpoint of the other kind on; a step that is skipped changes nothing."""
    if kernels == "fused":
        requires("triton")
    monkeypatch.setattr(adam, "PIECE", 3000)
    made = partial(with_adam, tiny, dtype, kernels, distributed=distributed, states=states)
    here, there = made(offload=False), made(offload=True)
    kinds = [one.dtype for one in states_of(there)]
    assert kinds.count(torch.bfloat16) == (len(kinds) * 2 // 3 if states == "bfloat16" else 0)
    assert train(here, range(2)) == train(there, range(2))
    for one in (here, there):
        one.accumulate([batch(rows(4, seed=9))])
        one.module.scale_gradients(float("inf"))
        assert one.step(LR)["skipped"] == 1.0
    assert all(map(torch.equal, states_of(here), states_of(there)))
    for one, name in ((here, "here"), (there, "there")):
        save(tmp_path / name, one, {})
    expected = train(here, range(2, 3))
    for offload, name in ((True, "here"), (False, "there")):
        ours = made(offload=offload)
        load(tmp_path / name, ours)
        assert train(ours, range(2, 3)) == expected
        assert all(map(torch.equal, states_of(here), states_of(ours)))
        live = zip(here.model.module.parameters(), ours.model.module.parameters(), strict=True)
        assert all(torch.equal(one, other) for one, other in live)


@pytest.mark.parametrize("distributed", [False, True])
def test_moments_of_another_type_are_refused_by_name(tiny: Path, tmp_path: Path, distributed: bool):
    save(
        tmp_path / "a",
        trainer(tiny, optimizer={"distributed": distributed, "states": "bfloat16"}),
        {},
    )
    with pytest.raises(
        ConfigError, match=r"saved with actor\.optimizer\.states bfloat16, the run has float32"
    ):
        load(tmp_path / "a", trainer(tiny, optimizer={"distributed": distributed}))


def test_main_parameters_are_made_in_the_place_of_gradients(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
):
    """A model that fits with its states on the host alone is never on the GPU with gradients and
    main parameters."""
    from relax_hpc.training import optimizer

    sizes: list[int] = []
    real = optimizer.offload_main_parameters

    def looks(parts: list[Any]) -> dict[torch.Tensor, torch.Tensor]:
        model = parts[0].model_chunks[0].module
        sizes.extend(one.main_grad.untyped_storage().nbytes() for one in model.parameters())
        return real(parts)

    monkeypatch.setattr(optimizer, "offload_main_parameters", looks)
    ours = trainer(tiny, dtype="bfloat16", optimizer={"offload": True, "distributed": True})
    assert sizes and not any(sizes)
    gradients = [one.main_grad for one in ours.model.module.parameters()]
    assert all(one.untyped_storage().nbytes() for one in gradients) and not any(
        map(torch.any, gradients)
    )
