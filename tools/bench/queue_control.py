"""What the queue's control plane does in a second: tickets, puts, claims and acknowledgements, without any rows' bytes.

A sample is admitted, put, claimed by a forward task, answered by it, claimed by the actor, trained and retired; in the
end every ticket is accounted for. The parts: `desk` is the controller without sockets; `sockets` is all of it, with
processes that each wait for one answer at a time; `latency` is a put of one prompt group that a waiting consumer is
told of; `claims` is a claim of 128 rows beside the number of rows that the queue holds, and the memory that these take.

    python tools/bench/queue_control.py --part desk --part sockets --durability flush --samples 200000 --json
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from queue_work import (
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

from relax_hpc.transfer_queue.desk import Desk
from relax_hpc.transfer_queue.eventlog import EventLog
from relax_hpc.transfer_queue.journal import Journal
from relax_hpc.transfer_queue.plan import Plan
from relax_hpc.transfer_queue.requests import Request
from relax_hpc.transfer_queue.state import QueueState

TOGETHER = 32
"""Requests that `desk` commits together."""
CLAIM_ROWS, CLAIMS = 128, 200
DEPTHS = (1_000, 100_000, 1_000_000)
ROUNDS = 2000
"""Of `latency`."""
LOOK_S = 0.5
MB = 1e6
Figures = dict[str, Any]


class Table:
    """A desk whose journal and events are files."""

    def __init__(self, folder: Path, plan: Plan, durable: bool) -> None:
        (folder / "journal").mkdir()
        self.journal, self.events = Journal(folder / "journal", 1, durable), EventLog(folder / "events.jsonl", 1)
        list(self.journal.replay())
        self.desk = Desk(plan, 1, QueueState(plan), self.journal)
        self._numbers = itertools.count(1)

    def ask(self, group: str, op: str, **args: Any) -> dict[str, Any]:
        number = next(self._numbers)
        answer = self.desk.handle(Request(b"", number, f"{group}#{number}", (group, 1), op, args, 0.0, 0.0))
        if not number % TOGETHER:
            self.commit()
        return answer

    def commit(self) -> None:
        """What the controller does once for all the requests that it found."""
        self.journal.commit()
        self.events.write(self.desk.state.take_lines())
        self.events.flush()
        self.desk.state.shelf.garbage.clear()


def desk(folder: Path, options: argparse.Namespace, durable: bool) -> Figures:
    """Samples a second without sockets."""
    plan = plan_of(options.samples, options.group, options.step_groups, 1 << 40)
    table, taken = Table(folder, plan, durable), array("q")
    begin(table.ask)
    workers = [produce(table.ask, plan, options.batch, "p"), consume(table.ask, plan, options.batch, "c", taken)]
    trainer, trained = train(table.ask, plan), 0
    started = time.perf_counter()
    while trained < plan.steps:
        for worker in workers:
            next(worker)
        while len(taken) >= (trained + 1) * plan.groups_per_step:
            next(trainer)
            trained += 1
    table.commit()
    seconds = time.perf_counter() - started
    check_all_taken([taken], plan)
    return rate(plan, seconds) | {"journal_bytes_per_sample": table.journal.position.offset / samples_of(plan)}


def sockets(folder: Path, options: argparse.Namespace, durable: bool) -> Figures:
    """Samples a second through sockets, what they cost the controller, and its memory at each fifth of the run."""
    plan = plan_of(options.samples, options.group, options.step_groups, options.ahead)
    kinds = [("train", "t")] + [("consume", f"c{number}") for number in range(options.consumers)]
    kinds += [("produce", f"p{number}") for number in range(options.producers)]
    with hub(folder, plan, durable) as server, ExitStack() as stack:
        line = server.line("begin")
        begin(line.ask)
        about = (server.token, server.endpoint, plan, options.batch)
        pipes = [stack.enter_context(process(work, kind, name, *about)) for kind, name in kinds]
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
    about = {f"{who}_cpu_us_per_sample": 1e6 * cpu_s / samples_of(plan) for who, cpu_s in spent.items()}
    return rate(plan, seconds) | about | {"controller_mb": memory, "snapshots": cost["snapshots"]}


def watch(line: Line, plan: Plan, pid: int) -> list[float]:
    """Memory of the controller at each fifth of the run, MB."""
    seen: list[float] = []
    while len(seen) < 5:
        time.sleep(LOOK_S)
        trained = line.ask("actor", "status")["trained_steps"]
        while trained >= plan.steps * (len(seen) + 1) // 5 and len(seen) < 5:
            seen.append(round(resident(pid) / MB, 1))
    return seen


def latency(folder: Path, options: argparse.Namespace, durable: bool) -> Figures:
    """Milliseconds from a put of one prompt group to its answer, and to that of a claim that waited for it."""
    plan = plan_of(ROUNDS * options.group, options.group, ROUNDS, 1 << 40)
    answered, told = [], []
    with hub(folder, plan, durable) as server:
        producer, consumer = server.line("producer"), server.line("consumer")
        begin(producer.ask)
        producer.ask("rollout", "serve", reader="r", version=str(VERSION))
        for number in range(ROUNDS):
            tickets = admit(producer.ask, "r", 1)
            consumer.send("reference", "claim", task="reference", budget=1, boundary=1)
            producer.ask("rollout", "beat", member="r")
            started = time.perf_counter()
            put(producer.ask, plan, tickets, f"{number:06d}")
            answered.append(time.perf_counter() - started)
            claim = consumer.receive()
            told.append(time.perf_counter() - started)
            put(consumer.ask, plan, claim["tickets"], f"{number:06d}", claim["lease"])
        producer.close()
        consumer.close()
        server.end()
    return {"put_ms": quantiles(answered), "put_to_claim_ms": quantiles(told)}


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    cuts = statistics.quantiles(seconds, n=100)
    return {"p50": 1e3 * cuts[49], "p99": 1e3 * cuts[98]}


def claims(folder: Path, options: argparse.Namespace, durable: bool) -> Figures:
    """Microseconds of a claim at several depths, the oldest ticket being in generation yet, and memory of the rows."""
    figures: Figures = {}
    for depth, ordered in itertools.product(options.depth, (False, True)):
        place = folder / f"{depth}-{ordered}"
        place.mkdir()
        with process(measure_claims, place, options.group, depth, ordered, durable) as pipe:
            figures[f"{depth} rows, {'in order' if ordered else 'as ready'}"] = receive(pipe)
    return figures


def measure_claims(folder: Path, group: int, depth: int, ordered: bool, durable: bool, pipe: Connection) -> None:
    """In a process of its own, whose memory is the queue's."""
    before = resident(os.getpid())
    table, plan = filled(folder, group, depth, ordered, durable)
    held = resident(os.getpid()) - before
    seconds = timed_claims(table, plan)
    pipe.send({"claim_us": 1e6 * statistics.median(seconds), "mb_per_million_rows": held / depth})


