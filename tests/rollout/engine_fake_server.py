"""`python -m tests.rollout.engine_fake_server ARGS.json`: to a client,
`relax_hpc.rollout.engines.sglang.server` without a model.

The first token of a prompt, one of the constants, says how its answer is wrong. A child is started
that would outlive the server, and a part that it cannot do without. If its model has a pipe `hold`,
it serves when that is closed.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import socket
import subprocess
import sys
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web

GOOD, SPANS, STATUS_500, HANG, MISSING, NOT_JSON, FEW_LOGPROBS, TOO_MANY, EMPTY, NULL, POSITIVE = (
    range(11)
)
NO_VERSION, BAD_VERSION, GAP, MALFORMED, EXIT, ABORTED, NO_INDEX, ERROR, NUMBER, SLOW = range(
    11, 21
)
FEW_ROUTES, FAR_ROUTES, OTHER_ROUTES, NO_ROUTES, TORN_ROUTES, LATE = range(21, 27)
PAUSE_S = 0.8
"""Of a slow answer, before each of its three parts."""
CALLS = web.AppKey("calls", list[str])
HANGING = web.AppKey("hanging", asyncio.Event)
"""Set once a request hangs."""
ABORTS = web.AppKey("aborts", asyncio.Queue[None])
"""Aborts: a request of kind LATE, which hangs, has not arrived yet when the first comes, and ends
by the second."""


def answer(kind: int, tokens: int) -> dict[str, Any]:
    """One answer of /generate."""
    count = {TOO_MANY: tokens + 1, EMPTY: 0, ABORTED: 0}.get(kind, tokens)
    logprobs: list[float | None] = [-0.5] * (count - (kind == FEW_LOGPROBS))
    if kind in (NULL, POSITIVE):
        logprobs[1] = None if kind == NULL else 0.5
    meta: dict[str, Any] = {
        "finish_reason": {"type": "length", "length": count},
        "output_token_logprobs": [[value, 7, None] for value in logprobs],
        "weight_version": "default" if kind == BAD_VERSION else "i000001-v000004",
    }
    if kind in (SPANS, GAP):
        first = {"version": "i000001-v000003", "start": kind == GAP, "end": 2}
        meta["weight_versions"] = [first, {"version": "i000001-v000004", "start": 2, "end": count}]
    if kind == ABORTED:
        meta["finish_reason"] = {"type": "abort", "message": "too long"}
    if kind != NO_ROUTES:
        meta["routed_experts"] = routes(kind, 2 + count - 1)
    if kind == NO_VERSION:
        del meta["weight_version"]
    return {} if kind == MALFORMED else {"output_ids": [7] * count, "meta_info": meta}


def routes(kind: int, tokens: int) -> str:
    """Two layers, two of four experts; a prompt has two tokens."""
    found = np.tile([[[0, 1], [2, 3]]], (tokens - (kind == FEW_ROUTES), 1, 1)).astype("<i4")
    if kind == FAR_ROUTES:
        found[2, 1, 0] = 4
    if kind == OTHER_ROUTES:
        found = found[:, :, :1]
    return base64.b64encode(found.tobytes()).decode()[: -4 if kind == TORN_ROUTES else None]


def pieces(kind: int, index: int, tokens: int) -> list[dict[str, Any]]:
    """An answer as it is streamed: two tokens, and the rest with what is known at the end."""
    whole = answer(kind, tokens)
    if kind == MALFORMED:
        return [{"index": index}]
    ids, meta = whole["output_ids"], whole["meta_info"]
    first, rest = meta["output_token_logprobs"][:2], meta["output_token_logprobs"][2:]
    begun = {
        "finish_reason": None,
        "output_token_logprobs": first,
        "weight_version": "i000001-v000003",
    }
    return [
        {"index": index, "output_ids": ids[:2], "meta_info": begun},
        {
            "index": index,
            "output_ids": ids[2:],
            "meta_info": meta | {"output_token_logprobs": rest},
        },
    ]


async def generate(request: web.Request) -> web.StreamResponse:
    """All prompts share a transport, so one that breaks it breaks all. Every response is begun
    before one is whole."""
    body = await request.json()
    kinds = [prompt[0] for prompt in body["input_ids"]]
    if EXIT in kinds:
        os._exit(3)
    if STATUS_500 in kinds:
        return web.Response(status=500, text="out of memory")
    limits = [each["max_new_tokens"] for each in body["sampling_params"]]
    streams = [pieces(kind, index, limits[index]) for index, kind in enumerate(kinds)]
    events = [piece for both in zip_longest(*streams) for piece in both if piece]
    events = [event for event in events if kinds[event["index"]] != MISSING]
    for event in events:
        if kinds[event["index"]] == NO_INDEX:
            del event["index"]
    sent = [f"data: {json.dumps(event)}\n\n".encode() for event in events]
    if NOT_JSON in kinds:
        sent.insert(1, b"data: [NaN\n\n")
    if ERROR in kinds:
        sent = [b'data: {"error": {"message": "too long", "code": 400}}\n\n']
    if NUMBER in kinds:
        sent = [b"data: 5\n\n"]
    reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await reply.prepare(request)
    for part in [*sent, b"data: [DONE]\n\n"]:
        if HANG in kinds and part == sent[-1]:
            request.app[HANGING].set()
            await asyncio.Event().wait()
        if LATE in kinds and part == sent[-1]:
            request.app[HANGING].set()
            for _ in range(2):
                await request.app[ABORTS].get()
            request.app[HANGING].clear()
        if SLOW in kinds:
            await asyncio.sleep(PAUSE_S)
        # Networks cut anywhere.
        await reply.write(part[:9])
        await reply.write(part[9:])
    return reply


async def update(request: web.Request) -> web.Response:
    """Directories named "broken" are refused; "stale" are taken without a change of version."""
    body = await request.json()
    if "broken" in body["model_path"]:
        return web.json_response({"success": False, "message": "no such file"}, status=400)
    if body["flush_cache"]:
        # SGLang ends itself if it cannot.
        request.app[CALLS].append("flushes with the update")
    if "stale" not in body["model_path"]:
        request.app[CALLS].append(body["weight_version"])
    return web.json_response({"success": True, "message": ""})


def application(token: str) -> web.Application:
    """The server; `app[CALLS]` are the control requests it got, in order."""

    @web.middleware
    async def guard(request: web.Request, handler: Any) -> web.StreamResponse:
        if request.path == "/health":
            return web.Response(status=400 if "Authorization" in request.headers else 200)
        if request.headers.get("Authorization") != f"Bearer {token}":
            return web.Response(status=401)
        if request.path in ("/pause_generation", "/continue_generation", "/freeze_gc"):
            request.app[CALLS].append(request.path)
            return web.json_response({"status": "ok"})
        return await handler(request)

    async def model_info(request: web.Request) -> web.Response:
        versions = [call for call in request.app[CALLS] if call.startswith("i")]
        return web.json_response(
            {"weight_version": versions[-1] if versions else "i000001-v000000"}
        )

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    async def occupation(request: web.Request) -> web.Response:
        tags = (await request.json()).get("tags") or "all"
        request.app[CALLS].append(f"{request.path} {tags}")
        return web.json_response(None)

    async def environment(_: web.Request) -> web.Response:
        return web.json_response(dict(os.environ))

    async def flush(request: web.Request) -> web.Response:
        return web.Response(status=400 if request.app[HANGING].is_set() else 200)

    async def abort(request: web.Request) -> web.Response:
        request.app[ABORTS].put_nowait(None)
        return web.Response()

    app = web.Application(middlewares=[guard])
    app[CALLS] = []
    app[HANGING], app[ABORTS] = asyncio.Event(), asyncio.Queue()
    app.add_routes([web.post("/generate", generate), web.post("/update_weights_from_disk", update)])
    app.add_routes([web.post("/flush_cache", flush), web.post("/abort_request", abort)])
    app.add_routes(
        [web.post(f"/{what}_memory_occupation", occupation) for what in ("release", "resume")]
    )
    app.add_routes([web.get("/model_info", model_info), web.get("/health", health)])
    app.add_routes([web.get("/environment", environment), web.route("*", "/{other}", health)])
    return app


if __name__ == "__main__":
    settings = json.loads(Path(sys.argv[1]).read_bytes())
    for title in ("helper", "sglang::part"):
        subprocess.Popen([title, "-c", "import time; time.sleep(600)"], executable=sys.executable)
    if (hold := Path(settings["server"]["model_path"], "hold")).exists():
        hold.read_bytes()
    key = Path(settings["key_file"]).read_text()
    web.run_app(application(key), sock=socket.socket(fileno=settings["socket"]), print=None)
