"""The contract of engines, checked with a real SGLang server and with the engine in this process."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.requirements import requires

requires("sglang", "torch", "transformers")

import psutil  # noqa: E402
import torch  # noqa: E402

from relax_hpc.base.reward_settings import JudgeSettings, RewardSettings  # noqa: E402
from relax_hpc.base.versions import Version  # noqa: E402
from relax_hpc.cluster.sandbox.processes import command_line  # noqa: E402
from relax_hpc.config.schema import PartialRollout  # noqa: E402
from relax_hpc.data.tokenizer import load_tokenizer  # noqa: E402
from relax_hpc.rewards import RewardError, RewardInput, Scores, get_reward  # noqa: E402
from relax_hpc.rewards.scoring import scores_soon  # noqa: E402
from relax_hpc.rollout.engines.engine import Draft, EngineFault, Generation  # noqa: E402
from relax_hpc.rollout.engines.seeded_draws import cut  # noqa: E402
from relax_hpc.rollout.engines.sglang.client import SglangClient  # noqa: E402
from relax_hpc.training.weights.slab import MARK  # noqa: E402
from tests.helpers.engine_helpers import (  # noqa: E402
    error_against,
    make_config,
    reference_logprobs_in_place,
    reference_logprobs_recomputed,
    reference_model,
    session_of,
)
from tests.helpers.served_engines import (  # noqa: E402, F401
    PROMPTS,
    TOLERANCE,
    Served,
    generate_together,
    make_request,
    make_requests,
    models_fixture,
    served_fixture,
    sglang_fixture,
    sglang_of_two_ranks_fixture,
    transformers_fixture,
)

pytestmark = pytest.mark.run


def test_log_probs_are_those_of_the_model_at_the_temperature(served: Served) -> None:
    requests = make_requests(temperature=0.7)
    answers = served.generate(*requests)
    for request, answer in zip(requests, answers, strict=True):
        assert len(answer.token_ids) == len(answer.logprobs) == len(answer.token_versions) == 8
        assert answer.finish_reason == "length"
        assert (
            error_against(served.model, request.prompt_ids, answer, 0.7)
            < TOLERANCE[served.engine.name]
        )
    assert len({tuple(answer.token_ids) for answer in answers}) > len(PROMPTS)


def test_temperature_zero_takes_the_most_probable_token(served: Served) -> None:
    for prompt, answer in zip(
        PROMPTS, served.generate(*make_requests(temperature=0.0))[::2], strict=True
    ):
        ids = list(prompt)
        for token in answer.token_ids:
            assert token == int(
                reference_model(served.model)(input_ids(ids)).logits[0, -1].argmax()
            )
            ids.append(token)
        assert error_against(served.model, prompt, answer) < TOLERANCE[served.engine.name]


def input_ids(ids: list[int]) -> torch.Tensor:
    return torch.tensor([ids])


def test_a_stop_token_ends_the_response_and_belongs_to_it(served: Served) -> None:
    [whole] = served.generate(make_request(PROMPTS[0], temperature=0.0))
    stop = whole.token_ids[3]
    [cut] = served.generate(make_request(PROMPTS[0], temperature=0.0, stop_token_ids=(stop,)))
    assert cut.finish_reason == "stop"
    assert cut.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]


def test_a_stop_text_ends_the_response_and_belongs_to_it(served: Served) -> None:
    """The tokenizer has one token per character, and the stop text has two tokens."""
    [whole] = served.generate(make_request(PROMPTS[0], temperature=0.0))
    decode = load_tokenizer(served.model).decode
    text = decode(whole.token_ids[2:4])
    assert len(text) == 2 and text not in decode(whole.token_ids[:3]), whole.token_ids
    [cut] = served.generate(make_request(PROMPTS[0], temperature=0.0, stop=("nowhere", text)))
    assert (cut.finish_reason, cut.token_ids) == ("stop", whole.token_ids[:4])


def test_after_an_update_the_new_weights_generate_under_the_new_version(served: Served) -> None:
    old = served.model
    new = served.update()
    for request, answer in zip(make_requests(), served.generate(*make_requests()), strict=True):
        assert answer.token_versions.dtype == np.int32
        assert set(answer.token_versions) == {served.version.encode()}
        assert error_against(new, request.prompt_ids, answer) < TOLERANCE[served.engine.name]
        assert error_against(old, request.prompt_ids, answer) > 0.1


def test_an_update_from_a_missing_folder_is_a_fault_and_the_next_update_works(
    served: Served,
) -> None:
    with pytest.raises(EngineFault) as caught:
        served.runner.run(served.engine.update_weights(Path("/nonexistent"), Version(9, 9)))
    assert caught.value.reason == "update_failed"
    served.update()
    for answer in served.generate(*make_requests()):
        assert set(answer.token_versions) == {served.version.encode()}


def test_weights_are_loaded_from_a_mapped_slab_or_from_a_directory(
    sglang: Served,
) -> None:
    """A loader in the server's process reads the slab. The request names its load format and path."""
    log = sglang.logs / "engine-0.log"
    for folder, load_format in ((None, "private"), (sglang.models[0], "auto"), (None, "private")):
        log_size = log.stat().st_size
        sglang.version = Version(3, sglang.version.number + (2 - sglang.version.number % 2))
        sglang.runner.run(sglang.engine.update_weights(folder or sglang.slab, sglang.version))
        assert (
            error_against(sglang.model, PROMPTS[0], sglang.generate(make_request(PROMPTS[0]))[0])
            < 1e-3
        )
        assert f"Load format={load_format}" in log.read_text()[log_size:]


