"""A generative reward model of the run's own: where it is found, what its absence costs, its death
in a real run."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import socket
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import yaml
from aiohttp import web

from relax_hpc.base.errors import ConfigError, RelaxError
from relax_hpc.base.reward_settings import JudgeSettings, RewardSettings
from relax_hpc.cluster.sandbox.processes import command_line
from relax_hpc.cluster.slurm.layout import components
from relax_hpc.cluster.slurm.render import render
from relax_hpc.config import load
from relax_hpc.config.load import resolve
from relax_hpc.config.schema import TinyModelConfig
from relax_hpc.data.tokenizer import load_tokenizer
from relax_hpc.net.rendezvous.endpoints import Endpoint, publish_endpoints, read_endpoints
from relax_hpc.net.transport.calls import CallListener
from relax_hpc.net.transport.exchange import Message
from relax_hpc.net.transport.listener import create_listening_socket
from relax_hpc.net.transport.proof import Challenge
from relax_hpc.ops.checks.model_files import spec_at
from relax_hpc.ops.checks.settings import check
from relax_hpc.ops.plan.plan import plan
from relax_hpc.rewards import (
    RewardError,
    RewardInput,
    Score,
    Scores,
    get_reward,
    group_service,
    outage,
)
from relax_hpc.rewards.group_service import PURPOSE
from relax_hpc.rewards.outage import OutageRetry
from relax_hpc.rewards.scoring import scores_soon
from relax_hpc.roles import genrm
from relax_hpc.rollout.group_rewards import patient_settings
from relax_hpc.training.models.tiny_model import make_tiny_model
from tests.helpers.audit import audit
from tests.helpers.http_server import serving
from tests.helpers.run_helpers import LIGHT, QUICKSTART, merged, queue_rows, running, trained_steps
from tests.requirements import requires

requires("mpi", "torch", "megatron", "sglang")

WAIT_S = 240.0
OTHERS = ("rollout", "actor", "controller")
GROUP = [RewardInput("2+2?", "4", text, "stop") for text in ("4", "5")]


CHAT = "/v1/chat/completions"


@contextlib.asynccontextmanager
async def answering(
    key: str, serve: Callable[[int, Message], Awaitable[Message]]
) -> AsyncIterator[Endpoint]:
    """A process of role genrm that answers questions by ``serve``."""
    listener = CallListener(create_listening_socket("127.0.0.1"), key.encode(), PURPOSE, serve)
    running = asyncio.create_task(listener.run())
    try:
        yield Endpoint(listener.endpoint, key)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@contextlib.asynccontextmanager
async def judging(key: str, score: str) -> AsyncIterator[Endpoint]:
    """One that gives everybody with the key this score."""

    async def serve(number: int, message: Message) -> Message:
        return {
            "status": 200,
            "body": json.dumps({"choices": [{"message": {"content": f"Score: {score}"}}]}).encode(),
        }

    async with answering(key, serve) as endpoint:
        yield endpoint


def made_judge(directory: Path) -> Path:
    """A model that answers each chat with one digit, any of the ten, and ends then."""
    from safetensors.torch import load_file, save_file

    make_tiny_model(directory, TinyModelConfig(tie_word_embeddings=False), seed=1)
    (directory / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.content }}{% endfor %}"
    )
    tokenizer = load_tokenizer(directory)
    digits = [tokenizer.encode(digit)[-1] for digit in "0123456789"]
    weights = load_file(directory / "model.safetensors")
    # What comes next depends on the token before alone: digits follow all but digits, the end
    # follows digits.
    for name, weight in weights.items():
        if name.endswith(
            ("o_proj.weight", "down_proj.weight", "embed_tokens.weight", "lm_head.weight")
        ):
            weight.zero_()
    is_other, is_digit = 0, 1
    weights["model.embed_tokens.weight"][:, is_other] = 1.0
    weights["model.embed_tokens.weight"][digits] = 0.0
    weights["model.embed_tokens.weight"][digits, is_digit] = 1.0
    weights["lm_head.weight"][digits, is_other] = 10.0
    weights["lm_head.weight"][list(tokenizer.eos_ids), is_digit] = 10.0
    save_file(weights, directory / "model.safetensors")
    return directory


class InThisProcess:
    """Rewards of a judge whose servers say in a folder where they are."""

    def __init__(self, folder: Path, timeout_s: float = 20.0) -> None:
        settings = JudgeSettings(endpoints=str(folder), retries=0, timeout_s=timeout_s)
        self.judge = get_reward("judge", RewardSettings(judge=settings))

    async def start(self) -> None: ...

    async def score(self, samples: list[RewardInput]) -> Scores:
        return await scores_soon(self.judge, samples)

    async def close(self) -> None:
        await self.judge.service.close()


@pytest.fixture(name="quick")
def quick_fixture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outage, "_CHECK_S", 0.01)
    monkeypatch.setattr(group_service, "_READ_AGAIN_S", 0.0)


@pytest.mark.usefixtures("quick")
def test_who_is_away_is_waited_for_and_found_where_he_is_then(tmp_path: Path) -> None:
    """Not there yet; gone, with a stranger at the address; back elsewhere, with another key."""
    told = list[int]()

    async def main() -> None:
        rewards = OutageRetry(InThisProcess(tmp_path), tmp_path, 60.0, told.append)
        asking = asyncio.create_task(rewards.score(GROUP))
        while not told:
            await asyncio.sleep(0)
        async with judging("first", "1") as server:
            publish_endpoints(tmp_path, 1, 0, [server])
            assert await asking == [Score(1.0), Score(1.0)]
            assert await rewards.score(GROUP) == [Score(1.0), Score(1.0)] and told == [1, -1]
            publish_endpoints(
                tmp_path, 2, 0, [Endpoint(server.url, "of the one who was there before")]
            )
            again = asyncio.create_task(rewards.score(GROUP))
            while len(told) < 3:
                await asyncio.sleep(0)
            async with judging("third", "3") as third:
                publish_endpoints(tmp_path, 3, 0, [third])
                assert await again == [Score(3.0), Score(3.0)] and sum(told) == 0
        await rewards.close()

    asyncio.run(main())


@pytest.mark.usefixtures("quick")
def test_a_prompt_group_does_not_wait_for_ever_and_is_no_zero(tmp_path: Path) -> None:
    (tmp_path / "inc-000001-servers-0.json").write_text(
        '{"endpoints": [{"url": 7}, {"url": "http://127.0.0.1:9"'
    )

    async def main() -> Scores:
        rewards = OutageRetry(InThisProcess(tmp_path), tmp_path, 0.05, lambda change: None)
        return await rewards.score(GROUP)

    found = asyncio.run(main())
    assert isinstance(found, RewardError) and found.reason == "reward_away"
    assert found.detail.startswith(
        "away for 0.05 s, reward.judge.away_s: Away: no server has published an endpoint in"
    )


def test_who_is_there_and_slow_is_not_away(tmp_path: Path) -> None:
    """It is asked as any service is, within its own limits."""

    async def wait(number: int, message: Message) -> Message:
        await asyncio.Event().wait()
        return {}

    async def main() -> Scores:
        async with answering("key", wait) as slow:
            publish_endpoints(tmp_path, 1, 0, [slow])
            rewards = OutageRetry(
                InThisProcess(tmp_path, timeout_s=0.2), tmp_path, 60.0, lambda change: None
            )
            try:
                return await rewards.score(GROUP)
            finally:
                await rewards.close()

    found = asyncio.run(main())
    assert isinstance(found, RewardError) and found.reason == "reward_exception"
    assert found.detail.startswith(
        "NoAnswer: asked 1 times, the last time:  no answer within 0.2 s"
    )


class Stranger:
    """Another process at the address of a server that has died; it keeps all that it is sent, and
    says ``words``."""

    def __init__(self, words: bytes) -> None:
        self.words, self.heard = words, b""
        self.socket = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._answer, daemon=True).start()

    def endpoint(self, scheme: str) -> Endpoint:
        return Endpoint(f"{scheme}://127.0.0.1:{self.socket.getsockname()[1]}", "KEY-OF-THE-DEAD")

    def _answer(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.socket.accept()
                with connection:
                    connection.settimeout(0.5)
                    connection.sendall(self.words)
                    with contextlib.suppress(TimeoutError):
                        while data := connection.recv(1 << 16):
                            self.heard += data


OK = (
    b'HTTP/1.1 200 OK\r\nContent-Length: 53\r\n\r\n{"choices": [{"message": {"content": "Score: '
    b'1"}}]}   '
)


@pytest.mark.parametrize("scheme", ["http", "tcp"])
@pytest.mark.parametrize(
    "words",
    [b"", OK, Challenge(b"KEY-OF-A-GUESS", PURPOSE).greeting + bytes(32)],
    ids=["silent", "http", "greeting"],
)
@pytest.mark.usefixtures("quick")
def test_a_stranger_at_the_port_of_a_server_gets_no_question_and_gives_no_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: bytes, scheme: str
) -> None:
    monkeypatch.setattr(group_service, "CONNECT_S", 0.3)
    stranger = Stranger(words)
    publish_endpoints(tmp_path, 1, 0, [stranger.endpoint(scheme)])

    async def main() -> Scores:
        rewards = OutageRetry(InThisProcess(tmp_path), tmp_path, 0.5, lambda change: None)
        return await rewards.score([RewardInput("QUESTION", "ANSWER", "RESPONSE", "stop")])

    try:
        found = asyncio.run(main())
    finally:
        stranger.socket.close()
    assert isinstance(found, RewardError) and found.reason == "reward_away"
    assert not any(
        secret in stranger.heard for secret in (b"KEY", b"QUESTION", b"ANSWER", b"RESPONSE")
    )


def test_requests_share_one_attempt_to_reach_a_dead_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dead node answers nothing, so that each attempt takes all of its time."""
    attempts = list[Endpoint]()

    async def time_out(endpoint: Endpoint) -> None:
        attempts.append(endpoint)
        await asyncio.sleep(0.05)
        raise TimeoutError("no proof")

    async def main() -> Scores:
        rewards = InThisProcess(tmp_path)
        try:
            first, second = await asyncio.gather(rewards.score(GROUP * 4), rewards.score(GROUP * 4))
            assert first == second and len(attempts) == 1
            return await rewards.score(GROUP)
        finally:
            await rewards.close()

    monkeypatch.setattr(group_service, "open_endpoint", time_out)
    publish_endpoints(tmp_path, 1, 0, [Endpoint("tcp://127.0.0.1:9", "key")])
    result = asyncio.run(main())
    assert isinstance(result, RewardError) and result.reason == "reward_away"
    assert len(attempts) == 2


