"""Anthropic's messages (docs.anthropic.com/en/api/messages)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

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
    read_texts,
    wrong_field,
)
from relax_hpc.rollout.agents.gateway.front import Reply

TOO_LONG = "prompt is too long: {tokens} tokens > {limit} maximum"
_THOUGHTS = ("thinking", "redacted_thinking")
"""Types of blocks that this policy never sends."""
_ROLES = {"user": "user", "assistant": "assistant"}
_FIELDS = RequestFields(
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


def parse(body: Mapping[str, Any], chats: Mapping[str, Sequence[Message]]) -> ChatRequest:
    """See `Dialect.parse`."""
    # `effort` is a hint. `format` would restrict the answer, which is not supported.
    output = body.get("output_config")
    if not isinstance(output or {}, dict) or set(output or {}) - {"effort"}:
        raise wrong_field("output_config", output, "effort")
    _FIELDS.check({name: value for name, value in body.items() if name != "output_config"})
    tools = [_tool(tool) for tool in read_objects(body, "tools")] if body.get("tools") else []
    system = join_text(body.get("system"))
    messages = [{"role": "system", "content": system}] if system else []
    for message in read_objects(body, "messages"):
        messages += _messages(message)
    return ChatRequest(
        messages,
        tools,
        may_call=_choice(body.get("tool_choice")) == "auto" and bool(tools),
        max_tokens=read_count(body, "max_tokens"),
        stop=read_texts(body, "stop_sequences"),
        streams=read_flag(body, "stream"),
    )


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise wrong_field("tools.type", tool["type"], "custom: tools that the program has itself")
    return make_tool(tool.get("name"), tool.get("description"), tool.get("input_schema"))


def _choice(choice: Any) -> str:
    """Whether the policy may call a tool: auto or none. Refused: it must call one."""
    choice = choice or {"type": "auto"}
    if not isinstance(choice, dict) or choice.get("type") not in ("auto", "none"):
        raise wrong_field("tool_choice", choice, '{"type": "auto"} or {"type": "none"}')
    if choice.get("disable_parallel_tool_use"):
        raise wrong_field("tool_choice.disable_parallel_tool_use", True, "false")
    return choice["type"]


def _messages(sent: Mapping[str, Any]) -> Iterator[Message]:
    """Messages for the template in a ``sent`` message: each result of a tool is a separate
    message."""
    role, content = read_role(sent, "messages.role", _ROLES), sent.get("content")
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    texts, calls = list[Any](), list[dict[str, Any]]()
    for block in read_objects(sent, "content"):
        match block.get("type"):
            case "tool_result" if role == "user":
                text = _result(block)
                yield {
                    "role": "tool",
                    "tool_call_id": str(block.get("tool_use_id")),
                    "content": text,
                }
            case "tool_use" if role == "assistant":
                calls.append(make_call(block.get("name"), block.get("input"), block.get("id")))
            case kind if role != "assistant" or kind not in _THOUGHTS:
                texts.append(block)
    if texts or calls:
        yield {
            "role": role,
            "content": join_text(texts),
            **({"tool_calls": calls} if calls else {}),
        }


def _result(block: Mapping[str, Any]) -> str:
    """Text of a tool's result. Chat templates have no field for a failure, so a failure is marked
    in the text, as by tools of `environment.kind: tools`."""
    text = join_text(block.get("content"))
    says_error = text.lstrip().lower().startswith("error")
    return f"Error: {text}" if block.get("is_error") and not says_error else text


def reply(request: ChatRequest, answer: PolicyAnswer) -> Reply:
    """See `Dialect.reply`."""
    message = {
        "id": f"msg_{answer.number}",
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": _blocks(answer),
        "stop_reason": _stop_reason(answer),
        "stop_sequence": answer.stops[0] if answer.stops else None,
        "usage": {"input_tokens": answer.context_tokens, "output_tokens": answer.tokens},
    }
    return streamed(_events(message, answer)) if request.streams else Reply(200, as_json(message))


def _stop_reason(answer: PolicyAnswer) -> str:
    if answer.calls:
        return "tool_use"
    if answer.is_cut:
        return "max_tokens"
    return "stop_sequence" if answer.stops else "end_turn"


def _blocks(answer: PolicyAnswer) -> list[dict[str, Any]]:
    text = [{"type": "text", "text": answer.content}] if answer.content or not answer.calls else []
    calls = [
        {"type": "tool_use", "id": name, "name": call.name, "input": call.arguments}
        for name, call in answer.named_calls
    ]
    return [*text, *calls]


def _events(
    message: Mapping[str, Any], answer: PolicyAnswer
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    def event(kind: str, **content: Any) -> tuple[str, Mapping[str, Any]]:
        return kind, {"type": kind, **content}

    start_usage = {**message["usage"], "output_tokens": 0}
    empty_message = {**message, "content": [], "stop_reason": None, "usage": start_usage}
    yield event("message_start", message=empty_message)
    arguments = iter([arguments_of(call) for call in answer.calls])
    for index, block in enumerate(message["content"]):
        if block["type"] == "text":
            empty_block = {**block, "text": ""}
            delta = {"type": "text_delta", "text": block["text"]}
        else:
            empty_block = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": next(arguments)}
        yield event("content_block_start", index=index, content_block=empty_block)
        yield event("content_block_delta", index=index, delta=delta)
        yield event("content_block_stop", index=index)
    ended = {name: message[name] for name in ("stop_reason", "stop_sequence")}
    yield event("message_delta", delta=ended, usage={"output_tokens": answer.tokens})
    yield event("message_stop")
