"""Workers that decode media: what they give is what decoding here gives, and what ends them costs
one file."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_hpc.base.content_id import hash_content
from relax_hpc.data.multimodal.bad_media import UnusableMedium
from relax_hpc.data.multimodal.limits import Limits
from relax_hpc.data.multimodal.loading import load
from relax_hpc.data.multimodal.medium import Kind
from relax_hpc.data.multimodal.pool import MediaPool
from relax_hpc.data.multimodal.rules import Rules
from tests.helpers.media_files import (
    CRASHES,
    HANGS,
    KILLED_TWICE,
    SWELLS,
    avi,
    clip,
    encoded,
    have_own_pillow,
    picture,
)

RULES = Rules(rate=16000)
PNG = encoded(picture(64, 96))


@pytest.fixture
def with_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    have_own_pillow(tmp_path, monkeypatch)

    def run(work: Callable[[MediaPool], Coroutine[Any, Any, Any]], **limits: float) -> Any:
        async def whole() -> Any:
            pool = MediaPool(RULES, Limits(**limits), 1)
            try:
                return await work(pool)
            finally:
                await pool.close()

        return asyncio.run(whole())

    return run


def test_a_worker_gives_what_is_decoded_here(with_pool: Callable[..., Any], tmp_path: Path) -> None:
    movie = avi(clip(20, 64, 96))
    (tmp_path / "file.png").write_bytes(PNG)

    async def work(pool: MediaPool) -> None:
        for kind, source in (
            (Kind.IMAGE, tmp_path / "file.png"),
            (Kind.VIDEO, movie),
            (Kind.IMAGE, PNG),
        ):
            here, there = load(kind, source, RULES), await pool.load(kind, source)
            assert bytes(there.blob) == here.to_bytes() and there.media_id == hash_content(
                here.to_bytes()
            )
            assert there.header == here.header == await pool.header(kind, source)
            assert np.array_equal(there.medium.data, here.data)
        with pytest.raises(UnusableMedium, match=r"missing_file.*gone"):
            await pool.load(Kind.IMAGE, tmp_path / "gone.png")

    with_pool(work)


def test_a_file_that_hangs_kills_or_swells_its_worker_is_bad_alone(
    with_pool: Callable[..., Any],
) -> None:
    async def work(pool: MediaPool) -> list[str]:
        files = [
            encoded(picture(32, width)) for width in (HANGS, 32, CRASHES, 32, SWELLS, KILLED_TWICE)
        ]
        found = await asyncio.gather(
            *(pool.load(Kind.IMAGE, file) for file in files), return_exceptions=True
        )
        return [
            one.reason if isinstance(one, UnusableMedium) else type(one).__name__ for one in found
        ]

    reasons = with_pool(work, time_s=8.0, memory_mb=512)
    assert reasons == [
        "decoder_hung",
        "Loaded",
        "decoder_died",
        "Loaded",
        "decoder_memory",
        "Loaded",
    ]
