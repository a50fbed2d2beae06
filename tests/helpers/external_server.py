"""A small HTTP server that behaves like an SGLang server without a model: all tokens are equally
likely. Faults can be set while it runs."""

from __future__ import annotations

import asyncio
import json
import math
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from relax_hpc.data.tokenizer import load_tokenizer


@dataclass
class Behaviour:
    """What the server does. Tests change it while the server runs."""

    model: Path
    flags: dict[str, Any] = field(
        default_factory=lambda: {
            "incremental_streaming_output": True,
            "stream_interval": 64,
            "disable_radix_cache": True,
            "dtype": "float32",
            "random_seed": 77,
        }
    )
    key: str = ""
    version: str = "default"
    reported_version: str = ""
    """Version that it claims to serve; empty: the one that it was given."""
    logprob_shift: float = 0.0
    """Added to all log-probabilities."""
    token_shift: int = 0
    """Added to each token that it claims to have scored."""
    hangs: bool = False
    """Whether generation never ends."""
    is_frozen: bool = False
    """Whether no request is answered, as after a SIGSTOP."""
    breaks_streams: bool = False
    """Whether it closes the connection in the middle of a response."""
    is_other_service: bool = False
    """Whether it is another kind of server."""
    pause_s: float = 0.0
    """Seconds before the last piece of a response."""
    updates: list[str] = field(default_factory=list)
    """Versions that it has loaded, with the folder of each."""
    generated: int = 0
    """Responses that it has finished."""


class StandIn:
    """The handlers of the server."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        tokenizer = load_tokenizer(behaviour.model)
        self.vocabulary = tokenizer.vocab_size
        self.logprob = -math.log(self.vocabulary)
        self.aborted: dict[str, asyncio.Event] = {}
        self.random = random.Random(3)

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._guard])
        app.add_routes(
            [
                web.get("/health", self._empty),
                web.get("/model_info", self._model_info),
                web.get("/server_info", self._server_info),
                web.post("/generate", self._generate),
                web.post("/abort_request", self._abort),
                web.post("/update_weights_from_disk", self._update),
                web.route("*", "/{other}", self._empty),
            ]
        )
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        while self.behaviour.is_frozen:
            await asyncio.sleep(0.01)
        if self.behaviour.is_other_service:
            return web.Response(text="<html>a page</html>", content_type="text/html")
        expected = f"Bearer {self.behaviour.key}"
        has_key = request.headers.get("Authorization") == expected
        if self.behaviour.key and request.path != "/health" and not has_key:
            return web.Response(status=401)
        return await handler(request)

    async def _empty(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _model_info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": self._served(), "is_generation": True})

    def _served(self) -> str:
        return self.behaviour.reported_version or self.behaviour.version

    async def _server_info(self, _: web.Request) -> web.Response:
        return web.json_response(
            {"model_path": str(self.behaviour.model), "version": "stand-in", **self.behaviour.flags}
        )

    async def _update(self, request: web.Request) -> web.Response:
        body = await request.json()
        folder = Path(body["model_path"])
        if not any(folder.glob("*.safetensors")):
            return web.json_response({"success": False}, status=400)
        self.behaviour.version = body["weight_version"]
        self.behaviour.updates.append(str(folder))
        return web.json_response({"success": True})

    async def _abort(self, request: web.Request) -> web.Response:
        rid = (await request.json())["rid"]
        if rid in self.aborted:
            self.aborted[rid].set()
        return web.Response()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if not body.get("stream"):
            return web.json_response([self._score(prompt) for prompt in body["input_ids"]])
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        version = self._served()
        for index, (rid, limits) in enumerate(
            zip(body["rid"], body["sampling_params"], strict=True)
        ):
            tokens = self._sample(limits["max_new_tokens"], limits["stop_token_ids"])
            first = self._piece(index, tokens[:1], version, None)
            await self._send(reply, first)
            self.aborted[rid] = asyncio.Event()
            finish = await self._pause(rid)
            if self.behaviour.breaks_streams:
                assert request.transport
                request.transport.abort()
                return reply
            if finish == "abort":
                tokens = tokens[:1]
            last = self._piece(index, tokens[1:], version, {"type": finish or "length"})
            await self._send(reply, last)
            self.behaviour.generated += 1
        await reply.write(b"data: [DONE]\n\n")
        return reply

    async def _pause(self, rid: str) -> str:
        """Wait as the behaviour says; `abort` if the request is aborted meanwhile."""
        event = self.aborted[rid]
        try:
            async with asyncio.timeout(None if self.behaviour.hangs else self.behaviour.pause_s):
                await event.wait()
            return "abort"
        except TimeoutError:
            return ""
        finally:
            self.aborted.pop(rid, None)

    async def _send(self, reply: web.StreamResponse, piece: dict[str, Any]) -> None:
        await reply.write(b"data: " + json.dumps(piece).encode() + b"\n\n")

    def _sample(self, count: int, stops: list[int]) -> list[int]:
        return [
            token
            for token in (self.random.randrange(self.vocabulary) for _ in range(count))
            if token not in stops
        ] or [self.vocabulary - 1]

    def _piece(
        self, index: int, tokens: list[int], version: str, finish: dict[str, str] | None
    ) -> dict[str, Any]:
        logprob = self.logprob + self.behaviour.logprob_shift
        return {
            "index": index,
            "output_ids": tokens,
            "meta_info": {
                "finish_reason": finish,
                "output_token_logprobs": [[logprob, token, None] for token in tokens],
                "weight_version": version,
            },
        }

    def _score(self, prompt: list[int]) -> dict[str, Any]:
        logprob = self.logprob + self.behaviour.logprob_shift
        shift = self.behaviour.token_shift
        scored = [
            [None, prompt[0], None],
            *([logprob, token + shift, None] for token in prompt[1:]),
        ]
        meta = {"input_token_logprobs": scored, "weight_version": self._served()}
        return {"output_ids": [0], "meta_info": meta}


@contextmanager
def external_server(behaviour: Behaviour) -> Iterator[str]:
    """The server in a thread, with an event loop of its own; its address."""
    started, stopping = threading.Event(), None
    loop = asyncio.new_event_loop()
    address: list[str] = []

    async def serve() -> None:
        nonlocal stopping
        stopping = asyncio.Event()
        stand_in = StandIn(behaviour)
        runner = web.AppRunner(stand_in.application(), shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        address.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        started.set()
        await stopping.wait()
        for response in list(stand_in.aborted.values()):
            response.set()
        await runner.cleanup()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    started.wait(30.0)
    try:
        yield address[0]
    finally:
        behaviour.is_frozen = behaviour.hangs = False
        assert stopping is not None
        loop.call_soon_threadsafe(stopping.set)
        thread.join(30.0)
        loop.close()
