"""Interfaces of the endpoint, by the clients that are written for them: one chat, whichever way it is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.gateway.broker import message_of
from relax_hpc.gateway.exchange import Message
from relax_hpc.rollout.agents.session import Session
from relax_hpc.rollout.history import History
from tests.agent_helpers import TOOLS, Chats, ToldEngine
from tests.gateway_helpers import gateway
from tests.requirements import requires
from tests.test_agents import rows, session_of

requires("sglang")

from openai import AsyncOpenAI  # noqa: E402

ARGUMENTS = {"a": 2, "b": 2}
CALL = f'<tool_call>\n{{"name": "add", "arguments": {json.dumps(ARGUMENTS)}}}\n</tool_call>'
SAID = [f"Let me see.\n{CALL}", "It is 4.", "Bye."]
FUNCTION = TOOLS[0]["function"]
QUESTION = "What is 2 + 2?"


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chats]:
    made = Chats.in_folder(tmp_path_factory.mktemp("model"))
    yield made
    made.template.close()


def session_that_says(chats: Chats) -> tuple[Session, ToldEngine]:
    said = iter(SAID)
    engine = ToldEngine(lambda before, most: chats.said(next(said)))
    return session_of(chats, engine, History()), engine


@asynccontextmanager
async def served(folder: Path, session: Session) -> AsyncIterator[AsyncOpenAI]:
    async def answer(message: Message) -> Message:
        return message_of(await session.reply(message["path"], message["body"], message["repeats"]))

    async with gateway(folder) as there:
        link, bearer = await there.opened("one", answer)
        async with AsyncOpenAI(base_url=f"{there.url}/v1", api_key=bearer, max_retries=0) as client:
            yield client
        link.close()


def check(chats: Chats, session: Session, engine: ToldEngine) -> None:
    """All of it is one row, whose tokens are those of the whole chat."""
    (row,) = rows(session)
    result = {"role": "tool", "content": "4"}
    assistant = [{"role": "assistant", "content": text} for text in SAID]
    whole = [{"role": "user", "content": QUESTION}, assistant[0], result, assistant[1]]
    thanks = {"role": "user", "content": "Thanks"}
    assert [*row.prompt, *row.draft.token_ids] == [*chats.whole([*whole, thanks], TOOLS), *chats.said(SAID[2])]
    assert len(engine.asked) == 3 and not session.refused


def test_completions(chats: Chats, tmp_path: Path) -> None:
    async def play() -> None:
        session, engine = session_that_says(chats)
        async with served(tmp_path, session) as client:
            assert [model.id async for model in client.models.list()] == ["policy"]
            messages: list[Any] = [{"role": "user", "content": QUESTION}]
            about = {"model": "any", "tools": TOOLS}
            choice = (await client.chat.completions.create(messages=messages, **about)).choices[0]
            assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see."
            (call,) = choice.message.tool_calls
            assert json.loads(call.function.arguments) == ARGUMENTS
            messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "4"}]
            stream = await client.chat.completions.create(messages=messages, stream=True, **about)
            said = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Thanks"}]
            last = await client.chat.completions.create(messages=messages, **about)
            assert last.choices[0].message.content == "Bye." and last.usage.completion_tokens == len(engine.asked[2][1])
        check(chats, session, engine)

    asyncio.run(play())


def test_responses(chats: Chats, tmp_path: Path) -> None:
    async def play() -> None:
        session, engine = session_that_says(chats)
        async with served(tmp_path, session) as client:
            about: Any = {"model": "any", "tools": [{"type": "function", "strict": True, **FUNCTION}]}
            first = await client.responses.create(input=QUESTION, **about)
            text, call = first.output
            assert text.content[0].text == "Let me see." and json.loads(call.arguments) == ARGUMENTS
            result = {"type": "function_call_output", "call_id": call.call_id, "output": "4"}
            async with client.responses.stream(previous_response_id=first.id, input=[result], **about) as stream:
                second = await stream.get_final_response()
            assert second.output_text == SAID[1] and second.status == "completed" and second.usage.output_tokens > 1
            # The same chat, told in full.
            items = [{"role": "user", "content": QUESTION}, text, call, result, *second.output]
            items += [{"role": "user", "content": "Thanks"}]
            assert (await client.responses.create(input=items, **about)).output_text == "Bye."
        check(chats, session, engine)

    asyncio.run(play())


def test_messages(chats: Chats) -> None:
    """Of Anthropic's client there is none in the lock; what it reads of a stream is put together here."""

    async def play() -> None:
        session, engine = session_that_says(chats)
        tool = {"name": "add", "description": FUNCTION["description"], "input_schema": FUNCTION["parameters"]}

        async def ask(messages: list[Any], **more: Any) -> bytes:
            body = {"model": "any", "max_tokens": 100, "tools": [tool], "messages": messages, **more}
            reply = await session.reply("/v1/messages", json.dumps(body).encode(), 0)
            assert reply.status == 200, reply.body
            return reply.body

        messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]
        first = json.loads(await ask(messages))
        text, call = first["content"]
        assert (first["stop_reason"], text, call["input"]) == (
            "tool_use",
            {"type": "text", "text": "Let me see."},
            ARGUMENTS,
        )
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "4"}]}
        messages += [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
        events = [event.split("\n") for event in (await ask(messages, stream=True)).decode().strip().split("\n\n")]
        told = [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in events]
        assert all(name == about["type"] for name, about in told)
        assert [name for name, _ in told] == [
            "message_start",
            *("content_block_start", "content_block_delta", "content_block_stop"),
            *("message_delta", "message_stop"),
        ]
        said = told[2][1]["delta"]["text"]
        assert said == SAID[1] and told[4][1]["delta"]["stop_reason"] == "end_turn"
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Thanks"}]
        assert json.loads(await ask(messages))["content"] == [{"type": "text", "text": "Bye."}]
        check(chats, session, engine)

    asyncio.run(play())


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("responses", {"input": "x", "previous_response_id": "resp_7"}, "unknown_response"),
        ("responses", {"input": [{"type": "computer_call"}]}, "wrong_field"),
        ("responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "wrong_field"),
        ("responses", {"input": []}, "wrong_field"),
        ("messages", {"messages": [{"role": "tool", "content": "x"}]}, "wrong_field"),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "wrong_field"),
        ("messages", {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "bash"}]}, "wrong_field"),
        ("messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": -1}, "wrong_field"),
    ],
)
def test_a_bad_request_is_refused_by_name(chats: Chats, path: str, body: Any, says: str) -> None:
    async def play() -> None:
        session, engine = session_that_says(chats)
        reply = await session.reply(f"/v1/{path}", json.dumps(body).encode(), 0)
        assert reply.status in (400, 404) and json.loads(reply.body)["error"]["code"] == says and not engine.asked

    asyncio.run(play())
