"""The plane over NIXL, within a node by process_vm_readv and by TCP; which way is taken needs no
NIXL to test."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import cache
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_hpc.config.schema import Config, PlanesConfig, QueueConfig
from relax_hpc.net.rendezvous.process import die_with_parent
from relax_hpc.net.transport import Descriptor, PlaneError, SlabPool, rdma_agent, rdma_path
from relax_hpc.net.transport.rdma import RdmaPlane, check_nixl
from relax_hpc.net.transport.rdma_path import find_route, route_facts
from relax_hpc.net.transport.rdma_source import RdmaAddress
from relax_hpc.queue.controller.messages import MAX_OPAQUE_BYTES
from relax_hpc.queue.storage.shard_store import open_planes
from tests.helpers.plane_helpers import READ_S, ROOT, TOKEN, WAIT_S, Peer, digest, pattern, serve
from tests.helpers.queue_helpers import Roles, in_thread, make_run, small
from tests.plain_user import plain_user
from tests.requirements import requires

needs_nixl = pytest.mark.usefixtures("nixl")
WAYS = {"cma": "all", "tcp": "tcp,self"} | (
    {"verbs": "rc,ud,self"} if rdma_path.has_active_card() else {}
)
"""UCX_TLS that leads to each."""
BIG = 3_000_000


class RdmaPeer(Peer):
    """A process with an `RdmaPlane`, over ``way``; ``options`` are the plane's, ``inside`` is a
    command around it."""

    def __init__(
        self, way: str, owner: str = "one-e1", inside: tuple[str, ...] = (), **options: Any
    ) -> None:
        self._pipe, theirs = Pipe()
        options = {"emulated": way == "tcp", **options}
        words = [
            *inside,
            sys.executable,
            "-m",
            "tests.net.test_plane_rdma",
            owner,
            json.dumps(options),
            str(theirs.fileno()),
        ]
        env = {**os.environ, "UCX_TLS": WAYS[way]}
        self._process = subprocess.Popen(words, cwd=ROOT, env=env, pass_fds=[theirs.fileno()])
        theirs.close()

    def publish(self, name: str, size: int, seed: int = 0, copied: bool = False) -> Descriptor:
        return self.call("publish", name=name, size=size, seed=seed)

    def read(self, descriptor: Descriptor, timeout_s: float = READ_S) -> str:
        """The record's digest, or what went wrong."""
        return self.call("read", descriptor=descriptor, timeout_s=timeout_s)

    def finish(self) -> int:
        """Let it end by itself; its exit code."""
        self._pipe.close()
        return self._process.wait(WAIT_S)


class _Server:
    """What an `RdmaPeer` can be asked. Whatever went wrong is kept, with all that hangs on it."""

    def __init__(self, owner: str, options: dict[str, Any]) -> None:
        self.pool = SlabPool()
        self.plane = RdmaPlane(TOKEN, self.pool, owner, **options)
        self.kept: list[memoryview] = []
        self.abandoned: list[memoryview] = []
        self.errors: list[PlaneError] = []
        self.agents: list[weakref.ref] = []

    def set(self, suspect_s: float = 30.0, quarantine_bytes: int = 1 << 40) -> None:
        self.plane.suspect_s, self.plane.quarantine_bytes = suspect_s, quarantine_bytes

    def publish(self, name: str, size: int, seed: int) -> Descriptor:
        slab = self.pool.take(size)
        slab.memory[:size] = pattern(size, seed)
        return self.plane.publish(name, slab.memory[:size])

    def read(self, descriptor: Descriptor, timeout_s: float) -> str:
        try:
            return digest(self.plane.read(descriptor, timeout_s))
        except PlaneError as error:
            self.errors.append(error)
            return str(error)

    def keep(self, descriptor: Descriptor) -> list[str]:
        """Digests of all records that are kept, this one last."""
        self.kept.append(self.plane.read(descriptor, READ_S))
        return [digest(record) for record in self.kept]

    def abandon(self, descriptor: Descriptor, timeout_s: float) -> str:
        """Give up on a read, but look at its destination later."""
        text = self.read(descriptor, timeout_s)
        self.abandoned.append(self.plane._sink._given_up[-1][0].memory[: descriptor["size"]])
        self.agents.append(weakref.ref(self.plane._sink.agent._nixl.agent))
        return text

    def destinations(self) -> list[str]:
        return [digest(memory) for memory in self.abandoned]

    def state(self) -> dict[str, Any]:
        """Routes by agent, agents that were given up, and which of those that abandoned a read are
        still there."""
        routes = {agent: str(found) for agent, found in self.plane.routes.items()}
        return {
            "routes": routes,
            "restarts": self.plane.restarts,
            "alive": [bool(ref()) for ref in self.agents],
        }


