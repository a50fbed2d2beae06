"""How torch's ranks meet: alone without a socket, over several nodes by connections that prove
themselves."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest

from tests.requirements import requires

requires("torch", "megatron")

import psutil  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402

from relax_hpc.net.rendezvous.world import World  # noqa: E402
from relax_hpc.net.transport.links import Deadline  # noqa: E402
from relax_hpc.net.transport.wire import pack  # noqa: E402
from relax_hpc.training import authenticated_store  # noqa: E402
from relax_hpc.training.authenticated_store import (  # noqa: E402
    AuthenticatedStore,
    RemoteTable,
    make_store,
    serve,
)
from relax_hpc.training.cpu import single_process  # noqa: E402

pytestmark = pytest.mark.run

TOKEN = b"t" * 32
ALONE = """
import os, psutil
from relax_hpc.net.rendezvous.channel import RankChannel
from relax_hpc.training.cpu import single_process as alone
from relax_hpc.training import parallel
parallel.initialize_alone("cpu", 0, 60.0)
channel = RankChannel(60.0)
import torch.distributed as dist
from megatron.core import parallel_state
assert channel.gather({"a": 1}) == [{"a": 1}] and alone.wrong_collectives() == []
box = [None]
dist.all_gather_object(box, {"b": 2}, group=channel.group)
assert box == [{"b": 2}] and parallel_state.get_data_parallel_group_gloo().size() == 1
found = [one for one in psutil.Process().net_connections("all") if one.status == "LISTEN" or one.family == 1]
assert not found, found
parallel.destroy()
"""


def test_a_rank_alone_opens_no_socket_and_its_collectives_are_copies() -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", ALONE], timeout=120, check=True)


def _results(given: Tensor) -> dict[str, Tensor]:
    """Result of each kind of collective in a group of one rank, by name."""
    group, outputs = dist.new_group([0]), {}

    def fresh(name: str) -> Tensor:
        return outputs.setdefault(name, torch.full_like(given, -1.0))

    for operation in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
        dist.all_reduce(fresh(f"all_reduce {operation}").copy_(given), operation, group)
    dist.reduce(fresh("reduce").copy_(given), 0, group=group)
    dist.broadcast(fresh("broadcast").copy_(given), 0, group)
    dist.all_gather([fresh("all_gather")], given, group)
    dist.all_gather_into_tensor(fresh("all_gather_into_tensor"), given, group)
    dist.gather(given, [fresh("gather")], 0, group)
    dist.scatter(fresh("scatter"), [given], 0, group)
    dist.reduce_scatter(fresh("reduce_scatter"), [given], group=group)
    dist.reduce_scatter_tensor(fresh("reduce_scatter_tensor"), given, group=group)
    if dist.get_backend() != "gloo":  # that of torch 2.11 has no all_to_all
        dist.all_to_all([fresh("all_to_all")], [given], group)
    dist.all_to_all_single(fresh("all_to_all_single"), given, group=group)
    dist.all_to_all_single(fresh("with sizes"), given, [len(given)], [len(given)], group)
    with dist._coalescing_manager(group, async_ops=True) as work:
        for name in ("coalesced", "coalesced too"):
            dist.all_gather_into_tensor(fresh(name), given, group)
    work.wait()
    dist.all_gather_into_tensor(fresh("asynchronous"), given, group, async_op=True).wait()
    dist.barrier(group)
    return outputs


def test_collectives_of_one_rank_give_what_a_real_group_of_one_rank_gives() -> None:
    """With any torch: its backend `fake` is not used, some of whose collectives copy nothing in
    torch 2.11."""
    given, results = torch.arange(1.0, 9.0).view(4, 2), []
    for start in (
        lambda: single_process.initialize(timedelta(seconds=60)),
        lambda: dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1),
    ):
        start()
        try:
            results.append(_results(given))
        finally:
            dist.destroy_process_group()
    ours, gloo = results
    assert [name for name in ours if not torch.equal(ours[name], given)] == []
    assert [name for name in gloo if not torch.equal(ours[name], gloo[name])] == []


@pytest.fixture(name="served")
def served_fixture() -> tuple[str, int]:
    """Where ranks reach a table."""
    listening = socket.create_server(("127.0.0.1", 0))
    address = listening.getsockname()
    serve(listening, TOKEN)
    return address


def test_a_store_over_the_network_does_what_torchs_own_do(served: tuple[str, int]) -> None:
    """Through torch's own prefix too, which calls it from C++."""
    here, there = (
        AuthenticatedStore(RemoteTable(served, TOKEN), 5.0),
        AuthenticatedStore(RemoteTable(served, TOKEN), 5.0),
    )
    for ours, theirs in ((here, there), (there, here), (here, dist.PrefixStore("p", there))):
        name = f"{id(ours)}{id(theirs)}"
        theirs.set(f"{name}a", "1\0\xff".encode())
        assert theirs.get(f"{name}a") == "1\0\xff".encode() and theirs.check([f"{name}a"])
        assert [theirs.add(f"{name}n", 2), theirs.add(f"{name}n", -5)] == [2, -3]
        assert theirs.compare_set(f"{name}c", "", "first") == b"first"
        assert theirs.compare_set(f"{name}c", "other", "second") == b"first"
        assert theirs.compare_set(f"{name}c", "first", "second") == b"second"
        assert (
            theirs.delete_key(f"{name}c")
            and not theirs.delete_key(f"{name}c")
            and not theirs.check([f"{name}c"])
        )
        before = theirs.num_keys()
        theirs.multi_set([f"{name}x", f"{name}y"], ["x", "y"])
        assert (
            theirs.multi_get([f"{name}x", f"{name}y"]) == [b"x", b"y"]
            and theirs.num_keys() == before + 2
        )
        theirs.append(f"{name}x", "z")
        assert theirs.get(f"{name}x") == b"xz"
    there.set("seen", "by all")
    assert (
        here.get("seen") == b"by all" and dist.PrefixStore("q", here).num_keys() == there.num_keys()
    )


