"""Setup of every process of a run: private files, end with its parent, clean end on signals."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import re
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from relax_hpc.base.errors import RelaxError
from relax_hpc.base.last_error import find_late_collective, read_last_error

_PR_SET_PDEATHSIG = 1
PARENT = "RELAX_PARENT"
"""Environment variable: pid of the process that started this one."""
END_SIGNAL = signal.SIGUSR2
"""Signal by which a supervisor requests the end of a role. srun forwards it to its tasks. SIGTERM
would end srun itself."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, END_SIGNAL)
"""Signals that request a stop. Slurm sends SIGTERM at preemption and at the end of a job. A
terminal that is closed sends SIGHUP."""
STACKS_SIGNAL = signal.SIGUSR1
"""Signal on which a process of a run writes the stacks of all its threads to its log."""
EXIT_BUG = 1
"""Exit code of a watched child whose work raised an exception."""
PRIVATE_UMASK = 0o077
"""File mode mask of every process of a run. Many sites set a mask with which all members of a
project can write. SGLang unpickles messages of its sockets, and checkpoints have pickled metadata,
so that a user who can write there can run code as the user of the run."""
# Variables of torchrun, PMI, PMIx, Hydra, MPICH, Open MPI and Slurm steps. A child program that
# inherits them would take itself for a rank of its parent's step.
_LAUNCHER = re.compile(
    r"(LOCAL_|GROUP_|NODE_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_(ADDR|PORT)"
    r"|(PMI|PMIX|HYDRA|MPIR?_|OMPI_|TORCHELASTIC|SLURM_(?!CONF$)|SBATCH_|SRUN_).*"
)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, for any reason.

    Exit if the parent, whose pid is in PARENT, has already ended.
    """
    # The kernel sends the signal when the thread that forked ends, see PR_SET_PDEATHSIG in
    # prctl(2). A parent must therefore fork in a thread that lives as long as the child.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = os.environ.pop(PARENT, "")
    if parent and int(parent) != os.getppid():
        sys.exit(f"process {parent}, which started this one, has ended")


def forbid_core_files() -> None:
    """Let this process and its children write no core files. One of a rank that a signal ends would
    have the size of its host memory."""
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))


def describe_end(code: int, log: Path | None = None) -> str:
    """The end of a process as text.

    ``code``: its exit code, negative for a signal. ``log``: its log, which says why it was aborted.

    >>> describe_end(75), describe_end(-9)
    ('ended with code 75', 'was ended by signal 9')
    """
    if code >= 0:
        return f"ended with code {code}"
    text = f"was ended by signal {-code}"
    if -code != signal.SIGABRT or log is None:
        return text
    # Collectives of NCCL return at once, and the rank waits elsewhere. When one is late by its
    # timeout, a thread of torch (2.13), the watchdog, aborts the process.
    collective = find_late_collective(log)
    if collective:
        return (
            f"{text}: a rank of this group is gone, or late by more than "
            f"liveness.collective_timeout_s; its log, in the same folder, has the reason "
            f"({collective})"
        )
    error = read_last_error(log).text
    return f"{text}: {error}" if error else text


def set_private_umask() -> None:
    """Set the umask, so that only the user can read and write new files of this process."""
    os.umask(PRIVATE_UMASK)


def install_stack_dump() -> None:
    """Write the stacks of all threads to standard error on STACKS_SIGNAL, and when the process
    crashes.

    Standard error may be redirected to another file later.
    """
    # faulthandler works in C, so it also works while native code holds the interpreter's lock.
    faulthandler.enable(2)
    faulthandler.register(STACKS_SIGNAL, 2)


def handles_stack_signal(pid: int) -> bool:
    """Whether a process of this machine has a handler for STACKS_SIGNAL.

    The signal would end a process without handler.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next(
        (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0"
    )
    return bool(int(caught, 16) >> (STACKS_SIGNAL - 1) & 1)


def clean_environment() -> dict[str, str]:
    """Environment of this process without the variables of MPI launchers and Slurm steps."""
    return {name: value for name, value in os.environ.items() if not _LAUNCHER.fullmatch(name)}


def stop_signals() -> tuple[signal.Signals, ...]:
    """STOP_SIGNALS, without SIGHUP if this process was started with SIGHUP ignored, as by nohup."""
    ignores_hangup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(s for s in STOP_SIGNALS if not (ignores_hangup and s == signal.SIGHUP))


class SignalFlag:
    """Flag that a signal handler sets."""

    # Not a threading.Event, which has a lock: if a second signal interrupts a handler that holds
    # the lock, the second handler waits for the first one for ever.

    def __init__(self, signals: tuple[signal.Signals, ...] = STOP_SIGNALS) -> None:
        """``signals``: those that set the flag. Callers may handle other signals themselves."""
        self.signals = signals
        self._set = False

    def set(self) -> None:
        self._set = True

    def is_set(self) -> bool:
        return self._set


def flag_stop_signals(raises: bool, is_led: bool = False) -> SignalFlag:
    """A flag that STOP_SIGNALS set.

    ``raises``: the first signal also raises RelaxError in the main thread. ``is_led``: the parent
    also receives Slurm's signals and decides which process ends when, so that only END_SIGNAL
    counts.
    """
    flag, pid = SignalFlag((END_SIGNAL,) if is_led else STOP_SIGNALS), os.getpid()

    def handle(number: int, _: object) -> None:
        # A handler that does nothing, and not SIG_IGN, which child programs would inherit. Forked
        # processes have no leader: for them every signal counts.
        if number not in flag.signals and os.getpid() == pid:
            return
        is_first = not flag.is_set()
        flag.set()
        if raises and is_first:
            raise RelaxError("asked to stop")

    for number in stop_signals():
        signal.signal(number, handle)
    return flag


def run_watched(
    work: Callable[[], int],
    on_end: Callable[[int], int | None],
    background: Callable[[], None] | None = None,
) -> int:
    """Run ``work`` in a watched child, so that every kind of end is detected. Returns an exit code.

    Call it before threads are started. Stop signals are forwarded to the child. ``on_end`` is
    called with the exit code of a child, or minus the number of a signal. It returns the exit code
    of this process, or None to run the work again. ``background`` runs in a thread of this process;
    with it, the work must not run again.
    """
    # Slurm sends the signal to all processes of a step. The stacks of this one are of no interest,
    # because it only waits.
    signal.signal(STACKS_SIGNAL, signal.SIG_IGN)
    # If a parent process ignores SIGCHLD, children inherit that, and the kernel then discards the
    # exit status of their children.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # These signals stay blocked, and sigwait takes them one by one. A Python handler would not do:
    # if its signal arrives just before waitpid, it runs only after waitpid has returned. A signal
    # that arrives while no child runs stays pending until the next child.
    awaited = (*stop_signals(), signal.SIGCHLD)
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    while True:
        watcher = os.getpid()
        child = os.fork()
        if not child:
            _run(work, watcher, awaited)
        if background:
            threading.Thread(target=background, name="background", daemon=True).start()
        code = on_end(os.waitstatus_to_exitcode(_wait_for(child, awaited)))
        if code is not None:
            return code


def _wait_for(child: int, awaited: Sequence[signal.Signals]) -> int:
    """Wait status of ``child``. Signals of ``awaited`` except SIGCHLD are forwarded to it."""
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status
        number = signal.sigwait(awaited)
        if number != signal.SIGCHLD:
            os.kill(child, number)


def _run(work: Callable[[], int], watcher: int, blocked: Sequence[signal.Signals]) -> None:
    """Run the work in the child and exit. ``blocked``: signals that the parent has blocked."""
    code = EXIT_BUG
    try:
        os.environ[PARENT] = str(watcher)
        die_with_parent()
        for number in stop_signals():
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)
        code = work()
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit: it would wait for threads of libraries, such as gloo and engines.
        os._exit(code)
