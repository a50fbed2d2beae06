"""Shared memory that killed processes of MPICH and SGLang leave: removed, unless a process uses
it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from relax_hpc.base import orphaned_memory
from relax_hpc.base.orphaned_memory import sweep_orphaned_memory
from relax_hpc.base.rundir import RunDir
from relax_hpc.training.weights.node_cache import staging_root
from tests.plain_user import plain_user

USER = """
import mmap, os, sys
file = open(sys.argv[1], "r+b")
if sys.argv[2] == "mapped":
    mapped = mmap.mmap(file.fileno(), 0)
    file.close()
print("ready", flush=True)
sys.stdin.read()
"""

GUARDED = """
import sys
from relax_hpc.commands.guard import start_guard
from relax_hpc.base.rundir import RunDir
start_guard(RunDir(sys.argv[1]))
print("ready", flush=True)
sys.stdin.read()
"""


def test_the_guard_of_a_killed_run_clears_its_memory_and_holds_nothing(run_dir: Path) -> None:
    """A copy of a descriptor of the run would keep the run's lock."""
    staging = staging_root(RunDir(run_dir))
    staging.mkdir()
    reader, writer = os.pipe()
    command = [sys.executable, "-c", GUARDED, str(run_dir)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[writer]
    ) as run:
        assert run.stdout and run.stdout.readline() == b"ready\n"
        os.close(writer)
        (child,) = psutil.Process(run.pid).children()
        deadline = time.monotonic() + 60
        while psutil.pid_exists(child.pid) and child.num_fds() != 4:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        run.kill()
    assert os.read(reader, 1) == b""
    os.close(reader)
    child.wait(60)
    assert not staging.exists()


def test_only_unused_files_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orphaned_memory, "MEMORY", tmp_path)
    names = (
        "mpich_shm_1_0",
        "sglang_loads_x.shm",
        "mpich_shm_mapped",
        "sglang_loads_open",
        "psm_1",
        "other",
        f"sgl_shm_mm_{os.getpid()}_0a1b2c3d",
    )
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for kind in (f"sgl_shm_mm_{ended.pid}_0a1b2c3d", f"multi_tokenizer_args_{ended.pid}"):
        (tmp_path / kind).write_bytes(bytes(4096))
    for name in names:
        (tmp_path / name).write_bytes(bytes(4096))
    users = []
    for name, use in (("mpich_shm_mapped", "mapped"), ("sglang_loads_open", "open")):
        command = [sys.executable, "-c", USER, str(tmp_path / name), use]
        users.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
    try:
        for user in users:
            assert user.stdout and user.stdout.readline() == b"ready\n"
        sweep_orphaned_memory()
        assert {path.name for path in tmp_path.iterdir()} == {*names[2:]}
    finally:
        for user in users:
            user.communicate(timeout=60)
    sweep_orphaned_memory()
    assert {path.name for path in tmp_path.iterdir()} == {*names[4:]}


@pytest.mark.skipif(os.getuid() != 0, reason="makes files of another user")
def test_files_of_other_users_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orphaned_memory, "MEMORY", tmp_path)
    (tmp_path / "mpich_shm_1_0").touch()
    with plain_user() as other:
        os.chown(tmp_path / "mpich_shm_1_0", other.entry.pw_uid, other.entry.pw_gid)
    sweep_orphaned_memory()
    assert (tmp_path / "mpich_shm_1_0").exists()
