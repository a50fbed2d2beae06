"""Media between file and batch: storage by prompt group, spans of rows, features and thumbnails."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from relax_hpc.base.versions import Version
from relax_hpc.config.schema import Config
from relax_hpc.data.media import PromptMedium
from relax_hpc.data.multimodal.bad_media import Reason, UnusableMedium
from relax_hpc.data.multimodal.features import raw_features
from relax_hpc.data.multimodal.medium import Kind, Medium
from relax_hpc.data.multimodal.rules import Rules
from relax_hpc.data.prompts import Prompt
from relax_hpc.data.tokenizer import load_tokenizer
from relax_hpc.ops.observe.sample_page import render_page
from relax_hpc.ops.observe.sample_reading import valid_samples
from relax_hpc.ops.observe.sample_text import lines
from relax_hpc.queue.storage.media import MediaMismatch, MediaStore, check_media
from relax_hpc.roles.media_reader import MediaReader
from relax_hpc.rollout.engines.engine import Episode, EpisodeRow, Generation
from relax_hpc.rollout.media import PromptMedia
from relax_hpc.rollout.rows import rows_of
from relax_hpc.rollout.sample_keeper import SampleKeeper
from relax_hpc.rollout.thumbnails import thumbnail
from tests.helpers.media_prompts import END, IMAGE, START, png, seeing_model

MEDIUM = PromptMedium(Kind.IMAGE, png(), ((2, 4),))
PROMPT = Prompt("p", (1, START, *[IMAGE] * 4, END, 5), "<image>?", "a", media=(MEDIUM,))


@dataclass
class RolloutMedia:
    """Media of a rollout, its store, and the media ids that it registered with the queue."""

    media: PromptMedia
    store: MediaStore
    named: list[tuple[int, list[str]]]
    folder: Path
    runner: asyncio.Runner

    def store_prompt_for_ticket(self, prompt: Prompt, ticket: int = 7) -> Prompt:
        return self.runner.run(self.media.store_prompt_for_ticket(prompt, ticket))

    def store_prompt_for_evaluation(self, prompt: Prompt) -> Prompt:
        return self.runner.run(self.media.store_prompt_for_evaluation(prompt))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return seeing_model(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture
def stored(model: Path, tmp_path: Path) -> Iterator[RolloutMedia]:
    named: list[tuple[int, list[str]]] = []

    def register_media(ticket: int, ids: list[str]) -> Future[bool]:
        named.append((ticket, ids))
        answer: Future[bool] = Future()
        answer.set_result(True)
        return answer

    store = MediaStore(tmp_path / "media", durable=False)
    client: Any = SimpleNamespace(
        config=Config(), media=store, tickets=SimpleNamespace(register_media=register_media)
    )
    with asyncio.Runner() as runner:
        media = PromptMedia(client, model, tmp_path / "evaluations")
        yield RolloutMedia(media, store, named, tmp_path, runner)
        runner.run(media.close())


def answer(*tokens: int) -> Generation:
    versions = np.full(len(tokens), Version(1, 0).encode(), np.int32)
    return Generation([*tokens], [-1.0] * len(tokens), versions, "stop")


def test_a_medium_is_stored_once_for_all_rows_of_its_prompt_group(stored: RolloutMedia) -> None:
    prompt = stored.store_prompt_for_ticket(PROMPT)
    (media_id,) = stored.store.sizes()
    assert stored.named == [(7, [media_id])]
    rows = rows_of(prompt, 7, {0: answer(9, 2), 1: answer(8, 2)})
    for row in rows:
        assert row["spans"] == [{"kind": "image", "start": 2, "length": 4, "media_id": media_id}]
        assert row["media_tokens"] == {media_id: 4} and check_media(row, {"image": IMAGE}) == 4
    twice = replace(PROMPT, media=(MEDIUM, replace(MEDIUM, spans=((8, 4),))))
    assert len({medium.blob for medium in stored.store_prompt_for_ticket(twice, 8).media}) == 1


def test_media_of_a_reassigned_ticket_are_stored(stored: RolloutMedia, monkeypatch: Any) -> None:
    refused: Future[bool] = Future()
    refused.set_result(False)
    monkeypatch.setattr(stored.media._client.tickets, "register_media", lambda *_: refused)
    (medium,) = stored.store_prompt_for_ticket(PROMPT).media
    assert medium.blob and medium.blob.exists()


def test_only_rows_that_begin_with_the_prompt_have_its_media(stored: RolloutMedia) -> None:
    prompt = stored.store_prompt_for_ticket(PROMPT)
    episode = Episode(
        [EpisodeRow((*prompt.token_ids, 6, 6), answer(9)), EpisodeRow((1, 5, 5), answer(9))]
    )
    with_prompt, compacted = rows_of(prompt, 7, {0: episode})
    assert len(with_prompt["spans"]) == 1 and compacted["spans"] == []


def test_evaluations_have_a_separate_store(stored: RolloutMedia) -> None:
    prompt = stored.store_prompt_for_evaluation(PROMPT)
    assert not stored.named and not stored.store.sizes()
    assert prompt.media[0].blob and prompt.media[0].blob.parent == stored.folder / "evaluations"
    text = Prompt("t", (1, 5), "?", "a")
    assert stored.store_prompt_for_evaluation(text) is text


def test_unusable_media_have_a_reason(stored: RolloutMedia) -> None:
    def reason_of(medium: PromptMedium) -> str:
        with pytest.raises((UnusableMedium, MediaMismatch)) as raised:
            stored.store_prompt_for_ticket(replace(PROMPT, media=(medium,)))
        return raised.value.reason

    assert reason_of(replace(MEDIUM, source=png()[:200])) in ("truncated", "corrupted")
    assert reason_of(replace(MEDIUM, source=Path("/nowhere.png"))) == "missing_file"
    # The file has changed between the index and decoding.
    assert reason_of(replace(MEDIUM, source=png(96, 96))) == "media_mismatch"
    missing = Prompt("p", (), "", "", media_error=UnusableMedium(Reason.MISSING, "a.png"))
    with pytest.raises(UnusableMedium, match="missing_file"):
        stored.store_prompt_for_ticket(missing)
    stored.media._client.config.queue.max_medium_bytes = 100
    assert reason_of(MEDIUM) == "media_too_large"
    assert not stored.named and not stored.store.sizes()


def test_expected_media_are_decoded_ahead(stored: RolloutMedia) -> None:
    prompts = []
    for number in range(3):
        (stored.folder / f"{number}.png").write_bytes(png(seed=number))
        prompts.append(
            replace(PROMPT, media=(replace(MEDIUM, source=stored.folder / f"{number}.png"),))
        )
    ahead, size = stored.media._ahead, 64 * 64 * 3

    async def expect(*numbers: int, max_bytes: int = 1_000_000) -> None:
        ahead.max_bytes = max_bytes
        stored.media.expect(prompts[number] for number in numbers)
        async with asyncio.timeout(60):
            while ahead.bytes < min(len(numbers) * size, max_bytes) or ahead._working:
                await asyncio.wait(ahead._working)

    stored.runner.run(expect(0, 1))
    # No ticket has registered the media yet. They stay in the store as
    # long as a ticket may still arrive.
    assert len(stored.store.sizes()) == 2 and not stored.named
    for path in stored.folder.glob("*.png"):
        path.unlink()
    assert stored.store_prompt_for_ticket(prompts[1]).media[0].blob
    assert len(stored.named) == 1
    # A prompt that was taken is no longer held, and an unusable medium fails its own prompt.
    for number in (1, 2):
        stored.runner.run(expect(0, max_bytes=1))
        stored.media.expect([prompts[number]])
        with pytest.raises(UnusableMedium, match="missing_file"):
            stored.store_prompt_for_ticket(prompts[number])
    assert stored.store_prompt_for_ticket(prompts[0]).media[0].blob

    async def withdraw() -> None:
        for expected in ([PROMPT, prompts[0]], [], []):
            stored.media.expect(expected)

    stored.runner.run(withdraw())
    assert not ahead.bytes and not ahead._started


def test_the_reader_returns_features_and_positions_for_the_tower(
    stored: RolloutMedia, model: Path
) -> None:
    prompt = stored.store_prompt_for_ticket(PROMPT)
    (row,) = rows_of(prompt, 7, {0: answer(9, 2)})
    reader = MediaReader(lambda: stored.store, model)
    batch = reader.read([row, row, {"token_ids": [1], "spans": []}])
    assert batch
    ((media_id, medium_input),) = batch.inputs.items()
    assert medium_input.tokens == 4 and medium_input.grid == (1, 4, 4)
    medium = Medium.from_bytes(stored.store.read(media_id))
    assert (medium_input.values == raw_features(medium, Rules.from_model(model))).all()
    heights, widths = [2, 2, 3, 3], [2, 3, 2, 3]
    expected = [[0, 1, *axis, 4, 5, 6, 7] for axis in ([2] * 4, heights, widths)]
    assert batch.positions(row).tolist() == expected
    assert reader.read([{"token_ids": [1], "spans": []}]) is None


def test_samples_show_thumbnails_of_their_media(stored: RolloutMedia, model: Path) -> None:
    prompt = stored.store_prompt_for_ticket(PROMPT)
    kept: list[Any] = []
    log: Any = SimpleNamespace(keep=lambda samples, step=None: kept.extend(samples))
    config = Config()
    keeper = SampleKeeper(log, config, load_tokenizer(model), stored.store.folder)
    last = config.prompts_per_step - 1
    keeper.put([row | {"reward": 1.0} for row in rows_of(prompt, last, {0: answer(9, 2)})], "shard")
    (sample,) = valid_samples(kept)
    (medium,) = sample["media"]
    assert medium["about"] == "64 x 64"
    picture = Image.open(io.BytesIO(base64.b64decode(medium["picture"].partition(",")[2])))
    assert picture.format == "JPEG" and picture.size == (64, 64)
    assert "image    64 x 64" in list(lines(sample | {"fate": "trained"}, 80, lambda text, _: text))
    text = render_page({"run": "r", "left_out": ""}, [sample])
    assert medium["picture"] in text and "img-src data:" in text
    # A user can edit files of a run directory, so values that are not media are left out.
    assert "media" not in next(valid_samples([sample | {"media": ["x", {"kind": 1}]}]))


def test_thumbnails_of_videos_and_sounds() -> None:
    video = Medium(Kind.VIDEO, np.zeros((5, 32, 400, 3), np.uint8), (3, 2, 25), (0.0, 1.0, 2.0))
    summary = thumbnail(video)
    picture = Image.open(io.BytesIO(base64.b64decode(summary["picture"].partition(",")[2])))
    assert summary["about"] == "400 x 32, 5 frames" and max(picture.size) <= 96
    beep = np.zeros(9600, np.int16)
    beep[:4800:2] = 16384
    summary = thumbnail(Medium(Kind.AUDIO, beep, (1, 1, 60)))
    picture = np.asarray(
        Image.open(io.BytesIO(base64.b64decode(summary["picture"].partition(",")[2]))).convert("L")
    )
    dark = (picture < 128).mean(0)
    assert summary["about"] == "9600 samples"
    # The first half has half of the maximum amplitude, and the second half is silent.
    assert dark[:44] == pytest.approx(0.5, abs=0.1) and (dark[52:] < 0.1).all()