def test_what_torch_clones_is_of_use_as_long_as_the_store_is(served: tuple[str, int]) -> None:
    """torch's C++ holds a clone, and nobody in Python."""
    store = AuthenticatedStore(RemoteTable(served, TOKEN), 5.0)
    clone = dist.PrefixStore("p", store).clone().clone()
    gc.collect()
    clone.set("a", "b")
    assert clone.get("a") == b"b" and store.get("p/a") == b"b"


def test_who_waits_is_woken_and_nobody_waits_for_ever(served: tuple[str, int]) -> None:
    """While one thread of a rank waits, another of it can do what it waits for."""
    store = AuthenticatedStore(RemoteTable(served, TOKEN), 30.0)
    found: list[bytes] = []
    waiting = threading.Thread(target=lambda: found.append(store.get("late")))
    waiting.start()
    store.set("late", "here")
    waiting.join(60)
    assert found == [b"here"]
    with pytest.raises(Exception, match=r"no rank has set 'never' in the store within 0\.05 s"):
        store.wait(["late", "never"], timedelta(seconds=0.05))
    store.set_timeout(timedelta(seconds=0.05))
    with pytest.raises(Exception, match="never"):
        dist.PrefixStore("p", store).get("never")
    assert store.get("late") == b"here", "it is of use after that"


def test_who_waits_for_several_is_woken_by_the_last(served: tuple[str, int]) -> None:
    """In whatever order they come, and though one of them goes again."""
    store, other = (
        AuthenticatedStore(RemoteTable(served, TOKEN), 30.0),
        AuthenticatedStore(RemoteTable(served, TOKEN), 30.0),
    )
    with ThreadPoolExecutor() as threads:
        waiting = [
            threads.submit(store.wait, keys) for keys in (["a", "b", "c"], ["c", "a"], ["b"], [])
        ]
        for key in "cab":
            other.set(key, "x")
        assert [one.result(30.0) for one in waiting] == [None] * 4
    store.delete_key("b")
    assert store.check(["a", "c"]) and not store.check(["a", "b"])


MANY = 1100
"""More connections than planes take: those of some 370 ranks."""


def test_a_thousand_ranks_meet_and_rank_0_has_one_thread_for_them(served: tuple[str, int]) -> None:
    remote, before = RemoteTable(served, TOKEN, 60.0), threading.active_count()
    with ThreadPoolExecutor(32) as threads:
        made = list(threads.map(lambda _: remote._connect(), range(MANY)))
    for one in made:
        one.send(pack({"name": "get", "arguments": ["word"]}))
    remote.set("word", b"for all")
    assert threading.active_count() == before
    for one in made:
        assert authenticated_store._next_message(one, Deadline(30.0)) == {"result": b"for all"}
        one.close()


@pytest.mark.parametrize(
    "said",
    [
        b"\xc1",
        b"",
        pack({"name": "get"}),
        pack({"name": "wait", "arguments": []}),
        pack({"name": "get", "arguments": 7}),
    ],
)
def test_who_says_what_no_rank_says_is_hung_up_on(served: tuple[str, int], said: bytes) -> None:
    remote = RemoteTable(served, TOKEN)
    one = remote._connect()
    one.send(said)
    with pytest.raises(ConnectionResetError):
        authenticated_store._next_message(one, Deadline(30.0))
    one.close()
    assert remote.missing(["word"]) == "word"


def test_a_stranger_reads_and_writes_nothing(served: tuple[str, int]) -> None:
    remote = RemoteTable(served, TOKEN)
    remote.set("key", b"value")
    with pytest.raises(
        ConnectionError,
        match=r"has not accepted this rank's connection .*: the listener has closed the connection",
    ):
        RemoteTable(served, b"w" * 32, 0.2).get("key", 1.0)
    with socket.create_connection(served) as stranger:
        stranger.sendall(b"\x00" * 4096)
        stranger.settimeout(10.0)
        hello = stranger.recv(4096)
        assert hello.startswith(b"RLXLINK1") and b"value" not in hello
    with pytest.raises(RuntimeError, match="no operation 'values'"):
        remote._request(remote._connect(), "values", ())
    with pytest.raises(RuntimeError, match="argument"):
        remote.add("key")
    assert remote.count() == 1


