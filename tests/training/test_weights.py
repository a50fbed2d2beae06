"""Published weights: verified before use, refused by name when damaged, deleted when nobody needs
them."""

from __future__ import annotations

import json
import os
import shutil
import stat
import struct
import threading
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import load_file, save_file

from relax_hpc.base.disk_waits import CURES, WAITS
from relax_hpc.base.errors import ConfigError, FencedError
from relax_hpc.base.rundir import private_folder
from relax_hpc.base.transformers_hook import install_transformers_hook
from relax_hpc.base.versions import Version
from relax_hpc.config.schema import TinyModelConfig, WeightsConfig
from relax_hpc.queue.client import QueueClient
from relax_hpc.training.models.families import spec_from_config
from relax_hpc.training.models.hf_files import read_config
from relax_hpc.training.models.stored_pieces import split_into_pieces
from relax_hpc.training.models.tiny_model import make_tiny_model
from relax_hpc.training.published_form import published_form
from relax_hpc.training.weights import publisher, slab, version_files
from relax_hpc.training.weights.file_form import FileForm
from relax_hpc.training.weights.manifest import MANIFEST, WeightsError, read_manifest
from relax_hpc.training.weights.node_cache import staging_root
from relax_hpc.training.weights.pull import Puller
from relax_hpc.training.weights.slab import MARK, open_slab
from relax_hpc.training.weights.subscriber import NOTHING, Fetcher, PublishedVersion, Subscriber
from relax_hpc.training.weights.untrained_tensors import UntrainedTensors
from relax_hpc.training.weights.version_files import FOLDER, LISTING, TENSORS
from tests.effort import effort
from tests.helpers.convert_helpers import bounded_data, in_child
from tests.helpers.queue_helpers import in_thread, make_run, small
from tests.helpers.weights_helpers import WAIT_S, Source
from tests.requirements import DEVICE

SOON = 5.0


@pytest.fixture
def stage(tmp_path):
    """A run with a controller, an actor that publishes, and a rollout's client; `put(number, ...)`
    publishes."""
    with staged(tmp_path) as stage:
        yield stage


@contextmanager
def staged(folder):
    run, config = make_run(folder / "run"), small()
    run.model.mkdir()
    (run.model / "config.json").write_text("{}")
    (run.model / TENSORS).write_bytes(b"old")
    with in_thread(run, config) as controller, QueueClient(run, config, "actor", 1) as actor:
        actor.connection.call("resume", step=0)
        with QueueClient(run, config, "rollout", 1) as rollout:
            yield Stage(run, config, actor, rollout, controller)
    shutil.rmtree(staging_root(run), ignore_errors=True)


class Stage:
    def __init__(self, run, config, actor, rollout, controller) -> None:
        self.run, self.config, self.actor, self.rollout, self.controller = (
            run,
            config,
            actor,
            rollout,
            controller,
        )
        self.source = None

    def put(self, *numbers: int, last: bool = False, **settings: int) -> None:
        """Publish version n, whose every number is n."""
        if self.source is None:
            half = torch.zeros(5, 2, dtype=torch.bfloat16, device=DEVICE)
            tensors = {"w": torch.zeros(3, device=DEVICE), "half": half}
            self.source = Source(self.run, self.actor, tensors, **settings)
        for number in numbers:
            for tensor in self.source.tensors.values():
                tensor.fill_(number)
            self.source.publish(Version(1, number), last)

    def actor_dies(self) -> None:
        """Its memory is gone."""
        self.source.publisher.close()

    def reader(self, name: str = "rollout/0", patience: float = 0.3) -> Subscriber:
        settings = WeightsConfig(read_timeout_s=patience)
        return Subscriber(self.run, self.rollout, name, self.rollout.store.planes, settings)

    def fetch(self, reader: Subscriber) -> int | None:
        """The number of what a reader gets, which is whole; None if it gets nothing."""
        got = reader.fetch(reader.newer().result(timeout=SOON))
        if got is None:
            return None
        number = Version.parse(got[0].version).number
        found = load_file(got[1].path / TENSORS)
        assert found["w"].tolist() == [number] * 3 and found["half"].shape == (5, 2)
        assert (found["half"] == number).all() and found["half"].dtype is torch.bfloat16
        got[1].release()
        return number

    def directories(self) -> list[str]:
        return sorted(path.name for path in self.run.weights.iterdir())


