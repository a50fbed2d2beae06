"""The contract of engines, held by a real SGLang server and by the engine in this process."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
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
from relax_hpc.rollout.engines import make_engine  # noqa: E402
from relax_hpc.rollout.engines.engine import (  # noqa: E402
    Draft,
    Engine,
    EngineFault,
    GenerateRequest,
    Generation,
    Sampling,
)
from relax_hpc.rollout.engines.seeded_draws import cut  # noqa: E402
from relax_hpc.rollout.engines.sglang.client import SglangClient  # noqa: E402
from relax_hpc.rollout.engines.transformers_engine import load_weights  # noqa: E402
from relax_hpc.training.models.families import spec_from_config  # noqa: E402
from relax_hpc.training.models.hf_files import read_config  # noqa: E402
from relax_hpc.training.weights.slab import MARK  # noqa: E402
from tests.helpers.engine_helpers import (  # noqa: E402
    error_against,
    make_config,
    make_model,
    make_slab,
    reference_logprobs_in_place,
    reference_logprobs_recomputed,
    reference_model,
    session_of,
)

pytestmark = pytest.mark.run

PROMPTS = [(1, 3 + k, 9, 2 + k, 7) for k in range(4)]
TOLERANCE = {"sglang": 1e-3, "transformers": 1e-4}


@dataclass
class Served:
    """An engine that runs, the loop it runs in, and what it serves: version n has the weights of
    models[n % 2]."""

    engine: Engine
    runner: asyncio.Runner
    models: list[Path]
    logs: Path
    version: Version

    def generate(self, *requests: GenerateRequest) -> list[Generation]:
        return self.runner.run(together(self.engine, requests))

    def update(self) -> Path:
        """Go to the next version; its weights."""
        self.version = Version(self.version.incarnation, self.version.number + 1)
        self.runner.run(self.engine.update_weights(self.slab, self.version))
        return self.model

    @property
    def slab(self) -> Path:
        """What a node would have of the present version."""
        folder = self.logs.parent / "node" / str(self.version)
        return folder if folder.exists() else make_slab(self.model, self.version, folder.parent)

    @property
    def model(self) -> Path:
        return self.models[self.version.number % 2]


async def together(engine: Engine, requests: Sequence[GenerateRequest]) -> list[Generation]:
    return await asyncio.gather(*map(engine.generate, requests))


def ask(
    prompt: tuple[int, ...],
    key: str = "p",
    sample: int = 0,
    budget: int = 8,
    draft: Draft | None = None,
    **how: object,
) -> GenerateRequest:
    sampling = {"temperature": 1.0, "top_p": 1.0, "stop_token_ids": (), "seed": 5} | how
    return GenerateRequest(prompt, key, sample, Sampling(**sampling), budget, draft=draft)


def requests(**how: object) -> list[GenerateRequest]:
    """Two samples of each prompt."""
    return [
        ask(prompt, f"p{k}", sample, **how)
        for k, prompt in enumerate(PROMPTS)
        for sample in range(2)
    ]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [make_model(folder / f"model-{seed}", seed) for seed in range(2)]


def serve(kind: str, models: list[Path], folder: Path, **settings: object) -> Iterator[Served]:
    with asyncio.Runner() as runner:
        engine = make_engine(
            make_config(kind, **settings), 0, models[0], Version(3, 0), folder / "logs"
        )
        runner.run(engine.start())
        try:
            yield Served(engine, runner, models, folder / "logs", Version(3, 0))
        finally:
            runner.run(engine.close())


@pytest.fixture(scope="module")
def sglang(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """With its radix cache, which is off by default, so that reuse of keys and values can be seen;
    and it tells of every fourth token."""
    folder = tmp_path_factory.mktemp("sglang")
    (folder / "chat.jinja").write_text(
        "{% for message in messages %}{{ message.content }}{% endfor %}"
    )
    flags = {"disable_radix_cache": False, "enable_cache_report": True, "stream_interval": 4}
    yield from serve(
        "sglang", models, folder, flags=flags | {"chat_template": str(folder / "chat.jinja")}
    )


def stub_nccl(folder: Path) -> Path:
    """A libnccl.so.2 that SGLang can load on a CPU, as it can load the one of torch's CUDA build;
    it does nothing."""
    (package,) = find_spec("sglang").submodule_search_locations
    wrapper = Path(package) / "srt/distributed/device_communicators/pynccl_wrapper.py"
    names = sorted(set(re.findall(r'"(nccl[A-Z]\w+)"', wrapper.read_text())))
    assert "ncclCommInitRank" in names
    library = folder / "libnccl.so.2"
    source = "".join(f"int {name}(void) {{ return 0; }}\n" for name in names)
    command = ["gcc", "-shared", "-fPIC", "-w", "-x", "c", "-", "-o", str(library)]
    subprocess.run(command, input=source, text=True, check=True, timeout=60)
    return library


@pytest.fixture(scope="module")
def sglang_of_two_ranks(
    models: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """Without its radix cache, as by default; each rank takes its slices from the same mapped file.

    It finds a libnccl, as with the CUDA build of torch that package indexes have.
    """
    requires("gcc")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_NCCL_SO_PATH", str(stub_nccl(tmp_path_factory.mktemp("nccl"))))
        # On CPUs it wants to be told where ranks run, unless each has a NUMA domain.
        cpus = sorted(os.sched_getaffinity(0))
        patch.setenv("SGLANG_CPU_OMP_THREADS_BIND", f"{cpus[0]}|{cpus[-1]}")
        yield from serve(
            "sglang", models, tmp_path_factory.mktemp("sglang-two"), flags={"tp_size": 2}
        )


@pytest.fixture(scope="module")
def transformers(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from serve("transformers", models, tmp_path_factory.mktemp("transformers"))


@pytest.fixture(params=["sglang", "transformers"])
def served(request: pytest.FixtureRequest) -> Served:
    return request.getfixturevalue(request.param)


def test_log_probs_are_those_of_the_model_at_the_temperature(served: Served) -> None:
    asked = requests(temperature=0.7)
    answers = served.generate(*asked)
    for request, answer in zip(asked, answers, strict=True):
        assert len(answer.token_ids) == len(answer.logprobs) == len(answer.token_versions) == 8
        assert answer.finish_reason == "length"
        assert (
            error_against(served.model, request.prompt_ids, answer, 0.7)
            < TOLERANCE[served.engine.name]
        )
    assert len({tuple(answer.token_ids) for answer in answers}) > len(PROMPTS)


def test_temperature_zero_takes_the_most_probable_token(served: Served) -> None:
    for prompt, answer in zip(
        PROMPTS, served.generate(*requests(temperature=0.0))[::2], strict=True
    ):
        ids = list(prompt)
        for token in answer.token_ids:
            assert token == int(
                reference_model(served.model)(input_ids(ids)).logits[0, -1].argmax()
            )
            ids.append(token)
        assert error_against(served.model, prompt, answer) < TOLERANCE[served.engine.name]


def input_ids(ids: list[int]) -> object:

    return torch.tensor([ids])


def test_a_stop_token_ends_the_response_and_belongs_to_it(served: Served) -> None:
    [whole] = served.generate(ask(PROMPTS[0], temperature=0.0))
    stop = whole.token_ids[3]
    [cut] = served.generate(ask(PROMPTS[0], temperature=0.0, stop_token_ids=(stop,)))
    assert cut.finish_reason == "stop"
    assert cut.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]


def test_a_stop_text_ends_the_response_and_belongs_to_it(served: Served) -> None:
    """The tokenizer has a token a character; here the text has two."""
    [whole] = served.generate(ask(PROMPTS[0], temperature=0.0))
    decode = load_tokenizer(served.model).decode
    text = decode(whole.token_ids[2:4])
    assert len(text) == 2 and text not in decode(whole.token_ids[:3]), whole.token_ids
    [cut] = served.generate(ask(PROMPTS[0], temperature=0.0, stop=("nowhere", text)))
    assert (cut.finish_reason, cut.token_ids) == ("stop", whole.token_ids[:4])


def test_after_an_update_the_new_weights_generate_under_the_new_version(served: Served) -> None:
    old = served.model
    new = served.update()
    for request, answer in zip(requests(), served.generate(*requests()), strict=True):
        assert answer.token_versions.dtype == np.int32
        assert set(answer.token_versions) == {served.version.encode()}
        assert error_against(new, request.prompt_ids, answer) < TOLERANCE[served.engine.name]
        assert error_against(old, request.prompt_ids, answer) > 0.1


def test_an_update_from_nowhere_is_a_fault_and_the_next_update_works(served: Served) -> None:
    with pytest.raises(EngineFault) as caught:
        served.runner.run(served.engine.update_weights(Path("/nonexistent"), Version(9, 9)))
    assert caught.value.reason == "update_failed"
    served.update()
    assert {
        version for answer in served.generate(*requests()) for version in answer.token_versions
    } == {served.version.encode()}


def test_weights_are_taken_from_the_mapped_memory_of_the_node_or_else_from_a_directory(
    sglang: Served,
) -> None:
    """By a loader in the server's process, which a request names by a word and a path."""
    log = sglang.logs / "engine-0.log"
    for folder, word in ((None, "private"), (sglang.models[0], "auto"), (None, "private")):
        seen = log.stat().st_size
        sglang.version = Version(3, sglang.version.number + (2 - sglang.version.number % 2))
        sglang.runner.run(sglang.engine.update_weights(folder or sglang.slab, sglang.version))
        assert error_against(sglang.model, PROMPTS[0], sglang.generate(ask(PROMPTS[0]))[0]) < 1e-3
        assert f"Load format={word}" in log.read_text()[seen:]


