"""Engines that see, and hear: what they say of tokens is what transformers says, by the media that
they were given."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.requirements import requires

requires("sglang", "torch", "transformers")

import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from relax_hpc.base.routes import NAME, RouteShape  # noqa: E402
from relax_hpc.base.versions import Version  # noqa: E402
from relax_hpc.data.media import PromptMedium  # noqa: E402
from relax_hpc.data.multimodal.medium import Kind  # noqa: E402
from relax_hpc.queue.storage.media import check_media, read_placeholders  # noqa: E402
from relax_hpc.rollout.engines.engine import BadAnswer, Draft, Episode  # noqa: E402
from relax_hpc.rollout.rows import rows_of  # noqa: E402
from relax_hpc.training.models.families import spec_from_config  # noqa: E402
from relax_hpc.training.models.hf_files import read_config  # noqa: E402
from relax_hpc.training.models.stored_pieces import split_into_pieces  # noqa: E402
from relax_hpc.training.weights.version_files import copy_small  # noqa: E402
from tests.helpers.engine_helpers import make_slab  # noqa: E402
from tests.helpers.media_engine import (  # noqa: E402
    CLOSE,
    SEEING_EXPERTS,
    MediaEngine,
    error,
    error_of_turns,
    film,
    noise,
    own_routes,
)
from tests.helpers.media_prompts import END, HEARING, IMAGE, START, png  # noqa: E402
from tests.rollout.showing_environments import Showing, Torn, shown  # noqa: E402
from tests.videos.make import VIDEOS  # noqa: E402

pytestmark = pytest.mark.run

NEW = Version(1, 1)


@pytest.fixture(scope="module", params=["transformers", "sglang"])
def seeing(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MediaEngine]:
    with MediaEngine.started(
        request.param, tmp_path_factory.mktemp(request.param), caches=True
    ) as found:
        yield found


@pytest.mark.parametrize("kind", ["transformers", "sglang"])
def test_sounds_images_videos_and_texts_are_in_flight_at_once(kind: str, tmp_path: Path) -> None:
    """A sound alone is the same beside longer ones; two of them beside an image have SGLang's own
    positions fail."""
    with MediaEngine.started(kind, tmp_path, HEARING) as hearing:
        named = [
            (),
            (noise(0.4),),
            (noise(2.3, 1),),
            (png(64, 96),),
            (film(3),),
            (noise(1.3, 2), png(32, 64), noise(1.6, 3)),
            (png(seed=1), film(1), noise(1.1, 4), film(2)),
            (noise(0.63, 5),),
        ]
        asked = [hearing.asked(*media, sample=number) for number, media in enumerate(named)]
        answers = hearing.answers(*asked)
        assert [
            error(hearing.models[0], *pair) < CLOSE for pair in zip(asked, answers, strict=True)
        ] == [True] * 8
        # A video that is heard as well: its frames and its sound are there by turns.
        talking = Kind.VIDEO, (VIDEOS / "h264.mp4").read_bytes()
        heard = [
            hearing.asked(*media, heard=True)
            for media in ((talking,), (png(seed=2), talking, noise(1.2, 6)))
        ]
        answers_heard = hearing.answers(*heard, asked[6])
        for request, answer in zip(heard, answers_heard, strict=False):
            kinds = [medium.kind for medium in request.media]
            assert kinds.count(Kind.AUDIO) == 1 + kinds.count(Kind.IMAGE)
            assert error(hearing.models[0], request, answer, heard=True) < CLOSE
        other = replace(asked[2], media=hearing.asked(noise(2.3, 7)).media)
        assert error(hearing.models[0], other, answers[2]) > 1000 * CLOSE
        hearing.runner.run(
            hearing.engine.update_weights(speaking(hearing.models[1]), Version(1, 1))
        )
        again = hearing.answers(*asked)
        assert (
            max(error(hearing.models[1], *pair) for pair in zip(asked, again, strict=True)) < CLOSE
        )


@pytest.mark.parametrize("kind", ["transformers", "sglang"])
def test_experts_see_and_say_who_they_were(kind: str, tmp_path: Path) -> None:
    """Started and updated from files as published, experts turned around, and by memory, where they
    lie one by one. Tokens of images have routes like those of text."""
    shape = RouteShape(
        SEEING_EXPERTS.num_layers, SEEING_EXPERTS.num_experts, SEEING_EXPERTS.num_experts_per_tok
    )
    with MediaEngine.started(kind, tmp_path, SEEING_EXPERTS, routes=kind == "sglang") as seeing:
        named = [(), (png(64, 96),), (png(96, 64, 1), png(32, 32, 2)), (film(3), png(seed=4)), ()]
        asked = [seeing.asked(*media, sample=number) for number, media in enumerate(named)]
        slab = make_slab(in_pieces(seeing.models[1], tmp_path / "pieces"), NEW, tmp_path)
        versions = [None, seeing.models[1], slab]
        for number, directory in enumerate(versions):
            if directory:
                seeing.runner.run(
                    seeing.engine.update_weights(directory, replace(NEW, number=number))
                )
            model = seeing.models[min(number, 1)]
            for request, answer in zip(asked, seeing.answers(*asked), strict=True):
                assert error(model, request, answer) < CLOSE
                if kind == "sglang":
                    routes = np.concatenate([answer.before[NAME], answer.extras[NAME]])
                    expected = own_routes(model, request, answer, shape)
                    assert (np.sort(routes, 2) == np.sort(expected, 2)).all()


def speaking(model: Path) -> Path:
    """``model`` with a file of what is not trained, as versions have it."""
    talker = {
        "talker.model.layers.0.mlp.experts.0.up_proj.weight": torch.ones(2, 3),
        "code2wav.bias": torch.ones(5),
    }
    save_file(talker, model / "model-00002-of-00002.safetensors")
    trained = (model / "model.safetensors").rename(model / "model-00001-of-00002.safetensors")
    owner = dict.fromkeys(load_file(trained), trained.name) | dict.fromkeys(
        talker, "model-00002-of-00002.safetensors"
    )
    index = {"metadata": {}, "weight_map": owner}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    return model


def in_pieces(model: Path, folder: Path) -> Path:
    """``model`` with experts one by one."""
    folder.mkdir()
    copy_small(model, folder)
    spec, tensors = spec_from_config(read_config(model)), load_file(model / "model.safetensors")
    pieces, _ = split_into_pieces(
        spec, tensors, {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    )
    save_file(
        {name: piece[:].contiguous() for name, piece in pieces.items()},
        folder / "model.safetensors",
    )
    return folder


def test_what_engines_see_in_each_turn_is_what_the_row_has(
    seeing: MediaEngine, tmp_path: Path
) -> None:
    """Also by the keys and values of the turns before; half of an image costs its episode."""
    prompt, made = shown(seeing, tmp_path, Showing)
    assert isinstance(made, Episode) and made.finish_reason == "env_done", made
    (row,) = made.rows
    assert (
        len(row.turns) == 4
        and len(row.media) == 5
        and error_of_turns(seeing.models[0], row) < CLOSE
    )
    (stored,) = rows_of(prompt, 7, {0: made})
    assert check_media(stored, read_placeholders(seeing.models[0])) == sum(
        medium.tokens for medium in row.media
    )
    _, torn = shown(seeing, tmp_path, Torn)
    assert (
        isinstance(torn, BadAnswer)
        and torn.reason == "environment_answer"
        and "truncated" in str(torn)
    )


def test_rows_with_images_and_without_are_in_flight_at_once(seeing: MediaEngine) -> None:
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


def test_a_response_goes_on_from_its_draft(seeing: MediaEngine) -> None:
    request = seeing.asked(png(seed=3))
    (whole,) = seeing.answers(request)
    draft = Draft(whole.token_ids[:3], whole.logprobs[:3], whole.token_versions[:3].tolist())
    (rest,) = seeing.answers(replace(request, draft=draft))
    assert (
        rest.token_ids[:3] == whole.token_ids[:3] and error(seeing.models[0], request, rest) < CLOSE
    )


def test_what_a_tower_made_by_older_weights_is_not_used_again(seeing: MediaEngine) -> None:
    request = seeing.asked(png(seed=4))
    seeing.answers(request)
    for number, model in ((1, seeing.models[1]), (2, seeing.models[0])):
        seeing.runner.run(seeing.engine.update_weights(model, Version(1, number)))
        (answer,) = seeing.answers(request)
        assert error(model, request, answer) < CLOSE


def moved(media: Sequence[PromptMedium], by: int) -> tuple[PromptMedium, ...]:
    return tuple(
        replace(one, spans=tuple((start + by, length) for start, length in one.spans))
        for one in media
    )


def test_places_that_media_do_not_fit_are_refused_before_anything_is_asked(
    seeing: MediaEngine,
) -> None:
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
