"""A watched child: its watcher gets every exit and passes signals on; the child ends with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.supervise.wakeups import Wakeups
from relax_hpc.net.rendezvous.process import END_SIGNAL, STOP_SIGNALS

WATCHDOG = """\
[rank0]:[E1127 10:00:30 ProcessGroupNCCL.cpp:683] [Rank 0] Watchdog caught collective operation \
timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=4, NumelOut=4, Timeout(ms)=30000) ran for \
30008 milliseconds before timing out.
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 0 PG GUID 0(default_pg) Rank 0] Process group watchdog thread terminated
"""
"""Messages of torch's NCCL watchdog before it aborts its process."""
PROGRAM = """
import os, signal, sys, time
from relax_hpc.net.rendezvous.process import STOP_SIGNALS, run_watched

def say(*words):
    print(*words, flush=True)

def work():
    say("started", os.getpid(), os.getppid())
    if what == "signals":
        # A handler does not run if its signal comes just before signal.pause().
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    elif what == "raises":
        raise ValueError("a bug")
    elif what.isdigit():
        return int(what)
    say("ready")
    while what == "signals":
        say("got", int(signal.sigwait(STOP_SIGNALS)))
    signal.pause()

lives = int(sys.argv[2])

def ended(code):
    global lives
    lives -= 1
    say("ended", code)
    return None if lives else 7

what = sys.argv[1]
sys.exit(run_watched(work, ended))
"""
Start = Callable[..., subprocess.Popen]


@pytest.fixture
def start() -> Iterator[Start]:
    processes: list[subprocess.Popen] = []

    def start(behaviour: str, lives: int = 1) -> subprocess.Popen:
        command = [sys.executable, "-c", PROGRAM, behaviour, str(lives)]
        root = Path(__file__).resolve().parents[2]
        processes.append(
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=root
            )
        )
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate(timeout=10)


def started_child(process: subprocess.Popen) -> int:
    """Wait until the child has started, and return its pid."""
    event, child, parent = process.stdout.readline().split()
    assert event == "started" and int(parent) == process.pid
    return int(child)


@pytest.mark.parametrize(("behaviour", "code"), [("0", 0), ("75", 75), ("raises", 1)])
def test_the_watcher_gets_the_exit_code_of_its_child(
    start: Start, behaviour: str, code: int
) -> None:
    process = start(behaviour)
    started_child(process)
    assert process.stdout.read() == f"ended {code}\n" and process.wait(60) == 7
    assert ("ValueError: a bug" in process.stderr.read()) == (behaviour == "raises")


def test_the_watcher_gets_the_signal_and_restarts_a_killed_child(start: Start) -> None:
    process = start("waits", lives=3)
    for _ in range(3):
        child = started_child(process)
        assert process.stdout.readline() == "ready\n"
        os.kill(child, signal.SIGKILL)
        assert process.stdout.readline() == "ended -9\n"
    assert process.wait(60) == 7


def test_stop_signals_reach_every_restarted_child(start: Start) -> None:
    process = start("signals", lives=2)
    for _ in range(2):
        child = started_child(process)
        assert process.stdout.readline() == "ready\n"
        # With this many signals, some arrive just before the watcher waits.
        for number in 20 * STOP_SIGNALS:
            process.send_signal(number)
            assert process.stdout.readline() == f"got {int(number)}\n"
        os.kill(child, signal.SIGKILL)
        assert process.stdout.readline() == "ended -9\n"


def test_a_hangup_that_nohup_ignores_stays_ignored(start: Start) -> None:
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = start("waits")
    finally:
        signal.signal(signal.SIGHUP, former)
    child = started_child(process)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGHUP)
    os.kill(child, signal.SIGHUP)
    process.terminate()
    assert process.stdout.readline() == "ended -15\n"


