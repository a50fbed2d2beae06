"""The engine in this process: its draws, keyed and by the distribution that is left, and its
device."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from tests.requirements import requires

requires("torch")

import torch  # noqa: E402

from relax_hpc.base.errors import ConfigError  # noqa: E402
from relax_hpc.base.versions import Version  # noqa: E402
from relax_hpc.rollout.engines import make_engine  # noqa: E402
from relax_hpc.rollout.engines.engine import GenerateRequest, Sampling  # noqa: E402
from relax_hpc.rollout.engines.seeded_draws import keyed_uniform, sample_token  # noqa: E402
from tests.helpers.engine_helpers import error_against, make_config, make_model  # noqa: E402


def test_uniforms_are_keyed_and_uniform() -> None:
    values = [
        keyed_uniform(0, "p", sample, position) for sample in range(50) for position in range(40)
    ]
    assert len(set(values)) == 2000
    assert keyed_uniform(0, "p", 1, 2) == values[42]
    assert np.histogram(values, bins=10, range=(0, 1))[0].min() > 150


def sampling(**how: object) -> Sampling:
    return Sampling(**{"temperature": 1.0, "top_p": 1.0, "stop_token_ids": (), "seed": 5} | how)


def test_sampled_tokens_follow_the_distribution_and_top_p() -> None:
    logits = torch.log(torch.tensor([0.5, 0.05, 0.3, 0.15]))
    points = (np.arange(1000) + 0.5) / 1000

    def counts(**how: float) -> list[int]:
        drawn = [sample_token(logits, sampling(**how), u) for u in points]
        found = np.bincount([token for token, _ in drawn], minlength=4)
        share = found / 1000
        assert all(
            logprob == pytest.approx(np.log(share[token]), abs=2e-3) for token, logprob in drawn
        ), "of its own"
        return found.tolist()

    assert counts() == [500, 50, 300, 150]
    assert counts(top_p=0.79) == counts(top_k=2) == counts(min_p=0.5) == [625, 0, 375, 0]
    assert counts(top_p=0.9, top_k=3, min_p=0.05) == counts(top_p=0.81) == [526, 0, 316, 158]
    assert counts(top_p=0.1) == counts(top_k=1) == counts(min_p=1.0) == [1000, 0, 0, 0]
    assert sample_token(logits, sampling(temperature=0.0, top_k=2), 0.99) == (
        0,
        pytest.approx(np.log(0.5), abs=1e-6),
    )


def test_the_engine_runs_on_its_device_or_refuses(tmp_path: Path) -> None:
    """It ran on a CPU in silence, whatever it was given."""
    models, prompt = (
        [make_model(tmp_path / f"model-{seed}", seed) for seed in range(2)],
        (1, 3, 9, 2, 7),
    )
    request = GenerateRequest(prompt, "p", 0, sampling(), 8)
    config = make_config("transformers")
    config.model.device = "cuda"
    engine = make_engine(config, 1, models[0], Version(3, 0), models[0], local_number=0)

    async def scene() -> str:
        try:
            await engine.start()
        except ConfigError as error:
            return str(error)
        assert error_against(models[0], prompt, await engine.generate(request)) < 1e-3
        found = str(engine._model.device)
        await engine.release()
        assert str(engine._model.device) == "cpu"
        await engine.update_weights(models[1], Version(3, 1))
        assert str(engine._model.device) == found
        return found

    said = asyncio.run(scene())
    here = (
        "cuda:0"
        if torch.cuda.is_available()
        else "model.device: the transformers engine cannot run on cuda:0: "
    )
    assert said.startswith(here)
