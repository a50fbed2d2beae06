"""Signs of life in files: whose they are, whether that process is gone, and what it is at."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from relax_hpc.net.rendezvous import life_signs
from relax_hpc.net.rendezvous.life_signs import (
    has_ended,
    process_identity,
    read_activity,
    write_activity,
)

SPEAKER = """
import sys
from pathlib import Path
from relax_hpc.net.rendezvous.life_signs import write_activity
write_activity(Path(sys.argv[1]), "warm start")
print("said", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def speaker(tmp_path):
    """Another process, which says what it loads and lives on."""
    words = [sys.executable, "-c", SPEAKER, str(tmp_path / "sign.json")]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    ) as process:
        assert process.stdout.readline() == b"said\n"
        yield process
        process.kill()


def test_a_process_that_was_killed_is_gone_before_anybody_has_waited_for_it(tmp_path, speaker):
    sign = json.loads((tmp_path / "sign.json").read_text())
    assert not has_ended(sign) and read_activity(tmp_path / "sign.json").startswith("warm start (")
    speaker.kill()
    # Until it is a zombie; nobody has reaped it.
    subprocess.run(
        ["/bin/sh", "-c", f"while ! grep -q ') Z' /proc/{speaker.pid}/stat; do :; done"], timeout=10
    )
    assert has_ended(sign) and read_activity(tmp_path / "sign.json") == ""
    speaker.wait(60)
    assert has_ended(sign)


def test_of_other_machines_and_namespaces_nothing_is_known():
    sign = process_identity() | {"pid": 1 << 22, "born": 7}
    assert has_ended(sign)
    assert not has_ended(sign | {"space": "another boot/4026531836"}) and not has_ended(
        {"time": 0.0}
    )


def test_a_pid_that_another_process_has_now_is_no_sign_of_life():
    assert not has_ended(process_identity()) and has_ended(
        process_identity() | {"born": process_identity()["born"] - 1}
    )


def test_what_a_process_is_at_is_said_until_it_is_over(tmp_path, monkeypatch):
    path = tmp_path / "preparing.json"
    assert read_activity(path) == ""
    write_activity(path, "warm start")
    assert read_activity(path) == "warm start (0 s)"
    write_activity(path, "")
    assert read_activity(path) == ""
    for text in (
        "{",
        "[]",
        '{"doing": "x"}',
        '{"doing": 7, "since": 1}',
        '{"doing": "x", "since": "now"}',
    ):
        path.write_text(text)
        assert read_activity(path) == ""
    monkeypatch.setattr(
        life_signs, "write_json", lambda *_: (_ for _ in ()).throw(OSError(28, "no room"))
    )
    write_activity(path, "goes on")
