"""The engine without a model: reproducible, even draws, at the pace that it is told."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from relax_hpc.base.versions import Version
from relax_hpc.config.schema import Config, TinyModelConfig
from relax_hpc.data.tokenizer import load_tokenizer
from relax_hpc.rollout.engines import make_engine
from relax_hpc.rollout.engines.engine import (
    BadAnswer,
    BatchedEngine,
    Draft,
    EngineFault,
    GenerateRequest,
    Generation,
    Sampling,
)
from relax_hpc.rollout.engines.simulated_engine import SimulatedEngine
from relax_hpc.rollout.engines.stops import Stops, with_stops
from tests.requirements import requires
from tests.rollout.virtual_clock import run_on_a_clock

requires("torch")

SAMPLING = Sampling(temperature=1.0, top_p=1.0, stop_token_ids=(), seed=5)


def ask(key: str, sample: int = 0, budget: int = 40, draft: Draft | None = None) -> GenerateRequest:
    return GenerateRequest((1, 5), key, sample, SAMPLING, budget, draft=draft)


REQUESTS = [ask(f"p{number}", sample) for number in range(50) for sample in range(4)]
OLD, NEW = Version(1, 3), Version(1, 4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from relax_hpc.training.models.tiny_model import make_tiny_model

    directory = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny_model(directory, TinyModelConfig(), 0)
    return directory


async def started(model: Path, timeout_s: float = 120.0, **settings: float) -> SimulatedEngine:
    config = Config()
    config.rollout.engine.kind, config.rollout.engine.request_timeout_s = "simulated", timeout_s
    for name, value in settings.items():
        setattr(config.rollout.engine.simulated, name, value)
    engine = make_engine(config, 0, model, OLD, model)
    await engine.start()
    return engine


async def answers(engine: SimulatedEngine, requests: Sequence[GenerateRequest]) -> list[Generation]:
    return await asyncio.gather(*map(engine.generate, requests))


def drawn(model: Path, requests: Sequence[GenerateRequest] = REQUESTS) -> list[Generation]:
    async def draw() -> list[Generation]:
        return await answers(await started(model), requests)

    return asyncio.run(draw())


def test_draws_are_even_reproducible_and_end_at_end_tokens(model: Path) -> None:
    first, engine = drawn(model), asyncio.run(started(model))
    size, ends = engine._tokenizer.vocab_size, set(engine._tokenizer.eos_ids)
    assert [made.token_ids for made in drawn(model, REQUESTS[::-1])][::-1] == [
        made.token_ids for made in first
    ]
    counts = Counter(token for made in first for token in made.token_ids)
    expected = counts.total() / size
    chi_square = sum((counts[token] - expected) ** 2 / expected for token in range(size))
    assert set(counts) == set(range(size)) and chi_square < size + 5 * math.sqrt(2 * size)
    for made in first:
        assert made.logprobs == [-math.log(size)] * len(made.token_ids)
        assert not ends & set(made.token_ids[:-1])
        assert made.finish_reason == ("stop" if made.token_ids[-1] in ends else "length")
    assert {made.finish_reason for made in first} == {"stop", "length"}


@pytest.mark.parametrize("kept", [1, 7])
def test_it_goes_on_with_what_there_is_of_a_response(model: Path, kept: int) -> None:
    pairs = zip(REQUESTS, drawn(model), strict=True)
    request, whole = next((request, made) for request, made in pairs if len(made.token_ids) > kept)
    older = [Version(1, 2).encode()] * kept
    draft = Draft(whole.token_ids[:kept], whole.logprobs[:kept], list(older))
    [made] = drawn(model, [replace(request, draft=draft)])
    assert (made.token_ids, made.logprobs) == (whole.token_ids, whole.logprobs)
    assert made.token_versions.tolist() == older + [OLD.encode()] * (len(made.token_ids) - kept)
    assert draft.ended is made and draft.token_ids == whole.token_ids[:-1]


def test_a_turn_goes_on_from_what_was_said_whose_texts_end_nothing(model: Path) -> None:
    """Nor do those of turns before; its tokens are other draws than theirs."""

    async def two() -> tuple[Generation, Generation, list[int]]:
        engine = await started(model)
        digits = replace(SAMPLING, stop=("......", *map(str, range(10))))
        request = replace(ask("p4"), sampling=digits, budget=400)
        first = await engine.generate(replace(request, draft=Draft()))
        draft, said = Draft.after_turn(first), engine._tokenizer.encode("4,7", special=False)
        draft.append_observation(said)
        return first, await engine.generate(replace(request, draft=draft)), said

    first, both, said = asyncio.run(two())
    known = len(first.token_ids) + len(said)
    assert both.token_ids[:known] == first.token_ids + said and len(both.token_ids) > known + 1
    assert (np.flatnonzero(both.token_versions == 0) + 1).tolist() == list(
        range(known - len(said) + 1, known + 1)
    )
    assert both.token_ids[known : known + 3] != first.token_ids[:3] and both.finish_reason == "stop"


def test_an_update_is_served_from_the_next_token_on(model: Path) -> None:
    async def updated() -> Generation:
        engine = await started(model, response_s=2.0)
        draft = Draft()
        generating = asyncio.create_task(engine.generate(ask("p0", budget=200, draft=draft)))
        while not draft.token_ids and not generating.done():
            await asyncio.sleep(0)
        await engine.update_weights(model, NEW)
        return await generating

    versions = asyncio.run(updated()).token_versions
    assert set(versions) == {OLD.encode(), NEW.encode()} and (np.diff(versions) >= 0).all()


def test_weights_that_are_not_there_are_refused(model: Path, tmp_path: Path) -> None:
    async def update() -> None:
        await (await started(model)).update_weights(tmp_path, NEW)

    with pytest.raises(EngineFault, match=r"update_failed.*no \*\.safetensors"):
        asyncio.run(update())


def test_times_are_lognormal_around_the_median(model: Path) -> None:
    engine = asyncio.run(started(model, response_s=2.0, sigma=0.5))
    logs = np.log([engine.seconds(ask(str(number))) for number in range(4000)])
    assert np.mean(logs) == pytest.approx(math.log(2.0), abs=0.04) and np.std(
        logs
    ) == pytest.approx(0.5, abs=0.03)
    even = asyncio.run(started(model, response_s=2.0))
    assert {even.seconds(request) for request in REQUESTS} == {2.0}


def test_as_many_are_drawn_at_a_time_as_it_is_told(model: Path) -> None:
    async def most() -> int:
        engine = await started(model, concurrency=3, response_s=0.05)
        requests = [ask(f"p{number}", draft=Draft()) for number in range(9)]
        generating = asyncio.create_task(answers(engine, requests))
        found = 0
        while not generating.done():
            found = max(
                found, sum(bool(r.draft.token_ids) and r.draft.ended is None for r in requests)
            )
            await asyncio.sleep(0)
        return found

    assert asyncio.run(most()) == 3


def test_what_takes_too_long_is_a_fault(model: Path) -> None:
    async def hurried() -> None:
        await answers(await started(model, timeout_s=0.05, response_s=60.0), REQUESTS)

    with pytest.raises(EngineFault, match=r"timeout: no token for 0\.05 s"):
        asyncio.run(hurried())


def test_a_long_response_is_no_silence(model: Path) -> None:
    async def long() -> list[Generation]:
        engine = await started(model, timeout_s=120.0, response_s=3200.0, concurrency=2)
        # The last of them wait for the others for an hour.
        return await answers(engine, REQUESTS[:4])

    assert all(isinstance(made, Generation) for made in run_on_a_clock(long()))


def test_who_gives_up_leaves_its_place_to_the_next(model: Path) -> None:
    async def left() -> list[float]:
        engine, clock = (
            await started(model, concurrency=1, response_s=3200.0),
            asyncio.get_running_loop().time,
        )
        drawing, waiting, last = (
            asyncio.create_task(engine.generate(ask(key))) for key in ("p0", "p1", "p2")
        )
        await asyncio.sleep(10.0)
        for task in (drawing, waiting):
            task.cancel()
        made = await last
        return [clock(), 3200.0 * len(made.token_ids) / 40]

    ended, took = run_on_a_clock(left())
    assert ended == pytest.approx(10.0 + took)


def test_all_of_a_prompt_in_one_call_are_as_one_by_one(model: Path) -> None:
    """Whether they have media, which it does not look at, or not."""

    async def together() -> list[Generation | BadAnswer]:
        engine = await started(model, concurrency=3, response_s=3200.0)
        assert isinstance(engine, BatchedEngine)
        return await engine.generate_all([replace(REQUESTS[0], media=("m",)), *REQUESTS[1:8]])

    found = run_on_a_clock(together())
    assert [made.token_ids for made in found] == [
        made.token_ids for made in drawn(model, REQUESTS[:8])
    ]


def test_who_gives_up_several_leaves_all_their_places(model: Path) -> None:
    async def left() -> list[float]:
        engine, clock = (
            await started(model, concurrency=2, response_s=3200.0),
            asyncio.get_running_loop().time,
        )
        drawing = asyncio.create_task(engine.generate_all([ask(key) for key in ("p0", "p1", "p2")]))
        last = asyncio.create_task(engine.generate(ask("p3")))
        await asyncio.sleep(10.0)
        drawing.cancel()
        return [len((await last).token_ids), clock()]

    count, ended = run_on_a_clock(left())
    assert ended == pytest.approx(10.0 + 3200.0 * count / 40)


def test_the_name_of_a_special_token_ends_a_response_where_it_is_drawn(model: Path) -> None:
    """Responses are decoded without special tokens, so that its text is never found."""
    tokenizer = load_tokenizer(model)
    sampling = with_stops(
        replace(SAMPLING, stop=("a",), stop_token_ids=(2,)), ["<pad>", "b"], tokenizer
    )
    assert (sampling.stop_token_ids, sampling.stop) == ((2, 0), ("a", "b"))
    pad = tokenizer.encode("ab<pad>", special=False, special_tokens=True)
    for texts, ends in ((("<pad>",), True), (("b",), False), (("ab",), False)):
        assert Stops(frozenset(), texts, tokenizer).met(pad[-1:]) is ends
    assert Stops(frozenset(), ("ab",), tokenizer).met(pad[:2])
