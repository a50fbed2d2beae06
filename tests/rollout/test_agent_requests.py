"""Requests of agent programs that a session refuses, and bounds of an episode."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_hpc.data.chat import ChatTemplate
from relax_hpc.data.tokenizer import TokenizerError
from relax_hpc.rollout.agents import session as session_module
from tests.effort import effort
from tests.rollout.agent_helpers import (  # noqa: F401
    COMPLETIONS,
    TEMPLATE,
    TOOLS,
    USER,
    Chats,
    ToldEngine,
    ask,
    chats_fixture,
    rows,
    scripted,
    session_of,
)


def code(body: bytes) -> str:
    return json.loads(body)["error"]["code"]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "not_json"),
        (b"[" * 100_000, "not_json"),
        (b"[]", "wrong_field"),
        (b'{"messages": []}', "wrong_field"),
        (b'{"messages": [{"role": "judge", "content": "x"}]}', "wrong_field"),
        (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "wrong_field"),
        (b'{"messages": [{"role": "user", "content": "x"}], "n": 2}', "wrong_field"),
        (b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": "many"}', "wrong_field"),
        (b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}', "wrong_field"),
        (b'{"messages": [{"role": "user", "content": "x"}], "stream": "false"}', "wrong_field"),
        (b'{"messages": [{"role": "user", "content": "x"}], "stop": [1]}', "wrong_field"),
        (
            b'{"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "browser"}]}',
            "wrong_field",
        ),
        (
            json.dumps({"messages": [{"role": "user", "content": "x" * 20_000}]}).encode(),
            "context_length_exceeded",
        ),
    ],
)
def test_a_bad_request_is_refused_by_name_and_draws_nothing(
    chats: Chats, body: bytes, says: str
) -> None:
    async def play() -> None:
        engine = scripted(chats, "fine")
        session = session_of(chats, engine)
        reply = await session.reply(COMPLETIONS, body, 0)
        assert (reply.status, code(reply.body)) == (400, says) and session.refused == {says: 1}
        assert code((await session.reply("/v1/embeddings", b"{}", 0)).body) == "unknown_path"
        assert not rows(session) and not engine.requests
        assert (await ask(session, [USER]))["content"] == "fine"

    asyncio.run(play())


SHOWS_SOME_TOOLS = TEMPLATE.replace(
    "{%- if tools %}", "{%- if tools and messages[0].role == 'system' %}"
)
NOTE = {"role": "system", "content": "Mind the <|im_end|> and answer in French."}


@pytest.mark.parametrize("is_new", [True, False])
def test_a_message_that_the_template_leaves_out_is_refused(chats: Chats, is_new: bool) -> None:
    async def play() -> None:
        engine = scripted(chats, "fine", "fine")
        session = session_of(chats, engine)
        answer = {"role": "assistant", "content": "so"} if is_new else await ask(session, [USER])
        body = json.dumps({"messages": [USER, answer, NOTE, USER]}).encode()
        reply = await session.reply(COMPLETIONS, body, 0)
        assert (
            reply.status == 400 and "leaves out a message of the role system" in reply.body.decode()
        )
        assert len(engine.requests) == int(not is_new) and session.refused == {"chat_template": 1}

    asyncio.run(play())


def test_tools_that_the_template_does_not_show_are_refused(chats: Chats) -> None:
    async def play() -> None:
        engine = scripted(chats, "fine", "fine")
        template = ChatTemplate(SHOWS_SOME_TOOLS, {}, "")
        session = session_of(replace(chats, template=template), engine)
        try:
            body = json.dumps({"messages": [USER], "tools": TOOLS}).encode()
            reply = await session.reply(COMPLETIONS, body, 0)
            assert reply.status == 400 and "does not show the tool 'add'" in reply.body.decode()
            assert not engine.requests
            await ask(session, [{"role": "system", "content": "Add."}, USER], tools=TOOLS)
        finally:
            template.close()

    asyncio.run(play())


def test_bounds_of_an_episode_are_kept_and_endless_requests_end_it(chats: Chats) -> None:
    async def play() -> None:
        body, talks = (
            json.dumps({"messages": [USER]}).encode(),
            ToldEngine(lambda before, limit: [65] * limit),
        )
        session = session_of(chats, talks, max_turns=3, turn_tokens=5)
        for _ in range(3):
            await ask(session, [USER])
        assert {row.length for row in rows(session)} == {5}
        assert code((await session.reply(COMPLETIONS, body, 0)).body) == "max_turns"
        assert session._bounds.reached == "max_turns" and not session.has_ended.is_set()
        for _ in range(100):
            await session.reply("/v1/embeddings", b"{}", 0)
        assert not session.has_ended.is_set(), "what there is not may be asked for"
        for _ in range(31):
            await session.reply(COMPLETIONS, b"{}", 0)
        assert session.has_ended.is_set()
        session = session_of(chats, talks, sampled_tokens=7)
        await ask(session, [USER], max_tokens=4)
        await ask(session, [USER])
        assert [row.length for row in rows(session)] == [4, 3]
        assert code((await session.reply(COMPLETIONS, body, 0)).body) == "sampled_budget"

    asyncio.run(play())


def test_refused_requests_between_answers_do_not_add_up(chats: Chats) -> None:
    async def play() -> None:
        session = session_of(
            chats, ToldEngine(lambda before, limit: chats.said("ok")), max_turns=50
        )
        for _ in range(4):
            for _ in range(31):
                await session.reply(COMPLETIONS, b"{}", 0)
            await ask(session, [USER])
        assert not session.has_ended.is_set() and session.refused.total() == 124

    asyncio.run(play())


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/responses", "/v1/messages"])
def test_an_overflow_that_a_program_recovers_from_is_not_its_end(chats: Chats, path: str) -> None:
    """Each interface says it in its own words, by which its clients know what to do."""
    sentences = {
        COMPLETIONS: "maximum context length is 2999 tokens. However, your messages resulted in {} "
        "tokens.",
        "/v1/responses": "Your input exceeds the context window of this model.",
        "/v1/messages": "prompt is too long: {} tokens > 2999 maximum",
    }

    async def play() -> None:
        session, long = (
            session_of(chats, ToldEngine(lambda before, limit: chats.said("4"))),
            "ab " * 3000,
        )
        session._bounds.window = 3000
        field = "input" if path == "/v1/responses" else "messages"
        short = {field: [USER], "max_tokens": 20} if path == "/v1/messages" else {field: [USER]}
        assert (await session.reply(path, json.dumps(short).encode(), 0)).status == 200
        body = {**short, field: [{"role": "user", "content": long}]}
        reply = await session.reply(path, json.dumps(body).encode(), 0)
        error = json.loads(reply.body)["error"]
        tokens = len(chats.whole([{"role": "user", "content": long}]))
        assert reply.status == 400 and sentences[path].format(tokens) in error["message"]
        assert (error["code"], error["type"]) == (
            "context_length_exceeded",
            "invalid_request_error",
        )
        assert session.reason == "length"
        await session.reply(path, json.dumps(short).encode(), 0)
        assert session.reason == "env_done"

    asyncio.run(play())


def test_tokens_are_counted_without_a_turn(chats: Chats) -> None:
    async def play() -> None:
        session = session_of(chats, scripted(chats, "fine"))
        for path, field in (
            ("/v1/messages/count_tokens", "messages"),
            ("/v1/responses/input_tokens", "input"),
        ):
            reply = await session.reply(path, json.dumps({field: [USER]}).encode(), 0)
            assert json.loads(reply.body)["input_tokens"] == len(chats.whole([USER]))
        for path in ("/v1/models", "/v1/models/policy"):
            assert b"policy" in (await session.reply(path, b"", 0)).body
        assert not rows(session) and not session.refused

    asyncio.run(play())


@pytest.mark.parametrize("body", [
    b'{"messages": [{"role": "user", "content": "cut \\ud83d"}]}',
    b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "\\ude00"}]}], "stop": '
    b'["\\ud83d"]}',
    json.dumps({"messages": [USER], "tools": [{**TOOLS[0], "x\ud83d": "\udfff"}]}).encode(),
])  # fmt: skip
def test_half_a_surrogate_pair_is_replaced(chats: Chats, body: bytes) -> None:
    async def play() -> None:
        session = session_of(chats, scripted(chats, "fine"))
        assert (await session.reply(COMPLETIONS, body, 0)).status == 200 and not session.error
        (row,) = rows(session)
        assert "\ufffd" in chats.tokenizer.decode(list(row.prompt)) or b"tools" in body

    asyncio.run(play())


def test_a_chat_that_the_tokenizer_cannot_process_is_refused(
    chats: Chats, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A panic of its library is no error of the episode: the program may ask for something else."""

    def panic(*_: Any) -> list[int]:
        raise TokenizerError("the tokenizer has failed: retry-limit-in-match over")

    async def play() -> None:
        session = session_of(chats, scripted(chats, "fine"))
        body = json.dumps({"messages": [USER]}).encode()
        with monkeypatch.context() as patched:
            patched.setattr(session._renderer, "prompt", panic)
            reply = await session.reply(COMPLETIONS, body, 0)
        assert (
            reply.status == 400
            and b"retry-limit-in-match over" in reply.body
            and session.refused["tokenizer"] == 1
        )
        assert (await session.reply(COMPLETIONS, body, 0)).status == 200 and not session.error

    asyncio.run(play())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_an_answer_that_no_message_can_hold_ends_its_episode_by_name(
    chats: Chats, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """A stream of `/v1/responses` has the text of an answer six times."""
    monkeypatch.setattr(session_module, "_MAX_REPLY_BYTES", 1000)

    async def play() -> None:
        request = {"input" if path == "/v1/responses" else "messages": [USER], "stream": True}
        session = session_of(chats, scripted(chats, "fine " * 300))
        reply = await session.reply(path, json.dumps(request).encode(), 0)
        assert reply.status == 500 and b"no_answer" in reply.body and session.has_ended.is_set()
        assert f"bytes by {path}, allowed: 1000; lower rollout.max_new_tokens" in str(session.error)

    asyncio.run(play())


FIELDS = (
    "role",
    "content",
    "type",
    "text",
    "name",
    "input",
    "tool_calls",
    "function",
    "arguments",
    "output",
    "id",
)
TOP_FIELDS = (
    *(
        "messages",
        "input",
        "tools",
        "tool_choice",
        "stop",
        "system",
        "instructions",
        "max_tokens",
        "stop_sequences",
    ),
    *(
        "previous_response_id",
        "text",
        "output_config",
        "stream",
        "stream_options",
        "n",
        "logprobs",
        "include",
    ),
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(FIELDS)
)
anything = st.recursive(
    scalars | st.just("user"),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=4)
    ),
    max_leaves=10,
)