def filled(folder: Path, group: int, depth: int, ordered: bool, durable: bool) -> tuple[Table, Plan]:
    """A queue with ``depth`` rows that wait for the reference."""
    plan = plan_of(depth + group, group, depth // group + 1, 1 << 40)
    task = replace(plan.tasks["reference"], in_order=ordered)
    plan = replace(plan, tasks=plan.tasks | {"reference": task})
    table = Table(folder, plan, durable)
    begin(table.ask)
    table.ask("rollout", "serve", reader="r", version=str(VERSION))
    if not ordered:
        admit(table.ask, "r", 1)
    for number in range(depth // CLAIM_ROWS):
        put(table.ask, plan, admit(table.ask, "r", CLAIM_ROWS // group), f"{number:06d}")
    return table, plan


def timed_claims(table: Table, plan: Plan) -> list[float]:
    seconds = []
    window = {"task": "reference", "budget": CLAIM_ROWS * WIDTH, "boundary": plan.groups_per_step}
    for _ in range(CLAIMS):
        started = time.perf_counter()
        claim = table.ask("reference", "claim", **window)
        seconds.append(time.perf_counter() - started)
        assert len(claim["tickets"]) == CLAIM_ROWS // plan.samples_per_group
        table.ask("reference", "release", lease=claim["lease"])
    return seconds


def rate(plan: Plan, seconds: float) -> Figures:
    return {"samples": samples_of(plan), "samples_per_s": samples_of(plan) / seconds}


PARTS: dict[str, Callable[[Path, argparse.Namespace, bool], Figures]] = {
    "desk": desk,
    "sockets": sockets,
    "latency": latency,
    "claims": claims,
}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=list(PARTS), help="default: all")
    parser.add_argument("--durability", action="append", choices=["flush", "commit"], help="default: both")
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=64, help="samples of one put and of one claim")
    parser.add_argument("--group", type=int, default=8, help="samples of one prompt group")
    parser.add_argument("--step-groups", type=int, default=128, help="prompt groups of one training step")
    parser.add_argument("--ahead", type=int, default=65_536, help="samples that may wait for training")
    parser.add_argument("--producers", type=int, default=64)
    parser.add_argument("--consumers", type=int, default=16)
    parser.add_argument("--depth", type=int, action="append", help=f"rows of `claims`; default: {DEPTHS}")
    parser.add_argument("--folder", type=Path, default=Path(), help="where journals are written: its disk matters")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    options.depth = options.depth or list(DEPTHS)
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Print the figures, a line each or as one JSON object."""
    options = parse(argv)
    results: Figures = {}
    for part, durability in itertools.product(options.part or PARTS, options.durability or ("flush", "commit")):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            figures = PARTS[part](Path(folder), options, durability == "commit")
        results[f"{part}, {durability}"] = figures
        if not options.json:
            print(f"{part}, {durability}: {json.dumps(figures)}", flush=True)
    if options.json:
        print(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
