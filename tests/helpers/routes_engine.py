"""An engine of one's own whose class declares a field, and gives it token by token."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np

from relax_hpc.base.fields import FieldSpec
from relax_hpc.base.versions import Version
from relax_hpc.rollout.engines.engine import (
    Draft,
    GenerateRequest,
    Generation,
    checked,
    refuse_media,
)

PAUSE_S = 0.02


class RoutesEngine:
    """Counts up from the sample's number, slowly, up to the budget."""

    name, phase, pause_s = "routes", "starting", 0.0
    fields = (
        FieldSpec("routes", "token", "uint8", "experts that were chosen", tail=(2,), loss=True),
    )

    def __init__(
        self, config: object, number: int, model_dir: Path, version: Version, *_: object
    ) -> None:
        self._version = version

    async def start(self) -> None: ...

    async def generate(self, request: GenerateRequest) -> Generation:
        refuse_media(request)
        draft = request.draft or Draft()
        while (count := len(draft.token_versions)) < request.budget:
            await asyncio.sleep(PAUSE_S)
            token = request.sample + count
            draft.add([token], [-1.0], [self._version.encode()], {"routes": routes_of([token])})
        draft.ended = made = replace(draft.suffix(0), finish_reason="length")
        return checked(made, request.budget)

    async def update_weights(self, directory: Path, version: Version) -> None:
        self._version = version

    async def release(self) -> None: ...

    async def wait_dead(self) -> str:
        return await asyncio.get_running_loop().create_future()

    async def close(self) -> None: ...


def routes_of(tokens: list[int]) -> np.ndarray:
    """Of each token two experts: uint8 [tokens, 2]."""
    return np.array([[token % 7, token % 5] for token in tokens], np.uint8)
