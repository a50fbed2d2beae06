"""Frames over TCP: cut anywhere, to many at once, to who does not read, and from who sends
anything."""

from __future__ import annotations

import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_hpc.net.transport import lobby, sockets
from relax_hpc.net.transport.listener import Listener, create_listening_socket
from relax_hpc.net.transport.sockets import (
    FrameConnection,
    FrameCutter,
    PendingConnection,
    Wakeup,
    connect,
    frame_content,
)
from relax_hpc.net.transport.wire import MAC_BYTES, MAX_MESSAGE_BYTES, BadMessage
from tests.helpers.queue_helpers import next_payload

TOKEN, PURPOSE = b"0123456789abcdef" * 4, b"test"


@pytest.fixture
def listener():
    made = Listener(create_listening_socket("127.0.0.1"), TOKEN, PURPOSE)
    yield made
    made.close()


def meet(listener: Listener) -> FrameConnection:
    """A connection to a listener of this thread."""
    knock = PendingConnection(listener.endpoint, TOKEN, PURPOSE, 5.0)
    for _ in range(100_000):
        assert listener.receive(0.0) == []
        if made := knock.proceed(0.001):
            return made
    raise AssertionError("no connection came about")


def come(listener: Listener, count: int) -> list[tuple[int, bytes]]:
    """The next ``count`` payloads."""
    found: list[tuple[int, bytes]] = []
    for _ in range(100_000):
        found += [(peer, bytes(payload)) for peer, payload in listener.receive(5.0)]
        if len(found) >= count:
            return found
    raise AssertionError(f"{len(found)} came, expected {count}")


@given(st.lists(st.binary(min_size=MAC_BYTES + 1, max_size=60), max_size=8), st.data())
def test_frames_are_what_was_framed_however_it_is_cut(contents, data):
    stream, cutter, found = b"".join(map(frame_content, contents)), FrameCutter(), []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        cutter.add(stream[:size])
        stream = stream[size:]
        while (frame := cutter.next()) is not None:
            found.append(frame)
    assert found == contents


@pytest.mark.parametrize("size", [0, MAC_BYTES, MAX_MESSAGE_BYTES + 1, (1 << 32) - 1])
def test_a_length_that_no_frame_has_ends_it(size):
    cutter = FrameCutter()
    cutter.add((MAC_BYTES + 1).to_bytes(4, "little"))
    assert cutter.next() is None
    cutter = FrameCutter()
    cutter.add(size.to_bytes(4, "little"))
    with pytest.raises(BadMessage, match="frame of"):
        cutter.next()


def test_everyone_gets_their_own_answers(listener):
    peers = [meet(listener) for _ in range(20)]
    for number, peer in enumerate(peers):
        peer.send(b"%d" % number)
    for number, frame in come(listener, len(peers)):
        listener.send(number, b"to " + frame)
    for number, peer in enumerate(peers):
        assert next_payload(peer) == b"to %d" % number
        peer.close()


def test_answers_to_who_has_gone_go_nowhere(listener):
    peer = meet(listener)
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
    """Frames that no buffer of the system holds, to one who reads late; another one is served
    meanwhile."""
    slow, other = meet(listener), meet(listener)
    slow.send(b"slow")
    [(number, _)] = come(listener, 1)
    sizes = [1 << 20] * 12
    for size in sizes:
        listener.send(number, bytes(size))
    other.send(b"other")
    [(second, _)] = come(listener, 1)
    listener.send(second, b"answer")
    assert next_payload(other) == b"answer"
    got: list[int] = []
    slow.socket.settimeout(60.0)

    def read() -> None:
        while len(got) < len(sizes):
            slow.receive()
            got.extend(map(len, slow.payloads()))

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
    peer = meet(listener)
    peer.send(b"hello")
    [(number, _)] = come(listener, 1)
    for _ in range(40):
        listener.send(number, bytes(1 << 20))
    assert number not in listener._peers
    peer.close()


def test_a_connection_keeps_what_it_cannot_send():
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        ours, theirs = (
            FrameConnection(near, bytes(32), False),
            FrameConnection(server.accept()[0], bytes(32), True),
        )
    sent = [bytes([number]) * (1 << 20) for number in range(12)]
    for content in sent:
        ours.send(content)
    assert ours.has_backlog
    got: list[bytes] = []
    while len(got) < len(sent):
        ours.flush()
        theirs.receive()
        got += map(bytes, theirs.payloads())
    assert got == sent and not ours.has_backlog
    ours.close()
    theirs.close()


def test_a_bell_ends_a_wait_and_so_does_a_frame(listener):
    bell, peer = Wakeup(), meet(listener)
    peer.send(b"hello")
    [(number, _)] = come(listener, 1)
    for wake in (bell.ring, lambda: listener.send(number, b"frame")):
        waiting = threading.Thread(target=bell.wait, args=(peer, 60.0))
        waiting.start()
        wake()
        waiting.join(60)
        assert not waiting.is_alive()
    bell.close()
    peer.close()


def test_nobody_there_is_an_error_at_once():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(OSError):
        connect(f"tcp://127.0.0.1:{port}", TOKEN, PURPOSE, 5.0)


def test_without_room_for_connections_the_others_are_served(listener, monkeypatch):
    peer = meet(listener)
    refused, real = [], listener.lobby._listening

    class Full:
        def __getattr__(self, name):
            return getattr(real, name)

        def accept(self):
            refused.append(True)
            raise OSError(24, "Too many open files")

        def fileno(self):
            return real.fileno()

    monkeypatch.setattr(lobby, "_REST_S", 0.2)
    listener.lobby._listening = Full()
    late = PendingConnection(listener.endpoint, TOKEN, PURPOSE, 5.0)
    listener.receive(1.0)
    peer.send(b"second")
    assert [payload for _, payload in come(listener, 1)] == [b"second"] and len(refused) < 3
    listener.lobby._listening = real
    while not (made := late.proceed(0.001)):
        assert listener.receive(0.1) == []
    peer.close()
    made.close()
