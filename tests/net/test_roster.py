"""The run directory and the roster: incarnations are taken once, secrets stay secret."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.protocol import PROTOCOL, RUN_FORMAT
from relax_hpc.base.rundir import RunDir
from relax_hpc.config import load_resolved
from relax_hpc.net.rendezvous.roster import GroupCard, claim_incarnation, latest_card, publish_card
from tests.helpers.queue_helpers import make_run

RACER = """
import sys
from pathlib import Path
from relax_hpc.net.rendezvous.roster import claim_incarnation
from relax_hpc.base.rundir import RunDir
run = RunDir(Path(sys.argv[1]))
run.create()
print(run.token().decode(), *(claim_incarnation(run, "actor") for _ in range(50)))
"""


def test_racing_processes_never_take_the_same_incarnation_or_make_two_tokens(tmp_path):
    words = [sys.executable, "-c", RACER, str(tmp_path / "run")]
    root = Path(__file__).resolve().parents[2]
    racers = [
        subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=root) for _ in range(3)
    ]
    answers = [racer.communicate(timeout=30)[0].split() for racer in racers]
    assert len({answer[0] for answer in answers}) == 1
    assert sorted(int(incarnation) for answer in answers for incarnation in answer[1:]) == list(
        range(1, 151)
    )


def test_the_highest_published_incarnation_is_followed(tmp_path):
    run = make_run(tmp_path / "run")
    assert latest_card(run, "hub") is None
    for _ in range(3):
        incarnation = claim_incarnation(run, "hub")
    assert latest_card(run, "hub") is None, "claimed is not published"
    for published in (incarnation, 1):
        publish_card(run, GroupCard("hub", published, [], f"tcp://127.0.0.1:{published}"))
    assert latest_card(run, "hub") == GroupCard("hub", 3, [], "tcp://127.0.0.1:3")


def test_only_the_user_may_enter_a_run_and_read_its_token(tmp_path):
    (tmp_path / "run").mkdir(mode=0o755)
    run = make_run(tmp_path / "run")
    assert stat.S_IMODE(run.root.stat().st_mode) == 0o700
    assert stat.S_IMODE(run.token_file.stat().st_mode) == 0o600
    token = run.token()
    run.create()
    assert run.token() == token and len(token) == 64
    assert [path.name for path in run.root.glob(".token*")] == []


@pytest.mark.parametrize("text", ["", "short\n"])
def test_a_token_that_is_none_is_refused(tmp_path, text):
    run = make_run(tmp_path / "run")
    run.token_file.write_text(text)
    with pytest.raises(ConfigError, match="token"):
        run.token()
    with pytest.raises(ConfigError, match="token"):
        RunDir(tmp_path / "nowhere").token()


def test_code_of_another_protocol_is_named(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.rendezvous("hub").mkdir(parents=True)
    publish_card(run, GroupCard("hub", 3, [], "tcp://127.0.0.1:3", PROTOCOL + 1))
    card = latest_card(run, "hub")
    assert card is not None
    with pytest.raises(
        ConfigError,
        match=f"this code has protocol {PROTOCOL}, hub incarnation 3 has {PROTOCOL + 1}",
    ):
        card.check_protocol()


@pytest.mark.parametrize(
    ("journal", "says", "found"),
    [
        ("epoch-000001.journal", "", 1),
        ("inc-000001.journal", "", 2),
        ("inc-000001.journal", '{"format": 2}', 2),
        ("inc-000001.journal", f'{{"format": {RUN_FORMAT + 1}}}', RUN_FORMAT + 1),
    ],
)
def test_a_run_of_another_format_is_not_gone_on_with(
    tmp_path: Path, journal: str, says: str, found: int
) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    run.check_format()
    (run.root / "format.json").unlink()
    run.check_format()
    (run.journal / journal).write_bytes(b"")
    if says:
        (run.root / "format.json").write_text(says)
    with pytest.raises(
        ConfigError, match=f"found a run of format {found}, this code reads {RUN_FORMAT}; .*convert"
    ):
        load_resolved(run.root)
