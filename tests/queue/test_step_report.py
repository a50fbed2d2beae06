"""What a step says of how far policies are apart."""

from __future__ import annotations

import contextlib
import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from relax_hpc.algorithms import Algorithm, Distill, Grpo, Ppo
from relax_hpc.algorithms.batch import TokenBatch
from relax_hpc.algorithms.losses import mean_metrics
from relax_hpc.base.errors import RelaxError
from relax_hpc.base.metrics.writer import MetricsWriter
from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.supervise.console import Terminal
from relax_hpc.config.schema import Config
from relax_hpc.queue.client import StepTrained
from relax_hpc.queue.row_ids import row_id
from relax_hpc.queue.row_schema import NO_VERSION
from relax_hpc.roles.step_report import (
    StepResult,
    StepTally,
    policy_values,
    row_counts,
    staleness_report,
)
from tests.algorithms.test_algorithms import random_batch
from tests.requirements import requires

requires("torch")


def test_drift_and_updates_are_apart() -> None:
    """Old log-probabilities 0.5 nats below those of a step's begin, whose update moves it by 0.25
    more."""
    batch, means = random_batch(2, 5, seed=1), []
    for moved in (0.5, 0.75):
        at = batch.replace(logprobs=batch.old_logprobs + moved, advantages=batch.mask.clone())
        _, metrics = Grpo().loss(at)
        means.append(mean_metrics({name: float(value) for name, value in metrics.items()}))
    values = policy_values(StepResult(means, 1, tally_of([1.0]), 1e-3, 1.0))
    drift, last = np.exp(0.5) - 1.5, np.exp(0.75) - 1.75
    assert values["kl/drift"] == pytest.approx(drift)
    assert (values["kl/old"], values["kl/old_max"]) == pytest.approx(((drift + last) / 2, last))
    assert values["loss/clip_fraction_drift"] == values["loss/clip_fraction"] == 1.0, (
        "e^0.5 is beyond 1.28"
    )


def tally_of(rewards: list[float]) -> StepTally:
    tally = StepTally()
    tally.rewards, tally.lengths = rewards, [3] * len(rewards)
    return tally


def update(weight: float, tokens: float, **metrics: float) -> dict[str, float]:
    """Metrics of an update as `Trainer.step` gives them."""
    counts = {"weight": weight, "tokens": tokens, "skipped": 0.0, "empty": float(not tokens)}
    return counts | {"loss/policy": 0.0, "clip_fraction": 0.0, "grad_norm": 0.0} | metrics


def test_metrics_of_several_updates_are_sums_means_or_maxima() -> None:
    """Two passes of two mini-batches. A spike in the first update, which the last one does not
    have, is seen; an update without tokens and one whose gradient is not finite are counted, each
    by its name, and are in no mean."""
    names = (
        "train_rollout_logprob_max",
        "train_rollout_ratio_p99",
        "rollout_kl",
        "experts/load_max",
    )
    many, few = (
        dict(zip(names, values, strict=True))
        for values in ((2.0, 3.0, 0.5, 4.0), (1.0, 1.5, 0.1, 1.0))
    )
    updates = [
        update(
            1.0,
            30.0,
            **many,
            **{"loss/policy": 6.0, "clip_fraction": 0.5, "grad_norm": 9.0, "kl/old": 0.0},
        ),
        update(
            3.0,
            10.0,
            **few,
            **{"loss/policy": 2.0, "clip_fraction": 0.1, "grad_norm": 1.0, "kl/old": 0.4},
        ),
        update(0.0, 0.0, skipped=0.0),
        update(
            2.0,
            5.0,
            skipped=1.0,
            grad_norm=math.inf,
            **{"loss/policy": math.nan, "clip_fraction": 0.0},
        ),
    ]
    values = policy_values(StepResult(updates, 2, tally_of([1.0]), 1e-3, 1.0))
    assert (values["loss/skipped_updates"], values["loss/empty_updates"]) == (1.0, 1.0)
    assert values["loss/policy"] == pytest.approx((1 * 6 + 3 * 2) / 4), (
        "by the weight that the loss is a mean over"
    )
    assert values["loss/clip_fraction"] == pytest.approx((30 * 0.5 + 10 * 0.1) / 45), "by tokens"
    assert (values["loss/clip_fraction_max"], values["kl/old_max"]) == (0.5, 0.4)
    assert (values["loss/grad_norm"], values["loss/grad_norm_max"]) == (5.0, 9.0)
    assert values["experts/load_max"] == 4.0
    # Of the comparisons that no update changes, those of the first pass: every row once.
    assert (values["parity/logprob_max"], values["parity/ratio_p99"]) == (2.0, 3.0)
    assert values["kl/rollout"] == pytest.approx((30 * 0.5 + 10 * 0.1) / 40)
    assert (values["kl/drift"], values["loss/clip_fraction_drift"]) == (0.0, 0.5)


