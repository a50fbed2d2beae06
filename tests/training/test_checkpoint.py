"""Checkpoints: exact continuation, and refusal of everything that is not whole."""

from __future__ import annotations

import errno
import json
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from relax_hpc.base import host_memory
from relax_hpc.base.disk_waits import WAITS
from relax_hpc.base.errors import ConfigError, DeadlineError, FencedError, NoProgressError
from relax_hpc.net.rendezvous.channel import RankChannel
from relax_hpc.training import adam
from relax_hpc.training.checkpoint import saver, store
from relax_hpc.training.checkpoint.saver import Saver
from relax_hpc.training.trainer import Trainer
from tests.effort import effort
from tests.helpers.small_disk import small_disk
from tests.helpers.training_helpers import (  # noqa: F401
    LR,
    batch,
    launch,
    load,
    one_rank_fixture,
    rows,
    save,
    tiny_fixture,
    trainer,
)
from tests.training.killed_saves import POINTS

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.run, pytest.mark.usefixtures("one_rank")]


def train(ours: Trainer, steps: range) -> list[dict[str, float]]:
    metrics = []
    for step in steps:
        ours.accumulate([batch(rows(4, seed=step))])
        metrics.append(ours.step(LR))
    return metrics


@pytest.fixture(scope="module")
def saved(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoints") / "i000001-step-000002"
    ours = trainer(tiny)
    train(ours, range(2))
    save(directory, ours, {"step": 2})
    return directory


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    import shutil

    return Path(shutil.copytree(saved, tmp_path / saved.name))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "distributed", "steps"),
    [
        ("float32", False, 2),
        ("float32", True, 2),
        ("bfloat16", False, 2),
        ("float32", False, 0),
        ("float32", True, 0),
    ],
)
def test_training_continues_bit_for_bit(
    tiny: Path,
    tmp_path: Path,
    dtype: str,
    distributed: bool,
    steps: int,
    monkeypatch: pytest.MonkeyPatch,
):
    """Also with the optimizer's moments in host memory, or no longer in it."""
    monkeypatch.setattr(adam, "PIECE", 3000)
    first = trainer(tiny, dtype=dtype, optimizer={"distributed": distributed, "offload": not steps})
    train(first, range(steps))
    digest = save(tmp_path / "i000001-step-000002", first, {"step": 2, "note": "é"})
    random = torch.rand(3)
    expected = train(first, range(2, 5))
    second = trainer(
        tiny, dtype=dtype, optimizer={"distributed": distributed, "offload": bool(steps)}
    )
    assert load(tmp_path / "i000001-step-000002", second, digest) == {"step": 2, "note": "é"}
    assert torch.equal(torch.rand(3), random)
    assert train(second, range(2, 5)) == expected
    exported = first.model.export_hf()
    assert all(
        torch.equal(value, exported[name]) for name, value in second.model.export_hf().items()
    )


