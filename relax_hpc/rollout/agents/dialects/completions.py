"""OpenAI's chat completions (platform.openai.com/docs/api-reference/chat)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from relax_hpc.environments.tool_calls import THINK, THOUGHT
from relax_hpc.rollout.agents.answers import MODEL, PolicyAnswer, arguments_of, as_json, streamed
from relax_hpc.rollout.agents.chat import (
    ChatRequest,
    Message,
    RequestFields,
    join_text,
    make_call,
    make_tool,
    read_count,
    read_flag,
    read_objects,
    read_role,
    read_text,
    read_texts,
    wrong_field,
)
from relax_hpc.rollout.agents.gateway.front import Reply

# Two sentences of OpenAI's errors: litellm and verifiers search for the first one, langchain-openai
# 1.7 for the last one.
TOO_LONG = (
    "This model's maximum context length is {limit} tokens. However, your messages resulted in "
    "{tokens} tokens. Please reduce the length of the messages. Input tokens exceed the configured "
    "limit of {limit} tokens."
)
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_THOUGHTS = ("reasoning_content", "reasoning")
"""Fields of a message for a thought, as named by the servers of SGLang and vLLM."""
_FIELDS = RequestFields(
    read=frozenset(
        (
            "model",
            "messages",
            "tools",
            "max_tokens",
            "max_completion_tokens",
            "stop",
            "stream",
            "stream_options",
        )
    ),
    hints=frozenset(
        (
            *("user", "metadata", "store", "service_tier", "safety_identifier", "prediction"),
            *("prompt_cache_key", "prompt_cache_retention", "reasoning_effort", "verbosity"),
        )
    ),
    neutral={
        "n": [1],
        "tool_choice": ["auto", "none"],
        "parallel_tool_calls": [True],
        "response_format": [{"type": "text"}],
        "logprobs": [False],
        "top_logprobs": [0],
        "logit_bias": [{}],
        "modalities": [["text"]],
        "functions": [[]],
    },
)


def parse(body: Mapping[str, Any], chats: Mapping[str, Sequence[Message]]) -> ChatRequest:
    """See `Dialect.parse`."""
    _FIELDS.check(body)
    options = body.get("stream_options")
    tools = [_tool(tool) for tool in read_objects(body, "tools")] if body.get("tools") else []
    return ChatRequest(
        [_message(message) for message in read_objects(body, "messages")],
        tools,
        may_call=bool(tools) and body.get("tool_choice") != "none",
        max_tokens=read_count(body, "max_completion_tokens", "max_tokens"),
        stop=read_texts(body, "stop"),
        streams=read_flag(body, "stream"),
        reports_usage=isinstance(options, dict) and bool(options.get("include_usage")),
    )


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict):
        raise wrong_field("tools", tool, "functions")
    make_tool(function.get("name"), None, None)
    return {"type": "function", "function": function}


def _message(sent: Mapping[str, Any]) -> Message:
    role = read_role(sent, "messages.role", _ROLES)
    if role != "assistant" and sent.get("content") is None:
        raise wrong_field(
            "messages.content",
            None,
            f"a text or parts, which a message of role {sent['role']} has to have",
        )
    message: Message = {"role": role, "content": join_text(sent.get("content"))}
    if role == "assistant" and THOUGHT not in message["content"]:
        message["content"] = _thought(sent) + message["content"]
    for field in ("function_call", "audio", "refusal"):
        if sent.get(field):
            raise wrong_field(f"messages.{field}", sent[field], "nothing; calls are tool_calls")
    # The name of an assistant is not a part of the policy's turn.
    if role != "assistant" and read_text(sent, "name"):
        message["name"] = sent["name"]
    call_id = sent.get("tool_call_id")
    if isinstance(call_id, str):
        message["tool_call_id"] = call_id
    if sent.get("tool_calls"):
        if role != "assistant":
            raise wrong_field("messages.tool_calls", role, "of an assistant")
        message["tool_calls"] = [_call(call) for call in read_objects(sent, "tool_calls")]
    return message


def _thought(sent: Mapping[str, Any]) -> str:
    """The thought of an assistant's message, with the marks that the policy writes around it.
    litellm and other clients move it from the content to a field."""
    thought = next((read_text(sent, field) for field in _THOUGHTS if sent.get(field)), "")
    return f"{THINK}{thought}{THOUGHT}" if thought else ""


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict):
        raise wrong_field("messages.tool_calls", call, "calls of functions")
    return make_call(function.get("name"), function.get("arguments"), call.get("id"))


def reply(request: ChatRequest, answer: PolicyAnswer) -> Reply:
    """See `Dialect.reply`."""
    head = {"id": f"chatcmpl-{answer.number}", "created": int(time.time()), "model": MODEL}
    calls = [
        {
            "id": name,
            "type": "function",
            "function": {"name": call.name, "arguments": arguments_of(call)},
        }
        for name, call in answer.named_calls
    ]
    reason = "length" if answer.is_cut else "stop"
    if calls:
        reason = "tool_calls"
    usage = {
        "prompt_tokens": answer.context_tokens,
        "completion_tokens": answer.tokens,
        "total_tokens": answer.context_tokens + answer.tokens,
    }
    # Without calls, smolagents and other clients fail at a content of null.
    content = answer.content or (None if calls else "")
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if request.streams:
        sent_usage = usage if request.reports_usage else None
        return streamed(_events(head, message, calls, reason, sent_usage))
    if calls:
        message["tool_calls"] = calls
    choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}
    return Reply(
        200, as_json(head | {"object": "chat.completion", "choices": [choice], "usage": usage})
    )


def _events(
    head: Mapping[str, Any],
    message: Mapping[str, Any],
    calls: Sequence[Mapping[str, Any]],
    reason: str,
    usage: Mapping[str, int] | None,
) -> Iterator[tuple[str, Mapping[str, Any] | None]]:
    def chunk(delta: Mapping[str, Any], reason: str | None = None) -> tuple[str, Mapping[str, Any]]:
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        return "", {**head, "object": "chat.completion.chunk", "choices": [choice]}

    yield chunk(message)
    if calls:
        yield chunk({"tool_calls": [{"index": index, **call} for index, call in enumerate(calls)]})
    yield chunk({}, reason)
    if usage:
        yield "", {**head, "object": "chat.completion.chunk", "choices": [], "usage": usage}
    yield "", None