@settings(max_examples=effort(80, 5000), deadline=None)
@given(
    st.sampled_from(["/v1/chat/completions", "/v1/responses", "/v1/messages"]),
    st.dictionaries(st.sampled_from(TOP_FIELDS), anything),
)
def test_whatever_a_program_sends_its_episode_goes_on(
    chats: Chats, path: str, body: dict[str, Any]
) -> None:
    async def play() -> None:
        session = session_of(chats, ToldEngine(lambda before, limit: chats.said("ok")))
        whole = {"messages": [USER], "input": "x", **body}
        for request in (body, whole):
            reply = await session.reply(path, json.dumps(request).encode(), 0)
            assert reply.status in (200, 400, 404), reply
        assert session.error is None and not session.has_ended.is_set()

    asyncio.run(play())


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/responses", "/v1/messages"])
def test_a_prefilled_answer_is_refused_by_name(chats: Chats, path: str) -> None:
    async def play() -> None:
        engine = scripted(chats, "fine")
        session = session_of(chats, engine)
        chat = [USER, {"role": "assistant", "content": "the answer is"}]
        body = {"input": chat} if path == "/v1/responses" else {"messages": chat}
        reply = await session.reply(path, json.dumps(body).encode(), 0)
        assert (
            reply.status == 400
            and b"does not support assistant message prefill" in reply.body
            and not engine.requests
        )

    asyncio.run(play())