def test_a_question_or_an_answer_that_is_too_large_costs_its_prompt_group(tmp_path: Path) -> None:
    async def serve(number: int, message: Message) -> Message:
        return {
            "status": 200,
            "body": bytes(9 << 20) if b"much" in message["body"] else b'{"choices": []}',
        }

    async def main() -> list[Scores]:
        async with answering("key", serve) as endpoint:
            publish_endpoints(tmp_path, 1, 0, [endpoint])
            rewards = InThisProcess(tmp_path)
            texts = ("much", "x" * (9 << 20), "x")
            found = [await rewards.score([RewardInput("q", "4", text, "stop")]) for text in texts]
            await rewards.close()
            return found

    large_answer, large_question, other = asyncio.run(main())
    assert isinstance(large_answer, RewardError) and "an answer of 9437" in large_answer.detail
    assert (
        isinstance(large_question, RewardError)
        and "TooLarge: a request of 9437" in large_question.detail
    )
    assert isinstance(other, RewardError) and "expected choices with a message" in other.detail


def test_questions_go_to_the_server_with_the_fewest_and_its_key_stays_on_the_node(
    tmp_path: Path,
) -> None:
    seen = Counter[str]()

    async def answer(request: web.Request) -> web.StreamResponse:
        seen[request.headers["Authorization"]] += 1
        body = await request.json()
        if body["model"] == "large":
            return web.Response(
                body=gzip.compress(bytes(16 << 20)), headers={"Content-Encoding": "gzip"}
            )
        await asyncio.sleep(0.05)
        return web.json_response(body, status=400 if body["model"] == "bad" else 200)

    async def main() -> None:
        async with serving(CHAT, answer) as first, serving(CHAT, answer) as second:
            servers = [
                SimpleNamespace(url=url.removesuffix(CHAT), key=name)
                for url, name in ((first, "a"), (second, "b"))
            ]
            front = genrm.JudgeFront(servers)
            replies = [
                front.serve(1, {"body": json.dumps({"model": name}).encode()})
                for name in ("x", "bad") * 4
            ]
            replies = await asyncio.gather(*replies)
            assert Counter(reply["status"] for reply in replies) == {200: 4, 400: 4}
            assert seen == {"Bearer a": 4, "Bearer b": 4}
            with pytest.raises(ValueError, match="answers more than 4194304 bytes"):
                await front.serve(1, {"body": b'{"model": "large"}'})
            await front.close()

    asyncio.run(main())


