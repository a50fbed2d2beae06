"""Programming errors in plug-ins end a run that has made no progress, and are retried later."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from relax_hpc.algorithms.base import drawn_tokens
from relax_hpc.base.error_origin import ErrorOrigin
from relax_hpc.base.errors import EXIT_CONFIG
from relax_hpc.base.programming_errors import describe_programming_error, plugin_names
from relax_hpc.config.schema import Config, RolloutConfig
from relax_hpc.roles.__main__ import settings_of_role
from relax_hpc.rollout.outcomes import Failure, Outcomes
from tests.effort import effort
from tests.helpers.run_helpers import LIGHT, Running, merged, running
from tests.requirements import requires

END_S = 120.0
ENGINE = """
import asyncio

import numpy as np

from relax_hpc.rollout.engines.engine import Generation, checked


class MyEngine:
    name, phase, pause_s = "mine", "starting", 0.0

    def __init__(self, config, number, model_dir, version, log_dir, place):
        self._version = version

    async def start(self): ...

    async def generate(self, request):
        tokens = [5] * request.budget
        versions = np.full(len(tokens), self._version.encode(), np.int32)
        if self._version.number >= FIRST_VERSION:
            RETURN_OR_RAISE
        return checked(Generation(tokens, [-1.0] * len(tokens), versions, "length"), request.budget)

    async def update_weights(self, directory, version):
        self._version = version

    async def release(self): ...

    async def wait_dead(self):
        return await asyncio.get_running_loop().create_future()

    async def close(self): ...
"""
REWARD = """
def my_reward(sample):
    return float(len(sample.respones))
"""
WRONG_REWARD = """
def my_reward(sample):
    return "good"
"""
ALGORITHM = """
from dataclasses import dataclass

from relax_hpc.algorithms.grpo import Grpo


@dataclass(kw_only=True)
class MyAlgorithm(Grpo):
    def token_losses(self, batch):
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls >= FIRST_CALL:
            batch.advantage.sum()
        return super().token_losses(batch)
"""
ADVANTAGES = """
from dataclasses import dataclass

from relax_hpc.algorithms.grpo import Grpo


@dataclass(kw_only=True)
class MyAlgorithm(Grpo):
    def advantages(self, rewards, tokens):
        return undefined_name * rewards
"""
TASK = """
from relax_hpc.tasks import get_task


class MyTask(type(get_task("sort_digits"))):
    async def episode(self, request, ask):
        generation = await ask(request)
        return generation.undefined_name
"""
ENVIRONMENT = """
from relax_hpc.environments.base import Environment, Step


class MyEnvironment(Environment):
    def reset(self, beginning):
        return []

    def step(self, response):
        return STEP
"""
ATTRIBUTE_ERROR = "tokens.undefined_name"
WRONG_RESULT = "return {'token_ids': tokens}"


def engine(body: str, first_version: int = 0) -> str:
    return ENGINE.replace("RETURN_OR_RAISE", body).replace("FIRST_VERSION", str(first_version))


def algorithm(first_call: int) -> str:
    return ALGORITHM.replace("FIRST_CALL", str(first_call))


def settings(section: str, name: str) -> dict[str, Any]:
    """Overrides by which a run uses the plug-in ``name`` of module `my_plugin`."""
    plugin = f"my_plugin:{name}"
    if section == "engine":
        return LIGHT | {"rollout": {"engine": {"kind": plugin}}}
    over: dict[str, Any] = {
        "reward": {"rollout": {"reward": plugin}},
        "algorithm": {"algorithm": {"name": plugin}},
        "task": {"data": {"task": plugin}},
        "environment": {"environment": {"kind": plugin}},
    }[section]
    return merged(LIGHT, over)


@pytest.fixture
def plugin_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder on PYTHONPATH of a run, for the module my_plugin."""
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    return tmp_path


def line_of(source: str, text: str) -> int:
    return next(n for n, line in enumerate(source.splitlines(), 1) if text in line)


