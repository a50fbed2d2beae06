"""Settings and findings that several tests of `relax-hpc check` use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.base.fields import FIELDS
from relax_hpc.config import load
from relax_hpc.ops.checks.settings import check
from tests.helpers.run_helpers import QUICKSTART


def model_findings(path: Path, **overrides: Any) -> list[str]:
    return check(
        load([QUICKSTART], {"run_dir": str(path / "run"), "model.path": str(path)} | overrides)
    )


@pytest.fixture(autouse=True)
def same_fields() -> Iterator[None]:
    """What a configuration declares is known to all of a process."""
    fields = dict(FIELDS)
    yield
    FIELDS.clear()
    FIELDS.update(fields)


EXPERTS = {
    "model.tiny.num_experts": 4,
    "model.tiny.tie_word_embeddings": False,
    "model.routing_replay": "on",
}
SEEING_EXPERTS = EXPERTS | {"model.tiny.vision_layers": 2, "model.tiny.moe_intermediate_size": 48}
