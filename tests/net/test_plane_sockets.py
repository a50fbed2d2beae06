"""Planes on sockets of ours: makers and readers that hang or lie, and the wrong token, harm nobody
else."""

from __future__ import annotations

import math
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_hpc.net.transport import Descriptor, Plane, PlaneError, SlabPool, TcpPlane, tcp
from relax_hpc.net.transport.choice import make_planes
from relax_hpc.net.transport.links import Deadline, prove_token, receive
from relax_hpc.net.transport.proof import ANSWER_BYTES, GREETING_BYTES, Challenge
from tests.helpers.plane_helpers import (
    NAMES,
    READ_S,
    TOKEN,
    Peer,
    digest,
    open_files,
    pattern,
    plane_here,
)

OTHER_TOKEN = b"fedcba9876543210" * 4
SHORT_S = 0.3
BIG = 5_000_000


@pytest.fixture(scope="module", params=["shm", "tcp"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def maker(kind: str) -> Iterator[Peer]:
    with Peer(kind) as peer:
        yield peer


@pytest.fixture(scope="module")
def reader(kind: str) -> Iterator[Plane]:
    with plane_here(kind) as plane:
        yield plane


# -- makers that hang or lie -----------------------------------------------------------------------


def test_a_maker_that_hangs_is_waited_for_until_the_deadline(kind, maker, reader):
    with Peer(kind) as slow:
        slow_record, files = slow.publish(next(NAMES), BIG, 1), open_files()
        slow.stop()
        with pytest.raises(PlaneError, match=f"{SHORT_S}"):
            reader.read(slow_record, SHORT_S)
        assert open_files() == files, "what comes late comes to nobody"
        with ThreadPoolExecutor() as threads:
            waiting = threads.submit(reader.read, slow_record, READ_S)
            assert digest(reader.read(maker.publish(next(NAMES), 1000, 5), READ_S)) == digest(
                pattern(1000, 5)
            )
            assert not waiting.done()
            slow.go_on()
            assert digest(waiting.result()) == digest(pattern(BIG, 1))


@contextmanager
def impostor(kind: str, answer: Callable[[socket.socket, bytes], object]) -> Iterator[Descriptor]:
    """What in a descriptor leads to a process that accepts one connection and calls ``answer(it,
    its purpose)``."""
    listening = socket.socket(socket.AF_UNIX if kind == "shm" else socket.AF_INET)
    listening.bind(f"\0relax-impostor-{os.getpid()}" if kind == "shm" else ("127.0.0.1", 0))
    listening.listen()
    name = listening.getsockname()
    leads = (
        {"socket": name[1:].decode()}
        if kind == "shm"
        else {"host": name[0], "port": name[1], "maker": "m"}
    )

    def accept() -> None:
        connection, _ = listening.accept()
        with connection:
            connection.settimeout(READ_S)
            answer(connection, (leads["socket"] if kind == "shm" else leads["maker"]).encode())

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        yield leads
    finally:
        thread.join(READ_S)
        listening.close()


def until_it_hangs_up(connection: socket.socket) -> None:
    try:
        while connection.recv(4096):
            pass
    except ConnectionError:
        pass


def accept_any_proof(connection: socket.socket, _: bytes) -> None:
    connection.sendall(b"RLXLINK1" + bytes(32))
    receive(connection, 64, Deadline(READ_S))
    connection.sendall(bytes(32))
    until_it_hangs_up(connection)


def reflect_the_proof(connection: socket.socket, _: bytes) -> None:
    connection.sendall(b"RLXLINK1" + bytes(32))
    connection.sendall(receive(connection, 64, Deadline(READ_S))[32:])
    until_it_hangs_up(connection)


def talk_nonsense(connection: socket.socket, _: bytes) -> None:
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
    until_it_hangs_up(connection)


def hang_up(connection: socket.socket, _: bytes) -> None:
    connection.sendall(b"RLX")


@pytest.mark.parametrize("answer", [accept_any_proof, reflect_the_proof, talk_nonsense, hang_up])
def test_a_maker_without_the_token_is_refused(kind, maker, reader, answer):
    record = maker.publish(next(NAMES), 1000)
    with (
        impostor(kind, answer) as leads,
        pytest.raises(PlaneError, match=r"token|not a listener|closed"),
    ):
        reader.read(record | leads, READ_S)
    assert digest(reader.read(record, READ_S)) == digest(pattern(1000, 0))


def test_a_maker_that_gives_no_sign_is_given_up_long_before_the_deadline(kind):
    """Its node may have lost power: then nobody closes the connection."""
    planes, _ = make_planes({kind: "required"}, TOKEN, SlabPool(), "127.0.0.1", "reader", SHORT_S)
    with closing(planes[kind]) as reader, Peer(kind) as silent:
        first, second = silent.publish(next(NAMES), 1000), silent.publish(next(NAMES), BIG, 1)
        assert digest(reader.read(first, READ_S)) == digest(pattern(1000, 0))
        silent.stop()
        with pytest.raises(PlaneError, match="timed out"):
            reader.read(second, 100 * READ_S)
        silent.go_on()
        assert digest(reader.read(second, READ_S)) == digest(pattern(BIG, 1))


def test_who_listens_and_says_nothing_is_not_waited_for(kind, maker, reader, monkeypatch):
    """Whoever got the port of a maker that has died may wait to be spoken to."""
    monkeypatch.setattr("relax_hpc.net.transport.peers.CONNECT_S", SHORT_S)
    record = maker.publish(next(NAMES), 1000)
    with impostor(kind, lambda connection, _: until_it_hangs_up(connection)) as leads:
        with pytest.raises(PlaneError, match=r"timed out|not done"):
            reader.read(record | leads, 100 * READ_S)
    assert digest(reader.read(record, READ_S)) == digest(pattern(1000, 0))


@pytest.mark.parametrize(
    "answer", [b"", b"x", bytes(17), b"\1" * 17, b"\1" + b"\xff" * 8 + bytes(8), bytes(1000)]
)
def test_a_maker_that_lies_harms_one_read(kind, maker, reader, answer):
    def lie(connection: socket.socket, purpose: bytes) -> None:
        challenge = Challenge(TOKEN, purpose)
        connection.sendall(challenge.greeting)
        connection.sendall(challenge.check(receive(connection, ANSWER_BYTES, Deadline(READ_S)))[0])
        connection.recv(4096)
        connection.sendall(answer)

    record = maker.publish(next(NAMES), 1000)
    with impostor(kind, lie) as leads, pytest.raises(PlaneError):
        reader.read(record | leads, READ_S)
    assert digest(reader.read(record, READ_S)) == digest(pattern(1000, 0))


# -- readers that lie ------------------------------------------------------------------------------


@contextmanager
def stranger(record: Descriptor) -> Iterator[tuple[socket.socket, bytes]]:
    """A connection to the maker of ``record``, and the purpose that a proof must name."""
    unix = "socket" in record
    connection = socket.socket(socket.AF_UNIX if unix else socket.AF_INET)
    connection.settimeout(READ_S)
    with connection:
        connection.connect(f"\0{record['socket']}" if unix else (record["host"], record["port"]))
        yield connection, (record["socket"] if unix else record["maker"]).encode()


def test_a_reader_without_the_token_is_refused(kind, maker, reader):
    record = maker.publish(next(NAMES), 1000)
    with (
        plane_here(kind, OTHER_TOKEN) as wrong,
        pytest.raises(PlaneError, match="refused the proof"),
    ):
        wrong.read(record, READ_S)
    with stranger(record) as (connection, _), pytest.raises(ConnectionError, match="refused"):
        prove_token(connection, TOKEN, b"another plane of the run", Deadline(READ_S))
    assert digest(reader.read(record, READ_S)) == digest(pattern(1000, 0))


@settings(max_examples=20)
@given(frames=st.lists(st.binary(max_size=300), min_size=1, max_size=3), proven=st.booleans())
def test_what_hostile_readers_send_harms_nobody(kind, maker, reader, frames, proven):
    record = maker.publish(next(NAMES), 1000)
    # They keep their half frames and connections while the others read.
    with stranger(record) as (connection, purpose):
        if proven:
            prove_token(connection, TOKEN, purpose, Deadline(READ_S))
        try:
            for frame in frames:
                connection.sendall(frame)
        except ConnectionError:
            assert not proven or kind == "tcp"
        assert digest(reader.read(record, READ_S)) == digest(pattern(1000, 0))
    assert maker.is_alive()


@pytest.mark.parametrize(
    "request_", [(1.0, 60_000), (math.nan, 1), (-1.0, 1), (math.inf, 1), (1e300, 1)]
)
def test_tcp_hangs_up_on_what_no_reader_asks(request_):
    with plane_here("tcp") as plane:
        record = plane.publish("r", memoryview(b"bytes"))
        with stranger(record) as (connection, purpose):
            prove_token(connection, TOKEN, purpose, Deadline(READ_S))
            connection.sendall(struct.pack("<dH", *request_))
            assert connection.recv(1) == b""
        assert bytes(plane.read(record, READ_S)) == b"bytes"


def readers(kind: str) -> list[threading.Thread]:
    """Threads of this process that serve somebody."""
    return [thread for thread in threading.enumerate() if thread.name == f"plane-{kind}-reader"]


def test_a_listener_serves_so_many_and_no_more(kind, monkeypatch):
    monkeypatch.setattr("relax_hpc.net.transport.links.MAX_CONNECTIONS", 2)
    with plane_here(kind) as plane, plane_here(kind) as other:
        record = plane.publish("r", memoryview(b"bytes"))
        with (
            stranger(record) as (first, purpose),
            stranger(record) as (second, _),
            stranger(record) as (third, _),
        ):
            for one in (first, second, third):
                prove_token(one, TOKEN, purpose, Deadline(READ_S))
            assert third.recv(1) == b"" and len(readers(kind)) == 2
        for thread in readers(kind):
            thread.join(READ_S)
        assert bytes(other.read(record, READ_S)) == b"bytes"


def test_so_many_have_proven_nothing_and_whoever_holds_the_token_gets_in(kind, monkeypatch):
    """Those that came first make room, and none has a thread."""
    monkeypatch.setattr("relax_hpc.net.transport.lobby.MAX_UNPROVEN", 3)
    with plane_here(kind) as plane, plane_here(kind) as other, ExitStack() as held:
        record = plane.publish("r", memoryview(b"bytes"))
        many = [held.enter_context(stranger(record))[0] for _ in range(10)]
        for one in many[:-3]:
            until_it_hangs_up(one)
        assert len(plane._listener._lobby.guests) <= 3 and not readers(kind)
        assert bytes(other.read(record, READ_S)) == b"bytes"
        assert len(plane._listener._lobby.guests) == 2 and len(many[-1].recv(100)) == GREETING_BYTES


def test_who_connects_and_hangs_up_makes_no_threads(kind, monkeypatch):
    """In actors and rollouts, which have other things to do."""
    begun: list[str] = []
    start = threading.Thread.start
    monkeypatch.setattr(
        threading.Thread, "start", lambda self: begun.append(self.name) or start(self)
    )
    with plane_here(kind) as plane, plane_here(kind) as other:
        record = plane.publish("r", memoryview(b"bytes"))
        begun.clear()
        for _ in range(200):
            with stranger(record):
                pass
        assert bytes(other.read(record, READ_S)) == b"bytes"
        assert begun == [f"plane-{kind}-reader"]


def test_who_holds_the_token_gets_in_while_strangers_come_and_go(kind):
    """From another thread, as fast as they are let in."""
    over = threading.Event()
    with plane_here(kind) as plane:
        record = plane.publish("r", memoryview(b"bytes"))

        def come_and_go() -> None:
            while not over.is_set():
                with suppress(OSError), stranger(record) as (one, _):
                    one.recv(1)

        flood = threading.Thread(target=come_and_go)
        flood.start()
        try:
            for _ in range(3):
                with plane_here(kind) as other:
                    assert bytes(other.read(record, READ_S)) == b"bytes"
        finally:
            over.set()
            flood.join(READ_S)


def test_who_holds_the_token_waits_where_strangers_fill_the_line():
    """Of unix sockets the kernel says so; to others it knocks again by itself."""
    with (
        Peer("shm") as slow,
        plane_here("shm") as reader,
        ExitStack() as held,
        ThreadPoolExecutor() as threads,
    ):
        record = slow.publish(next(NAMES), 1000, 1)
        slow.stop()
        with suppress(BlockingIOError):
            while True:
                held.enter_context(stranger(record))
        waiting = threads.submit(reader.read, record, READ_S)
        with pytest.raises(BlockingIOError), stranger(record):
            pass
        slow.go_on()
        assert digest(waiting.result()) == digest(pattern(1000, 1))


# -- tcp -------------------------------------------------------------------------------------------


def test_damaged_bytes_are_noticed():
    with plane_here("tcp") as plane:
        memory = bytearray(pattern(100_000, 0))
        record = plane.publish("r", memoryview(memory))
        plane.read(record, READ_S)
        memory[77_777] ^= 1
        with pytest.raises(PlaneError, match="checksum"):
            plane.read(record, READ_S)


def test_a_record_that_is_retired_while_its_checksum_is_made_is_not_sent(monkeypatch):
    with plane_here("tcp") as plane:

        def retire_meanwhile(memory: memoryview) -> int:
            plane.retire("r")
            return make(memory)

        make = tcp.xxhash.xxh3_64_intdigest
        record = plane.publish("r", memoryview(b"bytes"))
        monkeypatch.setattr(tcp.xxhash, "xxh3_64_intdigest", retire_meanwhile)
        with pytest.raises(PlaneError, match="has retired it"):
            plane.read(record, READ_S)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::"])
def test_no_listening_everywhere(host):
    with pytest.raises(ValueError, match="one address of this node"):
        TcpPlane(TOKEN, host)


def test_a_name_that_is_too_long_is_refused():
    with plane_here("tcp") as plane:
        with pytest.raises(PlaneError, match="allowed 1024"):
            plane.publish("x" * 1025, memoryview(b""))