@pytest.mark.parametrize(
    ("signals", "requests"),
    [
        ([signal.SIGHUP], 1),
        ([signal.SIGHUP, signal.SIGHUP], 1),
        ([signal.SIGHUP, signal.SIGTERM], 1),
        ([signal.SIGTERM, signal.SIGHUP], 1),
        ([signal.SIGHUP, signal.SIGTERM, signal.SIGINT], 2),
        ([signal.SIGINT, signal.SIGTERM], 2),
    ],
)
def test_a_hangup_is_one_request_to_stop(signals: list[signal.Signals], requests: int) -> None:
    """At a hangup the shell and the kernel both send SIGHUP, and a login manager also SIGTERM."""
    former = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    calls: list[int] = []
    try:
        with Wakeups(lambda: calls.append(1)):
            for number in signals:
                os.kill(os.getpid(), number)
        if signal.SIGHUP in signals:
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
    assert len(calls) == requests


def test_an_unhandled_signal_ends_the_child(start: Start) -> None:
    process = start("waits")
    started_child(process)
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    assert process.stdout.readline() == "ended -15\n"


def test_the_child_dies_with_its_watcher(start: Start) -> None:
    process = start("signals")
    child = psutil.Process(started_child(process))
    process.kill()
    assert psutil.wait_procs([child], timeout=10)[1] == []


STORM = """
import sys
from relax_hpc.net.rendezvous.process import flag_stop_signals

stop = flag_stop_signals(raises=False, is_led="led" in sys.argv)
for line in sys.stdin:
    print("asked to stop" if stop.is_set() else "works", flush=True)
"""


def test_a_process_works_after_thousands_of_signals() -> None:
    """Slurm signals every process of a step, and watchers pass signals on. Handlers interrupt each
    other."""
    command = [sys.executable, "-c", STORM]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:

        def ask_state() -> str:
            process.stdin.write("state?\n")
            process.stdin.flush()
            return process.stdout.readline().strip()

        try:
            assert ask_state() == "works"
            for _ in range(10_000):
                process.send_signal(signal.SIGUSR2)
                process.send_signal(signal.SIGTERM)
            assert ask_state() == "asked to stop"
        finally:
            process.kill()


def test_a_led_process_stops_only_at_the_signal_of_its_parent() -> None:
    """Slurm also signals processes below a batch script. Its head decides what to save before they
    end."""
    command = [sys.executable, "-c", STORM, "led"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:

        def ask_state(*signals: signal.Signals) -> str:
            for number in signals:
                process.send_signal(number)
            process.stdin.write("state?\n")
            process.stdin.flush()
            return process.stdout.readline().strip()

        try:
            assert ask_state() == "works"
            assert ask_state(signal.SIGTERM, signal.SIGINT, signal.SIGTERM) == "works"
            assert ask_state(END_SIGNAL) == "asked to stop"
        finally:
            process.kill()


CUT_SHORT = """
import os, signal, sys, threading
from relax_hpc.config.schema import Config
from relax_hpc.roles import __main__ as roles

def serve(args, config, run, stop):
    condition = threading.Condition()
    with condition:
        condition.release()  # A wait holds no lock until it returns.
        os.kill(os.getpid(), signal.SIGUSR2)
        if "bug" in sys.argv:
            raise KeyError("unasked")

roles.serve, roles.load_resolved = serve, lambda *_: Config()
if "bug" in sys.argv:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
words = ["--run_dir", sys.argv[1], "--group", "reference", "--role", "reference", "--incarnation", "1"]
sys.exit(roles.work(roles.parse(words)))
"""


@pytest.mark.parametrize(("arguments", "status"), [([], "stopped"), (["bug"], "failed")])
def test_a_stop_at_the_end_of_a_wait_is_not_a_failure(
    arguments: list[str], status: str, tmp_path: Path
) -> None:
    """The wait does not hold its lock then, so that leaving it raises a RuntimeError."""
    mark_path = RunDir(tmp_path).exit_mark("reference", 1, "reference")
    mark_path.parent.mkdir(parents=True)
    process = subprocess.run(
        [sys.executable, "-c", CUT_SHORT, str(tmp_path), *arguments],
        stderr=subprocess.PIPE,
        text=True,
    )
    mark = json.loads(mark_path.read_text())
    assert process.returncode == 75 and mark["status"] == status, process.stderr
    assert (mark["reason"] == "asked to stop") == (status == "stopped")


def test_a_role_and_its_children_write_no_core_files() -> None:
    """A core file of a rank with pinned memory would fill a disk."""
    program = """
import resource, subprocess, sys
from relax_hpc.net.rendezvous.process import forbid_core_files
resource.setrlimit(resource.RLIMIT_CORE, (resource.getrlimit(resource.RLIMIT_CORE)[1],) * 2)
forbid_core_files()
show = "import resource; print(resource.getrlimit(resource.RLIMIT_CORE)[0])"
subprocess.run([sys.executable, "-c", show], check=True)
"""
    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True
    )
    assert process.stdout == "0\n"


