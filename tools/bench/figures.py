"""What benchmarks report: named figures against their targets, as a table and as one line of
JSON."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

_WIDTHS = (46, 10, 22, 10, 10, 6)
"""Known before, as figures are printed one by one."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number; `target` in words ("<= 0.05"), `ok` whether it was met, None where there
    is none."""

    name: str
    value: float
    unit: str
    target: str | None = None
    ok: bool | None = None
    rounds: Sequence[float] = ()
    """What every round gave, in the same unit; `value` is their median."""


def print_figures(
    figures: Iterable[Figure], settings: Mapping[str, object], as_json: bool
) -> list[Figure]:
    """Print a table for people, each figure as soon as ``figures`` gives it, with the load of the
    machine before.

    Returns them all. With ``as_json`` also {"figures": [...], "settings": {...}} as the last line:
    of all that were measured, whatever ended the rest.
    """
    found: list[Figure] = []
    about = {"cores": os.cpu_count(), "load_before": round(os.getloadavg()[0], 2)} | dict(settings)
    print(_line("figure", "value", "[rounds]", "unit", "target", ""), flush=True)
    try:
        for figure in figures:
            found.append(figure)
            verdict = {True: "ok", False: "MISSED", None: ""}[figure.ok]
            cells = (
                _short(figure.value),
                _spread(figure.rounds),
                figure.unit,
                figure.target or "",
                verdict,
            )
            print(_line(figure.name, *cells), flush=True)
    finally:
        print("settings: " + ", ".join(f"{key}={value}" for key, value in about.items()))
        if as_json:
            print_result(found, about)
    return found


def print_result(
    figures: Iterable[Figure], settings: Mapping[str, object], **details: object
) -> None:
    """Print the result of a benchmark as one line of JSON: {"figures", "settings"} and `details`.

    `columns` and `rows` among the details are the table of the documentation. Without them it has
    one row per figure.
    """
    lines = [asdict(figure) | {"value": _finite(figure.value)} for figure in figures]
    result = {"figures": lines, "settings": dict(settings), **details}
    print(json.dumps(result, allow_nan=False, default=str), flush=True)


def _line(name: str, value: str, *rest: str) -> str:
    words = [name.ljust(_WIDTHS[0]), value.rjust(_WIDTHS[1])]
    return "  ".join(
        words + [word.ljust(width) for word, width in zip(rest, _WIDTHS[2:], strict=True)]
    ).rstrip()


def _spread(rounds: Sequence[float]) -> str:
    return f"[{_short(min(rounds))} to {_short(max(rounds))}]" if len(rounds) > 1 else ""


def _short(value: float) -> str:
    """Four significant digits, never in scientific notation between 0.001 and a billion."""
    if value != 0 and math.isfinite(value) and not 1e-3 <= abs(value) < 1e9:
        return f"{value:.3e}"
    if not math.isfinite(value) or float(value).is_integer() or abs(value) >= 1e3:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
