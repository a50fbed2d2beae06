"""Towers before megatron-core's decoder against transformers, on one rank."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.flop_counter import FlopCounterMode

from relax_hpc.algorithms import Sft
from relax_hpc.base.errors import ConfigError
from relax_hpc.base.routes import NAME
from relax_hpc.config.schema import ActorConfig, ModelConfig, ParallelConfig
from relax_hpc.data.multimodal.bad_media import UnusableMedium
from relax_hpc.data.multimodal.features import patches, raw_features
from relax_hpc.data.multimodal.medium import Kind, Medium
from relax_hpc.queue.row_schema import Row
from relax_hpc.training.model import PolicyModel
from relax_hpc.training.models.batches import collate, idle_batch
from relax_hpc.training.models.families import spec_from_config
from relax_hpc.training.models.hf_files import read_config
from relax_hpc.training.models.towers import attention
from relax_hpc.training.models.towers.encoder_input import TowerMedia
from relax_hpc.training.models.towers.media import RowMedia, TowerInput
from relax_hpc.training.models.towers.vision import normalize_pixels
from relax_hpc.training.trainer import Trainer
from tests.helpers.convert_helpers import model, to
from tests.helpers.media_helpers import (
    GRIDS,
    MEDIA,
    OMNI_MEDIA,
    OMNI_ROWS,
    OMNI_RULES,
    QWEN3_OMNI,
    QWEN3_OMNI_THINKER,
    QWEN3_VL,
    QWEN3_VL_MOE,
    ROW_MEDIA,
    ROWS,
    RULES,
    transformers_logprobs,
    transformers_model,
)
from tests.helpers.routes_helpers import declared, routed_policy
from tests.helpers.training_helpers import ALGORITHM, actor_settings, one_rank_fixture, policy  # noqa: F401
from tests.requirements import DEVICE

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_rank")]

PACKS = ROWS[:2], ROWS[2:3], ROWS[3:]


@pytest.fixture(scope="module", name="directory")
def directory_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-VL of four layers, two of which get something of the tower beside the embeddings."""
    return model(tmp_path_factory.mktemp("model") / "hf", QWEN3_VL)


def learnt(
    directory: Path,
    packs: Sequence[list[Row]],
    frozen: tuple[str, ...] = (),
    media: RowMedia = ROW_MEDIA,
    tower_attention: Literal["by_frame", "packed"] = "by_frame",
    **settings: Any,
) -> Trainer:
    """A trainer that has the gradients of a supervised loss of ``packs``."""
    actor = actor_settings(**settings)
    model_settings = ModelConfig(
        device=DEVICE, frozen_towers=[*frozen], tower_attention=tower_attention
    )
    ours = PolicyModel(read_config(directory), model_settings, ParallelConfig(), actor)
    ours.load_hf(directory)
    trainer = Trainer(ours, Sft(), actor.optimizer, 1.0)
    trainer.accumulate([collate(rows, 0, DEVICE, media=media) for rows in packs])
    return trainer


def tower_gradients(trainer: Trainer, name: str = "visual") -> dict[str, torch.Tensor]:
    """Gradients of a tower by the names of its own parameters."""
    tower = getattr(trainer.model.module.towers, name)
    return {name: value.main_grad for name, value in tower.named_parameters()}


@pytest.mark.parametrize(
    "config", [QWEN3_VL, QWEN3_VL_MOE, QWEN3_OMNI_THINKER], ids=lambda one: one["model_type"]
)
def test_logprobs_with_media_match_transformers(tmp_path: Path, config: dict):
    """At all positions, in packs with and without media; experts in one tensor where they are
    published so."""
    omni = "audio_config" in config
    directory = model(tmp_path / "hf", config, packed=not omni)
    ours, theirs = policy(directory), transformers_model(directory)
    rows, media = (OMNI_ROWS, OMNI_MEDIA) if omni else (ROWS, ROW_MEDIA)
    whole = [{key: row[key] for key in ("token_ids", "spans")} for row in rows]
    packs = [collate(part, 0, DEVICE, media=media) for part in (whole[:2], whole[2:3], whole[3:])]
    for row, mine in zip(rows, ours.forward_logprobs(packs, 1.0), strict=True):
        expected = transformers_logprobs(theirs, row, omni).detach().numpy()
        np.testing.assert_allclose(mine[1:], expected, atol=2e-5)
    assert expected[-5:].std() > 0.1
    ours.save_hf(tmp_path / "again", directory)
    saved = load_file(tmp_path / "again/model.safetensors")
    assert {*saved} == {*load_file(directory / "model.safetensors")}
    assert all(
        torch.equal(saved[name], value)
        for name, value in load_file(directory / "model.safetensors").items()
    )


