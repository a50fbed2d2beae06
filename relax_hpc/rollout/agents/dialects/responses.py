"""OpenAI's responses (platform.openai.com/docs/api-reference/responses)."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from relax_hpc.rollout.agents.answers import MODEL, Answer, arguments_of, as_json, streamed
from relax_hpc.rollout.agents.chat import (
    ChatRequest,
    Fields,
    Message,
    Refused,
    call_of,
    flag_in,
    list_in,
    number_in,
    role_in,
    text_in,
    text_of,
    tool_of,
    wrong,
)
from relax_hpc.rollout.agents.dialects import completions
from relax_hpc.rollout.agents.gateway.front import Reply

TOO_LONG = f"Your input exceeds the context window of this model. {completions.TOO_LONG}"
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_TEXTS = ("input_text", "output_text", "text")
_FIELDS = Fields(
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
            *(
                "user",
                "metadata",
                "store",
                "service_tier",
                "safety_identifier",
                "reasoning",
                "stream_options",
            ),
            *("prompt_cache_key", "prompt_cache_retention"),
        )
    ),
    neutral={
        "tool_choice": ["auto", "none"],
        "parallel_tool_calls": [True],
        "truncation": ["disabled"],
        "background": [False],
        "top_logprobs": [0],
        # The policy has no reasoning that a client could not read.
        "include": [[], ["reasoning.encrypted_content"]],
    },
)


def name_of(answer: Answer) -> str:
    """Name of an answer, by which a later request goes on."""
    return f"resp_{answer.number}"


def parse(asked: Mapping[str, Any], chats: Mapping[str, Sequence[Message]]) -> ChatRequest:
    """See `Dialect.parse`."""
    # `verbosity` is a hint; a format would be a constraint.
    text = asked.get("text") or {}
    if not isinstance(text, dict) or set(text) - {"format", "verbosity"}:
        raise wrong("text", text, "format, verbosity")
    if text.get("format") not in (None, {"type": "text"}):
        raise wrong("text.format", text["format"], '{"type": "text"} or nothing')
    _FIELDS.check({name: value for name, value in asked.items() if name != "text"})
    instructions, before = (
        text_of(asked.get("instructions")),
        text_in(asked, "previous_response_id"),
    )
    if before and before not in chats:
        raise Refused(
            404,
            "unknown_response",
            f"previous_response_id: found {before[:80]!r}, which is no answer",
        )
    given = asked.get("input")
    items = (
        [{"role": "user", "content": given}] if isinstance(given, str) else list_in(asked, "input")
    )
    first = [{"role": "system", "content": instructions}] if instructions else []
    tools = [_tool(tool) for tool in list_in(asked, "tools")] if asked.get("tools") else []
    return ChatRequest(
        [*first, *chats.get(before, ()), *_messages(items)],
        tools,
        may_call=bool(tools) and asked.get("tool_choice") != "none",
        max_tokens=number_in(asked, "max_output_tokens"),
        streams=flag_in(asked, "stream"),
        apart=len(first),
    )


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise wrong("tools.type", tool.get("type"), "function: tools that the program has itself")
    return tool_of(tool.get("name"), tool.get("description"), tool.get("parameters"))


def _messages(items: Iterable[Mapping[str, Any]]) -> list[Message]:
    """Messages of items: what an assistant has said and called, one after the other, is one."""
    found: list[Message] = []
    for item in items:
        match item.get("type", "message"):
            case "message":
                role = role_in(item, "input.role", _ROLES)
                if role != "assistant" and item.get("content") is None:
                    raise wrong(
                        "input.content",
                        None,
                        f"a text or parts, which a message of role {role} has to have",
                    )
                found.append({"role": role, "content": text_of(item.get("content"), _TEXTS)})
            case "function_call":
                if not found or found[-1]["role"] != "assistant":
                    found.append({"role": "assistant", "content": ""})
                call = call_of(item.get("name"), item.get("arguments"), item.get("call_id"))
                found[-1].setdefault("tool_calls", []).append(call)
            case "function_call_output":
                text = text_of(item.get("output"), _TEXTS)
                found.append(
                    {"role": "tool", "tool_call_id": str(item.get("call_id")), "content": text}
                )
            case "reasoning":
                # This policy never gave any.
                pass
            case kind:
                raise wrong("input.type", kind, "message, function_call, function_call_output")
    return found


def reply(request: ChatRequest, answer: Answer) -> Reply:
    """See `Dialect.reply`."""
    usage = {
        "input_tokens": answer.known,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": answer.tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.known + answer.tokens,
    }
    response = {
        "id": name_of(answer),
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


def _items(answer: Answer) -> list[dict[str, Any]]:
    part = {"type": "output_text", "text": answer.content, "annotations": []}
    about = {
        "id": f"msg_{answer.number}",
        "type": "message",
        "role": "assistant",
        "status": "completed",
    }
    text = [{**about, "content": [part]}] if answer.content or not answer.calls else []
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
    return [*text, *calls]


def _events(response: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    begun = {
        **response,
        "status": "in_progress",
        "output": [],
        "usage": None,
        "incomplete_details": None,
    }
    found = [("response.created", {"response": begun})]
    for index, item in enumerate(response["output"]):
        found += _item_events({"output_index": index, "item_id": item["id"]}, item)
    found.append((f"response.{response['status']}", {"response": response}))
    for number, (kind, about) in enumerate(found):
        yield kind, {"type": kind, "sequence_number": number, **about}


def _item_events(
    place: Mapping[str, Any], item: Mapping[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    index = {"output_index": place["output_index"]}
    if item["type"] == "message":
        yield (
            "response.output_item.added",
            {**index, "item": {**item, "status": "in_progress", "content": []}},
        )
        (part,) = item["content"]
        inner = {**place, "content_index": 0}
        yield "response.content_part.added", {**inner, "part": {**part, "text": ""}}
        yield "response.output_text.delta", {**inner, "delta": part["text"], "logprobs": []}
        yield "response.output_text.done", {**inner, "text": part["text"], "logprobs": []}
        yield "response.content_part.done", {**inner, "part": part}
    else:
        yield (
            "response.output_item.added",
            {**index, "item": {**item, "status": "in_progress", "arguments": ""}},
        )
        yield "response.function_call_arguments.delta", {**place, "delta": item["arguments"]}
        yield (
            "response.function_call_arguments.done",
            {**place, "arguments": item["arguments"], "name": item["name"]},
        )
    yield "response.output_item.done", {**index, "item": item}
