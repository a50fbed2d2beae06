"""Engines with images, videos and sounds: their log-probabilities are those of transformers."""

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
from tests.rollout.showing_environments import Showing, Torn, play_with_media  # noqa: E402
from tests.videos.make import VIDEOS  # noqa: E402

pytestmark = pytest.mark.run

NEW = Version(1, 1)


@pytest.fixture(scope="module", params=["transformers", "sglang"])
def seeing(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MediaEngine]:
    with MediaEngine.started(
        request.param, tmp_path_factory.mktemp(request.param), caches=True
    ) as engine:
        yield engine


@pytest.mark.parametrize("kind", ["transformers", "sglang"])
def test_requests_with_sounds_images_videos_and_text_run_together(
    kind: str, tmp_path: Path
) -> None:
    """The result for a sound does not depend on longer sounds in the same batch. SGLang's own
    positions are wrong for two sounds and an image."""
    with MediaEngine.started(kind, tmp_path, HEARING) as hearing:
        media_of_requests = [
            (),
            (noise(0.4),),
            (noise(2.3, 1),),
            (png(64, 96),),
            (film(3),),
            (noise(1.3, 2), png(32, 64), noise(1.6, 3)),
            (png(seed=1), film(1), noise(1.1, 4), film(2)),
            (noise(0.63, 5),),
        ]
        requests = [
            hearing.asked(*media, sample=number) for number, media in enumerate(media_of_requests)
        ]
        answers = hearing.answers(*requests)
        assert [
            error(hearing.models[0], *pair) < CLOSE for pair in zip(requests, answers, strict=True)
        ] == [True] * 8
        # A video with sound: tokens of frames and of sound alternate.
        talking = Kind.VIDEO, (VIDEOS / "h264.mp4").read_bytes()
        with_sound = [
            hearing.asked(*media, heard=True)
            for media in ((talking,), (png(seed=2), talking, noise(1.2, 6)))
        ]
        answers_heard = hearing.answers(*with_sound, requests[6])
        for request, answer in zip(with_sound, answers_heard, strict=False):
            kinds = [medium.kind for medium in request.media]
            assert kinds.count(Kind.AUDIO) == 1 + kinds.count(Kind.IMAGE)
            assert error(hearing.models[0], request, answer, heard=True) < CLOSE
        changed = replace(requests[2], media=hearing.asked(noise(2.3, 7)).media)
        assert error(hearing.models[0], changed, answers[2]) > 1000 * CLOSE
        hearing.runner.run(
            hearing.engine.update_weights(add_untrained_tensors(hearing.models[1]), Version(1, 1))
        )
        updated_answers = hearing.answers(*requests)
        assert (
            max(
                error(hearing.models[1], *pair)
                for pair in zip(requests, updated_answers, strict=True)
            )
            < CLOSE
        )


@pytest.mark.parametrize("kind", ["transformers", "sglang"])
def test_models_with_experts_read_images_and_report_routes(kind: str, tmp_path: Path) -> None:
    """The engine loads published files, whose experts are stacked and transposed, and then a slab with
    one tensor per expert. Tokens of images have routes like those of text."""
    shape = RouteShape(
        SEEING_EXPERTS.num_layers, SEEING_EXPERTS.num_experts, SEEING_EXPERTS.num_experts_per_tok
    )
    with MediaEngine.started(kind, tmp_path, SEEING_EXPERTS, routes=kind == "sglang") as seeing:
        media_of_requests = [
            (),
            (png(64, 96),),
            (png(96, 64, 1), png(32, 32, 2)),
            (film(3), png(seed=4)),
            (),
        ]
        requests = [
            seeing.asked(*media, sample=number) for number, media in enumerate(media_of_requests)
        ]
        slab = make_slab(split_experts(seeing.models[1], tmp_path / "pieces"), NEW, tmp_path)
        versions = [None, seeing.models[1], slab]
        for number, directory in enumerate(versions):
            if directory:
                seeing.runner.run(
                    seeing.engine.update_weights(directory, replace(NEW, number=number))
                )
            model = seeing.models[min(number, 1)]
            for request, answer in zip(requests, seeing.answers(*requests), strict=True):
                assert error(model, request, answer) < CLOSE
                if kind == "sglang":
                    routes = np.concatenate([answer.before[NAME], answer.extras[NAME]])
                    expected = own_routes(model, request, answer, shape)
                    assert (np.sort(routes, 2) == np.sort(expected, 2)).all()


