"""A trainer's state goes to the host and comes back: nothing of it is left on the device, and no
bit is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from relax_hpc.base import host_memory
from relax_hpc.base.errors import ConfigError, RelaxError
from relax_hpc.base.host_memory import allocate_host_memory, allocate_host_tensors
from relax_hpc.training import offload, swap_weights
from relax_hpc.training.device_offload import DeviceOffload
from relax_hpc.training.trainer import Trainer
from tests.helpers.training_helpers import (  # noqa: F401
    LR,
    batch,
    load,
    one_rank_fixture,
    rows,
    save,
    tiny_fixture,
    trainer,
)

pytestmark = pytest.mark.usefixtures("one_rank")


def train(ours: Trainer, steps: range, away: DeviceOffload | None = None) -> list[dict[str, float]]:
    metrics = []
    for step in steps:
        if away:
            away.offload()
            assert held(ours) == 0
            away.restore()
        ours.accumulate([batch(rows(4, seed=step))])
        metrics.append(ours.step(LR))
    return metrics


def held(ours: Trainer) -> int:
    """Bytes that the allocator was asked for: of weights, gradients, main parameters and
    moments."""
    tensors = list(ours.module.parameters())
    tensors += [one.main_grad for one in tensors] + [
        buffer.grad_data for buffer in ours.module.buffers
    ]
    for part in ours.optimizer.chained_optimizers:
        tensors += [one for group in part.optimizer.param_groups for one in group["params"]]
        tensors += [one for state in part.optimizer.state.values() for one in state.values()]
    return sum(
        {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in tensors}.values()
    )


@pytest.mark.parametrize(
    ("dtype", "distributed"), [("float32", False), ("bfloat16", False), ("bfloat16", True)]
)
def test_the_device_has_nothing_of_it_meanwhile_and_training_goes_on_bit_for_bit(
    tiny: Path, tmp_path: Path, dtype: str, distributed: bool
):
    """From a checkpoint on, which brings tensors of its own."""
    one, other = (
        trainer(tiny, dtype=dtype, optimizer={"distributed": distributed}) for _ in range(2)
    )
    train(one, range(1))
    save(tmp_path / "i000001-step-000001", one, {"step": 1})
    load(tmp_path / "i000001-step-000001", other)
    away = DeviceOffload(other)
    weights = sum(parameter.nbytes for parameter in other.model.module.parameters())
    # Moments in float32, gradients too, and main parameters beside those in bfloat16.
    assert away.bytes >= weights * (4 if dtype == "float32" else 9)
    assert train(one, range(1, 4)) == train(other, range(1, 4), away)
    exported = one.model.export_hf()
    assert all(
        torch.equal(value, exported[name]) for name, value in other.model.export_hf().items()
    )


def test_what_cannot_be_given_back_is_told_at_start(tiny: Path):
    ours = trainer(tiny)
    parameter = next(ours.model.module.parameters())
    parameter.data = torch.frombuffer(bytearray(parameter.nbytes), dtype=parameter.dtype).view(
        parameter.shape
    )
    with pytest.raises(
        ConfigError, match=r"colocate: \d+ bytes of the actor's state cannot be freed"
    ):
        DeviceOffload(ours)


def test_no_room_to_come_back_to_is_told(tiny: Path):
    away = DeviceOffload(trainer(tiny))
    away.offload()
    away._sizes[0] = 1 << 60
    with pytest.raises(RelaxError, match=r"do not fit on cpu .*mem_fraction_static"):
        away.restore()


def test_memory_of_the_host_is_as_large_as_what_it_is_for_and_pinned_in_one_piece(monkeypatch):
    """torch's own pinned memory comes in powers of two."""
    pinned = []

    class Runtime:
        def cudaHostRegister(self, address, size, flags):
            pinned.append((address, size))
            return type("Error", (), {"value": 0})

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    like = [
        torch.ones(3, 5),
        torch.ones(0),
        torch.ones(130, dtype=torch.bfloat16),
        torch.tensor(1.0),
    ]
    found = allocate_host_tensors(like, pinned=True, purpose="test")
    assert pinned == [(found[0].data_ptr(), 64 + 320 + 64)]
    assert [(one.shape, one.dtype) for one in found] == [(one.shape, one.dtype) for one in like]
    for number, one in enumerate(found):
        one.fill_(number)
    assert [set(one.flatten().tolist()) for one in found] == [{0.0}, set(), {2.0}, {3.0}]
    wide = allocate_host_tensors(like, pinned=False, purpose="test", dtype=torch.float32)
    assert (
        {one.dtype for one in wide} == {torch.float32}
        and not any(one.any() for one in wide)
        and len(pinned) == 1
    )


def test_several_threads_allocate_every_page_of_a_large_memory(monkeypatch):
    monkeypatch.setattr(host_memory, "_SHARE_BYTES", 2 << 20)
    for size in (1, 4096, (2 << 20) + 1, (9 << 20) - 5):
        memory = allocate_host_memory(size, pinned=False, purpose="test")
        assert memory.nbytes == size and resident_bytes(memory.data_ptr()) >= size
        assert not memory.any()
        memory.fill_(1)


def resident_bytes(address: int) -> int:
    """Resident bytes of the mapping that begins at ``address``, or contains it."""
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            start, stop = (int(end, 16) for end in words[0].split("-"))
            is_inside = start <= address < stop
        elif is_inside and words[0] == "Rss:":
            return int(words[1]) << 10
    return 0


def test_a_node_with_too_little_memory_is_named_with_the_setting_that_wants_it(
    tiny: Path, monkeypatch
):
    ours, unlimited = trainer(tiny), 1 << 62
    huge = type(
        "Huge", (), {"numel": lambda _: unlimited, "dtype": torch.uint8, "shape": (unlimited,)}
    )()
    monkeypatch.setattr(
        swap_weights,
        "allocate_host_tensors",
        lambda _, *about: allocate_host_tensors([huge], *about),
    )
    too_little = r"weights old: \d+ bytes of host memory .*separate group"
    with pytest.raises(ConfigError, match=r"actor\.forward: .*" + too_little):
        swap_weights.SwappedWeights(ours.model.module).store("old")
    monkeypatch.setattr(
        offload,
        "allocate_host_tensors",
        lambda _, *about: allocate_host_tensors([huge], *about[:2]),
    )
    with pytest.raises(
        ConfigError,
        match=r"actor\.optimizer\.offload: .*optimizer states: \d+ bytes .*set it false",
    ):
        trainer(tiny, optimizer={"offload": True})
