"""The table of figures on a GPU: the rows of tools/gpu/rows.py, with what was stored of them by
tools/gpu/check.sh."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).parents[1]
RESULTS = TOOLS / "bench/results"
sys.path.append(str(TOOLS / "gpu"))

from rows import COLUMNS, ROWS  # noqa: E402


def table(device: str) -> str:
    """Of one ``device``, `gpu-nvidia-h100-80gb-hbm3`, or of each that figures are stored of; of
    none: the targets."""
    stored = sorted(RESULTS.glob(f"{device or 'gpu-*'}.json"))
    return "\n\n".join(map(_of, [json.loads(path.read_text()) for path in stored] or [{}]))


def _of(result: dict[str, Any]) -> str:
    lines = [
        COLUMNS,
        ("---",) * len(COLUMNS),
        *(row.cells(result.get("measured", {})) for row in ROWS),
    ]
    told = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    about = ", ".join(f"{name} {value}" for name, value in result.get("machine", {}).items())
    return f"{told}\n\n{about}: `tools/gpu/check.sh --store`" if about else told