@pytest.mark.gpu
def test_a_reader_gets_what_was_published(stage):
    stage.put(0, file_every=0)
    reader = stage.reader()
    assert stage.fetch(reader) == 0 and reader.fetcher.puller.bytes == {"shm": 64 + 20}
    reader.served(Version(1, 0))
    waiting = reader.newer()
    stage.put(1)
    assert waiting.result(timeout=SOON).version == "i000001-v000001"
    assert stage.fetch(reader) == 1
    assert not (stage.run.weights / "i000001-v000001" / FOLDER).exists(), "in memory alone"


def test_versions_with_files_have_what_is_not_trained_too(stage, tmp_path):
    """Once on the disk, and in the type that it has."""
    spoken = {
        "talker.head": torch.randn(3, 5).bfloat16(),
        "talker.b": torch.randn(7),
        "code2wav.s": torch.arange(3),
    }
    old = {"thinker.w": torch.zeros(2, 3)}
    save_file(spoken | old, stage.run.model / TENSORS, metadata={"format": "pt"})
    source = Source(
        stage.run, stage.actor, old, form=FileForm(untrained=("talker.", "code2wav.")), keep_every=1
    )
    for number in range(2):
        old["thinker.w"].fill_(number)
        source.publish(Version(1, number))
    folders = [stage.run.weights / str(Version(1, number)) / FOLDER for number in range(2)]
    for number, folder in enumerate(folders):
        names = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
        found = {name: load_file(folder / file)[name] for name, file in names.items()}
        assert (found.pop("thinker.w") == number).all() and found.keys() == spoken.keys()
        assert all(
            torch.equal(one, spoken[name]) and one.dtype is spoken[name].dtype
            for name, one in found.items()
        )
    first, second = (folder / names["talker.head"] for folder in folders)
    assert first.samefile(second)
    listing = json.loads((folders[0].parent / LISTING).read_text())
    assert listing.keys() == {path.name for path in folders[0].iterdir()} - {
        "model.safetensors.index.json"
    }


