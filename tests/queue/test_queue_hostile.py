"""Hostile and corrupted messages, shards and journals: the controller lives, and what others have
put is there."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relax_hpc.base.versions import Version
from relax_hpc.net.rendezvous.roster import latest_card
from relax_hpc.net.transport import wire
from relax_hpc.net.transport.sockets import frame_content
from relax_hpc.net.transport.wire import MAX_MESSAGE_BYTES, BadMessage, unpack
from relax_hpc.queue.client import Claim, read_rows
from relax_hpc.queue.controller.journal import Journal, JournalError
from relax_hpc.queue.controller.messages import Refused, parse
from relax_hpc.queue.controller.server import Controller
from relax_hpc.queue.controller.service import SCHEMAS
from relax_hpc.queue.controller.waiting import NotYet
from relax_hpc.queue.plan import GENERATED, Plan
from relax_hpc.queue.storage.shard import MAX_NAME_BYTES, ShardError, check_name, pack
from relax_hpc.queue.storage.shard_files import ShardFiles
from relax_hpc.queue.storage.shard_store import ShardReader
from tests.effort import effort
from tests.helpers.plane_helpers import plane_here
from tests.helpers.queue_helpers import BUDGET, HubProcess, Roles, dial, make_run, rows_of, small
from tests.helpers.queue_in_memory import contents
from tests.helpers.queue_world import World

ORIGIN = {"group": "rollout", "incarnation": 1}
MARK = "@@ deep @@"
OUTSIDE = [
    "../../token",
    "/etc/passwd",
    "a/../../b",
    "..",
    ".hidden",
    "a\0b",
    "",
    "x" * (MAX_NAME_BYTES + 1),
]
OF_OTHERS = ("down", "resume", "trained", "checkpoint", "publish", "evaluated", "serve")
"""Who holds the run's token may ask for these in the name of others; the rest harms nobody but who
asks."""


def deep(levels: int) -> bytes:
    """msgpack of lists in each other, more of them than its packer makes."""
    return b"\x91" * levels + b"\xc0"


def payload_of(op: str, args: Any, levels: int = 0, /, **over: Any) -> bytes:
    """A request; where `MARK` stands in it are that many lists."""
    message = {
        "id": 1,
        "client": "stranger",
        "group": "stranger",
        "incarnation": 1,
        "op": op,
        "args": args,
        "patience": 0.0,
    }
    payload = msgpack.packb(message | over)
    return payload.replace(msgpack.packb(MARK), deep(levels)) if levels else payload


# -- messages, to a service without sockets --------------------------------------------------------

whole = st.sampled_from(
    [0, 1, 2, 7, -1, 1 << 31, (1 << 53) - 1, -(1 << 53) + 1, 1 << 53, (1 << 64) - 1, -(1 << 63)]
)
text = st.sampled_from(
    ["", "r", "token_ids", "reward", "\0", "é" * 3000, "i000001-v000000", *OUTSIDE]
) | st.text(max_size=5)
leaves = (
    st.none() | st.booleans() | whole | st.floats() | text | st.binary(max_size=5) | st.just(MARK)
)
anything = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text | whole, inner, max_size=3),
    max_leaves=8,
)
row = st.fixed_dictionaries(
    {
        "ticket": whole,
        "episodes": st.binary(max_size=3) | whole,
        "lengths": st.binary(max_size=9) | whole,
        "versions": st.lists(whole, max_size=3),
    }
)
shard = st.fixed_dictionaries(
    {"name": text}, optional={"bytes": whole | anything, "planes": anything}
)
GOOD: dict[str, st.SearchStrategy] = {
    "int": whole,
    "bool": st.booleans(),
    "float": st.floats() | whole,
    "str": text,
    "dict": shard,
    "list[int]": st.lists(whole, max_size=3),
    "list[str]": st.lists(text, max_size=3),
    "list[dict]": st.lists(row, max_size=3),
    "dict[str, float]": st.dictionaries(text, st.floats() | whole, max_size=3),
    "Any": anything,
}


@st.composite
def requests(draw: Callable, ops: list[str]) -> bytes:
    """Right and wrong arguments of one operation, or no request at all."""
    op = draw(st.sampled_from([*ops, "nonsense"]))
    types = SCHEMAS[op]._types if op in SCHEMAS else {}
    args = {
        name: draw(GOOD[kind] | anything if draw(st.integers(0, 9)) == 0 else GOOD[kind])
        for name, kind in types.items()
    }
    if draw(st.integers(0, 9)) == 0:
        args |= draw(st.dictionaries(text, anything, max_size=2))
    levels = draw(st.sampled_from([1, 7, 400, 505, 511, 900, 5000]))
    over = draw(
        st.just({})
        | st.fixed_dictionaries(
            {}, optional=dict.fromkeys(("id", "incarnation", "patience", "op"), leaves)
        )
    )
    return payload_of(op, args, levels, **over)


def ask(it: World, payload: bytes) -> None:
    """What the controller does with what a frame brings; whatever it answers can be sent."""
    try:
        request = parse(b"", unpack(payload))
        answer = it.service.handle(request)
    except (BadMessage, Refused, NotYet) as refusal:
        answer = str(refusal)
    wire.pack({"id": 1, "hub_incarnation": 1, "result": answer})


def world() -> World:
    """A run in its middle: there are leases, shards, and tickets in generation."""
    it = World(Plan.from_config(small(2, 2, 3, 1)), BUDGET)
    for number in range(6):
        for role in ("actor", "rollout", "rollout", "reference", "actor_fwd"):
            it.act(role, number)
    return it


def end_stranger(it: World) -> None:
    """Its supervisor has noticed."""
    for incarnation in (
        1,
        *(e for group, e in it.service.state.members.incarnations.items() if group == "stranger"),
    ):
        it.service.ask(
            "supervisor", 1, f"end{incarnation}", "down", group="stranger", incarnation=incarnation
        )


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(data=st.data())
def test_a_run_goes_to_its_end_whatever_a_stranger_sends(data):
    it = world()
    for payload in data.draw(
        st.lists(requests([op for op in SCHEMAS if op not in OF_OTHERS]), min_size=1, max_size=10)
    ):
        ask(it, payload)
        it.audit()
    assert contents(it.service.replayed()) == contents(it.service.state)
    end_stranger(it)
    it.go_to_the_end()


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(data=st.data())
def test_nothing_that_is_asked_for_breaks_the_controller_or_its_journal(data):
    it = world()
    for payload in data.draw(st.lists(requests(list(SCHEMAS)), min_size=1, max_size=10)):
        ask(it, payload)
    assert contents(it.service.replayed()) == contents(it.service.state)


@given(payload=st.binary(max_size=200) | anything.map(lambda value: msgpack.packb(value)))
def test_payloads_of_anything_are_messages_or_refused(payload):
    with contextlib.suppress(BadMessage):
        assert isinstance(unpack(payload), dict)


@pytest.mark.parametrize("levels", [400, 511, 990, 1100, 100_000])
@pytest.mark.parametrize("op", ["put", "beat", "resume", "claim", "note"])
def test_deeply_nested_values_are_refused(op, levels):
    it = world()
    before = len(it.service.journal)
    args = {
        "put": {
            "shard": {"name": "s", "planes": MARK},
            "rows": [],
            "fields": ["token_ids", "reward"],
        },
        "beat": {"member": "m", "more": MARK},
    }
    ask(it, payload_of(op, args.get(op, {"step": MARK, "task": MARK, "what": MARK}), levels))
    assert len(it.service.journal) <= before + 1, "the stranger is registered, and that is all"


@pytest.mark.parametrize("name", OUTSIDE)
def test_no_name_leads_out_of_the_run(name, tmp_path):
    it = world()
    kept = list(it.service.state.shards.garbage)
    put = {"shard": {"name": name}, "rows": [], "fields": ["token_ids", "reward"]}
    for op, args in (
        ("put", put),
        ("saved", {"names": [name]}),
        ("checkpoint", {"step": 0, "name": name, "digest": "d"}),
    ):
        with pytest.raises(Refused, match=r"no path|allowed 200"):
            it.service.handle(parse(b"", unpack(payload_of(op, args))))
    assert it.service.state.shards.garbage == kept
    with pytest.raises(ShardError):
        check_name(name)


# -- a controller in a process of its own ----------------------------------------------------------


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Roles, HubProcess, str]]:
    run = make_run(tmp_path_factory.mktemp("hostile") / "run")
    with HubProcess(run) as hub, Roles(run, small(steps=50)) as roles:
        roles.start()
        card = latest_card(run, "hub")
        assert card
        yield roles, hub, card.endpoint


def odd_payloads() -> list[bytes]:
    """What has been trouble somewhere, from who holds the token."""
    descriptor = {
        "name": "x-i000001-1.h5",
        "bytes": (1 << 64) - 1,
        "planes": {"shm": [], "tcp": "x"},
    }
    put = {"shard": descriptor, "rows": [], "fields": ["token_ids", "reward"]}
    long = {"names": ["stranger-i000001-" + "x" * 4000]}
    return [
        os.urandom(64),
        deep(500_000),
        b"\xdd\xff\xff\xff\xff" + bytes(100),
        payload_of("saved", long),
        payload_of("saved", {"names": ["../../token"]}),
        *(
            payload_of("put", {**put, "shard": {**descriptor, "planes": MARK}}, levels)
            for levels in (400, 505, 900)
        ),
        *(payload_of("beat", {"member": "m", "more": MARK}, levels) for levels in (400, 505, 900)),
        *(
            payload_of("put", {**put, "shard": {**descriptor, "name": f"s{n}"}}, id=n)
            for n in range(3)
        ),
        payload_of("resume", {"step": MARK}, 990),
        payload_of("status", {}),
        bytes(MAX_MESSAGE_BYTES + 1),
    ]


def test_a_real_controller_outlives_them_all(served):
    roles, hub, endpoint = served
    run, step = roles["actor"].run, 0
    host, port = endpoint.removeprefix("tcp://").split(":")
    version = Version(1, 0)
    tickets = roles.admit(version)
    assert roles["rollout"].put_generated(rows_of(tickets, version)) == {}
    sockets = []
    endless, cut = struct.pack("<I", (1 << 32) - 1), struct.pack("<I", 1000) + b"x"
    for raw in (
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        os.urandom(4096),
        endless,
        cut,
        cut[:3],
        struct.pack("<I", 0) * 99,
    ):
        sockets.append(socket.create_connection((host, int(port)), 10.0))
        sockets[-1].sendall(raw)
    for payload in odd_payloads():
        connection = dial(run, endpoint, hub.incarnation)
        with contextlib.suppress(OSError):
            connection.send(payload)
            connection.send(payload)
        connection.close()
    roles.learn(version)
    rows = roles.train(step)
    assert [row["row_id"] for row in rows] == [row["row_id"] for row in rows_of(tickets, version)]
    assert (
        hub.process.poll() is None
        and roles["actor"].connection.call("status")["refused_connections"] >= 5
    )
    for one in sockets:
        one.close()
    assert run.token_file.exists()


@settings(
    max_examples=effort(15, 3000),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(frames=st.lists(st.binary(max_size=300), max_size=5), proven=st.booleans())
def test_a_real_controller_answers_after_any_bytes(served, frames, proven):
    roles, hub, endpoint = served
    host, port = endpoint.removeprefix("tcp://").split(":")
    connection = dial(roles["actor"].run, endpoint, hub.incarnation) if proven else None
    with (
        connection.socket
        if connection
        else socket.create_connection((host, int(port)), 10.0) as made
    ):
        with contextlib.suppress(OSError):
            for frame in frames:
                connection.send(frame) if connection else made.sendall(frame_content(frame))
        assert (
            roles["actor"].connection.call("status")["trained_steps"] <= 1
            and hub.process.poll() is None
        )


# -- files -----------------------------------------------------------------------------------------


def test_a_shard_in_the_place_of_another_is_noticed(tmp_path):
    version, folder = Version(1, 0), tmp_path
    files = ShardFiles(folder)
    shards = [
        files.write(f"{t}.h5", pack(rows_of([t], version), GENERATED, ORIGIN)) for t in (0, 1)
    ]
    (folder / "1.h5").replace(folder / "0.h5")
    claim = Claim(1, 0, (0,), ({**shards[0], "tickets": [0]},), 0, episodes=(b"\1\1",))
    with pytest.raises(
        ShardError, match=r"0.h5: has no row 000000000.00.00; another file has its name"
    ):
        read_rows(ShardReader(files), claim)


@pytest.mark.parametrize(
    "planes", [None, [], "x", {"shm": None, "tcp": 7}, {"shm": {}, "tcp": {"host": "h"}}]
)
def test_a_descriptor_of_anything_leaves_the_file(tmp_path, planes):
    files = ShardFiles(tmp_path)
    shard = files.write("a.h5", pack(rows_of([3], Version(1, 0)), GENERATED, ORIGIN))
    with plane_here("shm") as shm, plane_here("tcp") as tcp:
        assert len(ShardReader(files, [shm, tcp]).read({**shard, "planes": planes})) == 2


@pytest.fixture(scope="module")
def journal_bytes(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[bytes, list[int], list[dict[str, Any]]]:
    """A journal, where its records end, and what they are."""
    made = Journal(tmp_path_factory.mktemp("journal"), 1, durable=False)
    records, ends = list(made.replay()), []
    ends.append(made.position.offset)
    for number in range(20):
        records.append({"op": "note", "what": "w" * number, "name": "n", "reason": "r"})
        made.append(records[-1])
        made.commit()
        ends.append(made.position.offset)
    made.close()
    return made.path.read_bytes(), ends, records


def replayed(folder: Path, content: bytes) -> tuple[list[dict[str, Any]], int]:
    """Records of a journal of this content, and bytes of its torn tail."""
    for path in folder.iterdir():
        path.unlink()
    (folder / "inc-000001.journal").write_bytes(content)
    made = Journal(folder, 2, durable=False)
    try:
        return list(made.replay()), sum(made.torn_bytes.values())
    finally:
        made.close()


@settings(max_examples=effort(50, 500), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), cut=st.booleans(), junk=st.binary(max_size=30))
def test_a_damaged_journal_is_cut_at_its_end_or_refused(tmp_path, journal_bytes, data, cut, junk):
    """What is replayed is the beginning of what was written, whole, and nothing else."""
    whole, ends, records = journal_bytes
    at = data.draw(st.integers(0, len(whole) - 1))
    content = (
        whole[:at] + junk
        if cut
        else whole[:at] + bytes([whole[at] ^ 0x41]) + whole[at + 1 :] + junk
    )
    try:
        found, torn = replayed(tmp_path, content)
    except JournalError as error:
        offset = int(str(error).rpartition(" ")[2])
        assert offset in (0, *ends) and "inc-000001.journal" in str(error)
        return
    good = sum(end <= at for end in ends) - 1
    assert found == records[: max(0, good)] if not junk else found == records[: len(found)]
    assert torn == len(content) - (
        [0, *ends][len(found) + 1] if content[: ends[0]] == whole[: ends[0]] else 0
    )


def test_a_controller_that_finds_a_damaged_journal_says_where(tmp_path):
    run, config = make_run(tmp_path / "run"), small()
    with HubProcess(run) as hub, Roles(run, config) as roles:
        roles.start()
        roles.step(0)
        hub.kill()
    path = run.journal / "inc-000001.journal"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(JournalError, match=r"inc-000001\.journal: .* at offset \d+"):
        Controller(run, Plan.from_config(config), 2)
    assert path.read_bytes() == content, "nothing is overwritten"
