"""What each test file costs, and what it may: a session fails when one takes twice what was
recorded for it.

Counted are CPU seconds, of this process and of all children that have ended: they do not ask who
else uses the machine. Not wholly, though. On processors that are shared the same work takes more of
them, and whatever watches a run takes the longer the slower that is. So a fixed piece of work is
timed before and after each file, and the budget is multiplied by how much slower than at the
recording it went. `env/test.sh --record-budgets`, on a quiet machine, writes the record. Wall
seconds are recorded too, as workers begin with the files that take longest; nobody is judged by
them.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

RECORD = Path(__file__).with_name("budgets.json")
FLOOR_S = 10.0
"""Nobody is told of less."""
FACTOR = 2.0
KEPT_S = 2.0
"""Files that take less are not recorded: twice as much is below the floor anyway."""
_TURNS = 1_000_000
"""Of a loop: about 20 ms."""


def pace() -> float:
    """Wall seconds of a fixed piece of work, now."""
    began = time.perf_counter()
    for _ in range(_TURNS):
        pass
    return time.perf_counter() - began


def cpu_s() -> float:
    """Of this process, and of its children that have ended, and of theirs."""
    return sum(os.times()[:4])


@dataclass(slots=True)
class Cost:
    """What a file took in this session."""

    cpu_s: float = 0.0
    wall_s: float = 0.0
    paces: list[float] = field(default_factory=list)

    def slower(self, usual: float) -> float:
        """How much slower the machine was than one on which `pace` is ``usual``; at least 1."""
        return max(1.0, sum(self.paces) / len(self.paces) / usual) if self.paces and usual else 1.0


def over_budget(costs: Mapping[str, Cost], record: Mapping[str, Any]) -> Iterator[str]:
    """A line for each file that took more than it may."""
    for name, cost in sorted(costs.items()):
        budget, slower = record["cpu_s"].get(name, 0.0), cost.slower(record["pace_s"])
        allowed = max(FLOOR_S, FACTOR * budget) * slower
        if cost.cpu_s > allowed:
            yield (
                f"{name}: took {cost.cpu_s:.0f} CPU seconds, recorded are {budget:.0f}, allowed "
                f"{allowed:.0f} "
                f"({FACTOR:g} times that, at least {FLOOR_S:g}, on a machine {slower:.1f} times "
                "slower): make it "
                "cheaper (see CONTRIBUTING.md), or say why not and record it: env/test.sh "
                "--record-budgets"
            )


def recorded(costs: Mapping[str, Cost], record: Mapping[str, Any]) -> dict[str, Any]:
    """``record`` with the files of ``costs`` anew."""
    paces = [one for cost in costs.values() for one in cost.paces]
    kept = {
        name: spent
        for name, spent in record["cpu_s"].items()
        if name not in costs and Path(name).exists()
    }
    kept |= {name: round(cost.cpu_s, 1) for name, cost in costs.items() if cost.cpu_s >= KEPT_S}
    walls = {
        name: spent
        for name, spent in record["wall_s"].items()
        if name not in costs and Path(name).exists()
    }
    walls |= {name: round(cost.wall_s, 1) for name, cost in costs.items() if cost.wall_s >= KEPT_S}
    words = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(words, cwd=RECORD.parent, capture_output=True, text=True).stdout.strip()
    where = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    pace_s = round(sorted(paces)[len(paces) // 2], 5)
    head = {"machine": where, "commit": commit, "pace_s": pace_s}
    return head | {"cpu_s": dict(sorted(kept.items())), "wall_s": dict(sorted(walls.items()))}


class Budgets:
    """The pytest plugin. Workers of pytest-xdist measure, and send it with their reports; the
    session judges."""

    def __init__(self, config: pytest.Config, record: Path = RECORD) -> None:
        self.config, self.path = config, record
        self.record: dict[str, Any] = json.loads(record.read_text())
        self.costs: dict[str, Cost] = defaultdict(Cost)
        self.told: list[str] = []
        self._mark, self._file = cpu_s(), ""
        self._last = False

    def expected(self, path: Path) -> float:
        """Seconds that a file took when it was recorded."""
        name = os.path.relpath(path, self.config.rootpath)
        return self.record["wall_s"].get(name, 0.0)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Iterator[None]:
        self._mark, self._last = cpu_s(), nextitem is None or nextitem.path != item.path
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        report = yield
        now = cpu_s()
        report.cpu_s, self._mark = now - self._mark, now
        first, self._file = self._file != str(item.path), str(item.path)
        report.paces = [pace()] if first or (self._last and report.when == "teardown") else []
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        cost = self.costs[report.nodeid.partition("::")[0]]
        cost.cpu_s += getattr(report, "cpu_s", 0.0)
        cost.wall_s += report.duration
        cost.paces += getattr(report, "paces", [])

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(self.config, "workerinput") or not self.costs:
            return
        if self.config.getoption("record_budgets"):
            self.path.write_text(json.dumps(recorded(self.costs, self.record), indent=2) + "\n")
        elif not os.environ.get("RELAX_WHOLE"):
            self.told = list(over_budget(self.costs, self.record))
        if self.told and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.told:
            terminalreporter.section("test files over their budgets", red=True)
            for line in self.told:
                terminalreporter.line(line)
