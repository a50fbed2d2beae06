"""Planes for tests: how each is made, and processes of their own that publish and read on one."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from relax_hpc.net.rendezvous.process import die_with_parent
from relax_hpc.net.transport import Descriptor, Plane, PlaneError, ShmPlane, SlabPool, TcpPlane
from relax_hpc.net.transport.rdma import RdmaPlane

PLANES: dict[str, Callable[[bytes, SlabPool], Plane]] = {
    "shm": ShmPlane,
    "tcp": lambda token, _: TcpPlane(token, "127.0.0.1"),
    "rdma": lambda token, pool: RdmaPlane(
        token, pool, f"test-{os.getpid()}", emulated=is_emulated()
    ),
}
"""How to make each plane: whatever is here keeps the contract of test_planes.py. `rdma` needs
NIXL."""
ROOT = Path(__file__).resolve().parents[2]
TOKEN = b"0123456789abcdef" * 4
PATIENCE = float(os.environ.get("RELAX_TEST_PATIENCE", "1"))
"""How many times as long as usual everything may take: more on an emulated machine."""
WAIT_S = 60.0 * PATIENCE
"""For a process of a test to answer."""
READ_S = 20.0 * PATIENCE
NAMES = (f"record-{number:06d}" for number in itertools.count())


def is_emulated() -> bool:
    """Whether UCX may use nothing that is one-sided: then `rdma` is tested over TCP, else over
    process_vm_readv."""
    return os.environ.get("UCX_TLS") == "tcp,self"


def pattern(size: int, seed: int) -> bytes:
    """``size`` bytes that no other ``seed`` gives."""
    return np.random.default_rng(seed).bytes(size)


def digest(record: memoryview | bytes) -> str:
    return hashlib.sha256(record).hexdigest()


@contextmanager
def plane_here(kind: str, token: bytes = TOKEN) -> Iterator[Plane]:
    """A plane in this process."""
    pool = SlabPool()
    plane = PLANES[kind](token, pool)
    try:
        yield plane
    finally:
        plane.close()
        pool.close()


def open_files() -> list[str]:
    found = []
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found.append(str(path.readlink()))
    return sorted(found)


class Peer:
    """A process with one plane, which does what `call` asks. Killed at the end of the block, if not
    before."""

    def __init__(self, kind: str, token: bytes = TOKEN) -> None:
        self._pipe, theirs = Pipe()
        words = [
            sys.executable,
            "-m",
            "tests.helpers.plane_helpers",
            "serve",
            kind,
            token.hex(),
            str(theirs.fileno()),
        ]
        self._process = subprocess.Popen(words, cwd=ROOT, pass_fds=[theirs.fileno()])
        theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, op: str, **args: Any) -> None:
        """Ask for `_Server.op(**args)`; `answer` waits for the result."""
        self._pipe.send_bytes(msgpack.packb({"op": op, **args}))

    def answer(self) -> Any:
        if not self._pipe.poll(WAIT_S):
            raise TimeoutError(f"process {self.pid} of the test has not answered for {WAIT_S} s")
        return msgpack.unpackb(self._pipe.recv_bytes())

    def call(self, op: str, **args: Any) -> Any:
        self.ask(op, **args)
        return self.answer()

    def publish(self, name: str, size: int, seed: int = 0, copied: bool = False) -> Descriptor:
        """Have it publish ``pattern(size, seed)``, from a slab or (``copied``) from memory of its
        own."""
        return self.call("publish", name=name, size=size, seed=seed, copied=copied)

    def stop(self) -> None:
        """It stands still, from now on."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitpid(self.pid, os.WUNTRACED)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """Without a chance to tidy up."""
        if self.is_alive():
            os.kill(self.pid, signal.SIGKILL)
        self._process.wait(WAIT_S)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._pipe.close()


class _Server:
    """What a `Peer` can be asked."""

    def __init__(self, kind: str, token: bytes) -> None:
        self.pool = SlabPool()
        self.plane = PLANES[kind](token, self.pool)

    def publish(self, name: str, size: int, seed: int, copied: bool) -> Descriptor:
        record = memoryview(pattern(size, seed))
        if not copied:
            slab = self.pool.take(size)
            slab.memory[:size] = record
            record = slab.memory[:size]
        return self.plane.publish(name, record)

    def retire(self, name: str) -> None:
        self.plane.retire(name)

    def read(self, descriptor: Descriptor, timeout_s: float = READ_S) -> str:
        """The record's digest, or what went wrong."""
        try:
            return digest(self.plane.read(descriptor, timeout_s))
        except PlaneError as error:
            return f"PlaneError: {error}"


def serve(server: _Server, pipe: Connection) -> None:
    """Do what is asked until nobody is there to ask."""
    while True:
        try:
            request = msgpack.unpackb(pipe.recv_bytes())
        except EOFError:
            return
        pipe.send_bytes(msgpack.packb(getattr(server, request.pop("op"))(**request)))


def main(command: str, kind: str, token: str, *rest: str) -> None:
    """`serve KIND TOKEN FD`: be a Peer; `read KIND TOKEN DESCRIPTOR`: print what reading gives;
    `both KIND TOKEN`: print what reading from a Peer gives, and what it should."""
    server = _Server(kind, bytes.fromhex(token))
    if command == "serve":
        die_with_parent()
        serve(server, Connection(int(rest[0])))
    elif command == "read":
        print(server.read(json.loads(rest[0])))
    else:
        with Peer(kind, bytes.fromhex(token)) as maker:
            print(server.read(maker.publish("r", 100_000)), digest(pattern(100_000, 0)))


if __name__ == "__main__":
    main(*sys.argv[1:])
