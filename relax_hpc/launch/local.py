"""The local layout: all groups of a run as process trees on this machine, watched by one small supervisor."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from relax_hpc.config import Config, dump, load_resolved, resolve
from relax_hpc.config.changes import retire_changes
from relax_hpc.config.check import check
from relax_hpc.disk import keep_printing
from relax_hpc.errors import EXIT_CONFIG, EXIT_DONE, EXIT_INTERRUPTED, ConfigError, RelaxError
from relax_hpc.launch import processes
from relax_hpc.launch.processes import LocalLauncher
from relax_hpc.launch.requests import asked_to_stop
from relax_hpc.launch.status import status
from relax_hpc.launch.supervisor import Outcome, Supervisor
from relax_hpc.launch.terminal import Terminal
from relax_hpc.rendezvous.process import STOP_SIGNALS
from relax_hpc.rundir import RunDir, read_map, write_json, write_numbered
from relax_hpc.transfer_queue.plan import SUPERVISOR
from relax_hpc.weights.staging import staging_root

_ANSWER_S = 1.0
FIXED = ("seed", "groups_per_step", "samples_per_group", "model", "data", "warm_start")
"""Settings that a run keeps for life: its tickets and its first weights are made of them."""


def run(config: Config, resume: bool) -> int:
    """Make or continue the run of ``config`` on this machine; the exit code of ``relax-hpc run``."""
    keep_printing()
    directory, config = establish(config, resume)
    if directory.finished.exists():
        print(f"{directory.root}: the run is finished already; to go on, resume with more --steps")
        return EXIT_DONE
    with contextlib.ExitStack() as stack:
        terminal = stack.enter_context(contextlib.closing(Terminal(directory, config)))
        stack.callback(shutil.rmtree, staging_root(directory), ignore_errors=True)
        if not prepare(directory, config, terminal):
            return EXIT_INTERRUPTED
        launcher, names = LocalLauncher(directory), start_order(config)
        attempt = new_attempt(directory)
        supervisor = Supervisor(directory, config, SUPERVISOR, names, lambda _: launcher, attempt, terminal)
        outcome = stack.enter_context(supervisor).supervise()
        if outcome is Outcome.FINISHED:
            terminal.summary()
            return EXIT_DONE
        terminal.say(f"go on with: relax-hpc run --run_dir {directory.root} --resume")
        return asked_to_stop(directory).get("code") or EXIT_INTERRUPTED


def start_order(config: Config) -> list[str]:
    """The groups of a run, the hub first."""
    return ["hub", *(name for name in config.groups if name != "hub")]


def establish(config: Config, resume: bool) -> tuple[RunDir, Config]:
    """Make the run directory of ``config``, or go back to it; ConfigError if it is not as it should be."""
    config = resolve(config)
    directory = RunDir(Path(config.run_dir))
    if findings := check(config):
        raise ConfigError(findings[0])
    if directory.config.exists():
        if not resume:
            raise ConfigError(f"run_dir: {directory.root} holds a run already; add --resume or name another --run_dir")
        check_resumable(directory, config)
        if directory.finished.exists():
            return directory, config
    elif directory.root.exists() and not directory.token_file.exists() and any(directory.root.iterdir()):
        raise ConfigError(f"run_dir: {directory.root} holds other files; name a new or empty folder")
    directory.create()
    directory.stop.unlink(missing_ok=True)
    dump(config, directory.config)
    retire_changes(directory)
    return directory, config


def check_resumable(directory: RunDir, config: Config) -> None:
    """ConfigError if a fixed setting changed or the run is being run; a finished run with more steps is reopened."""
    before = load_resolved(directory.root)
    for key in FIXED:
        if (found := getattr(config, key)) != (kept := getattr(before, key)):
            raise ConfigError(f"{directory.config}: {key}: found {found}, a run keeps {kept}; start a new run_dir")
    saved = max((step for step, _ in directory.saved()), default=0)
    if config.steps < saved:
        raise ConfigError(f"steps: found {config.steps}, but step {saved} is checkpointed; allowed: at least {saved}")
    if not directory.finished.exists():
        if status(directory, _ANSWER_S)["hub"]:
            raise ConfigError(f"run_dir: {directory.root} is being run now; look with: relax-hpc status RUN")
    elif config.steps > before.steps:
        reopen(directory)


def reopen(directory: RunDir) -> None:
    """A finished run is to go on: no role has come to its good end any more."""
    for mark in directory.root.glob("logs/*/epoch-*/exit-*.json"):
        # What a power loss has emptied says nothing.
        if read_map(mark).get("status") == "done":
            write_json(mark, {"status": "stopped", "code": EXIT_DONE, "reason": "the run goes on with more steps"})
    directory.finished.unlink()


def new_attempt(directory: RunDir) -> int:
    """Number of this command among those that started or resumed the run."""
    return int(write_numbered(directory.root / "attempts", "").name)


def latest_attempt(directory: RunDir) -> int:
    """0 before the first."""
    names = [path.name for path in (directory.root / "attempts").glob("[0-9]*")]
    return max((int(name) for name in names if name.isdecimal()), default=0)


def prepare(directory: RunDir, config: Config, terminal: Terminal) -> bool:
    """Make the model, data and warm start in a process of its own, so that the supervisor stays small.

    False if a signal came in its middle. ConfigError if what the user named is of no use.
    """
    words = [sys.executable, "-m", "relax_hpc.launch.prepare", "--run_dir", str(directory.root)]
    log = directory.root / "logs" / "prepare.log"
    log.parent.mkdir(exist_ok=True)
    terminal.say(f"preparing {'model, data and warm start' if config.warm_start.steps else 'model and data'}")
    interrupted: list[int] = []

    def interrupt(number: int, _: object) -> None:
        interrupted.append(number)
        processes.kill(processes.family(child.pid))

    with log.open("ab") as file:
        child = subprocess.Popen(words, stdout=file, stderr=file, env=processes.environment(config))
    former = {number: signal.signal(number, interrupt) for number in STOP_SIGNALS}
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
        # Nothing has begun: with the mistake mended, the same command line is right.
        directory.config.unlink()
        raise ConfigError(lines[-1])
    return True
