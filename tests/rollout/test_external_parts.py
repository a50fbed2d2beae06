"""Parts of external engines: versions in the run directory, and answers that are no answers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.base.versions import Version
from relax_hpc.data.generation import GenerateRequest, Sampling
from relax_hpc.rollout.engines.engine import BadAnswer
from relax_hpc.rollout.engines.sglang.stream import StreamedResponse
from relax_hpc.rollout.external.preflight import (
    RequiredFlags,
    check_flags,
    vocabulary_size,
)
from relax_hpc.rollout.external.shared_versions import SharedVersions
from relax_hpc.service.relay import EngineAwayError, MemberConnection, pack, unpack

VERSION = Version(1, 3)


def test_a_version_stays_while_an_engine_loads_it(tmp_path: Path) -> None:
    staged = tmp_path / "staged"
    staged.mkdir()
    (staged / "config.json").write_text("{}")

    async def play() -> None:
        shared = SharedVersions(tmp_path / "external")
        async with shared.published(staged, Version(1, 1)) as slow:
            for number in (2, 3, 4):
                async with shared.published(staged, Version(1, number)):
                    assert (slow / "config.json").exists()
        async with shared.published(staged, Version(1, 5)):
            names = sorted(path.name for path in shared.root.iterdir())
            assert names == [str(Version(1, 4)), str(Version(1, 5))]

    asyncio.run(play())


@pytest.mark.parametrize("tokens", [[5, 100], [-1], ["5"], [2.0], [True], "5", 7])
def test_tokens_that_the_model_does_not_have_are_refused(tokens: Any) -> None:
    async def play() -> None:
        request = GenerateRequest((1, 2), "prompt", 0, Sampling(1.0, 1.0, (), 0), 8)
        response = StreamedResponse(request, VERSION, None, vocabulary=100)
        meta = {
            "output_token_logprobs": [[-1.0, 5, None], [-1.0, 100, None]],
            "finish_reason": None,
            "weight_version": str(VERSION),
        }
        response.add({"output_ids": tokens, "meta_info": meta})
        with pytest.raises(BadAnswer):
            await response.answer

    asyncio.run(play())


def test_the_number_of_token_ids_is_that_of_the_model(tmp_path: Path) -> None:
    assert vocabulary_size(tmp_path) == 0
    for text, size in (
        ('{"vocab_size": 9}', 9),
        ('{"text_config": {"vocab_size": 8}}', 8),
        ("[]", 0),
        ("{", 0),
    ):
        (tmp_path / "config.json").write_text(text)
        assert vocabulary_size(tmp_path) == size


def test_a_seed_may_be_anything() -> None:
    required = RequiredFlags(
        dtype="float32",
        max_stream_interval=64,
        forbids_cache=False,
        returns_routes=False,
        taken_seeds=frozenset((1,)),
        min_context_tokens=1,
    )
    info = {"incremental_streaming_output": True, "stream_interval": 8, "dtype": "float32"}
    seeds: list[Any] = [[], {}, None, "1", 2]
    for seed in seeds:
        check_flags(info | {"random_seed": seed}, required)


class Socket:
    """Websocket of a member that answers each request with given messages."""

    def __init__(self, *answers: dict[str, Any]) -> None:
        self._answers = answers
        self.connection = MemberConnection(self)  # type: ignore[arg-type]  # only send_bytes
        self.cancelled = 0

    async def send_bytes(self, data: bytes) -> None:
        message = unpack(data)
        self.cancelled += message["kind"] == "cancel"
        waiting = self.connection._answers.get(message["number"])
        if waiting and message["kind"] == "request":
            for answer in self._answers:
                waiting.put_nowait(unpack(pack(**answer)))


@pytest.mark.parametrize(
    "answers",
    [
        [{"kind": "head"}],
        [{"kind": "head", "status": "200"}],
        [{"kind": "head", "status": 99}],
        [{"kind": "head", "status": 200}, {"kind": "data", "data": 10**15}],
        [{"kind": "head", "status": 200}, {"kind": "strange"}],
    ],
)
def test_malformed_replies_of_a_member_are_faults_of_its_engine(answers: list[Any]) -> None:
    async def play() -> None:
        socket = Socket(*answers)
        with pytest.raises(EngineAwayError):
            reply = await socket.connection.request("GET", "/health", b"")
            async for _ in socket.connection.read_data(reply.number):
                raise AssertionError("no data")

    asyncio.run(play())
