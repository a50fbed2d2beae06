"""The queue's benchmark: every row of it runs, and its table says what is met and what is
missed."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.guardian import MEMORY, memory_prefix

pytestmark = pytest.mark.run

QUEUE = Path(__file__).parents[2] / "tools/bench/queue"


@pytest.fixture(scope="module")
def table() -> ModuleType:
    """A module of a folder that is run and no package."""
    spec = importlib.util.spec_from_file_location("queue_bench_table", QUEUE / "table.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def memory() -> Iterator[str]:
    """A folder whose syncs cost nothing: what a disk takes is not asked here."""
    with tempfile.TemporaryDirectory(prefix=memory_prefix(), dir=MEMORY) as folder:
        yield folder


def test_all_rows_run(memory):
    """Further than the 64 versions that engines may lag by default, at which two of them used to
    wait for ever."""
    words = [sys.executable, QUEUE, "--quick", "--json", "--folder", memory]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    lines = found["lines"]
    assert set(found["settings"]["loads"]) == set(
        re.findall(r"^-- (\w+) \(load [\d.]+\)$", done.stdout, re.M)
    )
    assert all(line["ours"] > 0 and line["peer"] is None for line in lines)
    parts = (
        "put",
        "get",
        "get while written",
        "get tcp",
        "get file",
        "p50, flush",
        "p99, commit",
        "slowest / fastest",
        "check again",
        "stream / alone",
    )
    assert all(any(part in line["what"] for line in lines) for part in parts)
    assert {line["unit"] for line in lines} >= {"GB/s", "ms", "samples/s", "MB/1e6"}


@pytest.mark.parametrize(
    ("about", "met", "ratios"),
    [
        (
            {"ours": 10.0, "peer": 2.0, "memcpy": 20.0, "targets": {"peer": 5.0, "memcpy": 0.4}},
            True,
            (5.0, 0.5),
        ),
        (
            {"ours": 10.0, "peer": 2.0, "memcpy": 40.0, "targets": {"peer": 5.0, "memcpy": 0.4}},
            False,
            (5.0, 0.25),
        ),
        ({"ours": 10.0, "targets": {"peer": 5.0}}, None, (None, None)),
        ({"ours": 10.0}, None, (None, None)),
        (
            {"ours": 0.5, "peer": 2.0, "targets": {"most": 1.0}, "less_is_better": True},
            True,
            (4.0, None),
        ),
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
    texts = [
        table.Line("a", "ms", 1.0, limit="light").text(),
        table.Line("b", "ms", 2.0, 3.0).text(),
    ]
    assert [text.split()[0] for text in "\n".join(texts).splitlines()] == ["a", "limit:", "b"]
    assert len({text.index("ms") for text in texts}) == 1 and table.head().index("unit") == texts[
        0
    ].index("ms")


def test_a_line_says_the_best_and_the_worst_of_its_rounds(table):
    line = table.Line("a", "ms", 2.0, 5.0, rounds=[3.0, 1.0, 2.0], peer_rounds=[5.0, 4.0, 6.0])
    assert line.cells()[2:6] == ["2", "[1 to 3]", "5", "[4 to 6]"]
    assert (line.record()["rounds"], line.record()["peer_rounds"]) == (
        [3.0, 1.0, 2.0],
        [5.0, 4.0, 6.0],
    )


def test_what_was_measured_is_printed_although_a_later_row_fails(memory):
    """Each row as it comes, and the JSON of all that there are."""
    words = [
        sys.executable,
        QUEUE,
        "--quick",
        "--json",
        "--folder",
        memory,
        "--rows",
        "claims",
        "--rows",
        "media",
    ]
    program = (
        "import runpy, sys; sys.path.insert(0, sys.argv[1]); import pictures; "
        "pictures.check_claim = None\n"
    )
    program += "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", program, *words[1:]], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1 and "TypeError" in done.stderr
    lines = json.loads(done.stdout.splitlines()[-1])["lines"]
    assert [line["what"] for line in lines][-1] == "controller's memory, 2,048 rows"
    assert all(line["what"] in done.stdout.rpartition("settings:")[0] for line in lines)


def test_quantiles_are_values_that_were_seen(table):
    assert [table.quantile([3.0, 1.0, 2.0], share) for share in (0.01, 0.5, 0.99)] == [
        1.0,
        2.0,
        3.0,
    ]
    assert (
        table.number(None) == "-"
        and table.number(1234.5) == "1,234"
        and table.number(0.05) == "0.05"
    )
