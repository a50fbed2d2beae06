"""What the clients of a queue do, without any rows' bytes, by whatever way of asking; and processes
that do it."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from relax_hpc.base.rundir import RunDir
from relax_hpc.base.versions import Version
from relax_hpc.config.schema import Config, GroupConfig
from relax_hpc.net.rendezvous.roster import GroupCard, claim_incarnation, publish_card
from relax_hpc.net.transport.sockets import connect, wake_listener
from relax_hpc.net.transport.wire import controller_purpose, pack, unpack
from relax_hpc.queue.controller.server import Controller
from relax_hpc.queue.lengths import pack_lengths
from relax_hpc.queue.plan import GENERATED, Plan

VERSION = Version(1, 0)
WIDTH = 512
"""Tokens that every row is said to have."""
_INCARNATION = 1
"""Of the hub."""
WAIT_S = 600.0
Ask = Callable[..., dict[str, Any]]


def plan_of(samples: int, group: int, step_groups: int, ahead: int) -> Plan:
    """A run of ``samples`` in prompt groups of ``group``, at most ``ahead`` samples of it waiting
    at a time."""
    roles = ("rollout", "actor", "reference")
    config = Config(
        groups={name: GroupConfig(roles=[name]) for name in roles},
        samples_per_prompt=group,
        max_staleness=1,
    )
    config.eval.every = config.queue.keep_steps = 0
    shape = {
        "steps": -(-samples // (group * step_groups)),
        "prompts_per_step": step_groups,
        "max_rows": ahead,
    }
    # Readers serve the first version to the end, so engines lag as far as the run is long.
    endless = {"max_staleness": shape["steps"], "publish_lag": shape["steps"], "max_bytes": 1 << 60}
    return replace(Plan.from_config(config), **endless, **shape)


def samples_of(plan: Plan) -> int:
    return plan.steps * plan.prompts_per_step * plan.samples_per_prompt


# -- the work --------------------------------------------------------------------------------------


def begin(ask: Ask) -> None:
    """Training starts, with a first version."""
    ask("actor", "resume", step=0)
    ask("actor", "publish", version=str(VERSION), digest="d")


def admit(ask: Ask, reader: str, count: int) -> list[int]:
    """Tickets; none when the run is finished."""
    return ask("rollout", "admit", reader=reader, count=count).get("tickets", [])


def put(ask: Ask, plan: Plan, tickets: list[int], name: str, lease: int = 0) -> None:
    """Generated rows, or with a lease what the reference adds to them."""
    codes = [] if lease else [VERSION.encode()]
    lengths = b"" if lease else pack_lengths([WIDTH] * plan.samples_per_prompt)
    rows = [
        {"ticket": ticket, "episodes": plan.undeclared, "lengths": lengths, "versions": codes}
        for ticket in tickets
    ]
    group, fields = ("reference", ["ref_logprobs"]) if lease else ("rollout", list(GENERATED))
    shard = {
        "plane": "file",
        "name": f"{group}-i000001-{name}.shard",
        "bytes": 16 * WIDTH * len(rows),
    }
    assert ask(group, "put", shard=shard, rows=rows, fields=fields, lease=lease)["refused"] == {}


def produce(ask: Ask, plan: Plan, batch: int, name: str) -> Iterator[None]:
    """Tickets and puts of ``batch`` samples until there are no more."""
    ask("rollout", "serve", reader=name, version=str(VERSION))
    for number in itertools.count():
        tickets = admit(ask, name, batch // plan.samples_per_prompt)
        if not tickets:
            return
        put(ask, plan, tickets, f"{name}-{number:06d}")
        yield


def consume(ask: Ask, plan: Plan, batch: int, name: str, taken: array) -> Iterator[None]:
    """Claims of at most ``batch`` samples, and their answers, until there are no more; ``taken``:
    their tickets."""
    for number in itertools.count():
        claim = ask(
            "reference",
            "claim",
            task="reference",
            budget=batch * WIDTH,
            boundary=plan.prompts_per_step,
        )
        if "finished" in claim:
            return
        taken.extend(claim["tickets"])
        put(ask, plan, claim["tickets"], f"{name}-{number:06d}", claim["lease"])
        yield


def train(ask: Ask, plan: Plan) -> Iterator[None]:
    """Whole steps, each followed by a checkpoint, which frees its rows."""
    for step in range(plan.steps):
        claim = ask("actor", "claim", task="actor", budget=1 << 40, boundary=plan.prompts_per_step)
        ask("actor", "trained", step=step, leases=[claim["lease"]])
        ask("actor", "checkpoint", step=step + 1, name=f"c{step + 1}", digest="d")
        yield


def check_all_taken(taken: Sequence[array], plan: Plan) -> None:
    """Every ticket went to one consumer, once."""
    tickets = sorted(itertools.chain.from_iterable(taken))
    assert tickets == list(range(plan.steps * plan.prompts_per_step)), (
        f"{len(tickets)} tickets were taken"
    )


# -- processes -------------------------------------------------------------------------------------


class Line:
    """A client's side of the protocol; `ask` waits for one answer at a time."""

    def __init__(self, token: bytes, endpoint: str, name: str) -> None:
        self.name, self.numbers = name, itertools.count(1)
        self.connection = connect(endpoint, token, controller_purpose(_INCARNATION), WAIT_S)
        self.connection.socket.settimeout(WAIT_S)

    def send(self, group: str, op: str, **args: Any) -> None:
        message = {
            "id": next(self.numbers),
            "client": self.name,
            "group": group,
            "incarnation": 1,
            "op": op,
            "args": args,
        }
        self.connection.send(pack({**message, "patience": WAIT_S}))

    def receive(self) -> dict[str, Any]:
        while not (payloads := self.connection.payloads()):
            self.connection.receive()
        reply = unpack(payloads[0])
        assert "error" not in reply, reply["error"]
        return reply["result"]

    def ask(self, group: str, op: str, **args: Any) -> dict[str, Any]:
        self.send(group, op, **args)
        return self.receive()

    def close(self) -> None:
        self.connection.close()


