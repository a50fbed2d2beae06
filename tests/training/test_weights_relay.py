"""Several nodes get a version from each other: the actor sends it to two of them, whatever becomes
of the others."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from relax_hpc.base.errors import RefusedError
from relax_hpc.base.versions import Version
from relax_hpc.config.schema import Config, GroupConfig, ResourcesConfig
from relax_hpc.net.transport import PlaneError, TcpPlane
from relax_hpc.net.transport.tcp import RecordPending, record_in_folder
from relax_hpc.queue.client import QueueClient
from relax_hpc.queue.controller.relays import FAN_OUT, Relays, ancestors
from relax_hpc.training.weights.manifest import Chunk, Manifest, read_manifest
from relax_hpc.training.weights.node_cache import Staging
from relax_hpc.training.weights.relay import SharedVersion, relay_pays
from relax_hpc.training.weights.tensors import SafetensorsFile, TensorInfo, TensorPart
from relax_hpc.training.weights.version_files import TENSORS
from tests.helpers.plane_helpers import TOKEN
from tests.helpers.queue_helpers import in_thread, make_run, small
from tests.helpers.weights_helpers import Source
from tests.training.node_reader import Node

COUNT, RECORDS, RECORD_BYTES = 5, 8, 32_768
SILENCE_S = 0.5


class Nodes:
    """A run with an actor in this process, and nodes, each a process."""

    def __init__(self, run, actor: QueueClient, folder: Path) -> None:
        self.run, self.actor, self.folder, self.number, self.started = run, actor, folder, 0, 0
        tensors = {f"t{number}": torch.zeros(RECORD_BYTES // 4) for number in range(RECORDS)}
        self.source = Source(run, actor, tensors, file_every=0, chunk_bytes=RECORD_BYTES)
        [self.plane] = [plane for plane in actor.store.planes if isinstance(plane, TcpPlane)]
        self.all = [self.start() for _ in range(COUNT)]
        assert [node.hear()["ready"] for node in self.all]

    def start(self) -> Node:
        self.started += 1
        return Node(self.run, f"node-{self.started}", self.folder, SILENCE_S)

    def publish(self) -> str:
        """Another version; the digest of what every node should have then."""
        self.number += 1
        for place, tensor in enumerate(self.source.tensors.values()):
            tensor.copy_(
                torch.randn(
                    tensor.shape, generator=torch.Generator().manual_seed(100 * self.number + place)
                )
            )
        self.source.publish(Version(1, self.number))
        self.plane.sent_bytes = 0
        with QueueClient(self.run, small(), "rollout", 1, "looks") as client:
            news = client.weights.newer(Version(0, 0)).result()
        manifest = read_manifest(self.run.weights / news.version, news.digest)
        path = self.folder / TENSORS
        with SafetensorsFile(path, manifest.tensors) as file:
            for chunk in manifest.chunks:
                [record] = [self.plane._records[chunk.planes["tcp"]["name"].encode()].memory]
                for part in chunk.parts:
                    file.put(part, record)
            return xxhash.xxh3_64_hexdigest(b"".join(file.pieces(1 << 20)))


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    folder = tmp_path_factory.mktemp("nodes")
    run, config = make_run(folder / "run"), small()
    run.model.mkdir()
    with in_thread(run, config), QueueClient(run, config, "actor", 1) as actor:
        actor.connection.call("resume", step=0)
        made = Nodes(run, actor, folder)
        yield made
        for node in made.all:
            node.kill()


def test_the_actor_sends_a_version_to_two_nodes_and_these_to_the_others(nodes):
    for _ in range(2):
        whole = nodes.publish()
        for node in nodes.all:
            node.say("fetch")
        found = [node.hear() for node in nodes.all]
        assert {one["digest"] for one in found} == {whole}
        size = RECORDS * RECORD_BYTES
        assert sorted(map(str, (one["bytes"] for one in found))) == [
            *[str({"relay": size})] * (COUNT - FAN_OUT),
            *[str({"tcp": size})] * FAN_OUT,
        ]
        assert nodes.plane.sent_bytes == FAN_OUT * size


def test_a_record_is_passed_on_before_the_version_is_whole_and_a_killed_node_is_replaced(nodes):
    whole, (first, second, third, *_) = nodes.publish(), nodes.all
    first.say("fetch 3")
    assert first.hear()["has"] == 3
    assert second.fetch()["bytes"] == {"tcp": RECORDS * RECORD_BYTES}
    third.say("fetch 3")
    assert third.hear()["bytes"].keys() == {"relay"}
    first.kill()
    third.say("go")
    found = third.hear()
    assert found["digest"] == whole and sum(found["bytes"].values()) == RECORDS * RECORD_BYTES
    # Two records are on their way at a time, so it had three or four.
    assert 3 <= found["bytes"]["relay"] / RECORD_BYTES <= 4
    nodes.all[0] = nodes.start()
    nodes.all[0].hear()


def test_a_node_that_stands_still_is_given_up(nodes):
    whole, (first, second, third, *_) = nodes.publish(), nodes.all
    first.say("fetch 3")
    assert first.hear()["has"] == 3
    second.fetch()
    first.process.send_signal(signal.SIGSTOP)
    os.waitpid(first.process.pid, os.WUNTRACED)
    found = third.fetch()
    assert found["digest"] == whole and found["bytes"] == {"tcp": RECORDS * RECORD_BYTES}
    first.process.send_signal(signal.SIGCONT)
    first.say("go")
    assert first.hear()["digest"] == whole


def test_what_a_node_has_in_a_damaged_memory_gets_to_no_other(nodes):
    whole, (first, second, third, *_) = nodes.publish(), nodes.all
    version = first.fetch()["version"]
    with (first.folder / version / TENSORS).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    second.fetch()
    found = third.fetch()
    assert found["digest"] == whole
    assert found["bytes"] == {"relay": (RECORDS - 1) * RECORD_BYTES, "tcp": RECORD_BYTES}


# -- who reads from whom ---------------------------------------------------------------------------


@given(st.integers(1, 300))
def test_nobody_has_more_than_so_many_readers_and_few_are_one_after_the_other(count):
    chains = [ancestors(place) for place in range(count)]
    nearest = [chain[0] if chain else -1 for chain in chains]
    assert max(nearest.count(place) for place in range(-1, count)) <= FAN_OUT
    assert all(
        max(chain, default=-1) < place and chain == sorted(chain)[::-1]
        for place, chain in enumerate(chains)
    )
    assert max(map(len, chains)) <= (count + 1).bit_length()


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(1, 3)), max_size=40))
def test_nobody_reads_from_who_is_gone_or_who_waits_for_him(arrivals):
    """Readers come, come again after a failure, and as later incarnations, which end what their
    earlier ones were."""
    relays, newest, waits_for = Relays(), {}, {}
    for reader, incarnation in arrivals:
        newest[reader] = max(incarnation, newest.get(reader, 0))
        where = {"reader": reader, "incarnation": newest[reader]}
        found = relays.join(
            Version(1, 1),
            str(reader),
            (str(reader), newest[reader]),
            where,
            lambda o: o[1] < newest[int(o[0])],
        )
        assert all(one["incarnation"] == newest[one["reader"]] for one in found)
        waits_for[reader] = {one["reader"] for one in found}
        for start in waits_for:
            seen, todo = set(), [start]
            while todo:
                todo += waits_for[todo.pop()] - seen
                seen |= set(todo)
            assert start not in seen


def test_a_hub_tells_of_versions_that_are_published_alone(nodes):
    nodes.publish()
    where = {"folder": "f"}
    with QueueClient(nodes.run, small(), "rollout", 1, "asks") as client:
        ask = lambda reader, number: client.weights.relays(  # noqa: E731
            reader, Version(1, number), where, 5.0
        ).result()
        assert [ask(reader, nodes.number) for reader in "abc"] == [[], [], [where]]
        assert [ask(reader, 1000) for reader in "abc"] == [[], [], []]
        with pytest.raises(RefusedError, match=r"relays: \d+ bytes, allowed"):
            client.weights.relays(
                "d", Version(1, nodes.number), {"folder": "f" * 20_000}, 5.0
            ).result()


def test_few_nodes_all_read_from_the_actor():
    config = Config(layout="jobs")
    config.groups = {
        "rollout": GroupConfig(roles=["rollout"], resources=ResourcesConfig(nodes=FAN_OUT))
    }
    assert not relay_pays(config)
    config.groups["actor_fwd"] = GroupConfig(roles=["actor_fwd"])
    assert relay_pays(config)
    config.layout = "local"
    assert not relay_pays(config)


def test_who_ends_while_it_is_at_a_version_keeps_none_of_its_memory(tmp_path):
    """An engine may leave just then: what ends may come before the folder has its name."""
    described, path = {"w": TensorInfo("F32", (4,))}, tmp_path / TENSORS
    chunk = Chunk("c", 16, "", (TensorPart("w", 0, 0, 4, 0),))
    staging = Staging(tmp_path / "node")
    for ends_first in (False, True):
        SafetensorsFile(path, described).close()
        share = SharedVersion(Manifest("v", described, (chunk,)), path)
        share.add(chunk)
        assert bytes(share.read("c")) == bytes(16) and share.read("other") is None
        staged = staging.get("v", lambda folder: None, SILENCE_S)
        if not ends_first:
            share.hold(staged)
        share.end()
        share.hold(staged)
        staged.release()
        staging.clear(lambda _: True)
        assert share.read("c") is None and not (staging.root / "v").exists()


# -- the plane -------------------------------------------------------------------------------------


def test_a_folder_gives_what_is_there_and_its_readers_wait_for_what_comes():
    asked: list[str] = []

    def give(name: str) -> memoryview | None:
        asked.append(name)
        if name == "late" and len(asked) < 3:
            raise RecordPending
        return None if name == "none" else memoryview(name.encode())

    maker, reader = TcpPlane(TOKEN, "127.0.0.1"), TcpPlane(TOKEN, "127.0.0.1")
    try:
        folder = maker.open_folder("f", give)
        assert (
            bytes(reader.read(record_in_folder(folder, "late", 4), 20.0)) == b"late"
            and asked == ["late"] * 3
        )
        for name, size, why in (("none", 4, "retired"), ("late", 5, "has 4 bytes of it")):
            with pytest.raises(PlaneError, match=why):
                reader.read(record_in_folder(folder, name, size), 20.0)
        with pytest.raises(PlaneError, match="for too long"):
            reader.read(
                record_in_folder(maker.open_folder("never", _comes_never), "x", 1), 20.0, 0.05
            )
        maker.close_folder("f")
        with pytest.raises(PlaneError, match="retired"):
            reader.read(record_in_folder(folder, "late", 4), 20.0)
    finally:
        reader.close()
        maker.close()


def _comes_never(_: str) -> memoryview | None:
    raise RecordPending
