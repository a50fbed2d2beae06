"""SGLang's routes, as a rollout gets them: of every token those by which it was first read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.requirements import requires

requires("sglang", "torch", "transformers")

from safetensors.torch import load_file, save_file  # noqa: E402

from relax_hpc.base.routes import NAME  # noqa: E402
from relax_hpc.base.versions import Version  # noqa: E402
from relax_hpc.rollout.engines import make_engine  # noqa: E402
from relax_hpc.rollout.engines.engine import Draft, Engine, GenerateRequest, Generation, Sampling  # noqa: E402
from relax_hpc.training.models.hf_files import read_config  # noqa: E402
from relax_hpc.training.models.tiny_tokenizer import EOS_ID  # noqa: E402
from tests.helpers.engine_helpers import make_config, make_slab  # noqa: E402
from tests.helpers.routes_helpers import SHAPE, experts_model, own_routes  # noqa: E402

pytestmark = pytest.mark.run

PROMPT = (1, 5, 9, 4, 7)
LONG = 800
"""Tokens of a response that an update comes into."""
OLD, NEW = Version(1, 0), Version(1, 1)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two, whose routers differ; neither is likely to end a response."""
    found = []
    for number in range(2):
        directory = experts_model(tmp_path_factory.mktemp("model"))
        weights = load_file(directory / "model.safetensors")
        for name, value in weights.items():
            if number and name.endswith("mlp.gate.weight"):
                weights[name] = value.flip(0).contiguous()
        weights["lm_head.weight"] *= 6
        weights["lm_head.weight"][EOS_ID] = 0
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
        config = read_config(directory) | {"max_position_embeddings": 2 * LONG}
        (directory / "config.json").write_text(json.dumps(config))
        found.append(directory)
    return found


@pytest.fixture(scope="module")
def served(
    models: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[asyncio.Runner, Engine]]:
    """It tells of every fourth token, and draws anew what an update comes into."""
    config = make_config("sglang", flags={"stream_interval": 4})
    config.model.routing_replay, config.rollout.partial_rollout = "on", "recompute"
    config.rollout.save_partial = "tokens"
    with asyncio.Runner() as runner:
        engine = make_engine(config, 0, models[0], OLD, tmp_path_factory.mktemp("logs"))
        runner.run(engine.start())
        try:
            yield runner, engine
        finally:
            runner.run(engine.close())


def ask(tokens: int, draft: Draft | None = None) -> GenerateRequest:
    return GenerateRequest(
        PROMPT, "p", 0, Sampling(1.0, 1.0, (), 0), tokens, draft=draft or Draft()
    )


async def until(drawing: asyncio.Task, draft: Draft, tokens: int) -> None:
    """The draft has so many."""
    async with asyncio.timeout(60.0):
        while len(draft.token_ids) < tokens:
            assert not drawing.done(), drawing
            await asyncio.sleep(0.005)


def whole(made: Generation | Draft) -> tuple[np.ndarray, np.ndarray]:
    """Prompt and response, and the routes that there are of these."""
    routes = np.concatenate([made.before[NAME], np.array(made.extras[NAME])])
    return np.array([*PROMPT, *made.token_ids], np.int32), routes


def equal(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """[tokens]: whether the same experts were chosen in every layer, in any order."""
    return (np.sort(one, 2) == np.sort(other, 2)).all((1, 2, 3))


def test_of_each_token_come_the_experts_that_chose_it(served, models) -> None:
    runner, engine = served
    request = ask(21)
    made = runner.run(engine.generate(request))
    ids, routes = whole(made)
    assert SHAPE.find_fault({"token_ids": ids, NAME: routes}) == ""
    assert equal(routes, own_routes(models[0], ids)).all()


def test_who_goes_on_keeps_the_routes_that_the_draft_has(served, models) -> None:
    """What is in a draft has routes, and they stay, though the engine reads its tokens once
    more."""
    runner, engine = served
    draft = Draft()

    async def interrupted() -> Draft:
        drawing = asyncio.create_task(engine.generate(ask(LONG, draft)))
        await until(drawing, draft, 1)
        known = Draft.from_response(draft.snapshot())
        drawing.cancel()
        await asyncio.wait([drawing])
        return known

    known = runner.run(interrupted())
    ids, routes = whole(known)
    assert (
        len(ids) == len(routes)
        and equal(routes, own_routes(models[0], np.array([*ids, 0]))[:-1]).all()
    )
    # Such as the engine would not give.
    marked = replace(known.snapshot(), extras={NAME: np.full_like(known.extras[NAME], 7)})
    made = runner.run(engine.generate(ask(len(known.token_ids) + 9, Draft.from_response(marked))))
    longer, kept = whole(made)
    assert np.array_equal(longer[: len(ids)], ids) and (kept[len(PROMPT) : len(ids)] == 7).all()
    assert equal(kept[len(ids) :], own_routes(models[0], longer)[len(ids) :]).all()


def test_what_others_say_between_turns_has_the_routes_of_who_first_read_it(served, models) -> None:
    """So has the last token of the turn before, with which nothing was fed then."""
    runner, engine = served
    turn = runner.run(engine.generate(ask(9)))
    # Such as the engine would not give.
    draft = Draft.after_turn(replace(turn, extras={NAME: np.full_like(turn.extras[NAME], 7)}))
    draft.append_observation([3, 8, 6])
    made = runner.run(engine.generate(ask(20, draft)))
    ids, routes = whole(made)
    first = len(PROMPT) + len(turn.token_ids) - 1
    assert (
        SHAPE.find_fault({"token_ids": ids[first:], NAME: routes[first:]}) == ""
        and (routes[5:first] == 7).all()
    )
    assert equal(routes[first:], own_routes(models[0], ids)[first:]).all()
    assert len(draft.extras[NAME]) == len(draft.token_ids), "as it draws, it tells of these too"


def test_routes_of_what_was_read_before_an_update_are_those_of_then(served, models) -> None:
    """The server gives up keys and values, reads all once more by the new weights, and says which
    tokens are whose."""
    runner, engine = served

    slab = make_slab(models[1], NEW, models[1].parent)

    async def updated() -> Generation:
        draft = Draft()
        drawing = asyncio.create_task(engine.generate(ask(LONG, draft)))
        await until(drawing, draft, 8)
        await engine.update_weights(slab, NEW)
        return await drawing

    made = runner.run(updated())
    ids, routes = whole(made)
    by_old = int((made.token_versions == OLD.encode()).sum())
    assert 8 <= by_old < LONG
    # The last token of the old weights was first read by the new ones.
    read = len(PROMPT) + by_old - 1
    old, new = (own_routes(model, ids) for model in models)
    assert equal(routes, np.concatenate([old[:read], new[read:]])).all()
    assert not equal(old, new).all()
