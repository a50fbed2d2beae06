"""Signs of life in files: whose they are, whether that process is gone, and what it is at."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from relax_hpc.net.rendezvous import life_signs
from relax_hpc.net.rendezvous.life_signs import identity, is_gone, said, say

SPEAKER = """
import sys
from pathlib import Path
from relax_hpc.net.rendezvous.life_signs import say
say(Path(sys.argv[1]), "warm start")
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
    assert not is_gone(sign) and said(tmp_path / "sign.json").startswith("warm start (")
    speaker.kill()
    # Until it is a zombie; nobody has reaped it.
    subprocess.run(
        ["/bin/sh", "-c", f"while ! grep -q ') Z' /proc/{speaker.pid}/stat; do :; done"], timeout=10
    )
    assert is_gone(sign) and said(tmp_path / "sign.json") == ""
    speaker.wait(60)
    assert is_gone(sign)


def test_of_other_machines_and_namespaces_nothing_is_known():
    sign = identity() | {"pid": 1 << 22, "born": 7}
    assert is_gone(sign)
    assert not is_gone(sign | {"space": "another boot/4026531836"}) and not is_gone({"time": 0.0})


def test_a_pid_that_another_process_has_now_is_no_sign_of_life():
    assert not is_gone(identity()) and is_gone(identity() | {"born": identity()["born"] - 1})


def test_what_a_process_is_at_is_said_until_it_is_over(tmp_path, monkeypatch):
    path = tmp_path / "preparing.json"
    assert said(path) == ""
    say(path, "warm start")
    assert said(path) == "warm start (0 s)"
    say(path, "")
    assert said(path) == ""
    for text in (
        "{",
        "[]",
        '{"doing": "x"}',
        '{"doing": 7, "since": 1}',
        '{"doing": "x", "since": "now"}',
    ):
        path.write_text(text)
        assert said(path) == ""
    monkeypatch.setattr(
        life_signs, "write_json", lambda *_: (_ for _ in ()).throw(OSError(28, "no room"))
    )
    say(path, "goes on")
