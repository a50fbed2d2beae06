"""The table of survived faults: written only when asked for, one row a fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import fault_table


def test_lines_become_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RELAX_FAULT_TABLE", raising=False)
    fault_table.add("not kept", "het", "sglang")
    path = tmp_path / "faults"
    monkeypatch.setenv("RELAX_FAULT_TABLE", str(path))
    for fault, layout in (
        ("scancel", "jobs"),
        ("kill -9", "het"),
        ("scancel", "het"),
        ("scancel", "het"),
    ):
        monkeypatch.setattr("os.getuid", lambda layout=layout: 0 if layout == "het" else 1000)
        fault_table.add(fault, layout, "sglang" if fault == "scancel" else "transformers")
    assert fault_table.table(path.read_text().splitlines()).splitlines() == [
        "| Fault | `het` | `jobs` |",
        "| --- | --- | --- |",
        "| scancel | root | user |",
        "| kill -9 | root (transformers) |  |",
    ]
