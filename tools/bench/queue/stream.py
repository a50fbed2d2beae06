"""Puts that follow one another, beside puts each of which waits until the files of those before are
written.

The durable copy of a shard is written beside all else: what of the next put's time that takes is
what is looked at.
"""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from pathlib import Path

from data import Load, config_of, rows_of
from work import VERSION, begin, hub, process, receive

from relax_hpc.base.rundir import RunDir
from relax_hpc.config.schema import Config
from relax_hpc.queue import Plan, QueueClient

Seconds = dict[str, list[float]]
"""Of each put: "alone", and in the "stream"."""


def streamed(folder: Path, load: Load, durability: str, puts: int) -> Seconds:
    """So many ``puts`` of ``load`` of both kinds, by one process."""
    config = config_of(load, durability)
    with hub(folder, Plan.from_config(config), durability) as served:
        line = served.line("actor")
        begin(line.ask)
        with process(_put, served.run, config, load, puts) as pipe:
            found = receive(pipe)
            pipe.send("end")
        line.close()
        served.end()
    return found


def _put(run: RunDir, config: Config, load: Load, puts: int, pipe: Connection) -> None:
    columns, seconds = load.columns(), Seconds(alone=[], stream=[])
    with QueueClient(run, config, "rollout", 1) as client:
        client.connection.call("serve", reader="r", version=str(VERSION))
        for kind in ("alone", "stream") * 2:
            for _ in range(puts // 2):
                tickets = client.connection.call(
                    "admit", reader="r", count=config.prompts_per_step
                )["tickets"]
                rows = rows_of(columns, tickets, config.samples_per_prompt)
                if kind == "alone":
                    client.settle()
                started = time.perf_counter()
                refused = client.put(rows, [*load.names, "reward"])
                seconds[kind].append(time.perf_counter() - started)
                assert not refused, refused
            client.settle()
        pipe.send(seconds)
        pipe.recv()
