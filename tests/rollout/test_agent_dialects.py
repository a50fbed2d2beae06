"""Interfaces of the endpoint, by the clients that are written for them: one chat, whichever way it
is told."""

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
from relax_hpc.rollout.episodes.history import History
from tests.requirements import requires
from tests.rollout.agent_helpers import (  # noqa: F401
    TEMPLATE,
    TOOLS,
    Chats,
    ToldEngine,
    chats_fixture,
    rows,
    session_of,
)
from tests.rollout.gateway_helpers import gateway

requires("sglang")

from openai import AsyncOpenAI, AuthenticationError, BadRequestError, NotFoundError  # noqa: E402

ARGUMENTS = {"a": 2, "b": 2}
CALL = f'<tool_call>\n{{"name": "add", "arguments": {json.dumps(ARGUMENTS)}}}\n</tool_call>'
SAID = [f"Let me see.\n{CALL}", "It is 4.", "Bye."]
FUNCTION = TOOLS[0]["function"]
QUESTION = "What is 2 + 2?"


def session_that_says(chats: Chats) -> tuple[AgentSession, ToldEngine]:
    said = iter(SAID)
    engine = ToldEngine(lambda before, most: chats.said(next(said)))
    return session_of(chats, engine, History()), engine


@asynccontextmanager
async def served(folder: Path, session: AgentSession) -> AsyncIterator[AsyncOpenAI]:
    async def answer(message: Message) -> Message:
        return encode_reply(
            await session.reply(message["path"], message["body"], message["repeats"])
        )

    async with gateway(folder) as there:
        link, bearer = await there.opened("one", answer)
        async with AsyncOpenAI(base_url=f"{there.url}/v1", api_key=bearer, max_retries=0) as client:
            yield client
        link.close()


def check(chats: Chats, session: AgentSession, engine: ToldEngine) -> None:
    """All of it is one row, whose tokens are those of the whole chat."""
    (row,) = rows(session)
    result = {"role": "tool", "content": "4"}
    assistant = [{"role": "assistant", "content": text} for text in SAID]
    whole = [{"role": "user", "content": QUESTION}, assistant[0], result, assistant[1]]
    thanks = {"role": "user", "content": "Thanks"}
    assert [*row.prompt, *row.draft.token_ids] == [
        *chats.whole([*whole, thanks], TOOLS),
        *chats.said(SAID[2]),
    ]
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
            messages += [
                {"role": "assistant", "content": said},
                {"role": "user", "content": "Thanks"},
            ]
            last = await client.chat.completions.create(messages=messages, **about)
            assert last.choices[
                0
            ].message.content == "Bye." and last.usage.completion_tokens == len(engine.asked[2][1])
        check(chats, session, engine)

    asyncio.run(play())


def test_responses(chats: Chats, tmp_path: Path) -> None:
    async def play() -> None:
        session, engine = session_that_says(chats)
        async with served(tmp_path, session) as client:
            about: Any = {
                "model": "any",
                "tools": [{"type": "function", "strict": True, **FUNCTION}],
            }
            first = await client.responses.create(input=QUESTION, **about)
            text, call = first.output
            assert text.content[0].text == "Let me see." and json.loads(call.arguments) == ARGUMENTS
            result = {"type": "function_call_output", "call_id": call.call_id, "output": "4"}
            async with client.responses.stream(
                previous_response_id=first.id, input=[result], **about
            ) as stream:
                second = await stream.get_final_response()
            assert (
                second.output_text == SAID[1]
                and second.status == "completed"
                and second.usage.output_tokens > 1
            )
            # The same chat, told in full.
            items = [{"role": "user", "content": QUESTION}, text, call, result, *second.output]
            items += [{"role": "user", "content": "Thanks"}]
            assert (await client.responses.create(input=items, **about)).output_text == "Bye."
        check(chats, session, engine)

    asyncio.run(play())


