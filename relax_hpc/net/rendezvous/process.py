"""First duties of every process of a run: to keep its files private, die with its parent, and end
in order on signals."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from relax_hpc.base.errors import RelaxError

_PR_SET_PDEATHSIG = 1
PARENT = "RELAX_PARENT"
"""Environment variable: pid of the process that started this one."""
END_SIGNAL = signal.SIGUSR2
"""Signal by which a supervisor asks a role to end: srun passes it on to its tasks, and TERM it
takes for itself."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, END_SIGNAL)
"""Signals to stop. Slurm sends TERM at preemption and at the end of a job, a terminal that is
closed sends HUP."""
STACKS_SIGNAL = signal.SIGUSR1
"""Signal on which a process of ours writes the stacks of all its threads to its log, and goes
on."""
EXIT_BUG = 1
"""Exit code of a watched child whose work raised something."""
PRIVATE_UMASK = 0o077
"""File mode mask of every process of a run: many sites hand on one that lets a whole project write.
SGLang unpickles what comes in by its sockets, and checkpoints hold pickled metadata: whoever can
write there runs code as the run's user."""
_LAUNCHER = re.compile(
    r"(LOCAL_|GROUP_|NODE_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_(ADDR|PORT)"
    r"|(PMI|PMIX|HYDRA|MPIR?_|OMPI_|TORCHELASTIC|SLURM_(?!CONF$)|SBATCH_|SRUN_).*"
)


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that started it ends, however it ends.

    A parent that put its pid into PARENT is also noticed if it has ended by now.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = os.environ.pop(PARENT, "")
    if parent and int(parent) != os.getppid():
        sys.exit(f"process {parent}, which started this one, has ended")


def set_private_umask() -> None:
    """Let only the user read and write what this process and its children create."""
    os.umask(PRIVATE_UMASK)


def install_stack_dump() -> None:
    """Write the stacks of all threads to standard error on STACKS_SIGNAL, and when the process
    crashes.

    It is done in C, so also while native code holds the interpreter's lock. Standard error may
    become another file.
    """
    faulthandler.enable(2)
    faulthandler.register(STACKS_SIGNAL, 2)


def handles_stack_signal(pid: int) -> bool:
    """Whether a process of this machine has a handler for STACKS_SIGNAL, which ends one that has
    none."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next(
        (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0"
    )
    return bool(int(caught, 16) >> (STACKS_SIGNAL - 1) & 1)


def clean_environment() -> dict[str, str]:
    """Environment of this process without what an MPI launcher or Slurm step put there for its own
    ranks."""
    return {name: value for name, value in os.environ.items() if not _LAUNCHER.fullmatch(name)}


def stop_signals() -> tuple[signal.Signals, ...]:
    """STOP_SIGNALS, without SIGHUP if this process was started with that ignored, as by nohup."""
    ignores_hangup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(s for s in STOP_SIGNALS if not (ignores_hangup and s == signal.SIGHUP))


class SignalFlag:
    """Flag that a signal handler sets. A threading.Event has a lock: a handler that another signal
    interrupts while it holds that would wait for itself."""

    def __init__(self, signals: tuple[signal.Signals, ...] = STOP_SIGNALS) -> None:
        """Handle ``signals``; a subset is for who has a handler of its own for the others."""
        self.signals = signals
        self._set = False

    def set(self) -> None:
        self._set = True

    def is_set(self) -> bool:
        return self._set


def flag_stop_signals(at_once: bool, led: bool = False) -> SignalFlag:
    """A flag that STOP_SIGNALS set; ``at_once`` also raises RelaxError, once, wherever the main
    thread is.

    ``led``: by a parent which gets Slurm's signals too, and decides who ends when: END_SIGNAL alone
    counts.
    """
    flag, own = SignalFlag((END_SIGNAL,) if led else STOP_SIGNALS), os.getpid()

    def handle(number: int, _: object) -> None:
        # Rather than SIG_IGN, which what this process starts would inherit; what it forks is not
        # led.
        if number not in flag.signals and os.getpid() == own:
            return
        first = not flag.is_set()
        flag.set()
        if at_once and first:
            raise RelaxError("asked to stop")

    for number in stop_signals():
        signal.signal(number, handle)
    return flag


def run_watched(
    work: Callable[[], int],
    ended: Callable[[int], int | None],
    beside: Callable[[], None] | None = None,
) -> int:
    """Do ``work`` in a child that is watched, so that its end is known however it comes; the exit
    code.

    Call it before there are threads. Stop signals are passed on. ``ended`` is told how each child
    ended (an exit code, or minus a signal's number) and gives the exit code of this process, or
    None to do the work again. ``beside`` runs in a thread of the watcher; the work is not to be
    done again then.
    """
    # A step's processes get it all at once; of this one, which only waits, there is nothing to see.
    signal.signal(STACKS_SIGNAL, signal.SIG_IGN)
    # If a parent has set this to be ignored, the kernel does not report how the child ended.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # These stay blocked, and sigwait takes them one by one. A Python handler would run only after
    # waitpid if its signal came just before that call. A signal that comes while no child runs
    # waits for the next child.
    awaited = (*stop_signals(), signal.SIGCHLD)
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    while True:
        watcher = os.getpid()
        child = os.fork()
        if not child:
            _run(work, watcher, awaited)
        if beside:
            threading.Thread(target=beside, name="beside", daemon=True).start()
        code = ended(os.waitstatus_to_exitcode(_wait_for(child, awaited)))
        if code is not None:
            return code


def _wait_for(child: int, awaited: Sequence[signal.Signals]) -> int:
    """Wait status of ``child``; each blocked signal of ``awaited`` but SIGCHLD is sent to it."""
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        number = signal.sigwait(awaited)
        if number != signal.SIGCHLD:
            os.kill(child, number)


def _run(work: Callable[[], int], watcher: int, blocked: Sequence[signal.Signals]) -> None:
    """Run the child's work, with the signals that its watcher has ``blocked``; does not return."""
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
        # Library threads (gloo, engines) must not keep it alive.
        os._exit(code)
