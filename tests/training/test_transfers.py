"""Copies from a mapped file into live parameters: all bytes, in any strides, through rooms of any
size."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.requirements import requires

requires("torch", "megatron")

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from relax_hpc.rollout.engines.sglang.slab_loader import copying  # noqa: E402
from relax_hpc.training.models.hf_files import SafetensorFiles  # noqa: E402
from relax_hpc.training.weights.transfers import Transfers, batches, pieces  # noqa: E402
from tests.helpers.training_helpers import one_rank_fixture, policy, tiny_fixture  # noqa: E402, F401

CPU = torch.device("cpu")


def pairs() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Whole ones, slices along each axis, another type, no rows, no axes, views of a larger
    parameter."""
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
    targets = [torch.full(one.shape, -1, dtype=one.dtype) for one in sources[:-1]]
    targets[5] = torch.full((64, 64), -1.0)
    return [
        *zip(sources, [*targets, fused[0, :2]], strict=True),
        (numbers.view(4, 16, 64), fused[:, 16:32]),
    ]


@pytest.mark.parametrize(
    ("staged", "room"), [(False, 1 << 20), (True, 1 << 20), (True, 1024), (True, 320)]
)
def test_every_target_has_its_source_however_small_the_rooms(staged: bool, room: int):
    asked = pairs()
    transfers = Transfers(CPU, staged, room)
    for _ in range(2):
        transfers.copy(asked)
        for source, target in asked:
            assert torch.equal(target, source.to(target.dtype))
            target.detach().zero_()


def test_pieces_fit_and_batches_too():
    cut = [one for source, target in pairs() for one in pieces(source, target, 1024)]
    assert max(source.nbytes for source, _ in cut) <= 1024
    assert all(
        sum(source.nbytes for source, _ in batch) <= 4096 for batch in batches(iter(cut), 4096)
    )
    assert [one for batch in batches(iter(cut), 4096) for one in batch] == cut


def test_of_a_mapped_file_a_rank_copies_its_slices_alone(tmp_path: Path):
    """As SGLang's weight loaders do it: narrow, then copy; what is no part of the file is left
    alone."""
    whole = {"column": torch.randn(8, 6), "row": torch.randn(6, 8)}
    save_file(whole, tmp_path / "model.safetensors")
    sent: list[torch.Tensor] = []
    transfers = Transfers(CPU, True, 1024)
    send, transfers.send = (
        transfers.send,
        lambda asked: (sent.extend(one for one, _ in asked), send(asked)),
    )
    with SafetensorFiles(tmp_path) as files:
        views, other = {name: files[name][:] for name in whole}, torch.zeros(2)
        fused, row = torch.zeros(2, 4, 6), torch.nn.Parameter(torch.zeros(6, 4))
        with copying(transfers, list(views.values())):
            fused[1].copy_(views["column"].narrow(0, 4, 4))
            row.data.copy_(views["row"].narrow(1, 4, 4))
            other.copy_(torch.ones(2))
    assert torch.equal(fused[1], whole["column"][4:]) and torch.equal(row.data, whole["row"][:, 4:])
    assert not fused[0].any() and other.all()
    assert sum(one.nbytes for one in sent) == (8 * 6 + 6 * 8) * 4 // 2


@pytest.mark.usefixtures("one_rank")
def test_a_model_is_loaded_from_the_mapped_file_itself_into_the_live_parameters(tiny: Path):
    model = policy(tiny)
    live = {one.untyped_storage().data_ptr() for one in model.module.parameters()}
    with SafetensorFiles(tiny) as files:
        for source, target in model._live_pairs(files):
            assert any(low <= source.data_ptr() < high for low, high in mapped(".safetensors"))
            assert target.untyped_storage().data_ptr() in live


def mapped(suffix: str) -> list[tuple[int, int]]:
    """Where in this process's memory files of such names are."""
    lines = [
        line.split()
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.endswith(suffix)
    ]
    return [tuple(int(end, 16) for end in words[0].split("-")) for words in lines]