@pytest.fixture(scope="session")
def nixl() -> None:
    requires("nixl")


@pytest.fixture(scope="module")
def pairs() -> Iterator[Callable[[str], tuple[RdmaPeer, RdmaPeer]]]:
    """A reader and a maker for each way, which live as long as this module's tests."""
    with ExitStack() as stack:
        yield cache(
            lambda way: tuple(
                stack.enter_context(RdmaPeer(way, f"{role}-e1")) for role in ("reader", "good")
            )
        )


@needs_nixl
@pytest.mark.parametrize("way", WAYS)
def test_bytes_come_by_the_way_that_is_told_and_processes_end_well(way):
    with RdmaPeer(way) as maker, RdmaPeer(way) as reader:
        for size in (0, 1, 8, 4097, BIG):
            record = maker.publish(f"r{size}", size, size)
            assert reader.read(record) == digest(pattern(size, size))
            assert len(msgpack.packb(record)) < 1000
        (found,) = reader.call("state")["routes"].values()
        assert found.partition(" ")[0] == way
        assert (reader.finish(), maker.finish()) == (0, 0)


@needs_nixl
def test_a_maker_that_stands_still_is_read_one_sided(pairs):
    reader, maker = pairs("cma")
    reader.read(maker.publish("first", 10))
    record = maker.publish("still", BIG, 1)
    maker.stop()
    assert reader.read(record) == digest(pattern(BIG, 1))
    maker.go_on()


@needs_nixl
def test_what_lands_late_overwrites_nothing(pairs):
    """The destination of a read that was given up on is written when its maker goes on, and nobody
    else has it."""
    reader, other = pairs("tcp")
    reader.call("set", suspect_s=0)
    with RdmaPeer("tcp") as slow:
        late, good = slow.publish("late", BIG, 1), other.publish("good", BIG, 2)
        reader.read(slow.publish("first", 10))
        slow.stop()
        assert "not done in 0.3 s" in reader.call("abandon", descriptor=late, timeout_s=0.3)
        assert reader.call("destinations")[-1] != digest(pattern(BIG, 1))
        for _ in range(3):
            reader.call("keep", descriptor=good)
        slow.go_on()
        until = time.monotonic() + READ_S
        while reader.call("destinations")[-1] != digest(pattern(BIG, 1)):
            assert time.monotonic() < until
            reader.read(good)
        assert reader.call("keep", descriptor=good) == [digest(pattern(BIG, 2))] * 4


@needs_nixl
def test_nothing_lands_any_more_once_the_agent_was_changed(pairs):
    """Not even while somebody keeps the error of the read. Over TCP the maker may not survive
    that."""
    reader, other = pairs("tcp")
    reader.call("set", suspect_s=0)
    with RdmaPeer("tcp") as slow:
        late, good = slow.publish("late", BIG, 1), other.publish("better", BIG, 2)
        reader.read(slow.publish("first", 10))
        slow.stop()
        reader.call("abandon", descriptor=late, timeout_s=0.1)
        before = reader.call("state")
        assert before["alive"][-1]
        reader.call("set", suspect_s=0, quarantine_bytes=BIG)
        assert "not done in 0.1 s" in reader.read(late, 0.1)
        after = reader.call("state")
        assert after["restarts"] == before["restarts"] + 1 and not any(after["alive"])
        slow.go_on()
        with suppress(EOFError, ConnectionError):
            slow.call("read", descriptor=late, timeout_s=READ_S)
        for _ in range(3):
            reader.read(late, 1.0)
            assert reader.read(good) == digest(pattern(BIG, 2))
        assert reader.call("destinations")[-1] != digest(pattern(BIG, 1))


