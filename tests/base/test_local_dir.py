"""Scratch on a node's own disk: whose process is gone goes, and what may be another's stays."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from relax_hpc.base import local_dir
from relax_hpc.base.local_dir import LOCAL_DIR, Scratch


def test_scratch_of_a_killed_process_goes_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the site's folder has too long a name for sockets in it."""
    monkeypatch.setenv(LOCAL_DIR, str(tmp_path / ("disk" * 16)))
    outside = tmp_path / "in-memory"
    outside.touch()
    script = (
        "import os, sys; from pathlib import Path; from relax_hpc.base.local_dir import Scratch; "
        "one = Scratch()\n"
    )
    script += "print(one.path, flush=True); one.remove_on_close(Path(sys.argv[1])); os.kill(os.getpid(), 9)"
    killed = subprocess.run(
        [sys.executable, "-c", script, outside], capture_output=True, text=True, timeout=60
    )
    left = Path(killed.stdout.strip())
    assert left.exists() and outside.exists() and len(str(left / "tmpabcdefgh")) < 107
    with Scratch() as scratch:
        assert not left.exists() and not outside.exists()
        with Scratch() as other:
            assert scratch.path.exists() and other.path != scratch.path
    assert not scratch.path.exists() and not other.path.exists()


def test_scratch_of_another_boot_goes_and_of_others_who_may_live_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LOCAL_DIR, str(tmp_path))
    monkeypatch.setattr(local_dir, "_MAX_PATH_CHARS", 1000)
    host, boot, pids = local_dir._marks()
    outside = tmp_path / "in-memory"
    outside.touch()

    def left(*marks: str) -> Path:
        path = tmp_path / f"scratch-{''.join(marks)}-{dead.pid}-x"
        path.mkdir()
        (path / ".outside").write_text(f"{outside}\n")
        return path

    with subprocess.Popen(["true"]) as dead:
        pass
    booted = left(host, "0000" if boot != "0000" else "0001", pids)
    others = [left("0000" if host != "0000" else "0001", boot, pids), left(host, boot, "fffff")]
    with Scratch() as scratch:
        assert sorted(tmp_path.iterdir()) == sorted([*others, outside, scratch.path])
    assert not booted.exists() and outside.exists(), "its name may be another's in this boot"
    here = left(host, boot, pids)
    local_dir.remove_orphaned_scratch(tmp_path)
    assert not here.exists() and not outside.exists()
