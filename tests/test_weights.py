"""Published weights: verified before use, refused by name when damaged, deleted when nobody needs them."""

from __future__ import annotations

import stat

import pytest
import torch
from safetensors.torch import load

from relax_hpc.errors import ConfigError
from relax_hpc.rundir import private_folder
from relax_hpc.transfer_queue.client import QueueClient
from relax_hpc.versions import Version
from relax_hpc.weights.manifest import MANIFEST, TENSORS, WeightsError
from relax_hpc.weights.publisher import publish
from relax_hpc.weights.subscriber import Subscriber, staging_root
from tests.queue_helpers import in_thread, make_run, small


@pytest.fixture
def stage(tmp_path):
    """A run with a controller, an actor's client and a rollout's."""
    run, config = make_run(tmp_path / "run"), small()
    with in_thread(run, config), QueueClient(run, config, "actor", 1) as actor:
        actor.call("resume", step=0)
        with QueueClient(run, config, "rollout", 1) as rollout:
            yield run, config, actor, rollout


def weights(number: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((3,), float(number))}


def put(stage, *numbers: int) -> None:
    for number in numbers:
        publish(stage[0], stage[2], Version(1, number), weights(number))


def directories(run) -> list[str]:
    return sorted(path.name for path in run.weights.iterdir())


def test_a_reader_gets_what_was_published(stage):
    put(stage, 0)
    reader = Subscriber(stage[0], stage[3], "rollout/0")
    announced, data = reader.read(reader.newer().result(timeout=5))
    version = Version.parse(announced["version"])
    assert version == Version(1, 0) and torch.equal(load(data)["w"], weights(0)["w"])
    reader.served(version)
    waiting = reader.newer()
    put(stage, 1)
    assert waiting.result(timeout=5)["version"] == "e000001-v000001"


@pytest.mark.parametrize("name", [TENSORS, MANIFEST])
@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data[:-1] + b"\x07", None])
def test_damaged_weights_are_refused_by_name(stage, name, damage):
    put(stage, 0)
    path = stage[0].weights / "e000001-v000000" / name
    if damage:
        path.write_bytes(damage(path.read_bytes()))
    else:
        path.unlink()
    reader = Subscriber(stage[0], stage[3], "rollout/0")
    with pytest.raises(WeightsError, match=name):
        reader.read(reader.newer().result(timeout=5))


def test_versions_are_deleted_below_every_living_reader(stage):
    run, config, _, rollout = stage
    put(stage, 0)
    slow, quick = Subscriber(run, rollout, "rollout/0"), Subscriber(run, rollout, "rollout/1")
    slow.served(Version(1, 0))
    quick.served(Version(1, 0))
    put(stage, 1)
    quick.served(Version(1, 1))
    put(stage, 2)
    assert directories(run) == ["e000001-v000000", "e000001-v000001", "e000001-v000002"]
    slow.served(Version(1, 1))
    put(stage, 3)
    assert directories(run)[0] == "e000001-v000001"
    with QueueClient(run, config, "supervisor", 1) as supervisor:
        supervisor.call("down", group="rollout", epoch=1)
    put(stage, 4)
    assert directories(run) == ["e000001-v000004"], "a dead reader holds nothing"


def test_what_a_dead_actor_left_half_written_goes_too(stage):
    run = stage[0]
    (run.weights / ".e000001-v000000.123").mkdir()
    (run.weights / "unrelated").mkdir()
    put(stage, 1)
    assert directories(run) == ["e000001-v000001", "unrelated"]


def test_a_reader_that_lost_the_race_with_deletion_gets_the_newer_version(stage):
    put(stage, 0)
    reader = Subscriber(stage[0], stage[3], "rollout/0")
    announced = reader.newer().result(timeout=5)
    put(stage, 1)
    assert directories(stage[0]) == ["e000001-v000001"]
    newer = reader.newer().result(timeout=5)
    assert newer["version"] == "e000001-v000001" and newer["digest"] != announced["digest"]
    assert reader.read(announced)[0] == newer, "with its digest, for whoever reads it too"


def test_rolled_back_weights_are_not_announced(stage):
    run, config = stage[:2]
    put(stage, 0, 1, 2)
    reader = Subscriber(run, stage[3], "rollout/0")
    with QueueClient(run, config, "actor", 2) as successor:
        successor.call("resume", step=1)
        waiting = reader.newer()
        publish(run, successor, Version(2, 1), weights(1))
        assert waiting.result(timeout=5)["version"] == "e000002-v000001"


def test_the_staged_copy_is_a_private_model_directory(stage):
    run = stage[0]
    put(stage, 0)
    run.model.mkdir()
    (run.model / "config.json").write_text("{}")
    (run.model / TENSORS).write_bytes(b"old")
    reader = Subscriber(run, stage[3], "rollout/0")
    try:
        version, folder = reader.stage(reader.newer().result(timeout=5))
        assert version == Version(1, 0) and load((folder / TENSORS).read_bytes())["w"][0] == 0
        assert sorted(path.name for path in folder.iterdir()) == ["config.json", TENSORS]
        for path in (folder, folder.parent):
            assert stat.S_IMODE(path.stat().st_mode) == 0o700
    finally:
        for path in sorted(staging_root(run).rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
        staging_root(run).rmdir()


def test_a_staging_folder_that_others_can_enter_is_refused(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path)
    for name in ("open", "link"):
        with pytest.raises(ConfigError, match=name):
            private_folder(tmp_path / name)