@pytest.mark.parametrize("first", ["run", "server", "listener"])
def test_servers_serve_to_the_end_of_the_run_and_none_dies_alone(first: str) -> None:
    async def main() -> None:
        over, ended = Future[None](), asyncio.get_running_loop().create_future()
        client = SimpleNamespace(status=SimpleNamespace(run_finished=lambda: over))
        session = SimpleNamespace(ended=ended)
        server = SimpleNamespace(
            session=session, log="judge-0.log", quoted_error=lambda: ": no memory"
        )
        listener = asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(
            genrm._await_end(SimpleNamespace(client=client), [server], listener)
        )
        await asyncio.sleep(0)
        if first == "listener":
            listener.set_exception(OSError("its selector is closed"))
        else:
            (over if first == "run" else ended).set_result("sglang::scheduler (process 7) ended")
        async with asyncio.timeout(WAIT_S):
            await serving

    if first == "run":
        asyncio.run(main())
    elif first == "listener":
        with pytest.raises(OSError, match="its selector is closed"):
            asyncio.run(main())
    else:
        with pytest.raises(
            RelaxError, match=r"sglang::scheduler \(process 7\) ended: no memory; see judge-0\.log"
        ):
            asyncio.run(main())


def test_endpoints_are_those_of_the_newest_incarnation_for_this_user_alone(tmp_path: Path) -> None:
    for incarnation, rank in ((1, 0), (9, 0), (10, 1), (10, 0)):
        publish_endpoints(
            tmp_path, incarnation, rank, [Endpoint(f"http://{incarnation}", str(rank))]
        )
    assert read_endpoints(tmp_path) == [Endpoint("http://10", "0"), Endpoint("http://10", "1")]
    assert read_endpoints(tmp_path / "none") == []


