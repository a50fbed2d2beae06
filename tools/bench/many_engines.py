"""A hub with 1,000 simulated engines: its share of a core, and the latency of admission.

The engines are readers of the queue, in a few processes. Each joins, serves a version, and takes a
ticket every 30 s at its own time; the rows of a ticket are put when it takes the next one. Eight
engines share a process of the run, which sends a beat every 0.5 s. A forward role and a trainer
take the rows. The requests are those of real rollout processes; the bytes of the rows are missing.
CPU seconds and latencies are those of the time after all engines have joined. A beat changes
nothing on disk: its latency shows what the machine's other load costs.

    python tools/bench many_engines --store
    python tools/bench/many_engines.py --engines 100 --seconds 20
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import os
import random
import sys
import tempfile
import time
from array import array
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parent / "queue"))

from figures import Figure, print_figures
from table import median, quantile
from work import VERSION, Line, admit, begin, hub, plan_of, process, put, receive, work

from relax_hpc.queue.plan import Plan

GROUP = 8
"""Episodes of a prompt group."""
STEP_GROUPS = 128
PROCESSES = 4
"""Processes of this benchmark that send the requests of all engines."""
ENGINES_PER_MEMBER, BEAT_S = 8, 0.5
TARGET_SHARE, TARGET_MS = 0.5, 50.0


def drive(
    names: list[str], every_s: float, seconds: float, line_args: tuple, plan: Plan, pipe: Connection
) -> None:
    """Be the engines ``names``, one request at a time, until ``seconds`` after the word to begin;
    send the latencies in seconds, and how late the requests were sent."""
    token, endpoint = line_args
    line = Line(token, endpoint, names[0])
    draw = random.Random(names[0])
    for name in names:
        line.ask("rollout", "serve", reader=name, version=str(VERSION))
    pipe.send("ready")
    pipe.recv()
    started = time.monotonic()
    members = [f"member of {name}" for name in names[::ENGINES_PER_MEMBER]]
    due = [(started + draw.uniform(0.0, every_s), name) for name in names]
    due += [(started + draw.uniform(0.0, BEAT_S), member) for member in members]
    heapq.heapify(due)
    held: dict[str, list[int]] = {}
    latencies = {"admit": array("d"), "beat": array("d")}
    delays = array("d")
    for number in itertools.count():
        due_at, name = heapq.heappop(due)
        if due_at > started + seconds:
            break
        time.sleep(max(0.0, due_at - time.monotonic()))
        is_beat = name.startswith("member")
        if tickets := held.pop(name, []):
            put(line.ask, plan, tickets, f"{name.replace('/', '-')}-{number:06d}")
        asked = time.monotonic()
        if is_beat:
            line.ask("rollout", "beat", member=name, busy_s=1.0, progress=number)
        else:
            delays.append(asked - due_at)
            held[name] = admit(line.ask, name, 1)
        latencies["beat" if is_beat else "admit"].append(time.monotonic() - asked)
        heapq.heappush(due, (due_at + (BEAT_S if is_beat else every_s), name))
    pipe.send((latencies, delays))
    line.close()


def measure(args: argparse.Namespace, folder: Path) -> list[Figure]:
    """Run the hub, the engines and a trainer, and measure."""
    tickets = args.engines * (args.seconds / args.every + 2)
    samples = int(GROUP * (tickets + 8 * STEP_GROUPS))
    plan = replace(plan_of(samples, GROUP, STEP_GROUPS, 1 << 40), max_rows=1 << 40)
    names = [f"rollout/{number}" for number in range(args.engines)]
    parts = [names[first::PROCESSES] for first in range(PROCESSES)]
    with hub(folder, plan, args.durability) as server, ExitStack() as stack:
        line = server.line("begin")
        begin(line.ask)
        ends = (server.token, server.endpoint)
        joined = time.monotonic()
        pipes = [
            stack.enter_context(process(drive, part, args.every, args.seconds, ends, plan))
            for part in parts
        ]
        trainer = stack.enter_context(process(work, "train", "t", *ends, plan, GROUP))
        consumer = stack.enter_context(process(work, "consume", "c", *ends, plan, 64))
        for pipe in (*pipes, trainer, consumer):
            receive(pipe)
        join_s = time.monotonic() - joined
        controller = psutil.Process(server.pid)
        before = sum(controller.cpu_times()[:2])
        started = time.monotonic()
        for pipe in (trainer, consumer, *pipes):
            pipe.send("go")
        results = [pipe.recv() for pipe in pipes]
        cpu_s = sum(controller.cpu_times()[:2]) - before
        share = cpu_s / (time.monotonic() - started)
        # The run has more steps than tickets were taken; its other processes are ended.
        memory_mb = controller.memory_info().rss / 1e6
        line.close()
    latencies = [1e3 * value for result in results for value in result[0]["admit"]]
    beats = [1e3 * value for result in results for value in result[0]["beat"]]
    delays = [1e3 * value for result in results for value in result[1]]
    return [
        Figure("hub's share of a core", share, "cores", "<= 0.5", share <= TARGET_SHARE),
        Figure(
            "admission, p99",
            quantile(latencies, 0.99),
            "ms",
            "<= 50",
            quantile(latencies, 0.99) <= TARGET_MS,
        ),
        Figure("admission, median", median(latencies), "ms"),
        Figure("admission, largest", max(latencies), "ms"),
        Figure("beat, p99", quantile(beats, 0.99), "ms"),
        Figure("beat, median", median(beats), "ms"),
        Figure("tickets taken", len(latencies), "tickets"),
        Figure("requests sent late, p99", quantile(delays, 0.99), "ms"),
        Figure("all engines joined", join_s, "s"),
        Figure("hub's memory", memory_mb, "MB"),
    ]


def main() -> int:
    """Measure and print; 1 if a target is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds of measurement")
    parser.add_argument("--every", type=float, default=30.0, help="seconds between two tickets")
    parser.add_argument("--durability", default="commit", choices=("commit", "flush"))
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args()
    settings = {name: getattr(args, name) for name in ("engines", "seconds", "every", "durability")}
    with tempfile.TemporaryDirectory(prefix="engines-", dir=os.environ.get("TMPDIR")) as folder:
        figures = print_figures(measure(args, Path(folder)), settings, args.json)
    return int(any(figure.ok is False for figure in figures))


if __name__ == "__main__":
    sys.exit(main())
