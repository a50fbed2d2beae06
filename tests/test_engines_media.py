"""Engines that see: what they say of tokens is what transformers says, by the images that they were given."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.requirements import requires

requires("sglang", "torch", "transformers")

import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from relax_hpc.data.media import PromptMedium  # noqa: E402
from relax_hpc.data.tiny_model import EOS_ID  # noqa: E402
from relax_hpc.engines import make_engine  # noqa: E402
from relax_hpc.engines.engine import BadAnswer, Draft, Engine, GenerateRequest, Generation, Sampling  # noqa: E402
from relax_hpc.multimodal.features import patches  # noqa: E402
from relax_hpc.multimodal.medium import Kind  # noqa: E402
from relax_hpc.multimodal.rules import Rules  # noqa: E402
from relax_hpc.tasks.moving_squares import filmed  # noqa: E402
from relax_hpc.transfer_queue.storage.media import MediaStore, placeholders_of  # noqa: E402
from relax_hpc.versions import Version  # noqa: E402
from tests.engine_helpers import make_config  # noqa: E402
from tests.media_helpers import transformers_model  # noqa: E402
from tests.media_prompts import END, IMAGE, START, VIDEO, placed, png, seeing_model, stored  # noqa: E402

pytestmark = pytest.mark.run

CLOSE = 1e-5
"""Difference of log-probabilities in float32 that were summed in other orders."""
NAMES = (
    (Kind.IMAGE, "pixel_values", "image_grid_thw"),
    (Kind.VIDEO, "pixel_values_videos", "video_grid_thw"),
)
SAMPLING, TOKENS = Sampling(1.0, 1.0, (), 0), 8


@dataclass
class Seeing:
    """An engine, the loop it runs in, and the two models that it may serve."""

    engine: Engine
    runner: asyncio.Runner
    models: list[Path]
    store: MediaStore

    def asked(self, *media: bytes | tuple[Kind, bytes], sample: int = 0) -> GenerateRequest:
        """A request with media, which are images unless it is said."""
        named = [one if isinstance(one, tuple) else (Kind.IMAGE, one) for one in media]
        ids, media = placed(self.models[0], self.store, *named)
        return GenerateRequest((*ids, 8 + sample), "p", sample, SAMPLING, TOKENS, media)

    def answers(self, *requests: GenerateRequest) -> list[Generation]:
        async def together() -> list[Generation]:
            return await asyncio.gather(*map(self.engine.generate, requests))

        return self.runner.run(together())


def film(seed: int) -> tuple[Kind, bytes]:
    """A video of four frames."""
    return Kind.VIDEO, filmed(f"film {seed}")[0]


def strong(model: Path) -> Path:
    """``model`` with weights by which the next token depends strongly on all that is before, images included."""
    weights = {name: one * (8 if one.ndim > 1 else 1) for name, one in load_file(model / "model.safetensors").items()}
    weights["model.language_model.embed_tokens.weight"][EOS_ID] = 0
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    return model


@pytest.fixture(scope="module", params=["transformers", "sglang"])
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeing]:
    folder = tmp_path_factory.mktemp(request.param)
    models = [strong(seeing_model(folder / f"m{seed}", seed)) for seed in (0, 1)]
    engine = make_engine(make_config(request.param), 0, models[0], Version(1, 0), folder)
    with asyncio.Runner() as runner:
        runner.run(engine.start())
        yield Seeing(engine, runner, models, MediaStore(folder / "media", durable=False))
        runner.run(engine.close())


@functools.cache
def transformers_of(model: Path) -> Any:
    return transformers_model(model)


@torch.inference_mode()
def error(model: Path, request: GenerateRequest, found: Generation) -> float:
    """Largest difference of log-probabilities to those of transformers, which has no placeholders to choose from."""
    rules, ids = Rules.of(model), torch.tensor([[*request.prompt_ids, *found.token_ids]])
    given: dict[str, Any] = {"mm_token_type_ids": (ids == IMAGE).int() + 2 * (ids == VIDEO).int()}
    for kind, values, grids in NAMES:
        if media := [stored(medium) for medium in request.media if medium.kind is kind]:
            given[values] = torch.from_numpy(np.concatenate([patches(medium, rules) for medium in media]))
            given[grids] = torch.tensor([medium.grid for medium in media])
    logits = transformers_of(model)(input_ids=ids, attention_mask=torch.ones_like(ids), **given).logits[0].clone()
    logits[:, [*placeholders_of(model).values()]] = -torch.inf
    drawn = logits.log_softmax(-1)[len(request.prompt_ids) - 1 : -1].gather(-1, torch.tensor(found.token_ids)[:, None])
    return (drawn[:, 0] - torch.tensor(found.logprobs)).abs().max().item()


def test_rows_with_images_and_without_are_in_flight_at_once(seeing: Seeing) -> None:
    wide, high, small = png(64, 96), png(96, 64, 1), png(32, 32, 2)
    asked = [
        seeing.asked(*images, sample=k)
        for k, images in enumerate(
            [(), (wide,), (high, small), (film(3),), (wide, wide), (film(1), small, film(2)), ()]
        )
    ]
    answers = seeing.answers(*asked)
    for request, answer in zip(asked, answers, strict=True):
        assert error(seeing.models[0], request, answer) < CLOSE
        assert IMAGE not in answer.token_ids
    # The engine looks at the image: by another one the same tokens have other log-probabilities.
    other = replace(asked[1], media=seeing.asked(png(64, 96, 7)).media)
    assert error(seeing.models[0], other, answers[1]) > 0.1


def test_a_response_goes_on_from_its_draft(seeing: Seeing) -> None:
    request = seeing.asked(png(seed=3))
    (whole,) = seeing.answers(request)
    draft = Draft(whole.token_ids[:3], whole.logprobs[:3], whole.token_versions[:3].tolist())
    (rest,) = seeing.answers(replace(request, draft=draft))
    assert rest.token_ids[:3] == whole.token_ids[:3] and error(seeing.models[0], request, rest) < CLOSE


def test_what_a_tower_made_by_older_weights_is_not_used_again(seeing: Seeing) -> None:
    request = seeing.asked(png(seed=4))
    seeing.answers(request)
    for number, model in ((1, seeing.models[1]), (2, seeing.models[0])):
        seeing.runner.run(seeing.engine.update_weights(model, Version(1, number)))
        (answer,) = seeing.answers(request)
        assert error(model, request, answer) < CLOSE


def moved(media: Sequence[PromptMedium], by: int) -> tuple[PromptMedium, ...]:
    return tuple(replace(one, spans=tuple((start + by, length) for start, length in one.spans)) for one in media)


def test_places_that_media_do_not_fit_are_refused_before_anything_is_asked(seeing: Seeing) -> None:
    """SGLang answers the first of these without a word, by wrong tokens."""
    two, one = seeing.asked(png(), png(seed=1)), seeing.asked(png())
    wrong = [
        replace(two, media=two.media[1:]),
        replace(one, media=()),
        replace(one, media=moved(one.media, 1)),
        replace(one, prompt_ids=(*one.prompt_ids, START, IMAGE, END)),
    ]
    for request in wrong:
        with pytest.raises(BadAnswer, match="bad_media"):
            seeing.answers(request)
