"""A power loss takes nothing back that the queue has accepted, trained or saved."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import psutil
import pytest

from relax_hpc.base.rundir import RunDir
from relax_hpc.training.weights.node_cache import staging_root
from tests import fault_table
from tests.helpers.audit import audit
from tests.helpers.run_helpers import LIGHT, Running, engine_of, queue_state, running, with_engine
from tests.requirements import requires
from tests.runs import power_loss

requires("mpi", "torch", "megatron", "transformers")

pytestmark = pytest.mark.run

EVERY, STEPS = 2, 6
ENGINE = engine_of("simulated")
OVER = {"steps": STEPS, "max_staleness": 1, "checkpoint": {"every": EVERY}}
OVER |= {name: LIGHT[name] for name in ("actor", "groups")} | with_engine(ENGINE)
WAIT_S = 240.0


def test_a_run_goes_on_after_a_power_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in power_loss.environment(tmp_path / "disk").items():
        monkeypatch.setenv(name, value)
    with running(tmp_path, OVER) as live:
        live.wait_for_step(EVERY + 1, WAIT_S)
        kill_everything(live)
    told = live.run.events.read_bytes().splitlines()
    before = RunDir(power_loss.lose_power(live.run.root, tmp_path / "disk"))
    shutil.rmtree(staging_root(live.run), ignore_errors=True)
    assert_something_was_lost(live.run, before)
    with running(tmp_path, OVER, None, "--resume") as live:
        live.finish(WAIT_S)
    assert live.run.events.read_bytes().splitlines()[: len(told)] == told, (
        "what was said to be done is done"
    )
    result = audit(live.run)
    assert result.problems == [] and set(result.dropped) <= {"rolled_back", "lost"}
    state = queue_state(live.run)
    assert state.progress.trained_steps == STEPS and state.lineage.starts[-1][1] >= EVERY, (
        "it went on from a checkpoint"
    )
    fault_table.add("power loss of everything, with all that no fsync had saved", "local", ENGINE)


def kill_everything(live: Running) -> None:
    """SIGKILL to the supervisor and to all that it started."""
    supervisor = psutil.Process(live.process.pid)
    family = [supervisor, *supervisor.children(recursive=True)]
    for process in family:
        process.kill()
    assert live.wait(30.0) == -signal.SIGKILL
    assert not psutil.wait_procs(family, timeout=30.0)[1]


def assert_something_was_lost(run: RunDir, before: RunDir) -> None:
    """Weights, logs and metrics are not worth a sync; everything that the queue knows of is."""
    assert any(before.weights.iterdir()) and not any(run.weights.iterdir())
    assert before.metrics.stat().st_size > 0 and not run.metrics.exists()
    state = queue_state(run)
    saved = {
        shard.descriptor["name"] for shard in state.shards.by_number.values() if not shard.unsaved
    }
    assert saved and saved <= {path.name for path in run.shards.iterdir()}
    assert state.progress.trained_steps > EVERY and state.progress.checkpoints[-1]["step"] >= EVERY
