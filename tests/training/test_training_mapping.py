"""Hugging Face <-> megatron-core names and slices, as pure bookkeeping."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from relax_hpc.base.errors import ConfigError
from relax_hpc.config.schema import OptimizerConfig
from relax_hpc.training.models.batches import collate
from relax_hpc.training.models.hf_mapping import (
    all_pieces,
    check_names,
    cut_slice,
    fuse,
    join_slices,
    split,
    stage_entries,
)
from relax_hpc.training.models.packs import PackSplit
from relax_hpc.training.models.qwen3 import Qwen3
from relax_hpc.training.optimizer import learning_rate

SHAPE = Qwen3(hidden=8, inner=12, layers=4, heads=8, groups=4, head_dim=2, vocab=13, tied=False)


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_cutting_and_fusing_are_undone(parts: int, groups: int):
    """Where there are fewer groups than parts, each has its rows of the whole parameter, as
    megatron-core cuts it."""
    spec = dataclasses.replace(SHAPE, groups=groups)
    generator = torch.Generator().manual_seed(0)
    full = {
        name: torch.randn(piece.shape, generator=generator)
        for name, piece in all_pieces(spec).items()
    }
    for entry in stage_entries(spec, range(4), True, True):
        slices = [
            [cut_slice(piece, full[piece.name], parts, rank) for piece in entry.pieces]
            for rank in range(parts)
        ]
        fused = [fuse(entry, pieces, spec) for pieces in slices]
        undone = [split(entry, one, spec, parts, rank) for rank, one in enumerate(fused)]
        if entry.fuse == "qkv":
            assert torch.equal(
                torch.cat(fused), fuse(entry, [full[piece.name] for piece in entry.pieces], spec)
            )
        for index, piece in enumerate(entry.pieces):
            assert torch.equal(
                join_slices(piece, [pieces[index] for pieces in undone]), full[piece.name]
            ), piece.name


def test_queries_lie_beside_their_key_and_value():
    entry = next(
        entry for entry in stage_entries(SHAPE, range(1), False, False) if entry.fuse == "qkv"
    )
    pieces = [torch.full(piece.shape, float(index)) for index, piece in enumerate(entry.pieces)]
    fused = fuse(entry, pieces, SHAPE)[:, 0].tolist()
    assert fused == [0.0] * 4 + [1.0] * 2 + [2.0] * 2 + ([0.0] * 4 + [1.0] * 2 + [2.0] * 2) * 3


def test_the_last_rank_has_fewer_rows_of_the_vocabulary():
    piece = all_pieces(SHAPE)["lm_head.weight"]
    whole = torch.ones(piece.shape)
    last = cut_slice(piece, whole, 4, 3)
    assert (
        last.shape == (1, 8)
        and last.data_ptr() == whole[12:].data_ptr()
        and SHAPE.padded_vocab(4) == 16
    )


def test_stages_hold_every_tensor_once():
    stages = [
        stage_entries(SHAPE, range(2), True, False),
        stage_entries(SHAPE, range(2, 4), False, True),
    ]
    names = [piece.name for stage in stages for entry in stage for piece in entry.pieces]
    assert sorted(names) == sorted(all_pieces(SHAPE))


def test_transformer_engine_names_differ_only_in_the_norms():
    local, te = (
        {entry.name for entry in stage_entries(SHAPE, range(1), True, True, spec)}
        for spec in ("local", "te")
    )
    assert te - local == {
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight",
    }


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda shapes: shapes.pop("model.norm.weight"), r"model\.norm\.weight is missing"),
        (lambda shapes: shapes.update(extra=(1,)), r"unknown tensor extra"),
        (
            lambda shapes: shapes.update({"model.norm.weight": (9,)}),
            r"has shape \[9\], expected \[8\]",
        ),
    ],
)
def test_wrong_tensors_are_refused_by_name(change, says):
    shapes = {name: piece.shape for name, piece in all_pieces(SHAPE).items()}
    change(shapes)
    with pytest.raises(ConfigError, match=says):
        check_names(SHAPE, shapes, "somewhere")


def test_collate_packs_rows_and_leaves_out_what_a_row_lacks():
    rows = [{"token_ids": [5, 6, 7], "old_logprobs": [0.0, -1.0, -2.0]}, {"token_ids": [8]}]
    batch = collate(rows, 9, "cpu", PackSplit(sequence=3))
    assert batch.tokens.tolist() == [[5, 6, 7, 8, 9, 9]] and batch.packed.positions.tolist() == [
        0,
        1,
        2,
        0,
        0,
        1,
    ]
    assert batch.packed.queries == batch.packed.keys == [
        3,
        1,
        2,
    ] and batch.packed.query_ends.tolist() == [0, 3, 4, 6]
    assert batch.lengths == [3, 1] and "old_logprobs" not in batch.fields and not batch.mask.any()
    assert batch.mask.shape == (2, 3) and batch.scored.tokens.tolist() == [6, 7]
    assert batch.scored.scatter(torch.tensor([1.0, 2.0]), batch.mask.shape).tolist() == [
        [0, 1, 2],
        [0, 0, 0],
    ]


def test_what_a_models_forward_pass_takes_of_a_row_comes_with_it():
    rows = [
        {"token_ids": [5, 6], "token_versions": [[0, 1], [7, 2]]},
        {"token_ids": [8], "token_versions": [[3, 4]]},
    ]
    (found,) = collate(rows, 0, "cpu", PackSplit(sequence=4), also=("token_versions",)).inputs[
        "token_versions"
    ]
    assert found.tolist() == [[0, 1], [7, 2], [3, 4], [0, 0]]
    cut = [
        collate(rows, 0, "cpu", PackSplit(1, 2, rank), also=("token_versions",))
        for rank in range(2)
    ]
    assert [one.tokens.tolist() for one in cut] == [[[5, 0, 8, 0]], [[6, 0, 0, 0]]]
    assert cut[1].inputs["token_versions"][0].tolist() == [[7, 2], [0, 0], [0, 0], [0, 0]]
    # What the first rank predicts is the second one's.
    assert [one.scored.tokens.tolist() for one in cut] == [[6], []]


def test_learning_rate_warms_up_and_decays_linearly():
    config = OptimizerConfig(lr=2.0, final_lr_share=0.5, warmup_steps=2)
    rates = [learning_rate(config, step, 7) for step in range(7)]
    assert rates == [1.0, 2.0, 2.0, 1.75, 1.5, 1.25, 1.0]


def test_learning_rate_may_go_by_a_cosine_or_stay():
    cosine = OptimizerConfig(lr=2.0, final_lr_share=0.1, warmup_steps=1, schedule="cosine")
    rates = [learning_rate(cosine, step, 10) for step in range(10)]
    from torch.optim import SGD
    from torch.optim.lr_scheduler import CosineAnnealingLR

    optimizer = SGD([torch.zeros(1)], lr=2.0)
    theirs = CosineAnnealingLR(optimizer, T_max=8, eta_min=0.2)
    expected = []
    for _ in range(9):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()
    assert rates == pytest.approx([2.0, *expected])
    constant = OptimizerConfig(lr=2.0, final_lr_share=0.1, warmup_steps=2, schedule="constant")
    assert [learning_rate(constant, step, 5) for step in range(5)] == [1.0, 2.0, 2.0, 2.0, 2.0]
