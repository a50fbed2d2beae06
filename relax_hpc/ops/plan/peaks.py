"""Peaks that GPU runs have had, where tools/gpu/check.sh --store has left some, beside what was
worked out for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.foreign_files import read_json_object

RESULTS = Path(__file__).parents[3] / "tools/bench/results"
"""Folder of the results in a checkout of this code; an installation has none."""


def basis(folder: Path = RESULTS) -> str:
    """Basis of a plan, in a sentence."""
    about = "not measured: worked out by the formulas of docs/reference/memory.md; "
    found = "; ".join(_peaks(folder))
    return about + (
        f"peaks of GPU runs: {found}" if found else "no peak of a GPU run of this code is stored"
    )


def _peaks(folder: Path) -> Iterator[str]:
    for path in sorted(folder.glob("gpu-*.json")):
        try:
            result = read_json_object(path)
            machine = f"{result['machine']['device']}, commit {result['machine']['commit']}"
            for job, figures in result["measured"].items():
                if {"memory_gib", "worked_out_gib"} <= figures.keys():
                    peak, ours = figures["memory_gib"], figures["worked_out_gib"]
                    yield f"{peak:.1f} GiB, worked out {ours:.1f} ({job}; {machine})"
        except (ConfigError, ValueError, LookupError, AttributeError, TypeError):
            continue
