"""A run of groups that are tiny real processes, for the supervisor's tests; the hub is made up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.supervise import starts, supervisor
from relax_hpc.cluster.supervise.command import Command
from relax_hpc.cluster.supervise.console import Terminal
from relax_hpc.cluster.supervise.group import Incarnation, Member
from relax_hpc.cluster.supervise.launch_records import Launch, record_launch
from relax_hpc.cluster.supervise.processes import LocalProcesses
from relax_hpc.cluster.supervise.supervisor import Outcome, Supervisor
from relax_hpc.config.groups import group_roles
from relax_hpc.config.schema import Config, GroupConfig
from relax_hpc.net.rendezvous.exit_mark import write_exit_mark
from relax_hpc.net.rendezvous.process import STOP_SIGNALS
from relax_hpc.net.rendezvous.roster import claim_incarnation
from relax_hpc.queue.client.operations import OperationRequests
from relax_hpc.queue.client.status import StatusRequests
from tests.helpers.queue_helpers import make_run

DEADLINE_S = 120.0
ROLE = """
import json, os, signal, sys
what, mark = sys.argv[1:]
# Taken by sigwait: a handler does not run if its signal comes just before signal.pause().
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
def say(status, code, reason="", **more):
    with open(mark + ".new", "w") as file:
        json.dump({"status": status, "code": code, "reason": reason, **more}, file)
    os.rename(mark + ".new", mark)
    os._exit(code)
if what == "lives":
    print("lives", flush=True)
    signal.sigwait([signal.SIGUSR2])
    say("stopped", 75, "asked to stop")
elif what == "deaf":
    print("lives", flush=True)
    while True:
        signal.pause()
elif what == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
elif what.startswith("engine:"):
    say("failed", 75, "EngineFault: dead", start_error=what.removeprefix("engine:"))
elif what == "mistyped":
    say("failed", 75, "NameError: name 'x' is not defined", is_programming_error=True)
elif what != "crashes":
    status, code = what.split(":")
    say(status, int(code), "it says so")
