"""Published versions in memory: readers get complete ones only, and versions without readers are
deleted. Their files are in test_weight_files.py."""

from __future__ import annotations

import shutil
import stat
import struct
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from relax_hpc.base.errors import ConfigError, FencedError
from relax_hpc.base.rundir import private_folder
from relax_hpc.base.versions import Version
from relax_hpc.config.schema import WeightsConfig
from relax_hpc.queue.client import QueueClient
from relax_hpc.training.weights import slab, version_files
from relax_hpc.training.weights.manifest import WeightsError
from relax_hpc.training.weights.node_cache import staging_root
from relax_hpc.training.weights.slab import MARK, open_slab
from relax_hpc.training.weights.subscriber import NOTHING, Subscriber
from relax_hpc.training.weights.tensors import TensorPart
from relax_hpc.training.weights.version_files import FOLDER, TENSORS
from tests.effort import effort
from tests.helpers.convert_helpers import bounded_data, in_child
from tests.helpers.weights_helpers import (
    SOON_S,
    WAIT_S,
    Source,
    Stage,
    stage,  # noqa: F401
    staged_run,
)
from tests.requirements import DEVICE

# ruff: noqa: F811

# -- readers ---------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_reader_gets_the_published_version(stage: Stage) -> None:
    stage.put(0, file_every=0)
    reader = stage.reader()
    assert stage.fetch(reader) == 0 and reader.fetcher.puller.bytes == {"shm": 64 + 20}
    reader.served(Version(1, 0))
    next_version = reader.newer()
    stage.put(1)
    assert next_version.result(timeout=SOON_S).version == "i000001-v000001"
    assert stage.fetch(reader) == 1
    assert not (stage.run.weights / "i000001-v000001" / FOLDER).exists(), "in memory only"


@pytest.mark.gpu
def test_the_newest_version_with_files_of_a_dead_actor_is_readable(stage: Stage) -> None:
    stage.put(0, 1, 2, file_every=2)
    reader = stage.reader()
    stage.put(3)
    stage.end_actor()
    assert stage.fetch(reader) == 2 and reader.fetcher.puller.bytes.keys() == {"file"}
    reader.served(Version(1, 2))
    assert stage.fetch(reader) is None, "version 3 was only in the actor's memory"
    # The reader ignores further announcements of version 3.
    assert reader.serving == Version(1, 2) and reader._unreadable == Version(1, 3)


def test_a_reader_takes_the_files_if_a_bit_in_a_slab_is_flipped(stage: Stage) -> None:
    stage.put(0)
    stage.source.publisher.ring.record(0, 0)[20] ^= 1
    reader = stage.reader()
    assert stage.fetch(reader) == 0
    assert reader.fetcher.puller.bytes.keys() == {"file"}


@pytest.mark.parametrize("plane", ["shm", "tcp"])
def test_a_slow_reader_does_not_block_the_actor_and_gets_a_newer_version(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, plane: str
) -> None:
    """While the reader copies version 0 from shared memory, version 2 overwrites it, because there
    are two slabs. The bytes that come by a socket are a copy, so that reader gets version 0."""
    stage.put(0, file_every=0)
    reader = stage.reader()
    puller = reader.fetcher.puller
    puller.planes = [candidate for candidate in puller.planes if candidate.name == plane]
    put = version_files.SafetensorsFile.put
    written_tensors: list[TensorPart] = []

    def put_and_publish(
        self: version_files.SafetensorsFile, tensor: TensorPart, record: memoryview
    ) -> None:
        put(self, tensor, record)
        if not written_tensors:
            written_tensors.append(tensor)
            stage.put(1, 2)

    monkeypatch.setattr(version_files.SafetensorsFile, "put", put_and_publish)
    assert stage.fetch(reader) == (2 if plane == "shm" else 0)


