"""Writers on a disk that takes nothing for a while: each of them waits, says so, and loses
nothing."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from relax_hpc.base import disk_waits
from relax_hpc.base.disk_waits import (
    CURES,
    WAITS,
    AppendFile,
    describe_wait,
    is_temporary,
    probe_folder,
    retry_write,
)
from relax_hpc.base.errors import EXIT_DONE, EXIT_RETRY, FencedError, RelaxError
from relax_hpc.base.rundir import write_atomic
from relax_hpc.base.versions import Version
from relax_hpc.cluster.supervise import disk_watch
from relax_hpc.cluster.supervise.disk_watch import DiskWatch
from relax_hpc.cluster.supervise.supervisor import Supervisor
from relax_hpc.commands.program import main
from relax_hpc.net.rendezvous.exit_mark import write_exit_mark
from relax_hpc.queue.controller.journal import Journal
from relax_hpc.queue.controller.journal import _read as journal_frames
from relax_hpc.queue.storage.media import MediaStore
from tests.effort import effort
from tests.helpers.queue_helpers import (
    BUDGET,
    GIVES,
    HubProcess,
    Roles,
    in_thread,
    learned,
    make_run,
    rows_of,
    small,
)
from tests.helpers.small_disk import small_disk

pytestmark = pytest.mark.run

ERRORS = sorted(CURES)
SYNCS = ("fsync", "fdatasync")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_waits, "_MAX_PAUSE_S", 0.1)


class Failing:
    """Calls of some functions of `os` fail with ``number`` while it is `on`, where they concern
    files in ``folder``."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, folder: Path, number: int, names: tuple[str, ...]
    ) -> None:
        self.folder, self.number = folder, number
        self.on, self.times = True, 0
        for name in names:
            monkeypatch.setattr(os, name, self._wrapped(getattr(os, name)))

    def _wrapped(self, real: Callable) -> Callable:
        def call(descriptor: int, *rest: Any) -> Any:
            if self.on and Path(f"/proc/self/fd/{descriptor}").readlink().is_relative_to(
                self.folder
            ):
                self.times += 1
                raise OSError(self.number, os.strerror(self.number))
            return real(descriptor, *rest)

        return call

    @contextmanager
    def while_failing(self) -> Iterator[None]:
        """For the body, and until it is tried in vain twice more."""
        yield
        wait_for(lambda: self.times > 1)
        self.on = False


