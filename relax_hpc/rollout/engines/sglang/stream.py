"""SGLang's streamed answers, put together: each piece of a response has the tokens that came since
the last one."""

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

_END = b"\n\n"
_DATA = b"data: "
_DONE = b"[DONE]"


class Events:
    """Cuts a stream of server-sent events, whose parts come as the network has them.

    >>> events = Events()
    >>> events.of(b'data: {"index": 0}\\n\\nda'), events.of(b"ta: [DONE]\\n\\n")
    ([{'index': 0}], [])
    """

    def __init__(self) -> None:
        self._rest = b""

    def of(self, part: bytes) -> list[dict[str, Any]]:
        """The events that ``part`` completes; ValueError if one is no JSON."""
        *lines, self._rest = (self._rest + part).split(_END)
        data = [line.removeprefix(_DATA) for line in lines]
        return [orjson.loads(text) for text in data if text != _DONE]


class Routes:
    """Routes of a response's tokens and of those before it, as far as they have come."""

    def __init__(self, shape: RouteShape) -> None:
        self.shape = shape
        self.so_far = shape.without_routes(0)
        """Routes from the first token on: uint8 [tokens, layers, chosen, width]."""

    def add(self, meta: dict[str, Any], tokens: int) -> None:
        """Take those that came with a piece, int32 [some, layers, chosen] in base 64, up to the
        last but one of ``tokens``. BadAnswer: they are none, or with the last piece not all."""
        if not (text := meta.get(NAME)):
            return
        layers, chosen, _ = self.shape.token_shape
        try:
            numbers = np.frombuffer(b"".join(map(base64.b64decode, text.split(","))), "<i4")
            news = self.shape.pack(numbers.reshape(-1, layers, chosen))
        except ValueError as error:
            expected = f"{layers} layers, {chosen} of {self.shape.experts} experts each"
            raise BadAnswer(
                "bad_routes", f"/generate: {NAME}: {error}, expected {expected}"
            ) from error
        start = tokens - 1 - len(news)
        if start and meta["finish_reason"]:
            raise BadAnswer(
                "bad_routes",
                f"/generate: {NAME}: found those of {len(news)} tokens, expected {tokens - 1}",
            )
        # If some are missing, the rest waits for the end, with which all come.
        if 0 <= start <= len(self.so_far):
            self.so_far = np.concatenate([self.so_far[:start], news])