def test_a_single_update_is_reported_as_it_is() -> None:
    metrics = update(1.0, 4.0, **{"loss/policy": 0.25, "clip_fraction": 0.5, "grad_norm": 3.0})
    values = StepResult([metrics], 1, tally_of([1.0]), 1e-3, 1.0).values()
    assert (values["loss/policy"], values["loss/clip_fraction"], values["loss/grad_norm"]) == (
        0.25,
        0.5,
        3.0,
    )
    assert not [name for name in values if name.endswith("_max")]
    bad = StepResult(
        [metrics | {"skipped": 1.0, "loss/policy": math.nan}], 1, tally_of([1.0]), 1e-3, 1.0
    ).values()
    assert math.isnan(bad["loss/policy"]) and bad["loss/skipped_updates"] == 1.0, (
        "nothing else is known of it"
    )


def rows_with(*groups: list[float]) -> list[dict]:
    """A row of each episode, with its reward, of prompt groups."""
    rows = []
    for ticket, rewards in enumerate(groups):
        for episode, reward in enumerate(rewards):
            row = {
                "row_id": row_id(ticket, episode, 0),
                "reward": np.float32(reward),
                "token_ids": np.arange(3),
            }
            versions = np.array([0, 4, 4], np.int32)
            rows.append(
                row | {"token_versions": versions, "prompt_len": 1, "finish_reason": "stop"}
            )
    return rows


@pytest.mark.parametrize(
    ("groups", "share"),
    [
        ([[0, 0], [0, 0, 0]], 1.0),
        ([[1, 1], [0, 0]], 1.0),
        ([[1, 1], [0, 1], [0.1, 0.1], [1, 1]], 0.75),
        ([[1, 0], [0, 1]], 0.0),
        ([[1], [1]], None),
    ],
)
def test_groups_of_equal_rewards_are_counted(
    groups: list[list[float]], share: float | None
) -> None:
    """Over several windows; a group of one episode compares nothing."""
    tally, second = StepTally(), StepTally()
    rows = rows_with(*groups)
    first_ticket = [row for row in rows if row["row_id"].startswith(rows[0]["row_id"][:9])]
    tally.add(first_ticket)
    second.add(rows[len(first_ticket) :])
    tally.merge(second)
    values = policy_values(StepResult([update(1.0, 1.0)], 1, tally, 1e-3, 1.0))
    assert values.get("reward/zero_std_share") == share


def loss_metrics(algorithm: Algorithm, advantages: list[float]) -> dict[str, float]:
    """Tags of an update on a row of these advantages."""
    row = torch.tensor([advantages], dtype=torch.float64)
    scores = {"logprobs": row * 0 - 1, "old_logprobs": row * 0 - 1, "rollout_logprobs": row * 0 - 2}
    if isinstance(algorithm, Distill):
        top = torch.full((1, len(advantages), 2), -1.0, dtype=torch.float64)
        scores |= {"likeliest": top, "teacher_top_logprobs": top}
    _, sums = algorithm.loss(TokenBatch(**scores, mask=row * 0 + 1, advantages=row))
    means = mean_metrics({name: float(value) for name, value in sums.items()})
    return StepResult([means], 1, tally_of([1.0]), 1e-3, 1.0).values()