@pytest.mark.parametrize("change", ["cut", "renamed", "shared", "header", "manifest"])
def test_an_engine_refuses_a_slab_that_changed_after_its_verification(
    sglang: Served, change: str
) -> None:
    sglang.version = Version(3, sglang.version.number + 1)
    slab = sglang.slab
    file, mark = slab / "model.safetensors", slab / MARK
    if change == "cut":
        os.truncate(file, file.stat().st_size - 1)
    elif change == "renamed":
        slab = slab.rename(slab.with_name(str(Version(3, 99999))))
    elif change == "shared":
        slab.chmod(0o770)
    elif change == "header":
        file.write_bytes(file.read_bytes().replace(b"q_proj", b"k_proj", 1))
    else:
        mark.write_bytes(mark.read_bytes()[:-2])
    with pytest.raises(EngineFault) as caught:
        sglang.runner.run(sglang.engine.update_weights(slab, sglang.version))
    assert caught.value.reason == "update_failed" and slab.name in str(caught.value)
    with pytest.raises(EngineFault, match="weights are unknown"):
        sglang.generate(make_request(PROMPTS[0]))
    sglang.update()
    assert (
        error_against(sglang.model, PROMPTS[0], sglang.generate(make_request(PROMPTS[0]))[0]) < 1e-3
    )


def test_a_response_continues_where_its_draft_ends(served: Served) -> None:
    prompt, limit = PROMPTS[0], 12
    [whole] = served.generate(make_request(prompt, temperature=0.0, budget=limit))
    for count in (5, limit):
        drafted = np.full(count, Version(1, 7).encode(), np.int32)
        draft = Draft.from_response(
            Generation(whole.token_ids[:count], whole.logprobs[:count], drafted, "partial")
        )
        [answer] = served.generate(make_request(prompt, temperature=0.0, budget=limit, draft=draft))
        assert answer.token_ids == whole.token_ids and answer.finish_reason == "length"
        assert answer.logprobs == pytest.approx(whole.logprobs, abs=TOLERANCE[served.engine.name])
        assert answer.token_versions.tolist() == [
            *drafted,
            *[served.version.encode()] * (limit - count),
        ]
        assert draft.ended is answer


def test_a_draft_has_the_tokens_of_a_response_before_it_ends(served: Served) -> None:
    """The same holds for a response that ends while another one of the request continues.

    The test records each change of the drafts. A test that polls them would miss changes on a slow
    machine, where all tokens of an answer arrive together.
    """
    changes: list[tuple[Draft, Generation]] = []

    class RecordedDraft(Draft):
        def add(self, *fields: Sequence[int]) -> None:
            super().add(*fields)
            changes.append((self, self.snapshot()))

        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if name == "ended" and value is not None:
                changes.append((self, self.snapshot()))

    prompt, limit = PROMPTS[0], 200
    [whole] = served.generate(make_request(prompt, temperature=0.0, budget=limit))
    all_but_last = Generation(
        whole.token_ids[:-1], whole.logprobs[:-1], whole.token_versions[:-1], "partial"
    )
    drafts = [RecordedDraft.from_response(all_but_last), RecordedDraft()]
    requests = [
        make_request(prompt, "p", k, limit, draft, temperature=0.0)
        for k, draft in enumerate(drafts)
    ]
    assert [answer.token_ids for answer in served.generate(*requests)] == [whole.token_ids] * 2
    ended = [draft for draft, snapshot in changes if snapshot.finish_reason == "length"]
    assert ended == drafts
    of_second = [snapshot for draft, snapshot in changes if draft is drafts[1]]
    partial = [snapshot for snapshot in of_second if snapshot.finish_reason == "partial"]
    lengths = [len(snapshot.token_ids) for snapshot in partial]
    assert len(lengths) > 1 and lengths == sorted({*lengths} - {0, limit})
    for snapshot in partial:
        assert snapshot.token_ids == whole.token_ids[: len(snapshot.token_ids)]


