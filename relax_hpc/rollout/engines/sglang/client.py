"""Client of SGLang's HTTP protocol, as far as rollout needs it (0.5.21; the same in 0.5.17)."""

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
from urllib.parse import urlsplit

import aiohttp
import orjson

from relax_hpc.base.model_sizes import read_seconds
from relax_hpc.base.routes import RouteShape
from relax_hpc.base.versions import Version
from relax_hpc.config.schema import EngineConfig, PartialRollout, ProfileConfig
from relax_hpc.rollout.engines.batcher import Batcher
from relax_hpc.rollout.engines.deadline import SilenceTimeout
from relax_hpc.rollout.engines.engine import (
    EngineFault,
    GenerateRequest,
    Generation,
    PromptScores,
)
from relax_hpc.rollout.engines.media import check_places
from relax_hpc.rollout.engines.sglang import slab_loader
from relax_hpc.rollout.engines.sglang.data_ranks import DataRanks
from relax_hpc.rollout.engines.sglang.media import request_fields
from relax_hpc.rollout.engines.sglang.stream import EventParser, StreamedResponse
from relax_hpc.rollout.engines.update_gate import UpdateGate
from relax_hpc.training.weights.slab import is_slab

_HEALTH = "/health"
_HEALTH_TIMEOUT_S = 5.0
_ABORT_TIMEOUT_S = 1.0
"""Seconds for the server to end an aborted request."""
_ABORT_RETRY_S = 0.05
"""Seconds between two abort requests for the same response."""
_MAX_BATCH = 64
"""Most responses of one HTTP request, unless the configuration sets another number."""
_NEVER_SAMPLED = -1e4
"""Logit bias of a token that is never sampled. Log-probabilities are renormalized over the rest."""
_NO_TOP_K = -1
"""SGLang's value of top_k that keeps all tokens."""
NO_PLACEHOLDERS: Mapping[str, int] = MappingProxyType({})
_PAUSE_MODES: dict[PartialRollout, str] = {"keep": "in_place", "recompute": "retract"}


