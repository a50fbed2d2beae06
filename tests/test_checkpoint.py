"""Checkpoints: exact continuation, and refusal of everything that is not whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from relax_hpc.checkpoint import store
from relax_hpc.errors import ConfigError
from relax_hpc.training.trainer import Trainer
from tests.training_helpers import LR, batch, launch, load, one_rank_fixture, rows, save, tiny_fixture, trainer  # noqa: F401

pytestmark = pytest.mark.usefixtures("one_rank")


def train(ours: Trainer, steps: range) -> list[dict[str, float]]:
    metrics = []
    for step in steps:
        ours.accumulate([batch(rows(4, seed=step))])
        metrics.append(ours.step(LR))
    return metrics


@pytest.fixture(scope="module")
def saved(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoints") / "e000001-step-000002"
    ours = trainer(tiny)
    train(ours, range(2))
    save(directory, ours, {"step": 2})
    return directory


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    import shutil

    return Path(shutil.copytree(saved, tmp_path / saved.name))


@pytest.mark.parametrize(
    ("dtype", "distributed", "steps"),
    [("float32", False, 2), ("float32", True, 2), ("bfloat16", False, 2), ("float32", False, 0), ("float32", True, 0)],
)
def test_training_continues_bit_for_bit(
    tiny: Path,
    tmp_path: Path,
    dtype: str,
    distributed: bool,
    steps: int,
):
    first = trainer(tiny, dtype=dtype, distributed=distributed)
    train(first, range(steps))
    digest = save(tmp_path / "e000001-step-000002", first, {"step": 2, "note": "é"})
    random = torch.rand(3)
    expected = train(first, range(2, 5))
    second = trainer(tiny, dtype=dtype, distributed=distributed)
    assert load(tmp_path / "e000001-step-000002", second, digest) == {"step": 2, "note": "é"}
    assert torch.equal(torch.rand(3), random)
    assert train(second, range(2, 5)) == expected
    exported = first.model.export_hf()
    assert all(torch.equal(value, exported[name]) for name, value in second.model.export_hf().items())


def test_a_new_process_continues_bit_for_bit(saved: Path, tiny: Path, tmp_path: Path):
    from safetensors.torch import load_file

    launch(1, "1,1,1,0,0", tiny, tmp_path, saved)
    ours = trainer(tiny)
    load(saved, ours)
    ours.accumulate([batch(rows(4, seed=9))])
    ours.step(LR)
    exported = ours.model.export_hf()
    assert all(torch.equal(value, exported[name]) for name, value in load_file(tmp_path / "first.safetensors").items())


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
        load(saved, trainer(tiny, distributed=True))


def test_a_save_that_died_leaves_nothing_that_counts(saved: Path, tiny: Path, tmp_path: Path):
    partial = tmp_path / ".e000001-step-000001.partial"
    partial.mkdir()
    (partial / "__0_0.distcp").write_bytes(b"half")
    save(tmp_path / "e000001-step-000001", trainer(tiny), {})
    assert not partial.exists()
    with pytest.raises(store.CheckpointError, match="never overwritten"):
        save(tmp_path / "e000001-step-000001", trainer(tiny), {})
    (tmp_path / ".e000002-step-000001.partial").mkdir()
    assert store.remove_others(tmp_path, {"e000001-step-000001"}) == [".e000002-step-000001.partial"]
    assert load(tmp_path / "e000001-step-000001", trainer(tiny)) == {}
