"""Answers to agent programs: stop texts, thoughts, calls, streams, and how they return in the next
request."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from relax_hpc.data.chat import ChatTemplate
from relax_hpc.rollout.agents.rendering import Renderer
from tests.rollout.agent_helpers import (  # noqa: F401
    CALL,
    COMPLETIONS,
    TEMPLATE,
    TOOLS,
    USER,
    Body,
    Chats,
    ToldEngine,
    ask,
    chats_fixture,
    rows,
    scripted,
    session_of,
)


@pytest.mark.parametrize("put_back", ["</code>", "\n</code>"])
def test_a_stop_text_that_comes_back_is_what_the_policy_has_drawn(
    chats: Chats, put_back: str
) -> None:
    async def play() -> None:
        engine = ToldEngine(
            lambda before, limit: chats.tokenizer.encode("a <code>1</code>", special=False)
        )
        session, messages = session_of(chats, engine), [USER]
        for _ in range(3):
            answer = await ask(session, messages, stop=["</code>", "Observation:"])
            assert answer["content"] == "a <code>1"
            messages += [{"role": "assistant", "content": answer["content"] + "</code>"}, USER]
        assert len(rows(session)) == 1
        # Another stop text is not of the policy's tokens, so the program's history begins a row.
        messages[-2] = {"role": "assistant", "content": "a <code>1Observation:"}
        await ask(session, messages, stop=["</code>"])
        assert len(rows(session)) == 2

    asyncio.run(play())


@pytest.mark.parametrize(
    "back",
    [
        {"content": "\n\nfour", "reasoning_content": "\nhm\n"},
        {"content": "four", "reasoning": "hm"},
        {"content": "<think>\nhm\n</think>\nfour"},
        {"content": "<think>\nhm\n</think>\n\nfour", "reasoning_content": "\nhm\n"},
    ],
)
def test_a_thought_that_comes_back_in_a_field_is_the_policys_own(chats: Chats, back: Body) -> None:
    """litellm moves a thought to the field `reasoning_content`."""

    async def play() -> None:
        session = session_of(chats, scripted(chats, "<think>\nhm\n</think>\n\nfour", "five"))
        await ask(session, [USER])
        await ask(session, [USER, {"role": "assistant", **back}, USER])
        assert len(rows(session)) == 1

    asyncio.run(play())


def test_a_thought_of_an_example_is_shown_as_the_policy_writes_it(chats: Chats) -> None:
    async def play() -> None:
        example = {"role": "assistant", "content": "four", "reasoning_content": "Two and two."}
        template = ChatTemplate(TEMPLATE.replace(".split('</think>')[-1]", ""), {}, "")
        engine = scripted(chats, "five")
        try:
            await ask(session_of(replace(chats, template=template), engine), [USER, example, USER])
        finally:
            template.close()
        assert "<think>Two and two.</think>four" in chats.tokenizer.decode(engine.requests[0][0])

    asyncio.run(play())


def test_a_call_in_a_thought_is_no_call(chats: Chats) -> None:
    """Whether the policy has opened the thought, or the template, and whether it came to an end."""
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>'

    opens = TEMPLATE.replace(
        "<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}"
    )
    assert opens != TEMPLATE
    opening = ChatTemplate(opens, {}, "")

    async def said(text: str, template: ChatTemplate = chats.template) -> Body:
        session = session_of(chats, scripted(chats, text))
        session._renderer = Renderer(template, chats.tokenizer)
        return await ask(session, [USER], tools=TOOLS)

    async def play() -> None:
        thought = f"<think>I could {call} but no.</think>It is 4."
        assert await said(thought) == {"role": "assistant", "content": thought}
        assert "tool_calls" not in await said(f"<think>I could {call}")
        answer = await said(f"<think>hm {call}</think>so {call}")
        assert len(answer["tool_calls"]) == 1 and answer["content"] == f"<think>hm {call}</think>so"
        assert "tool_calls" not in await said(f"I could {call}", opening)
        assert len((await said(f"no {call}</think>{call}", opening))["tool_calls"]) == 1

    asyncio.run(play())
    opening.close()


def test_stops_and_streams(chats: Chats) -> None:
    async def play() -> None:
        engine = scripted(chats, "think\nObservation: made up", "x")
        session = session_of(chats, engine)
        answer = await ask(session, [USER], stop=["Observation:"])
        assert answer["content"] == "think\n"
        await ask(session, [USER, answer, USER])
        assert len(rows(session)) == 1, "it continues from the cut"
        call = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
        session = session_of(chats, scripted(chats, call))
        body = {
            "messages": [USER],
            "tools": TOOLS,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        reply = await session.reply(COMPLETIONS, json.dumps(body).encode(), 0)
        assert reply.content_type == "text/event-stream"
        events = [line.removeprefix("data: ") for line in reply.body.decode().split("\n\n") if line]
        assert events.pop() == "[DONE]"
        chunks = [json.loads(event) for event in events]
        assert chunks[1]["choices"][0]["delta"]["tool_calls"][0]["function"] == {
            "name": "add",
            "arguments": "{}",
        }
        assert (
            chunks[2]["choices"][0]["finish_reason"] == "tool_calls"
            and chunks[3]["usage"]["completion_tokens"] > 0
        )

    asyncio.run(play())


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/responses", "/v1/messages"])
def test_no_text_of_an_answer_ends_a_line_of_its_stream(chats: Chats, path: str) -> None:
    """Readers such as httpx's `iter_lines` split lines as `str.splitlines` does."""

    async def play() -> None:
        call = json.dumps({"name": "add", "arguments": {"a": "x\u2028y"}}, ensure_ascii=False)
        text = f"a\u2028b\x85c\u2029d<tool_call>{call}</tool_call>"
        session = session_of(chats, scripted(chats, text))
        body = {"input" if path == "/v1/responses" else "messages": [USER], "stream": True}
        reply = await session.reply(path, json.dumps(body).encode(), 0)
        lines = reply.body.decode().splitlines()
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        assert all(not line or line.startswith(("data: ", "event: ")) for line in lines)
        assert any(
            "a\u2028b\x85c\u2029d" in texts_of(json.loads(each))
            for each in data
            if each != "[DONE]"
        )

    asyncio.run(play())


def texts_of(value: Any) -> str:
    """All texts of a JSON value in one."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return " ".join(map(texts_of, value.values()))
    return " ".join(map(texts_of, value)) if isinstance(value, list) else ""


def test_an_answer_without_a_text_is_an_empty_text(chats: Chats) -> None:
    async def play() -> None:
        session = session_of(chats, scripted(chats, "", f"{CALL}", "fine"))
        empty = await ask(session, [USER])
        assert empty["content"] == ""
        call = await ask(session, [USER, empty, USER], tools=TOOLS)
        assert call["content"] is None and call["tool_calls"]

    asyncio.run(play())
