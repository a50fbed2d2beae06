"""Layout `local`: all groups of a run as process trees on this machine, under one supervisor."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys

from relax_hpc.base.disk_waits import ignore_print_errors
from relax_hpc.base.errors import EXIT_CONFIG, EXIT_DONE, EXIT_INTERRUPTED, ConfigError, RelaxError
from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.elastic import make_local_reconciler
from relax_hpc.cluster.supervise import processes
from relax_hpc.cluster.supervise.attempts import new_attempt, start_order
from relax_hpc.cluster.supervise.console import Terminal
from relax_hpc.cluster.supervise.processes import LocalLauncher
from relax_hpc.cluster.supervise.requests import read_stop_request
from relax_hpc.cluster.supervise.supervisor import Outcome, Supervisor
from relax_hpc.commands.guard import start_guard
from relax_hpc.commands.on_end import report_local_end
from relax_hpc.commands.queue import export_all_rows
from relax_hpc.commands.run_setup import prepare_run_dir
from relax_hpc.config import Config
from relax_hpc.net.rendezvous.process import stop_signals
from relax_hpc.queue.plan import SUPERVISOR
from relax_hpc.roles.prepare import NOTE
from relax_hpc.training.weights.node_cache import staging_root


def run(config: Config, resume: bool) -> int:
    """Start or resume the run of ``config`` on this machine. Returns the exit code of ``relax-hpc
    run``."""
    ignore_print_errors()
    directory, config = prepare_run_dir(config, resume, starts_here=True)
    if directory.finished.exists():
        print(
            f"{directory.root}: the run is finished already; to continue it, resume with more "
            "--steps"
        )
        return EXIT_DONE
    with contextlib.ExitStack() as stack:
        terminal = stack.enter_context(contextlib.closing(Terminal(directory, config)))
        stack.callback(shutil.rmtree, staging_root(directory), ignore_errors=True)
        stack.push(terminal.log_error)
        start_guard(directory)
        stack.enter_context(report_local_end(directory, config))
        if not prepare(directory, config, terminal):
            return EXIT_INTERRUPTED
        launcher, names = LocalLauncher(directory), start_order(config)
        attempt = new_attempt(directory)
        supervisor = Supervisor(
            directory, config, SUPERVISOR, names, lambda _: launcher, attempt, terminal
        )
        supervisor.companion = make_local_reconciler(supervisor)
        outcome = stack.enter_context(supervisor).supervise()
        if outcome is Outcome.FINISHED:
            terminal.summary()
            if config.only == "rollout":
                terminal.say(export_all_rows(directory))
            return EXIT_DONE
        terminal.say(f"resume with: relax-hpc run --run_dir {directory.root} --resume")
        return read_stop_request(directory).get("code") or EXIT_INTERRUPTED


def prepare(directory: RunDir, config: Config, terminal: Terminal) -> bool:
    """Make the model, the data and the warm start in a child process, so that the supervisor stays
    small.

    False if a signal interrupted it. ConfigError if a file that the user named cannot be used.
    """
    command = [sys.executable, "-m", "relax_hpc.roles.prepare", "--run_dir", str(directory.root)]
    log = directory.root / "logs" / "prepare.log"
    log.parent.mkdir(exist_ok=True)
    terminal.say(
        f"preparing {'model, data and warm start' if config.warm_start.steps else 'model and data'}"
    )
    interrupted: list[int] = []

    def interrupt(number: int, _: object) -> None:
        interrupted.append(number)
        processes.kill_processes(processes.process_tree(child.pid))

    start = log.stat().st_size if log.exists() else 0
    with log.open("ab") as file:
        child = subprocess.Popen(
            command, stdout=file, stderr=file, env=processes.role_environment(config)
        )
    former = {number: signal.signal(number, interrupt) for number in stop_signals()}
    try:
        code = child.wait()
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
    if interrupted:
        return False
    if code:
        lines = log.read_text(errors="replace").strip().splitlines() or ["no output"]
        if code != EXIT_CONFIG:
            raise RelaxError(f"prepare: {lines[-1]} (log: {log})")
        # The run has not started. After the mistake is corrected, the same command must work.
        directory.config.unlink()
        raise ConfigError(lines[-1])
    for line in log.read_bytes()[start:].decode(errors="replace").splitlines():
        if line.startswith(NOTE):
            terminal.say(line)
    return True