RANK = """
import os, sys, torch
import torch.distributed as dist
from relax_hpc.config.schema import ParallelConfig
from relax_hpc.net.rendezvous.channel import RankChannel
from relax_hpc.net.rendezvous.world import World
from relax_hpc.training import parallel
from relax_hpc.training.authenticated_store import make_store
rank, port = int(sys.argv[1]), int(sys.argv[2])
import socket
listening = socket.socket(fileno=int(sys.argv[3])) if rank == 0 else None
cards = [{"node": f"n{k}", "address": "127.0.0.1", "port": port} for k in range(2)]
world = World(rank, 2, 0, cards, listening)
parallel.initialize(ParallelConfig(data=2), rank, 2, 0, make_store(world, b"t" * 32, 60.0), "cpu", 0, 60.0)
values = torch.full((4,), rank + 1.0)
dist.all_reduce(values)
assert values.tolist() == [3.0] * 4
assert RankChannel(60.0).gather(rank) == ([0, 1] if rank == 0 else None)
dist.barrier()
parallel.destroy()
"""


def test_ranks_of_several_nodes_meet_by_it() -> None:
    """As torch's gloo groups do all of their meeting, with megatron-core's dozens of groups."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port, number = listening.getsockname()[1], listening.fileno()
        words = [sys.executable, "-W", "ignore", "-c", RANK]
        env = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
        first = subprocess.Popen([*words, "0", str(port), str(number)], env=env, pass_fds=(number,))
    ranks = [first, subprocess.Popen([*words, "1", str(port), "-1"], env=env)]
    try:
        assert [rank.wait(120) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()


def test_a_rank_waits_for_rank_0_as_long_as_that_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a shared filesystem that may take one node a minute longer than another."""
    monkeypatch.setattr(authenticated_store, "CONNECT_S", 0.1)
    listening = socket.create_server(("127.0.0.1", 0))
    remote, found = RemoteTable(listening.getsockname(), TOKEN, 60.0), []
    asking = threading.Thread(target=lambda: found.append(remote.count()))
    asking.start()
    asking.join(0.5)
    assert asking.is_alive()
    monkeypatch.undo()
    serve(listening, TOKEN)
    asking.join(20.0)
    assert found == [0]
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(
            TimeoutError,
            match=r"rank 0 has not accepted this rank's connection within 0\.2 s; open its log",
        ),
    ):
        RemoteTable(silent.getsockname(), TOKEN, 0.2).count()


IN_A_CONTAINER = """
import ctypes, os
# As Apptainer does for each of its processes.
if os.environ["RELAX_MEETING"].startswith("1 "):
    assert ctypes.CDLL(None).unshare(0x10000000) == 0, "no user namespaces"
from relax_hpc.config.schema import MpiConfig
from relax_hpc.net.rendezvous.world import join_world
from relax_hpc.training.authenticated_store import make_store
world = join_world("127.0.0.1", 2, MpiConfig(), 60.0)
store = make_store(world, b"t" * 32, 30.0)
if world.is_leader:
    store.set("word", "from rank 0")
    store.get("never")
assert world.on_one_node and store.get("word") == b"from rank 0"
raise SystemExit(7)
"""


@pytest.mark.skipif(
    subprocess.run(["unshare", "--user", "true"], capture_output=True).returncode != 0,
    reason="needs user namespaces",
)
def test_ranks_of_one_node_meet_where_each_is_in_a_container_of_its_own() -> None:
    """The kernel then lets none open the others' files in memory."""
    words = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "relax_hpc.cluster.supervise.ranks",
        "2",
        "-c",
        IN_A_CONTAINER,
    ]
    done = subprocess.run(words, timeout=120, capture_output=True, text=True)
    assert done.returncode == 7, done.stderr


def test_a_rank_that_is_hung_up_on_in_a_crowd_knocks_again() -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    remote, found = RemoteTable(listening.getsockname(), TOKEN), []
    asking = threading.Thread(target=lambda: found.append(remote.add("n", 3)))
    asking.start()
    listening.accept()[0].close()
    serve(listening, TOKEN)
    asking.join(20.0)
    assert found == [3]


def test_on_one_node_the_store_is_a_file_in_memory() -> None:
    memory = os.memfd_create("meeting")
    world = World(0, 2, 0, [{"node": "n", "pid": os.getpid(), "memory": memory}] * 2)
    before = psutil.Process().net_connections("all")
    store = make_store(world, TOKEN, 5.0)
    store.set("a", "b")
    assert Path(f"/proc/self/fd/{memory}").stat().st_size > 0
    assert psutil.Process().net_connections("all") == before
    os.close(memory)