@pytest.mark.parametrize("harm", ["cut", "renamed", "shared", "header", "manifest"])
def test_memory_that_is_not_what_was_verified_gets_into_no_engine(
    sglang: Served, harm: str
) -> None:
    sglang.version = Version(3, sglang.version.number + 1)
    slab = sglang.slab
    file, mark = slab / "model.safetensors", slab / MARK
    if harm == "cut":
        os.truncate(file, file.stat().st_size - 1)
    elif harm == "renamed":
        slab = slab.rename(slab.with_name(str(Version(3, 99999))))
    elif harm == "shared":
        slab.chmod(0o770)
    elif harm == "header":
        file.write_bytes(file.read_bytes().replace(b"q_proj", b"k_proj", 1))
    else:
        mark.write_bytes(mark.read_bytes()[:-2])
    with pytest.raises(EngineFault) as caught:
        sglang.runner.run(sglang.engine.update_weights(slab, sglang.version))
    assert caught.value.reason == "update_failed" and slab.name in str(caught.value)
    with pytest.raises(EngineFault, match="weights are unknown"):
        sglang.generate(ask(PROMPTS[0]))
    sglang.update()
    assert error_against(sglang.model, PROMPTS[0], sglang.generate(ask(PROMPTS[0]))[0]) < 1e-3


