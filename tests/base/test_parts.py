"""Files that grow are cut and compressed; whoever reads them sees every line once, in order."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from relax_hpc.base import log_rotation
from relax_hpc.base.log_rotation import (
    LogRotator,
    compress_rotated_file,
    find_own_log,
    read_all_lines,
    read_rotated_file,
    rotate_log,
    rotated_files,
)

WRITER = """
import os, subprocess, sys
from relax_hpc.roles.__main__ import redirect_output
from pathlib import Path
answers = os.dup(1)
redirect_output(Path(sys.argv[1]))
for batch in sys.stdin:
    for n in range(100):
        os.write(2, b"parent %d\\n" % (100 * int(batch) + n))
    code = f"for n in range(100): print('child', {100 * int(batch)} + n)"
    subprocess.run([sys.executable, "-S", "-c", code], check=True)
    os.write(answers, b"written\\n")
"""


def test_a_log_that_others_write_to_is_cut_and_they_go_on(tmp_path: Path) -> None:
    """Also processes that have inherited it, as engines do."""
    log, words = (
        tmp_path / "rank-0.log",
        [sys.executable, "-c", WRITER, str(tmp_path / "rank-0.log")],
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(words, cwd=Path(__file__).parents[2], **pipes) as process:
        for batch in range(4):
            process.stdin.write(b"%d\n" % batch)
            process.stdin.flush()
            assert process.stdout.readline() == b"written\n"
            assert log.stat().st_size < 4000 and rotate_log(log, 1000)
        process.stdin.close()
    assert process.returncode == 0 and len(rotated_files(log)) == 4
    lines = list(read_all_lines(log))
    for who in (b"parent", b"child"):
        assert [int(line.split()[1]) for line in lines if line.startswith(who)] == list(range(400))


def test_of_a_log_the_newest_parts_stay(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    for number in range(5):
        with log.open("ab") as file:
            file.write(b"%d\n" % number * 100)
        assert rotate_log(log, 100, kept=2) and log.read_bytes() == b""
    assert [part.name for part in rotated_files(log)] == ["a.log.000004.gz", "a.log.000005.gz"]
    assert not rotate_log(log, 100) and not rotate_log(tmp_path / "none.log", 100)
    assert set(read_all_lines(log)) == {b"3\n", b"4\n"}


def test_a_log_is_as_it_was_where_there_is_no_room_for_its_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "a.log"
    log.write_bytes(b"line\n" * 100)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(log_rotation.shutil, "copyfileobj", full)
    with pytest.raises(OSError, match="No space"):
        rotate_log(log, 100)
    assert list(tmp_path.iterdir()) == [log] and log.read_bytes() == b"line\n" * 100


def test_a_part_counts_once_while_it_is_compressed_and_damage_hides_no_other(
    tmp_path: Path,
) -> None:
    path = tmp_path / "spans.jsonl"
    for number in (1, 2, 3):
        path.with_name(f"spans.jsonl.{number:06d}").write_bytes(b"%d\n" % number)
    path.write_bytes(b"4\n")
    for name in ("spans.jsonl.backup", "spans.jsonl.1", "other.jsonl.000009"):
        (tmp_path / name).write_bytes(b"no part\n")
    compress_rotated_file(path.with_name("spans.jsonl.000001"))
    # Killed before it could remove what it has compressed.
    path.with_name("spans.jsonl.000002.gz").write_bytes(gzip.compress(b"2\n"))
    assert list(read_all_lines(path)) == [b"1\n", b"2\n", b"3\n", b"4\n"]
    assert [read_rotated_file(part) for part in rotated_files(path)] == [b"1\n", b"2\n", b"3\n"]
    os.truncate(path.with_name("spans.jsonl.000002.gz"), 5)
    assert list(read_all_lines(path)) == [b"1\n", b"3\n", b"4\n"]
    assert (
        list(read_all_lines(tmp_path / "nothing")) == []
        and rotated_files(tmp_path / "no/folder") == []
    )


def test_a_keeper_looks_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut = threading.Event()
    monkeypatch.setattr(log_rotation, "_CHECK_S", 0.01)
    monkeypatch.setattr(log_rotation, "ROTATION_BYTES", 100)
    real = log_rotation.rotate_log
    monkeypatch.setattr(log_rotation, "rotate_log", lambda path: real(path) and cut.set())
    keeper = LogRotator([tmp_path / "none.log"])
    log = tmp_path / "a.log"
    log.write_bytes(b"x" * 101)
    keeper.add(log)
    assert cut.wait(60)
    keeper.close()
    assert [part.name for part in rotated_files(log)] == ["a.log.000001.gz"]


@pytest.mark.parametrize(("name", "known"), [("actor.log", True), ("terminal.txt", False)])
def test_a_process_knows_its_own_log(tmp_path: Path, name: str, known: bool) -> None:
    code = (
        "import sys; from relax_hpc.base.log_rotation import find_own_log; "
        "sys.stderr.write(str(find_own_log()))"
    )
    with (tmp_path / name).open("ab") as file:
        words = [sys.executable, "-c", code]
        done = subprocess.run(
            words, stdout=file, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
        )
    assert (str(tmp_path / name) in done.stderr) == known
    assert find_own_log() == [] or find_own_log()[0].suffix == ".log"
