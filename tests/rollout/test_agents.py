"""Episodes of agent programs, each a process that asks a gateway: rewards, failures and
restarts."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.config.schema import Config, EnvironmentConfig
from relax_hpc.config.schema.environment import AGENT
from relax_hpc.data.media import PromptMedium
from relax_hpc.data.multimodal.medium import Kind
from relax_hpc.data.prompts import Prompt
from relax_hpc.environments.base import EnvironmentFault
from relax_hpc.rewards.environment_reward import environment
from relax_hpc.rollout.agents.agents import Agents
from relax_hpc.rollout.engines.engine import BadAnswer, Episode, GenerateRequest, Generation
from relax_hpc.rollout.episodes.history import History
from relax_hpc.rollout.episodes.player import Player
from relax_hpc.rollout.rows import reward_input
from tests.rollout.agent_helpers import (  # noqa: F401
    CALL,
    TOOLS,
    Chats,
    ToldEngine,
    chats_fixture,
    scripted,
)
from tests.rollout.gateway_helpers import LIMIT_S, Gateway, gateway


@asynccontextmanager
async def make_player(
    node: Gateway, chats: Chats, command: list[str], **limits: Any
) -> AsyncIterator[tuple[Player, list[EnvironmentFault]]]:
    """Player of a rollout process, and the faults that it noted."""
    config, faults = Config(run_dir=str(node.run.root)), list[EnvironmentFault]()
    config.data.max_prompt_tokens, config.rollout.max_new_tokens = 2000, 2000
    config.environment = EnvironmentConfig(kind=AGENT, options={"command": command}, **limits)
    stage = Agents(config, chats.tokenizer, lambda reason: None)
    player = Player(stage, config.environment.max_faults, LIMIT_S, faults.append)
    await player.start()
    try:
        yield player, faults
    finally:
        await player.close()


def test_an_agent_program_that_knows_nothing_of_us_plays_an_episode(
    chats: Chats, tmp_path: Path
) -> None:
    """By OpenAI's own client, on another node than the gateway's, whose forwarder it talks to."""

    async def play() -> None:
        async with gateway(tmp_path, "another-node") as node:
            async with make_player(
                node, chats, ["python", "-m", "tests.rollout.agent_program"]
            ) as (
                player,
                faults,
            ):
                engine, history = scripted(chats, f"hm {CALL}", "It is 4."), History()
                episode = await player.play(history, engine.start())
            assert isinstance(episode, Episode) and not faults and history.ended is episode
            (row,) = episode.rows
            ids = [*row.prompt, *row.generation.token_ids]
            chat = [
                {"role": "user", "content": "2+2?"},
                {"role": "assistant", "content": f"hm {CALL}"},
            ]
            chat += [{"role": "tool", "content": "4"}]
            assert ids == [*chats.whole(chat, TOOLS), *chats.said("It is 4.")]
            both = zip(row.generation.token_ids, row.generation.token_versions, strict=True)
            sampled = list[int]()
            for _, generated in engine.requests:
                sampled += generated
            assert [token for token, version in both if version] == sampled
            assert (episode.finish_reason, episode.outcome["reward"]) == ("env_done", 1.0)
            info = episode.outcome["info"]
            assert (
                info["said"]["seen"] == "4"
                and "{'level': 3}" in info["output"]
                and info["exit_code"] == 0
            )
            assert node.broker.request_count == 2

    asyncio.run(play())


PROGRAM = """
import json, os, sys, time, urllib.request
def send(text="x", **more):
    body = json.dumps({"messages": [{"role": "user", "content": text}], **more}).encode()
    head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, body, head)) as got:
        return json.loads(got.read())
def ask(text):
    try:
        return send(text)
    except OSError as error:
        return error
