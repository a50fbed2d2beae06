"""Copies from a mapped file into live parameters: all bytes, with any strides, through buffers of any
size."""

from __future__ import annotations

import errno
import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.requirements import requires

requires("torch", "megatron")

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from relax_hpc.base import parallel_copies  # noqa: E402
from relax_hpc.base.errors import DeadlineError  # noqa: E402
from relax_hpc.base.parallel_copies import Copier  # noqa: E402
from relax_hpc.net.transport import SlabPool  # noqa: E402
from relax_hpc.rollout.engines.sglang.slab_loader import copying  # noqa: E402
from relax_hpc.training.models.hf_files import SafetensorFiles  # noqa: E402
from relax_hpc.training.weights import ring  # noqa: E402
from relax_hpc.training.weights.tensors import TensorInfo  # noqa: E402
from relax_hpc.training.weights.transfers import Transfers, pieces  # noqa: E402
from tests.helpers.training_helpers import one_rank_fixture, policy, tiny_fixture  # noqa: E402, F401

CPU = torch.device("cpu")


def pairs() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Sources and targets: whole tensors, slices along each axis, another type, no rows, no axes, and
    views of a larger parameter."""
    numbers = torch.arange(4096, dtype=torch.float32).view(64, 64)
    fused = torch.zeros(4, 48, 64)
    sources = [
        numbers,
        numbers[:, 8:24],
        numbers[3:5],
        numbers[:0],
        numbers[0, 0],
        numbers.bfloat16(),
        numbers[:2],
    ]
    targets = [torch.full_like(source, -1) for source in sources[:-1]]
    targets[5] = torch.full((64, 64), -1.0)
    return [
        *zip(sources, [*targets, fused[0, :2]], strict=True),
        (numbers.view(4, 16, 64), fused[:, 16:32]),
    ]


@pytest.mark.parametrize(
    ("staged", "buffer_bytes"), [(False, 1 << 20), (True, 1 << 20), (True, 1024), (True, 320)]
)
def test_every_target_has_its_source_with_buffers_of_any_size(staged: bool, buffer_bytes: int):
    copies = pairs()
    transfers = Transfers(CPU, staged, buffer_bytes)
    for _ in range(2):
        transfers.copy(copies)
        for source, target in copies:
            assert torch.equal(target, source.to(target.dtype))
            target.detach().zero_()


def test_pieces_fit_and_small_ones_share_a_buffer(monkeypatch):
    copies = list(itertools.chain(*(pieces(source, target, 1024) for source, target in pairs())))
    assert max(source.nbytes for source, _ in copies) <= 1024
    transfers = Transfers(CPU, True, 4096)
    buffers: list[list[torch.Tensor]] = []
    start = Copier.start

    def start_and_record(self, sources, buffer):
        buffers.append(sources)
        return start(self, sources, buffer)

    monkeypatch.setattr(Copier, "start", start_and_record)
    transfers.copy(copies)
    assert all(sum(source.nbytes for source in sources) <= 4096 for sources in buffers)
    assert list(itertools.chain(*buffers)) == [source for source, _ in copies]
    assert len(buffers) < len(copies) / 2


@pytest.mark.parametrize("length", [1, 63, 1023, 1025, 4097, 10_000])
def test_odd_sizes_pass_through_two_buffers_byte_for_byte(length: int):
    sources = [torch.arange(length + extra, dtype=torch.int64).to(torch.uint8) for extra in (0, 3)]
    targets = [torch.zeros_like(source) for source in sources]
    transfers = Transfers(CPU, True, 1000)
    transfers.copy(zip(sources, targets, strict=True))
    assert all(map(torch.equal, sources, targets))
    assert len(transfers._buffers) == 2


def test_a_target_has_the_last_of_two_deferred_sources_and_wait_copies_all():
    for staged in (False, True):
        target, transfers = torch.zeros(1000), Transfers(CPU, staged, 512)
        for value in (1.0, 2.0):
            transfers.defer(torch.full((1000,), value), target)
        transfers.wait()
        assert target.eq(2.0).all()


def test_an_error_in_a_copying_thread_is_raised_and_later_copies_work(monkeypatch):
    copy, target, transfers = parallel_copies._copy_share, torch.zeros(1000), None

    def fail(share: list) -> None:
        raise OSError(errno.EIO, "the file is gone")

    for staged in (False, True):
        transfers = Transfers(CPU, staged, 512)
        monkeypatch.setattr(parallel_copies, "_copy_share", fail)
        with pytest.raises(OSError, match="the file is gone"):
            transfers.copy([(torch.ones(1000), target)])
        monkeypatch.setattr(parallel_copies, "_copy_share", copy)
        transfers.copy([(torch.full((1000,), 3.0), target)])
        assert target.eq(3.0).all()
        target.zero_()


@pytest.mark.parametrize("staged", [False, True])
def test_after_an_error_in_reading_pairs_none_is_left_for_the_next_copy(staged: bool):
    transfers, target = Transfers(CPU, staged), torch.zeros(8)

    def broken() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        yield torch.ones(8), target
        raise ValueError("not a tensor")

    with pytest.raises(ValueError, match="not a tensor"):
        transfers.copy(broken())
    target.zero_()
    transfers.wait()
    assert not target.any()


def test_a_copy_that_does_not_end_is_an_error_at_its_deadline(monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr(parallel_copies, "_copy_share", lambda share: ended.wait(60.0))
    transfers = Transfers(CPU, True, 512)
    transfers._copier = Copier("transfers", limit_s=0.01)
    try:
        with pytest.raises(DeadlineError, match=r"transfers: .*not complete in time"):
            transfers.copy([(torch.ones(100), torch.zeros(100))])
    finally:
        ended.set()


def test_shares_of_threads_are_even_in_bytes_and_have_each_row_once(monkeypatch):
    monkeypatch.setattr(parallel_copies, "_SMALLEST_SHARE_BYTES", 1)
    numbers = np.arange(40 * 4096, dtype=np.int32)
    sources = [numbers[:100_000], numbers[:0], numbers.reshape(160, 1024)[:, :512], numbers[:5]]
    targets = [np.zeros(source.shape, np.int32) for source in sources]
    pairs = list(zip(sources, targets, strict=True))
    for count in (1, 3, 7):
        shares = parallel_copies.split_evenly(pairs, count)
        sizes = [sum(source.nbytes for source, _ in share) for share in shares]
        assert len(shares) <= count and sum(sizes) == sum(source.nbytes for source in sources)
        assert max(sizes) <= sum(sizes) / count + 4096 + 2048
        for share in shares:
            parallel_copies._copy_share(share)
        assert all(map(np.array_equal, sources, targets))
        for target in targets:
            target.fill(0)


def test_a_rank_copies_only_its_slices_of_a_mapped_file(tmp_path: Path):
    """Weight loaders of SGLang narrow a tensor and then copy it. Copies of other tensors are not
    changed."""
    whole = {"column": torch.randn(8, 6), "row": torch.randn(6, 8)}
    save_file(whole, tmp_path / "model.safetensors")
    sources: list[torch.Tensor] = []
    transfers = Transfers(CPU, True, 1024)
    defer = transfers.defer

    def defer_and_record(source: torch.Tensor, target: torch.Tensor) -> None:
        sources.append(source)
        defer(source, target)

    transfers.defer = defer_and_record
    with SafetensorFiles(tmp_path) as files:
        views, other = {name: files[name][:] for name in whole}, torch.zeros(2)
        fused, row = torch.zeros(2, 4, 6), torch.nn.Parameter(torch.zeros(6, 4))
        with copying(transfers, list(views.values())):
            fused[1].copy_(views["column"].narrow(0, 4, 4))
            row.data.copy_(views["row"].narrow(1, 4, 4))
            other.copy_(torch.ones(2))
    assert torch.equal(fused[1], whole["column"][4:]) and torch.equal(row.data, whole["row"][:, 4:])
    assert not fused[0].any() and other.all()
    assert sum(source.nbytes for source in sources) == (8 * 6 + 6 * 8) * 4 // 2


@pytest.mark.parametrize("staged", [False, True])
def test_a_loader_that_reads_a_target_between_its_copies_has_the_new_values(staged: bool):
    """Copies are deferred until an operation that is no view, so that small tensors are copied
    together."""
    sources, target = [torch.ones(8), torch.full((8,), 2.0)], torch.zeros(2, 8)
    transfers = Transfers(CPU, staged)
    with copying(transfers, sources):
        for row, source in enumerate(sources):
            target.narrow(0, row, 1).view(8).copy_(source)
        assert len(transfers._batch) == (2 if staged else 0)
        total = target.sum()
    assert total.item() == 24.0 and not transfers._batch


class Stream:
    """Stream without a GPU that records the streams and events for which it waits."""

    current: Stream

    def __init__(self) -> None:
        self.waits: list[object] = []
        self.wait_stream = self.wait_event = self.waits.append

    @contextmanager
    def use(self) -> Iterator[None]:
        before, Stream.current = Stream.current, self
        yield
        Stream.current = before


class Event:
    """Complete when its stream is awaited."""

    def record(self, stream: Stream) -> None:
        self.stream, self.is_awaited = stream, False

    def synchronize(self) -> None:
        self.is_awaited = True


def test_a_publish_copies_on_two_streams_and_waits_for_both(monkeypatch):
    """Each stream waits for training, and training waits for the events of both."""
    training = Stream.current = Stream()
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", Stream.use)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream.current)
    monkeypatch.setattr(ring, "pin_memory", lambda *_: None)
    whole, used = {"a": torch.randn(9, 4), "b": torch.randn(4, 6).T, "c": torch.randn(3, 2)}, []
    infos = {name: TensorInfo("F32", tuple(tensor.shape)) for name, tensor in whole.items()}
    slices = [
        ring.WeightSlice(
            name, 0, 0, len(tensor), lambda tensor=tensor: used.append(Stream.current) or tensor
        )
        for name, tensor in whole.items()
    ]
    copied = ring.SlabRing(SlabPool(), (), infos, slices, 2, 1 << 20, pinned=True)
    copied.copy()
    assert all(
        map(torch.equal, copied._targets[0], [tensor.flatten() for tensor in whole.values()])
    )
    streams, done = copied._copies._streams, copied._copies._done
    assert used == [streams[0], streams[1], streams[1]]
    assert all(stream.waits == [training] for stream in streams) and not training.waits
    copied.await_copy()
    assert training.waits == done and [event.stream for event in done] == streams
    copied.settle()
    assert all(event.is_awaited for event in done)
    copied.close()


@pytest.mark.usefixtures("one_rank")
def test_a_model_is_copied_from_the_mapped_file_into_its_parameters(tiny: Path):
    model = policy(tiny)
    parameters = model.module.parameters()
    live = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    with SafetensorFiles(tiny) as files:
        for source, target in model._live_pairs(files):
            ranges = mapped_ranges(".safetensors")
            assert any(low <= source.data_ptr() < high for low, high in ranges)
            assert target.untyped_storage().data_ptr() in live


def mapped_ranges(suffix: str) -> list[tuple[int, int]]:
    """Addresses at which this process has mapped files whose names end with ``suffix``."""
    ranges = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(suffix):
            low, high = line.split()[0].split("-")
            ranges.append((int(low, 16), int(high, 16)))
    return ranges


def test_an_engine_finishes_its_last_batch_before_weights_change(monkeypatch):
    """On a GPU, where the batch runs on another stream than the copies."""
    source, target, waits = torch.ones(3), torch.zeros(3), []
    monkeypatch.setattr(
        torch.cuda, "synchronize", lambda device: waits.append((device, target.tolist()))
    )
    transfers = Transfers(torch.device("cpu"))
    for device in ("cpu", "cuda:1"):
        target.zero_()
        transfers.device = torch.device(device)
        with copying(transfers, [source]):
            target.copy_(source)
        assert target.tolist() == [1.0] * 3
    assert waits == [(torch.device("cuda:1"), [0.0] * 3)]
