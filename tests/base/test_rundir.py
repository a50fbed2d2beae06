"""Files of a run that many write at once: each appears whole, under a number of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from relax_hpc.base.rundir import write_atomic, write_json, write_numbered

WRITER = """
import sys
from pathlib import Path
from relax_hpc.base.rundir import write_numbered
for number in range(40):
    write_numbered(Path(sys.argv[1]), ".txt", f"{sys.argv[2]} {number} ".encode() * 100)
"""


def test_racing_writers_get_numbers_of_their_own_and_nobody_sees_half_a_file(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "requests"
    root = Path(__file__).resolve().parents[2]
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(folder), str(n)], cwd=root)
        for n in range(3)
    ]
    while any(writer.poll() is None for writer in writers):
        texts = [path.read_text() for path in folder.glob("*.txt")] if folder.exists() else []
        assert all(len(set(zip(*[iter(text.split())] * 2, strict=True))) == 1 for text in texts)
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    assert sorted(path.name for path in folder.iterdir()) == [
        f"{number:06d}.txt" for number in range(1, 121)
    ]
    assert len({path.read_text() for path in folder.iterdir()}) == 120


def test_numbers_go_on_after_the_highest_and_other_suffixes_count(tmp_path: Path) -> None:
    (tmp_path / "000007.answer.json").write_text("")
    (tmp_path / "notes.txt").write_text("")
    assert write_numbered(tmp_path, ".json").name == "000008.json"


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"b": 1}, sync=True)
    before = (tmp_path / "a.json").read_bytes()
    with pytest.raises(TypeError):
        write_json(tmp_path / "a.json", {"b": object()})
    with pytest.raises(FileNotFoundError):
        write_atomic(tmp_path / "missing" / "a", b"")
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    assert (tmp_path / "a.json").read_bytes() == before
