"""The queue's control plane: tickets, puts, claims and acknowledgements, without any rows' bytes.

A sample is admitted, put, claimed by a forward task, answered by it, claimed by the actor, trained
and retired; in the end every ticket is accounted for.
"""

from __future__ import annotations

import itertools
import statistics
import time
from array import array
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from work import (
    VERSION,
    WIDTH,
    Line,
    admit,
    begin,
    check_all_taken,
    consume,
    hub,
    plan_of,
    process,
    produce,
    put,
    receive,
    resident,
    samples_of,
    train,
    work,
)

from relax_hpc.queue.controller.eventlog import EventLog
from relax_hpc.queue.controller.journal import Journal
from relax_hpc.queue.controller.messages import Request
from relax_hpc.queue.controller.service import QueueService
from relax_hpc.queue.controller.state.queue_state import QueueState
from relax_hpc.queue.plan import Plan

TOGETHER = 32
"""Requests that a `Table` commits together."""
CLAIM_ROWS = 128
BATCH = 64
"""Samples of one put and of one claim."""
GROUP = 8
"""Samples of one prompt group."""
STEP_GROUPS = 128
AHEAD = 65_536
"""Samples that may wait for training."""
LOOK_S = 0.5
MB = 1e6
Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Crowd:
    """How much control work, and by how many processes."""

    samples: int = 1_000_000
    producers: int = 64
    consumers: int = 16
    step_groups: int = STEP_GROUPS


class Table:
    """A service without sockets, whose journal and events are files."""

    def __init__(self, folder: Path, plan: Plan, durable: bool) -> None:
        (folder / "journal").mkdir()
        self.journal, self.events = (
            Journal(folder / "journal", 1, durable),
            EventLog(folder / "events.jsonl", 1),
        )
        list(self.journal.replay())
        self.service = QueueService(plan, 1, QueueState(plan), self.journal)
        self._numbers = itertools.count(1)

    def ask(self, group: str, op: str, **args: Any) -> dict[str, Any]:
        number = next(self._numbers)
        answer = self.service.handle(
            Request(0, number, f"{group}#{number}", (group, 1), op, args, 0.0, 0.0)
        )
        if not number % TOGETHER:
            self.commit()
        return answer

    def commit(self) -> None:
        """What the controller does once for all the requests that it found."""
        self.journal.commit()
        self.events.write(self.service.state.events.take_lines())
        self.events.flush()
        self.service.state.shards.garbage.clear()


def without_sockets(folder: Path, samples: int, durable: bool) -> float:
    """Samples a second that one process does alone, nobody asking it through a socket."""
    plan = plan_of(samples, GROUP, STEP_GROUPS, 1 << 40)
    table, taken = Table(folder, plan, durable), array("q")
    begin(table.ask)
    workers = [produce(table.ask, plan, BATCH, "p"), consume(table.ask, plan, BATCH, "c", taken)]
    trainer, trained = train(table.ask, plan), 0
    started = time.perf_counter()
    while trained < plan.steps:
        for worker in workers:
            next(worker)
        while len(taken) >= (trained + 1) * plan.prompts_per_step:
            next(trainer)
            trained += 1
    table.commit()
    check_all_taken([taken], plan)
    return samples_of(plan) / (time.perf_counter() - started)


def crowd(folder: Path, about: Crowd, durability: str) -> Figures:
    """Samples a second through sockets, what they cost the controller, and its memory at each fifth
    of the run."""
    plan = plan_of(about.samples, GROUP, about.step_groups, AHEAD)
    kinds = [("train", "t")] + [("consume", f"c{number}") for number in range(about.consumers)]
    kinds += [("produce", f"p{number}") for number in range(about.producers)]
    with hub(folder, plan, durability) as server, ExitStack() as stack:
        line = server.line("begin")
        begin(line.ask)
        args = (server.token, server.endpoint, plan, BATCH)
        pipes = [stack.enter_context(process(work, kind, name, *args)) for kind, name in kinds]
        for pipe in pipes:
            receive(pipe)
        started = time.monotonic()
        for pipe in pipes:
            pipe.send("go")
        memory = watch(line, plan, server.pid)
        ends = [receive(pipe) for pipe in pipes]
        line.close()
        cost = server.end()
    check_all_taken([taken for _, taken, _ in ends], plan)
    seconds = max(end for end, _, _ in ends) - started
    spent = {"controller": cost["cpu_s"], "clients": sum(cpu_s for _, _, cpu_s in ends)}
    figures = {
        f"{who}_cpu_us_per_sample": 1e6 * cpu_s / samples_of(plan) for who, cpu_s in spent.items()
    }
    return figures | {"samples_per_s": samples_of(plan) / seconds, "controller_mb": memory}


def watch(line: Line, plan: Plan, pid: int) -> list[float]:
    """Memory of the controller at each fifth of the run, MB."""
    seen: list[float] = []
    while len(seen) < 5:
        time.sleep(LOOK_S)
        trained = line.ask("actor", "status")["trained_steps"]
        while trained >= plan.steps * (len(seen) + 1) // 5 and len(seen) < 5:
            seen.append(round(resident(pid) / MB, 1))
    return seen


@dataclass(frozen=True, slots=True)
class Deep:
    """A controller with many rows, and who asks it."""

    line: Line
    plan: Plan
    bytes_per_row: float
    """Of the controller's memory."""


@contextmanager
def deep_queue(folder: Path, depth: int) -> Iterator[Deep]:
    """``depth`` rows that wait for the reference, the oldest ticket being in generation yet."""
    plan = plan_of(depth + GROUP, GROUP, depth // GROUP + 1, 1 << 40)
    plan = replace(
        plan, tasks=plan.tasks | {"reference": replace(plan.tasks["reference"], in_order=False)}
    )
    with hub(folder, plan, "flush") as server:
        line, before = server.line("all"), resident(server.pid)
        begin(line.ask)
        line.ask("rollout", "serve", reader="r", version=str(VERSION))
        admit(line.ask, "r", 1)
        for number in range(depth // CLAIM_ROWS):
            put(line.ask, plan, admit(line.ask, "r", CLAIM_ROWS // GROUP), f"{number:06d}")
        yield Deep(line, plan, (resident(server.pid) - before) / depth)
        line.close()
        server.end()


def timed_claims(line: Line, plan: Plan, count: int) -> float:
    """Median of the seconds of ``count`` claims of `CLAIM_ROWS`."""
    seconds = []
    window = {"task": "reference", "budget": CLAIM_ROWS * WIDTH, "boundary": plan.prompts_per_step}
    for _ in range(count):
        started = time.perf_counter()
        claim = line.ask("reference", "claim", **window)
        seconds.append(time.perf_counter() - started)
        assert len(claim["tickets"]) == CLAIM_ROWS // plan.samples_per_prompt
        line.ask("reference", "release", lease=claim["lease"])
    return statistics.median(seconds)