@pytest.mark.parametrize("distributed", [False, True])
def test_the_memory_of_the_first_save_is_there_before_it_and_of_its_size(
    tiny: Path, tmp_path: Path, distributed: bool
):
    keeper = Saver(trainer(tiny, optimizer={"distributed": distributed}), RankChannel(60.0), 60.0)
    keeper.prepare()
    keeper.ready()
    writer = keeper._writer
    made, asked = writer._memory, []
    writer._copy_all = lambda sources, rooms: asked.extend(sources)
    keeper.save(tmp_path / "i000001-step-000001", {})
    assert writer._memory is made
    assert len(made) == sum(-(-one.nbytes // 64) * 64 for one in asked)
    keeper.wait()


def test_memory_that_is_not_to_be_had_ends_the_start_in_a_line(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
):
    keeper = Saver(trainer(tiny), RankChannel(60.0), 60.0)
    monkeypatch.setattr(
        host_memory.mmap, "mmap", lambda *_, **__: (_ for _ in ()).throw(OSError(12, "no memory"))
    )
    keeper.prepare()
    with pytest.raises(
        ConfigError, match=r"checkpoint: \d+ bytes of host memory cannot be allocated: no memory"
    ):
        keeper.ready()


@pytest.mark.skipif(
    not effort(0, 1), reason="killed_saves has new processes go on too; alone: env/test.sh --all"
)
def test_a_new_process_continues_bit_for_bit(saved: Path, tiny: Path, tmp_path: Path):
    from safetensors.torch import load_file

    launch(1, "{}", tiny, tmp_path, saved)
    ours = trainer(tiny)
    load(saved, ours)
    ours.accumulate([batch(rows(4, seed=9))])
    ours.step(LR)
    exported = ours.model.export_hf()
    assert all(
        torch.equal(value, exported[name])
        for name, value in load_file(tmp_path / "first.safetensors").items()
    )


def test_a_truncated_or_missing_file_is_named(copy: Path, tiny: Path):
    ours = trainer(tiny)
    shard = next(copy.glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(store.CheckpointError, match=rf"{shard.name}: damaged"):
        load(copy, ours)
    shard.unlink()
    with pytest.raises(store.CheckpointError, match=rf"{shard.name}: missing"):
        load(copy, ours)


def test_without_a_marker_there_is_no_checkpoint(copy: Path, tiny: Path):
    (copy / store.MARKER).unlink()
    with pytest.raises(store.CheckpointError, match=r"COMPLETE\.json: missing"):
        load(copy, trainer(tiny))


def test_a_marker_of_another_save_is_refused(copy: Path, tiny: Path):
    with pytest.raises(store.CheckpointError, match="not the marker that was recorded"):
        load(copy, trainer(tiny), "0" * 64)


def test_settings_that_change_the_state_are_refused(saved: Path, tiny: Path):
    with pytest.raises(ConfigError, match=r"saved with model\.dtype float32, the run has bfloat16"):
        load(saved, trainer(tiny, dtype="bfloat16"))
    with pytest.raises(ConfigError, match=r"saved with actor\.optimizer\.distributed False"):
        load(saved, trainer(tiny, optimizer={"distributed": True}))


def test_a_save_that_died_leaves_nothing_that_counts(saved: Path, tiny: Path, tmp_path: Path):
    partial = tmp_path / ".i000001-step-000001.partial"
    partial.mkdir()
    (partial / "__0_0.distcp").write_bytes(b"half")
    save(tmp_path / "i000001-step-000001", trainer(tiny), {})
    assert not partial.exists()
    with pytest.raises(store.CheckpointError, match="never overwritten"):
        save(tmp_path / "i000001-step-000001", trainer(tiny), {})
    (tmp_path / ".i000002-step-000001.partial").mkdir()
    assert store.remove_others(tmp_path, {"i000001-step-000001"}, 2) == [
        ".i000002-step-000001.partial"
    ]
    assert load(tmp_path / "i000001-step-000001", trainer(tiny)) == {}


def test_a_trainer_killed_at_any_point_of_a_save_comes_back_bit_for_bit(tiny: Path, tmp_path: Path):
    """Step 1 was saved before; step 2 is there once its directory has been journaled, and not a
    moment earlier."""
    found = list(killed_saves(tiny, tmp_path, "", *POINTS))
    undisturbed, *killed = found
    assert undisturbed["from"] == 0 and undisturbed["died"] is None
    assert [line["point"] for line in killed] == list(POINTS)
    for line in killed:
        assert (line["died"], line["from"]) == (9, 1), line["point"]
        assert line["weights"] == undisturbed["weights"], line["point"]
    assert {line["partial"] for line in killed} == {0, 1}


def killed_saves(model: Path, folder: Path, *points: str) -> Iterator[dict]:
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "tests.training.killed_saves",
        str(model),
        str(folder),
        *points,
    ]
    process = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, timeout=300, text=True, check=True
    )
    yield from map(json.loads, process.stdout.splitlines())


def test_training_goes_on_while_a_checkpoint_is_written(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What is saved is the state of the moment at which it was asked for."""
    slow, begun = threading.Event(), threading.Event()
    real = saver.checksums_of

    def waits(*args: Any, **kwargs: Any) -> dict[str, str]:
        begun.set()
        assert slow.wait(30.0)
        return real(*args, **kwargs)

    monkeypatch.setattr(saver, "checksums_of", waits)
    ours = trainer(tiny)
    train(ours, range(2))
    expected = ours.model.export_hf()
    keeper = Saver(ours, RankChannel(60.0), 60.0)
    keeper.save(tmp_path / "i000001-step-000002", {"step": 2})
    assert begun.wait(30.0)
    train(ours, range(2, 4))
    assert not (tmp_path / "i000001-step-000002").exists()
    slow.set()
    keeper.settle()
    again = trainer(tiny)
    load(tmp_path / "i000001-step-000002", again)
    assert all(
        torch.equal(value, expected[name]) for name, value in again.model.export_hf().items()
    )


def test_the_next_save_waits_for_the_last_one_but_not_for_ever(
    tiny: Path, tmp_path: Path, monkeypatch
):
    hold = threading.Event()
    monkeypatch.setattr(saver, "_create", lambda *_: hold.wait(30.0))
    keeper = Saver(trainer(tiny), RankChannel(60.0), 0.2)
    keeper.save(tmp_path / "a", {})
    with pytest.raises(DeadlineError, match=r"not written within checkpoint\.timeout_s=0\.2"):
        keeper.save(tmp_path / "b", {})
    hold.set()


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """The kernel refuses to write files of this process beyond ``size`` bytes, as a full disk
    would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [0, 100, 2000, 20_000, 60_000])
def test_a_full_disk_costs_the_checkpoint_alone(tiny: Path, tmp_path: Path, capfd, size: int):
    """Each size is the end of another kind of file."""
    told: list[str] = []
    ours = trainer(tiny)
    keeper = Saver(ours, RankChannel(60.0), 60.0, told.append)
    keeper.save(tmp_path / "a", {"step": 1})
    keeper.settle()
    with files_up_to(size):
        keeper.save(tmp_path / "b", {"step": 2})
        with pytest.raises(store.CheckpointError, match=r"b: not saved: rank 0: "):
            keeper.settle()
    assert len(told) == 1 and told[0].startswith("not saved: rank 0: ")
    assert capfd.readouterr().err.startswith("checkpoint: ") or not size, "nor can anything be said"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    keeper.save(tmp_path / "c", {"step": 3})
    keeper.settle()
    assert load(tmp_path / "c", ours) == {"step": 3}


def test_on_a_full_disk_it_is_tried_until_there_is_room(tiny: Path, tmp_path: Path, capfd):
    """On a real one, which is filled after the first; the end of the run waits for it, and it
    counts as one failure."""
    told: list[str] = []
    with small_disk(tmp_path / "disk", "2m") as disk:
        ours = trainer(tiny)
        keeper = Saver(ours, RankChannel(60.0), 60.0, told.append, max_failures=1)
        for number, left in enumerate((0, 4096, 8192, 40_000, 80_000)):
            disk.fill(left)
            keeper.save(disk.folder / f"{number}", {"step": number})
            while not (wait := WAITS.longest()):
                keeper.check()
            assert (
                wait["errno"] == errno.ENOSPC
                and wait["path"] == str(disk.folder / f"{number}")
                and wait["loose"]
            )
            assert keeper.failed == len(told) == 1 and "No space left on device" in told.pop()
            threading.Timer(0.3, disk.free).start()
            keeper.settle()
            assert (
                load(disk.folder / f"{number}", ours) == {"step": number}
                and not keeper.failed
                and not WAITS
            )
            shutil.rmtree(disk.folder / f"{number}")


def test_on_a_full_disk_the_next_one_takes_its_place(tiny: Path, tmp_path: Path, capfd):
    told: list[str] = []
    with small_disk(tmp_path / "disk", "2m") as disk:
        keeper = Saver(trainer(tiny), RankChannel(60.0), 60.0, told.append)
        disk.fill()
        for number in range(3):
            keeper.save(disk.folder / f"{number}", {"step": number})
        keeper.wait()
        assert keeper.failed == 3 == len(told)
        disk.free()
        keeper.save(disk.folder / "3", {"step": 3})
        keeper.settle()
        assert [path.name for path in disk.folder.iterdir()] == ["3"] and not keeper.failed


def test_failures_in_a_row_that_no_full_disk_explains_end_the_run(
    tiny: Path, tmp_path: Path, capfd
):
    told: list[str] = []
    keeper = Saver(trainer(tiny), RankChannel(60.0), 60.0, told.append, max_failures=2)
    (tmp_path / "file").touch()
    keeper.save(tmp_path / "file" / "a", {})
    keeper.wait()
    keeper.save(tmp_path / "file" / "b", {})
    with pytest.raises(
        NoProgressError, match=r"2 checkpoints in a row .* allowed checkpoint.max_failures=2"
    ):
        keeper.settle()
    assert len(told) == 2


def test_what_an_older_actor_no_longer_needs_is_not_the_newer_ones(tmp_path: Path):
    names = [
        "i000001-step-000001",
        ".i000001-step-000002.partial",
        "i000002-step-000001",
        ".i000002-step-000003.partial",
    ]
    for name in names:
        (tmp_path / name).mkdir()
    assert store.remove_others(tmp_path, set(), 1) == sorted(names[:2])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[2:])


def test_an_older_actor_finishes_nothing(tiny: Path, tmp_path: Path):
    """Its directory may appear; the queue does not take it, and the actor ends."""

    def fenced(_: str) -> None:
        raise FencedError("actor incarnation 2 exists")

    keeper = Saver(trainer(tiny), RankChannel(60.0), 60.0)
    keeper.save(tmp_path / "a", {}, fenced)
    with pytest.raises(FencedError):
        keeper.settle()
    with pytest.raises(FencedError):
        keeper.save(tmp_path / "b", {})