def last_line(live: Running) -> str:
    return live.output.read_text().splitlines()[-1]


@dataclass(frozen=True)
class Case:
    """A plug-in with a programming error."""

    section: str
    name: str
    source: str
    error: str
    """What the message says of the error."""
    line: str = ""
    """Text in the line that the message names; empty: no line of the plug-in failed."""
    group: str = "rollout"


CASES = {
    "engine": Case(
        "engine",
        "MyEngine",
        engine(ATTRIBUTE_ERROR),
        "AttributeError: 'list' object has no attribute 'undefined_name'",
        ATTRIBUTE_ERROR,
    ),
    "reward": Case(
        "reward",
        "my_reward",
        REWARD,
        "AttributeError: 'RewardInput' object has no attribute 'respones'",
        "respones",
    ),
    "loss": Case(
        "algorithm",
        "MyAlgorithm",
        algorithm(1),
        "AttributeError: advantage is not a field that the loss takes",
        "batch.advantage.sum()",
        "actor",
    ),
}
MORE_CASES = {
    "engine_result": Case(
        "engine", "MyEngine", engine(WRONG_RESULT), "AttributeError: 'dict' object has no attribute"
    ),
    "reward_result": Case(
        "reward", "my_reward", WRONG_REWARD, "reward_not_a_number: returned str", "def my_reward"
    ),
    "advantages": Case(
        "algorithm",
        "MyAlgorithm",
        ADVANTAGES,
        "NameError: name 'undefined_name' is not defined",
        "undefined_name",
        "hub",
    ),
    "task": Case(
        "task",
        "MyTask",
        TASK,
        "AttributeError: 'Generation' object has no attribute",
        "undefined_name",
    ),
    "environment": Case(
        "environment",
        "MyEnvironment",
        ENVIRONMENT.replace("STEP", "Step(undefined_name)"),
        "NameError: name 'undefined_name' is not defined",
        "undefined_name",
    ),
    "environment_result": Case(
        "environment",
        "MyEnvironment",
        ENVIRONMENT.replace("STEP", "None"),
        "environment_answer: step(): found NoneType, allowed: Step",
    ),
}
"""Cases for a session at full length. The decision in each is proven without a run below."""


@pytest.mark.run
@pytest.mark.parametrize("name", [*CASES, *(MORE_CASES if effort(0, 1) else {})])
def test_a_programming_error_ends_a_run_without_progress(plugin_folder: Path, name: str) -> None:
    requires("torch", "megatron")
    case = (CASES | MORE_CASES)[name]
    file = plugin_folder / "my_plugin.py"
    file.write_text(case.source)
    with running(plugin_folder, settings(case.section, case.name)) as live:
        assert live.wait(END_S) == EXIT_CONFIG, live.story()
    text = last_line(live)
    assert text.startswith(f"relax-hpc: error: {case.group}: ") and case.error in text
    assert "correct the code, then resume the run (log: " in text
    if case.line:
        assert f"{file}:{line_of(case.source, case.line)} in " in text
    assert live.incarnations(case.group) == 1, "it was not restarted"


@pytest.mark.run
@pytest.mark.parametrize(
    ("section", "name", "source", "group"),
    [
        ("engine", "MyEngine", engine(ATTRIBUTE_ERROR, first_version=1), "rollout"),
        ("algorithm", "MyAlgorithm", algorithm(20), "actor"),
    ],
    ids=["engine", "loss"],
)
def test_the_same_error_after_a_step_is_retried(
    plugin_folder: Path, section: str, name: str, source: str, group: str
) -> None:
    requires("torch", "megatron")
    (plugin_folder / "my_plugin.py").write_text(source)
    over = {"steps": 100, "checkpoint": {"every": 1000}}
    with running(plugin_folder, merged(settings(section, name), over)) as live:
        live.wait_until(lambda: live.incarnations(group) > 1, f"{group} is restarted", END_S)
    assert "AttributeError" in live.output.read_text()


