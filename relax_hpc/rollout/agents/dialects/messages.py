"""Anthropic's messages (docs.anthropic.com/en/api/messages)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

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
    text_of,
    texts_in,
    tool_of,
    wrong,
)
from relax_hpc.rollout.agents.gateway.front import Reply

TOO_LONG = "prompt is too long: {tokens} tokens > {limit} maximum"
_THOUGHTS = ("thinking", "redacted_thinking")
"""Blocks that this policy never gave."""
_ROLES = {"user": "user", "assistant": "assistant"}
_FIELDS = Fields(
    read=frozenset(
        (
            "model",
            "messages",
            "system",
            "tools",
            "tool_choice",
            "max_tokens",
            "stop_sequences",
            "stream",
        )
    ),
    hints=frozenset(("metadata", "service_tier", "thinking", "cache_control")),
    neutral={"mcp_servers": [[]]},
)


def parse(asked: Mapping[str, Any], chats: Mapping[str, Sequence[Message]]) -> ChatRequest:
    """See `Dialect.parse`."""
    # `effort` is a hint; `format` would be a constraint.
    output = asked.get("output_config")
    if not isinstance(output or {}, dict) or set(output or {}) - {"effort"}:
        raise wrong("output_config", output, "effort")
    _FIELDS.check({name: value for name, value in asked.items() if name != "output_config"})
    tools = [_tool(tool) for tool in list_in(asked, "tools")] if asked.get("tools") else []
    system = text_of(asked.get("system"))
    messages = [{"role": "system", "content": system}] if system else []
    for message in list_in(asked, "messages"):
        messages += _messages(message)
    return ChatRequest(
        messages,
        tools,
        may_call=_choice(asked.get("tool_choice")) == "auto" and bool(tools),
        max_tokens=number_in(asked, "max_tokens"),
        stop=texts_in(asked, "stop_sequences"),
        streams=flag_in(asked, "stream"),
    )


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise wrong("tools.type", tool["type"], "custom: tools that the program has itself")
    return tool_of(tool.get("name"), tool.get("description"), tool.get("input_schema"))


def _choice(choice: Any) -> str:
    """Whether the policy may call: auto or none. Refused: it is to call something."""
    choice = choice or {"type": "auto"}
    if not isinstance(choice, dict) or choice.get("type") not in ("auto", "none"):
        raise wrong("tool_choice", choice, '{"type": "auto"} or {"type": "none"}')
    if choice.get("disable_parallel_tool_use"):
        raise wrong("tool_choice.disable_parallel_tool_use", True, "false")
    return choice["type"]


def _messages(given: Mapping[str, Any]) -> Iterator[Message]:
    """Messages that one is: of a user's, results of tools stand by themselves."""
    role, content = role_in(given, "messages.role", _ROLES), given.get("content")
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    texts, calls = list[Any](), list[dict[str, Any]]()
    for block in list_in(given, "content"):
        match block.get("type"):
            case "tool_result" if role == "user":
                text = _result(block)
                yield {
                    "role": "tool",
                    "tool_call_id": str(block.get("tool_use_id")),
                    "content": text,
                }
            case "tool_use" if role == "assistant":
                calls.append(call_of(block.get("name"), block.get("input"), block.get("id")))
            case kind if role != "assistant" or kind not in _THOUGHTS:
                texts.append(block)
    if texts or calls:
        yield {"role": role, "content": text_of(texts), **({"tool_calls": calls} if calls else {})}


def _result(block: Mapping[str, Any]) -> str:
    """Text of a tool's result. Chat templates have no field for a failure, so the text says it, as
    that of a tool of `environment.kind: tools` does."""
    text = text_of(block.get("content"))
    says_error = text.lstrip().lower().startswith("error")
    return f"Error: {text}" if block.get("is_error") and not says_error else text


def reply(request: ChatRequest, answer: Answer) -> Reply:
    """See `Dialect.reply`."""
    message = {
        "id": f"msg_{answer.number}",
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": _blocks(answer),
        "stop_reason": _stop_reason(answer),
        "stop_sequence": answer.stops[0] if answer.stops else None,
        "usage": {"input_tokens": answer.known, "output_tokens": answer.tokens},
    }
    return streamed(_events(message, answer)) if request.streams else Reply(200, as_json(message))


def _stop_reason(answer: Answer) -> str:
    if answer.calls:
        return "tool_use"
    if answer.is_cut:
        return "max_tokens"
    return "stop_sequence" if answer.stops else "end_turn"


def _blocks(answer: Answer) -> list[dict[str, Any]]:
    text = [{"type": "text", "text": answer.content}] if answer.content or not answer.calls else []
    calls = [
        {"type": "tool_use", "id": name, "name": call.name, "input": call.arguments}
        for name, call in answer.named_calls
    ]
    return [*text, *calls]


def _events(message: Mapping[str, Any], answer: Answer) -> Iterator[tuple[str, Mapping[str, Any]]]:
    def event(kind: str, **about: Any) -> tuple[str, Mapping[str, Any]]:
        return kind, {"type": kind, **about}

    begun = {"content": [], "stop_reason": None, "usage": {**message["usage"], "output_tokens": 0}}
    yield event("message_start", message={**message, **begun})
    arguments = iter([arguments_of(call) for call in answer.calls])
    for index, block in enumerate(message["content"]):
        if block["type"] == "text":
            start, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            start, delta = (
                {**block, "input": {}},
                {"type": "input_json_delta", "partial_json": next(arguments)},
            )
        yield event("content_block_start", index=index, content_block=start)
        yield event("content_block_delta", index=index, delta=delta)
        yield event("content_block_stop", index=index)
    ended = {name: message[name] for name in ("stop_reason", "stop_sequence")}
    yield event("message_delta", delta=ended, usage={"output_tokens": answer.tokens})
    yield event("message_stop")
