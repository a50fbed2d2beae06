"""Fields of the endpoint's interfaces: accepted ones, and fields that are refused by their names."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.rollout.agent_helpers import FUNCTION, TOOLS, Chats, addition_session, chats_fixture  # noqa: F401


@pytest.mark.parametrize(
    ("path", "body", "expected_code"),
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
def test_a_bad_request_is_refused_with_an_error_code(
    chats: Chats, path: str, body: Any, expected_code: str
) -> None:
    async def play() -> None:
        session, engine = addition_session(chats)
        reply = await session.reply(f"/v1/{path}", json.dumps(body).encode(), 0)
        assert (
            reply.status in (400, 404)
            and json.loads(reply.body)["error"]["code"] == expected_code
            and not engine.requests
        )

    asyncio.run(play())


TOOL = {"type": "function", "name": "add", "parameters": FUNCTION["parameters"]}
UNSUPPORTED_FIELDS: dict[str, list[dict[str, Any]]] = {
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
"""By interface: fields that ask for a feature that is missing."""


def unsupported_fields() -> Iterator[tuple[str, dict[str, Any]]]:
    """Interface and fields of each request that must be refused."""
    for path, requests in UNSUPPORTED_FIELDS.items():
        for fields in requests:
            yield path, fields


ACCEPTED_FIELDS: dict[str, dict[str, Any]] = {
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


@pytest.mark.parametrize(("path", "fields"), [*unsupported_fields()])
def test_a_field_for_a_missing_feature_is_refused_by_its_name(
    chats: Chats, path: str, fields: Any
) -> None:
    async def play() -> None:
        session, engine = addition_session(chats)
        body = {"messages": [{"role": "user", "content": "x"}], **fields}
        if path == "responses":
            body = {"input": "x", **fields}
        reply = await session.reply(f"/v1/{path}", json.dumps(body).encode(), 0)
        error = json.loads(reply.body)["error"]
        assert (
            reply.status == 400
            and error["code"] == "wrong_field"
            and not engine.requests
            and not session.error
        )
        if path.startswith("chat"):
            assert any(name in error["message"] for name in fields), error

    asyncio.run(play())


@pytest.mark.parametrize("path", ACCEPTED_FIELDS)
def test_fields_without_effect_or_with_default_values_are_accepted(chats: Chats, path: str) -> None:
    async def play() -> None:
        session, _ = addition_session(chats)
        body = {"input" if path == "responses" else "messages": [{"role": "user", "content": "x"}]}
        reply = await session.reply(
            f"/v1/{path}", json.dumps({**body, **ACCEPTED_FIELDS[path]}).encode(), 0
        )
        assert reply.status == 200, reply.body

    asyncio.run(play())
