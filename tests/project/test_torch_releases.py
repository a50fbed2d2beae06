"""The stored results of groups of one rank with other releases of torch than the lock's."""

from __future__ import annotations

import json
import re
from pathlib import Path

from packaging.version import Version

ROOT = Path(__file__).parents[2]
RUN = "tools/nightly/torch_releases.sh"


def test_groups_of_one_rank_ran_with_the_oldest_torch_and_a_newer_one() -> None:
    """The oldest is the one that setup.py allows; the newer one is newer than that of the lock."""
    stored = json.loads((ROOT / "tools/docs/results/torch_releases.json").read_text())
    releases = {Version(each["versions"]["torch"]).release: each for each in stored["releases"]}
    oldest = re.search(r'"torch>=([\d.]+)"', (ROOT / "setup.py").read_text())
    lock = re.search(r"^torch==([\d.]+)", (ROOT / "env/requirements-cpu.txt").read_text(), re.M)
    assert oldest and lock
    assert min(releases)[:2] == Version(oldest[1]).release[:2], RUN
    assert max(releases) >= Version(lock[1]).release, RUN
    for each in releases.values():
        assert each["failed"] == [] and each["passed"] > 100, RUN
        assert each["passed_by_file"]["tests/training/test_meeting.py"] > 5
        assert each["versions"]["megatron-core"] in (ROOT / "setup.py").read_text(), RUN