def add_untrained_tensors(model: Path) -> Path:
    """``model`` with a file of tensors that are not trained, as a published version has it."""
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


def split_experts(model: Path, folder: Path) -> Path:
    """A copy of ``model`` with one tensor per expert."""
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


def test_engines_read_the_media_of_each_turn_as_the_row_has_them(
    seeing: MediaEngine, tmp_path: Path
) -> None:
    """Keys and values of earlier turns are reused. A truncated image fails the episode."""
    prompt, episode = play_with_media(seeing, tmp_path, Showing)
    assert isinstance(episode, Episode) and episode.finish_reason == "env_done", episode
    (row,) = episode.rows
    assert (
        len(row.turns) == 4
        and len(row.media) == 5
        and error_of_turns(seeing.models[0], row) < CLOSE
    )
    (stored,) = rows_of(prompt, 7, {0: episode})
    assert check_media(stored, read_placeholders(seeing.models[0])) == sum(
        medium.tokens for medium in row.media
    )
    _, failure = play_with_media(seeing, tmp_path, Torn)
    assert (
        isinstance(failure, BadAnswer)
        and failure.reason == "environment_answer"
        and "truncated" in str(failure)
    )


def test_requests_with_and_without_images_run_together(seeing: MediaEngine) -> None:
    wide, high, small = png(64, 96), png(96, 64, 1), png(32, 32, 2)
    requests = [
        seeing.asked(*images, sample=k)
        for k, images in enumerate(
            [(), (wide,), (high, small), (film(3),), (wide, wide), (film(1), small, film(2)), ()]
        )
    ]
    answers = seeing.answers(*requests)
    for request, answer in zip(requests, answers, strict=True):
        assert error(seeing.models[0], request, answer) < CLOSE
        assert IMAGE not in answer.token_ids
    # With another image, the same tokens have other log-probabilities.
    changed = replace(requests[1], media=seeing.asked(png(64, 96, 7)).media)
    assert error(seeing.models[0], changed, answers[1]) > 0.1


def test_a_response_with_media_continues_from_its_draft(seeing: MediaEngine) -> None:
    request = seeing.asked(png(seed=3))
    (whole,) = seeing.answers(request)
    draft = Draft(whole.token_ids[:3], whole.logprobs[:3], whole.token_versions[:3].tolist())
    (continued,) = seeing.answers(replace(request, draft=draft))
    assert (
        continued.token_ids[:3] == whole.token_ids[:3]
        and error(seeing.models[0], request, continued) < CLOSE
    )


def test_embeddings_of_images_by_older_weights_are_not_reused(seeing: MediaEngine) -> None:
    request = seeing.asked(png(seed=4))
    seeing.answers(request)
    for number, model in ((1, seeing.models[1]), (2, seeing.models[0])):
        seeing.runner.run(seeing.engine.update_weights(model, Version(1, number)))
        (answer,) = seeing.answers(request)
        assert error(model, request, answer) < CLOSE


def shift_spans(media: Sequence[PromptMedium], offset: int) -> tuple[PromptMedium, ...]:
    return tuple(
        replace(medium, spans=tuple((start + offset, length) for start, length in medium.spans))
        for medium in media
    )


def test_spans_that_do_not_fit_the_media_are_refused_before_generation(
    seeing: MediaEngine,
) -> None:
    """SGLang answers the first request with wrong tokens and no error."""
    double, single = seeing.asked(png(), png(seed=1)), seeing.asked(png())
    wrong = [
        replace(double, media=double.media[1:]),
        replace(single, media=()),
        replace(single, media=shift_spans(single.media, 1)),
        replace(single, prompt_ids=(*single.prompt_ids, START, IMAGE, END)),
    ]
    for request in wrong:
        with pytest.raises(BadAnswer, match="bad_media"):
            seeing.answers(request)