def test_memory_is_bounded_whatever_the_number_of_experts(tmp_path):
    """Beside its slabs the actor needs room for pieces of a file, a reader of one that is read."""
    expert, count, room = 64 << 10, 1024, 16 << 20

    def with_little_memory() -> None:
        threading.stack_size(1 << 20)
        with staged(tmp_path) as stage:
            tensors = {
                f"layers.0.experts.{number}.weight": torch.zeros(expert // 4)
                for number in range(count)
            }
            source = Source(stage.run, stage.actor, tensors, file_every=1)
            with bounded_data(room):
                for number in range(2):
                    for one in tensors.values():
                        one.fill_(number)
                    source.publish(Version(1, number))
                reader = stage.reader(patience=WAIT_S)
                found, got = reader.fetch(reader.newer().result(timeout=WAIT_S))
                weights = open_slab(got.path)
                assert (
                    all((weights[name] == 1).all() for name in tensors)
                    and found.version == "i000001-v000001"
                )
                got.release()

    assert expert * count > 3 * room
    assert in_child(with_little_memory) == 0


@pytest.mark.gpu
def test_training_goes_on_while_a_version_is_copied(stage):
    """The weights change as soon as the device may: more than arrives meanwhile, from rows that do
    not lie together."""
    size = effort(1 << 20, 1 << 26)
    whole = torch.zeros(size, 2, device=DEVICE)
    source = Source(
        stage.run,
        stage.actor,
        {"w": whole[:, 0], "rest": torch.zeros(8, device=DEVICE)},
        file_every=0,
    )
    reader = stage.reader()
    for number in range(4):
        whole.fill_(number)
        source.publisher.publish(Version(1, number))
        source.publisher.await_copy()
        whole.fill_(-1.0)
        got = reader.fetch(reader.newer().result(timeout=SOON))
        found = load_file(got[1].path / TENSORS)["w"]
        assert Version.parse(got[0].version).number == number and (found == number).all()
        got[1].release()
        reader.served(Version(1, number))


@pytest.mark.gpu
def test_of_a_dead_actor_the_newest_version_with_files_is_readable(stage):
    stage.put(0, 1, 2, file_every=2)
    reader = stage.reader()
    stage.put(3)
    stage.actor_dies()
    assert stage.fetch(reader) == 2 and reader.fetcher.puller.bytes.keys() == {"file"}
    reader.served(Version(1, 2))
    assert stage.fetch(reader) is None, "version 3 was in its memory alone"
    assert reader.serving == Version(1, 2) and reader._unreadable == Version(1, 3), (
        "and is not told of again"
    )


def test_the_files_are_a_hugging_face_directory(stage):
    stage.put(0)
    directory = stage.run.weights / "i000001-v000000"
    assert sorted(path.name for path in directory.iterdir()) == [LISTING, MANIFEST, FOLDER]
    assert sorted(path.name for path in (directory / FOLDER).iterdir()) == ["config.json", TENSORS]
    assert load_file(directory / FOLDER / TENSORS)["w"].tolist() == [0, 0, 0]


def damage(path, how) -> None:
    data = path.read_bytes()
    path.unlink() if how is None else path.write_bytes(how(data))


DAMAGES = [lambda data: data[:-1], lambda data: data[:-1] + b"\x07", lambda data: b"", None]


@pytest.mark.parametrize(
    "name", [MANIFEST, LISTING, f"{FOLDER}/{TENSORS}", f"{FOLDER}/config.json"]
)
@pytest.mark.parametrize("how", DAMAGES)
def test_damaged_files_are_refused_by_name_and_the_last_good_version_stays(stage, name, how, capfd):
    stage.put(0)
    reader = stage.reader()
    assert stage.fetch(reader) == 0
    reader.served(Version(1, 0))
    stage.put(1)
    stage.actor_dies()
    damage(stage.run.weights / "i000001-v000001" / name, how)
    if name == MANIFEST:
        assert stage.fetch(reader) == 1, "the files do without it"
        return
    assert stage.fetch(reader) is None
    assert name.rpartition("/")[2] in (line := capfd.readouterr().err) and line.endswith(
        "continues with i000001-v000000\n"
    )
    assert stage.rollout.connection.call("status")["noted"] == {"weights_unreadable/unreadable": 1}


def test_no_flipped_bit_of_what_the_tensors_mean_is_unseen(stage, capfd):
    """Read from memory, from files, by a resume and by a conversion."""
    config = stage.run.model / "config.json"
    config.write_text('{"rope_theta": 10000}')
    stage.put(0)
    model, whole = stage.run.weights / "i000001-v000000" / FOLDER, config.read_bytes()
    version_files.check_unchanged(stage.run.weights, stage.run.model)
    version_files.check_listed(model)
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        for path, check in (
            (config, lambda: version_files.check_unchanged(stage.run.weights, stage.run.model)),
            (model / "config.json", lambda: version_files.check_listed(model)),
        ):
            path.write_bytes(flipped)
            with pytest.raises(ConfigError, match=r"config\.json: was replaced or damaged"):
                check()
            path.write_bytes(whole)
    config.write_bytes(flipped)
    reader = stage.reader()
    assert stage.fetch(reader) == 0 and reader.fetcher.puller.bytes.keys() == {"file"}, (
        "which have their own"
    )
    (stage.run.model / "README.md").write_text("may change")
    config.write_bytes(whole)
    version_files.check_unchanged(stage.run.weights, stage.run.model)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format_version": 1}', '{"format_version": 2, "tensors": 7}']
)
def test_a_manifest_that_is_none_is_refused(stage, text):
    stage.put(0, file_every=0)
    path = stage.run.weights / "i000001-v000000" / MANIFEST
    path.write_text(text)
    news = PublishedVersion(version="i000001-v000000", digest=version_files.digest(text.encode()))
    with pytest.raises(WeightsError, match=f"{MANIFEST}: "):
        Fetcher(stage.run, stage.rollout.store.planes, WeightsConfig()).fetch(news)