@needs_nixl
def test_who_was_late_is_left_alone_for_a_while(pairs):
    reader, other = pairs("tcp")
    reader.call("set", suspect_s=600)
    with RdmaPeer("tcp") as slow:
        record = slow.publish("r", BIG)
        slow.stop()
        assert "not done in 0.1 s" in reader.read(record, 0.1)
        assert "has not answered in time, and is not used for 600 s" in reader.read(record)
        assert reader.read(other.publish("nobody's fault", 10)) == digest(pattern(10, 0))


@needs_nixl
@pytest.mark.parametrize("way", WAYS)
def test_a_successor_is_read_and_the_dead_are_not(pairs, way):
    reader, _ = pairs(way)
    with RdmaPeer(way) as first, RdmaPeer(way) as second:
        old, unseen = first.publish("r", 10, 1), first.publish("s", BIG, 1)
        assert reader.read(old) == digest(pattern(10, 1))
        first.kill()
        assert reader.read(second.publish("r", 10, 2)) == digest(pattern(10, 2))
        for record in (old, unseen, old):
            assert reader.read(record).startswith(f"rdma: record {record['name']} from one-e1: ")


@needs_nixl
def test_makers_survive_readers_that_are_killed(pairs):
    reader, maker = pairs("cma")
    record = maker.publish("large", 20_000_000, 1)
    with RdmaPeer("cma") as mortal:
        mortal.read(record)
        mortal.ask("read", descriptor=record, timeout_s=READ_S)
    assert reader.read(record) == digest(pattern(20_000_000, 1))


@needs_nixl
def test_emulated_reads_are_refused(pairs):
    _, maker = pairs("tcp")
    with RdmaPeer("tcp", emulated=False) as reader:
        why = (
            "the only path is tcp (UCX_TLS=tcp,self), slow and unsafe for its maker; take plane tcp"
        )
        assert reader.read(maker.publish("r", 10)) == f"rdma: record r from good-e1: {why}"


@needs_nixl
def test_what_every_plane_promises_holds_over_tcp():
    """The tests of all planes again, in a process that may use nothing better."""
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-q",
        "tests/net/test_planes.py",
        "-k",
        "rdma",
    ]
    env = {**os.environ, "UCX_TLS": WAYS["tcp"]}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-3000:]


@needs_nixl
def test_processes_that_are_started_later_do_without_what_is_set_for_nixl():
    code = (
        "import os; before = dict(os.environ); from relax_hpc.net.transport.rdma_agent import "
        "NixlAgent; "
    )
    code += "agent = NixlAgent('one'); assert dict(os.environ) == before; print('well')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S
    )
    assert (done.returncode, done.stdout) == (0, "well\n"), done.stderr


@needs_nixl
def test_rows_of_a_queue_pass_by_it(tmp_path):
    run, config = make_run(tmp_path / "run"), small()
    config.queue.planes = PlanesConfig(shm="off", rdma="required", tcp="off")
    with in_thread(run, config), Roles(run, config) as roles:
        roles.start()
        roles.step(0)
        assert [set(roles[role].store.plane_counts.shards) for role in ("reference", "actor")] == [
            {"rdma_cma"}
        ] * 2