def test_messages(chats: Chats) -> None:
    """Of Anthropic's client there is none in the lock; what it reads of a stream is put together
    here."""

    async def play() -> None:
        session, engine = session_that_says(chats)
        tool = {
            "name": "add",
            "description": FUNCTION["description"],
            "input_schema": FUNCTION["parameters"],
        }

        async def ask(messages: list[Any], **more: Any) -> bytes:
            body = {
                "model": "any",
                "max_tokens": 100,
                "tools": [tool],
                "messages": messages,
                **more,
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
        events = [
            event.split("\n")
            for event in (await ask(messages, stream=True)).decode().strip().split("\n\n")
        ]
        told = [
            (name.removeprefix("event: "), json.loads(data.removeprefix("data: ")))
            for name, data in events
        ]
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
        (
            "responses",
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "wrong_field",
        ),
        ("responses", {"input": []}, "wrong_field"),
        ("messages", {"messages": [{"role": "tool", "content": "x"}]}, "wrong_field"),
        (
            "messages",
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "wrong_field",
        ),
        (
            "messages",
            {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "bash"}]},
            "wrong_field",
        ),
        (
            "messages",
            {"messages": [{"role": "user", "content": "x"}], "max_tokens": -1},
            "wrong_field",
        ),
    ],
)
def test_a_bad_request_is_refused_by_name(chats: Chats, path: str, body: Any, says: str) -> None:
    async def play() -> None:
        session, engine = session_that_says(chats)
        reply = await session.reply(f"/v1/{path}", json.dumps(body).encode(), 0)
        assert (
            reply.status in (400, 404)
            and json.loads(reply.body)["error"]["code"] == says
            and not engine.asked
        )

    asyncio.run(play())


TOOL = {"type": "function", "name": "add", "parameters": FUNCTION["parameters"]}
ASKS_FOR_MORE: dict[str, list[dict[str, Any]]] = {
    "chat/completions": [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}},
        {"response_format": {"type": "json_object"}},
        {"logprobs": True},
        {"top_logprobs": 5},
        {"tools": TOOLS, "tool_choice": "required"},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "add"}}},
        {"tools": TOOLS, "parallel_tool_calls": False},
        {"logit_bias": {"50256": -100}},
        {"functions": [FUNCTION]},
        {"function_call": "auto"},
        {"web_search_options": {}},
        {"modalities": ["text", "audio"]},
        {"audio": {"voice": "alloy", "format": "wav"}},
        {"n": 2},
        {"n": True},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"guided_json": {}},
        {"messages": [{"role": "function", "name": "add", "content": "4"}]},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "user", "content": "x"}, {"role": "tool", "tool_call_id": "c"}]},
        {
            "messages": [
                {"role": "assistant", "content": None, "refusal": "No."},
                {"role": "user", "content": "x"},
            ]
        },
        {
            "messages": [
                {"role": "assistant", "function_call": FUNCTION},
                {"role": "user", "content": "x"},
            ]
        },
    ],
    "responses": [
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": {}}}},
        {"tools": [{"type": "web_search"}]},
        {"tools": [TOOL, {"type": "file_search", "vector_store_ids": ["x"]}]},
        {"tools": [TOOL], "tool_choice": "required"},
        {"tools": [TOOL], "tool_choice": {"type": "function", "name": "add"}},
        {"truncation": "auto"},
        {"background": True},
        {"conversation": "conv_1"},
        {"prompt": {"id": "pmpt_1"}},
        {"include": ["message.output_text.logprobs"]},
        {"previous_response_id": ["resp_0"]},
        {"input": [{"role": ["user"], "content": "x"}]},
        {"input": [{"role": "user", "content": None}]},
        {"input": [{"type": "reasoning", "summary": []}]},
    ],
    "messages": [
        {"tool_choice": {"type": "any"}, "tools": [{"name": "add", "input_schema": {}}]},
        {
            "tool_choice": {"type": "tool", "name": "add"},
            "tools": [{"name": "add", "input_schema": {}}],
        },
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"output_config": {"format": {"type": "json_schema", "schema": {}}}},
        {"output_format": {"type": "json_schema", "schema": {}}},
        {"mcp_servers": [{"type": "url", "url": "http://x", "name": "x"}]},
        {"container": "x"},
        {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]},
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "thinking", "thinking": "x"},
                        {"type": "text", "text": "x"},
                    ],
                }
            ]
        },
    ],
}
ASKS_FOR_NOTHING: dict[str, dict[str, Any]] = {
    "chat/completions": {
        **{
            "model": "any",
            "n": 1,
            "temperature": 0.0,
            "top_p": 0.5,
            "seed": 3,
            "presence_penalty": 1,
            "user": "me",
        },
        **{
            "frequency_penalty": 0.5,
            "response_format": {"type": "text"},
            "logprobs": False,
            "tool_choice": "auto",
        },
        **{
            "parallel_tool_calls": True,
            "stream_options": None,
            "logit_bias": None,
            "store": True,
            "functions": None,
        },
        **{
            "reasoning_effort": "low",
            "verbosity": "low",
            "service_tier": "auto",
            "stop": None,
            "metadata": {"a": "b"},
        },
    },
    "responses": {
        **{
            "text": {"format": {"type": "text"}, "verbosity": "low"},
            "reasoning": {"effort": "low"},
            "store": False,
        },
        **{
            "truncation": "disabled",
            "include": ["reasoning.encrypted_content"],
            "parallel_tool_calls": True,
        },
        **{
            "tool_choice": "auto",
            "background": False,
            "temperature": 1.0,
            "previous_response_id": None,
        },
    },
    "messages": {
        **{
            "max_tokens": 100,
            "temperature": 0.5,
            "top_k": 5,
            "thinking": {"type": "enabled", "budget_tokens": 1024},
        },
        **{
            "metadata": {"user_id": "x"},
            "tool_choice": {"type": "auto"},
            "output_config": {"effort": "low"},
        },
    },
}