def test_a_step_in_which_all_advantages_are_zero_is_seen_and_so_is_the_entropy_of_what_was_drawn() -> (
    None
):
    assert loss_metrics(Grpo(), [0.0, 0.0])["loss/zero_advantage_share"] == 1.0
    assert loss_metrics(Ppo(), [0.0, 0.0, 0.5, 0.0])["loss/zero_advantage_share"] == 0.75
    divergence = loss_metrics(Distill(teacher_top_k=2), [0.0, 0.0])
    assert "loss/zero_advantage_share" not in divergence, (
        "it learns from the divergence, which needs no advantage"
    )
    assert loss_metrics(Grpo(), [1.0, -1.0])["loss/sampled_entropy_nats"] == 2.0, (
        "by those who drew"
    )


def test_it_is_said_once_of_each_stretch_that_nothing_was_learned(tmp_path: Path, capsys) -> None:
    run = RunDir(tmp_path)
    run.create()
    terminal = Terminal(run, Config(steps=10))
    equal = {"loss/zero_advantage_share": 1.0, "reward/zero_std_share": 1.0, "reward/mean": 0.25}
    masked = {"loss/zero_advantage_share": 0.0, "loss/empty_updates": 1.0}
    mixed = {
        "loss/zero_advantage_share": 0.5,
        "reward/zero_std_share": 0.5,
        "loss/empty_updates": 0.0,
    }
    with contextlib.closing(MetricsWriter(run.root, 1)) as writer:
        for step, values in enumerate([mixed, equal, equal, masked, mixed, mixed, masked]):
            writer.write(step, {"reward/mean": 0.0, "perf/step_s": 1.0} | values)
            terminal.show_progress()
    terminal.close()
    lines = [
        line.partition("] ")[2]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("[")
    ]
    assert [line.partition(";")[0] for line in lines] == [
        "step 1: nothing was learned from rewards: all rewards inside each prompt group are equal "
        "(reward/zero_std_share 1, reward/mean 0.250)",
        "step 4: the policy learns from rewards again",
        "step 6: nothing was learned from rewards: no token was trained, all were masked "
        "(loss/empty_updates)",
    ]


@pytest.mark.parametrize("error", [RelaxError("the disk is gone"), KeyError("a bug")])
def test_the_log_has_the_error_that_ends_a_run(tmp_path: Path, error: Exception) -> None:
    """A terminal that is closed shows nothing."""
    run = RunDir(tmp_path)
    run.create()
    with pytest.raises(type(error)), contextlib.ExitStack() as stack:
        terminal = stack.enter_context(contextlib.closing(Terminal(run, Config(steps=10))))
        stack.push(terminal.log_error)
        raise error
    log = (run.root / "supervisor.log").read_text()
    assert str(error) in log.splitlines()[-1]
    assert ("Traceback" in log) == isinstance(error, KeyError), "a bug is shown with its place"


def test_staleness_is_the_mean_the_least_and_the_most_of_the_prompt_groups() -> None:
    answer = StepTrained(staleness=[0, 4, 1, 1], lag=-1)
    assert staleness_report(answer) == {
        "staleness/min": 0,
        "staleness/mean": 1.5,
        "staleness/max": 4,
        "weights/publish_lag": 0,
    }


ROW = st.tuples(st.integers(1, 5), st.lists(st.sampled_from([NO_VERSION, 3, 4]), max_size=9))
"""Prompt length and versions of the tokens behind it."""


@given(st.lists(ROW, min_size=1, max_size=6))
def test_tokens_of_all_rows_are_counted_at_once_as_of_each(
    parts: list[tuple[int, list[int]]],
) -> None:
    versions = [[NO_VERSION] * prompt + response for prompt, response in parts]
    rows = [
        {"token_versions": np.array(values, np.int32), "prompt_len": prompt}
        for values, (prompt, _) in zip(versions, parts, strict=True)
    ]
    counts = row_counts(rows)
    assert counts.sampled.tolist() == [sum(v != NO_VERSION for v in values) for values in versions]
    groups = [
        [key for key, _ in itertools.groupby(v != NO_VERSION for v in response)]
        for _, response in parts
    ]
    assert counts.turns == sum(group.count(True) for group in groups)
    assert counts.heard == sum(v == NO_VERSION for _, response in parts for v in response)
