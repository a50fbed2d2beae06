"""What a get costs on each plane that is in memory, beside a memcpy of the same bytes in the same
process.

Where NIXL is installed there are two rows more: plane `rdma`, here over process_vm_readv, and
`nixl`, which is one read by NIXL alone into memory that was registered before, with nothing
checked.

Another process publishes; this one reads, the planes and the memcpy in turn. A get ends when every
byte has been copied into memory of the reader: by the plane itself, or by a memcpy from what the
plane has mapped. What a plane checks it checks here too. Bytes are compared once, before the clock
runs.

    python tools/bench/planes.py --size 64KiB --size 64MiB --json
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, Pipe

import msgpack
import numpy as np
from figures import Figure, print_result

from relax_hpc.net.rendezvous.process import die_with_parent
from relax_hpc.net.transport import Descriptor, Plane, ShmPlane, SlabPool, TcpPlane
from relax_hpc.net.transport.links import Deadline
from relax_hpc.net.transport.rdma import RdmaPlane
from relax_hpc.net.transport.rdma_agent import NixlAgent, address_of, why_not_installed


class RawNixl(Plane):
    """As little as NIXL can do: the record is in a slab, one peer, one reader, one record at a
    time, no checks."""

    name = "nixl"

    def __init__(self, pool: SlabPool) -> None:
        self._pool, self._room = pool, SlabPool()
        self._agent = NixlAgent("bench")
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)
        self._thread.start()

    def _poll(self) -> None:
        while not self._ending.wait(0.02):
            self._agent.serve_readers(Deadline(READ_S))

    def publish(self, name: str, record: memoryview) -> Descriptor:
        number, deadline = self._pool.locate(record)[0], Deadline(READ_S)
        self._agent.register(number, record, deadline)
        metadata = self._agent.metadata([number], deadline)
        return {
            "agent": self._agent.name,
            "metadata": metadata,
            "address": address_of(record),
            "size": len(record),
        }

    def read(self, descriptor: Descriptor, timeout_s: float) -> memoryview:
        deadline, (agent, metadata, theirs, size) = Deadline(timeout_s), descriptor.values()
        slab = self._room.take(size)
        self._agent.register(slab.number, slab.memory, deadline)
        self._agent.add_peer(agent, metadata, deadline)
        with self._agent.lock(deadline) as nixl:
            mine = nixl.get_xfer_descs([(address_of(slab.memory), size, 0)], "DRAM")
            handle = nixl.initialize_xfer(
                "READ", mine, nixl.get_xfer_descs([(theirs, size, 0)], "DRAM"), agent
            )
            state = nixl.transfer(handle)
            while state == "PROC":
                state = nixl.check_xfer_state(handle)
        self._room.give_back(slab)
        if state != "DONE":
            raise RuntimeError(f"nixl: the transfer ended as {state}")
        return slab.memory[:size]

    def retire(self, name: str) -> None:
        pass

    def close(self) -> None:
        self._ending.set()
        self._thread.join()
        self._agent.close()


PLANES: dict[str, Callable[[bytes, SlabPool], Plane]] = {
    "shm": ShmPlane,
    "tcp": lambda token, _: TcpPlane(token, "127.0.0.1"),
    "rdma": lambda token, pool: RdmaPlane(token, pool, f"bench-{os.getpid()}"),
    "nixl": lambda _, pool: RawNixl(pool),
}
BY_NIXL = ("rdma", "nixl")
COPIES = {"tcp", *BY_NIXL}
"""Planes that give a copy; what the others give is copied here."""
MEMCPY = "memcpy"
UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
SIZES = ("64B", "4KiB", "64KiB", "1MiB", "16MiB", "64MiB", "256MiB")
READ_S = 60.0
BURST_S, BURST = 0.005, 50
"""One turn of a plane is about so long, and so many gets at most."""


@dataclass(frozen=True, slots=True)
class Result:
    """Of one plane at one size: seconds of a get, and how many times the speed of a memcpy that
    is."""

    size: int
    plane: str
    gets: int
    median_s: float
    p99_s: float
    bytes_per_s: float
    ratio: float
    """Of the medians; `best_ratio` of the shortest gets."""
    best_ratio: float


def size_of(text: str) -> int:
    """Bytes of "64KiB".

    >>> size_of("64KiB")
    65536
    """
    found = re.fullmatch(r"(\d+)([KMG]i)?B", text)
    if not found or not int(found[1]):
        raise argparse.ArgumentTypeError(
            f"found {text!r}, allowed a number and one of {', '.join(UNITS)}: 64KiB"
        )
    return int(found[1]) * UNITS[f"{found[2] or ''}B"]


def in_words(size: int) -> str:
    unit = max((unit for unit in UNITS if not size % UNITS[unit]), key=UNITS.__getitem__)
    return f"{size // UNITS[unit]} {unit}"


def pattern(size: int) -> np.ndarray:
    """Bytes of which no page is like another."""
    return np.random.default_rng(size).integers(0, 256, size, np.uint8)


# -- the process that publishes --------------------------------------------------------------------


def serve(pipe: Connection) -> None:
    """Publish a record of every size asked for on every plane, from one slab; until nobody asks."""
    token, names = msgpack.unpackb(pipe.recv_bytes())
    pool = SlabPool()
    planes = {name: PLANES[name](token, pool) for name in names}
    while True:
        try:
            size = msgpack.unpackb(pipe.recv_bytes())
        except EOFError:
            return
        slab = pool.take(size)
        slab.memory[:size] = pattern(size).data
        descriptors = {
            name: plane.publish("record", slab.memory[:size]) for name, plane in planes.items()
        }
        pipe.send_bytes(msgpack.packb(descriptors))
        pipe.recv_bytes()
        for plane in planes.values():
            plane.retire("record")
        pool.give_back(slab)


@contextmanager
def maker(token: bytes, names: list[str]) -> Iterator[Callable[[int], Descriptor]]:
    """A process with these planes; called with a size, it publishes such a record and retires the
    one before."""
    ours, theirs = Pipe()
    words = [sys.executable, __file__, "--serve", str(theirs.fileno())]
    with subprocess.Popen(words, pass_fds=[theirs.fileno()]) as process, ours:
        theirs.close()
        ours.send_bytes(msgpack.packb((token, names)))
        published = False

        def publish(size: int) -> Descriptor:
            nonlocal published
            if published:
                ours.send_bytes(b"")
            published = True
            ours.send_bytes(msgpack.packb(size))
            if not ours.poll(READ_S):
                raise TimeoutError(f"a record of {size} bytes was not published in {READ_S} s")
            return msgpack.unpackb(ours.recv_bytes())

        try:
            yield publish
        finally:
            process.kill()


# -- the process that reads ------------------------------------------------------------------------


def getters(
    planes: dict[str, Plane], descriptors: Descriptor, size: int
) -> dict[str, Callable[[], np.ndarray]]:
    """What is timed: each leaves ``size`` bytes in memory of this process, and returns them."""
    source, room = pattern(size), np.zeros(size, np.uint8)

    def memcpy(found: np.ndarray) -> np.ndarray:
        np.copyto(room, found)
        return room

    def get(name: str) -> np.ndarray:
        found = np.frombuffer(planes[name].read(descriptors[name], READ_S), np.uint8)
        return found if name in COPIES else memcpy(found)

    return {MEMCPY: lambda: memcpy(source)} | {name: lambda name=name: get(name) for name in planes}


def take_turns(gets: dict[str, Callable[[], np.ndarray]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every get; in each round every one has a turn of at most BURST."""
    seconds: dict[str, list[float]] = {name: [] for name in gets}
    for _ in range(rounds):
        for name, get in gets.items():
            end = time.perf_counter() + BURST_S
            for _ in range(BURST):
                start = time.perf_counter()
                get()
                stop = time.perf_counter()
                seconds[name].append(stop - start)
                if stop > end:
                    break
    return seconds


