"""Rewards, filters, tasks and environments that a run could not call: `check` says so."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.base.errors import ConfigError
from relax_hpc.config import load
from relax_hpc.environments import environment_class
from relax_hpc.ops.checks.rewards import check_rewards
from relax_hpc.ops.checks.settings import check
from relax_hpc.rewards import RewardError, RewardInput, Score, get_reward
from relax_hpc.rewards.scoring import scores
from relax_hpc.rewards.signature import function_misfits
from relax_hpc.tasks import get_task, misfits

MODULE = """
import functools

notcallable = 0.5

def right(sample): return 1.0
def by_group(samples): return [1.0 for _ in samples]
def any_name(x, strict=False): return 1.0
def keywords(sample, **settings): return 1.0
async def soon(sample): return 1.0
bound = functools.partial(any_name, strict=True)

def two(sample, extra): return 1.0
def nothing(): return 1.0
def by_name(*, sample): return 1.0
def needs_keyword(sample, *, threshold): return 1.0
def lazily(sample): yield 1.0

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(ground_truth in solution_str)
def compute_scores(data_sources, solution_strs, ground_truths, extra_infos):
    return [float(b in a) for a, b in zip(solution_strs, ground_truths)]
def trl(prompts, completions, answer, **kwargs):
    return [float(a in c) for a, c in zip(answer, completions)]
def trl_completions(completions, **kwargs):
    return [float("4" in c) for c in completions]
def trl_columns(completions, ground_truth, step=None):
    return [float(a in c) for a, c in zip(ground_truth, completions)]
async def verl_soon(data_source, solution_str, ground_truth, extra_info=None):
    return float(ground_truth in solution_str)
class Verl:
    def __call__(self, data_source, solution_str, ground_truth, extra_info):
        return float(ground_truth in solution_str)
    def score(self, completions, answer):
        return [float(a in c) for a, c in zip(answer, completions)]
verl_object = Verl()
verl_bound = functools.partial(compute_score, extra_info=None)
trl_lambda = lambda completions, answer, **_: [float(a in c) for a, c in zip(answer, completions)]
def trl_by_name(*, completions, answer): return trl_columns(completions, answer)
def openrlhf(queries, prompts, labels):
    return [float(b in a) for a, b in zip(queries, labels)]

class Length:
    def __call__(self, sample): return 1.0
    def group(self, samples): return [1.0 for _ in samples]
    @staticmethod
    def plain(sample): return 1.0
    def two(self, sample, extra): return 1.0
class Threshold:
    def __init__(self, threshold): ...
    def __call__(self, sample): return 1.0
class Empty:
    pass
"""
GOOD = [
    "right",
    "by_group",
    "any_name",
    "keywords",
    "soon",
    "bound",
    "Length",
    "Length.group",
    "Length.plain",
]
BAD = {
    "two": "takes (sample, extra)",
    "nothing": "takes ()",
    "needs_keyword": "takes (sample, *, threshold)",
    "by_name": "takes (*, sample); a reward gets one parameter: `sample`, or `samples` for all "
    "samples of a prompt, given by position",
    "lazily": "found a generator; return a number",
    "compute_score": "as verl calls it",
    "compute_scores": "as verl's batches calls it",
    "trl": "as TRL calls it",
    "trl_completions": "as TRL calls it",
    "openrlhf": "as OpenRLHF calls it",
    "Length.two": "takes (sample, extra)",
    "Threshold": "takes (threshold), allowed: (); an object of the class is made without arguments",
    "Empty": "found a class without `__call__`",
}
SAMPLES = [RewardInput("2+2?", "4", "so 4", "stop"), RewardInput("2+2?", "4", "so 5", "stop")]


@pytest.fixture
def write_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Writes a module `own_code` of a user, which each test imports again."""
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("own_code", None)

    def write(source: str) -> Path:
        path = tmp_path / "own_code.py"
        path.write_text(source)
        importlib.invalidate_caches()
        return path

    return write


def findings(**settings: Any) -> list[str]:
    """Findings of `check_rewards`; dots of keys are written `__`."""
    overrides = {key.replace("__", "."): value for key, value in settings.items()}
    return list(check_rewards(load([], {"data.train": "x.jsonl"} | overrides)))


@pytest.mark.parametrize("name", GOOD)
def test_a_reward_that_can_be_called_is_right(
    write_module: Callable[[str], Path], name: str
) -> None:
    write_module(MODULE)
    assert findings(rollout__reward=f"own_code:{name}") == []


@pytest.mark.parametrize("key", ["rollout.reward", "eval.reward", "reward.weighted"])
def test_a_reward_that_cannot_be_called_is_one_finding(
    write_module: Callable[[str], Path], key: str
) -> None:
    write_module(MODULE)
    for name, text in BAD.items():
        reward = f"own_code:{name}"
        settings: dict[str, Any] = {"rollout.reward": "own_code:right", key: reward}
        if key == "reward.weighted":
            settings = {"rollout.reward": "weighted", key: {reward: 1.0}}
        [finding] = list(check_rewards(load([], {"data.train": "x.jsonl"} | settings)))
        assert finding.startswith(key)
        assert f"'{reward}'" in finding and text in finding and "\n" not in finding


