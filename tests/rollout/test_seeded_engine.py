"""The engine in this process: its samples, its deadline, and weights that it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.requirements import requires

requires("torch", "transformers")

from relax_hpc.rollout.engines.engine import EngineFault  # noqa: E402
from relax_hpc.rollout.engines.transformers_engine import load_weights  # noqa: E402
from relax_hpc.training.models.families import spec_from_config  # noqa: E402
from relax_hpc.training.models.hf_files import read_config  # noqa: E402
from tests.helpers.engine_helpers import reference_model  # noqa: E402
from tests.helpers.served_engines import (  # noqa: E402, F401
    Served,
    make_requests,
    models_fixture,
    serve,
    transformers_fixture,
)

pytestmark = pytest.mark.run


def test_samples_of_the_seeded_engine_do_not_depend_on_other_requests(
    transformers: Served,
) -> None:
    together = transformers.generate(*make_requests())
    alone = [transformers.generate(request)[0] for request in reversed(make_requests())][::-1]
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]
    assert [answer.logprobs for answer in together] == [answer.logprobs for answer in alone]


def test_the_seeded_engine_keeps_its_deadline(
    transformers: Served, models: list[Path], tmp_path: Path
) -> None:
    engines = serve("transformers", models, tmp_path, request_timeout_s=1e-6)
    with pytest.raises(EngineFault) as caught:
        next(engines).generate(*make_requests())
    engines.close()
    assert caught.value.reason == "timeout"


def test_weights_with_other_names_are_refused(
    transformers: Served, models: list[Path], tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(models[0] / "model.safetensors")
    weights["model.norm.scale"] = weights.pop("model.norm.weight")
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.norm\.scale, model\.norm\.weight"):
        load_weights(reference_model(models[0]), tmp_path, spec_from_config(read_config(models[0])))
