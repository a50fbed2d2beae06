"""Assembly of SGLang's streamed responses. Each piece of a stream has the tokens since the piece
before."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson

from relax_hpc.base.routes import NAME, RouteShape
from relax_hpc.base.versions import Version
from relax_hpc.rollout.engines.engine import (
    BadAnswer,
    Draft,
    EngineFault,
    GenerateRequest,
    Generation,
    checked,
)

_EVENT_END = b"\n\n"
_DATA = b"data: "
_STREAM_END = b"[DONE]"
_MAX_TOKEN_ID = 2**31 - 1


class EventParser:
    """Parser of a stream of server-sent events, which the network may split anywhere.

    >>> parser = EventParser()
    >>> parser.feed(b'data: {"index": 0}\\n\\nda'), parser.feed(b"ta: [DONE]\\n\\n")
    ([{'index': 0}], [])
    """

    def __init__(self) -> None:
        self._incomplete = b""

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """The events that ``data`` completes. ValueError: an event is not JSON."""
        *events, self._incomplete = (self._incomplete + data).split(_EVENT_END)
        contents = [event.removeprefix(_DATA) for event in events]
        return [orjson.loads(content) for content in contents if content != _STREAM_END]


class ReceivedRoutes:
    """Routes of the tokens of a request and its response, as far as they were received."""

    def __init__(self, shape: RouteShape) -> None:
        self.shape = shape
        self.values = shape.without_routes(0)
        """Routes from the first token on: uint8 [tokens, layers, chosen, width]."""

    def add(self, meta: dict[str, Any], tokens: int) -> None:
        """Add the routes in the ``meta`` of a piece: int32 [some, layers, chosen] in base 64, up to
        the last but one of ``tokens``. BadAnswer: they are malformed, or the last piece does not
        have all of them."""
        text = meta.get(NAME)
        if not text:
            return
        layers, chosen, _ = self.shape.token_shape
        try:
            numbers = np.frombuffer(b"".join(map(base64.b64decode, text.split(","))), "<i4")
            new = self.shape.pack(numbers.reshape(-1, layers, chosen))
        except ValueError as error:
            expected = f"{layers} layers, {chosen} of {self.shape.experts} experts each"
            raise BadAnswer(
                "bad_routes", f"/generate: {NAME}: {error}, expected {expected}"
            ) from error
        start = tokens - 1 - len(new)
        if start and meta["finish_reason"]:
            raise BadAnswer(
                "bad_routes",
                f"/generate: {NAME}: found those of {len(new)} tokens, expected {tokens - 1}",
            )
        # After a gap, later routes are ignored until the last piece, which has all of them.
        if 0 <= start <= len(self.values):
            self.values = np.concatenate([self.values[:start], new])


class StreamedResponse:
    """One response while its pieces arrive. Tokens whose version is certain are added to the
    request's draft immediately. Create it in a running event loop.

    SGLang 0.5.21 reports the versions of the tokens only at the end of a response. Before the end,
    the version of a piece is certain if the server still serves the version of the request.
    """

    def __init__(
        self,
        request: GenerateRequest,
        version: Version,
        routes: RouteShape | None = None,
        vocabulary: int = 0,
    ) -> None:
        """``version``: the version that the server serves at the time of the request. ``routes``:
        shape of the routes that it sends; None: it sends none. ``vocabulary``: number of token ids;
        0: unknown."""
        self._vocabulary = vocabulary or _MAX_TOKEN_ID + 1
        self.request, self.version = request, version
        self._draft = request.draft or Draft()
        self._drafted = self._draft.partial()
        """The tokens of the draft at the time of the request."""
        self._context_tokens = len(request.prompt_ids) + len(self._drafted.token_ids)
        """Tokens that the server gets."""
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._added_to_draft = 0
        """Received tokens that were added to the draft."""
        self._routes = ReceivedRoutes(routes) if routes and _has_routes(self._draft) else None
        self.name = ""
        """Name of the request for the server; empty: it was not sent yet."""
        self.rank: int | None = None
        """Data-parallel rank that gets the request, see `DataRanks`."""
        self.answer: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        """The response. Its exception is BadAnswer, or EngineFault if the exchange failed."""
        if self.max_new_tokens <= 0:
            generation = Generation(
                *self._all_tokens(np.empty(0, np.int32)),
                "length",
                self._drafted.extras,
                self._drafted.before,
            )
            self._end(generation)

    @property
    def needs_sampling_logprobs(self) -> bool:
        """Whether the log-probabilities must be those after top_k, top_p and min_p."""
        # SGLang 0.5.21 sends them in addition to those of the whole vocabulary, and only together
        # with the ids of the kept tokens.
        return self.request.sampling.is_cut and self.request.sampling.is_trained

    @property
    def max_new_tokens(self) -> int:
        """Most tokens that the server may generate."""
        return self.request.budget - len(self._drafted.token_ids)

    def add(self, piece: dict[str, Any]) -> None:
        """Add a piece of the response. A malformed piece ends the response."""
        if self.answer.done():
            return
        try:
            token_ids, meta = piece["output_ids"], piece["meta_info"]
            self._check_token_ids(token_ids)
            self._check_prompt(piece.get("prompt_token_ids"))
            logprobs = self._read_logprobs(meta)
            self._token_ids += token_ids
            self._logprobs += logprobs
            if self._routes:
                self._routes.add(meta, self._context_tokens + len(self._token_ids))
            finish = meta["finish_reason"]
            if finish:
                self._finish(finish, meta)
            elif meta["weight_version"] == str(self.version):
                self._update_draft()
        except EngineFault as fault:
            self.fail(fault)
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            self.fail(
                BadAnswer(
                    "http_error", f"/generate: unexpected answer, {error!r} in {str(piece)[:300]}"
                )
            )

    def _check_token_ids(self, token_ids: list[int]) -> None:
        """BadAnswer if a token is none of the model. It would end other engines, which continue the
        draft, and the trainer."""
        for token in token_ids:
            if type(token) is not int or not 0 <= token < self._vocabulary:
                raise BadAnswer(
                    "http_error",
                    f"/generate: found the token {token!r:.40}, allowed: 0 to "
                    f"{self._vocabulary - 1}",
                )

    def _check_prompt(self, received: list[int] | None) -> None:
        """BadAnswer if the server has processed other tokens than it was sent. It reports them for
        requests with media."""
        sent = [*self.request.prompt_ids, *self._drafted.token_ids]
        if self.request.media and received != sent:
            count = f"{len(received)} tokens" if isinstance(received, list) else "nothing"
            raise BadAnswer(
                "other_prompt",
                f"/generate: the server reports {count} of the prompt, which differ from the "
                f"{len(sent)} tokens that it was sent",
            )

    def _read_logprobs(self, meta: dict[str, Any]) -> list[float]:
        if self.needs_sampling_logprobs:
            values = meta["output_token_sampling_logprobs"]
        else:
            values = [item[0] for item in meta["output_token_logprobs"]]
        # SGLang 0.5.21 writes null for NaN, because JSON has no NaN.
        return [float("nan") if value is None else value for value in values]

    def fail(self, fault: EngineFault) -> None:
        """End with ``fault``, unless the response has ended."""
        if not self.answer.done():
            self.answer.set_exception(fault)
            # Retrieve the exception: asyncio logs one that no caller retrieves, and the caller may
            # have been cancelled.
            self.answer.exception()

    def _update_draft(self) -> None:
        """Add the new tokens to the draft. If routes are requested, leave out tokens whose route is
        missing."""
        start, stop = self._added_to_draft, len(self._token_ids)
        extras = {}
        if self._routes:
            routes, context = self._routes.values, self._context_tokens
            stop = min(stop, len(routes) - context)
            extras = {NAME: list(routes[self._first_missing_route : context + stop])}
            prompt_routes = {NAME: routes[: len(self.request.prompt_ids)]}
            self._draft.before = self._draft.before or prompt_routes
        if stop > start:
            versions = [self.version.encode()] * (stop - start)
            self._draft.add(
                self._token_ids[start:stop], self._logprobs[start:stop], versions, extras
            )
            self._added_to_draft = stop

    def _finish(self, finish: dict[str, Any], meta: dict[str, Any]) -> None:
        if finish["type"] == "abort" and not self._token_ids:
            raise BadAnswer("http_error", f"/generate: aborted: {finish.get('message')}")
        versions = token_versions(meta, len(self._token_ids))
        if (versions < self.version.encode()).any():
            oldest = Version.decode(versions.min())
            raise EngineFault(
                "old_version", f"found tokens of {oldest} from an engine that serves {self.version}"
            )
        cached = meta.get("cached_tokens")
        self._end(
            Generation(*self._all_tokens(versions), finish["type"], *self._all_routes(), cached)
        )

    def _all_tokens(self, versions: np.ndarray) -> tuple[list[int], list[float], np.ndarray]:
        """Tokens, log-probabilities and versions of the draft and of the received tokens."""
        drafted = self._drafted
        return (
            drafted.token_ids + self._token_ids,
            drafted.logprobs + self._logprobs,
            np.concatenate([drafted.token_versions, versions]),
        )

    def _all_routes(self) -> tuple[dict[str, np.ndarray], Mapping[str, np.ndarray]]:
        """Routes of the response's tokens, and of those before it. Routes in the draft are kept,
        because the server reports those of a second processing for their tokens."""
        if not self._routes or not len(self._routes.values):
            return {}, {}
        received, prompt_tokens = self._routes.values, len(self.request.prompt_ids)
        kept = self._drafted.extras.get(NAME, received[:0])
        new = received[prompt_tokens + len(kept) :]
        extras = {NAME: np.concatenate([kept, new, self._routes.shape.without_routes(1)])}
        return extras, self._drafted.before or {NAME: received[:prompt_tokens]}

    @property
    def _first_missing_route(self) -> int:
        """Index of the first token whose route is not in the draft."""
        return len(self.request.prompt_ids) + len(self._draft.extras.get(NAME, ()))

    def _end(self, generation: Generation) -> None:
        self.answer.set_result(checked(generation, self.request.budget))
        if generation.finish_reason != "abort":
            self._draft.ended = generation


def _has_routes(draft: Draft) -> bool:
    """Whether a draft has the routes of all tokens but the last one. A draft that was begun without
    routes never gets them."""
    sampled = np.flatnonzero(draft.token_versions)
    return len(draft.extras.get(NAME, ())) >= (sampled[-1] if len(sampled) else 0)


def token_versions(meta: dict[str, Any], tokens: int) -> np.ndarray:
    """Versions of the tokens of a response: int32 [tokens]."""
    # SGLang 0.5.21 sends spans of versions, older servers one version.
    spans = meta.get("weight_versions") or [
        {"version": meta.get("weight_version"), "start": 0, "end": tokens}
    ]
    versions = np.full(tokens, -1, np.int32)
    try:
        for span in spans:
            versions[span["start"] : span["end"]] = Version.parse(span["version"]).encode()
    except (ValueError, TypeError) as error:
        raise BadAnswer("unknown_version", f"{error} in {spans}") from error
    if (versions < 0).any():
        raise BadAnswer("unknown_version", f"{spans} do not cover {tokens} tokens")
    return versions
