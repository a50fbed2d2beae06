"""Frames over TCP: cut anywhere, to many at once, to who does not read, and from who sends anything."""

from __future__ import annotations

import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_hpc.transfer_queue import sockets
from relax_hpc.transfer_queue.sockets import (
    MAX_STRANGE_BYTES,
    Bell,
    Connection,
    Cutter,
    Listener,
    connect,
    framed,
)
from relax_hpc.transfer_queue.wire import MAX_MESSAGE_BYTES, BadMessage
from tests.queue_helpers import next_frame


@pytest.fixture
def listener():
    made = Listener("127.0.0.1")
    yield made
    made.close()


def come(listener: Listener, count: int) -> list[tuple[int, bytes]]:
    """The next ``count`` frames."""
    frames: list[tuple[int, bytes]] = []
    for _ in range(100_000):
        frames += [(peer, bytes(frame)) for peer, frame in listener.receive(5.0)]
        if len(frames) >= count:
            return frames
    raise AssertionError(f"{len(frames)} frames came, expected {count}")


@given(st.lists(st.binary(max_size=40), max_size=8), st.data())
def test_frames_are_what_was_framed_however_it_is_cut(contents, data):
    stream, cutter, found = b"".join(map(framed, contents)), Cutter(), []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        found += cutter.of(stream[:size])
        stream = stream[size:]
    assert found == contents


def test_a_length_that_no_message_has_ends_it():
    cutter = Cutter()
    assert cutter.of((MAX_MESSAGE_BYTES).to_bytes(4, "little")) == []
    with pytest.raises(BadMessage, match="frame of"):
        Cutter().of((MAX_MESSAGE_BYTES + 1).to_bytes(4, "little"))


def test_everyone_gets_their_own_answers(listener):
    peers = [connect(listener.endpoint, 5.0) for _ in range(20)]
    for number, peer in enumerate(peers):
        peer.send(b"%d" % number)
    for number, frame in come(listener, len(peers)):
        listener.send(number, b"to " + frame)
    for number, peer in enumerate(peers):
        assert next_frame(peer) == b"to %d" % number
        peer.close()


def test_who_sends_no_frames_is_left_and_counted_by_an_empty_one(listener):
    bad, good = connect(listener.endpoint, 5.0), connect(listener.endpoint, 5.0)
    bad.socket.send(b"\xff" * 8)
    good.send(b"good")
    assert sorted(frame for _, frame in come(listener, 2)) == [b"", b"good"]
    assert bad.socket.fileno() >= 0
    bad.socket.settimeout(5.0)
    with pytest.raises(ConnectionResetError):
        bad.receive()
    bad.close()
    good.close()


def test_only_who_is_vouched_for_sends_what_is_long():
    long = bytes(MAX_STRANGE_BYTES + 1)
    friend, stranger = Cutter(lambda frame: frame == b"secret"), Cutter(lambda frame: frame == b"secret")
    assert friend.of(framed(b"secret") + framed(long)) == [b"secret", long]
    assert stranger.of(framed(b"what") + framed(long)[:3]) == [b"what"]
    with pytest.raises(BadMessage, match="allowed 65536"):
        stranger.of(framed(long)[3:])


def test_answers_to_who_has_gone_go_nowhere(listener):
    peer = connect(listener.endpoint, 5.0)
    peer.send(b"hello")
    [(number, _)] = come(listener, 1)
    peer.close()
    while listener.receive(0.0):
        pass
    for _ in range(3):
        listener.send(number, bytes(100))
    listener.send(number + 1, b"never was")
    listener.receive(0.0)


def test_what_does_not_fit_is_sent_as_it_is_read(listener):
    """Frames that no buffer of the system holds, to one who reads late; another one is served meanwhile."""
    slow, other = connect(listener.endpoint, 5.0), connect(listener.endpoint, 5.0)
    slow.send(b"slow")
    [(number, _)] = come(listener, 1)
    sizes = [1 << 20] * 12
    for size in sizes:
        listener.send(number, bytes(size))
    other.send(b"other")
    [(second, _)] = come(listener, 1)
    listener.send(second, b"answer")
    assert next_frame(other) == b"answer"
    got: list[int] = []
    slow.socket.settimeout(10.0)

    def read() -> None:
        while len(got) < len(sizes):
            got.extend(map(len, slow.receive()))

    reader = threading.Thread(target=read)
    reader.start()
    while reader.is_alive():
        listener.receive(0.05)
    reader.join()
    assert got == sizes
    slow.close()
    other.close()


def test_who_never_reads_is_left(listener, monkeypatch):
    monkeypatch.setattr(sockets, "_MAX_BACKLOG_BYTES", 1 << 20)
    peer = connect(listener.endpoint, 5.0)
    peer.send(b"hello")
    [(number, _)] = come(listener, 1)
    for _ in range(40):
        listener.send(number, bytes(1 << 20))
    assert number not in listener._peers
    peer.close()


def test_a_connection_keeps_what_it_cannot_send():
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    made = Connection.__new__(Connection)
    made.socket, made._backlog, made._cutter = ours, bytearray(), Cutter()
    ours.setblocking(False)
    sent = [bytes([number]) * (1 << 18) for number in range(8)]
    for content in sent:
        made.send(content)
    assert made.waits
    cutter, got = Cutter(), []
    while len(got) < len(sent):
        made.flush()
        got += cutter.of(theirs.recv(1 << 16))
    assert got == sent and not made.waits
    made.close()
    theirs.close()


def test_a_bell_ends_a_wait_and_so_does_a_frame(listener):
    bell, peer = Bell(), connect(listener.endpoint, 5.0)
    peer.send(b"hello")
    [(number, _)] = come(listener, 1)
    for wake in (bell.ring, lambda: listener.send(number, b"frame")):
        waiting = threading.Thread(target=bell.wait, args=(peer, 60.0))
        waiting.start()
        wake()
        waiting.join(10.0)
        assert not waiting.is_alive()
    bell.close()
    peer.close()


def test_nobody_there_is_an_error_at_once():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(OSError):
        connect(f"tcp://127.0.0.1:{port}", 5.0)


def test_without_room_for_connections_the_others_are_served(listener, monkeypatch):
    peer = connect(listener.endpoint, 5.0)
    peer.send(b"first")
    [(number, _)] = come(listener, 1)
    refused, real = [], listener._socket

    class Full:
        def __getattr__(self, name):
            return getattr(real, name)

        def accept(self):
            refused.append(True)
            raise OSError(24, "Too many open files")

        def fileno(self):
            return real.fileno()

    monkeypatch.setattr(sockets, "_REST_S", 0.2)
    listener._socket = Full()
    late = connect(listener.endpoint, 5.0)
    late.send(b"late")
    listener.receive(1.0)
    peer.send(b"second")
    assert come(listener, 1) == [(number, b"second")] and len(refused) < 3
    listener._socket = real
    assert come(listener, 1)[0][1] == b"late"
    peer.close()
    late.close()
