"""Interfaces of the endpoint with their own clients. The same chat gives the same tokens in each."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.data.chat import ChatTemplate
from relax_hpc.net.transport.exchange import Message
from relax_hpc.rollout.agents.gateway.broker import encode_reply
from relax_hpc.rollout.agents.gateway.front import Reply
from relax_hpc.rollout.agents.session import AgentSession
from tests.requirements import requires
from tests.rollout.agent_helpers import (  # noqa: F401
    ANSWERS,
    ARGUMENTS,
    FUNCTION,
    TEMPLATE,
    TOOLS,
    Chats,
    ToldEngine,
    addition_session,
    chats_fixture,
    rows,
    session_of,
)
from tests.rollout.gateway_helpers import gateway

requires("sglang")

from openai import AsyncOpenAI, AuthenticationError, BadRequestError, NotFoundError  # noqa: E402

QUESTION = "What is 2 + 2?"


@asynccontextmanager
async def served(folder: Path, session: AgentSession) -> AsyncIterator[AsyncOpenAI]:
    async def answer(message: Message) -> Message:
        return encode_reply(
            await session.reply(message["path"], message["body"], message["repeats"])
        )

    async with gateway(folder) as endpoint:
        link, bearer = await endpoint.opened("one", answer)
        async with AsyncOpenAI(
            base_url=f"{endpoint.url}/v1", api_key=bearer, max_retries=0
        ) as client:
            yield client
        link.close()


def check_one_row(chats: Chats, session: AgentSession, engine: ToldEngine) -> None:
    """Check that the session has one row with the tokens of the whole chat."""
    (row,) = rows(session)
    result = {"role": "tool", "content": "4"}
    assistant = [{"role": "assistant", "content": text} for text in ANSWERS]
    whole = [{"role": "user", "content": QUESTION}, assistant[0], result, assistant[1]]
    thanks = {"role": "user", "content": "Thanks"}
    assert [*row.prompt, *row.draft.token_ids] == [
        *chats.whole([*whole, thanks], TOOLS),
        *chats.said(ANSWERS[2]),
    ]
    assert len(engine.requests) == 3 and not session.refused


def test_completions(chats: Chats, tmp_path: Path) -> None:
    async def play() -> None:
        session, engine = addition_session(chats)
        async with served(tmp_path, session) as client:
            assert [model.id async for model in client.models.list()] == ["policy"]
            messages: list[Any] = [{"role": "user", "content": QUESTION}]
            options = {"model": "any", "tools": TOOLS}
            choice = (await client.chat.completions.create(messages=messages, **options)).choices[0]
            assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see."
            (call,) = choice.message.tool_calls
            assert json.loads(call.function.arguments) == ARGUMENTS
            messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "4"}]
            stream = await client.chat.completions.create(messages=messages, stream=True, **options)
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            messages += [
                {"role": "assistant", "content": text},
                {"role": "user", "content": "Thanks"},
            ]
            last = await client.chat.completions.create(messages=messages, **options)
            assert last.choices[0].message.content == "Bye."
            assert last.usage.completion_tokens == len(engine.requests[2][1])
        check_one_row(chats, session, engine)

    asyncio.run(play())


def test_responses(chats: Chats, tmp_path: Path) -> None:
    async def play() -> None:
        session, engine = addition_session(chats)
        async with served(tmp_path, session) as client:
            options: Any = {
                "model": "any",
                "tools": [{"type": "function", "strict": True, **FUNCTION}],
            }
            first = await client.responses.create(input=QUESTION, **options)
            text, call = first.output
            assert text.content[0].text == "Let me see." and json.loads(call.arguments) == ARGUMENTS
            result = {"type": "function_call_output", "call_id": call.call_id, "output": "4"}
            async with client.responses.stream(
                previous_response_id=first.id, input=[result], **options
            ) as stream:
                second = await stream.get_final_response()
            assert (
                second.output_text == ANSWERS[1]
                and second.status == "completed"
                and second.usage.output_tokens > 1
            )
            # The same chat with all messages.
            items = [{"role": "user", "content": QUESTION}, text, call, result, *second.output]
            items += [{"role": "user", "content": "Thanks"}]
            assert (await client.responses.create(input=items, **options)).output_text == "Bye."
        check_one_row(chats, session, engine)

    asyncio.run(play())


def test_messages(chats: Chats) -> None:
    """The lock file has no client of Anthropic, so the test reads the stream itself."""

    async def play() -> None:
        session, engine = addition_session(chats)
        tool = {
            "name": "add",
            "description": FUNCTION["description"],
            "input_schema": FUNCTION["parameters"],
        }

        async def ask(messages: list[Any], **fields: Any) -> bytes:
            body = {
                "model": "any",
                "max_tokens": 100,
                "tools": [tool],
                "messages": messages,
                **fields,
            }
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
        result = {
            "type": "tool_result",
            "tool_use_id": call["id"],
            "content": [{"type": "text", "text": "4"}],
        }
        messages += [
            {"role": "assistant", "content": first["content"]},
            {"role": "user", "content": [result]},
        ]
        stream = (await ask(messages, stream=True)).decode()
        events = list[tuple[str, Any]]()
        for lines in stream.strip().split("\n\n"):
            name, data = lines.split("\n")
            events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
        assert all(name == event["type"] for name, event in events)
        assert [name for name, _ in events] == [
            "message_start",
            *("content_block_start", "content_block_delta", "content_block_stop"),
            *("message_delta", "message_stop"),
        ]
        answer = events[2][1]["delta"]["text"]
        assert answer == ANSWERS[1] and events[4][1]["delta"]["stop_reason"] == "end_turn"
        messages += [
            {"role": "assistant", "content": answer},
            {"role": "user", "content": "Thanks"},
        ]
        assert json.loads(await ask(messages))["content"] == [{"type": "text", "text": "Bye."}]
        check_one_row(chats, session, engine)

    asyncio.run(play())


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
def test_results_are_in_the_order_of_their_calls(chats: Chats, path: str) -> None:
    """The template has no ids of calls, so only the order tells the policy which result is which."""

    async def play() -> None:
        names = ["c0", "c1", "c2"]
        calls = [
            {"id": name, "type": "function", "function": {"name": "add", "arguments": "{}"}}
            for name in names
        ]
        results = [
            {"role": "tool", "tool_call_id": name, "content": f"of {name}"}
            for name in reversed(names)
        ]
        question = {"role": "user", "content": "x"}
        bodies: dict[str, Any] = {
            "chat/completions": {
                "messages": [question, {"role": "assistant", "tool_calls": calls}, *results]
            },
            "responses": {
                "input": [
                    question,
                    *(
                        {"type": "function_call", "call_id": name, "name": "add", "arguments": "{}"}
                        for name in names
                    ),
                    *(
                        {"type": "function_call_output", "call_id": name, "output": f"of {name}"}
                        for name in reversed(names)
                    ),
                ]
            },
            "messages": {
                "messages": [
                    question,
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "tool_use", "id": name, "name": "add", "input": {}}
                            for name in names
                        ],
                    },
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "tool_use_id": name, "content": f"of {name}"}
                            for name in reversed(names)
                        ],
                    },
                ]
            },
        }
        session, engine = addition_session(chats)
        reply = await session.reply(f"/v1/{path}", json.dumps(bodies[path]).encode(), 0)
        prompt = chats.tokenizer.decode(engine.requests[0][0])
        assert reply.status == 200 and prompt.index("of c0") < prompt.index("of c1") < prompt.index(
            "of c2"
        )

    asyncio.run(play())


def test_results_without_a_call_keep_their_position(chats: Chats) -> None:
    async def play() -> None:
        call = {"id": "c0", "type": "function", "function": {"name": "add", "arguments": "{}"}}
        results = [
            {"role": "tool", "content": "first"},
            {"role": "tool", "tool_call_id": "c0", "content": "second"},
        ]
        body = {
            "messages": [
                {"role": "user", "content": "x"},
                {"role": "assistant", "tool_calls": [call]},
                *results,
            ]
        }
        session, engine = addition_session(chats)
        assert (
            await session.reply("/v1/chat/completions", json.dumps(body).encode(), 0)
        ).status == 200
        prompt = chats.tokenizer.decode(engine.requests[0][0])
        assert prompt.index("first") < prompt.index("second")

    asyncio.run(play())


@pytest.mark.parametrize(
    ("result", "shown"),
    [
        ({"content": "no such file", "is_error": True}, "Error: no such file"),
        (
            {"content": [{"type": "text", "text": "Error: no such file"}], "is_error": True},
            "Error: no such file",
        ),
        ({"is_error": True}, "Error: "),
        ({"content": "fine", "is_error": False}, "fine"),
    ],
)
def test_a_result_that_is_an_error_is_marked_as_error(
    chats: Chats, result: dict[str, Any], shown: str
) -> None:
    async def play() -> None:
        use = {"type": "tool_use", "id": "c", "name": "add", "input": {}}
        messages = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", **result}]},
        ]
        session, engine = addition_session(chats)
        assert (
            await session.reply("/v1/messages", json.dumps({"messages": messages}).encode(), 0)
        ).status == 200
        assert f"<tool_response>\n{shown}\n</tool_response>" in chats.tokenizer.decode(
            engine.requests[0][0]
        )

    asyncio.run(play())


def test_the_template_gets_the_name_of_a_message(chats: Chats) -> None:
    async def play() -> None:
        source = TEMPLATE.replace("<|im_start|>user\n{{", "<|im_start|>user {{ message.name }}\n{{")
        template = ChatTemplate(source, {}, "")
        session, engine = addition_session(replace(chats, template=template))
        try:
            for names in (["Ann"], ["Ann", "Bob"], ["Eve", "Bob"]):
                messages = []
                for name, answer in zip(names, ANSWERS, strict=False):
                    messages += [
                        {"role": "user", "name": name, "content": "x"},
                        {"role": "assistant", "content": answer},
                    ]
                body = json.dumps({"messages": messages[:-1]}).encode()
                assert (await session.reply("/v1/chat/completions", body, 0)).status == 200
                assert f"user {names[-1]}\nx" in chats.tokenizer.decode(engine.requests[-1][0])
        finally:
            template.close()
        assert len(rows(session)) == 2, "a chat with another name is another row"

    asyncio.run(play())


def test_a_response_of_the_messages_interface_names_its_stop_sequence(chats: Chats) -> None:
    async def play() -> None:
        session = session_of(
            chats, ToldEngine(lambda before, limit: chats.said("so</code> and on"))
        )
        body = {"messages": [{"role": "user", "content": "x"}], "stop_sequences": ["</code>"]}
        answer = json.loads(
            (await session.reply("/v1/messages", json.dumps(body).encode(), 0)).body
        )
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "</code>")
        assert answer["content"][0]["text"] == "so"

    asyncio.run(play())


def test_clients_of_each_interface_can_read_its_errors(chats: Chats, tmp_path: Path) -> None:
    async def play() -> None:
        session, _ = addition_session(chats)
        async with served(tmp_path, session) as client:
            with pytest.raises(BadRequestError) as refused:
                await client.chat.completions.create(
                    model="any", messages=[{"role": "user", "content": "ab " * 9000}]
                )
            assert refused.value.code == "context_length_exceeded" and refused.value.param is None
            with pytest.raises(NotFoundError):
                await client.embeddings.create(model="any", input="x")
            async with AsyncOpenAI(
                base_url=client.base_url, api_key="sk-none", max_retries=0
            ) as stranger:
                with pytest.raises(AuthenticationError):
                    await stranger.models.list()
        for status, code, kind in (
            (401, "unknown_bearer", "authentication_error"),
            (413, "too_large", "request_too_large"),
        ):
            error = json.loads(Reply.error(status, code, "why", "/v1/messages").body)
            assert error == {
                "type": "error",
                "error": {"type": kind, "message": "why", "code": code},
            }

    asyncio.run(play())