"""


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("sys.exit(3)", "it ended by code 3, without an answer"),
        ("print('no such model'); os.close(1)", "no such model"),
        ("send(n=2)", "wrong_field: n: found '2', allowed: 1 or nothing"),
        ("while True: ask('')", None),
        ("ask('x'); sys.exit(1)", None),
        ("ask('x'); os.kill(os.getpid(), 11)", None),
        ("ask('x'); os.spawnlp(os.P_NOWAIT, 'sleep', 'sleep', '1000')", None),
    ],
)
def test_a_program_that_fails_costs_its_own_episode(
    chats: Chats, tmp_path: Path, program: str, says: str | None
) -> None:
    async def play() -> None:
        async with gateway(tmp_path) as node:
            command = ["python", "-c", PROGRAM + program]
            async with make_player(node, chats, command, max_faults=1, max_turns=3) as (
                player,
                faults,
            ):
                engine = ToldEngine(lambda before, limit: chats.said("ok"))
                episode = await player.play(History(), engine.start())
            if says:
                assert isinstance(episode, BadAnswer) and says in str(episode) and len(faults) == 2
            else:
                ends = {
                    "while": "max_turns",
                    "sys.exit(1)": "program_failed",
                    "os.kill(os.getpid(), 11)": "program_failed",
                }
                ended = next((ends[code] for code in ends if code in program), "env_done")
                assert isinstance(episode, Episode) and episode.finish_reason == ended
                assert episode.outcome["reward"] is None and len(faults) == (
                    2 if "os.kill" in program else 0
                )

    asyncio.run(play())


@pytest.mark.parametrize(
    ("program", "ended", "reward"),
    [
        ("while True: send()", "max_turns", 0.0),
        ("ask('x'); raise ValueError('no such command')", "program_failed", 0.0),
        ("ask('x'); os.kill(os.getpid(), 9)", "program_failed", 0.0),
        # Words of a command that kills the program then.
        (
            "ask('x'); print('{\"reward\": 1.0}', flush=True); os.kill(os.getpid(), 9)",
            "program_failed",
            0.0,
        ),
        ("ask('x'); os.write(3, b'{\"reward\": 0.5}'); os.kill(os.getpid(), 9)", "env_done", 0.5),
        ("ask('x'); print('{\"reward\": 0.5}'); sys.exit(2)", "env_done", 0.5),
        ("ask('x'); print('done')", "env_done", None),
        ("ask('x'); print(json.dumps({'reward': 2 + 2 == 4}))", "env_done", 1.0),
        ("ask('x'); os.write(3, b'{\"reward\": false}')", "env_done", 0.0),
        (
            "ask('x'); print(json.dumps({'reward': '1'}))",
            "env_done",
            'reward: found "1", allowed: a finite number',
        ),
        (
            "ask('x'); print('{\"reward\": NaN}')",
            "env_done",
            'reward: found "NaN", allowed: a finite number',
        ),
        (
            "ask('x'); print(json.dumps({'reward': [1.0]}))",
            "env_done",
            "reward: found \\[1.0\\], allowed: a finite",
        ),
    ],
)
def test_a_missing_reward_is_0_where_the_policy_has_led_there_and_is_counted(
    chats: Chats, tmp_path: Path, program: str, ended: str, reward: float | str | None
) -> None:
    """A ``reward`` that is a text is the error about it."""

    async def play() -> tuple[Any, Counter[str]]:
        counts = Counter[str]()
        async with gateway(tmp_path) as node:
            command = ["python", "-c", PROGRAM + program]
            async with make_player(node, chats, command, max_faults=1, max_turns=2) as (player, _):
                player._note_unrewarded = lambda reason: counts.update([reason])
                engine = ToldEngine(lambda before, limit: chats.said("ok"))
                return await player.play(History(), engine.start()), counts

    episode, counts = asyncio.run(play())
    assert isinstance(episode, Episode) and episode.finish_reason == ended
    sample = reward_input(Prompt("p", (1, 2, 3), "2+2?", "4"), episode, chats.tokenizer)
    if not isinstance(reward, float):
        with pytest.raises(ValueError, match=reward or "no reward of an environment"):
            environment(sample)
    else:
        assert environment(sample) == reward
    assert counts == ({ended: 1} if ended != "env_done" else {})


ASK = "ask('x'); "


@pytest.mark.parametrize("asks", [True, False])
def test_the_bearer_of_a_program_is_not_kept_with_what_it_prints(
    chats: Chats, tmp_path: Path, asks: bool
) -> None:
    """Clients print their key when they are refused, and programs their environment."""
    program = "key = os.environ['OPENAI_API_KEY']; print(key, flush=True); "
    program += (
        "os.write(3, json.dumps({'key': key}).encode()); sys.exit(f'Incorrect API key: {key}')"
    )

    async def play() -> Any:
        async with gateway(tmp_path) as node:
            command = ["python", "-c", f"{PROGRAM}{ASK if asks else ''}{program}"]
            async with make_player(node, chats, command, max_faults=0) as (player, _):
                return await player.play(
                    History(), ToldEngine(lambda before, limit: chats.said("ok")).start()
                )

    episode = asyncio.run(play())
    if asks:
        info = episode.outcome["info"]
        assert (info["output"].strip(), info["errors"].strip()) == ("***", "Incorrect API key: ***")
        assert info["said"] == {"key": "***"}
    else:
        assert "Incorrect API key: ***" in str(episode)


def test_a_prompt_with_media_is_refused(chats: Chats, tmp_path: Path) -> None:
    """Its program would play without them."""

    async def play() -> Any:
        async with gateway(tmp_path) as node:
            async with make_player(node, chats, ["true"]) as (player, _):
                start = ToldEngine(lambda before, limit: chats.said("ok")).start()
                medium = PromptMedium(Kind("image"), b"", ((0, 1),))
                return await player.play(
                    History(), replace(start, prompt=replace(start.prompt, media=(medium,)))
                )

    refused = asyncio.run(play())
    assert isinstance(refused, BadAnswer) and "found image in the prompt, allowed: text" in str(
        refused
    )


def test_an_engines_fault_ends_the_program(chats: Chats, tmp_path: Path) -> None:
    bad = BadAnswer("nan_logprob", "nan")

    async def once(request: GenerateRequest) -> BadAnswer:
        return bad

    async def play() -> None:
        async with gateway(tmp_path) as node:
            async with make_player(
                node, chats, ["python", "-c", PROGRAM + "ask('x'); time.sleep(1000)"]
            ) as (
                player,
                faults,
            ):
                start = ToldEngine(lambda before, limit: []).start()
                assert await player.play(History(), replace(start, ask=once)) is bad and not faults

    asyncio.run(play())


@pytest.mark.parametrize("process", ["gateway", "forwarder"])
def test_a_program_whose_endpoint_has_gone_is_begun_again_and_asks_for_the_same(
    chats: Chats, tmp_path: Path, process: str
) -> None:
    async def play() -> None:
        async with gateway(tmp_path, "another-node" if process == "forwarder" else "") as node:
            async with make_player(
                node, chats, ["python", "-c", PROGRAM + "ask('x'); ask('y')"]
            ) as (
                player,
                faults,
            ):
                engine, history, gone = (
                    ToldEngine(lambda before, limit: chats.said("ok")),
                    History(),
                    asyncio.Event(),
                )
                endpoint = player._backend._endpoint

                async def once(request: GenerateRequest) -> Generation | BadAnswer:
                    if len(engine.requests) == 1 and not gone.is_set():
                        gone.set()
                        if process == "forwarder":
                            endpoint._forwarder.kill()
                        else:
                            endpoint._link.close("a test")
                        await endpoint._link.lost.wait()
                    return await engine.once(request)

                episode = await player.play(history, replace(engine.start(), ask=once))
            assert isinstance(episode, Episode) and not faults
            assert len(episode.rows) == 2 and len(engine.requests) in (2, 3), (
                "of the first answer there is a record"
            )

    asyncio.run(play())


def test_a_gateway_is_waited_for_without_the_clock_of_the_episode(
    chats: Chats, tmp_path: Path
) -> None:
    async def play() -> None:
        loop, ahead_s = asyncio.get_running_loop(), 0.0
        real = loop.time
        loop.time = lambda: real() + ahead_s  # type: ignore[method-assign]
        async with gateway(tmp_path) as node:
            async with make_player(node, chats, ["python", "-c", PROGRAM + "ask('x')"]) as (
                player,
                faults,
            ):
                engine, endpoint = (
                    ToldEngine(lambda before, limit: chats.said("ok")),
                    player._backend._endpoint,
                )
                player._limit_s, reached = LIMIT_S / 2, endpoint.connect

                async def late() -> Any:
                    nonlocal ahead_s
                    ahead_s += LIMIT_S * 2 / 3
                    await asyncio.sleep(0)
                    return await reached()

                endpoint.connect = late
                assert (
                    isinstance(await player.play(History(), engine.start()), Episode) and not faults
                )

    asyncio.run(play())


def test_what_a_program_asked_for_and_did_not_wait_for_is_no_part_of_its_episode(
    chats: Chats, tmp_path: Path
) -> None:
    marker = tmp_path / "asked"
    threads = "[threading.Thread(target=ask, args=(text,), daemon=True).start() for text in 'yz']"
    leave = f"\nwhile not os.path.exists({str(marker)!r}): time.sleep(0.01)\nos._exit(0)"

    async def play() -> None:
        async with gateway(tmp_path) as node:
            command = ["python", "-c", f"import threading\n{PROGRAM}ask('x'); {threads}{leave}"]
            async with make_player(node, chats, command) as (player, faults):
                engine, history, waiting = (
                    ToldEngine(lambda before, limit: chats.said("ok")),
                    History(),
                    0,
                )

                async def once(request: GenerateRequest) -> Generation | BadAnswer:
                    nonlocal waiting
                    if not engine.requests:
                        return await engine.once(request)
                    waiting += 1
                    if waiting == 2:
                        marker.touch()
                    assert request.draft
                    request.draft.add([65], [-1.0], [1])
                    return await asyncio.get_running_loop().create_future()

                episode = await player.play(history, replace(engine.start(), ask=once))
            assert (
                isinstance(episode, Episode)
                and not faults
                and waiting == 2
                and history.may_differ_from_log
            )
            (row,) = episode.rows
            assert (
                row.generation.token_ids == chats.said("ok") and episode.finish_reason == "env_done"
            )

    asyncio.run(play())
