"""Which line of a user's code an exception came from."""

from __future__ import annotations

import importlib
import json
import os
import re
import statistics
import sys
from pathlib import Path

import pytest

from relax_hpc.base.error_origin import NO_ORIGIN, describe_with_location, locate_error, shorten
from relax_hpc.base.errors import ConfigError
from relax_hpc.base.metrics.first_failures import (
    FAILURES_FILE,
    FailureWriter,
    FirstFailure,
    read_failures,
)
from relax_hpc.base.plugins import load_plugin
from relax_hpc.rewards import RewardInput
from relax_hpc.rewards.choice import multiple_choice
from relax_hpc.rewards.scoring import scores
from tests.requirements import PACKAGE


def error_of(work: object, *arguments: object) -> BaseException:
    """What calling ``work`` raises."""
    with pytest.raises(BaseException) as caught:
        work(*arguments)
    return caught.value


def test_an_error_in_a_library_is_located_where_the_user_called_it() -> None:
    def score() -> float:
        return statistics.mean([])

    origin = locate_error(error_of(score))
    assert re.fullmatch(rf"{re.escape(__file__)}:\d+ in score", origin.location)
    assert "statistics.py" in origin.traceback, "the rest of the traceback is there, too"


def test_a_cause_is_shown_without_frames_of_this_package() -> None:
    def outer() -> None:
        try:
            json.loads("{")
        except ValueError as error:
            raise RuntimeError("no JSON") from error

    def reward(sample: object) -> float:
        return outer()

    failure = scores(reward, [None])
    assert failure.detail == "RuntimeError: no JSON"
    assert failure.origin.location.endswith(" in outer")
    text = failure.origin.traceback
    assert text.index("JSONDecodeError") < text.index("direct cause") < text.index("no JSON")
    assert PACKAGE not in text


def test_an_error_of_this_package_alone_has_no_origin() -> None:
    failure = scores(multiple_choice, [RewardInput("?", "both", "A", "stop")])
    assert failure.reason == "reward_exception" and failure.origin == NO_ORIGIN


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import os\ndef score(sample)\n    return 1\n", ":2"),
        ("limit = 3\nfactor = limit / 0\n", ":2 in <module>"),
        ("def inner():\n    return missing\n\ninner()\n", ":2 in inner"),
    ],
)
def test_a_module_that_cannot_be_imported_says_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, says: str
) -> None:
    path = tmp_path / "broken_rewards.py"
    path.write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    sys.modules.pop("broken_rewards", None)
    with pytest.raises(ConfigError, match="reward: 'broken_rewards:score'") as caught:
        load_plugin("reward", "broken_rewards:score", {})
    assert f"{path}{says}" in str(caught.value)


class Silent(Exception):
    def __str__(self) -> str:
        raise ValueError


def test_an_exception_that_has_no_text_is_described() -> None:
    def score() -> None:
        raise Silent

    text = describe_with_location(error_of(score))
    assert text.startswith("Silent: it has no text") and text.endswith(" in score")


def test_a_long_chain_of_causes_is_located() -> None:
    error = ValueError("the first cause")
    for number in range(3000):
        error.__traceback__ = None
        outer = RuntimeError(str(number))
        outer.__cause__ = error
        error = outer
    try:
        raise error
    except RuntimeError as raised:
        origin = locate_error(raised)
    assert origin.location.endswith("in test_a_long_chain_of_causes_is_located")
    assert "the first cause" in origin.traceback


def test_tracebacks_are_bounded() -> None:
    def score(depth: int) -> int:
        return score(depth + 1) if depth < 900 else score(len("x" * depth) / 0)

    assert len(locate_error(error_of(score, 0)).traceback) < 4100
    text = shorten("a" * 5000 + "b" * 5000, 1000)
    assert text.startswith("aaa") and text.endswith("bbb") and len(text) < 1010


def test_of_failures_of_one_kind_the_first_is_written(tmp_path: Path) -> None:
    def failure(reason: str, location: str, detail: str = "KeyError: 'x'") -> FirstFailure:
        return FirstFailure(group="rollout", reason=reason, detail=detail, location=location)

    written = [
        failure("reward_exception", "a.py:1 in f"),
        failure("reward_exception", "a.py:1 in f", "KeyError: 'y'"),
        failure("reward_exception", "a.py:2 in f"),
        failure("reward_timeout", "a.py:3 in f"),
        failure("reward_timeout", "a.py:4 in f"),
    ]
    writer = FailureWriter(tmp_path)
    for each in written:
        writer.write(each)
    writer.close()
    assert read_failures(tmp_path) == [written[0], written[2], written[3]]
    with (tmp_path / "failures.jsonl").open("ab") as file:
        file.write(b'[]\n{"group": 1}\n' + b"[" * 100_000 + b'\n{"torn')
    assert len(read_failures(tmp_path)) == 3
    assert written[3].headline == "reward_timeout: KeyError: 'x' at a.py:3 in f"


def test_failures_of_another_user_are_read_only_from_a_file_of_the_run(tmp_path: Path) -> None:
    assert read_failures(tmp_path) == []
    outside, run = tmp_path / "outside", tmp_path / "run"
    writer = FailureWriter(outside)
    writer.write(FirstFailure(group="rollout", reason="r", detail="private"))
    writer.close()
    run.mkdir()
    (run / FAILURES_FILE).symlink_to(outside / FAILURES_FILE)
    with pytest.raises(ConfigError, match="a link that leads out of"):
        read_failures(run)
    (run / FAILURES_FILE).unlink()
    os.mkfifo(run / FAILURES_FILE)
    with pytest.raises(ConfigError, match="a FIFO"):
        read_failures(run)
