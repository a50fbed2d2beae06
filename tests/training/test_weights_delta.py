"""Differences between versions: small, exact, and never needed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from relax_hpc.base.versions import Version
from relax_hpc.config.schema import WeightsConfig
from relax_hpc.training.weights import delta
from relax_hpc.training.weights.subscriber import Subscriber
from relax_hpc.training.weights.version_files import TENSORS
from tests.helpers.weights_helpers import SOON_S, Source, Stage, stage  # noqa: F401

SIZES = st.sampled_from(
    [1, 7, 4096, delta.BLOCK_BYTES, delta.BLOCK_BYTES + 1, 3 * delta.BLOCK_BYTES - 5]
)


@given(SIZES, st.sampled_from([1, 2, 4, 8]), st.floats(0, 1), st.integers(0, 99))
def test_old_and_difference_are_new(size: int, item: int, share: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 256, size, np.uint8)
    new = np.where(rng.random(size) < share, rng.integers(0, 256, size, np.uint8), old)
    difference = delta.encode(memoryview(old), memoryview(new), item)
    record = bytearray(old.tobytes())
    delta.apply(record, memoryview(difference))
    assert record == new.tobytes()
    delta.apply(record, memoryview(difference))
    assert record == old.tobytes()


def test_what_has_not_changed_costs_nothing() -> None:
    old = memoryview(bytes(10 * delta.BLOCK_BYTES))
    assert len(delta.encode(old, old, 2)) < 40


@pytest.mark.parametrize(
    "damage", [lambda d: b"", lambda d: d[:10], lambda d: b"X" + d[1:], lambda d: d[:-3]]
)
def test_what_is_no_difference_is_refused(damage) -> None:
    old = bytes(1000)
    difference = delta.encode(memoryview(old), memoryview(b"\1" * 1000), 2)
    with pytest.raises(ValueError, match="delta: "):
        delta.apply(bytearray(old), memoryview(damage(difference)))
    with pytest.raises(ValueError, match="delta: not one of a record of 999 bytes"):
        delta.apply(bytearray(999), memoryview(difference))
    with pytest.raises(ValueError, match="delta: found records of 3 and 4 bytes"):
        delta.encode(memoryview(b"old"), memoryview(b"newer"[:4]), 1)


class Far:
    """A reader on another node: it has no shared memory with the actor."""

    def __init__(self, stage: Stage) -> None:  # noqa: F811
        planes = [plane for plane in stage.rollout.store.planes if plane.name == "tcp"]
        self.reader = Subscriber(
            stage.run, stage.rollout, "rollout/0", planes, WeightsConfig(anchor_every=10)
        )

    def get(self) -> tuple[Version, dict[str, torch.Tensor]]:
        """The newest version, which it then serves."""
        news, staged = self.reader.fetch(self.reader.newer().result(timeout=SOON_S))
        found = {name: tensor.clone() for name, tensor in load_file(staged.path / TENSORS).items()}
        staged.release()
        version = Version.parse(news.version)
        self.reader.served(version)
        return version, found

    @property
    def ways(self) -> dict[str, int]:
        return self.reader.fetcher.puller.bytes


def policy() -> dict[str, torch.Tensor]:
    """Weights as large as those of a trained model, in float32 as the optimizer has them."""
    generator = torch.Generator().manual_seed(7)
    return {"w": torch.randn(300, 257, generator=generator) * 0.02, "norm": torch.ones(300)}


def test_a_hundred_versions_are_exact(stage: Stage) -> None:  # noqa: F811
    """Of a bfloat16 policy whose every weight moves by the learning rate a step, there or back."""
    exact, rate, generator = policy(), 1e-6, torch.Generator().manual_seed(3)
    published = {name: tensor.bfloat16() for name, tensor in exact.items()}
    source, far = (
        Source(stage.run, stage.actor, published, anchor_every=10, file_every=0),
        Far(stage),
    )
    whole = source.publisher.ring.bytes
    for number in range(100):
        source.publish(Version(1, number))
        version, found = far.get()
        assert version.number == number
        assert all(torch.equal(found[name], tensor) for name, tensor in published.items())
        for name, tensor in exact.items():
            tensor += rate * (torch.rand(tensor.shape, generator=generator) - 0.3).sign()
            published[name].copy_(tensor)
    assert far.ways["tcp"] == 10 * whole, "every tenth is an anchor"
    assert 0 < far.ways["tcp_delta"] < 0.1 * 90 * whole
    assert source.publisher.delta_share() < 0.1


def test_whoever_comes_late_needs_no_chain(stage: Stage) -> None:  # noqa: F811
    tensors = {"w": torch.zeros(100_000)}
    source = Source(stage.run, stage.actor, tensors, anchor_every=10, file_every=0)
    for number in range(5):
        tensors["w"][number] = number + 1
        source.publish(Version(1, number))
    late = Far(stage)
    assert late.get()[1]["w"][:6].tolist() == [1, 2, 3, 4, 5, 0]
    tensors["w"][5] = 6
    source.publish(Version(1, 5))
    assert late.get()[1]["w"][:6].tolist() == [1, 2, 3, 4, 5, 6] and late.ways.keys() == {"tcp"}
    for number in range(6, 12):
        source.publish(Version(1, number))
        late.get()
    assert late.ways["tcp_delta"] > 0, "from version 10 on it has the anchor"


def test_a_damaged_difference_or_anchor_costs_a_whole_read(stage: Stage) -> None:  # noqa: F811
    tensors = {"w": torch.zeros(100_000)}
    source, far = Source(stage.run, stage.actor, tensors, anchor_every=10, file_every=0), Far(stage)
    source.publish(Version(1, 0))
    far.get()
    tensors["w"].fill_(1)
    source.publish(Version(1, 1))
    [(_, _), (_, slab)] = source.publisher.ring._offered[1]
    slab.memory[30] ^= 1
    assert far.get()[1]["w"].eq(1).all() and "tcp_delta" not in far.ways
    source.publish(Version(1, 2))
    held = far.reader.fetcher._anchor.path / TENSORS
    held.write_bytes(held.read_bytes()[:-1] + b"\7")
    assert far.get()[1]["w"].eq(1).all() and "tcp_delta" not in far.ways


def test_a_new_actor_begins_with_an_anchor(stage: Stage) -> None:  # noqa: F811
    tensors = {"w": torch.zeros(1000)}
    source = Source(stage.run, stage.actor, tensors, anchor_every=10, file_every=0)
    deltas = source.publisher._deltas
    for version, anchor in [
        ((1, 0), (1, 0)),
        ((1, 3), (1, 0)),
        ((2, 2), (2, 2)),
        ((2, 11), (2, 2)),
        ((2, 12), (2, 12)),
    ]:
        _, found = deltas.add(Version(*version), 0, source.publisher.ring.offer(0, str(version)))
        assert found == str(Version(*anchor))
        source.publisher.ring.withdraw(0)
