"""What tests take for the write of a process that had ended: its requests, not what a controller
does by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relax_hpc.base.rundir import RunDir
from tests.runs import late_writes

OVER = [
    {"op": "register", "group": "hub", "incarnation": 1},
    {"op": "down", "group": "hub", "incarnation": 1},
]


@pytest.mark.parametrize(
    ("record", "late"),
    [
        ({"op": "put", "owner": ["hub", 1], "key": "hub-i000001-7-abc#1"}, True),
        ({"op": "put", "owner": ["hub", 2], "key": "hub-i000002-7-abc#1"}, False),
        ({"op": "gathered", "owner": ["hub", 1], "end": 3, "files": []}, False),
    ],
)
def test_a_controller_may_end_its_own_work_after_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: dict[str, Any], late: bool
) -> None:
    monkeypatch.setattr(late_writes, "journal_records", lambda run: [*OVER, record])
    assert bool(late_writes.late_writes(RunDir(tmp_path))) == late
