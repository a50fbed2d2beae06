"""The table of docs/faults.md of what runs survive: tests add lines, and `python -m
tests.fault_table` prints it.

Nothing is kept unless RELAX_FAULT_TABLE names the file, as `env/test.sh --all` does.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from pathlib import Path

LAYOUTS = ("het", "jobs", "local")


def add(fault: str, layout: str, engine: str) -> None:
    """A run has survived `fault`, and its audit found nothing lost and nothing trained twice."""
    if path := os.environ.get("RELAX_FAULT_TABLE"):
        user = "root" if os.getuid() == 0 else "user"
        with Path(path).open("a") as file:
            file.write(
                json.dumps({"fault": fault, "layout": layout, "engine": engine, "user": user})
                + "\n"
            )


def table(lines: list[str]) -> str:
    """The faults in the order in which they came; in each layout, as whom they were survived, with
    SGLang if no other engine is named."""
    cells: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for line in map(json.loads, lines):
        engine = "" if line["engine"] == "sglang" else f" ({line['engine']})"
        cells[line["fault"]][line["layout"]].add(line["user"] + engine)
    layouts = [layout for layout in LAYOUTS if any(layout in row for row in cells.values())]
    rows = [["Fault", *(f"`{layout}`" for layout in layouts)], ["---"] * (1 + len(layouts))]
    for fault, row in cells.items():
        rows.append([fault, *(", ".join(sorted(row[layout])) for layout in layouts)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    print(table(Path(sys.argv[1]).read_text().splitlines()))