def test_a_flipped_bit_in_a_slab_is_seen_and_the_files_are_taken(stage):
    stage.put(0)
    stage.source.publisher.ring.record(0, 0)[20] ^= 1
    reader = stage.reader()
    assert stage.fetch(reader) == 0
    assert reader.fetcher.puller.bytes.keys() == {"file"}


@pytest.mark.parametrize("plane", ["shm", "tcp"])
def test_a_reader_that_stops_in_the_middle_holds_nobody_and_gets_a_newer_version(
    stage, monkeypatch, plane
):
    """Of version 0 in shared memory the rest is overwritten: with two slabs, version 2 takes the
    place."""
    stage.put(0, file_every=0)
    reader = stage.reader()
    reader.fetcher.puller.planes = [
        one for one in reader.fetcher.puller.planes if one.name == plane
    ]
    put, passed = version_files.SafetensorsFile.put, []

    def stops(self, part, record) -> None:
        put(self, part, record)
        if not passed:
            passed.append(part)
            stage.put(1, 2)

    monkeypatch.setattr(version_files.SafetensorsFile, "put", stops)
    assert stage.fetch(reader) == (2 if plane == "shm" else 0), "what came by a socket is a copy"


@pytest.mark.parametrize("slabs", [2, 3, 5])
def test_as_many_versions_stay_in_memory_as_slabs_are_asked_for(stage, slabs):
    """A reader of version 0 is not disturbed by as many newer ones as there are other slabs, and
    the next takes its place."""
    source = Source(stage.run, stage.actor, {"w": torch.zeros(8)}, slabs=slabs, file_every=0)
    ring = source.publisher.ring
    for number in range(slabs + 1):
        source.tensors["w"].fill_(number)
        source.publish(Version(1, number))
        (first,) = struct.unpack("<f", ring.record(0, 0)[:4])
        assert first == (0 if number < slabs else slabs)
    source.publisher.close()


def test_a_slab_is_written_again_only_when_its_version_is_out(stage, monkeypatch):
    """The thread is held at version 0: with two slabs, version 2 has to wait, and no version has
    another's weights."""
    stage.put(0, file_every=0)
    publisher, hold, offered = stage.source.publisher, threading.Event(), []
    offer = publisher.ring.offer

    def held(slab: int, prefix: str):
        assert hold.wait(SOON)
        chunks = offer(slab, prefix)
        offered.append(bytes(publisher.ring.record(slab, 0)[:4]))
        return chunks

    monkeypatch.setattr(publisher.ring, "offer", held)

    def publish_three() -> None:
        for number in (1, 2, 3):
            stage.source.tensors["w"].fill_(number)
            publisher.publish(Version(1, number))

    actor = threading.Thread(target=publish_three)
    actor.start()
    actor.join(0.2)
    assert actor.is_alive() and publisher.work.pending == 2
    hold.set()
    actor.join(SOON)
    publisher.settle(SOON)
    assert offered == [struct.pack("<f", number) for number in (1, 2, 3)]


