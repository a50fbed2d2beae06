"""Hugging Face <-> megatron-core names and slices, as pure bookkeeping."""

from __future__ import annotations

import pytest
import torch

from relax_hpc.config.schema import OptimizerConfig
from relax_hpc.errors import ConfigError
from relax_hpc.models.hf_mapping import (
    all_pieces,
    check_names,
    cut,
    fuse,
    join,
    split,
    stage_entries,
)
from relax_hpc.models.qwen3 import Qwen3
from relax_hpc.training.batches import collate, split_rows
from relax_hpc.training.optimizer import learning_rate

SHAPE = Qwen3(hidden=8, inner=12, layers=4, heads=8, groups=4, head_dim=2, vocab=13, tied=False)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_cutting_and_fusing_are_undone(parts: int):
    generator = torch.Generator().manual_seed(0)
    full = {name: torch.randn(piece.shape, generator=generator) for name, piece in all_pieces(SHAPE).items()}
    for entry in stage_entries(SHAPE, range(4), True, True):
        slices = [[cut(piece, full[piece.name], parts, rank) for piece in entry.pieces] for rank in range(parts)]
        undone = [split(entry, fuse(entry, pieces, SHAPE), SHAPE) for pieces in slices]
        for index, piece in enumerate(entry.pieces):
            assert torch.equal(join(piece, [pieces[index] for pieces in undone]), full[piece.name]), piece.name


def test_queries_lie_beside_their_key_and_value():
    entry = next(entry for entry in stage_entries(SHAPE, range(1), False, False) if entry.fuse == "qkv")
    pieces = [torch.full(piece.shape, float(index)) for index, piece in enumerate(entry.pieces)]
    fused = fuse(entry, pieces, SHAPE)[:, 0].tolist()
    assert fused == [0.0] * 4 + [1.0] * 2 + [2.0] * 2 + ([0.0] * 4 + [1.0] * 2 + [2.0] * 2) * 3


def test_the_last_rank_has_fewer_rows_of_the_vocabulary():
    piece = all_pieces(SHAPE)["lm_head.weight"]
    whole = torch.ones(piece.shape)
    last = cut(piece, whole, 4, 3)
    assert last.shape == (1, 8) and last.data_ptr() == whole[12:].data_ptr() and SHAPE.padded_vocab(4) == 16


def test_stages_hold_every_tensor_once():
    stages = [stage_entries(SHAPE, range(2), True, False), stage_entries(SHAPE, range(2, 4), False, True)]
    names = [piece.name for stage in stages for entry in stage for piece in entry.pieces]
    assert sorted(names) == sorted(all_pieces(SHAPE))


def test_transformer_engine_names_differ_only_in_the_norms():
    local, te = ({entry.name for entry in stage_entries(SHAPE, range(1), True, True, spec)} for spec in ("local", "te"))
    assert te - local == {
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight",
    }


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda shapes: shapes.pop("model.norm.weight"), r"model\.norm\.weight is missing"),
        (lambda shapes: shapes.update(extra=(1,)), r"unknown tensor extra"),
        (lambda shapes: shapes.update({"model.norm.weight": (9,)}), r"has shape \[9\], expected \[8\]"),
    ],
)
def test_wrong_tensors_are_refused_by_name(change, says):
    shapes = {name: piece.shape for name, piece in all_pieces(SHAPE).items()}
    change(shapes)
    with pytest.raises(ConfigError, match=says):
        check_names(SHAPE, shapes, "somewhere")


def test_collate_pads_right_and_leaves_out_what_a_row_lacks():
    rows = [{"token_ids": [5, 6, 7], "old_logprobs": [0.0, -1.0, -2.0]}, {"token_ids": [8]}]
    batch = collate(rows, 0, "cpu", multiple=2)
    assert batch.tokens.tolist() == [[5, 6, 7, 0], [8, 0, 0, 0]]
    assert batch.lengths == [3, 1] and "old_logprobs" not in batch.fields and not batch.mask.any()


def test_what_a_models_forward_pass_takes_of_a_row_comes_with_it():
    rows = [{"token_ids": [5, 6], "token_versions": [0, 7]}, {"token_ids": [8], "token_versions": [0]}]
    batch = collate(rows, 0, "cpu", also=("token_versions",))
    assert batch.fields["token_versions"].tolist() == [[0, 7], [0, 0]]


def test_micro_batches_keep_order_and_budget():
    rows = [{"token_ids": [0] * length} for length in (3, 4, 1, 9, 2, 2)]
    parts = split_rows(rows, 8)
    assert [row for part in parts for row in part] == rows
    assert [[len(row["token_ids"]) for row in part] for part in parts] == [[3, 4], [1], [9], [2, 2]]


def test_learning_rate_warms_up_and_decays_linearly():
    config = OptimizerConfig(lr=2.0, final_lr_share=0.5, warmup_steps=2)
    rates = [learning_rate(config, step, 7) for step in range(7)]
    assert rates == [1.0, 2.0, 2.0, 1.75, 1.5, 1.25, 1.0]