def test_a_response_goes_on_where_its_draft_ends(served: Served) -> None:
    prompt, limit = PROMPTS[0], 12
    [whole] = served.generate(ask(prompt, temperature=0.0, budget=limit))
    for count in (5, limit):
        drafted = np.full(count, Version(1, 7).encode(), np.int32)
        draft = Draft.from_response(
            Generation(whole.token_ids[:count], whole.logprobs[:count], drafted, "partial")
        )
        [answer] = served.generate(ask(prompt, temperature=0.0, budget=limit, draft=draft))
        assert answer.token_ids == whole.token_ids and answer.finish_reason == "length"
        assert answer.logprobs == pytest.approx(whole.logprobs, abs=TOLERANCE[served.engine.name])
        assert answer.token_versions.tolist() == [
            *drafted,
            *[served.version.encode()] * (limit - count),
        ]
        assert draft.ended is answer


def test_what_there_is_of_a_response_is_in_its_draft_before_it_ends(served: Served) -> None:
    """Also of a response that is whole while another one of the request is not. Each change is seen
    as it happens: who looks now and then sees none where the machine is slow, and all of an answer
    comes at once."""
    seen: list[tuple[Draft, Generation]] = []

    class Watched(Draft):
        def add(self, *more: Sequence[int]) -> None:
            super().add(*more)
            seen.append((self, self.snapshot()))

        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if name == "ended" and value is not None:
                seen.append((self, self.snapshot()))

    prompt, limit = PROMPTS[0], 200
    [whole] = served.generate(ask(prompt, temperature=0.0, budget=limit))
    last = Generation(
        whole.token_ids[:-1], whole.logprobs[:-1], whole.token_versions[:-1], "partial"
    )
    drafts = [Watched.from_response(last), Watched()]
    asked = [ask(prompt, "p", k, limit, draft, temperature=0.0) for k, draft in enumerate(drafts)]
    assert [answer.token_ids for answer in served.generate(*asked)] == [whole.token_ids] * 2
    assert [draft for draft, made in seen if made.finish_reason == "length"] == drafts
    parts = [made for draft, made in seen if draft is drafts[1] and made.finish_reason == "partial"]
    lengths = [len(part.token_ids) for part in parts]
    assert len(lengths) > 1 and lengths == sorted({*lengths} - {0, limit})
    assert all(part.token_ids == whole.token_ids[: len(part.token_ids)] for part in parts)


