"""What strangers can cost a controller: counted, not timed. And what a connection's frames are good
for elsewhere."""

from __future__ import annotations

import hmac
import resource
import socket
import struct
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_hpc.base.errors import DeadlineError
from relax_hpc.net.rendezvous.open_files import connection_limit
from relax_hpc.net.rendezvous.roster import GroupCard, claim_incarnation, publish_card
from relax_hpc.net.transport import lobby, proof, sockets
from relax_hpc.net.transport.listener import FRAMES_A_TURN, Listener, create_listening_socket
from relax_hpc.net.transport.lobby import ACCEPTED_A_TURN
from relax_hpc.net.transport.proof import (
    ANSWER_BYTES,
    GREETING_BYTES,
    MAX_UNPROVEN,
    Challenge,
    ChallengeResponse,
)
from relax_hpc.net.transport.sockets import (
    FrameConnection,
    PendingConnection,
    connect,
    frame_content,
)
from relax_hpc.net.transport.wire import BadMessage, Seal, pack, unpack
from relax_hpc.queue.client import QueueClient
from tests.effort import effort
from tests.helpers.queue_helpers import Roles, dial, in_thread, make_run, small
from tests.queue.test_queue_sockets import PURPOSE, TOKEN, come, meet

KEY = b"k" * 32


@pytest.fixture
def listener():
    made = Listener(create_listening_socket("127.0.0.1"), TOKEN, PURPOSE)
    yield made
    made.close()


@pytest.fixture
def strangers(listener):
    """Makes raw connections."""
    made: list[socket.socket] = []

    def come_in(count: int) -> list[socket.socket]:
        port = int(listener.endpoint.rpartition(":")[2])
        made.extend(socket.create_connection(("127.0.0.1", port), 5.0) for _ in range(count))
        return made[-count:]

    yield come_in
    for one in made:
        one.close()


def turns(listener: Listener, condition, most: int = 2000) -> int:
    """How many turns it takes until the condition holds."""
    for number in range(most):
        if condition():
            return number
        assert listener.receive(0.01) == []
    raise AssertionError("never")


def is_open(one: socket.socket) -> bool:
    """Whether the other end still holds the connection; what it has sent is read."""
    one.setblocking(False)
    try:
        while data := one.recv(4096):
            pass
        return bool(data)
    except BlockingIOError:
        return True
    except OSError:
        return False


# -- bounds ----------------------------------------------------------------------------------------


