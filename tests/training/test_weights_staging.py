"""Weights in the memory of a node: made by one process, held by those that use them, cleared when
they are not."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from relax_hpc.base.errors import DeadlineError
from relax_hpc.base.rundir import RunDir
from relax_hpc.training.weights.node_cache import Staging, clear_staging, staging_root

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 20.0
USER = """
import sys, os
from pathlib import Path
from relax_hpc.training.weights.node_cache import Staging
root, name, made = sys.argv[1:]

def make(folder):
    if made == "dies":
        print("making", flush=True)
        sys.stdin.read()
    with open(made, "a") as file:
        file.write("made\\n")
    (folder / "w").write_bytes(b"w" * 100)

staged = Staging(Path(root)).get(name, make, 20.0)
print((staged.path / "w").read_bytes() == b"w" * 100, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "staging"


def make(folder: Path) -> None:
    (folder / "w").write_bytes(b"v" * 50)
    (folder / "small").write_bytes(b"s")


def user(root: Path, name: str, made: str | Path) -> subprocess.Popen:
    """A process that gets folder ``name`` and holds it until it is killed."""
    arguments = [sys.executable, "-c", USER, str(root), name, str(made)]
    return subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, text=True
    )


def end(*processes: subprocess.Popen) -> None:
    for process in processes:
        process.send_signal(signal.SIGKILL)
        process.communicate()


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_many_processes_make_a_version_once(root: Path, tmp_path: Path) -> None:
    users = [user(root, "v1", tmp_path / "made") for _ in range(4)]
    try:
        assert [process.stdout.readline() for process in users] == ["True\n"] * 4
        assert (tmp_path / "made").read_text() == "made\n"
    finally:
        end(*users)


def test_what_is_used_stays_until_its_user_has_died(root: Path, tmp_path: Path) -> None:
    held = user(root, "v1", tmp_path / "made")
    staging = Staging(root)
    assert held.stdout.readline() == "True\n"
    staging.get("v2", make, PATIENCE_S).release()
    staging.clear(lambda name: True)
    assert names(root) == [".spare", "v1", "v1.lock"]
    end(held)
    staging.clear(lambda name: True)
    assert names(root) == [".spare"]


def test_after_the_death_of_who_makes_it_the_next_one_does(root: Path) -> None:
    dying = user(root, "v1", "dies")
    assert dying.stdout.readline() == "making\n"
    got: list = []
    waiting = threading.Thread(target=lambda: got.append(Staging(root).get("v1", make, PATIENCE_S)))
    waiting.start()
    with pytest.raises(DeadlineError, match="v1: no process of this node has created it within 0"):
        Staging(root).get("v1", make, 0.0)
    end(dying)
    waiting.join(PATIENCE_S)
    assert (got[0].path / "w").read_bytes() == b"v" * 50
    got[0].release()


def test_what_cannot_be_made_leaves_nothing(root: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "w").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        Staging(root).get("v1", fail, PATIENCE_S)
    assert names(root) == ["v1.lock"]
    Staging(root).get("v1", make, PATIENCE_S).release()
    assert (root / "v1" / "w").exists()


def test_the_memory_of_a_version_is_used_again(root: Path) -> None:
    staging = Staging(root)
    staging.get("v1", make, PATIENCE_S).release()
    inode = (root / "v1" / "w").stat().st_ino
    staging.clear(lambda name: name < "v2")

    def again(folder: Path) -> None:
        staging.take_spare(folder / "w")

    with_spare = staging.get("v2", again, PATIENCE_S)
    assert (with_spare.path / "w").stat().st_ino == inode
    with_spare.release()
    with_spare.release()


def test_nothing_is_left_of_a_run(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    clear_staging(run)
    staged = Staging(staging_root(run)).get("v1", make, PATIENCE_S)
    clear_staging(run)
    assert staged.path.exists() and list(staged.path.iterdir())
    staged.release()
    clear_staging(run)
    assert not staging_root(run).exists()
