"""The local layout: all groups of a run as process trees on this machine, watched by one small supervisor.

The supervisor acts on the end of a process at once. A group that ends before its time is started again under the next
epoch while the others go on; the queue gives back what it held.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from relax_hpc.config import Config, dump, load_resolved, resolve
from relax_hpc.config.check import check
from relax_hpc.errors import EXIT_CONFIG, EXIT_DONE, EXIT_NO_PROGRESS, ConfigError, NoProgressError, RelaxError
from relax_hpc.launch import processes
from relax_hpc.launch.lookout import Lookout
from relax_hpc.launch.processes import GroupProcesses, Member
from relax_hpc.launch.status import status
from relax_hpc.launch.terminal import Terminal
from relax_hpc.rendezvous.roster import claim_epoch, latest_card, latest_epoch
from relax_hpc.rundir import RunDir
from relax_hpc.transfer_queue.client import QueueClient
from relax_hpc.transfer_queue.plan import SUPERVISOR
from relax_hpc.weights.subscriber import staging_root

INTERRUPTED = 130
_ANSWER_S = 1.0
_STOP_LOOK_S = 0.1
FIXED = ("seed", "groups_per_step", "samples_per_group", "model", "data", "warm_start")
"""Settings that a run keeps for life: its tickets and its first weights are made of them."""


def run(config: Config, resume: bool) -> int:
    """Make or continue the run of ``config`` on this machine; the exit code of ``relax-hpc run``."""
    config = resolve(config)
    directory = RunDir(Path(config.run_dir))
    if findings := check(config):
        raise ConfigError(findings[0])
    if directory.config.exists():
        if not resume:
            raise ConfigError(f"run_dir: {directory.root} holds a run already; add --resume or name another --run_dir")
        check_resumable(directory, config)
        if directory.finished.exists():
            print(f"{directory.root}: the run is finished already; to go on, resume with more --steps")
            return EXIT_DONE
    elif directory.root.exists() and not directory.token_file.exists() and any(directory.root.iterdir()):
        raise ConfigError(f"run_dir: {directory.root} holds other files; name a new or empty folder")
    directory.create()
    dump(config, directory.config)
    with Supervisor(directory, config) as supervisor:
        return supervisor.supervise()


def check_resumable(directory: RunDir, config: Config) -> None:
    """ConfigError if a fixed setting changed or the run is being run; a finished run with more steps is reopened."""
    before = load_resolved(directory.root)
    for key in FIXED:
        if (found := getattr(config, key)) != (kept := getattr(before, key)):
            raise ConfigError(f"{directory.config}: {key}: found {found}, a run keeps {kept}; start a new run_dir")
    saved = max((int(path.name[-6:]) for path in directory.checkpoints.glob("e*-step-*")), default=0)
    if config.steps < saved:
        raise ConfigError(f"steps: found {config.steps}, but step {saved} is checkpointed; allowed: at least {saved}")
    if not directory.finished.exists():
        if status(directory, _ANSWER_S)["hub"]:
            raise ConfigError(f"run_dir: {directory.root} is being run now; look with: relax-hpc status RUN")
    elif config.steps > before.steps:
        directory.finished.unlink()


class Supervisor:
    """Starts the groups, restarts what dies, ends everything. Use it as a context manager: nothing outlives it."""

    def __init__(self, directory: RunDir, config: Config) -> None:
        self.run, self.config = directory, config
        self.terminal = Terminal(directory, config)
        self.groups: dict[str, GroupProcesses] = {}
        self.done: set[str] = set()
        self.restarts: dict[str, int] = {}
        self.step_at_restart: dict[str, int] = {}
        self.interrupted = 0
        self.stopping = False
        self.epoch = claim_epoch(directory, SUPERVISOR)
        self.client: QueueClient | None = None
        self.selector = selectors.DefaultSelector()
        self.wake_out, self.wake_in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.selector.register(self.wake_out, selectors.EVENT_READ, None)

    def __enter__(self) -> Supervisor:
        signal.set_wakeup_fd(self.wake_in)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._interrupt)
        return self

    def __exit__(self, *_: object) -> None:
        if self.client:
            self.client.close()
        for group in self.groups.values():
            group.kill()
        shutil.rmtree(staging_root(self.run), ignore_errors=True)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        self.selector.close()
        os.close(self.wake_in)
        os.close(self.wake_out)
        self.terminal.close()

    def _interrupt(self, *_: object) -> None:
        self.interrupted += 1

    # -- the run -----------------------------------------------------------------------------------------------

    def supervise(self) -> int:
        """Prepare, start all groups, and watch them to the end."""
        self.prepare()
        if self.interrupted:
            return self.stop()
        for name in ["hub", *(name for name in self.config.groups if name != "hub")]:
            self.start(name)
        self.client = QueueClient(self.run, self.config, SUPERVISOR, self.epoch)
        lookout = Lookout(self.client, self.config.liveness.lease_s)
        while not self.finished():
            if self.interrupted:
                return self.stop()
            self.wait(self.config.liveness.beat_s)
            for dead in lookout.look():
                self.hangs(*dead)
            if (latest := latest_epoch(self.run, SUPERVISOR)) > self.epoch:
                raise RelaxError(f"supervisor {latest} has taken over {self.run.root}; this one was {self.epoch}")
            self.terminal.show_progress()
        self.end_hub()
        self.terminal.summary()
        return 0

    def prepare(self) -> None:
        """Make the model, data and warm start in a process of its own, so that the supervisor stays small."""
        words = [sys.executable, "-m", "relax_hpc.launch.prepare", "--run_dir", str(self.run.root)]
        log = self.run.root / "logs" / "prepare.log"
        log.parent.mkdir(exist_ok=True)
        self.terminal.say("preparing model, data and warm start")
        with log.open("ab") as file:
            child = subprocess.Popen(words, stdout=file, stderr=file, env=processes.environment(self.config))
        self._attend(Member("prepare", child, os.pidfd_open(child.pid)))
        if child.returncode and not self.interrupted:
            lines = log.read_text(errors="replace").strip().splitlines() or ["no output"]
            if child.returncode != EXIT_CONFIG:
                raise RelaxError(f"prepare: {lines[-1]} (log: {log})")
            # Nothing has begun: with the mistake mended, the same command line is right.
            self.run.config.unlink()
            raise ConfigError(lines[-1])

    def _attend(self, member: Member) -> None:
        """Wait for a process outside of the groups, or for a signal, which ends it."""
        with selectors.DefaultSelector() as selector:
            selector.register(member.pidfd, selectors.EVENT_READ)
            selector.register(self.wake_out, selectors.EVENT_READ)
            while member.process.poll() is None:
                selector.select()
                if self.interrupted:
                    processes.kill(processes.family(member.process.pid))
                    member.process.wait()
        os.close(member.pidfd)

    def start(self, name: str) -> None:
        """Start the next incarnation of a group."""
        epoch = claim_epoch(self.run, name)
        self.groups[name] = group = processes.start(self.run, self.config, name, epoch)
        for member in group.members:
            self.selector.register(member.pidfd, selectors.EVENT_READ, (name, member))
        self.terminal.say(f"{name}: started epoch {epoch} ({', '.join(member.role for member in group.members)})")

    def wait(self, seconds: float) -> None:
        """Sleep until a process ends, a signal comes or ``seconds`` are over; handle what ended."""
        for key, _ in self.selector.select(seconds):
            if key.data is None:
                os.read(self.wake_out, 4096)
                continue
            name, member = key.data
            if member in self.groups[name].members:
                self.ended(name, member)

    def ended(self, name: str, member: Member) -> None:
        """A process is gone: done if it left its mark, else its group goes and comes again."""
        self.selector.unregister(member.pidfd)
        code = member.process.wait()
        if self.stopping:
            return
        mark = self.mark(name, member.role)
        if code == 0 and mark.get("status") == "done":
            self.done.add(f"{name}/{member.role}")
            return
        reason = mark.get("reason") or f"ended with code {code}"
        self.terminal.say(f"{name}: {reason}" if member.role == name else f"{name}: {member.role}: {reason}")
        if mark.get("code") in (EXIT_CONFIG, EXIT_NO_PROGRESS):
            self.give_up(name, reason, mark["code"])
        self.restart(name, reason)

    def hangs(self, name: str, role: str, epoch: int) -> None:
        """A role lives but gives no sign: its group is dead, unless the role is done or already another's."""
        group = self.groups.get(name)
        started = latest_card(self.run, name) if name == "hub" else None
        if role == "controller" and (started is None or started.epoch != group.epoch):
            return
        if f"{name}/{role}" in self.done or (epoch and epoch != group.epoch):
            return
        self.terminal.say(f"{name}: {role} has given no sign for {self.config.liveness.lease_s:.0f} s, taken for dead")
        self.restart(name, "no sign of life")

    def mark(self, name: str, role: str) -> dict:
        """How a role says it ended; empty if it could not say."""
        try:
            return json.loads(self.run.exit_mark(name, self.groups[name].epoch, role).read_text())
        except (OSError, ValueError):
            return {}

    def forget(self, group: GroupProcesses) -> None:
        """Kill what is left of a group and stop watching it."""
        for member in group.members:
            if member.pidfd in self.selector.get_map():
                self.selector.unregister(member.pidfd)
        group.kill()

    def restart(self, name: str, reason: str) -> None:
        """Kill what is left of a group, tell the queue, start it again; give up if that leads nowhere."""
        group = self.groups[name]
        self.forget(group)
        self.done -= {f"{name}/{role}" for role in self.config.groups[name].roles}
        if self.client and name != "hub":
            self.client.submit("down", group=name, epoch=group.epoch)
        step = self.terminal.trained_steps()
        fresh = self.step_at_restart.get(name, -1) < step
        self.restarts[name] = 1 if fresh else self.restarts[name] + 1
        self.step_at_restart[name] = step
        if self.restarts[name] > self.config.liveness.max_restarts:
            times, allowed = self.restarts[name], self.config.liveness.max_restarts
            text = f"ended {times} times without a new step between, allowed liveness.max_restarts={allowed}"
            self.give_up(name, f"{text}; the last time: {reason}", EXIT_NO_PROGRESS)
        self.start(name)

    def give_up(self, name: str, reason: str, code: int) -> None:
        """End the run with an error that says where to look."""
        kind = ConfigError if code == EXIT_CONFIG else NoProgressError
        raise kind(f"{name}: {reason} (log: {self.run.logs(name, self.groups[name].epoch)})")

    def finished(self) -> bool:
        """Every role but the controller is done."""
        roles = {f"{name}/{role}" for name, group in self.config.groups.items() for role in group.roles}
        return roles <= self.done

    def end_hub(self) -> None:
        """All others are done: let the controller flush and go."""
        self.groups["hub"].signal(signal.SIGTERM)
        deadline = time.monotonic() + self.config.liveness.stop_timeout_s
        while "hub/controller" not in self.done and time.monotonic() < deadline:
            self.wait(0.1)
        self.terminal.show_progress()

    def stop(self) -> int:
        """Asked to end early: the actor saves at its next step's edge, then everything goes."""
        self.terminal.say("stopping; a second signal stops at once")
        self.stopping, asked = True, self.interrupted
        for names in self._stop_order():
            groups = [self.groups[name] for name in names]
            for group in groups:
                group.signal(signal.SIGTERM)
            deadline = time.monotonic() + self.config.liveness.stop_timeout_s
            while any(group.alive() for group in groups) and self.interrupted == asked and time.monotonic() < deadline:
                self.wait(_STOP_LOOK_S)
            for group in groups:
                self.forget(group)
        self.terminal.say(f"stopped; go on with: relax-hpc run --run_dir {self.run.root} --resume")
        return INTERRUPTED

    def _stop_order(self) -> list[list[str]]:
        """The actor while it can still be fed, then the others together, the hub last."""
        actors = [name for name, group in self.config.groups.items() if "actor" in group.roles and name != "hub"]
        others = [name for name in self.groups if name not in (*actors, "hub")]
        return [[name for name in names if name in self.groups] for names in (actors, others, ["hub"])]