def test_after_a_record_that_is_not_to_be_had_the_others_are_not_asked_for(stage, monkeypatch):
    tensors = {f"t{number:02d}": torch.zeros(2000) for number in range(40)}
    source = Source(stage.run, stage.actor, tensors, file_every=0, chunk_bytes=4096)
    source.publish(Version(1, 0))
    source.publisher.close()
    asked, reader = [], stage.reader(patience=5.0)
    [plane] = reader.fetcher.puller.planes = reader.fetcher.puller.planes[:1]
    read = plane.read
    monkeypatch.setattr(plane, "read", lambda *a: (asked.append(a), read(*a))[1])
    with pytest.raises(WeightsError, match="retired"):
        reader.fetcher.fetch(reader.newer().result(timeout=SOON))
    assert 1 <= len(asked) < 10


def test_a_reference_is_given_multiples_alone_and_they_are_kept_for_it(stage):
    stage.put(0, file_every=0)
    object.__setattr__(stage.controller.state.plan, "refresh_every", 3)
    stage.source.publisher.refresh_every = 3
    stage.put(1, 2, 3, 4, 5)
    every = {"after": str(NOTHING), "multiple_of": 3}
    assert stage.rollout.connection.call("next_version", **every)["version"] == "i000001-v000003"
    assert stage.rollout.connection.call("filed_version", **every)["version"] == "i000001-v000003"
    assert stage.directories()[0] == "i000001-v000003"
    late = Subscriber(stage.run, stage.rollout, "reference", [], WeightsConfig(), 3)
    news, staged = late.fetch(late.newer().result(timeout=SOON))
    staged.release()
    assert news.version == "i000001-v000003", "from its files, long after"


def test_versions_are_deleted_below_every_living_reader(stage):
    stage.put(0)
    slow, quick = stage.reader("rollout/0"), stage.reader("rollout/1")
    slow.served(Version(1, 0))
    quick.served(Version(1, 0))
    stage.put(1)
    quick.served(Version(1, 1))
    stage.put(2)
    assert stage.directories() == ["i000001-v000000", "i000001-v000001", "i000001-v000002"]
    slow.served(Version(1, 1))
    stage.put(3)
    assert stage.directories()[0] == "i000001-v000001"
    with QueueClient(stage.run, stage.config, "supervisor", 1) as supervisor:
        supervisor.connection.call("down", group="rollout", incarnation=1)
    stage.put(4)
    assert stage.directories() == ["i000001-v000003", "i000001-v000004"], (
        "a dead reader holds nothing"
    )


def test_versions_to_be_kept_are(stage):
    stage.put(*range(8), file_every=0, keep_every=3)
    kept = ["i000001-v000000", "i000001-v000003", "i000001-v000006"]
    assert stage.directories() == [*kept, "i000001-v000007"]
    assert [name for name in kept if (stage.run.weights / name / FOLDER / TENSORS).exists()] == kept


def test_the_last_version_always_has_files(stage):
    stage.put(0, file_every=0)
    stage.put(1, last=True)
    assert (
        stage.rollout.connection.call("filed_version", after=str(NOTHING))["version"]
        == "i000001-v000001"
    )


def test_what_a_dead_actor_left_half_written_goes_too(stage):
    (stage.run.weights / ".i000001-v000000.123").mkdir()
    (stage.run.weights / "unrelated").mkdir()
    stage.put(1)
    assert stage.directories() == ["i000001-v000001", "unrelated"]


def test_a_reader_that_lost_the_race_with_deletion_gets_the_newer_version(stage):
    stage.put(0)
    reader = stage.reader()
    announced = reader.newer().result(timeout=SOON)
    stage.put(1, 2)
    assert "i000001-v000000" not in stage.directories()
    news, staged = reader.fetch(announced)
    staged.release()
    assert news == reader.newer().result(timeout=SOON), "with its digests, for whoever reads it too"


def test_rolled_back_weights_are_not_announced(stage):
    stage.put(0, 1, 2)
    reader = stage.reader()
    stage.actor_dies()
    with QueueClient(stage.run, stage.config, "actor", 2) as successor:
        successor.connection.call("resume", step=1)
        waiting = reader.newer()
        assert (
            stage.rollout.connection.call("filed_version", after=str(NOTHING))["version"]
            == "i000001-v000001"
        )
        again = Source(stage.run, successor, {"w": torch.ones(3)})
        again.publish(Version(2, 1))
        assert waiting.result(timeout=SOON).version == "i000002-v000001"


