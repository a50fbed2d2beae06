"""The queue's benchmark: every row of it runs, and its table says what is met and what is missed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

QUEUE = Path(__file__).parents[1] / "tools/bench/queue"


@pytest.fixture(scope="module")
def table() -> ModuleType:
    """A module of a folder that is run and no package."""
    spec = importlib.util.spec_from_file_location("queue_bench_table", QUEUE / "table.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_all_rows_run(tmp_path):
    words = [sys.executable, QUEUE, "--quick", "--json", "--folder", tmp_path]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    lines = json.loads(done.stdout.splitlines()[-1])["lines"]
    assert all(line["ours"] > 0 and line["peer"] is None for line in lines)
    parts = ("put", "get", "get while written", "get tcp", "get file", "p50, flush", "p99, commit", "slowest / fastest")
    assert all(any(part in line["what"] for line in lines) for part in parts)
    assert {line["unit"] for line in lines} >= {"GB/s", "ms", "samples/s", "MB a million"}


@pytest.mark.parametrize(
    ("about", "met", "ratios"),
    [
        ({"ours": 10.0, "peer": 2.0, "memcpy": 20.0, "targets": {"peer": 5.0, "memcpy": 0.4}}, True, (5.0, 0.5)),
        ({"ours": 10.0, "peer": 2.0, "memcpy": 40.0, "targets": {"peer": 5.0, "memcpy": 0.4}}, False, (5.0, 0.25)),
        ({"ours": 10.0, "targets": {"peer": 5.0}}, None, (None, None)),
        ({"ours": 10.0}, None, (None, None)),
        ({"ours": 0.5, "peer": 2.0, "targets": {"most": 1.0}, "less_is_better": True}, True, (4.0, None)),
        ({"ours": 2.0, "targets": {"most": 1.0}, "less_is_better": True}, False, (None, None)),
        ({"ours": 2.0, "targets": {"least": 2.0}}, True, (None, None)),
    ],
)
def test_targets_are_compared_with_what_was_measured(table, about, met, ratios):
    line = table.Line("it", "ms", **about)
    assert line.met() is met
    assert tuple(line.ratios().get(name) for name in ("peer", "memcpy")) == ratios
    assert {True: "met", False: "MISSED", None: ""}[met] == line.cells()[-1]


def test_a_line_is_followed_by_its_limit(table):
    lines = table.table([table.Line("a", "ms", 1.0, limit="light"), table.Line("b", "ms", 2.0, 3.0)])
    assert [text.split()[0] for text in lines] == ["what", "a", "limit:", "b"]
    assert len({text.index("ms") for text in lines if "ms" in text.split()}) == 1


def test_quantiles_are_values_that_were_seen(table):
    assert [table.quantile([3.0, 1.0, 2.0], share) for share in (0.01, 0.5, 0.99)] == [1.0, 2.0, 3.0]
    assert table.number(None) == "-" and table.number(1234.5) == "1,234" and table.number(0.05) == "0.05"