@pytest.fixture(name="base")
def base_fixture(tmp_path: Path) -> dict[str, Any]:
    """Settings of a run with a judge of its own."""
    made_judge(tmp_path / "judge")
    run = {
        "run_dir": str(tmp_path / "run"),
        "data.task": "relax_hpc.examples.tasks.sort_digits:SortDigits",
        "data.max_prompt_tokens": 32,
    }
    judge = {"rollout.reward": "judge", "groups.genrm": {}, "genrm.path": str(tmp_path / "judge")}
    return run | judge | {"rollout.max_new_tokens": 5}


def test_what_is_wrong_with_a_judge_of_the_runs_own_is_found_before_it_starts(
    base: dict[str, Any], tmp_path: Path
) -> None:
    config = load([], base)
    assert check(config) == [] and config.groups["genrm"].roles == ["genrm"]
    for over, said in (
        ({"genrm.path": ""}, "genrm.path: found nothing with role genrm in group genrm"),
        (
            {"genrm.path": str(tmp_path)},
            "genrm.path: found no config.json and no tokenizer* and no *.safetensors in",
        ),
        ({"groups.genrm": None}, "genrm.path: found"),
        (
            {"groups.genrm": None},
            "reward.judge.url: found nothing, allowed: http://... or https://..., or a group",
        ),
        ({"rollout.reward": "f1"}, "groups.genrm.roles: found genrm, but judge is neither in"),
        (
            {"reward.judge.url": "http://host"},
            "reward.judge.url: found 'http://host' and role genrm",
        ),
        (
            {"genrm.flags": {"port": 1}},
            "genrm.flags.port: found 1, but the role sets this argument",
        ),
        ({"genrm.flags": {"tpsize": 1}}, "genrm.flags.tpsize: SGLang has no such server argument"),
    ):
        found = check(load([], base | over))
        assert any(finding.startswith(said) for finding in found), (said, found)
    (tmp_path / "judge/chat_template.jinja").unlink()
    (finding,) = check(config)
    assert finding.startswith("genrm.path: found no chat template in")


