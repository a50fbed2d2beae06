"""SGLang's HTTP protocol, as much of it as a rollout needs (written against 0.5.21; the same in
0.5.17)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp
import orjson

from relax_hpc.base.model_sizes import read_seconds
from relax_hpc.base.routes import RouteShape
from relax_hpc.base.versions import Version
from relax_hpc.config.schema import EngineConfig, PartialRollout
from relax_hpc.rollout.engines.batcher import Batcher
from relax_hpc.rollout.engines.deadline import SilenceTimeout
from relax_hpc.rollout.engines.engine import EngineFault, GenerateRequest, Generation
from relax_hpc.rollout.engines.media import check_places
from relax_hpc.rollout.engines.sglang import slab_loader
from relax_hpc.rollout.engines.sglang.data_ranks import DataRanks
from relax_hpc.rollout.engines.sglang.media import fields_of
from relax_hpc.rollout.engines.sglang.stream import Events, Response
from relax_hpc.rollout.engines.update_gate import UpdateGate
from relax_hpc.training.weights.slab import is_slab

_HEALTH = "/health"
_HEALTH_TIMEOUT_S = 5.0
_GIVE_UP_S = 1.0
"""Seconds for a server to end requests that nobody waits for any more."""
_ABORT_AGAIN_S = 0.05
"""Seconds for an aborted request to end, before the server is told again."""
_TOGETHER = 64
"""Requests of one HTTP request, unless the configuration says otherwise."""
_NEVER = -1e4
"""Bias of the logit of a token that is never drawn; log-probabilities are of what is left."""
NO_PLACEHOLDERS: Mapping[str, int] = MappingProxyType({})
_PAUSES: dict[PartialRollout, str] = {"keep": "in_place", "recompute": "retract"}


class SglangClient:
    """Requests to one server; make it inside a running event loop. Every call has a deadline from
    `settings`."""

    def __init__(
        self,
        url: str,
        key: str,
        settings: EngineConfig,
        version: Version,
        partial: PartialRollout = "keep",
        together: int = _TOGETHER,
        routes: RouteShape | None = None,
        placeholders: Mapping[str, int] = NO_PLACEHOLDERS,
    ) -> None:
        """``version``: what the server serves. ``partial``: what an update does to running
        requests. ``together``: how many that come at once are asked in one HTTP request, at most.
        ``routes``: those that are asked for. ``placeholders``: tokens that stand for media, by
        kind, which are never drawn."""
        headers = {"Content-Type": "application/json"}
        self._key = {"Authorization": f"Bearer {key}"}
        # A new connection a request: the server closes idle ones, and a request on its way there
        # would be lost. No limit: the role decides how many are in flight. No proxies: the key
        # stays between the two.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(
            url, headers=headers, connector=connector, trust_env=False
        )
        self._settings, self._version, self._partial, self._routes = (
            settings,
            version,
            partial,
            routes,
        )
        self._placeholders = placeholders
        self._silence = SilenceTimeout(settings.request_timeout_s)
        self._ranks = DataRanks(settings.flags.get("dp_size", 1))
        self._numbers = itertools.count()
        self._froze_gc = False
        self._unknown_weights = False
        self._released = False
        self._batcher: Batcher[Response] = Batcher(self._ask, together)
        self._reading: set[asyncio.Task[None]] = set()
        self.gate = UpdateGate()
        self.pause_s = 0.0
        """Seconds for which the last update kept requests from going on, or new ones from
        beginning."""

    async def healthy(self) -> bool:
        """Whether the server answers and serves; a paused one does not. It answers anybody, and
        gets no key."""
        try:
            await self._call(_HEALTH, None, _HEALTH_TIMEOUT_S)
        except EngineFault:
            return False
        return True

    async def generate(self, request: GenerateRequest) -> Generation:
        """See `Engine.generate`. One HTTP request for all that come at once: on a CPU that is the
        quickest."""
        check_places(request, self._placeholders)
        await self.gate.enter()
        try:
            if self._unknown_weights:
                raise EngineFault(
                    "update_failed", "the last update failed; the server's weights are unknown"
                )
            response = Response(request, self._version, self._routes)
            with self._ranks.place(request.session) as response.rank:
                if not response.answer.done():
                    self._batcher.add(response)
                try:
                    answer = await asyncio.shield(response.answer)
                except asyncio.CancelledError:
                    await self._give_up(response)
                    raise
        finally:
            self.gate.leave()
        await self._freeze_gc()
        return answer

    def _ask(self, responses: list[Response]) -> None:
        """Have the server give each response what it lacks."""
        by_rank: dict[int | None, list[Response]] = defaultdict(list)
        for response in responses:
            if not response.answer.done():
                by_rank[response.rank].append(response)
        for wanted in by_rank.values():
            for response in wanted:
                response.name = f"{next(self._numbers):012d}"
            reading = asyncio.create_task(self._read(wanted))
            self._reading.add(reading)
            reading.add_done_callback(self._reading.discard)

    async def _read(self, asked: list[Response]) -> None:
        """Take the server's answer in; what has none by its end has a fault."""
        fault = EngineFault(
            "wrong_count", f"/generate: some of {len(asked)} requests have no answer"
        )
        try:
            with self._silence.for_request():
                async for piece in self._stream("/generate", self._body(asked)):
                    self._silence.note_output()
                    _take(piece, asked)
        except TimeoutError:
            fault = EngineFault("timeout", f"/generate: no token for {self._silence.seconds} s")
        except EngineFault as error:
            fault = error
        finally:
            for response in asked:
                response.fail(fault)

    def _body(self, asked: Sequence[Response]) -> dict[str, Any]:
        banned = {str(token): _NEVER for token in self._placeholders.values()}
        media = fields_of([response.request.media for response in asked])
        return {
            "input_ids": [response.request.context_ids for response in asked],
            "sampling_params": [
                _parameters(response) | ({"logit_bias": banned} if banned else {})
                for response in asked
            ],
            "rid": [response.name for response in asked],
            "return_logprob": True,
            "return_sampling_mask": [response.tells_of_cut for response in asked],
            "stream": True,
            # Keys and values of other weights are never found.
            "extra_key": [str(response.begun_by) for response in asked],
            **({} if asked[0].rank is None else {"routed_dp_rank": asked[0].rank}),
            **({"return_routed_experts": True} if self._routes else {}),
            **({"return_prompt_token_ids": True, **media} if media else {}),
        }

    async def _give_up(self, response: Response) -> None:
        """Abort a request that nobody waits for: the server would go on with it for 2 s, and have
        no room to update."""
        ended = response.answer
        if not response.name:
            response.fail(EngineFault("timeout", "given up before it was asked"))
        elif not ended.done():
            # By itself: in a task that is cancelled, asyncio.timeout of Python 3.11.2 ends nothing.
            aborting = asyncio.create_task(self._abort(response))
            await asyncio.wait([aborting], timeout=_GIVE_UP_S)
            aborting.cancel()
            await asyncio.gather(aborting, return_exceptions=True)
        response.fail(EngineFault("timeout", "given up"))

    async def _abort(self, response: Response) -> None:
        """Have the server end a request; again and again, as it does nothing about one that has not
        reached it yet."""
        while not response.answer.done():
            await self._call("/abort_request", {"rid": response.name}, _GIVE_UP_S)
            await asyncio.wait([response.answer], timeout=_ABORT_AGAIN_S)

    async def _is_idle(self, patience_s: float) -> bool:
        """Whether the server is at nothing any more, after some time if need be; its cache is empty
        then.

        Only it can tell: it may be at requests that nobody waits for, or not yet through with those
        it has answered.
        """
        with contextlib.suppress(EngineFault):
            await self._call(
                f"/flush_cache?timeout={patience_s:g}", {}, patience_s + _HEALTH_TIMEOUT_S
            )
            return True
        return False

    async def update_weights(self, directory: Path, version: Version) -> None:
        """See `Engine.update_weights`. After a fault, whose weights are unknown, only another
        update may follow.

        Running requests stop between two tokens and go on by the new weights, with the keys and
        values that they have or with new ones; unless they are waited for. A new request never sees
        keys and values of older weights, which are cached under the version it was asked for by.
        Updates from disk take no begin/end_weight_update in any version of SGLang; those frame
        updates by tensors or broadcast, which need them from 0.5.21 on.
        """
        limit, began = self._settings.update_timeout_s + read_seconds(directory), time.monotonic()
        async with self.gate.update(when_empty=self._partial == "off"):
            # After an update that failed it may be paused. What has given its memory back was idle
            # then, and is still.
            busy = self.gate.inside > 0 or self._unknown_weights or not await self._is_idle(0.0)
            busy = busy and not self._released
            waited = time.monotonic() - began
            self._unknown_weights = True
            # Asked to flush its cache with the update, SGLang ends itself if it then cannot: where
            # it has just become busy, or is so still.
            weights = {
                "model_path": str(directory),
                "weight_version": str(version),
                "flush_cache": False,
            }
            weights |= _load_format(directory, self._settings.flags)
            try:
                with self._silence.suspended():
                    info = await self._swap(weights, busy, limit)
                self.pause_s += waited
            except EngineFault as fault:
                raise EngineFault(
                    "update_failed", f"{version} from {directory}: {fault}"
                ) from fault
        if (found := info.get("weight_version")) != str(version):
            raise EngineFault(
                "update_failed", f"the server reports version {found} after an update to {version}"
            )
        self._version, self._unknown_weights = version, False

    async def release(self) -> None:
        """See `Engine.release`: its weights are gone too, and nothing can be asked before the next
        update."""
        async with self.gate.update(when_empty=True):
            self._unknown_weights = self._released = True
            limit = self._settings.update_timeout_s
            # Not idle, it would end itself.
            if not await self._is_idle(limit):
                raise EngineFault(
                    "timeout", f"requests that were given up are drawn still, after {limit} s"
                )
            await self._call("/release_memory_occupation", {}, limit)

    async def _swap(self, weights: dict[str, Any], busy: bool, limit: float) -> dict[str, Any]:
        """Update from disk, a ``busy`` server's requests paused meanwhile; what it then says of its
        model."""
        started = time.monotonic()
        if self._released:
            await self._call("/resume_memory_occupation", {}, limit)
            self._released = False
        if busy:
            await self._call(
                "/pause_generation", {"mode": _PAUSES.get(self._partial, "in_place")}, limit
            )
        await self._call("/update_weights_from_disk", weights, limit)
        if busy:
            await self._call("/continue_generation", {"torch_empty_cache": False}, limit)
        self.pause_s = time.monotonic() - started
        return await self._call("/model_info", None, limit)

    async def close(self) -> None:
        """Drop the connections."""
        for reading in self._reading:
            reading.cancel()
        await self._session.close()

    async def _freeze_gc(self) -> None:
        """Freeze the server's garbage collector once, after the first batch: without it every tenth
        batch on a CPU takes 0.4 s more (measured)."""
        if not self._froze_gc:
            self._froze_gc = True
            with contextlib.suppress(EngineFault):
                await self._call("/freeze_gc", {}, self._settings.update_timeout_s)

    async def _call(self, path: str, body: dict[str, Any] | None, timeout_s: float) -> Any:
        """POST `body`, or GET if it is None; the JSON answer, or None where the answer is text."""
        async with self._exchange(path, body, timeout_s) as reply:
            content = await reply.read()
            try:
                return orjson.loads(content) if reply.content_type == "application/json" else None
            except ValueError as error:
                raise EngineFault("http_error", f"{path}: {error} in {content[:300]!r}") from error

    async def _stream(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The events that answer a POST of `body`, which may take any time."""
        events = Events()
        async with self._exchange(path, body, None) as reply:
            async for part in reply.content.iter_any():
                try:
                    found = events.of(part)
                except ValueError as error:
                    raise EngineFault("http_error", f"{path}: {error} in {part[:300]!r}") from error
                for event in found:
                    yield event

    @contextlib.asynccontextmanager
    async def _exchange(
        self, path: str, body: dict[str, Any] | None, timeout_s: float | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A request whose answer is good so far; what goes wrong, in the body of the block too, is
        a fault."""
        method, data = ("GET", None) if body is None else ("POST", orjson.dumps(body))
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        key = {} if path == _HEALTH else self._key
        try:
            async with self._session.request(
                method, path, data=data, timeout=timeout, headers=key
            ) as reply:
                if reply.status != 200:
                    content = await reply.read()
                    raise EngineFault(
                        "http_error",
                        f"{path}: {reply.status} {content[:300].decode(errors='replace')}",
                    )
                yield reply
        except TimeoutError as error:
            raise EngineFault("timeout", f"{path}: no answer within {timeout_s} s") from error
        except aiohttp.ClientError as error:
            raise EngineFault("connection", f"{path}: {error!r}") from error


_ALL = -1
"""SGLang's top_k that leaves all tokens."""


def _load_format(directory: Path, flags: Mapping[str, Any]) -> dict[str, str]:
    """SGLang's loader for ``directory``; without it, SGLang would use the last one again. A loader
    that changes the weights on their way is the user's choice, and stays."""
    if "load_format" in flags or "quantization" in flags:
        return {}
    return {"load_format": slab_loader.FORMAT if is_slab(directory) else "auto"}


def _parameters(response: Response) -> dict[str, Any]:
    sampling = response.request.sampling
    found = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "stop_token_ids": sampling.stop_token_ids,
        "max_new_tokens": response.missing,
    }
    cuts = {"top_k": sampling.top_k or _ALL, "min_p": sampling.min_p} if sampling.is_cut else {}
    return found | cuts | ({"stop": sampling.stop, "no_stop_trim": True} if sampling.stop else {})


def _take(piece: dict[str, Any], asked: Sequence[Response]) -> None:
    """Give a piece of the answer to the response that it is of. EngineFault: it is of none."""
    try:
        if "error" in piece:
            raise EngineFault("http_error", f"/generate: {str(piece['error'])[:300]}")
        asked[piece["index"]].add(piece)
    except (LookupError, TypeError) as error:
        raise EngineFault("http_error", f"/generate: {error!r} in {str(piece)[:300]}") from error