def wait_for(condition: Callable[[], Any], seconds: float = 10.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "never"
        time.sleep(0.005)
    return value


# -- the mechanism ---------------------------------------------------------------------------------


@pytest.mark.parametrize("number", ERRORS)
def test_a_write_is_tried_again_until_it_succeeds(tmp_path: Path, number: int) -> None:
    left, told = [1, 1, 1], []

    def write() -> str:
        if left:
            left.pop()
            raise OSError(number, os.strerror(number))
        told.append(WAITS.longest())
        return "done"

    assert retry_write(tmp_path / "file", write) == "done"
    assert (
        told[0]["path"] == str(tmp_path / "file")
        and told[0]["errno"] == number
        and told[0]["seconds"] > 0
    )
    assert os.strerror(number) in describe_wait(told[0]) and CURES[number] in describe_wait(told[0])
    assert not WAITS


def test_other_errors_are_raised_at_once_and_nothing_waits_for_ever(
    tmp_path: Path, monkeypatch
) -> None:
    def write(number: int) -> Callable:
        return lambda: (_ for _ in ()).throw(OSError(number, "no"))

    with pytest.raises(PermissionError):
        retry_write(tmp_path, write(errno.EACCES))
    ends = iter([False, False, True])
    with pytest.raises(OSError, match="no"):
        retry_write(tmp_path, write(errno.ENOSPC), until=lambda: next(ends))
    monkeypatch.setattr(disk_waits, "_GRACE_S", 0.0)
    monkeypatch.setattr(WAITS, "limit_s", 0.3)
    with pytest.raises(OSError, match="no"):
        retry_write(tmp_path, write(errno.ENOSPC))
    assert not WAITS and not is_temporary(ValueError("no")) and not next(ends, False)


def test_lines_that_a_disk_does_not_take_are_written_later(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"torn")
    failing = Failing(monkeypatch, tmp_path, errno.ENOSPC, ("write",))
    failing.on = False
    lines = AppendFile(path)
    lines.write(b"a\n")
    lines.flush()
    failing.on = True
    for line in (b"b\n", b"c\n"):
        lines.write(line)
        lines.flush()
    assert WAITS.longest()["loose"] and lines.dropped == 0
    monkeypatch.setattr(disk_waits, "_KEPT_BYTES", 4)
    lines.write(b"too much\n")
    assert lines.dropped == 9
    failing.on = False
    lines.close()
    assert path.read_bytes() == b"torn\na\nb\nc\n" and not WAITS


def test_a_wait_that_nobody_tries_again_is_over(tmp_path: Path, monkeypatch) -> None:
    """The owner of a file of spans may write nothing for a long time after the disk has room
    again."""
    WAITS.begin(tmp_path / "spans", OSError(errno.ENOSPC, "full"), loose=True)
    WAITS.begin(tmp_path / "queue", OSError(errno.ENOSPC, "full"))
    monkeypatch.setattr(disk_waits, "_LOOSE_S", 0.0)
    assert WAITS.longest()["path"] == str(tmp_path / "queue"), "somebody waits for it"
    WAITS.end(tmp_path / "queue")
    assert WAITS and WAITS.longest() == {}
    monkeypatch.setattr(disk_waits, "_LOOSE_S", 60.0)
    assert WAITS.longest()["path"] == str(tmp_path / "spans")
    WAITS.end(tmp_path / "spans")


def test_a_warning_about_a_file_that_nobody_waits_for_is_withdrawn(
    tmp_path: Path, monkeypatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(disk_watch, "_SILENT_S", 1e-9)
    watch = DiskWatch(make_run(tmp_path / "run"), 60.0, lines.append)
    with small_disk(tmp_path / "other") as other:
        wait = {
            "who": "a",
            "path": str(other.folder / "x"),
            "errno": errno.ENOSPC,
            "seconds": 1.0,
            "loose": True,
        }
        now = time.monotonic() + 60.0
        watch.update([wait], now)
        assert lines == [], "there is room: the wait is an old one"
        other.fill()
        for told in ([wait], [wait], []):
            watch.update(told, now)
        assert len(lines) == 1 and lines[0].startswith(f"{wait['path']}: No space left on device")
        other.free()
        watch.update([], now)
        watch.update([], now)
        assert lines[1:] == [f"{other.folder} is written again"]
        other.fill()
        watch.update([wait], now)
        assert len(lines) == 3, "it is full again"


@pytest.mark.parametrize("left", [256 << 10, 0, 4 << 10, 8 << 10][: effort(1, 4)])
def test_a_submission_to_a_full_disk_names_the_file_and_can_be_repeated(
    tmp_path: Path, left: int, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Path(__file__).parents[2] / "configs" / "runs" / "quickstart.yaml"
    with small_disk(tmp_path / "disk", "32m") as full:
        root = full.folder / "run"
        full.fill(left)
        argv = [
            "submit",
            "--dry-run",
            "--config",
            str(config),
            "--run_dir",
            str(root),
            "--layout",
            "het",
        ]
        argv += ["--site.python", sys.executable]
        assert main(argv) == EXIT_RETRY
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and f"error: {root}/" in error, error
        assert error.endswith(": No space left on device; free space there\n")
        full.free()
        assert main([*argv, "--resume"] if (root / "config.yaml").exists() else argv) == EXIT_DONE


def test_a_line_that_a_full_disk_cuts_ends_before_the_next(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as full:
        log = full.folder / "log"
        log.write_bytes(b"x" * 4094 + b"\n")
        printed = io.BufferedWriter(
            disk_waits._Printed(os.open(log, os.O_APPEND | os.O_WRONLY), "wb")
        )
        full.fill()
        for line in (b"one\n", b"two\n"):
            printed.write(line)
            printed.flush()
        full.free()
        printed.write(b"three\n")
        printed.close()
        assert log.read_bytes()[4095:] == b"o\nthree\n", "a page of the disk had room for one byte"


@pytest.mark.parametrize("block", ["if True:", "with harmless_output():"])
def test_what_is_printed_ends_nothing(block: str) -> None:
    """On a real device that is always full; commands neutralise what they print."""
    program = (
        "from relax_hpc.base.disk_waits import ignore_print_errors; from relax_hpc.base.terminal_text "
        "import harmless_output\n"
    )
    program += f"{block}\n ignore_print_errors(); print('x', flush=True); print('y')"
    with Path("/dev/full").open("wb") as full:
        assert (
            subprocess.run(
                [sys.executable, "-c", program], stdout=full, stderr=full, timeout=60
            ).returncode
            == 0
        )


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch) -> None:
    failing = Failing(monkeypatch, tmp_path, errno.EDQUOT, ("fsync",))
    with pytest.raises(OSError, match="quota"):
        write_atomic(tmp_path / "a", b"x", sync=True)
    assert list(tmp_path.iterdir()) == [] and failing.times == 1
    assert probe_folder(tmp_path)["errno"] == errno.EDQUOT and list(tmp_path.iterdir()) == []


def test_a_disk_is_said_once_and_when_it_is_well_again(tmp_path: Path) -> None:
    lines: list[str] = []
    watch = DiskWatch(make_run(tmp_path / "run"), 0.05, lines.append)
    one = {
        "who": "a",
        "path": "/r/queue/1.h5",
        "errno": errno.ENOSPC,
        "seconds": 1.0,
        "loose": False,
    }
    answered = time.monotonic()
    watch.update(
        [one, one | {"path": "/r/queue/2.h5"}, one | {"path": "/r/logs/x", "loose": True}], answered
    )
    watch.update([one | {"path": "/r/queue/3.h5"}], answered)
    assert [line.partition(":")[0] for line in lines] == ["/r/queue/1.h5", "/r/logs/x"]
    wait_for(watch.timeout_reason)
    assert "/r/queue/3.h5: No space left on device" in watch.timeout_reason()
    watch.update([one | {"loose": True}], answered)
    assert lines[-1].startswith("the disk is written again") and not watch.timeout_reason()
    watch.update([], answered)
    watch.update([one], answered)
    assert lines[-1].startswith("/r/queue/1.h5: ")
    watch.check_space()


def test_a_hub_that_is_silent_or_new_ends_no_wait(tmp_path: Path, monkeypatch) -> None:
    """It is over when the disk says so: another one than that of the run directory."""
    lines: list[str] = []
    watch = DiskWatch(make_run(tmp_path / "run"), 0.05, lines.append, sure_s=60.0)
    with small_disk(tmp_path / "other") as other:
        other.fill()
        one = {
            "who": "a",
            "path": str(other.folder / "x"),
            "errno": errno.ENOSPC,
            "seconds": 1.0,
            "loose": False,
        }
        watch.update([one], time.monotonic())
        watch.update([], time.monotonic())
        monkeypatch.setattr(disk_watch, "_SILENT_S", 0.0)
        watch.sure_s = 0.0
        watch.update([], time.monotonic() - 100.0)
        assert not any("again" in line for line in lines) and wait_for(watch.timeout_reason)
        other.free()
        watch.update([], time.monotonic() - 100.0)
        assert lines[-1].startswith("the disk is written again") and not watch.timeout_reason()


def test_a_supervisor_that_cannot_see_whether_it_is_fenced_waits(
    tmp_path: Path, monkeypatch
) -> None:
    """And says why."""
    fails, lines = [True] * 3, list[str]()

    def incarnations(*_: object) -> int:
        if fails and fails.pop():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return 2

    monkeypatch.setattr("relax_hpc.cluster.supervise.supervisor.latest_incarnation", incarnations)
    run = make_run(tmp_path / "run")
    watch = DiskWatch(run, 60.0, lines.append)
    supervisor = SimpleNamespace(
        run=run, name="supervisor", incarnation=1, interrupted=0, disk=watch
    )
    supervisor._latest = lambda: Supervisor._latest(supervisor)
    with pytest.raises(FencedError, match="supervisor 2 has taken over"):
        Supervisor.check_fenced(supervisor)
    assert not fails and len(lines) == 1 and os.strerror(errno.EIO) in lines[0]


def test_a_run_that_waits_too_long_saves_what_it_can_and_ends_with_75(tmp_path: Path) -> None:
    told = {
        "who": "a",
        "path": "/r/queue/1.h5",
        "errno": errno.EDQUOT,
        "seconds": 1.0,
        "loose": False,
    }
    stopped: list[bool] = []
    watch = DiskWatch(make_run(tmp_path / "run"), 0.2, lambda _: None)
    liveness = SimpleNamespace(disk=[told], answered_at=time.monotonic())
    supervisor = SimpleNamespace(
        disk=watch, hub_liveness=liveness, stop=lambda: stopped.append(True)
    )
    with pytest.raises(
        RelaxError, match=r"/r/queue/1.h5: Disk quota .* allowed liveness.longest_wait_s=0.2"
    ) as ended:
        wait_for(lambda: Supervisor.check_disk(supervisor))
    assert ended.value.exit_code == EXIT_RETRY and stopped == [True]


# -- writers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", ERRORS)
@pytest.mark.parametrize("names", [("pwrite",), SYNCS], ids=["write", "sync"])
def test_a_journal_writes_all_again_after_a_failure(
    tmp_path: Path, monkeypatch, number: int, names
) -> None:
    """A sync that failed once is believed no more: the kernel takes what it could not write for
    written."""
    journal = Journal(tmp_path, 1)
    assert list(journal.replay()) == []
    journal.append({"op": "a"})
    journal.commit()
    failing = Failing(monkeypatch, tmp_path, number, names)
    journal.append({"op": "b", "text": "x" * 5000})
    before = journal.position
    with pytest.raises(OSError, match=os.strerror(number)):
        journal.commit()
    assert journal.position == before
    failing.on = False
    os.ftruncate(journal._file.fileno(), before.offset)
    journal.append({"op": "c"})
    assert journal.commit() and not journal.commit()
    journal.close()
    assert [record["op"] for record in Journal(tmp_path, 2).replay()] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("durability", "call", "number"),
    [
        ("commit", "pwrite", errno.EDQUOT),
        ("commit", "fdatasync", errno.EIO),
        ("flush", "pwrite", errno.EROFS),
    ],
)
def test_nobody_is_told_of_what_the_journal_does_not_have(
    tmp_path: Path, monkeypatch, durability: str, call: str, number: int
) -> None:
    """But everybody of why; and everything goes on by itself, though it took longer than any wait
    may."""
    config = small()
    config.queue.wait_timeout_s = 0.6
    run = make_run(tmp_path / "run")
    with in_thread(run, config, durability=durability) as controller, Roles(run, config) as roles:
        version = roles.start()
        roles.admit(version)
        failing = Failing(monkeypatch, run.journal, number, (call,))
        with failing.while_failing():
            late = roles["rollout"].connection.submit("note", what="w", name="n", reason="r")
            later = roles["advantages"].connection.submit("checkpoints")
            wait_for(lambda: roles["actor"].beat.disk_wait)
            assert roles["actor"].beat.disk_wait["path"].startswith(str(run.journal))
            found = roles["actor"].connection.call("status", timeout=5.0)["disk"]
            assert {one["errno"] for one in found} == {number} and found[0][
                "who"
            ] == "hub/controller"
            wait_for(lambda: roles["rollout"].beat.paused_s > 2 * config.queue.wait_timeout_s)
            assert not late.done() and not later.done()
            written = [
                record["op"] for _, record in journal_frames(controller.journal.path, 0, None)
            ]
            assert call == "fdatasync" or "note" not in written
        assert late.result(5) == {} and later.result(5) == {"checkpoints": []}
        assert controller.state.counts.noted["w/r"] == 1
        wait_for(lambda: not roles["actor"].beat.disk_wait)


def test_a_journal_whose_folder_cannot_be_read_ends_no_controller(
    tmp_path: Path, monkeypatch
) -> None:
    """It cannot see whether it has a successor, so that it tells nobody of anything until it
    can."""
    run, out, real = make_run(tmp_path / "run"), [True], Journal.find_successor

    def find_successor(journal: Journal) -> int:
        if out:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(journal)

    with in_thread(run, small()), Roles(run, small()) as roles:
        version = roles.start()
        monkeypatch.setattr(Journal, "find_successor", find_successor)
        late = roles["rollout"].connection.submit("note", what="w", name="n", reason="r")
        wait_for(lambda: roles["actor"].beat.disk_wait)
        assert not late.done()
        out.clear()
        assert late.result(5) == {}
        assert roles.admit(version)


@pytest.mark.parametrize("number", ERRORS)
def test_shards_are_written_when_there_is_room(tmp_path: Path, monkeypatch, number: int) -> None:
    """The actor, which asks whether its rows are on disk, waits no longer than the disk is full."""
    config = small()
    run = make_run(tmp_path / "run")
    with in_thread(run, config), Roles(run, config) as roles:
        version = roles.start()
        tickets = roles.admit(version)
        failing = Failing(monkeypatch, run.shards, number, ("writev",))
        with failing.while_failing():
            assert roles["rollout"].put_generated(rows_of(tickets, version)) == {}
            for role, fields in GIVES.items():
                claim = roles[role].claim(role, BUDGET)
                roles[role].put(learned(roles[role].rows(claim), version), fields, claim)
            claim = roles["actor"].claim("actor", BUDGET)
            settled = roles["actor"].connection.submit("settled", leases=[claim.lease])
            wait_for(lambda: "disk" in roles["rollout"].beat.content())
            assert roles["rollout"].beat.content()["busy_s"] < 1.0 and not settled.done()
        assert settled.result(10)["tickets"] == tickets
        assert not WAITS


@pytest.mark.parametrize("number", ERRORS)
def test_media_and_marks_wait_for_room(tmp_path: Path, monkeypatch, number: int) -> None:
    failing = Failing(monkeypatch, tmp_path, number, SYNCS)
    ids: list[str] = []
    thread = threading.Thread(
        target=lambda: ids.append(MediaStore(tmp_path / "media").put(b"blob"))
    )
    with failing.while_failing():
        thread.start()
    thread.join(60)
    assert bytes(MediaStore(tmp_path / "media").read(ids[0])) == b"blob"
    full = [1, 1]

    def write(path: Path, *_: Any) -> None:
        if full.pop() if full else 0:
            raise OSError(number, "full")
        path.write_text("{}")

    monkeypatch.setattr("relax_hpc.net.rendezvous.exit_mark.write_json", write)
    write_exit_mark(tmp_path / "mark")
    assert (tmp_path / "mark").exists() and not WAITS
    full += [1] * 1000
    write_exit_mark(tmp_path / "failed", code=75, patience_s=0.2)
    assert not (tmp_path / "failed").exists()


# -- a journal that has lost its end ---------------------------------------------------------------


def cut_before_last(folder: Path, op: str) -> None:
    """Cut the journal off before its last record of ``op``, and all that was acknowledged since."""
    path = max(folder.glob("*.journal"))
    ends = list(journal_frames(path, 0, None))
    start = max(
        before for (before, _), (_, record) in pairwise([(0, {}), *ends]) if record["op"] == op
    )
    os.truncate(path, start)


@pytest.mark.parametrize("number", [0, 1])
def test_an_acknowledgement_that_was_lost_stops_nothing(tmp_path: Path, number: int) -> None:
    """The hub dies, and of its journal the end is gone in which rows were said to be on disk."""
    run, config = make_run(tmp_path / "run"), small()
    with Roles(run, config) as roles:
        with HubProcess(run):
            version = roles.start()
            roles.generate(version)
            if number:
                roles.learn(version)
        cut_before_last(run.journal, "saved")
        with HubProcess(run):
            if not number:
                roles.learn(version)
            claim = roles["actor"].claim("actor", BUDGET)
            settled = roles["actor"].connection.submit(
                "settled", timeout=10.0, leases=[claim.lease]
            )
            assert settled.result()["tickets"] == list(claim.tickets)
            roles["actor"].connection.call("publish", version=str(Version(1, 1)), digest="d")
            roles["actor"].connection.call("trained", step=0, leases=[claim.lease])