def test_so_many_connections_a_turn_and_so_many_that_have_proven_nothing(listener, strangers):
    strangers(MAX_UNPROVEN // 2)
    before = 0
    while before < MAX_UNPROVEN // 2:
        listener.receive(0.1)
        assert len(listener.lobby.guests) - before <= ACCEPTED_A_TURN
        before = len(listener.lobby.guests)
    first = strangers(MAX_UNPROVEN + 100)[0]
    for _ in range(2 * MAX_UNPROVEN // ACCEPTED_A_TURN + 20):
        listener.receive(0.0)
        assert len(listener.lobby.guests) <= MAX_UNPROVEN
    assert len(listener.lobby.guests) == MAX_UNPROVEN and not is_open(first), (
        "the oldest have made room"
    )


def test_who_holds_the_token_gets_in_however_many_strangers_come(listener, strangers):
    """Between any two of its steps as many strangers come as a controller takes in a turn, and are
    there already."""
    strangers(MAX_UNPROVEN)
    turns(listener, lambda: len(listener.lobby.guests) == MAX_UNPROVEN)
    knock = PendingConnection(listener.endpoint, TOKEN, PURPOSE, 5.0)
    for _ in range(4):
        strangers(ACCEPTED_A_TURN)
        listener.receive(0.1)
        if made := knock.proceed(0.01):
            break
    assert made, "it takes two turns at most from its being accepted to its answer's being read"
    made.send(b"hello")
    assert [bytes(payload) for _, payload in come(listener, 1)] == [b"hello"]
    made.close()


def test_of_a_stranger_one_answer_is_read_and_hashed(listener, strangers, monkeypatch):
    hashed: list[int] = []

    def digest(key: bytes, data: bytes, name: str) -> bytes:
        hashed.append(len(data))
        return hmac.digest(key, data, name)

    monkeypatch.setattr(
        proof, "hmac", SimpleNamespace(digest=digest, compare_digest=hmac.compare_digest)
    )
    many = strangers(20)
    for one in many:
        one.sendall(bytes(1 << 16))
    turns(listener, lambda: not any(map(is_open, many)))
    assert len(hashed) == len(many) and sum(hashed) <= len(many) * (2 * ANSWER_BYTES + len(PURPOSE))
    assert listener.refused == len(many) and not listener.lobby.guests


def test_an_answer_in_pieces_costs_no_more(listener, strangers):
    (one,) = strangers(1)
    turns(listener, lambda: listener.lobby.guests)
    (guest,) = listener.lobby.guests.values()
    for _ in range(ANSWER_BYTES - 1):
        one.sendall(b"x")
        listener.receive(1.0)
    assert len(guest._answer) == ANSWER_BYTES - 1 and is_open(one)
    one.sendall(b"x")
    turns(listener, lambda: not is_open(one))
    assert listener.refused == 1


def test_no_more_is_read_of_a_stranger_than_its_answer(listener, strangers):
    """What follows is for whoever it turns out to be."""
    (one,) = strangers(1)
    turns(listener, lambda: listener.lobby.guests)
    one.settimeout(60.0)
    one.sendall(ChallengeResponse(TOKEN, PURPOSE).answer(one.recv(GREETING_BYTES)) + b"abc")
    turns(listener, lambda: listener._peers)
    (peer,) = listener._peers.values()
    turns(listener, lambda: peer._cutter._buffer == b"abc")


def test_who_proves_nothing_in_time_is_left(listener, strangers, monkeypatch):
    peer, many = meet(listener), strangers(3)
    turns(listener, lambda: len(listener.lobby.guests) == 3)
    now = time.monotonic
    monkeypatch.setattr(lobby, "time", SimpleNamespace(monotonic=lambda: now() + proof.PROOF_S))
    listener.receive(5.0)
    assert not listener.lobby.guests and not any(map(is_open, many)) and listener.refused == 3
    peer.send(b"still here")
    assert come(listener, 1)[0][1] == b"still here"
    peer.close()


def test_the_wait_ends_when_somebody_is_to_go(listener, strangers, monkeypatch):
    monkeypatch.setattr(lobby, "PROOF_S", 0.05)
    strangers(1)
    turns(listener, lambda: listener.lobby.guests)
    listener.receive(3600.0)
    assert not listener.lobby.guests


def test_of_one_peer_so_many_frames_a_turn_and_none_is_lost(listener):
    busy, other = meet(listener), meet(listener)
    for number in range(3 * FRAMES_A_TURN + 1):
        busy.send(b"%d" % number)
    found: list[bytes] = []
    while len(found) < FRAMES_A_TURN:
        payloads = listener.receive(5.0)
        assert len(payloads) <= FRAMES_A_TURN
        found += [bytes(payload) for _, payload in payloads]
    other.send(b"other")
    seen = -1
    for turn in range(10):
        payloads = [bytes(payload) for _, payload in listener.receive(0.0)]
        assert len(payloads) <= FRAMES_A_TURN + 1
        if b"other" in payloads:
            seen = turn
        found += [payload for payload in payloads if payload != b"other"]
    assert found == [b"%d" % number for number in range(3 * FRAMES_A_TURN + 1)] and 0 <= seen < 2
    busy.close()
    other.close()


def test_a_bad_frame_ends_its_connection_at_once(listener):
    good = meet(listener)
    bad: list[bytes] = [
        struct.pack("<I", 0),
        bytes(1 << 16),
        frame_content(b"x" * 100),
        b"\xff" * 8,
    ]
    for number, raw in enumerate(bad, 1):
        peer = meet(listener)
        peer.send(b"good")
        assert come(listener, 1)[0][1] == b"good"
        peer.socket.setblocking(True)
        peer.socket.sendall(raw)
        turns(listener, lambda peer=peer: not is_open(peer.socket))
        assert listener.refused == number and len(listener._peers) == 1
        peer.close()
    good.send(b"still here")
    assert come(listener, 1)[0][1] == b"still here"
    good.close()


CROWDED = """
import resource, socket, sys, tempfile
from pathlib import Path
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 96))
from relax_hpc.queue.controller.server import Controller
from relax_hpc.queue.plan import Plan
from tests.helpers.queue_helpers import dial, make_run, small
run = make_run(Path(sys.argv[1]))
controller = Controller(run, Plan.from_config(small()), 1)
port = int(controller.endpoint.rpartition(":")[2])
print("ready", port, resource.getrlimit(resource.RLIMIT_NOFILE), flush=True)
controller.serve(lambda: False)
"""


def test_no_number_of_connections_takes_a_controllers_files(tmp_path):
    """Under a hard limit of fewer files than there may be strangers it looks for successors, and
    serves its clients."""
    run = make_run(tmp_path / "run")
    words = [sys.executable, "-c", CROWDED, str(run.root)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            _, port, *limits = process.stdout.readline().split()
            assert limits == ["(96,", "96)"], "the soft limit is the hard one"
            held = [socket.create_connection(("127.0.0.1", int(port)), 5.0) for _ in range(300)]
            publish_card(
                run, GroupCard("hub", claim_incarnation(run, "hub"), [], f"tcp://127.0.0.1:{port}")
            )
            with QueueClient(run, small(), "actor", 1) as actor:
                actor.connection.call("resume", timeout=20.0, step=0)
                for number in range(3):
                    actor.connection.call(
                        "publish", timeout=20.0, version=f"i000001-v00000{number}", digest="d"
                    )
            assert process.poll() is None and sum(map(is_open, held)) < 96
            for one in held:
                one.close()
        finally:
            process.kill()


def test_a_process_that_listens_may_open_what_its_user_may(listener):
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert (
        resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard
        and 3 * hard // 4 <= connection_limit() < hard
    )


# -- what was sent elsewhere, or before ------------------------------------------------------------


def test_a_frame_is_good_once_in_its_place_and_direction():
    ours, theirs = Seal(KEY, to_listener=True), Seal(KEY, to_listener=True)
    first, second = bytearray(ours.frame(b"first")), bytearray(ours.frame(b"second"))
    assert theirs.payload(first) == b"first"
    other = Seal(KEY, to_listener=False)
    other.frame(b"as many before it")
    for again in (first, bytearray(other.frame(b"reflected")), bytearray(20)):
        held = Seal(KEY, to_listener=True)
        held.payload(first)
        with pytest.raises(BadMessage):
            held.payload(again)
    with pytest.raises(BadMessage, match="not the next frame"):
        Seal(KEY, to_listener=True).payload(second)
    with pytest.raises(BadMessage):
        Seal(b"o" * 32, to_listener=True).payload(first)
    for at in range(len(second)):
        held = Seal(KEY, to_listener=True)
        held.payload(first)
        with pytest.raises(BadMessage):
            held.payload(second[:at] + bytes([second[at] ^ 1]) + second[at + 1 :])


def test_each_connection_has_a_key_that_the_token_alone_does_not_give():
    keys = set()
    for _ in range(3):
        challenge, response = Challenge(TOKEN, PURPOSE), ChallengeResponse(TOKEN, PURPOSE)
        sent = challenge.greeting, response.answer(challenge.greeting)
        own, key = challenge.check(sent[1])
        assert response.check(own) == key and TOKEN not in b"".join([*sent, own])
        keys.add(key)
    assert len(keys) == 3
    for token, purpose in ((TOKEN[::-1], PURPOSE), (TOKEN, b"another")):
        with pytest.raises(ConnectionError, match="token"):
            Challenge(token, purpose).check(
                ChallengeResponse(TOKEN, PURPOSE).answer(challenge.greeting)
            )
    response.answer(challenge.greeting)
    for nonsense in (own, bytes(32), sent[1][32:]):
        with pytest.raises(ConnectionError, match="token"):
            response.check(nonsense)


def recorded(monkeypatch) -> list[bytes]:
    """All that connections of this process send from now on."""
    sent: list[bytes] = []
    real = FrameConnection._try_send
    monkeypatch.setattr(
        FrameConnection,
        "_try_send",
        lambda self, data: sent.append(bytes(data)) or real(self, data),
    )
    return sent


def test_what_was_sent_before_is_no_request_of_anybody(tmp_path, monkeypatch):
    """Neither requests nor answers, on another connection of who holds the token."""
    run, config = make_run(tmp_path / "run"), small()
    sent = recorded(monkeypatch)
    with in_thread(run, config) as controller, Roles(run, config) as roles:
        roles.start()
        for client in roles.clients.values():
            client.connection.call("status")
        before, replayed = controller.journal.records, sent[:30]
        for frame in replayed:
            one = dial(run, controller.endpoint, controller.incarnation)
            one.socket.setblocking(True)
            one.socket.sendall(frame)
            with pytest.raises(ConnectionResetError):
                one.receive()
        assert controller.journal.records == before and len(replayed) > 10
        assert roles["actor"].connection.call("status")["refused_connections"] == len(replayed)


# -- clients ---------------------------------------------------------------------------------------


class Squatter:
    """Has the port of a controller that died, and not the token. `heard` is all that clients have
    said to it."""

    def __init__(self, answer: bytes | None) -> None:
        """``answer``: what it says to who connects; None reflects what comes."""
        self.answer, self.heard = answer, bytearray()
        self.server = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self.server.getsockname()[1]}"

    def serve_one(self) -> None:
        self.server.settimeout(60.0)
        made, _ = self.server.accept()
        with made:
            made.settimeout(0.5)
            try:
                made.sendall(self.answer or b"")
                while data := made.recv(4096):
                    self.heard += data
                    if self.answer is None:
                        made.sendall(data)
            except OSError:
                pass


@pytest.mark.parametrize("answer", [b"", bytes(GREETING_BYTES), b"RLXLINK1" + bytes(32), None])
def test_a_client_tells_nothing_to_who_does_not_prove_that_it_holds_the_token(tmp_path, answer):
    run, squatter = make_run(tmp_path / "run"), Squatter(answer)
    publish_card(run, GroupCard("hub", claim_incarnation(run, "hub"), [], squatter.endpoint))
    with QueueClient(run, small(), "actor", 1) as actor:
        asked = actor.connection.submit("resume", timeout=20.0, step=0)
        squatter.serve_one()
        assert b"resume" not in squatter.heard and b"actor" not in squatter.heard
        assert len(squatter.heard) in (0, ANSWER_BYTES)
        squatter.server.close()
        with in_thread(run, small()):
            asked.result(timeout=15)


def test_a_silent_squatter_costs_a_call_no_more_than_its_patience(tmp_path):
    """Nor does it hold up a client once there is a newer controller."""
    run, squatter = make_run(tmp_path / "run"), Squatter(b"")
    publish_card(run, GroupCard("hub", claim_incarnation(run, "hub"), [], squatter.endpoint))
    with QueueClient(run, small(), "actor", 1) as actor:
        with pytest.raises(DeadlineError):
            actor.connection.call("status", timeout=0.2)
        asked = actor.connection.submit("resume", timeout=20.0, step=0)
        with in_thread(run, small()) as controller:
            asked.result(timeout=15)
            assert controller.incarnation == 2
    squatter.server.close()


leaves = (
    st.none()
    | st.booleans()
    | st.integers(0, 3)
    | st.text(max_size=3)
    | st.sampled_from(["fenced", "deadline"])
)
values = (
    leaves
    | st.lists(leaves, max_size=2)
    | st.dictionaries(st.sampled_from(["free", "id"]), leaves, max_size=2)
)
replies = st.dictionaries(
    st.sampled_from(["id", "result", "error", "kind", "hub_incarnation"]) | leaves,
    values,
    max_size=4,
)


@settings(max_examples=effort(100, 10_000))
@given(
    st.lists(
        replies
        | st.fixed_dictionaries(
            {"id": st.integers(0, 2)}, optional={"kind": values, "error": values}
        )
    )
)
def test_no_answer_ends_a_client(client, found):
    for reply in found:
        client.connection._handle_reply(unpack(pack(reply)))


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """A client with calls in flight to nobody, and shards that may be freed."""
    run = make_run(tmp_path_factory.mktemp("client") / "run")
    with QueueClient(run, small(), "actor", 1) as made:
        for _ in range(3):
            made.connection.submit("status", timeout=600.0)
        made._store = made.connection.shards = SimpleNamespace(
            holds=list, free="".join, settle=lambda _: True, close=lambda: None
        )
        yield made


def test_who_listens_and_hangs_up_is_an_error(listener):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        knock = PendingConnection(endpoint, TOKEN, PURPOSE, 5.0)
        taken.accept()[0].close()
        with pytest.raises(ConnectionError):
            knock.proceed(5.0)
        with pytest.raises(TimeoutError, match=r"no proof .* in 0\.05 s"):
            connect(endpoint, TOKEN, PURPOSE, 0.05)
    assert sockets.PROOF_S == proof.PROOF_S