@pytest.mark.parametrize("name", GRIDS)
def test_pixels_become_the_numbers_of_processors_where_the_tower_is(name: str):
    rules = replace(RULES, mean=(0.48, 0.46, 0.41), std=(0.27, 0.26, 0.28))
    pixels = raw_features(MEDIA[name], rules)
    assert pixels.dtype == np.uint8
    found = normalize_pixels(torch.from_numpy(pixels).to(DEVICE), rules)
    assert (found.cpu().numpy() == patches(MEDIA[name], rules)).all()


@pytest.mark.parametrize(
    "config", [QWEN3_VL, QWEN3_OMNI_THINKER], ids=lambda one: one["model_type"]
)
def test_what_a_tower_computes_is_counted_as_torch_counts_it(config: dict):
    """Padding apart: transformers fills the last chunk of a sound."""
    sound = Medium(Kind.AUDIO, np.arange(48000).astype(np.int16), (1, 1, 300))
    beyond_a_window = TowerInput.from_medium(sound, OMNI_RULES)
    of_rows = (OMNI_MEDIA if "audio_config" in config else ROW_MEDIA).inputs
    media = [one for name, one in of_rows.items() if name not in ("speech", "song")] + [
        beyond_a_window
    ]
    for tower in spec_from_config(config).towers:
        module = tower.build()
        # Of other attention it counts nothing on a CPU.
        module.set_attn_implementation("eager")
        for one in (one for one in media if one.kind in tower.kinds):
            values, grid = torch.from_numpy(one.values), torch.tensor([one.grid])
            given = TowerMedia(values, grid, *[torch.empty(0)] * 2, OMNI_RULES)
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                tower.encode(module, given)
            assert counter.get_total_flops() == 2 * tower.multiply_adds(one.grid) > 0


@pytest.mark.parametrize(
    "config", [QWEN3_VL, QWEN3_OMNI_THINKER], ids=lambda one: one["model_type"]
)
def test_bfloat16_is_as_near_to_float32_as_that_of_transformers(tmp_path: Path, config: dict):
    omni = "audio_config" in config
    directory = model(tmp_path / "hf", config)
    rows, media = (OMNI_ROWS, OMNI_MEDIA) if omni else (ROWS, ROW_MEDIA)
    exact, rounded = (
        transformers_model(directory, dtype) for dtype in (torch.float32, torch.bfloat16)
    )
    whole = [{key: row[key] for key in ("token_ids", "spans")} for row in rows]
    found = policy(directory, dtype="bfloat16").forward_logprobs(
        [collate(whole, 0, DEVICE, media=media)], 1.0
    )
    errors: dict[str, list[torch.Tensor]] = {"ours": [], "theirs": []}
    for row, mine in zip(rows, found, strict=True):
        right, theirs = (transformers_logprobs(one, row, omni).detach() for one in (exact, rounded))
        possible = right > -1e3
        errors["ours"].append((torch.from_numpy(mine[1:].copy()) - right)[possible])
        errors["theirs"].append((theirs - right)[possible])
    mean = {name: float(torch.cat(some).abs().mean()) for name, some in errors.items()}
    # Of fifty tokens, some of which go to other experts for a rounding.
    assert 0 < mean["ours"] < 2 * mean["theirs"], mean


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_tower_learns_what_transformers_learns(directory: Path, recompute: str):
    theirs = transformers_model(directory)
    backward(theirs, ROWS)
    assert_equal(
        tower_gradients(learnt(directory, PACKS, recompute=recompute)), theirs.model.visual
    )


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_towers_for_sights_and_sounds_learn_what_transformers_learns(
    tmp_path: Path, recompute: str
):
    directory = model(tmp_path / "hf", QWEN3_OMNI_THINKER)
    theirs = transformers_model(directory)
    backward(theirs, OMNI_ROWS, omni=True)
    ours = learnt(directory, (OMNI_ROWS[:3], OMNI_ROWS[3:]), media=OMNI_MEDIA, recompute=recompute)
    assert_equal(tower_gradients(ours), theirs.visual)
    assert_equal(tower_gradients(ours, "audio"), theirs.audio_tower)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_one_attention_for_all_frames_of_a_layer_learns_the_same(
    tmp_path: Path, recompute: str, monkeypatch: pytest.MonkeyPatch
):
    """As on GPUs in bfloat16, here with the formula instead of the kernel, and with the numbers of
    transformers' own attention."""
    calls = list[int]()

    def varlen_attn(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        ends: torch.Tensor,
        key_ends: torch.Tensor,
        longest: int,
        longest_key: int,
        scale: float,
    ) -> torch.Tensor:
        sizes = ends.diff().tolist()
        assert ends.dtype == torch.int32 and max(sizes) == longest == longest_key
        assert sum(sizes) == len(q) and torch.equal(ends, key_ends)
        calls.append(len(sizes))
        rows = zip(*(x.transpose(0, 1).split(sizes, dim=1) for x in (q, k, v)), strict=True)
        return torch.cat(
            [torch.nn.functional.scaled_dot_product_attention(*row, scale=scale) for row in rows],
            dim=1,
        ).transpose(0, 1)

    directory = model(tmp_path / "hf", QWEN3_OMNI_THINKER)
    packs = OMNI_ROWS[:3], OMNI_ROWS[3:]
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    monkeypatch.setattr(attention, "_has_kernel", lambda weight, size: True)
    theirs = learnt(directory, packs, media=OMNI_MEDIA, recompute=recompute)
    assert not calls, "it is used only if the settings ask for it"
    packed = {"recompute": recompute, "tower_attention": "packed"}
    ours = learnt(directory, packs, media=OMNI_MEDIA, **packed)
    for name in ("visual", "audio"):
        expected = tower_gradients(theirs, name)
        for parameter, gradient in tower_gradients(ours, name).items():
            torch.testing.assert_close(gradient, expected[parameter], atol=1e-5, rtol=1e-4)
    layers = sum(tower.depth for tower in ours.model.spec.towers)
    # Sounds whose chunks differ in length are encoded one after the other.
    assert len(calls) >= layers * len(packs) and max(calls) > 1