@pytest.mark.parametrize(
    "name",
    [
        "compute_score",
        "compute_scores",
        "verl_soon",
        "verl_object",
        "verl_bound",
        "Verl",
        "Verl.score",
        "trl",
        "trl_columns",
        "trl_lambda",
        "trl_by_name",
        "openrlhf",
    ],
)
def test_the_adapter_that_a_message_gives_is_right(
    write_module: Callable[[str], Path], name: str
) -> None:
    """The line of the message, added to the module, is a reward with the same values."""
    write_module(MODULE)
    [finding] = findings(rollout__reward=f"own_code:{name}")
    line = finding.partition("name this: ")[2]
    write_module(f"{MODULE}\n{line}\n")
    sys.modules.pop("own_code")
    assert findings(rollout__reward="own_code:score") == []
    assert scores(get_reward("own_code:score"), SAMPLES) == [Score(1.0), Score(0.0)]


def test_an_unusual_function_is_left_alone() -> None:
    assert list(function_misfits(max, "builtins:max", "max")) == []


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("own_code:notcallable", ["found float 'notcallable'", "a function or a class"]),
        ("own_code:rigth", ["has no function 'rigth'", "did you mean 'right'?"]),
        ("own_code:notcallabel", ["has no function 'notcallabel'; define it there"]),
        ("own_code.py:right", ["leave out .py", "and own_code:right"]),
        ("code/own_code.py:right", ["PYTHONPATH=", "/code and own_code:right"]),
        ("own_code.py", ["leave out .py", "own_code:FUNCTION"]),
        ("own_code.right", ["such as own_code:right"]),
        (
            "needs_more:right",
            ["No module named 'no_such_package'", ":1 in <module>", "install no_such_package"],
        ),
        ("missing_code:right", ["No module named 'missing_code'", "on PYTHONPATH"]),
    ],
)
def test_a_name_that_is_no_reward_says_what_to_write(
    write_module: Callable[[str], Path], name: str, texts: list[str]
) -> None:
    path = write_module(MODULE)
    path.with_name("needs_more.py").write_text("import no_such_package\n")
    [finding] = findings(rollout__reward=name)
    assert finding.startswith("rollout.reward: ") and "\n" not in finding
    assert all(text in finding for text in texts), finding


def test_a_module_in_the_current_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    (tmp_path / "mine_here.py").write_text("def score(sample): return 1\n")
    [finding] = findings(rollout__reward="mine_here:score")
    assert finding.endswith(f"export PYTHONPATH={tmp_path}")


def test_a_filter_a_task_and_an_environment_are_checked_too(
    write_module: Callable[[str], Path],
) -> None:
    write_module(
        """
from relax_hpc.tasks import Task
from relax_hpc.environments.base import Environment

def keeps(rewards, threshold): return True

class Puzzle(Task):
    def rows(self, split): return []
    def reward(self, solution_str, ground_truth, data_source): return 1.0

class Game(Environment):
    def step(self, action, state): ...
"""
    )
    [finding] = findings(rollout__reward="exact", rollout__filter="own_code:keeps")
    start = "rollout.filter: 'own_code:keeps' takes (rewards, threshold)"
    assert finding == f"{start}, allowed: (rewards), a list of numbers"
    reward, rows = misfits(get_task("own_code:Puzzle"))
    assert "as verl calls it" in reward and rows == "rows takes (split), allowed: (split, data)"
    with pytest.raises(ConfigError, match=r"step takes \(action, state\), allowed: \(response\)"):
        environment_class("own_code:Game")


def test_the_shipped_classes_have_no_misfits() -> None:
    config = load([], {"data.task": "relax_hpc.examples.tasks.sort_digits:SortDigits"})
    assert not [finding for finding in check(config) if "takes (" in finding]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("None", "returned None (some path through the function has no `return`)"),
        ("'1.0'", "returned str '1.0' (use float(...))"),
        ("[1.0]", "returned list, expected one number"),
        ("float('nan')", "returned nan"),
        ("float('inf')", "returned inf"),
    ],
)
def test_what_is_no_number_is_said_with_the_line_of_the_reward(
    write_module: Callable[[str], Path], value: str, text: str
) -> None:
    path = write_module(f"import math\n\ndef score(sample):\n    return {value}\n")
    failure = scores(get_reward("own_code:score"), SAMPLES)
    assert isinstance(failure, RewardError) and text in failure.detail
    assert failure.origin.location == f"{path}:3 in score"


def test_numbers_of_any_library_are_taken(write_module: Callable[[str], Path]) -> None:
    write_module(
        "import numpy, torch\nfrom fractions import Fraction\n"
        "def score(samples): return [numpy.float32(0.5), torch.tensor(0.5), True, Fraction(1, 2)]\n"
    )
    values = scores(get_reward("own_code:score"), SAMPLES * 2)
    assert values == [Score(0.5), Score(0.5), Score(1.0), Score(0.5)]
