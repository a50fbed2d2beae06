"""Rewards that are asked over HTTP: retries, limits, and what becomes of a service that does not do
as it should."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from relax_hpc.base.background import print_log_line
from relax_hpc.base.errors import ConfigError
from relax_hpc.base.reward_settings import JudgeSettings, RemoteSettings, RewardSettings
from relax_hpc.rewards import RewardError, RewardInput, Score, Scores, get_reward
from relax_hpc.rewards import service as service_module
from relax_hpc.rewards.placement import make_rewards
from relax_hpc.rewards.scoring import scores_soon
from tests.helpers.http_server import Answer, serving

GROUP = [RewardInput("2+2?", "4", text, "stop", {"level": 1}) for text in ("4", "5")]
PATH = "/score"


def asked(answer: Answer, **settings: Any) -> Scores:
    """The scores of one group, asked for in this process."""

    async def main() -> Scores:
        async with serving(PATH, answer) as url:
            reward = get_reward(
                "remote", RewardSettings(remote=RemoteSettings(url=url, **settings))
            )
            try:
                return await scores_soon(reward, GROUP)
            finally:
                await reward.service.close()

    return asyncio.run(main())


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "FIRST_PAUSE_S", 0.001)


def test_a_service_is_asked_for_whole_groups_with_its_token(tmp_path: Path) -> None:
    seen = list[Any]()

    async def answer(request: web.Request) -> web.Response:
        seen.append((request.headers.get("Authorization"), await request.json()))
        right = [float(one["answer"] == one["response_text"]) for one in seen[-1][1]["samples"]]
        return web.json_response({"scores": [{"total": value, "right": value} for value in right]})

    (tmp_path / "token").write_text("secret\n")
    assert asked(answer, token_file=str(tmp_path / "token")) == [
        Score(1.0, {"right": 1.0}),
        Score(0.0, {"right": 0.0}),
    ]
    [(token, body)] = seen
    assert token == "Bearer secret"
    assert body["samples"][1] == {
        "prompt": "2+2?",
        "answer": "4",
        "response_text": "5",
        "finish_reason": "stop",
        "metadata": {"level": 1},
        "rows": [],
        "turns": [],
        "environment": {},
    }


@pytest.mark.parametrize("status", [429, 500, 503])
def test_who_is_busy_is_asked_again_a_few_times(status: int) -> None:
    count = 0

    async def answer(_: web.Request) -> web.Response:
        nonlocal count
        count += 1
        return (
            web.Response(status=status, text="busy")
            if count < 3
            else web.json_response({"scores": [1, 0]})
        )

    assert asked(answer) == [Score(1.0), Score(0.0)] and count == 3
    count = -10
    found = asked(answer, retries=2)
    assert isinstance(found, RewardError) and count == -7
    assert (found.reason, found.detail) == (
        "reward_exception",
        f"NoAnswer: asked 3 times, the last time: {status} busy",
    )


@pytest.mark.parametrize(
    ("body", "status", "reason", "detail"),
    [
        ("no such model", 404, "reward_exception", "the service refuses: 404 no such model"),
        ("[1, 2]", 200, "reward_exception", "expected {"),
        ("{", 200, "reward_exception", "JSONDecodeError"),
        ('{"scores": [1]}', 200, "reward_wrong_count", "returned 1 values for 2 samples"),
        ('{"scores": [1, NaN]}', 200, "reward_not_finite", "returned nan"),
        ('{"scores": [1, "2"]}', 200, "reward_not_a_number", "returned str"),
        (
            '{"scores": [1, {"right": 1}]}',
            200,
            "reward_not_a_number",
            "returned a mapping of right",
        ),
    ],
)
def test_what_is_no_answer_is_named_and_not_asked_for_again(
    body: str, status: int, reason: str, detail: str
) -> None:
    count = 0

    async def answer(_: web.Request) -> web.Response:
        nonlocal count
        count += 1
        return web.Response(status=status, text=body, content_type="application/json")

    found = asked(answer)
    assert (
        isinstance(found, RewardError)
        and found.reason == reason
        and detail in found.detail
        and count == 1
    )


def test_who_says_nothing_has_a_deadline() -> None:
    async def answer(_: web.Request) -> web.Response:
        await asyncio.sleep(1000)
        raise AssertionError

    found = asked(answer, timeout_s=0.1, retries=1)
    assert (
        isinstance(found, RewardError)
        and "asked 2 times, the last time:  no answer within 0.1 s" in found.detail
    )


def test_who_is_not_there_is_named() -> None:
    async def main() -> Scores:
        reward = get_reward(
            "remote", RewardSettings(remote=RemoteSettings(url="http://127.0.0.1:9/", retries=1))
        )
        found = await scores_soon(reward, GROUP)
        await reward.service.close()
        return found

    found = asyncio.run(main())
    assert isinstance(found, RewardError) and "ClientConnectorError" in found.detail


def test_no_more_requests_are_under_way_than_the_limit() -> None:
    """From a worker's process, with the deadline counted from when a group's turn has come."""
    under_way, most, turn = 0, 0, asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        if under_way == 3:
            turn.set()
        await turn.wait()
        await asyncio.sleep(0.01)
        under_way -= 1
        return web.json_response({"scores": [0.5] * len((await request.json())["samples"])})

    async def main() -> list[Scores]:
        async with serving(PATH, answer) as url:
            rewards = make_rewards(
                "remote", 4, 60.0, RewardSettings(remote=RemoteSettings(url=url, in_flight=3))
            )
            try:
                return await asyncio.gather(*(rewards.score(GROUP) for _ in range(20)))
            finally:
                await rewards.close()

    assert asyncio.run(main()) == [[Score(0.5), Score(0.5)]] * 20 and most == 3


def test_an_address_and_a_token_are_there_or_it_is_said(tmp_path: Path) -> None:
    def made(**settings: str) -> None:
        get_reward("remote", RewardSettings(remote=RemoteSettings(**settings)))

    with pytest.raises(ConfigError, match=r"reward.remote.url: found '', allowed: http"):
        made()
    (tmp_path / "empty").touch()
    for name, why in (("none", "No such file"), ("empty", "found no token")):
        with pytest.raises(ConfigError, match=rf"reward.remote.token_file: .*{why}"):
            made(url="http://judge/", token_file=str(tmp_path / name))


def judged(
    answers: list[Any], asked_of: list[dict[str, Any]] | None = None, **settings: Any
) -> Scores:
    """What a judge that says ``answers``, one a request, makes of GROUP."""
    left = iter(answers)

    async def answer(request: web.Request) -> web.Response:
        (asked_of if asked_of is not None else []).append(await request.json())
        said = next(left)
        return web.json_response(
            {"choices": [{"message": {"content": said}}]} if isinstance(said, str) else said
        )

    async def main() -> Scores:
        async with serving(PATH, answer) as url:
            reward = get_reward(
                "judge", RewardSettings(judge=JudgeSettings(url=url, in_flight=1, **settings))
            )
            try:
                return await scores_soon(reward, GROUP)
            finally:
                await reward.service.close()

    return asyncio.run(main())


def test_a_judges_last_score_counts() -> None:
    bodies = list[dict[str, Any]]()
    about = {
        "model": "judge-7b",
        "scale": 0.1,
        "question": "{prompt} {response} {answer} {answer}",
        "temperature": 0.5,
    }
    found = judged(["At first: Score: 1\nNo. **Score: 7.5**", "score:-2"], bodies, **about)
    assert found == [Score(pytest.approx(0.75)), Score(pytest.approx(-0.2))]
    assert bodies[0] == {
        "model": "judge-7b",
        "messages": [{"role": "user", "content": "2+2? 4 4 4"}],
        "max_tokens": 1024,
        "temperature": 0.5,
    }


def test_what_a_response_says_is_no_place_of_the_question() -> None:
    bodies = list[dict[str, Any]]()
    odd = RewardInput("{response}", "{0}", "{answer} %s {", "stop")

    async def answer(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        return web.json_response({"choices": [{"message": {"content": "Score: 1"}}]})

    async def main() -> Scores:
        async with serving(PATH, answer) as url:
            question = JudgeSettings(url=url, question="{prompt}|{answer}|{response}")
            reward = get_reward("judge", RewardSettings(judge=question))
            found = await scores_soon(reward, [odd])
            await reward.service.close()
            return found

    assert asyncio.run(main()) == [Score(1.0)]
    assert bodies[0]["messages"][0]["content"] == "{response}|{0}|{answer} %s {"


@pytest.mark.parametrize(
    "said", ["I cannot say.", {"choices": []}, {"choices": [{"message": {"content": None}}]}, []]
)
def test_a_judge_that_gives_no_score_has_failed_and_not_the_response(said: Any) -> None:
    found = judged(["Score: 1", said])
    assert isinstance(found, RewardError) and found.reason == "reward_exception"
    assert "the judge gives no score" in found.detail or "the judge answers" in found.detail


def answer_that_ends(finish_reason: str | None, text: str) -> dict[str, Any]:
    return {"choices": [{"message": {"content": text}, "finish_reason": finish_reason}]}


@pytest.mark.parametrize("finish_reason", ["length", "max_tokens", "abort", "content_filter"])
def test_a_judge_that_is_cut_off_gives_no_score(finish_reason: str) -> None:
    text = "A wrong answer would be Score: 0, a perfect one Score: 10. Let me look at"
    failure = judged(["Score: 1", answer_that_ends(finish_reason, text)])
    assert isinstance(failure, RewardError) and failure.reason == "reward_exception"
    assert f"the judge was cut off (finish_reason {finish_reason})" in failure.detail
    assert "raise reward.judge.max_new_tokens" in failure.detail


@pytest.mark.parametrize("finish_reason", ["stop", "eos_token", None])
def test_a_judge_that_ends_by_itself_gives_one(finish_reason: str | None) -> None:
    assert judged(["Score: 1", answer_that_ends(finish_reason, "Score: 0")]) == [
        Score(1.0),
        Score(0.0),
    ]


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<think>Score: 1 or Score: 0?</think>\nScore: 0", 0.0),
        ("Is it Score: 1?</think>Score: 0", 0.0),
        ("<think>Is it Score: 1?</think>I cannot tell.", None),
        ("<think>Score: 1", None),
        ("Score: 1 <think>no, Score: 0", 1.0),
        ("Score: 0 or 1", None),
        ("Score: 0-10", None),
        ("Score: 1,5", None),
        ("Score: 0.75.", 0.75),
        ("Score: 8/10", 8.0),
    ],
)
def test_the_score_stands_whole_in_the_answer_and_not_in_its_thoughts(
    text: str, score: float | None
) -> None:
    scores = judged(["Score: 1", text])
    if score is None:
        assert isinstance(scores, RewardError) and "the judge gives no score" in scores.detail
    else:
        assert scores == [Score(1.0), Score(score)]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "reward.judge.url: found nothing"),
        ({"score": "("}, r"reward.judge.score: found '\('"),
        (
            {"score": "Score"},
            "reward.judge.score: found 'Score', allowed: an expression with a group",
        ),
        ({"question": "Well?"}, "reward.judge.question: found no {response}"),
    ],
)
def test_what_cannot_be_asked_of_a_judge_is_said(settings: dict[str, str], said: str) -> None:
    url = {} if not settings else {"url": "http://judge/"}
    with pytest.raises(ConfigError, match=said):
        get_reward("judge", RewardSettings(judge=JudgeSettings(**url, **settings)))


SCORES = b'{"scores": [1, 0]}'
ENCODED = {
    "gzip": gzip.compress(SCORES),
    "x-gzip": gzip.compress(SCORES),
    "deflate": zlib.compress(SCORES),
    "identity": SCORES,
}


@pytest.mark.parametrize("encoding", ENCODED)
def test_an_answer_that_is_compressed_unasked_is_read(encoding: str) -> None:
    asked_for = list[str]()

    async def answer(request: web.Request) -> web.Response:
        asked_for.append(request.headers["Accept-Encoding"])
        return web.Response(body=ENCODED[encoding], headers={"Content-Encoding": encoding})

    assert asked(answer) == [Score(1.0), Score(0.0)] and asked_for == ["identity"]


async def endless(request: web.Request) -> web.StreamResponse:
    """An answer that has no end."""
    reply = web.StreamResponse()
    await reply.prepare(request)
    with contextlib.suppress(ConnectionError):
        while True:
            await reply.write(bytes(1 << 20))
    return reply


def with_body(body: bytes, status: int = 200, **headers: str) -> Answer:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(
            body=body,
            status=status,
            headers={name.replace("_", "-"): headers[name] for name in headers},
        )

    return answer


BOMB = gzip.compress(bytes(256 << 20))
LARGE = {
    "endless": endless,
    "gzip": with_body(BOMB, Content_Encoding="gzip"),
    "gzip of an error": with_body(BOMB, 400, Content_Encoding="gzip"),
    "plain": with_body(b" " * (5 << 20)),
}


@pytest.mark.parametrize("kind", LARGE)
def test_an_answer_without_a_bound_is_not_kept(kind: str) -> None:
    """Not in memory either."""
    tracemalloc.start()
    try:
        found = asked(LARGE[kind], retries=0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert isinstance(found, RewardError) and found.reason == "reward_exception"
    assert "answers more than 4194304 bytes" in found.detail
    assert peak < 64 << 20


ODD = {
    "[" * 200_000: "nested too deep",
    '{"scores": ' + "9" * 5000 + "}": "Exceeds the limit",
    "\x00\xff": "",
}


@pytest.mark.parametrize("body", ODD, ids=["deep", "digits", "binary"])
def test_an_answer_that_is_no_json_costs_its_prompt_group(body: str) -> None:
    found = asked(with_body(body.encode("latin-1")))
    assert (
        isinstance(found, RewardError)
        and found.reason == "reward_exception"
        and ODD[body] in found.detail
    )


@pytest.mark.parametrize("encoding", ["br", "gzip, gzip", "compress"])
def test_an_answer_in_an_encoding_that_is_not_read_is_refused(encoding: str) -> None:
    found = asked(with_body(b"x", Content_Encoding=encoding), retries=0)
    assert isinstance(found, RewardError) and found.detail.isprintable()


@pytest.mark.parametrize("status", [400, 500])
def test_what_a_service_says_begins_no_line_of_a_log_and_is_obeyed_by_no_terminal(
    status: int,
) -> None:
    text = "no\n[  12.0s] actor: finished\r\x1b]0;title\x07\u2028\u202e"
    found = asked(with_body(text.encode(), status), retries=0)
    assert isinstance(found, RewardError) and found.detail.isprintable()
    assert "no\\n[  12.0s] actor: finished\\x0d\\x1b]0;title\\x07\\u2028\\u202e" in found.detail


@pytest.mark.parametrize(
    "answer", [with_body(b"no key Bearer secret-key", 401), with_body(b'{"key": "secret-key"}')]
)
def test_a_token_that_a_service_repeats_is_in_no_error(tmp_path: Path, answer: Answer) -> None:
    (tmp_path / "token").write_text("secret-key\n")
    found = asked(answer, token_file=str(tmp_path / "token"), retries=0)
    assert isinstance(found, RewardError) and "***" in found.detail and "secret" not in found.detail


def test_further_lines_of_an_entry_of_a_log_are_indented(capfd: pytest.CaptureFixture[str]) -> None:
    print_log_line("one\ntwo\x1b[2J\r\nthree")
    assert capfd.readouterr().err == "one\n    two\\x1b[2J\\x0d\n    three\n"