@pytest.mark.parametrize("moment", ["asked", "drawing"])
def test_a_call_that_is_cancelled_leaves_nothing_in_the_engine(sglang: Served, moment: str) -> None:
    """The server would refuse to flush its cache, and to give memory back, while it is at
    something."""
    drafts = [Draft() for _ in PROMPTS]
    asked = [
        ask(prompt, draft=draft, budget=240) for prompt, draft in zip(PROMPTS, drafts, strict=True)
    ]

    async def cancelled() -> None:
        task = asyncio.create_task(together(sglang.engine, asked))
        while not (
            sglang.engine._client.gate.inside
            if moment == "asked"
            else any(d.token_ids for d in drafts)
        ):
            assert not task.done()
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() and not any(draft.ended for draft in drafts)

    sglang.runner.run(cancelled())
    sglang.runner.run(sglang.engine.release())
    sglang.update()
    assert error_against(sglang.model, PROMPTS[0], sglang.generate(ask(PROMPTS[0]))[0]) < 1e-3


def test_no_new_request_reuses_keys_and_values_of_older_weights(sglang: Served) -> None:
    prompt = (1, *range(3, 43))

    def look() -> tuple[int, Generation]:
        body = {"input_ids": [prompt], "sampling_params": {"max_new_tokens": 1}}
        [raw] = sglang.runner.run(sglang.engine._client._call("/generate", body, 30.0))
        return raw["meta_info"]["cached_tokens"], sglang.generate(ask(prompt, "long"))[0]

    look()
    assert look()[0] > 30, (
        "the cache works within a version, so the rest of this test says something"
    )
    new = sglang.update()
    cached, answer = look()
    assert cached == 0
    assert error_against(new, prompt, answer) < 1e-3


def test_an_update_in_place_hides_what_it_leaves_in_the_cache(sglang: Served) -> None:
    """While a request runs, the cache cannot be flushed."""
    old, prompt = str(sglang.version), (1, *range(3, 43))

    async def scene() -> tuple[int, Generation]:
        engine = sglang.engine
        await engine.generate(ask(prompt, "first", budget=4))
        running = asyncio.create_task(
            engine.generate(ask(PROMPTS[0], "runs", budget=200, temperature=0.0))
        )
        while not engine._client.gate.inside:
            await asyncio.sleep(0)
        sglang.version = Version(3, sglang.version.number + 1)
        await engine.update_weights(sglang.model, sglang.version)
        answer = await engine.generate(ask(prompt, "second", budget=4))
        body = {"input_ids": [prompt], "sampling_params": {"max_new_tokens": 1}, "extra_key": old}
        [raw] = await engine._client._call("/generate", body, 30.0)
        await running
        return raw["meta_info"]["cached_tokens"], answer

    left, answer = sglang.runner.run(scene())
    assert left > 30, "it is still there, so the rest of this test says something"
    assert error_against(sglang.model, prompt, answer) < 1e-3


def test_a_server_that_becomes_busy_between_the_question_and_the_update_lives_on(
    sglang: Served,
) -> None:
    """Asked to flush its cache with the update, its scheduler would end itself."""
    client = sglang.engine._client
    sampling = {"max_new_tokens": 200, "ignore_eos": True}
    call, body = (
        client._call,
        {"input_ids": PROMPTS[0], "sampling_params": sampling, "stream": True},
    )
    running = client._stream("/generate", body)

    async def crossed(path: str, body: dict | None, timeout_s: float) -> object:
        if path == "/update_weights_from_disk":
            await anext(running)
            await call("/pause_generation", {"mode": "in_place"}, 30.0)
        return await call(path, body, timeout_s)

    async def ended() -> int:
        await call("/continue_generation", {}, 30.0)
        return [piece async for piece in running][-1]["meta_info"]["completion_tokens"]

    client._call = crossed
    try:
        new = sglang.update()
    finally:
        client._call = call
    assert sglang.runner.run(ended()) == 200
    assert error_against(new, PROMPTS[0], sglang.generate(ask(PROMPTS[0]))[0]) < 1e-3


