"""This version's benchmarks beside an older one's, on the same machine: each runs at both, one
after the other.

Either checkout measures itself by its own benchmarks, at their short size; what both of them call
by one name is compared. The older one is any commit, checked out beside this one, that needs no
other packages than these.

    git worktree add ../before 27b34ae
    python tools/bench/before_after.py ../before --json
    python tools/bench/before_after.py ../before --only queue --turns 3
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parents[2]
BENCHMARKS: dict[str, Sequence[str]] = {
    "queue": (
        "queue",
        "--rows",
        "fixed",
        "--rows",
        "small",
        "--rows",
        "latency",
        "--rows",
        "claims",
        "--rounds",
        "2",
    ),
    "overlap": (
        "overlap.py",
        "--ratios",
        "1",
        "--staleness",
        "0",
        "1",
        "--sigmas",
        "0",
        "--steps",
        "24",
    ),
    "hot_way": ("hot_way.py", "--shapes", "128x2", "--steps", "40"),
    "weights": ("weights.py", "--layers", "1", "--rounds", "3", "--readers", "--steps"),
    "recovery": (
        "recovery.py",
        "--layout",
        "het",
        "--policy",
        "toolkit",
        "--fault",
        "kill:actor",
        "--repeat",
        "2",
    ),
}
"""Name -> program in tools/bench and what it is told, about a minute each."""
FAULT_COLUMNS = {
    "detect": "s",
    "working": "s",
    "caught_up": "s",
    "lost": "samples",
    "duplicated": "samples",
}
"""Of a fault that the run recovers from -> their units."""
_LESS = ("s", "ms", "ms/step", "MB", "MiB", "MB/1e6", "samples")
"""Units of what is better if it is less, where no target says so."""
_RUN_S = 600.0
_WIDTHS = (60, 32, 32, 13)


@dataclass(frozen=True, slots=True)
class Measured:
    """Rounds of one figure."""

    unit: str
    values: Sequence[float]
    less_is_better: bool

    @property
    def text(self) -> str:
        spread = (
            f" ({min(self.values):.3g} to {max(self.values):.3g})" if len(self.values) > 1 else ""
        )
        return f"{median(self.values):.3g} {self.unit}".strip() + spread

    def with_(self, other: Measured | None) -> Measured:
        """Of both."""
        return Measured(
            self.unit, [*(other.values if other else ()), *self.values], self.less_is_better
        )

    def times_as_good_as(self, other: Measured) -> str:
        now, before = median(self.values), median(other.values)
        least, most = (now, before) if self.less_is_better else (before, now)
        return f"{most / least:.2f}" if least else "same" if not most else "-"


Found = dict[str, Measured]
"""By name."""


def measure(root: Path, name: str) -> Found:
    """What the benchmark ``name`` of a checkout says. RuntimeError: it printed no figures."""
    program, *words = BENCHMARKS[name]
    command = [sys.executable, f"tools/bench/{program}", *words, "--json"]
    environment = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, timeout=_RUN_S
    )
    try:
        return found_in(json.loads(done.stdout.strip().rpartition("\n")[2]))
    except ValueError:
        end = (done.stdout + done.stderr)[-500:]
        raise RuntimeError(
            f"{name} of {root}: exit code {done.returncode}, no figures; it ends with {end}"
        ) from None


def found_in(said: Any) -> Found:
    """Of the last line of a benchmark of any kind."""
    if isinstance(said, list):
        name = "G/T {ratio:g}, sigma {sigma:g}, staleness {staleness}: ideal / step"
        return {
            name.format(**one["case"]): Measured("", [one["efficiency"]], False) for one in said
        }
    if "lines" in said and "figures" not in said:
        return {
            one["what"]: _measured(one, one["ours"], "most" in one["targets"])
            for one in said["lines"]
        }
    if "records" in said and "figures" not in said:
        faults = [
            (record["fault"], column, record[column])
            for record in said["records"]
            for column in FAULT_COLUMNS
        ]
        found: Found = {}
        for fault, column, value in faults:
            if value is not None:
                name, one = f"{fault}: {column}", Measured(FAULT_COLUMNS[column], [value], True)
                found[name] = one.with_(found.get(name))
        return found
    figures = said["figures"]
    # The machine's load is in some names.
    names = [re.sub(r", load [\d.]+", "", figure["name"]) for figure in figures]
    values = [
        _measured(figure, figure["value"], (figure["target"] or "").startswith("<"))
        for figure in figures
    ]
    return dict(zip(names, values, strict=True))


def _measured(one: dict[str, Any], value: float, less_is_better: bool) -> Measured:
    return Measured(one["unit"], one["rounds"] or [value], less_is_better or one["unit"] in _LESS)


def cells(before: Found, now: Found) -> Iterator[list[str]]:
    """Rows of a table: what both have measured, both, and how many times as good it is now."""
    for name in now:
        if name in before:
            old, new = before[name], now[name]
            yield [name, old.text, new.text, new.times_as_good_as(old)]


def compare(before: Path, name: str, turns: int) -> list[list[str]]:
    """Rows of the benchmark ``name``, run at both in turns."""
    sides: dict[Path, Found] = {before: {}, HERE: {}}
    for _ in range(turns):
        for root, found in sides.items():
            found |= {what: one.with_(found.get(what)) for what, one in measure(root, name).items()}
    return [[f"{name}: {what}", *rest] for what, *rest in cells(sides[before], sides[HERE])]


def commit_of(root: Path) -> str:
    return subprocess.check_output(
        ["git", "-C", str(root), "rev-parse", "--short", "HEAD"], text=True
    ).strip()


def main() -> int:
    """Measure and print; 1 if a benchmark did not come to an end."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path, help="another checkout of this repository")
    parser.add_argument("--only", nargs="+", choices=list(BENCHMARKS), default=list(BENCHMARKS))
    parser.add_argument("--turns", type=int, default=1, help="of both, for each benchmark")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args()
    before, load, failed = options.before.resolve(), round(os.getloadavg()[0], 2), 0
    columns = ["what", f"before, {commit_of(before)}", f"now, {commit_of(HERE)}", "times as good"]
    table: list[list[str]] = []
    print(
        "  ".join(name.ljust(width) for name, width in zip(columns, _WIDTHS, strict=True)),
        flush=True,
    )
    for name in options.only:
        try:
            found = compare(before, name, options.turns)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            print(error, file=sys.stderr, flush=True)
            failed, found = 1, []
        for row in found:
            print(
                "  ".join(cell.ljust(width) for cell, width in zip(row, _WIDTHS, strict=True)),
                flush=True,
            )
        table += found
    if options.json:
        print(
            json.dumps({"columns": columns, "rows": table, "settings": {"load_before": load}}),
            flush=True,
        )
    return failed


if __name__ == "__main__":
    sys.exit(main())
