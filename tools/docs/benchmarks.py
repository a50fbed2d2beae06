"""Tables of docs/ from stored results: each says what was measured, by which command, of which
commit, on what.

`python tools/bench samples --store` writes such a result: results/samples.json, with the commit
that is checked out, this machine and its load.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results")


def table(name: str) -> str:
    """The table of a stored result, and below it how it came about."""
    result = json.loads((RESULTS / f"{name}.json").read_text())
    lines = [
        _row(result["columns"]),
        "|---" * len(result["columns"]) + "|",
        *map(_row, result["rows"]),
    ]
    about = (
        f"Commit {result['commit']}, {result['date']}, {result['machine']}, load {result['load']}"
    )
    return "\n".join([*lines, "", f"{about}: `{result['command']}`"])


def _row(cells: list[Any]) -> str:
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def stored(output: str, command: str) -> dict[str, Any]:
    """A result of what a benchmark printed with --json, whose last line has "figures", or "columns"
    and "rows", and "settings"."""
    found = json.loads(output.strip().splitlines()[-1])
    columns = found.get("columns", ["what", "measured (least to most of the rounds)", "target"])
    rows = found.get("rows") or [
        [one["name"], _value(one), _verdict(one)] for one in found["figures"]
    ]
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    machine = f"{os.cpu_count()} cores, {platform.machine()}"
    return {
        "commit": subprocess.check_output(git, text=True).strip(),
        "date": time.strftime("%Y-%m-%d"),
        "machine": ", ".join(filter(None, [found["settings"].get("device"), machine])),
        "load": found["settings"].get("load_before", os.getloadavg()[0]),
        "command": command,
        "columns": columns,
        "rows": rows,
    }


def _value(figure: dict[str, Any]) -> str:
    rounds = figure.get("rounds") or []
    spread = f" ({_short(min(rounds))} to {_short(max(rounds))})" if len(rounds) > 1 else ""
    return f"{_short(figure['value'])} {figure['unit']}{spread}".strip()


def _short(value: float) -> str:
    """Three digits that count.

    >>> [_short(value) for value in (0.0123456, 94.5789, 7608.9)]
    ['0.0123', '94.6', '7,610']
    """
    return f"{float(f'{value:.3g}'):,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _verdict(figure: dict[str, Any]) -> str:
    met = {True: ": met", False: ": missed"}.get(figure.get("ok"), "")
    return f"{figure['target']}{met}" if figure.get("target") else ""
