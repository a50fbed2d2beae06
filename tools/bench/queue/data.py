"""Rows with their bytes, from one process to another, beside a memcpy of the same bytes in each of
the two.

A get ends when every byte has been copied into memory that its reader has had for long, field by
field. Puts and gets come one after the other; between them, untimed, the durable copy is written,
unless it is asked for otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from work import VERSION, WAIT_S, begin, hub, process, receive

from relax_hpc.base.rundir import RunDir
from relax_hpc.config.schema import Config, GroupConfig
from relax_hpc.net.transport import TcpPlane
from relax_hpc.queue import Claim, Column, Plan, QueueClient
from relax_hpc.queue.row_ids import row_id
from relax_hpc.queue.row_schema import Row
from relax_hpc.queue.storage.shard_store import ShardReader, shard_files

STEPS = 1 << 19
"""More than anybody measures; each round is one."""
ALL = 1 << 50
POLL_S = 0.005
HOW = ("get", "get while written", "get rows", "get tcp", "get file")


@dataclass(frozen=True)
class Load:
    """Rows of ``fields`` int32 fields of ``tokens`` entries; ``variable``: of an eighth of that and
    more.

    ``plain``: none of them is one of which the queue looks at each entry, as it does at a sample's
    token_versions.
    """

    samples: int
    tokens: int
    fields: int
    variable: bool = False
    plain: bool = False

    @cached_property
    def lengths(self) -> list[int]:
        least = self.tokens // 8 if self.variable else self.tokens
        return (
            np.random.default_rng(self.samples)
            .integers(least, self.tokens + 1, self.samples)
            .tolist()
        )

    @property
    def names(self) -> list[str]:
        known = ["token_ids"] if self.plain else ["token_ids", "token_versions"]
        return [*known, *(f"field{number}" for number in range(len(known), self.fields))][
            : self.fields
        ]

    @property
    def bytes(self) -> int:
        return 4 * self.fields * sum(self.lengths)

    @property
    def group(self) -> int:
        """Samples of a prompt group."""
        return min(8, self.samples)

    def columns(self) -> dict[str, list[np.ndarray]]:
        """Of each field its rows."""
        random, ends = np.random.default_rng(0), np.cumsum(self.lengths)[:-1]
        flat = {
            name: random.integers(0, 150_000, sum(self.lengths), dtype=np.int32)
            for name in self.names
        }
        if "token_versions" in flat:
            flat["token_versions"][:] = VERSION.encode()
        columns = {name: np.split(values, ends) for name, values in flat.items()}
        return {"token_versions": [np.array([VERSION.encode()], np.int32)] * self.samples} | columns


def config_of(load: Load, durability: str) -> Config:
    """A run whose every step is one put."""
    groups = {name: GroupConfig(roles=[name]) for name in ("rollout", "actor")}
    about = {"samples_per_prompt": load.group, "prompts_per_step": load.samples // load.group}
    config = Config(groups=groups, steps=STEPS, max_staleness=STEPS, **about)
    config.eval.every = config.queue.keep_steps = 0
    config.queue.durability, config.queue.wait_timeout_s = durability, WAIT_S
    config.liveness.beat_s = 0.05
    # Nobody takes new weights here: readers serve the first version to the end.
    config.weights.publish_lag = STEPS
    return config


class Memcpy:
    """Seconds of one of so many bytes, in memory that this process has had for long."""

    def __init__(self, size: int) -> None:
        self._source, self._room = np.ones(size, np.uint8), np.zeros(size, np.uint8)

    def __call__(self) -> float:
        started = time.perf_counter()
        np.copyto(self._room, self._source)
        return time.perf_counter() - started


def digest_of(columns: list[list[np.ndarray]] | list[np.ndarray]) -> str:
    """Of all numbers of all fields, in their order."""
    found = xxhash.xxh3_64()
    for column in columns:
        found.update(
            np.ascontiguousarray(np.concatenate(column) if isinstance(column, list) else column)
        )
    return found.hexdigest()


# -- the process that puts -------------------------------------------------------------------------


def make(run: RunDir, config: Config, load: Load, pipe: Connection) -> None:
    """Put when told to; tell when it began and ended, and what a memcpy takes."""
    columns, memcpy = load.columns(), Memcpy(load.bytes)
    pipe.recv()
    with QueueClient(run, config, "rollout", 1) as client:
        client.connection.call("serve", reader="r", version=str(VERSION))
        pipe.send(digest_of([columns[name] for name in load.names]))
        while pipe.recv() != "end":
            tickets = client.connection.call("admit", reader="r", count=config.prompts_per_step)[
                "tickets"
            ]
            rows = rows_of(columns, tickets, config.samples_per_prompt)
            pipe.send("ready")
            pipe.recv()
            started = time.monotonic()
            refused = client.put(rows, [*load.names, "reward"])
            ended = time.monotonic()
            assert not refused, refused
            pipe.send((started, ended))
            pipe.recv()
            client.settle()
            pipe.send(memcpy())
            pipe.recv()
            wait_for(
                lambda: not client.store.pool.taken,
                "memory of rows that nobody needs was not freed",
            )
            pipe.send("free")
    pipe.send("ended")


def rows_of(columns: dict[str, list[np.ndarray]], tickets: list[int], group: int) -> list[Row]:
    names = [row_id(ticket, k) for ticket in tickets for k in range(group)]
    about = {"prompt_len": 0, "reward": 1.0}
    return [
        {"row_id": name, **about} | {field: values[number] for field, values in columns.items()}
        for number, name in enumerate(names)
    ]


def wait_for(done: Callable[[], bool], complaint: str) -> None:
    until = time.monotonic() + WAIT_S
    while not done():
        if time.monotonic() > until:
            raise TimeoutError(complaint)
        time.sleep(POLL_S)


# -- the process that gets -------------------------------------------------------------------------


class Taker:
    """Gets what is put, and trains on it, so that it is freed."""

    def __init__(self, client: QueueClient, load: Load) -> None:
        self.client, self.names, self.step = client, load.names, 0
        self.memcpy = Memcpy(load.bytes)
        # With what else is in a shard: names and lengths of its samples.
        self.copied = memoryview(bytearray(load.bytes + 1024 * load.samples + (1 << 16)))
        self.columns: dict[str, Column] = {}
        self.digest = ""
        self.room = {name: np.zeros(sum(load.lengths), np.int32) for name in load.names}
        files = shard_files(client.run, client.config)
        tcp = TcpPlane(client.run.token(), "127.0.0.1")
        self.readers = {"get tcp": ShardReader(files, [tcp]), "get file": ShardReader(files)}

    def copy(self, rows: list[Row]) -> None:
        for name, room in self.room.items():
            np.concatenate([row[name] for row in rows], out=room)

    def get(self) -> tuple[Claim, float]:
        """A claim, all of whose fields are copied then, and the seconds."""
        started = time.perf_counter()
        claim = self.client.claim("actor", ALL)
        assert claim is not None
        self.copy_columns(claim)
        return claim, time.perf_counter() - started

    def copy_columns(self, claim: Claim) -> None:
        self.columns = self.client.columns(claim, list(self.room), self.copied)

    def get_otherwise(self, claim: Claim) -> dict[str, float]:
        """Seconds to read the same row by row, and by the planes that compare checksums; the claim
        is not in them."""
        started = time.perf_counter()
        self.copy(self.client.rows(claim))
        seconds = {"get rows": time.perf_counter() - started}
        for how, reader in self.readers.items():
            started = time.perf_counter()
            self.copy([row for shard in claim.shards for row in reader.read(shard).values()])
            seconds[how] = time.perf_counter() - started
            reader.forget(set())
        return seconds

    def train(self, claim: Claim) -> None:
        self.client.connection.call("trained", step=self.step, leases=[claim.lease])
        self.step += 1
        self.client.connection.call("checkpoint", step=self.step, name=f"c{self.step}", digest="d")

    def close(self) -> None:
        for reader in self.readers.values():
            reader.close()


def take(run: RunDir, config: Config, load: Load, pipe: Connection) -> None:
    """Get when told to; tell how long it took, or as one who waits for it, when it was there."""
    with QueueClient(run, config, "actor", 1) as client:
        begin(lambda _, op, **args: client.connection.call(op, **args))
        taker = Taker(client, load)
        pipe.send("ready")
        while (what := pipe.recv()) != "end":
            if what == "wait":
                later = client.submit_claim("actor", ALL)
                # Answered after the claim was looked at, which waits from then on.
                started = time.perf_counter()
                client.connection.call("checkpoints")
                pipe.send(time.perf_counter() - started)
                claim = later.result()
                taker.copy_columns(claim)
                pipe.send(time.monotonic())
            else:
                claim, seconds = taker.get()
                pipe.send({"get": seconds, "get memcpy": taker.memcpy()})
            pipe.recv()
            taker.digest = (
                digest_of([column.flat for column in taker.columns.values()])
                if what == "check"
                else ""
            )
            otherwise = taker.get_otherwise(claim) if what == "check" else {}
            pipe.send({"digest": taker.digest, **otherwise} if what == "check" else {})
            taker.train(claim)
        taker.close()
    pipe.send("ended")


# -- both ------------------------------------------------------------------------------------------


class Move:
    """Both processes, which do one thing at a time."""

    def __init__(self, maker: Connection, taker: Connection) -> None:
        self.maker, self.taker = maker, taker
        receive(taker)
        self.digest = self._ask(maker, "go")

    def _ask(self, pipe: Connection, what: str) -> Any:
        pipe.send(what)
        return receive(pipe)

    def round(self, while_written: bool = False, check: bool = False) -> dict[str, float]:
        """Seconds of a put, of a get, and of a memcpy beside each; ``check``: RuntimeError if the
        bytes differ."""
        what = "check" if check else "get"
        self._ask(self.maker, "next")
        started, ended = self._ask(self.maker, "put")
        seconds = {"put": ended - started}
        if while_written:
            got = self._ask(self.taker, what)
            seconds["put memcpy"] = self._ask(self.maker, "settle")
        else:
            seconds["put memcpy"] = self._ask(self.maker, "settle")
            got = self._ask(self.taker, what)
        told = self._ask(self.taker, "tell")
        if check and told.pop("digest") != self.digest:
            raise RuntimeError("other bytes came than were put")
        self._ask(self.maker, "free")
        return seconds | got | told

    def latency(self) -> dict[str, float]:
        """Seconds until a put is answered, until one who waits for it has read it, and of a request
        alone."""
        self._ask(self.maker, "next")
        request = self._ask(self.taker, "wait")
        started, ended = self._ask(self.maker, "put")
        there = receive(self.taker)
        self._ask(self.maker, "settle")
        self._ask(self.taker, "tell")
        self._ask(self.maker, "free")
        return {"put": ended - started, "put to read": there - started, "request": request}

    def end(self) -> None:
        for pipe in (self.taker, self.maker):
            self._ask(pipe, "end")


@contextmanager
def move_of(folder: Path, load: Load, durability: str = "flush") -> Iterator[Move]:
    """A controller, a process that puts and one that gets, warmed up."""
    config = config_of(load, durability)
    with hub(folder, Plan.from_config(config), durability) as server:
        about = (server.run, config, load)
        with process(make, *about) as maker, process(take, *about) as taker:
            move = Move(maker, taker)
            yield move
            move.end()
        server.end()