def through_updates(served: Served, draft: Draft) -> Generation:
    """A response during which six versions come."""

    async def generate() -> Generation:
        request = ask(PROMPTS[0], budget=200, draft=draft, temperature=0.0)
        task = asyncio.create_task(served.engine.generate(request))
        await asyncio.sleep(0)
        for _ in range(6):
            served.version = Version(3, served.version.number + 1)
            await served.engine.update_weights(served.slab, served.version)
        return await task

    answer = served.runner.run(generate())
    assert len(answer.token_ids) == 200 and (np.diff(answer.token_versions) >= 0).all()
    return answer


def test_memory_that_was_given_back_is_there_again_after_an_update(sglang: Served) -> None:
    async def generate() -> Generation:
        return await sglang.engine.generate(ask(PROMPTS[0]))

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
def test_generation_goes_on_through_updates_and_each_token_has_the_version_that_drew_it(
    request: pytest.FixtureRequest,
    engine: str,
    partial: PartialRollout,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = request.getfixturevalue(engine)
    served.update()
    monkeypatch.setattr(getattr(served.engine, "_client", served.engine), "_partial", partial)
    # A busy machine may let an engine draw all of a response before the first version comes.
    for _ in range(10):
        draft = Draft()
        answer = through_updates(served, draft)
        if several := len(set(answer.token_versions)) > 1:
            break
    assert several, "no version came while a response was drawn"
    drawn_by = [
        served.models[Version.decode(code).number % 2] for code in answer.token_versions.tolist()
    ]
    reference = {"keep": reference_logprobs_in_place, "recompute": reference_logprobs_recomputed}[
        partial
    ]
    expected = reference(drawn_by, PROMPTS[0], answer.token_ids)
    assert np.abs(np.array(answer.logprobs) - expected).max() < 1e-3
    told = len(draft.token_versions)
    assert (
        draft.token_versions == answer.token_versions[:told].tolist()
        and draft.token_ids == answer.token_ids[:told]
    )
    if served.engine.name == "sglang":
        assert len(set(draft.token_versions)) < 2, (
            "before the end nobody says which of the later weights drew what"
        )


def test_an_update_may_wait_for_the_end_of_what_is_drawn(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.update()
    monkeypatch.setattr(getattr(served.engine, "_client", served.engine), "_partial", "off")
    before = served.version
    assert set(through_updates(served, Draft()).token_versions) == {before.encode()}
    [after] = served.generate(ask(PROMPTS[0]))
    assert set(after.token_versions) == {served.version.encode()} and served.version > before


def test_the_key_guards_every_endpoint_and_is_shown_nowhere(sglang: Served) -> None:
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


def test_the_server_listens_on_the_loopback_interface_alone(sglang: Served) -> None:
    session = session_of(sglang.engine.server.session.leader.pid)
    sockets = [socket for process in session for socket in process.net_connections("inet")]
    listening = {socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN}
    assert listening == {"127.0.0.1"}


def test_samples_of_the_seeded_engine_do_not_depend_on_what_is_generated_beside_them(
    transformers: Served,
) -> None:
    crowd = transformers.generate(*requests())
    alone = [transformers.generate(request)[0] for request in reversed(requests())][::-1]
    assert [answer.token_ids for answer in crowd] == [answer.token_ids for answer in alone]
    assert [answer.logprobs for answer in crowd] == [answer.logprobs for answer in alone]


def test_the_seeded_engine_keeps_its_deadline(
    transformers: Served, models: list[Path], tmp_path: Path
) -> None:
    hurried = serve("transformers", models, tmp_path, request_timeout_s=1e-6)
    with pytest.raises(EngineFault) as caught:
        next(hurried).generate(*requests())
    hurried.close()
    assert caught.value.reason == "timeout"


def test_weights_that_do_not_fit_are_refused_whole(
    transformers: Served, models: list[Path], tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(models[0] / "model.safetensors")
    weights["model.norm.scale"] = weights.pop("model.norm.weight")
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.norm\.scale, model\.norm\.weight"):
        load_weights(reference_model(models[0]), tmp_path, spec_from_config(read_config(models[0])))


@pytest.mark.parametrize(
    "how", [{"top_k": 3}, {"top_p": 0.6, "top_k": 8}, {"min_p": 0.6, "top_k": 8}], ids=str
)
def test_log_probs_are_those_of_what_was_drawn_from(served: Served, how: dict) -> None:
    """At another temperature, for requests beside which others draw from all."""

    asked = [*requests(temperature=0.7, **how), *requests()]
    answers = served.generate(*asked)
    cut_short = 0
    for request, answer in zip(asked, answers, strict=True):
        logits = reference_model(served.model)(
            input_ids([*request.prompt_ids, *answer.token_ids])
        ).logits[0]
        sampling = request.sampling
        for place, token in enumerate(answer.token_ids, start=len(request.prompt_ids) - 1):
            whole = (
                (logits[place].float() / sampling.temperature).softmax(-1).double().detach().numpy()
            )
            left = cut(whole, sampling)
            assert left[token] > 0
            cut_short += left.sum() < 0.999
            expected = np.log(left[token] / left.sum())
            assert abs(answer.logprobs[place + 1 - len(request.prompt_ids)] - expected) < 3e-3
    assert cut_short > 8 and torch is not None


def test_a_server_has_told_what_it_was_at_while_it_started(sglang: Served) -> None:
    """In words that are still those of this SGLang's log."""
    assert sglang.engine.phase == "SGLang is about to serve"
    log = (sglang.logs / "engine-0.log").read_text()
    assert log.index("Load weight begin") < log.index("Load weight end")


def test_a_judge_is_asked_as_the_server_wants_it(sglang: Served) -> None:
    """A model of random weights writes as much as it may: it is cut off, which is no score."""
    url = str(sglang.engine._client._session._base_url).rstrip("/") + "/v1/chat/completions"
    key_file = str(sglang.engine.server.key_file)
    judge_settings = JudgeSettings(
        url=url, token_file=key_file, retries=0, max_new_tokens=8, question="{response}"
    )

    async def asked() -> Scores:
        judge = get_reward("judge", RewardSettings(judge=judge_settings))
        try:
            return await scores_soon(judge, [RewardInput("?", "4", "12", "stop")] * 2)
        finally:
            await judge.service.close()

    error = sglang.runner.run(asked())
    assert isinstance(error, RewardError)
    assert re.match(
        r"ValueError: the judge was cut off \(finish_reason length\) after .+; raise", error.detail
    )


def test_what_the_server_keeps_is_its_users_alone(sglang: Served) -> None:
    """Whoever can write to its sockets, on which it unpickles, runs code as that user."""
    scratch = sglang.engine.server.scratch.path
    sockets = [path for path in scratch.rglob("*") if path.is_socket()]
    memory = sglang.engine.server.session.shared_memory()
    assert len(sockets) >= 3 and memory and {path.parent for path in memory} == {Path("/dev/shm")}
    # SGLang gives some locks to everybody by name; nobody else gets into the folder.
    assert not [path for path in (scratch, *sockets, *memory) if path.stat().st_mode & 0o077]


async def in_time(call: Awaitable[str]) -> str:
    async with asyncio.timeout(60.0):
        return await call


@pytest.mark.parametrize(
    ("fixture", "ends"), [("sglang", "close"), ("sglang_of_two_ranks", "detokenizer")]
)
def test_every_process_of_the_server_ends_with_it_and_nothing_is_left(
    fixture: str, ends: str, request: pytest.FixtureRequest
) -> None:
    """Last in this file: it ends the servers that the tests above share."""
    served = request.getfixturevalue(fixture)
    session, scratch = served.engine.server.session, served.engine.server.scratch.path
    members, memory = session_of(session.leader.pid), session.shared_memory()
    assert len(members) >= 3 and memory and scratch.exists()
    if ends == "detokenizer":
        [part] = [
            member for member in members if "sglang::detokenizer" in " ".join(command_line(member))
        ]
        part.kill()
        said = served.runner.run(in_time(served.engine.wait_dead()))
        assert "sglang::detokenizer" in said
        with pytest.raises(EngineFault, match="dead: sglang::detokenizer"):
            served.generate(*requests())
    served.runner.run(served.engine.close())
    _, alive = psutil.wait_procs(members, timeout=0)
    assert not alive and not session_of(session.leader.pid)
    assert not scratch.exists() and not [path for path in memory if path.exists()]
    names = [path.name for path in Path("/dev/shm").iterdir()]
    assert not [name for name in names if any(f"-{member.pid}-" in name for member in members)]