class Response:
    """One response while its pieces come; what is certain of it is in the request's draft at once.

    The server says which weights sampled which tokens when a response has ended. Before that, a
    piece is certain while the weights that served when the response was asked for serve still. Make
    it in a running event loop.
    """

    def __init__(
        self, request: GenerateRequest, begun_by: Version, routes: RouteShape | None = None
    ) -> None:
        """``routes``: shape of those that come; None: none do."""
        self.request, self.begun_by = request, begun_by
        self._draft = request.draft or Draft()
        self._known = self._draft.snapshot()
        self._asked = len(request.prompt_ids) + len(self._known.token_ids)
        """Tokens that the server is given."""
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._told = 0
        """Tokens of it that the draft has."""
        self._routes = Routes(routes) if routes and self._has_routes(self._draft) else None
        self.name = ""
        """Name of the request, to the server; empty: it was not asked."""
        self.rank: int | None = None
        """Copy of the model that is asked, see `DataRanks`."""
        self.answer: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        """Answer to the request, with an exception where there is none: BadAnswer, or EngineFault
        if the exchange broke."""
        if self.missing <= 0:
            extras = self._known.extras, self._known.before
            self._end(Generation(*self._whole(np.empty(0, np.int32)), "length", *extras))

    @staticmethod
    def _has_routes(draft: Draft) -> bool:
        """Whether a draft has those of all passes that drew it: begun when nobody asked for routes,
        it never will."""
        sampled = np.flatnonzero(draft.token_versions)
        return len(draft.extras.get(NAME, ())) >= (sampled[-1] if len(sampled) else 0)

    @property
    def tells_of_cut(self) -> bool:
        """Whether log-probabilities have to be of what top_k, top_p and min_p leave. The server has
        them beside those of the whole vocabulary, and only where it tells what they are of."""
        return self.request.sampling.is_cut and self.request.sampling.is_trained

    @property
    def missing(self) -> int:
        """Tokens that it may get, at most."""
        return self.request.budget - len(self._known.token_ids)

    def add(self, piece: dict[str, Any]) -> None:
        """Add a piece of the response that the server has sent; a malformed piece ends it."""
        if self.answer.done():
            return
        try:
            token_ids, meta = piece["output_ids"], piece["meta_info"]
            self._check_prompt(piece.get("prompt_token_ids"))
            logprobs = self._logprobs_of(meta)
            self._token_ids += token_ids
            self._logprobs += logprobs
            if self._routes:
                self._routes.add(meta, self._asked + len(self._token_ids))
            if finish := meta["finish_reason"]:
                self._finish(finish, meta)
            elif meta["weight_version"] == str(self.begun_by):
                self._tell()
        except EngineFault as fault:
            self.fail(fault)
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            self.fail(
                BadAnswer(
                    "http_error", f"/generate: unexpected answer, {error!r} in {str(piece)[:300]}"
                )
            )

    def _check_prompt(self, found: list[int] | None) -> None:
        """BadAnswer if the server has read another prompt than it was given; of one with media it
        says which."""
        asked = [*self.request.prompt_ids, *self._known.token_ids]
        if self.request.media and found != asked:
            told = f"{len(found)} tokens" if isinstance(found, list) else "nothing"
            raise BadAnswer(
                "other_prompt",
                f"/generate: {told} of the prompt, others than the {len(asked)} it was given",
            )

    def _logprobs_of(self, meta: dict[str, Any]) -> list[float]:
        told = (
            meta["output_token_sampling_logprobs"]
            if self.tells_of_cut
            else [item[0] for item in meta["output_token_logprobs"]]
        )
        # JSON has no NaN: the server writes null.
        return [float("nan") if value is None else value for value in told]

    def fail(self, fault: EngineFault) -> None:
        """End with ``fault`` instead of an answer, unless there is one already."""
        if not self.answer.done():
            self.answer.set_exception(fault)
            # Looked at, so that nobody complains where nobody waits.
            self.answer.exception()

    def _tell(self) -> None:
        """Put into the draft what is certain: of tokens whose routes are asked for, those that have
        one."""
        start, stop, extras = self._told, len(self._token_ids), {}
        if self._routes:
            found, asked = self._routes.so_far, self._asked
            stop = min(stop, len(found) - asked)
            extras = {NAME: found[self._first_read : asked + stop]}
            self._draft.before = self._draft.before or {NAME: found[: len(self.request.prompt_ids)]}
        if stop > start:
            versions = [self.begun_by.encode()] * (stop - start)
            self._draft.add(
                self._token_ids[start:stop], self._logprobs[start:stop], versions, extras
            )
            self._told = stop

    def _finish(self, finish: dict[str, Any], meta: dict[str, Any]) -> None:
        if finish["type"] == "abort" and not self._token_ids:
            raise BadAnswer("http_error", f"/generate: aborted: {finish.get('message')}")
        versions = token_versions(meta, len(self._token_ids))
        if (versions < self.begun_by.encode()).any():
            found = Version.decode(versions.min())
            raise EngineFault(
                "old_version", f"found tokens of {found} from an engine that serves {self.begun_by}"
            )
        cached = meta.get("cached_tokens")
        self._end(Generation(*self._whole(versions), finish["type"], *self._with_routes(), cached))

    def _whole(self, versions: np.ndarray) -> tuple[list[int], list[float], np.ndarray]:
        known = self._known
        both = np.concatenate([known.token_versions, versions])
        return known.token_ids + self._token_ids, known.logprobs + self._logprobs, both

    def _with_routes(self) -> tuple[dict[str, np.ndarray], Mapping[str, np.ndarray]]:
        """Routes of the response's tokens, and of those before it. Those that the draft has stay:
        what the engine says of their tokens now is of a later pass, which read them once more."""
        if not self._routes or not len(found := self._routes.so_far):
            return {}, {}
        kept = self._known.extras.get(NAME, found[:0])
        first = len(self.request.prompt_ids) + len(kept)
        extras = {NAME: np.concatenate([kept, found[first:], self._routes.shape.without_routes(1)])}
        return extras, self._known.before or {NAME: found[: len(self.request.prompt_ids)]}

    @property
    def _first_read(self) -> int:
        """Place of the first token whose route is not in the draft."""
        return len(self.request.prompt_ids) + len(self._draft.extras.get(NAME, ()))

    def _end(self, found: Generation) -> None:
        self.answer.set_result(checked(found, self.request.budget))
        if found.finish_reason != "abort":
            self._draft.ended = found


def token_versions(meta: dict[str, Any], tokens: int) -> np.ndarray:
    """int32 [tokens] from the spans of versions (0.5.21), or from the one version of older
    servers."""
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
