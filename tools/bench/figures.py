"""What benchmarks report: named figures against their targets, as a table and as one line of JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number; `target` in words ("<= 0.05"), `ok` whether it was met, None where there is none."""

    name: str
    value: float
    unit: str
    target: str | None = None
    ok: bool | None = None


def print_figures(figures: Sequence[Figure], settings: Mapping[str, object], as_json: bool) -> None:
    """Print a table for people; with `as_json` also {"figures": [...], "settings": {...}} as the last line."""
    verdicts = {True: "ok", False: "MISSED", None: ""}
    head = ("figure", "value", "unit", "target", "")
    rows = [head, *((f.name, _short(f.value), f.unit, f.target or "", verdicts[f.ok]) for f in figures)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, value, *rest in rows:
        words = [name.ljust(widths[0]), value.rjust(widths[1])]
        words += [word.ljust(width) for word, width in zip(rest, widths[2:], strict=True)]
        print("  ".join(words).rstrip())
    print("settings: " + ", ".join(f"{key}={value}" for key, value in settings.items()))
    if as_json:
        lines = [asdict(figure) | {"value": _finite(figure.value)} for figure in figures]
        print(json.dumps({"figures": lines, "settings": dict(settings)}, allow_nan=False, default=str), flush=True)


def _short(value: float) -> str:
    """Four significant digits, never in scientific notation between 0.001 and a billion."""
    if value != 0 and math.isfinite(value) and not 1e-3 <= abs(value) < 1e9:
        return f"{value:.3e}"
    if not math.isfinite(value) or float(value).is_integer() or abs(value) >= 1e3:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