ABORTED = """
import os, resource, sys
from relax_hpc.base.rundir import RunDir
from relax_hpc.config.schema import Config
from relax_hpc.roles import __main__ as roles

def serve(args, config, run, stop):
    roles.redirect_output(run.rank_log(args.group, args.incarnation, args.role, 0))
    print("core files:", resource.getrlimit(resource.RLIMIT_CORE)[0], flush=True)
    print(sys.argv[2], file=sys.stderr, flush=True)
    os.abort()

roles.serve, roles.load_resolved = serve, lambda *_: Config()
hard_limit = resource.getrlimit(resource.RLIMIT_CORE)[1]
resource.setrlimit(resource.RLIMIT_CORE, (hard_limit, hard_limit))
words = ["--group", "actor", "--role", "actor", "--incarnation", "1", "--watch"]
sys.exit(roles.main(["--run_dir", sys.argv[1], *words]))
"""


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (
            WATCHDOG,
            "a rank of this group is gone, or late by more than liveness.collective_timeout_s; "
            "its log, in the same folder, has the reason (WorkNCCL(SeqNum=7, OpType=ALLREDUCE, "
            "NumelIn=4, NumelOut=4, Timeout(ms)=30000) ran for 30008 milliseconds)",
        ),
        ("  what():  CUDA error: an illegal memory access", "what(): CUDA error: an illegal"),
    ],
)
def test_a_rank_that_aborts_leaves_its_reason_and_no_core_file(
    message: str, reason: str, tmp_path: Path
) -> None:
    """As NCCL's watchdog aborts a rank whose peers are gone; any other abort is no lost rank."""
    run = RunDir(tmp_path)
    mark_path = run.exit_mark("actor", 1, "actor")
    log = run.rank_log("actor", 1, "actor", 0)
    mark_path.parent.mkdir(parents=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    root = Path(__file__).resolve().parents[2]
    process = subprocess.run(
        [sys.executable, "-c", ABORTED, str(tmp_path), message],
        env=os.environ | {"PYTHONPATH": str(root)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    mark = json.loads(mark_path.read_text())
    assert process.returncode == 75 and mark["status"] == "failed", process.stderr
    assert mark["reason"].startswith(f"rank 0 was ended by signal 6: {reason}"), mark
    assert "core files: 0\n" in log.read_text() and not list(tmp_path.glob("core*"))


def test_the_parent_of_local_ranks_names_the_collective_of_an_aborted_rank(
    tmp_path: Path,
) -> None:
    log = RunDir(tmp_path).rank_log("actor", 2, "actor", 1)
    log.parent.mkdir(parents=True, exist_ok=True)
    program = (
        "import os, signal, sys\n"
        "if os.environ['RELAX_MEETING'].startswith('1 '):\n"
        "    open(sys.argv[1], 'w').write(sys.argv[2])\n"
        "    os.abort()\n"
        "signal.pause()\n"
    )
    options = f"--run_dir {tmp_path} --group actor --incarnation 2 --role actor".split()
    ranks = [sys.executable, "-m", "relax_hpc.cluster.supervise.ranks", "2"]
    process = subprocess.run(
        [*ranks, "-c", program, str(log), WATCHDOG, *options],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert process.returncode == 75
    assert process.stderr.splitlines()[-1].startswith(
        "rank 1 was ended by signal 6: a rank of this group is gone, or late by more than "
        "liveness.collective_timeout_s"
    )