@pytest.mark.parametrize("moment", ["requested", "generating"])
def test_a_cancelled_call_leaves_no_request_in_the_engine(sglang: Served, moment: str) -> None:
    """While it has requests, the server refuses to flush its cache and to release memory."""
    drafts = [Draft() for _ in PROMPTS]
    requests = [
        make_request(prompt, draft=draft, budget=240)
        for prompt, draft in zip(PROMPTS, drafts, strict=True)
    ]

    async def cancelled() -> None:
        task = asyncio.create_task(generate_together(sglang.engine, requests))
        while not (
            sglang.engine._client.gate.inside
            if moment == "requested"
            else any(d.token_ids for d in drafts)
        ):
            assert not task.done()
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        # On a busy machine, one of the requests may have ended before this task runs again.
        assert task.cancelled() and not all(draft.ended for draft in drafts)

    sglang.runner.run(cancelled())
    sglang.runner.run(sglang.engine.release())
    sglang.update()
    assert (
        error_against(sglang.model, PROMPTS[0], sglang.generate(make_request(PROMPTS[0]))[0]) < 1e-3
    )


def test_a_new_request_does_not_reuse_keys_and_values_of_older_weights(sglang: Served) -> None:
    prompt = (1, *range(3, 43))

    def read_prompt() -> tuple[int, Generation]:
        body = {"input_ids": [prompt], "sampling_params": {"max_new_tokens": 1}}
        [raw] = sglang.runner.run(sglang.engine._client._call("/generate", body, 30.0))
        return raw["meta_info"]["cached_tokens"], sglang.generate(make_request(prompt, "long"))[0]

    read_prompt()
    assert read_prompt()[0] > 30, "the cache must work within a version, or the test proves nothing"
    new = sglang.update()
    cached, answer = read_prompt()
    assert cached == 0
    assert error_against(new, prompt, answer) < 1e-3


def test_after_an_update_in_place_cached_keys_and_values_are_not_reused(sglang: Served) -> None:
    """While a request runs, the cache cannot be flushed, so the old entries remain in it."""
    old, prompt = str(sglang.version), (1, *range(3, 43))

    async def update_while_running() -> tuple[int, Generation]:
        engine = sglang.engine
        await engine.generate(make_request(prompt, "first", budget=4))
        running = asyncio.create_task(
            engine.generate(make_request(PROMPTS[0], "runs", budget=200, temperature=0.0))
        )
        while not engine._client.gate.inside:
            await asyncio.sleep(0)
        sglang.version = Version(3, sglang.version.number + 1)
        await engine.update_weights(sglang.model, sglang.version)
        answer = await engine.generate(make_request(prompt, "second", budget=4))
        body = {"input_ids": [prompt], "sampling_params": {"max_new_tokens": 1}, "extra_key": old}
        [raw] = await engine._client._call("/generate", body, 30.0)
        await running
        return raw["meta_info"]["cached_tokens"], answer

    cached, answer = sglang.runner.run(update_while_running())
    assert cached > 30, "old entries must still be cached, or the test proves nothing"
    assert error_against(sglang.model, prompt, answer) < 1e-3


def test_a_server_that_becomes_busy_before_the_update_does_not_end(
    sglang: Served,
) -> None:
    """If the update requested a flush of the cache, the busy scheduler would end itself."""
    client = sglang.engine._client
    sampling = {"max_new_tokens": 200, "ignore_eos": True}
    call, body = (
        client._call,
        {"input_ids": PROMPTS[0], "sampling_params": sampling, "stream": True},
    )
    running = client._stream("/generate", body)

    async def start_request_before_update(path: str, body: dict | None, timeout_s: float) -> object:
        if path == "/update_weights_from_disk":
            await anext(running)
            await call("/pause_generation", {"mode": "in_place"}, 30.0)
        return await call(path, body, timeout_s)

    async def finish_request() -> int:
        await call("/continue_generation", {}, 30.0)
        return [piece async for piece in running][-1]["meta_info"]["completion_tokens"]

    client._call = start_request_before_update
    try:
        new = sglang.update()
    finally:
        client._call = call
    assert sglang.runner.run(finish_request()) == 200
    assert error_against(new, PROMPTS[0], sglang.generate(make_request(PROMPTS[0]))[0]) < 1e-3