@pytest.mark.parametrize(
    ("device", "dtype", "size", "packed"),
    [
        ("cuda", torch.bfloat16, 72, True),
        ("cuda", torch.bfloat16, 64, True),
        ("cuda", torch.bfloat16, 20, False),
        ("cuda", torch.bfloat16, 264, False),
        ("cuda", torch.float32, 72, False),
        ("cpu", torch.bfloat16, 72, False),
    ],
)
def test_attention_of_towers_is_chosen_by_device_type_and_heads(
    device: str, dtype: torch.dtype, size: int, packed: bool
):
    weight = SimpleNamespace(is_cuda=device == "cuda", dtype=dtype)
    config = SimpleNamespace(_attn_implementation="sdpa")
    module = SimpleNamespace(parameters=lambda: iter([weight]), config=config)
    attention.choose_attention(module, size)
    assert config._attn_implementation == ("torch_flash_varlen" if packed else "sdpa")
    weight.is_cuda = False
    attention.choose_attention(module, size)
    assert config._attn_implementation == "sdpa"


def backward(theirs: Any, rows: list[Row], omni: bool = False) -> None:
    """Have transformers' model the gradients of the supervised loss."""
    for row in rows:
        mask = torch.from_numpy(row["loss_mask"][1:]).float()
        (-(transformers_logprobs(theirs, row, omni) * mask).sum()).backward()


def assert_equal(found: dict[str, torch.Tensor], tower: torch.nn.Module) -> None:
    """Gradients are those of transformers' ``tower``, none of which is nothing."""
    for name, value in tower.named_parameters():
        torch.testing.assert_close(found[name].cpu(), value.grad, atol=1e-4, rtol=1e-4)
        # What is added to all keys alike changes no attention.
        assert value.grad.abs().max() > 1e-4 or name.endswith(("qkv.bias", "k_proj.bias")), name


def test_each_distinct_medium_is_encoded_once(directory: Path, monkeypatch: pytest.MonkeyPatch):
    ours, seen = policy(directory), list[int]()
    visual = ours.module.towers.visual
    visual.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    packs = [
        collate(rows, 0, DEVICE, media=ROW_MEDIA)
        for rows in ([ROWS[0], ROWS[1], ROWS[4]], ROWS[2:3])
    ]
    ours.forward_logprobs(packs, 1.0)
    assert seen == [8 + 12]


def test_a_frozen_tower_has_no_gradients_and_stays_as_it_is(directory: Path):
    free, frozen = learnt(directory, PACKS), learnt(directory, PACKS, ("visual",))
    assert all(not hasattr(value, "main_grad") for value in frozen.model.module.towers.parameters())
    sizes = [sum(buffer.numel for buffer in one.module.buffers) for one in (free, frozen)]
    tower = sum(value.numel() for value in frozen.model.module.towers.parameters())
    assert sizes[0] - sizes[1] >= tower
    before = frozen.model.export_hf()
    frozen.step(1e-2)
    moved = {
        name
        for name, value in frozen.model.export_hf().items()
        if not torch.equal(value, before[name])
    }
    assert moved and not any("visual" in name for name in moved) and moved | {*before} == {*before}