def test_after_a_retired_record_a_reader_requests_no_more_records(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {f"t{number:02d}": torch.zeros(2000) for number in range(40)}
    source = Source(stage.run, stage.actor, tensors, file_every=0, chunk_bytes=4096)
    source.publish(Version(1, 0))
    source.publisher.close()
    reader = stage.reader(timeout_s=5.0)
    [plane] = reader.fetcher.puller.planes = reader.fetcher.puller.planes[:1]
    read = plane.read
    requests = []

    def count_and_read(*arguments: object) -> object:
        requests.append(arguments)
        return read(*arguments)

    monkeypatch.setattr(plane, "read", count_and_read)
    with pytest.raises(WeightsError, match="retired"):
        reader.fetcher.fetch(reader.newer().result(timeout=SOON_S))
    assert 1 <= len(requests) < 10


def test_a_reader_of_every_third_version_gets_them_from_files(stage: Stage) -> None:
    stage.put(0, file_every=0)
    object.__setattr__(stage.controller.state.plan, "refresh_every", 3)
    stage.source.publisher.refresh_every = 3
    stage.put(1, 2, 3, 4, 5)
    request = {"after": str(NOTHING), "multiple_of": 3}
    for method in ("next_version", "filed_version"):
        assert stage.rollout.connection.call(method, **request)["version"] == "i000001-v000003"
    assert stage.directories()[0] == "i000001-v000003"
    late = Subscriber(stage.run, stage.rollout, "reference", [], WeightsConfig(), 3)
    news, staged = late.fetch(late.newer().result(timeout=SOON_S))
    staged.release()
    assert news.version == "i000001-v000003"


def test_the_staged_copy_is_a_private_model_directory(stage: Stage) -> None:
    stage.put(0)
    reader = stage.reader()
    _, staged = reader.fetch(reader.newer().result(timeout=SOON_S))
    assert sorted(path.name for path in staged.path.iterdir()) == ["config.json", TENSORS, MARK]
    views, expected = open_slab(staged.path), load_file(staged.path / TENSORS)
    assert views.keys() == expected.keys()
    assert all(torch.equal(view, expected[name]) for name, view in views.items())
    del views
    for path in (staged.path, staged.path.parent):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    staged.release()


def test_a_reader_maps_two_files_for_all_versions_and_unmaps_deleted_files(stage: Stage) -> None:
    """The versions of a node alternate between two files in memory."""
    source = Source(stage.run, stage.actor, {"w": torch.zeros(5000)}, file_every=0)
    reader = stage.reader()

    def read(number: int) -> int:
        """Publish and read version ``number``. Return the address of its tensor."""
        source.tensors["w"].fill_(number)
        source.publish(Version(1, number))
        _, staged = reader.fetch(reader.newer().result(timeout=SOON_S))
        weights = open_slab(staged.path)["w"]
        assert (weights == number).all()
        staged.release()
        reader.served(Version(1, number))
        return weights.data_ptr()

    addresses = [read(number) for number in range(6)]
    assert addresses == addresses[:2] * 3 and len(slab._mapped) == 2
    shutil.rmtree(staging_root(stage.run))
    read(6)
    assert len(slab._mapped) == 1


def test_a_staging_folder_that_other_users_can_enter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path)
    for name in ("open", "link"):
        with pytest.raises(ConfigError, match=name):
            private_folder(tmp_path / name)


# -- memory of the actor ---------------------------------------------------------------------------