def test_an_older_actor_publishes_nothing(stage):
    stage.put(0)
    with QueueClient(stage.run, stage.config, "actor", 2) as successor:
        successor.connection.call("resume", step=0)
        with pytest.raises(FencedError):
            stage.put(1)


@pytest.mark.parametrize("number", sorted(CURES))
@pytest.mark.parametrize("where", ["write_summed", "sync_directory"])
def test_on_a_full_disk_files_are_written_when_there_is_room(
    stage, monkeypatch, capfd, number, where
):
    real, left = getattr(version_files, where), [1, 1]

    def full(*args, **kwargs):
        if left:
            left.pop()
            raise OSError(number, os.strerror(number))
        return real(*args, **kwargs)

    monkeypatch.setattr(version_files, where, full)
    stage.put(0, last=True)
    assert stage.fetch(stage.reader()) == 0 and not left and not WAITS
    assert (stage.run.weights / "i000001-v000000" / "model" / TENSORS).exists()
    assert os.strerror(number) in capfd.readouterr().err
    assert stage.rollout.connection.call("status")["noted"] == {}


def test_a_disk_that_takes_no_such_file_costs_the_files_alone(stage, monkeypatch, capfd):
    def refuse(*_, **__):
        raise OSError(27, "File too large")

    monkeypatch.setattr(version_files, "write_summed", refuse)
    stage.put(0)
    assert stage.fetch(stage.reader()) == 0
    assert (
        "version i000001-v000000 has no files: rank 0: [Errno 27] File too large"
        in capfd.readouterr().err
    )
    assert [path.name for path in (stage.run.weights / "i000001-v000000").iterdir()] == [MANIFEST]
    assert stage.rollout.connection.call("status")["noted"] == {"weights_unwritten/unwritten": 1}


@pytest.mark.parametrize("number", sorted(CURES))
def test_a_manifest_waits_for_room(stage, monkeypatch, number):
    real, left = publisher.write_atomic, [1, 1]

    def full(*args, **kwargs):
        if left:
            left.pop()
            raise OSError(number, os.strerror(number))
        return real(*args, **kwargs)

    monkeypatch.setattr(publisher, "write_atomic", full)
    stage.put(0)
    assert stage.fetch(stage.reader()) == 0 and not left and not WAITS


def test_a_manifest_that_cannot_be_written_ends_the_actor(stage, monkeypatch):
    stage.put(0)
    shutil.rmtree(stage.run.weights)
    stage.run.weights.write_text("no folder")
    with pytest.raises(
        Exception,
        match="i000001-v000001: Not a directory; version i000001-v000001 is not published",
    ):
        stage.put(1)