def generate_through_updates(served: Served, draft: Draft) -> Generation:
    """A response during which the engine loads six versions."""

    async def generate() -> Generation:
        request = make_request(PROMPTS[0], budget=200, draft=draft, temperature=0.0)
        task = asyncio.create_task(served.engine.generate(request))
        await asyncio.sleep(0)
        for _ in range(6):
            served.version = Version(3, served.version.number + 1)
            await served.engine.update_weights(served.slab, served.version)
        return await task

    answer = served.runner.run(generate())
    assert len(answer.token_ids) == 200 and (np.diff(answer.token_versions) >= 0).all()
    return answer


def test_released_memory_is_restored_by_an_update(sglang: Served) -> None:
    async def generate() -> Generation:
        return await sglang.engine.generate(make_request(PROMPTS[0]))

    sglang.runner.run(sglang.engine.release())
    with pytest.raises(EngineFault, match="weights are unknown"):
        sglang.runner.run(generate())
    sglang.update()
    assert error_against(sglang.model, PROMPTS[0], sglang.runner.run(generate())) < 1e-3


@pytest.mark.parametrize(
    ("engine", "partial"),
    [
        ("sglang", "keep"),
        ("transformers", "keep"),
        ("sglang_of_two_ranks", "recompute"),
        ("transformers", "recompute"),
    ],
)
def test_generation_continues_through_updates_and_tokens_have_their_versions(
    request: pytest.FixtureRequest,
    engine: str,
    partial: PartialRollout,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = request.getfixturevalue(engine)
    served.update()
    monkeypatch.setattr(getattr(served.engine, "_client", served.engine), "_partial", partial)
    # On a busy machine an engine may finish the response before the first version arrives.
    for _ in range(10):
        draft = Draft()
        answer = generate_through_updates(served, draft)
        if len(set(answer.token_versions)) > 1:
            break
    assert len(set(answer.token_versions)) > 1, "no version arrived during a response"
    models = [
        served.models[Version.decode(code).number % 2] for code in answer.token_versions.tolist()
    ]
    reference = {"keep": reference_logprobs_in_place, "recompute": reference_logprobs_recomputed}[
        partial
    ]
    expected = reference(models, PROMPTS[0], answer.token_ids)
    assert np.abs(np.array(answer.logprobs) - expected).max() < 1e-3
    drafted = len(draft.token_versions)
    assert (
        draft.token_versions == answer.token_versions[:drafted].tolist()
        and draft.token_ids == answer.token_ids[:drafted]
    )
    if served.engine.name == "sglang":
        assert len(set(draft.token_versions)) < 2, (
            "SGLang reports the versions of later tokens only at the end"
        )


def test_an_update_waits_for_running_responses_if_partial_rollout_is_off(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.update()
    monkeypatch.setattr(getattr(served.engine, "_client", served.engine), "_partial", "off")
    before = served.version
    assert set(generate_through_updates(served, Draft()).token_versions) == {before.encode()}
    [after] = served.generate(make_request(PROMPTS[0]))
    assert set(after.token_versions) == {served.version.encode()} and served.version > before


def test_every_endpoint_needs_the_key_and_the_key_is_in_no_log_or_environment(
    sglang: Served,
) -> None:
    async def refused(path: str) -> EngineFault:
        url = str(sglang.engine._client._session._base_url)
        stranger = SglangClient(url, "wrong", make_config("sglang").rollout.engine, sglang.version)
        try:
            with pytest.raises(EngineFault) as caught:
                await stranger._call(path, {}, 10.0)
        finally:
            await stranger.close()
        return caught.value

    for path in (
        "/generate",
        "/pause_generation",
        "/update_weights_from_disk",
        "/freeze_gc",
        "/v1/completions",
    ):
        assert "401" in str(sglang.runner.run(refused(path)))
    key = sglang.engine.server.key_file.read_text()
    for process in session_of(sglang.engine.server.session.leader.pid):
        assert key not in " ".join(process.cmdline()) + str(process.environ())
    logs = "".join(path.read_text() for path in sglang.logs.iterdir())
    assert key not in logs
    assert "'api_key': '***'" in logs


def test_the_server_listens_only_on_the_loopback_interface(sglang: Served) -> None:
    session = session_of(sglang.engine.server.session.leader.pid)
    sockets = []
    for process in session:
        sockets += process.net_connections("inet")
    listening = {socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN}
    assert listening == {"127.0.0.1"}


@pytest.mark.parametrize(
    "options", [{"top_k": 3}, {"top_p": 0.6, "top_k": 8}, {"min_p": 0.6, "top_k": 8}], ids=str
)
def test_log_probs_are_those_of_the_tokens_drawn_from(served: Served, options: dict) -> None:
    """The requests have another temperature. Other requests of the batch draw from all tokens."""
    requests = [*make_requests(temperature=0.7, **options), *make_requests()]
    answers = served.generate(*requests)
    cut_short = 0
    for request, answer in zip(requests, answers, strict=True):
        sampling, prompt_length = request.sampling, len(request.prompt_ids)
        ids = input_ids([*request.prompt_ids, *answer.token_ids])
        logits = reference_model(served.model)(ids).logits[0]
        for number, token in enumerate(answer.token_ids):
            scaled = logits[prompt_length - 1 + number].float() / sampling.temperature
            whole = scaled.softmax(-1).double().detach().numpy()
            remaining = cut(whole, sampling)
            assert remaining[token] > 0
            cut_short += remaining.sum() < 0.999
            expected = np.log(remaining[token] / remaining.sum())
            assert abs(answer.logprobs[number] - expected) < 3e-3
    assert cut_short > 8


def test_a_server_reports_the_phase_of_its_start(sglang: Served) -> None:
    """The phases follow from lines that SGLang 0.5.21 writes to its log."""
    assert sglang.engine.phase == "SGLang is about to serve"
    log = (sglang.logs / "engine-0.log").read_text()
    assert log.index("Load weight begin") < log.index("Load weight end")


def test_a_judge_sends_requests_that_the_server_accepts(sglang: Served) -> None:
    """A model with random weights writes up to the limit. An answer that is cut off has no score."""
    url = str(sglang.engine._client._session._base_url).rstrip("/") + "/v1/chat/completions"
    key_file = str(sglang.engine.server.key_file)
    judge_settings = JudgeSettings(
        url=url, token_file=key_file, retries=0, max_new_tokens=8, question="{response}"
    )

    async def request_scores() -> Scores:
        judge = get_reward("judge", RewardSettings(judge=judge_settings))
        try:
            return await scores_soon(judge, [RewardInput("?", "4", "12", "stop")] * 2)
        finally:
            await judge.service.close()

    error = sglang.runner.run(request_scores())
    assert isinstance(error, RewardError)
    assert re.match(
        r"ValueError: the judge was cut off \(finish_reason length\) after .+; raise", error.detail
    )


def test_only_its_user_can_access_files_and_memory_of_the_server(sglang: Served) -> None:
    """The server unpickles messages of its sockets, so write access to them runs code as its user."""
    scratch = sglang.engine.server.scratch.path
    sockets = [path for path in scratch.rglob("*") if path.is_socket()]
    memory = sglang.engine.server.session.shared_memory()
    assert len(sockets) >= 3 and memory and {path.parent for path in memory} == {Path("/dev/shm")}
    # SGLang lets all users access some named locks. The mode of the folder keeps them out.
    assert not [path for path in (scratch, *sockets, *memory) if path.stat().st_mode & 0o077]


async def with_deadline(call: Awaitable[str]) -> str:
    async with asyncio.timeout(60.0):
        return await call


@pytest.mark.parametrize(
    ("fixture", "ends"), [("sglang", "close"), ("sglang_of_two_ranks", "detokenizer")]
)
def test_all_processes_files_and_memory_of_a_server_end_with_it(
    fixture: str, ends: str, request: pytest.FixtureRequest
) -> None:
    """The last test of this file, because it ends the servers that the other tests share."""
    served = request.getfixturevalue(fixture)
    session, scratch = served.engine.server.session, served.engine.server.scratch.path
    members, memory = session_of(session.leader.pid), session.shared_memory()
    assert len(members) >= 3 and memory and scratch.exists()
    if ends == "detokenizer":
        [detokenizer] = [
            member for member in members if "sglang::detokenizer" in " ".join(command_line(member))
        ]
        detokenizer.kill()
        reason = served.runner.run(with_deadline(served.engine.wait_dead()))
        assert "sglang::detokenizer" in reason
        with pytest.raises(EngineFault, match="dead: sglang::detokenizer"):
            served.generate(*make_requests())
    served.runner.run(served.engine.close())
    _, alive = psutil.wait_procs(members, timeout=0)
    assert not alive and not session_of(session.leader.pid)
    assert not scratch.exists() and not [path for path in memory if path.exists()]
    names = [path.name for path in Path("/dev/shm").iterdir()]
    assert not [name for name in names if any(f"-{member.pid}-" in name for member in members)]
