"""Cost of a run in its report: hours, energy and points, with known answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.base.metrics.resource_samples import GpuUse, Sample, samples_path
from relax_hpc.base.metrics.writer import MetricsWriter
from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.slurm.energy import sum_energies
from relax_hpc.ops.observe.report import report
from relax_hpc.ops.observe.report_view import lines
from tests.helpers.fake_slurm import FakeSlurm
from tests.ops.test_report import GPU, generated, incarnation, make_run

SACCT = (
    "11|run|\n11.batch|batch|100000\n11.0|rollout.rollout.i000001|7200000\n"
    "11.1|actor.actor.i000001|3600000\n11.2|actor.critic.i000001|3500000\n"
)
"""Steps of two groups in one job; those of one incarnation run at the same time."""


def trained() -> list[tuple]:
    """Five steps of 10 s, after 10 s to start."""
    return [("start", 0, 10), *(("train", 10 + 10 * k, 20 + 10 * k, k) for k in range(5))]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """Two groups of four GPUs each, which share a job, and a hub; a held-out score that rises."""
    FakeSlurm(tmp_path / "slurm", monkeypatch).answer("sacct", SACCT)
    run = make_run(tmp_path / "run", **GPU, **{"data.eval": {"digits": "x"}})
    incarnation(run, "hub", 0, [("wait", 1, 70, "rollout", "rows of rollout")], 70)
    incarnation(run, "rollout", 0, generated(), 72)
    incarnation(run, "actor", 0, trained(), 60)
    add_sample(run, "rollout", "rollout", 0, "n1", cpu_s=7200.0)
    add_sample(run, "actor", "actor", 0, "n2", cpu_s=360.0)
    # A role that shares the GPU.
    add_sample(run, "actor", "critic", 0, "n2", cpu_s=360.0)
    add_sample(run, "actor", "actor", 1, "n3", cpu_s=0.0)
    with MetricsWriter(run.root, 1) as metrics:
        metrics.write(0, {"eval/digits/reward": 0.25})
        for step in range(5):
            metrics.write(step, {"reward/mean": 0.5, "perf/trained_tokens": 100_000})
        metrics.write(5, {"eval/digits/reward": 0.75})
    return run


def add_sample(run: RunDir, group: str, role: str, rank: int, node: str, cpu_s: float) -> None:
    gpu = GpuUse("GPU-a", 0.0, 0.0, 0, energy_j=1.8e6, busy_s=30.0, seconds=60.0)
    gpu.errors = {"79": 1}
    sample = Sample(1.0, node, 60.0, cpu_s, 2 << 30, [], [gpu])
    path = samples_path(run.logs(group, 1), role, rank)
    path.write_bytes(sample.to_line())


def test_cost_by_group_token_and_point(run: RunDir) -> None:
    cost = report(run)["cost"]
    groups: dict[str, Any] = cost["groups"]
    assert set(groups) == {"hub", "rollout", "actor"} and cost["unit"] == "GPU"
    assert groups["rollout"]["hours"] == pytest.approx(4 * 72 / 3600)
    assert groups["actor"]["hours"] == pytest.approx(4 * 60 / 3600)
    assert groups["rollout"]["cpu_hours"] == 2.0 and groups["actor"]["cpu_hours"] == 0.2
    # A GPU that two roles have sampled counts once.
    assert groups["rollout"]["gpu_kwh"] == 0.5 and groups["actor"]["gpu_kwh"] == 1.0
    assert groups["actor"]["gpu_errors"] == {"79": 2}
    assert groups["actor"]["gpu_utilization"] == 0.5
    assert groups["actor"]["peak_memory_bytes"] == 3 * (2 << 30)
    # Slurm: 7.2 MJ and 3.6 MJ in one job, in equal parts; the hub on its nodes gets none.
    assert groups["rollout"]["slurm_kwh"] == groups["actor"]["slurm_kwh"] == 1.5
    assert groups["hub"]["slurm_kwh"] is None and groups["hub"]["gpu_kwh"] is None
    assert cost["kwh"] == 3.0 and cost["kwh_per_million_tokens"] == 6.0
    assert cost["hours_per_million_tokens"] == pytest.approx(2 * 4 * 132 / 3600)
    (score,) = cost["scores"]
    assert score["points"] == pytest.approx(50) and score["kwh_per_point"] == pytest.approx(0.06)
    json.dumps(cost)


def test_the_text_of_the_cost(run: RunDir) -> None:
    text = "\n".join(lines(report(run)))
    assert "COST     GPU-HOURS  CPU-HOURS  PEAK MEMORY  GPU USE  GPU KWH  NODE KWH" in text
    assert "per million trained tokens: 0.293 GPU-hours, 6 kWh" in text
    expected = (
        "per point (0.01): 0.00293 GPU-hours, 0.06 kWh; eval/digits/reward from 0.250 to 0.750"
    )
    assert expected in text
    own = [line for line in text.splitlines() if str(run.root) not in line]
    assert not [line for line in own if len(line) > 100]


def test_a_part_of_a_run_has_its_share(run: RunDir) -> None:
    cost = report(run, 4, 4)["cost"]
    assert cost["groups"]["rollout"]["gpu_kwh"] == pytest.approx(0.5 * 10 / 72)
    assert cost["trained_tokens"] == 100_000 and cost["scores"] == []


def test_without_accounting_and_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = FakeSlurm(tmp_path / "slurm", monkeypatch)
    slurm.answer("sacct", err="Slurm accounting storage is disabled\n", code=1)
    run = make_run(tmp_path / "run")
    incarnation(run, "actor", 0, trained(), 60)
    cost = report(run)["cost"]
    assert cost["kwh"] is None and cost["kwh_per_million_tokens"] is None
    assert cost["groups"]["actor"]["gpu_utilization"] is None
    slurm.remove("sacct")
    assert report(run)["cost"]["kwh"] is None


def test_energies_of_jobs_that_were_requeued_or_measured_as_a_whole() -> None:
    step = "actor.actor.i000001"
    lines = [f"7|a|b|\n7.0|{step}|500", "7|a|", f"7.0|{step}|200", "8|h|", "8.batch|batch|40"]
    texts = "\n".join([*lines, "8.extern|extern|90", "nonsense", "9|x|", "9.0|x|"]).splitlines()
    assert sum_energies(texts) == {"7": 700.0, "8": 90.0}