@pytest.mark.parametrize(
    ("path", "fields"), [(path, fields) for path in ASKS_FOR_MORE for fields in ASKS_FOR_MORE[path]]
)
def test_a_field_that_asks_for_what_there_is_not_is_refused_by_name(
    chats: Chats, path: str, fields: Any
) -> None:
    async def play() -> None:
        session, engine = session_that_says(chats)
        body = {"messages": [{"role": "user", "content": "x"}], **fields}
        if path == "responses":
            body = {"input": "x", **fields}
        reply = await session.reply(f"/v1/{path}", json.dumps(body).encode(), 0)
        error = json.loads(reply.body)["error"]
        assert (
            reply.status == 400
            and error["code"] == "wrong_field"
            and not engine.asked
            and not session.error
        )
        assert not path.startswith("chat") or any(name in error["message"] for name in fields), (
            error
        )

    asyncio.run(play())


@pytest.mark.parametrize("path", ASKS_FOR_NOTHING)
def test_a_field_that_asks_for_nothing_is_taken(chats: Chats, path: str) -> None:
    async def play() -> None:
        session, _ = session_that_says(chats)
        body = {"input" if path == "responses" else "messages": [{"role": "user", "content": "x"}]}
        reply = await session.reply(
            f"/v1/{path}", json.dumps({**body, **ASKS_FOR_NOTHING[path]}).encode(), 0
        )
        assert reply.status == 200, reply.body

    asyncio.run(play())


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
def test_results_stand_in_the_order_of_their_calls(chats: Chats, path: str) -> None:
    """The template shows no names of calls: the policy knows results by their order alone."""

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
        session, engine = session_that_says(chats)
        reply = await session.reply(f"/v1/{path}", json.dumps(bodies[path]).encode(), 0)
        prompt = chats.tokenizer.decode(engine.asked[0][0])
        assert reply.status == 200 and prompt.index("of c0") < prompt.index("of c1") < prompt.index(
            "of c2"
        )

    asyncio.run(play())


def test_results_without_a_call_stay_where_they_are(chats: Chats) -> None:
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
        session, engine = session_that_says(chats)
        assert (
            await session.reply("/v1/chat/completions", json.dumps(body).encode(), 0)
        ).status == 200
        prompt = chats.tokenizer.decode(engine.asked[0][0])
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
def test_a_result_that_is_an_error_says_so(
    chats: Chats, result: dict[str, Any], shown: str
) -> None:
    async def play() -> None:
        use = {"type": "tool_use", "id": "c", "name": "add", "input": {}}
        messages = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", **result}]},
        ]
        session, engine = session_that_says(chats)
        assert (
            await session.reply("/v1/messages", json.dumps({"messages": messages}).encode(), 0)
        ).status == 200
        assert f"<tool_response>\n{shown}\n</tool_response>" in chats.tokenizer.decode(
            engine.asked[0][0]
        )

    asyncio.run(play())


def test_the_name_of_a_message_is_there_for_the_template(chats: Chats) -> None:
    async def play() -> None:
        source = TEMPLATE.replace("<|im_start|>user\n{{", "<|im_start|>user {{ message.name }}\n{{")
        template = ChatTemplate(source, {}, "")
        session, engine = session_that_says(replace(chats, template=template))
        try:
            for names in (["Ann"], ["Ann", "Bob"], ["Eve", "Bob"]):
                messages = []
                for name, said in zip(names, SAID, strict=False):
                    messages += [
                        {"role": "user", "name": name, "content": "x"},
                        {"role": "assistant", "content": said},
                    ]
                body = json.dumps({"messages": messages[:-1]}).encode()
                assert (await session.reply("/v1/chat/completions", body, 0)).status == 200
                assert f"user {names[-1]}\nx" in chats.tokenizer.decode(engine.asked[-1][0])
        finally:
            template.close()
        assert len(rows(session)) == 2, "another name makes another chat"

    asyncio.run(play())


def test_a_stop_sequence_is_named_to_who_asks_by_anthropics_interface(chats: Chats) -> None:
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


def test_errors_are_what_the_clients_of_an_interface_read(chats: Chats, tmp_path: Path) -> None:
    async def play() -> None:
        session, _ = session_that_says(chats)
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
