"""An engine that sees, or hears too, asked with media, and what transformers says of its
answers."""

from __future__ import annotations

import asyncio
import functools
import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from safetensors.torch import load_file, save_file

from relax_hpc.base.routes import RouteShape
from relax_hpc.base.versions import Version
from relax_hpc.config.schema import TinyModelConfig
from relax_hpc.data.multimodal.features import mel, patches
from relax_hpc.data.multimodal.medium import Kind, Medium
from relax_hpc.data.multimodal.rules import Rules
from relax_hpc.examples.tasks.moving_squares import filmed
from relax_hpc.queue.storage.media import MediaStore, read_placeholders
from relax_hpc.rollout.engines import make_engine
from relax_hpc.rollout.engines.engine import (
    Engine,
    EpisodeRow,
    GenerateRequest,
    Generation,
    Sampling,
)
from relax_hpc.training.models.tiny_model import make_tiny_model
from relax_hpc.training.models.tiny_tokenizer import EOS_ID
from tests.helpers.engine_helpers import make_config
from tests.helpers.media_helpers import transformers_model
from tests.helpers.media_prompts import IMAGE, SEEING, VIDEO, placed, stored
from tests.helpers.routes_helpers import chosen_routes

SEEING_EXPERTS = TinyModelConfig(
    vision_layers=3,
    num_layers=4,
    num_experts=8,
    moe_intermediate_size=48,
    tie_word_embeddings=False,
)
CLOSE = 1e-5
"""Difference of log-probabilities in float32 that were summed in other orders."""
SAMPLING, TOKENS = Sampling(1.0, 1.0, (), 0), 8
_SEEN = (
    (Kind.IMAGE, "pixel_values", "image_grid_thw"),
    (Kind.VIDEO, "pixel_values_videos", "video_grid_thw"),
)


@dataclass
class MediaEngine:
    """An engine, the loop it runs in, and the two models that it may serve."""

    engine: Engine
    runner: asyncio.Runner
    models: list[Path]
    store: MediaStore

    @classmethod
    @contextmanager
    def started(
        cls,
        kind: str,
        folder: Path,
        shape: TinyModelConfig = SEEING,
        routes: bool = False,
        caches: bool = False,
    ) -> Iterator[MediaEngine]:
        """``routes``: whether it says of each token which experts have computed it. ``caches``:
        whether it keeps keys and values for requests that go on from others."""
        flags = {"disable_radix_cache": not caches} if kind == "sglang" else {}
        models, config = (
            [strong(folder / f"m{seed}", shape, seed) for seed in (0, 1)],
            make_config(kind, flags=flags),
        )
        config.model.routing_replay = "on" if routes else "off"
        engine = make_engine(config, 0, models[0], Version(1, 0), folder)
        with asyncio.Runner() as runner:
            runner.run(engine.start())
            yield cls(engine, runner, models, MediaStore(folder / "media", durable=False))
            runner.run(engine.close())

    def asked(
        self, *media: bytes | tuple[Kind, bytes], sample: int = 0, heard: bool = False
    ) -> GenerateRequest:
        """A request with media, which are images unless it is said; ``heard``: see `placed`."""
        named = [one if isinstance(one, tuple) else (Kind.IMAGE, one) for one in media]
        ids, media = placed(self.models[0], self.store, *named, heard=heard)
        return GenerateRequest((*ids, 8 + sample), "p", sample, SAMPLING, TOKENS, media)

    def answers(self, *requests: GenerateRequest) -> list[Generation]:
        async def together() -> list[Generation]:
            return await asyncio.gather(*map(self.engine.generate, requests))

        return self.runner.run(together())


def film(seed: int) -> tuple[Kind, bytes]:
    """A video of four frames in two seconds."""
    return Kind.VIDEO, filmed(f"film {seed}")[0]


def noise(seconds: float, seed: int = 0) -> tuple[Kind, bytes]:
    """A sound."""
    samples = np.random.default_rng(seed).normal(scale=0.3, size=int(16000 * seconds)).clip(-1, 1)
    file = io.BytesIO()
    soundfile.write(file, samples, 16000, format="WAV")
    return Kind.AUDIO, file.getvalue()


def strong(model: Path, shape: TinyModelConfig, seed: int) -> Path:
    """A model whose next token depends strongly on all that is before, media included."""
    make_tiny_model(model, shape, seed)
    weights = {
        name: one * (8 if one.ndim > 1 else 1)
        for name, one in load_file(model / "model.safetensors").items()
    }
    heads = "thinker.lm_head.weight", "lm_head.weight", "model.language_model.embed_tokens.weight"
    last = next(name for name in heads if name in weights)
    weights[last][EOS_ID] = 0
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    return model


