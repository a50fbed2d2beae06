"""OpenAI's responses (platform.openai.com/docs/api-reference/responses)."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from relax_hpc.rollout.agents.answers import MODEL, PolicyAnswer, arguments_of, as_json, streamed
from relax_hpc.rollout.agents.chat import (
    ChatRequest,
    Message,
    Refused,
    RequestFields,
    join_text,
    make_call,
    make_tool,
    read_count,
    read_flag,
    read_objects,
    read_role,
    read_text,
    wrong_field,
)
from relax_hpc.rollout.agents.dialects import completions
from relax_hpc.rollout.agents.gateway.front import Reply

TOO_LONG = f"Your input exceeds the context window of this model. {completions.TOO_LONG}"
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_TEXTS = ("input_text", "output_text", "text")
_FIELDS = RequestFields(
    read=frozenset(
        (
            "model",
            "input",
            "instructions",
            "previous_response_id",
            "tools",
            "max_output_tokens",
            "stream",
        )
    ),
    hints=frozenset(
        (
            *("user", "metadata", "store", "service_tier", "safety_identifier", "reasoning"),
            *("stream_options", "prompt_cache_key", "prompt_cache_retention"),
        )
    ),
    neutral={
        "tool_choice": ["auto", "none"],
        "parallel_tool_calls": [True],
        "truncation": ["disabled"],
        "background": [False],
        "top_logprobs": [0],
        # The policy's reasoning is a part of its text, so no reasoning is encrypted.
        "include": [[], ["reasoning.encrypted_content"]],
    },
)


def answer_id(answer: PolicyAnswer) -> str:
    """Id of an answer, with which a later request continues its chat."""
    return f"resp_{answer.number}"


def parse(body: Mapping[str, Any], chats: Mapping[str, Sequence[Message]]) -> ChatRequest:
    """See `Dialect.parse`."""
    # `verbosity` is a hint. A format would restrict the answer, which is not supported.
    text = body.get("text") or {}
    if not isinstance(text, dict) or set(text) - {"format", "verbosity"}:
        raise wrong_field("text", text, "format, verbosity")
    if text.get("format") not in (None, {"type": "text"}):
        raise wrong_field("text.format", text["format"], '{"type": "text"} or nothing')
    _FIELDS.check({name: value for name, value in body.items() if name != "text"})
    instructions = join_text(body.get("instructions"))
    previous_id = read_text(body, "previous_response_id")
    if previous_id and previous_id not in chats:
        raise Refused(
            404,
            "unknown_response",
            f"previous_response_id: found {previous_id[:80]!r}, which is no answer",
        )
    if isinstance(body.get("input"), str):
        items = [{"role": "user", "content": body["input"]}]
    else:
        items = read_objects(body, "input")
    system = [{"role": "system", "content": instructions}] if instructions else []
    tools = [_tool(tool) for tool in read_objects(body, "tools")] if body.get("tools") else []
    return ChatRequest(
        [*system, *chats.get(previous_id, ()), *_messages(items)],
        tools,
        may_call=bool(tools) and body.get("tool_choice") != "none",
        max_tokens=read_count(body, "max_output_tokens"),
        streams=read_flag(body, "stream"),
        instructions=len(system),
    )


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise wrong_field(
            "tools.type", tool.get("type"), "function: tools that the program has itself"
        )
    return make_tool(tool.get("name"), tool.get("description"), tool.get("parameters"))


def _messages(items: Iterable[Mapping[str, Any]]) -> list[Message]:
    """Messages of ``items``. A text of an assistant and the calls after it are one message."""
    messages: list[Message] = []
    for item in items:
        match item.get("type", "message"):
            case "message":
                role = read_role(item, "input.role", _ROLES)
                if role != "assistant" and item.get("content") is None:
                    raise wrong_field(
                        "input.content",
                        None,
                        f"a text or parts, which a message of role {role} has to have",
                    )
                messages.append({"role": role, "content": join_text(item.get("content"), _TEXTS)})
            case "function_call":
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                call = make_call(item.get("name"), item.get("arguments"), item.get("call_id"))
                messages[-1].setdefault("tool_calls", []).append(call)
            case "function_call_output":
                text = join_text(item.get("output"), _TEXTS)
                messages.append(
                    {"role": "tool", "tool_call_id": str(item.get("call_id")), "content": text}
                )
            case "reasoning":
                # Not from this policy, which never sends reasoning items.
                pass
            case kind:
                raise wrong_field(
                    "input.type", kind, "message, function_call, function_call_output"
                )
    return messages


def reply(request: ChatRequest, answer: PolicyAnswer) -> Reply:
    """See `Dialect.reply`."""
    usage = {
        "input_tokens": answer.context_tokens,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": answer.tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.context_tokens + answer.tokens,
    }
    response = {
        "id": answer_id(answer),
        "object": "response",
        "created_at": int(time.time()),
        "model": MODEL,
        "status": "incomplete" if answer.is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if answer.is_cut else None,
        "error": None,
        "instructions": None,
        "metadata": {},
        "output": _items(answer),
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": usage,
    }
    return streamed(_events(response)) if request.streams else Reply(200, as_json(response))


def _items(answer: PolicyAnswer) -> list[dict[str, Any]]:
    text = {"type": "output_text", "text": answer.content, "annotations": []}
    message = {
        "id": f"msg_{answer.number}",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [text],
    }
    messages = [message] if answer.content or not answer.calls else []
    calls = [
        {
            "id": f"fc_{name}",
            "type": "function_call",
            "call_id": name,
            "name": call.name,
            "arguments": arguments_of(call),
            "status": "completed",
        }
        for name, call in answer.named_calls
    ]
    return [*messages, *calls]


def _events(response: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    empty_response = {
        **response,
        "status": "in_progress",
        "output": [],
        "usage": None,
        "incomplete_details": None,
    }
    events: list[tuple[str, dict[str, Any]]] = [("response.created", {"response": empty_response})]
    for index, item in enumerate(response["output"]):
        events += _item_events(index, item)
    events.append((f"response.{response['status']}", {"response": response}))
    for number, (kind, content) in enumerate(events):
        yield kind, {"type": kind, "sequence_number": number, **content}


def _item_events(
    output_index: int, item: Mapping[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    index = {"output_index": output_index}
    item_ids = {**index, "item_id": item["id"]}
    if item["type"] == "message":
        yield (
            "response.output_item.added",
            {**index, "item": {**item, "status": "in_progress", "content": []}},
        )
        (text,) = item["content"]
        ids = {**item_ids, "content_index": 0}
        yield "response.content_part.added", {**ids, "part": {**text, "text": ""}}
        yield "response.output_text.delta", {**ids, "delta": text["text"], "logprobs": []}
        yield "response.output_text.done", {**ids, "text": text["text"], "logprobs": []}
        yield "response.content_part.done", {**ids, "part": text}
    else:
        yield (
            "response.output_item.added",
            {**index, "item": {**item, "status": "in_progress", "arguments": ""}},
        )
        yield "response.function_call_arguments.delta", {**item_ids, "delta": item["arguments"]}
        yield (
            "response.function_call_arguments.done",
            {**item_ids, "arguments": item["arguments"], "name": item["name"]},
        )
    yield "response.output_item.done", {**index, "item": item}
