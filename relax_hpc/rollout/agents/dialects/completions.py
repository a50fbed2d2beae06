"""OpenAI's chat completions (platform.openai.com/docs/api-reference/chat)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from relax_hpc.environments.tool_calls import THINK, THOUGHT
from relax_hpc.rollout.agents.answers import MODEL, Answer, arguments_of, as_json, streamed
from relax_hpc.rollout.agents.chat import (
    ChatRequest,
    Fields,
    Message,
    call_of,
    flag_in,
    list_in,
    number_in,
    role_in,
    text_in,
    text_of,
    texts_in,
    tool_of,
    wrong,
)
from relax_hpc.rollout.agents.gateway.front import Reply

# Two sentences of OpenAI's: litellm and verifiers look for the first, langchain-openai 1.7 for the
# last.
TOO_LONG = (
    "This model's maximum context length is {limit} tokens. However, your messages resulted in "
    "{tokens} tokens. Please "
    "reduce the length of the messages. Input tokens exceed the configured limit of {limit} tokens."
)
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_THOUGHTS = ("reasoning_content", "reasoning")
"""Fields of a message that have a thought, as servers of SGLang and vLLM name them."""
_FIELDS = Fields(
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


def parse(asked: Mapping[str, Any], chats: Mapping[str, Sequence[Message]]) -> ChatRequest:
    """See `Dialect.parse`."""
    _FIELDS.check(asked)
    options = asked.get("stream_options")
    tools = [_tool(tool) for tool in list_in(asked, "tools")] if asked.get("tools") else []
    return ChatRequest(
        [_message(message) for message in list_in(asked, "messages")],
        tools,
        may_call=bool(tools) and asked.get("tool_choice") != "none",
        max_tokens=number_in(asked, "max_completion_tokens", "max_tokens"),
        stop=texts_in(asked, "stop"),
        streams=flag_in(asked, "stream"),
        tells_usage=isinstance(options, dict) and bool(options.get("include_usage")),
    )


def _tool(given: Mapping[str, Any]) -> dict[str, Any]:
    function = given.get("function")
    if given.get("type") != "function" or not isinstance(function, dict):
        raise wrong("tools", given, "functions")
    tool_of(function.get("name"), None, None)
    return {"type": "function", "function": function}


def _message(given: Mapping[str, Any]) -> Message:
    role = role_in(given, "messages.role", _ROLES)
    if role != "assistant" and given.get("content") is None:
        raise wrong(
            "messages.content",
            None,
            f"a text or parts, which a message of role {given['role']} has to have",
        )
    message: Message = {"role": role, "content": text_of(given.get("content"))}
    if role == "assistant" and THOUGHT not in message["content"]:
        message["content"] = _thought(given) + message["content"]
    for name in ("function_call", "audio", "refusal"):
        if given.get(name):
            raise wrong(f"messages.{name}", given[name], "nothing; calls are tool_calls")
    # An assistant's is no part of what the policy has said.
    if role != "assistant" and text_in(given, "name"):
        message["name"] = given["name"]
    if isinstance(name := given.get("tool_call_id"), str):
        message["tool_call_id"] = name
    if given.get("tool_calls"):
        if role != "assistant":
            raise wrong("messages.tool_calls", role, "of an assistant")
        message["tool_calls"] = [_call(call) for call in list_in(given, "tool_calls")]
    return message


def _thought(given: Mapping[str, Any]) -> str:
    """The thought of an assistant's message, with the marks that the policy writes around it.
    litellm and others move it from the content to a field."""
    thought = next((text_in(given, field) for field in _THOUGHTS if given.get(field)), "")
    return f"{THINK}{thought}{THOUGHT}" if thought else ""


def _call(given: Mapping[str, Any]) -> dict[str, Any]:
    function = given.get("function")
    if not isinstance(function, dict):
        raise wrong("messages.tool_calls", given, "calls of functions")
    return call_of(function.get("name"), function.get("arguments"), given.get("id"))


def reply(request: ChatRequest, answer: Answer) -> Reply:
    """See `Dialect.reply`."""
    about = {"id": f"chatcmpl-{answer.number}", "created": int(time.time()), "model": MODEL}
    calls = [
        {
            "id": name,
            "type": "function",
            "function": {"name": call.name, "arguments": arguments_of(call)},
        }
        for name, call in answer.named_calls
    ]
    reason = "tool_calls" if calls else "length" if answer.is_cut else "stop"
    usage = {
        "prompt_tokens": answer.known,
        "completion_tokens": answer.tokens,
        "total_tokens": answer.known + answer.tokens,
    }
    # Without calls, smolagents and other clients fail at a content of null.
    said = {"role": "assistant", "content": answer.content or (None if calls else "")}
    if request.streams:
        return streamed(_events(about, said, calls, reason, usage if request.tells_usage else None))
    message = {**said, **({"tool_calls": calls} if calls else {})}
    choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}
    return Reply(
        200, as_json(about | {"object": "chat.completion", "choices": [choice], "usage": usage})
    )


def _events(
    about: Mapping[str, Any],
    said: Mapping[str, Any],
    calls: Sequence[Mapping[str, Any]],
    reason: str,
    usage: Mapping[str, int] | None,
) -> Iterator[tuple[str, Mapping[str, Any] | None]]:
    def chunk(delta: Mapping[str, Any], reason: str | None = None) -> tuple[str, Mapping[str, Any]]:
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        return "", {**about, "object": "chat.completion.chunk", "choices": [choice]}

    yield chunk(said)
    if calls:
        yield chunk({"tool_calls": [{"index": place, **call} for place, call in enumerate(calls)]})
    yield chunk({}, reason)
    if usage:
        yield "", {**about, "object": "chat.completion.chunk", "choices": [], "usage": usage}
    yield "", None