@functools.cache
def _transformers(model: Path) -> Any:
    found = transformers_model(model)
    return getattr(found, "thinker", found)


@torch.inference_mode()
def error(model: Path, request: GenerateRequest, found: Generation, heard: bool = False) -> float:
    """Largest difference of log-probabilities to those of transformers, which has no placeholders
    to choose from."""
    logits = _logits(model, request, found, heard)
    logits[:, [*read_placeholders(model).values()]] = -torch.inf
    drawn = logits.log_softmax(-1)[len(request.prompt_ids) - 1 : -1].gather(
        -1, torch.tensor(found.token_ids)[:, None]
    )
    return (drawn[:, 0] - torch.tensor(found.logprobs)).abs().max().item()


@torch.inference_mode()
def error_of_turns(model: Path, row: EpisodeRow) -> float:
    """The same of what was sampled in a row of several turns, with all media in it."""
    request = GenerateRequest(tuple(row.prompt), "p", 0, SAMPLING, TOKENS, row.media or ())
    logits = _logits(model, request, row.generation)
    logits[:, [*read_placeholders(model).values()]] = -torch.inf
    ids, known = torch.tensor(row.generation.token_ids), len(row.prompt)
    drawn = logits.log_softmax(-1)[known - 1 : -1].gather(-1, ids[:, None])[:, 0]
    sampled = torch.from_numpy(row.generation.token_versions != 0)
    return (drawn - torch.tensor(row.generation.logprobs))[sampled].abs().max().item()


@torch.inference_mode()
def own_routes(
    model: Path, request: GenerateRequest, found: Generation, shape: RouteShape
) -> np.ndarray:
    """Routes of prompt and response by transformers."""
    with chosen_routes(_transformers(model), shape) as routes:
        _logits(model, request, found)
    return routes()


def _logits(
    model: Path, request: GenerateRequest, found: Generation, heard: bool = False
) -> torch.Tensor:
    """Logits [tokens, vocabulary] of prompt and response by transformers."""
    ids = torch.tensor([[*request.prompt_ids, *found.token_ids]])
    media, rules, theirs = (
        [stored(medium) for medium in request.media],
        Rules.from_model(model),
        _transformers(model),
    )
    given = _given(media, rules, ids)
    if rules.rate:
        given["position_ids"] = _positions(theirs, ids, len(request.prompt_ids), given, heard)
    return theirs(input_ids=ids, attention_mask=torch.ones_like(ids), **given).logits[0].clone()


def _given(media: list[Medium], rules: Rules, ids: torch.Tensor) -> dict[str, Any]:
    """What transformers takes of media."""
    given: dict[str, Any] = {}
    for kind, values, grids in _SEEN:
        if mine := [medium for medium in media if medium.kind is kind]:
            given[values] = torch.from_numpy(
                np.concatenate([patches(medium, rules) for medium in mine])
            )
            given[grids] = torch.tensor([medium.grid for medium in mine])
    if not rules.rate:
        return given | {"mm_token_type_ids": (ids == IMAGE).int() + 2 * (ids == VIDEO).int()}
    if sounds := [
        torch.from_numpy(mel(medium, rules)).t() for medium in media if medium.kind is Kind.AUDIO
    ]:
        pad = functools.partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
        given["input_features"] = pad(sounds).transpose(1, 2)
        given["feature_attention_mask"] = pad(
            [torch.ones(len(sound), dtype=torch.long) for sound in sounds]
        )
    videos = [medium for medium in media if medium.kind is Kind.VIDEO]
    return given | {"video_second_per_grid": torch.tensor([medium.seconds[1] for medium in videos])}


def _positions(
    model: Any, ids: torch.Tensor, prompt: int, given: dict[str, Any], heard: bool
) -> torch.Tensor:
    """Transformers' positions of a prompt, and those behind it: it would take each token that
    begins a sound, sampled ones too, for one."""
    mask = given.get("feature_attention_mask")
    about = (
        given.get("image_grid_thw"),
        given.get("video_grid_thw"),
        torch.ones(1, prompt, dtype=torch.long),
        heard,
    )
    lengths = None if mask is None else mask.sum(1)
    found, _ = model.get_rope_index(
        ids[:, :prompt], *about, lengths, given["video_second_per_grid"]
    )
    behind = found.max() + 1 + torch.arange(ids.shape[1] - prompt)
    return torch.cat([found, behind.expand(3, 1, -1)], dim=2)
