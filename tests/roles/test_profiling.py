"""Traces of steps: which steps, changes while the run works, faults, and the files."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.metrics.spans import Spans
from relax_hpc.base.rundir import RunDir
from relax_hpc.commands import profile as profile_command
from relax_hpc.config import Config, dump, load, load_resolved, profiling
from relax_hpc.ops.checks.settings import check
from relax_hpc.rollout.engine_profile import EngineProfile
from relax_hpc.rollout.engines.engine import EngineFault
from tests.helpers.trace_files import read_slices
from tests.requirements import requires

requires("torch")

OVER = {
    "profile.steps": "2-3",
    "profile.roles": ["actor", "rollout"],
    "steps": 20,
    "data.task": "relax_hpc.examples.tasks.sort_digits:SortDigits",
    "data.max_prompt_tokens": 32,
    "rollout.max_new_tokens": 8,
}


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Rank 0 of an actor of a run that profiles steps 2 and 3."""
    monkeypatch.setattr(profiling, "_LOOK_S", 0.0)
    run = RunDir(tmp_path / "run")
    run.create()
    config = load([], {"run_dir": str(run.root), "rollout.engine.kind": "sglang", **OVER})
    dump(config, run.config)
    return SimpleNamespace(
        run=run,
        config=config,
        group="actor",
        role="actor",
        incarnation=4,
        world=SimpleNamespace(rank=0),
        spans=Spans(tmp_path / "spans.jsonl", "actor"),
    )


def train(profiler: Any, context: Any, steps: range) -> None:
    """Each step is a matrix product in a span."""
    import torch

    for step in steps:
        profiler.reach(step)
        with context.spans("train", step=step):
            torch.ones(8, 8) @ torch.ones(8, 8)


def test_the_steps_of_the_configuration_are_in_a_file(context: Any) -> None:
    from relax_hpc.roles.profiling import StepProfiler

    profiler = StepProfiler(context)
    train(profiler, context, range(7))
    profiler.close()
    (path,) = context.run.profiles.iterdir()
    assert path.name == "actor-rank-0-steps-2-3.i000004.trace.json.gz"
    names = Counter(event["name"] for event in read_slices(path))
    assert names["step 2"] == names["step 3"] == 1 and names["step 4"] == 0
    assert names["train"] == names["aten::matmul"] == 2
    other: Any = SimpleNamespace(**{**vars(context), "world": SimpleNamespace(rank=1)})
    train(StepProfiler(other), other, range(7))
    assert len(list(context.run.profiles.iterdir())) == 1


def test_steps_can_be_asked_for_while_the_run_works(context: Any) -> None:
    """By the command. The run ends within them: what was recorded is kept."""
    from relax_hpc.roles.profiling import StepProfiler

    profiler = StepProfiler(context)
    train(profiler, context, range(6))
    root = str(context.run.root)
    assert profile_command.main(root, "8-12", ["actor"], stacks=True) == 0
    assert load_resolved(context.run.root, "actor").profile.stacks
    train(profiler, context, range(6, 11))
    profiler.close()
    profiler.close()
    names = sorted(path.name.partition(".")[0] for path in context.run.profiles.iterdir())
    assert names == ["actor-rank-0-steps-2-3", "actor-rank-0-steps-8-10"]
    with pytest.raises(ConfigError, match="--role: found 'critic', allowed: actor, rollout"):
        profile_command.main(root, "8", ["critic"])


def test_a_change_while_a_process_starts_counts(context: Any) -> None:
    """It was stored after the process had read its configuration."""
    from relax_hpc.roles.profiling import StepProfiler

    assert profile_command.main(str(context.run.root), "5") == 0
    profiler = StepProfiler(context)
    train(profiler, context, range(8))
    (path,) = context.run.profiles.iterdir()
    assert path.name.startswith("actor-rank-0-steps-5-5.")


def test_a_disk_that_takes_no_trace_changes_nothing(
    context: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    from relax_hpc.roles.profiling import StepProfiler

    context.run.profiles.write_text("")
    train(StepProfiler(context), context, range(6))
    assert "profile.steps: no trace was written: " in capsys.readouterr().out
    with context.spans("train", step=6):
        pass


class RecordingEngine:
    """An engine whose profiler can fail."""

    name = "recording"

    def __init__(self, fails: bool = False) -> None:
        self.calls: list[str] = []
        self.fails = fails

    async def start_profile(self, folder: Path, name: str, profile: Any) -> None:
        self.calls.append(name)
        if self.fails:
            raise EngineFault("http_error", "no profiler here")

    async def stop_profile(self) -> None:
        self.calls.append("stop")


def reach(profile: EngineProfile, engine: Any, steps: range) -> None:
    for step in steps:
        asyncio.run(profile.reach(step, engine))


def test_an_engine_records_once(context: Any, capsys: pytest.CaptureFixture[str]) -> None:
    context.group = "rollout"
    engine = RecordingEngine()
    profile = EngineProfile(context, 0)
    reach(profile, engine, range(9))
    assert engine.calls == ["engine-0-steps-2-3.i000004", "stop"]
    # An engine that was replaced while it recorded has no trace; the next one may still record.
    first, second = RecordingEngine(), RecordingEngine()
    profile = EngineProfile(context, 0)
    reach(profile, first, range(3))
    reach(profile, second, range(4, 6))
    assert (first.calls, second.calls) == (["engine-0-steps-2-3.i000004"], [])
    for broken in (RecordingEngine(fails=True), SimpleNamespace(name="simulated")):
        reach(EngineProfile(context, 0), broken, range(6))
    printed = capsys.readouterr().out
    assert "no trace of engine 0: http_error: no profiler here" in printed
    assert "no trace of engine 0: engine simulated has no profiler" in printed
    reach(EngineProfile(context, 1), engine, range(6))
    assert len(engine.calls) == 2


@pytest.mark.parametrize("text", ["7-5", "x", "5-", "-5", "1,2"])
def test_bad_steps_are_found_by_check(text: str) -> None:
    config = Config()
    config.profile.steps = text
    config.profile.roles = ["actor", "hub"]
    found = [line for line in check(config) if line.startswith("profile.")]
    assert found == [
        f"profile.steps: found {text!r}, allowed: a step such as 5, or steps such as 5-7, the "
        "smaller one first"
    ]


def test_roles_that_cannot_be_profiled_are_found_by_check() -> None:
    config = Config()
    config.profile.steps, config.profile.roles = "5", ["hub", "rollout"]
    config.profile.ranks = [-1]
    config.rollout.engine.kind = "simulated"
    found = "\n".join(line for line in check(config) if line.startswith("profile."))
    assert "profile.roles: found 'hub', allowed: actor, critic, actor_fwd, reference" in found
    assert "profile.ranks: found -1, allowed: numbers from 0 on" in found
    assert "found rollout with engine kind simulated, which has no profiler" in found