def test_memory_does_not_grow_with_the_number_of_experts(tmp_path: Path) -> None:
    """An actor needs memory for its slabs and for pieces of a file. A reader needs memory for one
    piece."""
    expert_bytes, count, limit_bytes = 64 << 10, 1024, 16 << 20

    def publish_and_read() -> None:
        # Threads with small stacks, because stacks count as data too.
        threading.stack_size(1 << 20)
        with staged_run(tmp_path) as stage:
            tensors = {
                f"layers.0.experts.{number}.weight": torch.zeros(expert_bytes // 4)
                for number in range(count)
            }
            source = Source(stage.run, stage.actor, tensors, file_every=1)
            with bounded_data(limit_bytes):
                for number in range(2):
                    for tensor in tensors.values():
                        tensor.fill_(number)
                    source.publish(Version(1, number))
                reader = stage.reader(timeout_s=WAIT_S)
                news, staged = reader.fetch(reader.newer().result(timeout=WAIT_S))
                weights = open_slab(staged.path)
                assert news.version == "i000001-v000001"
                assert all((weights[name] == 1).all() for name in tensors)
                staged.release()

    assert expert_bytes * count > 3 * limit_bytes
    assert in_child(publish_and_read) == 0


@pytest.mark.gpu
def test_training_continues_while_a_version_is_copied(stage: Stage) -> None:
    """The weights change as soon as the copy from the device has ended, while the reader still
    copies. The rows of the tensor are not contiguous."""
    size = effort(1 << 20, 1 << 26)
    storage = torch.zeros(size, 2, device=DEVICE)
    tensors = {"w": storage[:, 0], "other": torch.zeros(8, device=DEVICE)}
    source = Source(stage.run, stage.actor, tensors, file_every=0)
    reader = stage.reader()
    for number in range(4):
        storage.fill_(number)
        source.publisher.publish(Version(1, number))
        source.publisher.await_copy()
        storage.fill_(-1.0)
        news, staged = reader.fetch(reader.newer().result(timeout=SOON_S))
        weights = load_file(staged.path / TENSORS)["w"]
        assert Version.parse(news.version).number == number and (weights == number).all()
        staged.release()
        reader.served(Version(1, number))


@pytest.mark.parametrize("slabs", [2, 3, 5])
def test_as_many_versions_stay_in_memory_as_there_are_slabs(stage: Stage, slabs: int) -> None:
    """The slab of version 0 is overwritten when all other slabs have newer versions."""
    source = Source(stage.run, stage.actor, {"w": torch.zeros(8)}, slabs=slabs, file_every=0)
    ring = source.publisher.ring
    for number in range(slabs + 1):
        source.tensors["w"].fill_(number)
        source.publish(Version(1, number))
        (first,) = struct.unpack("<f", ring.record(0, 0)[:4])
        assert first == (0 if number < slabs else slabs)
    source.publisher.close()


def test_a_slab_is_overwritten_only_after_its_version_is_published(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The publishing thread is stopped at version 1. With two slabs, version 3 has to wait, and no
    version has the weights of another one."""
    stage.put(0, file_every=0)
    publisher = stage.source.publisher
    resume = threading.Event()
    offered = []
    offer = publisher.ring.offer

    def offer_after_resume(slab: int, prefix: str) -> object:
        assert resume.wait(SOON_S)
        chunks = offer(slab, prefix)
        offered.append(bytes(publisher.ring.record(slab, 0)[:4]))
        return chunks

    monkeypatch.setattr(publisher.ring, "offer", offer_after_resume)

    def publish_three() -> None:
        for number in (1, 2, 3):
            stage.source.tensors["w"].fill_(number)
            publisher.publish(Version(1, number))

    actor = threading.Thread(target=publish_three)
    actor.start()
    actor.join(0.2)
    assert actor.is_alive() and publisher.work.pending == 2
    resume.set()
    actor.join(SOON_S)
    publisher.settle(SOON_S)
    assert offered == [struct.pack("<f", number) for number in (1, 2, 3)]


# -- deletion and rollback -------------------------------------------------------------------------


def test_versions_older_than_those_of_all_living_readers_are_deleted(stage: Stage) -> None:
    stage.put(0)
    slow, fast = stage.reader("rollout/0"), stage.reader("rollout/1")
    slow.served(Version(1, 0))
    fast.served(Version(1, 0))
    stage.put(1)
    fast.served(Version(1, 1))
    stage.put(2)
    assert stage.directories() == ["i000001-v000000", "i000001-v000001", "i000001-v000002"]
    slow.served(Version(1, 1))
    stage.put(3)
    assert stage.directories()[0] == "i000001-v000001"
    with QueueClient(stage.run, stage.config, "supervisor", 1) as supervisor:
        supervisor.connection.call("down", group="rollout", incarnation=1)
    stage.put(4)
    # The readers of a dead group keep no versions.
    assert stage.directories() == ["i000001-v000003", "i000001-v000004"]


def test_keep_every_keeps_versions_and_their_files(stage: Stage) -> None:
    stage.put(*range(8), file_every=0, keep_every=3)
    kept = ["i000001-v000000", "i000001-v000003", "i000001-v000006"]
    assert stage.directories() == [*kept, "i000001-v000007"]
    assert [name for name in kept if (stage.run.weights / name / FOLDER / TENSORS).exists()] == kept


def test_the_last_version_always_has_files(stage: Stage) -> None:
    stage.put(0, file_every=0)
    stage.put(1, last=True)
    assert stage.announced("filed_version") == "i000001-v000001"


def test_incomplete_folders_of_a_dead_actor_are_deleted(stage: Stage) -> None:
    (stage.run.weights / ".i000001-v000000.123").mkdir()
    (stage.run.weights / "unrelated").mkdir()
    stage.put(1)
    assert stage.directories() == ["i000001-v000001", "unrelated"]


def test_a_reader_whose_version_is_deleted_meanwhile_gets_the_newer_one(stage: Stage) -> None:
    stage.put(0)
    reader = stage.reader()
    announced = reader.newer().result(timeout=SOON_S)
    stage.put(1, 2)
    assert "i000001-v000000" not in stage.directories()
    news, staged = reader.fetch(announced)
    staged.release()
    assert news == reader.newer().result(timeout=SOON_S), "with the digests of the newer version"


def test_rolled_back_weights_are_not_announced(stage: Stage) -> None:
    stage.put(0, 1, 2)
    reader = stage.reader()
    stage.end_actor()
    with QueueClient(stage.run, stage.config, "actor", 2) as successor:
        successor.connection.call("resume", step=1)
        next_version = reader.newer()
        assert stage.announced("filed_version") == "i000001-v000001"
        source = Source(stage.run, successor, {"w": torch.ones(3)})
        source.publish(Version(2, 1))
        assert next_version.result(timeout=SOON_S).version == "i000002-v000001"


def test_an_older_actor_cannot_publish(stage: Stage) -> None:
    stage.put(0)
    with QueueClient(stage.run, stage.config, "actor", 2) as successor:
        successor.connection.call("resume", step=0)
        with pytest.raises(FencedError):
            stage.put(1)
