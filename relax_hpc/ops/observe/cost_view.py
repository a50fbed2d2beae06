"""Tables of `relax-hpc report` about the cost of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from relax_hpc.ops.observe.text_table import Column, aligned

_GIB = 1 << 30


def cost_lines(cost: Mapping[str, Any]) -> Iterator[str]:
    """Table of the cost by group, and lines of the cost per token and per point of a score."""
    if not cost["groups"]:
        return
    columns = [
        Column("COST"),
        Column(f"{cost['unit'].upper()}-HOURS", is_number=True),
        Column("CPU-HOURS", is_number=True),
        Column("PEAK MEMORY", is_number=True),
        Column("GPU USE", is_number=True),
        Column("GPU KWH", is_number=True),
        Column("NODE KWH", is_number=True),
        Column("GPU ERRORS"),
    ]
    rows = [_row(name, group) for name, group in cost["groups"].items()]
    yield ""
    yield from aligned(columns, rows)
    yield from _ratios(cost)


def _row(name: str, group: Mapping[str, Any]) -> list[str]:
    memory, use = group["peak_memory_bytes"], group["gpu_utilization"]
    errors = [f"{count} x {code}" for code, count in group["gpu_errors"].items()]
    return [
        name,
        f"{group['hours']:.3g}",
        f"{group['cpu_hours']:.3g}",
        f"{memory / _GIB:.1f} GiB" if memory else "-",
        "-" if use is None else f"{use:.0%}",
        _number(group["gpu_kwh"]),
        _number(group["slurm_kwh"]),
        ", ".join(errors) or "-",
    ]


def _ratios(cost: Mapping[str, Any]) -> Iterator[str]:
    unit = f"{cost['unit']}-hours"
    if cost["hours_per_million_tokens"] is not None:
        yield (
            f"per million trained tokens: {_number(cost['hours_per_million_tokens'])} {unit}"
            f"{_energy(cost['kwh_per_million_tokens'])}"
        )
    for score in cost["scores"]:
        change = f"{score['tag']} from {score['first']:.3f} to {score['last']:.3f}"
        if score["hours_per_point"] is None:
            yield f"per point: {change}, no gain"
            continue
        yield (
            f"per point (0.01): {_number(score['hours_per_point'])} {unit}"
            f"{_energy(score['kwh_per_point'])}; {change}"
        )


def _energy(kwh: float | None) -> str:
    return "" if kwh is None else f", {kwh:.3g} kWh"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
