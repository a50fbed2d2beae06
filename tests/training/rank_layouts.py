"""What several ranks found, see `training_rank`, held against one rank that has everything."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from relax_hpc.net.rendezvous.channel import RankChannel
from relax_hpc.training.checkpoint import store
from relax_hpc.training.critic import CriticTrainer
from tests.helpers.training_helpers import (
    LR,
    TOP_K,
    batch,
    critic,
    distiller,
    launch,
    learned_from_files,
    rows,
    taught,
    trainer,
    valued,
)

Layouts = dict[str, dict[str, Any]]
"""`actor` sections by name."""


def launched(
    root: Path,
    world: int,
    cases: Layouts,
    model_of: Callable[[str], Path],
    checkpoints: Mapping[str, Path] = MappingProxyType({}),
    module: str = "tests.training.training_rank",
) -> dict[str, Path]:
    """By case, the folder in which the processes of one launch left what they found."""
    words, outs = [], {}
    for number, (name, layout) in enumerate(cases.items()):
        (out := root / f"{world}-{number}").mkdir(parents=True)
        words += [json.dumps(layout), model_of(name), out, checkpoints.get(name, "")]
        outs[name] = out
    launch(world, *words, timeout_s=480.0, module=module)
    return outs


def sharded_as(layout: dict[str, Any]) -> dict[str, Any]:
    """What one rank has of a layout."""
    return {"optimizer": {"distributed": layout.get("optimizer", {}).get("distributed", False)}}


def one_rank_run(
    layout: dict[str, Any], directory: Path, checkpoint: Path | None = None
) -> tuple[list, dict, list]:
    """What `training_rank.check` finds, in this process; from its second step on if there is a
    `checkpoint`."""
    ours = trainer(directory, **sharded_as(layout))
    if checkpoint:
        store.load(checkpoint, ours, RankChannel(60.0))
    logprobs = ours.model.forward_logprobs([batch(rows(8))], 0.9)
    metrics = []
    for samples in ([] if checkpoint else [rows(4, seed=9)]) + [rows(8)]:
        ours.accumulate([batch(samples)])
        metrics.append(ours.step(LR))
    return logprobs, ours.model.export_hf(), metrics


def check_agrees(layout: dict[str, Any], directory: Path, out: Path) -> None:
    """Log-probabilities, weights after two steps, metrics, and where a checkpoint of theirs leads
    one rank."""
    replicas = layout["parallel"].get("data", 1)
    logprobs, weights, metrics = one_rank_run(layout, directory)
    for replica in range(replicas):
        found = load_file(out / f"logprobs-{replica}.safetensors")["logprobs"].numpy()
        np.testing.assert_allclose(found, np.concatenate(logprobs[replica::replicas]), atol=1e-4)
    second = load_file(out / "second.safetensors")
    assert sorted(second) == sorted(weights)
    for key, value in weights.items():
        torch.testing.assert_close(second[key], value, atol=1e-5, rtol=0)
    found_metrics = json.loads((out / "metrics.json").read_text())
    for found, expected in zip(found_metrics, metrics, strict=True):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)

    resumed = one_rank_run(layout, directory, out / "i000001-step-000001")
    for key, value in resumed[1].items():
        torch.testing.assert_close(value, weights[key], atol=1e-5, rtol=0)
    assert resumed[2][0] == pytest.approx(metrics[1], rel=1e-4, abs=1e-5)


def check_critic_agrees(layout: dict[str, Any], directory: Path, out: Path) -> None:
    """Metrics of two steps, values after them, and where a checkpoint between them leads one
    rank."""
    ours = critic(directory, **sharded_as(layout))
    metrics = two_steps(ours)
    assert json.loads((out / "critic.json").read_text()) == [
        pytest.approx(one, rel=1e-4, abs=1e-5) for one in metrics
    ]
    said, replicas = ours.model.forward_values([batch(rows(8))]), layout["parallel"].get("data", 1)
    for replica in range(replicas):
        found = load_file(out / f"values-{replica}.safetensors")["values"].numpy()
        np.testing.assert_allclose(found, np.concatenate(said[replica::replicas]), atol=1e-5)
    again = critic(directory, **sharded_as(layout))
    store.load(out / "critic-i000001-step-000001", again, RankChannel(60.0))
    assert two_steps(again, first=1) == [pytest.approx(metrics[1], rel=1e-4, abs=1e-5)]


def check_learned_from_files_agrees(layout: dict[str, Any], directory: Path, out: Path) -> None:
    """Metrics of a step of sft and of one of dpo."""
    expected = learned_from_files(trainer(directory, **sharded_as(layout)))
    assert json.loads((out / "from-files.json").read_text()) == [
        pytest.approx(one, rel=1e-4, abs=1e-5) for one in expected
    ]


def check_distillation_agrees(layout: dict[str, Any], directory: Path, out: Path) -> None:
    """What a model says as a teacher, and metrics of two steps by a teacher's likeliest tokens."""
    ours, samples = distiller(directory, **sharded_as(layout)), taught(rows(8))
    said, replicas = (
        ours.model.forward_likeliest([batch(samples)], 0.9, TOP_K, 64),
        layout["parallel"].get("data", 1),
    )
    for replica in range(replicas):
        found = load_file(out / f"likeliest-{replica}.safetensors")["likeliest"].numpy()
        np.testing.assert_allclose(found, np.concatenate(said[replica::replicas]), atol=1e-4)
    for found in json.loads((out / "distill.json").read_text()):
        ours.accumulate([batch(samples)])
        assert found == pytest.approx(ours.step(LR), rel=1e-4, abs=1e-5)


def two_steps(ours: CriticTrainer, first: int = 0) -> list[dict[str, float]]:
    """Metrics of the steps from ``first`` on."""
    metrics = []
    for _ in range(first, 2):
        ours.accumulate([batch(valued(rows(8)))])
        metrics.append(ours.step(LR))
    return metrics