def test_its_servers_have_nodes_of_their_own(base: dict[str, Any]) -> None:
    gpus = {"model.device": "cuda", "genrm.replicas": 4, "genrm.flags.tp_size": 2}
    gpus |= {f"groups.{name}.resources.gpus_per_node": 4 for name in ("genrm", "actor", "rollout")}
    config = load([], base | gpus | {"groups.genrm.resources.nodes": 2, "slurm.one_node_hub": True})
    for layout in ("het", "jobs"):
        config.layout = layout
        (part,) = [part for part in components(config) if part.name == "genrm"]
        assert (part.nodes, part.tasks_per_node, part.gpus_per_node) == (2, 1, 4)
        assert any("genrm" in text for text in render(resolve(config)).values())
    for replicas, lacks in (
        (4, []),
        (
            6,
            [
                "genrm: 6 engines of tp_size 2 need 12 GPUs, and group genrm has 8; lower "
                "genrm.replicas, or use more nodes"
            ],
        ),
    ):
        config.genrm.replicas = replicas
        (place,) = [
            place for place in plan(config, spec_at(config.model)) if place.groups == ("genrm",)
        ]
        assert place.footprints[0].gpus == 2 * replicas and place.lacks == lacks
    config.genrm.replicas = 3
    with pytest.raises(ConfigError, match=r"genrm\.replicas: found 3, allowed: a multiple of"):
        components(config)


@pytest.mark.run
def test_a_judge_that_is_killed_is_waited_for_and_the_others_go_on(tmp_path: Path) -> None:
    """Real SGLang, of a model that scores each response by chance."""
    made_judge(tmp_path / "judge")
    flags = yaml.safe_load(QUICKSTART.read_text())["rollout"]["engine"]["flags"]
    judge = {
        "question": "{response}?",
        "score": r"(\d)",
        "max_new_tokens": 48,
        "temperature": 1.0,
        "timeout_s": 60.0,
    }
    over = {
        "steps": 6,
        "rollout": {"reward": "judge"},
        "reward": {"judge": judge},
        "genrm": {"path": str(tmp_path / "judge"), "flags": flags},
        "groups": {"genrm": {}},
        "liveness": {"start_ahead_s": 0.0},
    }
    with running(tmp_path, merged(LIGHT, over)) as live:
        live.wait_for_step(1, WAIT_S)
        others = [process.pid for role in OTHERS for process in live.processes(role)]
        (endpoint,) = read_endpoints(live.run.rendezvous("genrm"))
        words = [word for process in psutil.process_iter() for word in command_line(process)]
        assert not [word for word in words if endpoint.key in word]
        live.kill("genrm")
        live.wait_for_step(3, WAIT_S)
        assert others == [
            process.pid
            for role in ("rollout", "actor", "controller")
            for process in live.processes(role)
        ]
        live.finish(WAIT_S)
    assert [row["step"] for row in trained_steps(live.run)] == list(range(6)) and live.incarnations(
        "genrm"
    ) == 2
    result = audit(live.run)
    assert result.problems == [] and not result.dropped
    rewards = {row["reward"] for row in queue_rows(live.run).values()}
    assert len(rewards) > 1 and rewards <= {float(digit) for digit in range(10)}
    texts = "".join(
        path.read_text(errors="replace")
        for path in (live.run.root / "logs").rglob("*")
        if path.is_file()
    )
    assert endpoint.key not in texts and "rewards: waiting for the servers of role genrm" in texts
    modes = {
        path.stat().st_mode & 0o777
        for path in live.run.rendezvous("genrm").glob("*-servers-*.json")
    }
    assert modes == {0o600}


def test_a_judge_whose_job_is_in_a_queue_is_waited_for_as_any_group() -> None:
    run = {
        "groups": {"genrm": {}},
        "genrm.path": "judge",
        "rollout.reward": "judge",
        "liveness.longest_wait_s": 7200.0,
    }
    assert patient_settings(load([], run)).judge.away_s == 7200.0
    assert patient_settings(load([], run | {"reward.judge.away_s": 60.0})).judge.away_s == 60.0
    assert (
        patient_settings(
            load([], {"layout": "jobs"} | run | {"liveness.longest_wait_s": 0.0})
        ).judge.away_s
        > 86400.0
    )