@needs_nixl
def test_a_shard_with_every_plane_is_a_short_message(tmp_path):
    run, pool = make_run(tmp_path / "run"), SlabPool()
    config = Config(queue=QueueConfig(planes=PlanesConfig(rdma="required")))
    planes = open_planes(run, config, "rollout", "rollout-i000001-4000000-0123abcd", pool)
    name = "rollout-i000001-4000000-0123abcd-000001.h5"
    offers = {plane.name: plane.publish(name, pool.take(4096).memory) for plane in planes}
    assert list(offers) == ["shm", "rdma", "tcp"]
    assert (
        len(msgpack.packb({"name": name, "bytes": 4096, "planes": offers})) < MAX_OPAQUE_BYTES // 8
    )
    for plane in planes:
        plane.close()
    pool.close()


@needs_nixl
def test_another_pid_namespace_is_noticed(pairs):
    inside = ("unshare", "--pid", "--fork", "--kill-child")
    if (
        not shutil.which("unshare")
        or subprocess.run([*inside, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("needs the right to make a pid namespace: run as root")
    reader, _ = pairs("cma")
    with RdmaPeer("cma", inside=inside) as maker:
        assert "tcp (another pid namespace on the same node" in reader.read(maker.publish("r", 10))


@needs_nixl
def test_a_user_without_rights_can_do_it():
    with plain_user() as user:
        done = user.run(user.python, "-m", "tests.net.test_plane_rdma")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-2:] == [digest(pattern(10, 0)), "cma"]


@pytest.mark.root
def test_memory_of_another_user_is_not_there():
    if os.getuid():
        pytest.skip("needs processes of two users: run as root")
    code = "import json, sys; from relax_hpc.net.transport.rdma_path import find_route; "
    code += "print(find_route(json.loads(sys.argv[1]), int(sys.argv[2])))"
    memory = SlabPool().take(10).memory
    with plain_user() as user:
        words = [
            user.python,
            "-c",
            code,
            json.dumps(route_facts()),
            str(rdma_agent.address_of(memory)),
        ]
        assert (
            f"tcp (a process of user 0, this one is of {user.entry.pw_uid})"
            in user.run(*words).stdout
        )


def fabric(folder: Path, driver: str, state: str) -> Path:
    """A /sys/class/infiniband with one card."""
    (folder / "drivers" / driver).mkdir(parents=True)
    (folder / "class" / "card0" / "ports" / "1").mkdir(parents=True)
    (folder / "class" / "card0" / "device").mkdir()
    (folder / "class" / "card0" / "device" / "driver").symlink_to(folder / "drivers" / driver)
    (folder / "class" / "card0" / "ports" / "1" / "state").write_text(f"{state}\n")
    return folder / "class"


@pytest.mark.parametrize(
    ("driver", "state", "there", "tls", "kind"),
    [
        ("mlx5_core", "4: ACTIVE", True, "all", "verbs"),
        ("mlx5_core", "4: ACTIVE", True, "rc_x,ud,self", "verbs"),
        ("mlx5_core", "4: ACTIVE", True, "^ib", "tcp"),
        ("mlx5_core", "4: ACTIVE", False, "all", "tcp"),
        ("mlx5_core", "1: DOWN", True, "all", "tcp"),
        ("irdma", "4: ACTIVE", True, "all", "tcp"),
    ],
)
def test_between_nodes_it_takes_a_card_that_nixl_knows_on_both(
    tmp_path, monkeypatch, driver, state, there, tls, kind
):
    monkeypatch.setattr(rdma_path, "_FABRIC", fabric(tmp_path, driver, state))
    monkeypatch.setattr(rdma_path, "knows_all_cards", lambda: False)
    monkeypatch.setenv("UCX_TLS", tls)
    found = find_route(route_facts() | {"boot": "another", "fabric": there}, 0)
    assert found.kind == kind and bool(found.why) == (kind == "tcp")


@pytest.mark.parametrize(("is_link", "kind"), [(True, "verbs"), (False, "tcp")])
def test_nixl_with_the_systems_drivers_knows_all_cards(tmp_path, monkeypatch, is_link, kind):
    (tmp_path / "nixl_of_test").mkdir()
    (tmp_path / "nixl_of_test" / "__init__.py").touch()
    (tmp_path / "nixl_of_test.libs").mkdir()
    (tmp_path / "libibverbs.so.1").touch()
    own = tmp_path / "nixl_of_test.libs" / "libibverbs-1234.so.1"
    own.symlink_to(tmp_path / "libibverbs.so.1") if is_link else own.touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(rdma_agent, "_PACKAGES", ("nixl_of_test",))
    monkeypatch.setattr(rdma_path, "_FABRIC", fabric(tmp_path, "irdma", "4: ACTIVE"))
    monkeypatch.delenv("UCX_TLS", raising=False)
    assert find_route(route_facts() | {"boot": "another"}, 0).kind == kind


@pytest.mark.parametrize(
    ("tls", "kind"),
    [(None, "cma"), ("shm,tcp", "cma"), ("^tcp", "cma"), ("^cma", "tcp"), ("tcp,self", "tcp")],
)
def test_ucx_tls_is_respected(monkeypatch, tls, kind):
    monkeypatch.delenv("UCX_TLS", raising=False) if tls is None else monkeypatch.setenv(
        "UCX_TLS", tls
    )
    memory = SlabPool().take(10).memory
    assert find_route(route_facts() | {"fabric": False}, rdma_agent.address_of(memory)).kind == kind


def test_a_process_that_has_ended_is_told():
    with subprocess.Popen(["true"]) as gone:
        gone.wait(WAIT_S)
    assert find_route(route_facts() | {"pid": gone.pid}, 0) == rdma_path.Route(
        "tcp", f"process {gone.pid} has ended"
    )


PLACE = RdmaAddress("r", 10, "one-e1", "one-e1-ab", b"metadata", {"pid": 1}, 4096, 8192, 7)


def test_a_descriptor_comes_back_from_the_wire():
    assert (
        RdmaAddress.from_descriptor(msgpack.unpackb(msgpack.packb(PLACE.descriptor(TOKEN))), TOKEN)
        == PLACE
    )


VALUES = st.one_of(
    st.none(),
    st.integers(),
    st.text(max_size=9),
    st.binary(max_size=20),
    st.floats(),
    st.booleans(),
)


@given(field=st.sampled_from([*PLACE.__slots__, "proof", "surplus"]), value=VALUES)
def test_a_changed_descriptor_never_comes_near_nixl(field, value):
    changed = PLACE.descriptor(TOKEN) | {field: value}
    if changed != PLACE.descriptor(TOKEN):
        with pytest.raises((ValueError, TypeError, OverflowError)):
            RdmaAddress.from_descriptor(changed, TOKEN)


@given(descriptor=st.dictionaries(st.sampled_from([*PLACE.__slots__, "proof"]), VALUES))
def test_what_is_no_descriptor_is_refused(descriptor):
    with pytest.raises((ValueError, TypeError, OverflowError)):
        RdmaAddress.from_descriptor(descriptor, TOKEN)
    with pytest.raises(ValueError, match="token"):
        RdmaAddress.from_descriptor(PLACE.descriptor(b"another token"), TOKEN)


def test_without_nixl_the_reason_is_told(monkeypatch):
    monkeypatch.setattr(rdma_agent, "_PACKAGES", ("no_such_package",))
    assert check_nixl() == (False, "there is no package nixl-cu12; pip install --no-deps nixl-cu12")
    with pytest.raises(PlaneError, match="rdma: there is no package nixl-cu12"):
        RdmaPlane(TOKEN, SlabPool(), "one-e1")


def main(*words: str) -> None:
    """`OWNER OPTIONS FD`: be an `RdmaPeer`; nothing: print what reading from one gives, and by
    which way."""
    if words:
        die_with_parent()
        serve(_Server(words[0], json.loads(words[1])), Connection(int(words[2])))
        return
    with RdmaPeer("cma") as maker, RdmaPeer("cma") as reader:
        print(reader.read(maker.publish("r", 10)), *reader.call("state")["routes"].values())


if __name__ == "__main__":
    main(*sys.argv[1:])