def measure(
    planes: dict[str, Plane], descriptors: Descriptor, size: int, rounds: int
) -> list[Result]:
    """All planes at one size. RuntimeError if one of them gives other bytes than were published."""
    gets = getters(planes, descriptors, size)
    for name, get in gets.items():
        if not np.array_equal(get(), pattern(size)):
            raise RuntimeError(f"{name}: other bytes than were published, at {in_words(size)}")
    seconds = take_turns(gets, rounds)
    median, best = (
        {name: how(values) for name, values in seconds.items()} for how in (np.median, np.min)
    )
    return [
        Result(
            size,
            name,
            len(values),
            float(median[name]),
            float(np.percentile(values, 99)),
            float(size / median[name]),
            float(median[MEMCPY] / median[name]),
            float(best[MEMCPY] / best[name]),
        )
        for name, values in seconds.items()
    ]


HEAD = (
    f"{'size':>8}  {'plane':<7} {'median us':>11} {'p99 us':>11} {'GB/s':>8} {'/ memcpy':>9} "
    f"{'[best]':>8}"
)


def line_of(r: Result) -> str:
    times = f"{r.median_s * 1e6:11.1f} {r.p99_s * 1e6:11.1f} {r.bytes_per_s / 1e9:8.3f}"
    return (
        f"{in_words(r.size):>8}  {r.plane:<7} {times} {r.ratio:9.3f} {f'[{r.best_ratio:.3f}]':>8}"
    )


def print_ratios(results: list[Result]) -> None:
    """Of our plane `rdma` to NIXL alone, where both were measured."""
    speeds = {(r.plane, r.size): r.bytes_per_s for r in results}
    if sizes := [size for plane, size in speeds if plane == "nixl" and ("rdma", size) in speeds]:
        ratios = (
            f"{in_words(size)}: {speeds['rdma', size] / speeds['nixl', size]:.2f}" for size in sizes
        )
        print(f"rdma / nixl: {', '.join(ratios)}")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; what is left out means all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--size", action="append", type=size_of, help=f"default: {', '.join(SIZES)}"
    )
    parser.add_argument("--plane", action="append", choices=PLANES)
    parser.add_argument(
        "--rounds", type=int, default=15, metavar="N", help="turns of each plane at each size"
    )
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error(f"--rounds: found {args.rounds}, allowed 1 and more")
    usual = [name for name in PLANES if name not in BY_NIXL or not why_not_installed()]
    args.size, args.plane = args.size or [size_of(text) for text in SIZES], args.plane or usual
    return args


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    args = parse(argv)
    if args.serve is not None:
        die_with_parent()
        serve(Connection(args.serve))
        return 0
    load, token, pool, results = os.getloadavg()[0], secrets.token_bytes(32), SlabPool(), []
    planes = {name: PLANES[name](token, pool) for name in args.plane}
    print(HEAD, flush=True)
    with maker(token, args.plane) as publish:
        for size in args.size:
            found = measure(planes, publish(size), size, args.rounds)
            print("\n".join(map(line_of, found)), flush=True)
            results += found
    for plane in planes.values():
        plane.close()
    print_ratios(results)
    settings = {"rounds": args.rounds, "cores": os.cpu_count(), "load_before": round(load, 2)}
    print("settings: " + ", ".join(f"{key}={value}" for key, value in settings.items()))
    if args.json:
        figures = [
            Figure(f"{r.plane}, {r.size} bytes: speed / memcpy", r.ratio, "") for r in results
        ]
        print_result(figures, settings, results=[asdict(r) for r in results])
    return 0


if __name__ == "__main__":
    sys.exit(main())
