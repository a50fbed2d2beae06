"""A test file that costs twice what was recorded fails the session, with a line that says what to
do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.budgets import FLOOR_S, RECORD, Cost, over_budget, recorded

USUAL = {"pace_s": 0.01, "cpu_s": {"tests/test_a.py": 20.0, "tests/test_b.py": 1.0}}


@pytest.mark.parametrize(
    ("name", "cpu_s", "paces", "told"),
    [
        ("tests/test_a.py", 39.0, [0.01], False),
        ("tests/test_a.py", 41.0, [0.01], True),
        ("tests/test_a.py", 41.0, [0.01, 0.02], False),
        ("tests/test_a.py", 41.0, [0.005], True),
        ("tests/test_b.py", FLOOR_S - 1, [], False),
        ("tests/test_new.py", FLOOR_S + 1, [], True),
    ],
)
def test_twice_the_budget_on_a_machine_as_fast_is_too_much(
    name: str, cpu_s: float, paces: list[float], told: bool
) -> None:
    lines = list(over_budget({name: Cost(cpu_s, paces=paces)}, USUAL))
    assert len(lines) == told and all(name in line and "--record-budgets" in line for line in lines)


def test_what_was_not_run_keeps_its_budget() -> None:
    record = json.loads(RECORD.read_text())
    found = recorded(
        {"tests/project/test_budgets.py": Cost(50.0, 60.0, [0.02, 0.01, 0.03])}, record
    )
    assert found["cpu_s"] == dict(
        sorted((record["cpu_s"] | {"tests/project/test_budgets.py": 50.0}).items())
    )
    assert found["wall_s"] == dict(
        sorted((record["wall_s"] | {"tests/project/test_budgets.py": 60.0}).items())
    )
    assert found["pace_s"] == 0.02 and "cores" in found["machine"]


CONFTEST = """
from pathlib import Path
from tests import budgets

budgets.FLOOR_S = 0.5

def pytest_addoption(parser):
    parser.addoption("--record-budgets", action="store_true")

def pytest_configure(config):
    config.pluginmanager.register(budgets.Budgets(config, Path(__file__).with_name("record.json")))
"""
BURNS = """
import subprocess, sys

def test_burns():
    program = "import time\\nwhile time.process_time() < 0.6: pass"
    subprocess.run([sys.executable, "-c", program], check=True)
"""


def test_a_session_counts_what_children_burn_and_fails(tmp_path: Path) -> None:
    """Also where a worker has run the tests."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(BURNS)
    (tmp_path / "record.json").write_text(json.dumps({"pace_s": 1e6, "cpu_s": {}, "wall_s": {}}))
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
    ]
    words += ["-n", "1"] if find_spec("xdist") else []
    root = str(Path(__file__).parents[2])
    paths = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {name: value for name, value in os.environ.items() if name != "RELAX_WHOLE"} | {
        "PYTHONPATH": paths
    }
    done = subprocess.run(
        [*words, tmp_path], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1 and "1 passed" in done.stdout, done.stdout + done.stderr
    assert "test_it.py: took" in done.stdout