SEEING_EXPERTS = TinyModelConfig(
    vision_layers=1,
    num_layers=1,
    num_experts=3,
    moe_intermediate_size=24,
    tie_word_embeddings=False,
)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [("AutoModelForCausalLM", TinyModelConfig()), ("AutoModelForImageTextToText", SEEING_EXPERTS)],
    ids=["dense", "experts turned around"],
)
def test_a_version_in_several_files_is_loaded_by_transformers(stage, tmp_path, kind, shape):
    """As written by three ranks, from the memory of one, in the form in which the family is
    published."""
    install_transformers_hook()
    import transformers

    make_tiny_model(tmp_path / "model", shape, 3)
    model = tmp_path / "model"
    shutil.copytree(model, stage.run.model, dirs_exist_ok=True)
    stored, spec = load_file(model / TENSORS), spec_from_config(read_config(model))
    pieces, _ = split_into_pieces(
        spec, stored, {name: tuple(one.shape) for name, one in stored.items()}
    )
    source = Source(
        stage.run,
        stage.actor,
        {name: one[:].contiguous() for name, one in pieces.items()},
        file_every=0,
    )
    source.publish(Version(1, 0))
    directory = stage.run.weights / "i000001-v000000"
    manifest = read_manifest(
        directory, stage.rollout.connection.call("next_version", after=str(NOTHING))["digest"]
    )
    (partial := directory / ".partial").mkdir()
    puller = Puller(stage.rollout.store.planes, SOON)
    division = version_files.FileDivision(3, form=published_form(spec, "F32"))
    sums = [
        version_files.write_share(manifest, puller, partial, rank, division, tmp_path, sync=True)
        for rank in range(3)
    ]
    version_files.finish(
        manifest,
        partial,
        model,
        sums,
        division,
        UntrainedTensors(model, (), tmp_path / "none"),
        sync=True,
    )
    files = [load_file(path) for path in (directory / FOLDER).glob("*.safetensors")]
    assert len(files) == 3 and all(files)
    written = {name: one for file in files for name, one in file.items()}
    assert written.keys() == stored.keys() and all(
        torch.equal(one, stored[name]) for name, one in written.items()
    )
    found, expected = (
        getattr(transformers, kind).from_pretrained(one, dtype=torch.float32).state_dict()
        for one in (directory / FOLDER, model)
    )
    assert found.keys() == expected.keys() and all(
        torch.equal(found[name], one) for name, one in expected.items()
    )


@pytest.mark.parametrize("writers", [1, 2, 3, 7])
def test_shares_are_whole_tensors_and_all_of_them(writers):
    tensors = {
        f"t{number}": version_files.TensorInfo("F32", (number + 1, 10)) for number in range(5)
    }
    shares = version_files.divide_tensors(tensors, writers)
    assert (
        sorted(name for share in shares for name in share) == sorted(tensors)
        and len(shares) == writers
    )


def test_the_staged_copy_is_a_private_model_directory(stage):
    stage.put(0)
    reader = stage.reader()
    _, staged = reader.fetch(reader.newer().result(timeout=SOON))
    assert sorted(path.name for path in staged.path.iterdir()) == ["config.json", TENSORS, MARK]
    found = open_slab(staged.path)
    assert found.keys() == (expected := load_file(staged.path / TENSORS)).keys()
    assert all(torch.equal(one, expected[name]) for name, one in found.items())
    del found
    for path in (staged.path, staged.path.parent):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    staged.release()


def test_two_mappings_are_enough_for_all_versions_and_hold_no_memory_that_is_gone(stage):
    """The memory of a node's versions goes to and fro between two files."""
    source, reader = (
        Source(stage.run, stage.actor, {"w": torch.zeros(5000)}, file_every=0),
        stage.reader(),
    )

    def read(number: int) -> int:
        """Where it lies."""
        source.tensors["w"].fill_(number)
        source.publish(Version(1, number))
        _, staged = reader.fetch(reader.newer().result(timeout=SOON))
        found = open_slab(staged.path)["w"]
        assert (found == number).all()
        staged.release()
        reader.served(Version(1, number))
        return found.data_ptr()

    places = [read(number) for number in range(6)]
    assert places == places[:2] * 3 and len(slab._mapped) == 2
    shutil.rmtree(staging_root(stage.run))
    read(6)
    assert len(slab._mapped) == 1


def test_a_staging_folder_that_others_can_enter_is_refused(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path)
    for name in ("open", "link"):
        with pytest.raises(ConfigError, match=name):
            private_folder(tmp_path / name)


def test_the_manifest_says_where_everything_is(stage):
    stage.put(0)
    value = json.loads((stage.run.weights / "i000001-v000000" / MANIFEST).read_bytes())
    assert value["tensors"]["half"] == {"dtype": "BF16", "shape": [5, 2]}
    (chunk,) = value["chunks"]
    assert [(part["name"], part["start"], part["stop"]) for part in chunk["parts"]] == [
        ("w", 0, 3),
        ("half", 0, 5),
    ]
    assert "shm" in chunk["planes"]