def resident(pid: int) -> int:
    """Bytes of memory that a process has."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def process(target: Callable, *args: Any) -> Iterator[Connection]:
    """Runs ``target`` in a child, with the other end of this pipe as its last argument."""
    forked = multiprocessing.get_context("fork")
    mine, its = forked.Pipe()
    child = forked.Process(target=target, args=(*args, its), daemon=True)
    child.start()
    its.close()
    try:
        yield mine
    finally:
        child.join(5.0)
        child.kill()


def receive(pipe: Connection) -> Any:
    """What the child says next."""
    if not pipe.poll(WAIT_S):
        raise TimeoutError(f"a process of the benchmark has been silent for {WAIT_S:.0f} s")
    return pipe.recv()


class Hub:
    """A controller in a process of its own."""

    def __init__(self, run: RunDir, pipe: Connection) -> None:
        self.run, self.token, self._pipe = run, run.token(), pipe
        self.endpoint, self.pid = receive(pipe)

    def line(self, name: str) -> Line:
        return Line(self.token, self.endpoint, name)

    def end(self) -> dict[str, Any]:
        """Stop it; what it has cost."""
        self._pipe.send("end")
        wake_listener(self.endpoint, WAIT_S)
        return receive(self._pipe)


@contextmanager
def hub(folder: Path, plan: Plan, durability: str) -> Iterator[Hub]:
    """Make a run in ``folder`` and serve it."""
    run = RunDir(folder / "run")
    run.create()
    with process(_serve, run, plan, durability) as pipe:
        yield Hub(run, pipe)


def _serve(run: RunDir, plan: Plan, durability: str, pipe: Connection) -> None:
    controller = Controller(run, plan, _INCARNATION, durability=durability)
    publish_card(run, GroupCard("hub", claim_incarnation(run, "hub"), [], controller.endpoint))
    pipe.send((controller.endpoint, os.getpid()))
    controller.serve(pipe.poll)
    pipe.send({"cpu_s": time.process_time()})
    controller.close()


def work(
    kind: str, name: str, token: bytes, endpoint: str, plan: Plan, batch: int, pipe: Connection
) -> None:
    """A client's process: waits for the word, then tells when it ended, what it took, and its CPU
    seconds."""
    line, taken = Line(token, endpoint, name), array("q")
    jobs: dict[str, Callable[[], Iterator[None]]] = {
        "produce": lambda: produce(line.ask, plan, batch, name),
        "consume": lambda: consume(line.ask, plan, batch, name, taken),
        "train": lambda: train(line.ask, plan),
    }
    pipe.send("ready")
    pipe.recv()
    before = time.process_time()
    for _ in jobs[kind]():
        pass
    pipe.send((time.monotonic(), taken, time.process_time() - before))
    line.close()
