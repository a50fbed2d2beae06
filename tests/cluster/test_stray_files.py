"""What somebody leaves in a run directory, or leaves half written: it is answered or left alone,
and ends nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.slurm.submissions import Ledger, Submission
from relax_hpc.cluster.supervise import launch_records, requests
from relax_hpc.cluster.supervise.attempts import latest_attempt, new_attempt
from relax_hpc.cluster.supervise.incarnations import _nodes
from relax_hpc.cluster.supervise.lease import Lease, lease_holder, read_outcome
from relax_hpc.cluster.supervise.requests import GroupRequest
from relax_hpc.commands.run_setup import check_resumable, reopen
from relax_hpc.config import Config, dump, load_resolved
from relax_hpc.net.rendezvous.exit_mark import write_exit_mark
from relax_hpc.net.rendezvous.roster import (
    GroupCard,
    claim_incarnation,
    latest_card,
    latest_incarnation,
    publish_card,
)
from relax_hpc.ops.observe import status_groups
from relax_hpc.ops.observe.status import last_checkpoint, status
from relax_hpc.queue.client import QueueClient
from tests.helpers.queue_helpers import Roles, in_thread, make_run, small
from tests.helpers.stray_files import ODD, WRONG, leave


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = make_run(tmp_path / "run")
    dump(Config(), run.config)
    return run


@pytest.mark.parametrize(
    "content", [*ODD, b'{"op": "restart"}', b'{"op": "dance", "group": "actor"}']
)
def test_what_is_no_request_is_answered_and_other_files_are_left_alone(run, content):
    folder = run.root / "requests"
    good = requests.send_request(run, "restart", "actor")
    leave(folder / "000002.json", content)
    for name in (
        "notes.json",
        "000001.json~",
        "1.json",
        "0000001.json",
        "backup.answer.json",
        "².json",
    ):
        leave(folder / name, content)
    assert (
        requests.pending_requests(run, lambda _: True)
        == [good]
        == requests.pending_requests(run, lambda _: True)
    )
    answer = requests.wait_for_answer(run, GroupRequest(2, "", ""), 1.0)
    assert "000002.json: no request: op must be one of release, restart, start" in answer["error"]
    assert {path.name for path in folder.glob("*.answer.json")} == {
        "000002.answer.json",
        "backup.answer.json",
    }
    assert requests.send_request(run, "start", "rollout-2").number == 3


@pytest.mark.parametrize("content", [c for c in [*ODD, WRONG] if c is not None])
def test_a_stop_that_nobody_asked_for_is_none_and_a_right_one_takes_its_place(run, content):
    leave(run.stop, content)
    assert requests.read_stop_request(run) == {}
    requests.request_stop(run, 93, "in circles")
    assert requests.read_stop_request(run) == {"code": 93, "reason": "in circles"}


@pytest.mark.parametrize("content", [*ODD, WRONG])
def test_what_groups_tell_each_other_is_read_where_it_is_sound(run, content):
    assert claim_incarnation(run, "actor") == 1
    publish_card(run, GroupCard("actor", 1, [{"node": "n1"}]))
    folder = run.rendezvous("actor")
    for name in (
        "inc-000002.json",
        "beat-actor.json",
        "inc-000001.launch.json",
        "inc-x.json",
        "outcome-7.json",
    ):
        leave(folder / name, content)
    leave(run.rendezvous("notes"), b"a file among folders")
    leave(run.exit_mark("actor", 1, "actor"), content)
    config = Config()
    assert (
        latest_card(run, "actor") == GroupCard("actor", 1, [{"node": "n1"}])
        and _nodes(run, "actor", 1) == 1
    )
    assert latest_incarnation(run, "actor") == 1 and latest_incarnation(run, "notes") == 0
    assert launch_records.members_of(run, config) == list(config.groups)
    assert (
        launch_records.last_beat_s(run, "actor") == float("inf")
        and status_groups._beats(run, "actor", 1, {}) == []
    )
    assert (
        launch_records.read_launch(run, "actor", 1) is None
        and launch_records.read_mark(run, "actor", 1, "actor") == {}
    )
    assert (
        not launch_records.all_ended(run, config, "actor")
        and read_outcome(run, "actor", "7") is None
    )
    assert status(run, 0.1)["groups"]["actor"]["state"] in ("absent", "ended")
    if content is not None:
        write_exit_mark(run.exit_mark("actor", 1, "actor"), 75, "it says so")
        assert launch_records.read_mark(run, "actor", 1, "actor")["code"] == 75


@pytest.mark.parametrize("content", [c for c in [*ODD, WRONG] if c is not None])
def test_a_lease_of_anything_stands_still(run, content):
    claim_incarnation(run, "supervisor")
    leave(run.rendezvous("supervisor") / "lease", content)
    lease = Lease(run, "supervisor", Config().liveness, "node")
    assert not lease.is_free() and lease.former == 1 and lease_holder(run, "supervisor") == {}


@pytest.mark.parametrize("content", [*ODD, WRONG, b'{"job": "7"}'])
def test_the_ledger_knows_the_jobs_that_were_entered(run, content):
    ledger = Ledger(run)
    ledger.add(Submission("41", "run"))
    leave(ledger.folder / "000002.json", content)
    for name in ("1.json", "7notes.json", "000001.json.orig"):
        leave(ledger.folder / name, content)
    ledger.add(Submission("42", "group", "actor"))
    assert [entry.job for entry in ledger.entries()] == ["41", "42"]
    assert [path.name for path in sorted(ledger.folder.glob("00000*.json"))][-1] == "000003.json"


def test_numbers_are_taken_from_what_has_one(run):
    for name in ("7.bak", "old", "0000000009"):
        leave(run.root / "attempts" / name, b"")
    before = latest_attempt(run)
    assert new_attempt(run) == 1 and latest_attempt(run) == max(1, before)
    for name in ("i-step-backup", "i000001-step-000004.old", "i000001-step-000002"):
        leave(run.checkpoints / name / "COMPLETE.json", b"{}")
    assert last_checkpoint(run, load_resolved(run.root))["step"] == 2
    check_resumable(run, load_resolved(run.root))


@pytest.mark.parametrize("content", [c for c in [*ODD, WRONG] if c is not None])
def test_a_finished_run_is_shown_and_reopened(run, content):
    leave(run.finished, content)
    leave(run.exit_mark("actor", 1, "actor"), content)
    assert status(run, 0.1)["state"] == "finished"
    reopen(run)


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"a: [",
        b"nonsense: 1\n",
        b"actor: 7\n",
        b"7\n",
        b"\xff",
        b"steps: true\n",
        b"a: &a [*a]\n",
    ],
)
def test_a_change_that_is_none_is_left_out_and_said(run, capsys, content):
    folder = run.root / "changes"
    leave(folder / "000001-actor.yaml", b"actor: {max_tokens_per_micro_batch: 77}\n")
    leave(folder / "000002-actor.yaml", content)
    leave(folder / "000003-actor.yaml", b"actor: {balance_window: 3}\n")
    leave(folder / "notes.yaml", content)
    config = load_resolved(run.root, "actor")
    assert (config.actor.max_tokens_per_micro_batch, config.actor.balance_window) == (77, 3)
    assert capsys.readouterr().err.count(f"left out: {folder}/000002-actor.yaml") == 1
    run.config.write_bytes(content)
    with pytest.raises(ConfigError):
        load_resolved(run.root)


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "tcp://",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:x",
        "tcp://[::1",
        "tcp://127.0.0.1:99999999",
        "ü",
    ],
)
def test_a_client_outlives_cards_that_lead_nowhere(run, endpoint):
    publish_card(run, GroupCard("hub", claim_incarnation(run, "hub"), [], endpoint))
    with QueueClient(run, small(), "actor", 1) as actor:
        asked = actor.connection.submit("resume", timeout=20.0, step=0)
        leave(run.rendezvous("hub") / "inc-000009.json", b"{")
        with in_thread(run, small()):
            assert asked.result(timeout=15) is not None


def test_a_controller_starts_among_strange_files(run):
    for folder in (
        run.shards,
        run.journal,
        run.media,
        run.journal.with_name("snapshots"),
        run.root / "queue",
    ):
        for name in ("notes.txt", ".hidden", "rollout-i000001-000001.h5.orig"):
            leave(folder / name, b"what is that?")
        leave(folder / "folder", None)
    for step in range(2):
        with in_thread(run, small()), Roles(run, small()) as roles:
            roles.start() if step == 0 else None
            roles.step(step)