class SglangClient:
    """Requests to one server. Create it inside a running event loop. Each call has a deadline from
    `settings`."""

    def __init__(
        self,
        url: str,
        key: str,
        settings: EngineConfig,
        version: Version,
        partial: PartialRollout = "keep",
        max_batch: int = _MAX_BATCH,
        routes: RouteShape | None = None,
        placeholders: Mapping[str, int] = NO_PLACEHOLDERS,
        load_format: str = "",
        vocabulary: int = 0,
    ) -> None:
        """``key``: the server's API key; empty: it has none. ``version``: the version that the
        server serves. ``partial``: how an update treats running requests. ``max_batch``: most
        responses of one HTTP request. ``routes``: shape of the expert routes to request; None:
        request none. ``placeholders``: placeholder tokens of media by kind; they are never sampled.
        ``load_format``: SGLang's loader of updates; empty: see `_load_format`.
        ``vocabulary``: number of token ids; 0: unknown."""
        headers = {"Content-Type": "application/json"}
        self._key = {"Authorization": f"Bearer {key}"} if key else {}
        self._forced_load_format = load_format
        # force_close: SGLang's server closes idle connections, and a request that is sent at that
        # moment would be lost. limit=0: the role limits the requests in flight. trust_env: the key
        # must not be sent to a proxy.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        address = urlsplit(url)
        self._prefix = address.path.rstrip("/")
        """Beginning of all paths of the server; empty: it is alone at its address."""
        self._session = aiohttp.ClientSession(
            f"{address.scheme}://{address.netloc}",
            headers=headers,
            connector=connector,
            trust_env=False,
        )
        self._settings, self._version = settings, version
        self._partial, self._routes = partial, routes
        self._placeholders, self._vocabulary = placeholders, vocabulary
        self._silence = SilenceTimeout(settings.request_timeout_s)
        self._ranks = DataRanks(settings.flags.get("dp_size", 1))
        self._numbers = itertools.count()
        self._froze_gc = False
        self._unknown_weights = False
        self._released = False
        self._batcher: Batcher[StreamedResponse] = Batcher(self._send, max_batch)
        self._reading: set[asyncio.Task[None]] = set()
        self.gate = UpdateGate()
        self.pause_s = 0.0
        """Seconds for which the last update stopped running requests or delayed new ones."""

    async def healthy(self) -> bool:
        """Whether the server answers. A paused server does not: SGLang 0.5.21 returns 503 then. The
        path needs no key, so none is sent."""
        try:
            await self._call(_HEALTH, None, _HEALTH_TIMEOUT_S)
        except EngineFault:
            return False
        return True

    async def generate(self, request: GenerateRequest) -> Generation:
        """See `Engine.generate`. Requests that arrive together share one HTTP request, which is
        fastest on a CPU."""
        check_places(request, self._placeholders)
        await self.gate.enter()
        try:
            if self._unknown_weights:
                raise EngineFault(
                    "update_failed", "the last update failed; the server's weights are unknown"
                )
            response = StreamedResponse(request, self._version, self._routes, self._vocabulary)
            with self._ranks.assign(request.session) as response.rank:
                if not response.answer.done():
                    self._batcher.add(response)
                try:
                    answer = await asyncio.shield(response.answer)
                except asyncio.CancelledError:
                    await self._cancel(response)
                    raise
        finally:
            self.gate.leave()
        await self._freeze_gc()
        return answer

    def _send(self, responses: list[StreamedResponse]) -> None:
        """Send one HTTP request for the responses of each data rank."""
        by_rank: dict[int | None, list[StreamedResponse]] = defaultdict(list)
        for response in responses:
            if not response.answer.done():
                by_rank[response.rank].append(response)
        for batch in by_rank.values():
            for response in batch:
                response.name = f"{next(self._numbers):012d}"
            reading = asyncio.create_task(self._read(batch))
            self._reading.add(reading)
            reading.add_done_callback(self._reading.discard)

    async def _read(self, batch: list[StreamedResponse]) -> None:
        """Read the stream of the server. A response without an end in the stream fails."""
        fault = EngineFault(
            "wrong_count", f"/generate: some of {len(batch)} requests have no answer"
        )
        try:
            with self._silence.for_request():
                async for piece in self._stream("/generate", self._body(batch)):
                    self._silence.note_output()
                    _add_piece(piece, batch)
        except TimeoutError:
            fault = EngineFault("timeout", f"/generate: no token for {self._silence.seconds} s")
        except EngineFault as error:
            fault = error
        finally:
            for response in batch:
                response.fail(fault)

    def _body(self, batch: Sequence[StreamedResponse]) -> dict[str, Any]:
        banned = {str(token): _NEVER_SAMPLED for token in self._placeholders.values()}
        logit_bias = {"logit_bias": banned} if banned else {}
        body = {
            "input_ids": [response.request.context_ids for response in batch],
            "sampling_params": [_parameters(response) | logit_bias for response in batch],
            "rid": [response.name for response in batch],
            "return_logprob": True,
            "return_sampling_mask": [response.needs_sampling_logprobs for response in batch],
            "stream": True,
            # SGLang 0.5.21 makes extra_key a part of the radix cache's key, so that a request never
            # finds keys and values of other weights.
            "extra_key": [str(response.version) for response in batch],
        }
        if batch[0].rank is not None:
            body["routed_dp_rank"] = batch[0].rank
        if self._routes:
            body["return_routed_experts"] = True
        media = request_fields([response.request.media for response in batch])
        if media:
            body |= {"return_prompt_token_ids": True, **media}
        return body

    async def score(self, prompts: Sequence[Sequence[int]]) -> PromptScores:
        """See `PromptScorer`."""
        parameters = {"temperature": 0.0, "max_new_tokens": 1}
        body = {
            "input_ids": [list(prompt) for prompt in prompts],
            "sampling_params": [parameters] * len(prompts),
            "return_logprob": True,
            "logprob_start_len": 0,
            # A key of its own, so that keys and values of other requests are not reused.
            "extra_key": [f"score-{self._version}-{next(self._numbers)}"] * len(prompts),
        }
        await self.gate.enter()
        try:
            answers = await self._call("/generate", body, self._settings.request_timeout_s)
        finally:
            self.gate.leave()
        return read_scores(answers, prompts)

    async def model_info(self, timeout_s: float) -> dict[str, Any]:
        """The server's description of its model. It is answered without a request to the model."""
        return await self.ask("/model_info", None, timeout_s)

    async def server_info(self, timeout_s: float) -> dict[str, Any]:
        """The resolved arguments of the server."""
        return await self.ask("/server_info", None, timeout_s)

    async def ask(self, path: str, body: dict[str, Any] | None, timeout_s: float) -> dict[str, Any]:
        """The JSON object that answers a POST of ``body``, or a GET if it is None. EngineFault:
        there is none."""
        answer = await self._call(path, body, timeout_s)
        if not isinstance(answer, dict):
            raise EngineFault("http_error", f"{path}: the answer is no JSON object")
        return answer

    async def _cancel(self, response: StreamedResponse) -> None:
        """Abort a cancelled request. SGLang 0.5.21 would continue it for 2 s, and could not be
        updated meanwhile."""
        if not response.name:
            response.fail(EngineFault("timeout", "cancelled before it was sent"))
        elif not response.answer.done():
            # In another task: in a cancelled task, asyncio.timeout of Python 3.11.2 does not end
            # its body.
            aborting = asyncio.create_task(self._abort(response))
            await asyncio.wait([aborting], timeout=_ABORT_TIMEOUT_S)
            aborting.cancel()
            await asyncio.gather(aborting, return_exceptions=True)
        response.fail(EngineFault("timeout", "cancelled"))

    async def _abort(self, response: StreamedResponse) -> None:
        # SGLang 0.5.21 ignores the abort of a request that has not reached it yet, so the abort is
        # repeated.
        while not response.answer.done():
            await self._call("/abort_request", {"rid": response.name}, _ABORT_TIMEOUT_S)
            await asyncio.wait([response.answer], timeout=_ABORT_RETRY_S)

    async def _wait_idle(self, patience_s: float) -> bool:
        """Whether the server has no request, at the latest after ``patience_s``. Its cache is empty
        then.

        The server is asked, because it may work on cancelled requests, or may not have cleaned up
        after requests that it has answered.
        """
        # SGLang 0.5.21 answers 400 if requests are still running after the timeout.
        with contextlib.suppress(EngineFault):
            await self._call(
                f"/flush_cache?timeout={patience_s:g}", {}, patience_s + _HEALTH_TIMEOUT_S
            )
            return True
        return False

    async def update_weights(self, directory: Path, version: Version) -> None:
        """See `Engine.update_weights`. After a fault, the weights are unknown, and only another
        update may follow.

        Unless the update waits for them, running requests pause between two tokens and continue
        with the new weights. They keep their keys and values, or compute them again. A new request
        never sees keys and values of older weights: its version is a part of the cache's key.
        """
        limit, began = self._settings.update_timeout_s + read_seconds(directory), time.monotonic()
        async with self.gate.update(when_empty=self._partial == "off"):
            # A server whose memory was released is idle. After a failed update, it may be paused,
            # so it is treated as busy.
            is_busy = not self._released and (
                self.gate.inside > 0 or self._unknown_weights or not await self._wait_idle(0.0)
            )
            waited = time.monotonic() - began
            self._unknown_weights = True
            # flush_cache false: with true, SGLang 0.5.21 exits if the flush fails, which happens
            # when a request has just arrived or still runs.
            weights = {
                "model_path": str(directory),
                "weight_version": str(version),
                "flush_cache": False,
            }
            if self._forced_load_format:
                weights["load_format"] = self._forced_load_format
            else:
                weights |= _load_format(directory, self._settings.flags)
            try:
                with self._silence.suspended():
                    info = await self._swap(weights, is_busy, limit)
                self.pause_s += waited
            except EngineFault as fault:
                raise EngineFault(
                    "update_failed", f"{version} from {directory}: {fault}"
                ) from fault
        served = info.get("weight_version")
        if served != str(version):
            raise EngineFault(
                "update_failed", f"the server reports version {served} after an update to {version}"
            )
        self._version, self._unknown_weights = version, False

    async def release(self) -> None:
        """See `Engine.release`. The weights are released too, so no request is allowed before the
        next update."""
        async with self.gate.update(when_empty=True):
            self._unknown_weights = self._released = True
            limit = self._settings.update_timeout_s
            # SGLang 0.5.21 asserts in release_memory_occupation that it is idle, and exits if not.
            if not await self._wait_idle(limit):
                raise EngineFault(
                    "timeout", f"the server still works on cancelled requests after {limit} s"
                )
            await self._call("/release_memory_occupation", {}, limit)

    async def start_profile(
        self, folder: Path, name: str, profile: ProfileConfig, kinds: Sequence[str]
    ) -> None:
        """See `ProfiledEngine`. ``kinds``: activities to record, CPU and GPU."""
        # With num_steps, SGLang 0.5.21 counts forward passes, and ends the profile itself.
        body = {
            "output_dir": str(folder),
            "num_steps": profile.engine_batches,
            "activities": list(kinds),
            "with_stack": profile.stacks,
            "record_shapes": profile.shapes,
            "profile_id": name,
        }
        await self._call("/start_profile", body, self._settings.update_timeout_s)

    async def stop_profile(self) -> None:
        """See `ProfiledEngine`."""
        # SGLang 0.5.21 generates nothing while it writes the file.
        with self._silence.suspended():
            try:
                await self._call("/stop_profile", {}, self._settings.update_timeout_s)
            except EngineFault as fault:
                # It answers 500 if the profile has ended already.
                if fault.reason != "http_error":
                    raise

    async def _swap(self, weights: dict[str, Any], is_busy: bool, limit: float) -> dict[str, Any]:
        """Update from disk, with the requests of a busy server paused. Return the server's
        description of its model."""
        started = time.monotonic()
        if self._released:
            await self._call("/resume_memory_occupation", {}, limit)
            self._released = False
        if is_busy:
            mode = _PAUSE_MODES.get(self._partial, "in_place")
            await self._call("/pause_generation", {"mode": mode}, limit)
        # From 0.5.21 on, SGLang requires begin_weight_update and end_weight_update around updates
        # by tensors or broadcasts. No version requires them around an update from disk.
        await self._call("/update_weights_from_disk", weights, limit)
        if is_busy:
            await self._call("/continue_generation", {"torch_empty_cache": False}, limit)
        self.pause_s = time.monotonic() - started
        return await self._call("/model_info", None, limit)

    async def close(self) -> None:
        """Close the connections."""
        for reading in self._reading:
            reading.cancel()
        await self._session.close()

    async def _freeze_gc(self) -> None:
        # Once, after the first batch. Unless its garbage collector is frozen, every tenth batch of
        # SGLang 0.5.21 on a CPU takes 0.4 s longer (measured).
        if not self._froze_gc:
            self._froze_gc = True
            with contextlib.suppress(EngineFault):
                await self._call("/freeze_gc", {}, self._settings.update_timeout_s)

    async def _call(self, path: str, body: dict[str, Any] | None, timeout_s: float) -> Any:
        """POST `body`, or GET if it is None. Return the JSON reply, or None if the reply is
        text."""
        async with self._request(path, body, timeout_s) as reply:
            content = await reply.read()
            try:
                return orjson.loads(content) if reply.content_type == "application/json" else None
            except ValueError as error:
                raise EngineFault("http_error", f"{path}: {error} in {content[:300]!r}") from error

    async def _stream(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The events of the reply to a POST of `body`, without a time limit."""
        parser = EventParser()
        async with self._request(path, body, None) as reply:
            async for data in reply.content.iter_any():
                try:
                    events = parser.feed(data)
                except ValueError as error:
                    raise EngineFault("http_error", f"{path}: {error} in {data[:300]!r}") from error
                for event in events:
                    yield event

    @contextlib.asynccontextmanager
    async def _request(
        self, path: str, body: dict[str, Any] | None, timeout_s: float | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A reply with status 200. All errors of the exchange become EngineFault, also those in the
        body of the block."""
        method, data = ("GET", None) if body is None else ("POST", orjson.dumps(body))
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        key = {} if path == _HEALTH and not self._prefix else self._key
        try:
            async with self._session.request(
                method, self._prefix + path, data=data, timeout=timeout, headers=key
            ) as reply:
                if reply.status != 200:
                    content = await reply.read()
                    text = f"{path}: {reply.status} {content[:300].decode(errors='replace')}"
                    fault = EngineFault("http_error", text)
                    fault.status = reply.status
                    raise fault
                yield reply
        except TimeoutError as error:
            raise EngineFault("timeout", f"{path}: no answer within {timeout_s} s") from error
        except aiohttp.ClientError as error:
            raise EngineFault("connection", f"{path}: {error!r}") from error


def read_scores(answers: Any, prompts: Sequence[Sequence[int]]) -> PromptScores:
    """Scores in an answer of /generate. EngineFault: the server has scored other tokens, or the
    answer is malformed."""
    logprobs = list[list[float]]()
    try:
        versions = {answer["meta_info"]["weight_version"] for answer in answers}
        for answer, prompt in zip(answers, prompts, strict=True):
            # SGLang 0.5.21 gives no log-probability of the first token.
            scored = answer["meta_info"]["input_token_logprobs"][1:]
            if [entry[1] for entry in scored] != list(prompt[1:]):
                raise EngineFault(
                    "other_prompt", "/generate: the server scored other tokens than it was sent"
                )
            logprobs.append([float("nan" if entry[0] is None else entry[0]) for entry in scored])
        (version,) = versions
        return PromptScores(Version.parse(version), logprobs)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise EngineFault("http_error", f"/generate: unexpected scores, {error!r}") from error


def _load_format(directory: Path, flags: Mapping[str, Any]) -> dict[str, str]:
    """The field `load_format` of an update from ``directory``."""
    # A loader that changes the weights is the user's choice.
    if "load_format" in flags or "quantization" in flags:
        return {}
    # Always sent, because SGLang 0.5.21 keeps the format of the previous update otherwise.
    return {"load_format": slab_loader.FORMAT if is_slab(directory) else "auto"}


def _parameters(response: StreamedResponse) -> dict[str, Any]:
    sampling = response.request.sampling
    # Only keys that SGLang knows: 0.5.21 answers an unknown sampling parameter with status 500.
    parameters: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "stop_token_ids": sampling.stop_token_ids,
        "max_new_tokens": response.max_new_tokens,
    }
    if sampling.is_cut:
        parameters |= {"top_k": sampling.top_k or _NO_TOP_K, "min_p": sampling.min_p}
    if sampling.stop:
        # no_stop_trim: SGLang 0.5.21 removes the stop text from the response otherwise, although
        # the policy has sampled its tokens.
        parameters |= {"stop": sampling.stop, "no_stop_trim": True}
    return parameters


def _add_piece(piece: dict[str, Any], batch: Sequence[StreamedResponse]) -> None:
    """Add a piece of the stream to its response. EngineFault: the piece belongs to none."""
    try:
        if "error" in piece:
            raise EngineFault("http_error", f"/generate: {str(piece['error'])[:300]}")
        batch[piece["index"]].add(piece)
    except (LookupError, TypeError) as error:
        raise EngineFault("http_error", f"/generate: {error!r} in {str(piece)[:300]}") from error