# -- the decision, without a run -------------------------------------------------------------------


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Module my_plugin, imported from the test's folder."""
    source = """
from relax_hpc.algorithms.base import drawn_tokens

def fails(): return undefined_name
def fails_below(): return drawn_tokens(None)
def fails_to_import(): import no_such_module
def loses_connection(): raise ImportError("lib.so: cannot read file data: Input/output error")
def has_bad_data(): return {}["key"]
"""
    (tmp_path / "my_plugin.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_plugin", raising=False)
    return importlib.import_module("my_plugin")


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("fails", "NameError: name 'undefined_name' is not defined at FILE:4 in fails; a restart"),
        (
            "fails_below",
            "TypeError: 'NoneType' object is not subscriptable at FILE:5 in fails_below",
        ),
        ("fails_to_import", "ModuleNotFoundError: No module named 'no_such_module' at FILE:6"),
        ("loses_connection", ""),
        ("has_bad_data", ""),
    ],
)
def test_the_line_in_the_plugin_is_named(plugin: ModuleType, function: str, says: str) -> None:
    with pytest.raises(Exception) as raised:
        getattr(plugin, function)()
    # As in a role: the frames of this test are of no plug-in.
    error = raised.value.with_traceback(raised.tb.tb_next)
    text = describe_programming_error(error, ["my_plugin:fails"])
    assert text.startswith(says.replace("FILE", str(plugin.__file__)))
    assert bool(text) == bool(says)


def test_an_error_in_this_package_names_the_plugins_that_may_have_caused_it(
    plugin: ModuleType,
) -> None:
    with pytest.raises(TypeError) as raised:
        drawn_tokens(None)
    error = raised.value.with_traceback(raised.tb.tb_next)
    text = describe_programming_error(error, ["my_plugin:fails", "not_imported:x"])
    assert "base.py:" in text and "check what my_plugin:fails returns" in text
    assert describe_programming_error(error, ["relax_hpc.base.errors:RelaxError"]) == ""


def test_names_of_plugins_are_found_in_settings() -> None:
    config = {
        "a": {"kind": "my.module:Class"},
        "b": ["m:f", "host:80", "a b:c"],
        "c": 1,
        "d": "sglang",
    }
    assert list(plugin_names(config)) == ["my.module:Class", "m:f"]


@pytest.mark.parametrize(
    ("role", "sections"),
    [
        ("rollout", {"rollout", "data"}),
        ("actor", {"algorithm"}),
        ("advantages", {"algorithm"}),
        ("reference", set()),
    ],
)
def test_a_role_is_ended_only_by_plugins_that_it_calls(role: str, sections: set[str]) -> None:
    settings = settings_of_role(Config(), role)
    assert sections == settings.keys() & {"rollout", "data", "algorithm"}


def failure(detail: str, location: str, reason: str = "reward_exception") -> Failure:
    return Failure(reason, detail, origin=ErrorOrigin(location))


BAD = failure("reward_exception: TypeError: no", "/home/user/rewards.py:3 in reward")


@pytest.mark.parametrize(
    ("failures", "ends"),
    [
        ([BAD] * 16, True),
        ([BAD] * 15, False),
        ([failure("reward_exception: ValueError: no", "/home/user/rewards.py:3")] * 16, False),
        ([failure("reward_exception: TypeError: no", "")] * 16, False),
        ([failure("returned str", "/home/user/rewards.py:1", "reward_not_a_number")] * 16, True),
        ([failure("environment_answer: none", "", "environment_answer")] * 16, True),
        ([failure("TypeError: no", f"/home/user/rewards.py:{n}") for n in range(16)], False),
    ],
)
def test_only_what_every_group_fails_by_is_a_programming_error(
    failures: list[Failure], ends: bool
) -> None:
    outcomes = Outcomes(RolloutConfig())
    assert [outcomes.is_programming_error(each) for each in failures][-1] == ends
    outcomes = Outcomes(RolloutConfig())
    outcomes.count([])
    assert not any(outcomes.is_programming_error(each) for each in failures), (
        "one group had rewards"
    )