def test_a_tower_that_is_not_there_is_not_frozen(directory: Path):
    given = ModelConfig(frozen_towers=["visual", "audio"])
    with pytest.raises(ConfigError, match=r"model\.frozen_towers: found audio, allowed: visual"):
        PolicyModel(read_config(directory), given, ParallelConfig(), ActorConfig())


def test_rows_of_text_alone_leave_a_tower_without_gradient(directory: Path):
    """Also where sums over ranks wait for each parameter to have had one."""
    found = tower_gradients(learnt(directory, (ROWS[2:3],)))
    assert all(not value.any() for value in found.values())


@pytest.mark.parametrize(
    ("length", "says"),
    [
        (3, "a span of 3 tokens at 3: its image has 2 tokens"),
        (1, "do not use all tokens of a medium"),
    ],
)
def test_spans_that_media_do_not_fit_are_refused(length: int, says: str):
    spans = [{"kind": "image", "start": 3, "length": length, "media_id": "wide"}]
    with pytest.raises(UnusableMedium, match=says):
        collate([ROWS[2] | {"spans": spans}], 0, DEVICE, media=ROW_MEDIA)
    with pytest.raises(ValueError, match="no media were given"):
        collate([ROWS[0]], 0, DEVICE)
    assert idle_batch(ROWS[0], DEVICE).media is None


def test_a_first_stage_with_too_few_layers_is_refused(directory: Path):
    split = ParallelConfig(pipeline=2, first_stage_layers=1)
    with pytest.raises(
        ConfigError, match=r"first_stage_layers: found 1, with which .* has 1, allowed: 2 or more"
    ):
        PolicyModel(read_config(directory), ModelConfig(), split, ActorConfig(parallel=split))


def test_routes_of_tokens_among_media_are_those_of_the_experts_that_transformers_chooses(
    tmp_path: Path,
):
    directory = model(tmp_path / "hf", QWEN3_VL_MOE, packed=True)
    theirs, chosen = transformers_model(directory), list[torch.Tensor]()
    for layer in theirs.model.language_model.layers:
        layer.mlp.gate.register_forward_hook(lambda _, __, found: chosen.append(found[2]))
    with declared():
        ours, rows = routed_policy(directory, "record"), []
        for row in ROWS:
            chosen.clear()
            transformers_logprobs(theirs, row)
            routes = ours.spec.route_shape.pack(torch.stack(chosen, 1).numpy())
            rows.append(row | {NAME: routes})
        batch = collate(rows, 0, DEVICE, also=ours.row_fields, media=ROW_MEDIA)
        with torch.no_grad():
            ours.hidden(batch)
    assert len(batch.routes.equal) == 4 and all(
        equal.all() for equal in batch.routes.equal.values()
    )


def test_what_speaks_is_no_part_of_what_is_trained_and_goes_through(tmp_path: Path):
    """Of a whole Qwen3-Omni, whose thinker scores as it does by itself."""
    alone, whole = model(tmp_path / "alone", QWEN3_OMNI_THINKER), tmp_path / "whole"
    weights = load_file(alone / "model.safetensors")
    talker = {
        "talker.model.norm.weight": torch.randn(7),
        "code2wav.decoder.0.weight": torch.randn(2, 3).bfloat16(),
    }
    whole.mkdir()
    (whole / "config.json").write_text(json.dumps(QWEN3_OMNI))
    save_file(
        {f"thinker.{name}": value for name, value in weights.items()} | talker,
        whole / "model.safetensors",
    )
    ours, pack = policy(whole), collate(OMNI_ROWS, 0, DEVICE, media=OMNI_MEDIA)
    scored = [one.forward_logprobs([pack], 1.0) for one in (ours, policy(alone))]
    assert all(np.array_equal(*both) for both in zip(*scored, strict=True))
    ours.save_hf(tmp_path / "again", whole)
    again = load_file(tmp_path / "again/model.safetensors")
    for name, value in load_file(whole / "model.safetensors").items():
        assert again[name].dtype == value.dtype and torch.equal(again[name], value), name
    to(whole, tmp_path / "megatron")
    for number, options in enumerate(({}, {"model": whole}, {"shard_bytes": 20_000})):
        to(tmp_path / "megatron", tmp_path / f"hf-{number}", verify="digests", **options)
        found = [load_file(path) for path in (tmp_path / f"hf-{number}").glob("*.safetensors")]
        assert len(found) == (1 if number < 2 else len(found)) and sum(map(len, found)) == len(
            weights
        ) + len(talker)
        assert all(torch.equal(value, again[name]) for one in found for name, value in one.items())
