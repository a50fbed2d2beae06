"""Workers that decode media: the same results as in this process, and faults that fail one file."""

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
        async def run_with_pool() -> Any:
            pool = MediaPool(RULES, Limits(**limits), 1)
            try:
                return await work(pool)
            finally:
                await pool.close()

        return asyncio.run(run_with_pool())

    return run


def test_a_worker_decodes_the_same_as_this_process(
    with_pool: Callable[..., Any], tmp_path: Path
) -> None:
    movie = avi(clip(20, 64, 96))
    (tmp_path / "file.png").write_bytes(PNG)

    async def work(pool: MediaPool) -> None:
        for kind, source in (
            (Kind.IMAGE, tmp_path / "file.png"),
            (Kind.VIDEO, movie),
            (Kind.IMAGE, PNG),
        ):
            expected, loaded = load(kind, source, RULES), await pool.load(kind, source)
            assert bytes(loaded.blob) == expected.to_bytes() and loaded.media_id == hash_content(
                expected.to_bytes()
            )
            assert loaded.header == expected.header == await pool.header(kind, source)
            assert np.array_equal(loaded.medium.data, expected.data)
        with pytest.raises(UnusableMedium, match=r"missing_file.*gone"):
            await pool.load(Kind.IMAGE, tmp_path / "gone.png")

    with_pool(work)


def test_a_file_that_breaks_its_worker_fails_only_itself(
    with_pool: Callable[..., Any],
) -> None:
    async def work(pool: MediaPool) -> list[str]:
        files = [
            encoded(picture(32, width)) for width in (HANGS, 32, CRASHES, 32, SWELLS, KILLED_TWICE)
        ]
        results = await asyncio.gather(
            *(pool.load(Kind.IMAGE, file) for file in files), return_exceptions=True
        )
        return [
            result.reason if isinstance(result, UnusableMedium) else type(result).__name__
            for result in results
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