sys.exit(1)
"""
"""What a role does: live until it is asked to end, be killed, crash, leave a mark of "status:code",
one of an engine that does not start, "engine:its error", or one of a programming error,
"mistyped"."""
WAITS = (
    "import sys\nif sys.stdin.read(1):\n    sys.argv[1:] = ['lives', sys.argv[1]]\n    "
    f"exec({ROLE!r})"
)
"""What a role does that was started ahead."""


class Hub:
    """In place of the connection to the queue: it never answers, and remembers what it was told."""

    def __init__(self, run: RunDir, config: Config, name: str, incarnation: int) -> None:
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.status = StatusRequests(self.submit)
        self.operations = OperationRequests(self.submit)

    def submit(self, op: str, timeout: float | None = None, **args: Any) -> Future:
        self.told.append((op, args))
        return Future()

    def close(self) -> None:
        self.told.append(("close", {}))


class Tiny(LocalProcesses):
    """Processes that say when they are asked to end."""

    def __init__(self, world: World, name: str, incarnation: int, members: list[Member]) -> None:
        super().__init__(world.run, name, incarnation, members)
        self.world = world

    def request_end(self) -> None:
        others = {
            name
            for name, group in self.world.supervisor.table.supervised.items()
            if group.members and group.is_alive()
        }
        self.world.asked.append((self.name, others - {self.name}))
        super().request_end()


class Adopted(Incarnation):
    """Runs elsewhere: an earlier supervisor has started it."""

    outlives_supervisor = True
    fate = "runs"

    def request_end(self) -> None:
        self.fate = "asked"

    def request_stacks(self) -> None:
        """Nobody is there."""

    def kill(self) -> None:
        self.fate = "killed"

    def detach(self) -> None:
        self.fate = "left"


class World:
    """A run, its supervisor, and a launcher that starts what `plans` say: a word an incarnation,
    the last for ever."""

    def __init__(self, path: Path, layout: str = "local") -> None:
        self.run = make_run(path / "run")
        self.config = Config(layout=layout)
        self.config.groups = {n: GroupConfig(roles=[n]) for n in ("rollout", "actor", "reference")}
        self.config.groups["hub"] = GroupConfig()
        self.config.liveness.beat_s, self.config.liveness.stop_timeout_s = 0.05, 5.0
        self.plans: dict[str, list[str]] = {}
        self.started: list[tuple[str, int]] = []
        self.asked: list[tuple[str, set[str]]] = []
        self.handed: list[tuple[str, str]] = []
        self.adopted: dict[str, Incarnation] = {}
        self.answers: dict[str, Any] = {
            "whole": True,
            "ending": False,
            "hand_over": "",
            "lost": False,
        }
        self.on_start: Callable[[str, int], None] = lambda *_: None
        self.env = dict(os.environ)
        """Of what is started ahead."""

    # -- as a launcher -----------------------------------------------------------------------------

    def commands(self, name: str, incarnation: int) -> dict[str, Command]:
        """Of what waits: to become a role that lives."""
        words = [sys.executable, "-S", "-E", "-c", WAITS]
        log = self.run.logs(name, incarnation) / "log"
        return {
            role: Command(
                arguments=[*words, str(self.run.exit_mark(name, incarnation, role))],
                env=self.env,
                log=log,
                config=self.config,
            )
            for role in group_roles(self.config, name)
        }

    def start_ahead(self, name: str, incarnation: int, roles: Sequence[str]) -> Incarnation:
        self.run.logs(name, incarnation).mkdir(parents=True)
        members = [
            Member.start(role, self.commands(name, incarnation)[role], ahead=True) for role in roles
        ]
        return Tiny(self, name, incarnation, members)

    def start(
        self, name: str, incarnation: int, launch: Launch, ahead: Incarnation | None = None
    ) -> Incarnation:
        self.run.logs(name, incarnation).mkdir(parents=True, exist_ok=ahead is not None)
        record_launch(self.run, name, incarnation, launch)
        plan = self.plans.get(name, ["lives"])
        what = plan.pop(0) if len(plan) > 1 else plan[0]
        members = (
            ahead.members
            if ahead
            else [
                Member.from_process(role, self._process(what, name, incarnation, role))
                for role in group_roles(self.config, name)
            ]
        )
        self.started.append((name, incarnation))
        self.on_start(name, incarnation)
        return Tiny(self, name, incarnation, members)

    def _process(self, what: str, name: str, incarnation: int, role: str) -> subprocess.Popen:
        mark = str(self.run.exit_mark(name, incarnation, role))
        words = [sys.executable, "-S", "-E", "-c", ROLE, what, mark]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True)
        if what in ("lives", "deaf"):
            assert process.stdout.readline() == b"lives\n"
        process.stdout.close()
        return process

    def adopt(self, name: str, incarnation: int) -> Incarnation | None:
        return self.adopted.get(name)

    def _answer(self, what: str) -> Any:
        answer = self.answers[what]
        answer = answer.pop(0) if isinstance(answer, list) else answer
        if isinstance(answer, Exception):
            raise answer
        return answer

    def has_all_nodes(self, name: str) -> bool:
        return self._answer("whole")

    def has_lost_nodes(self, name: str) -> bool:
        return self._answer("lost")

    def is_ending(self) -> bool:
        return self._answer("ending")

    def hand_over(self, name: str, reason: str) -> str:
        self.handed.append((name, reason))
        return self._answer("hand_over")

    # -- what happens beside it --------------------------------------------------------------------

    def end_the_actor(self) -> None:
        """It has done its work."""
        write_exit_mark(self.run.exit_mark("actor", 1, "actor"))
        self.supervisor.table.supervised["actor"].members[0].process.kill()

    def go_on_in_a_job(self) -> None:
        """What happens to rollout once it was handed over: its job starts it, and it comes to its
        good end."""
        if self.supervisor.table.detached and not self.supervisor.table.supervised.keys() & {
            "rollout"
        }:
            incarnation = claim_incarnation(self.run, "rollout")
            self.run.logs("rollout", incarnation).mkdir(parents=True)
            write_exit_mark(self.run.exit_mark("rollout", incarnation, "rollout"))

    # -- the supervisor ----------------------------------------------------------------------------

    def supervise(self, *names: str, then: Callable[[], Any] = lambda: None) -> Outcome:
        """Supervise ``names`` to the end; ``then`` is called every round."""
        terminal = Terminal(self.run, self.config, steps=False)
        deadline = time.monotonic() + DEADLINE_S

        def tick() -> None:
            assert time.monotonic() < deadline, (self.run.root / "supervisor.log").read_text()
            then()

        self.supervisor = Supervisor(
            self.run, self.config, "supervisor", names, lambda _: self, 1, terminal
        )
        self.supervisor.on_round = tick
        try:
            with self.supervisor:
                return self.supervisor.supervise()
        finally:
            terminal.close()

    def told(self, op: str) -> list[dict[str, Any]]:
        assert isinstance(self.supervisor.client, Hub)
        return [args for name, args in self.supervisor.client.told if name == op]

    def said(self) -> str:
        return (self.run.root / "supervisor.log").read_text()

    def once(self, *actions: Callable[[], Any]) -> Callable[[], None]:
        """Each action in a round of its own."""
        left = list(actions)
        return lambda: left.pop(0)() if left else None


@pytest.fixture(name="world")
def world_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(supervisor, "QueueClient", Hub)
    monkeypatch.setattr(starts, "_AGAIN_S", 0.05)
    former = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield World(tmp_path)
    for number, handler in former.items():
        signal.signal(number, handler)
