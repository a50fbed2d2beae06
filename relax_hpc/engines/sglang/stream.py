"""SGLang's streamed answers, put together: each piece of a response has the tokens that came since the last one."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import orjson

from relax_hpc.engines.engine import BadAnswer, Draft, EngineFault, GenerateRequest, Generation, checked
from relax_hpc.versions import Version

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


class Response:
    """One response while its pieces come; what is certain of it is in the request's draft at once.

    The server says which weights sampled which tokens when a response has ended. Before that, a piece is certain while
    the weights that served when the response was asked for serve still. Make it in a running event loop.
    """

    def __init__(self, request: GenerateRequest, begun_by: Version) -> None:
        self.request, self.begun_by = request, begun_by
        self._draft = request.draft or Draft()
        self._known = self._draft.so_far()
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self.name = ""
        """Of the request, to the server; empty: it was not asked."""
        self.answer: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        """It has an exception where there is none: BadAnswer, or EngineFault if the exchange broke."""
        if self.missing <= 0:
            self._end(Generation(*self._whole(np.empty(0, np.int32)), "length"))

    @property
    def missing(self) -> int:
        """Tokens that it may get, at most."""
        return self.request.budget - len(self._known.token_ids)

    def add(self, piece: dict[str, Any]) -> None:
        """What the server has sent of it; a piece that is not as it should be ends it."""
        if self.answer.done():
            return
        try:
            token_ids, meta = piece["output_ids"], piece["meta_info"]
            # JSON has no NaN: the server writes null.
            logprobs = [float("nan") if item[0] is None else item[0] for item in meta["output_token_logprobs"]]
            self._token_ids += token_ids
            self._logprobs += logprobs
            if finish := meta["finish_reason"]:
                self._finish(finish, meta)
            elif meta["weight_version"] == str(self.begun_by):
                self._draft.add(token_ids, logprobs, [self.begun_by.encode()] * len(token_ids))
        except EngineFault as fault:
            self.fail(fault)
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            self.fail(BadAnswer("http_error", f"/generate: unexpected answer, {error!r} in {str(piece)[:300]}"))

    def fail(self, fault: EngineFault) -> None:
        """There will be no answer, unless there is one."""
        if not self.answer.done():
            self.answer.set_exception(fault)
            # Looked at, so that nobody complains where nobody waits.
            self.answer.exception()

    def _finish(self, finish: dict[str, Any], meta: dict[str, Any]) -> None:
        if finish["type"] == "abort" and not self._token_ids:
            raise BadAnswer("http_error", f"/generate: aborted: {finish.get('message')}")
        versions = token_versions(meta, len(self._token_ids))
        if (versions < self.begun_by.encode()).any():
            found = Version.decode(versions.min())
            raise EngineFault("old_version", f"found tokens of {found} from an engine that serves {self.begun_by}")
        self._end(Generation(*self._whole(versions), finish["type"]))

    def _whole(self, versions: np.ndarray) -> tuple[list[int], list[float], np.ndarray]:
        known = self._known
        both = np.concatenate([known.token_versions, versions])
        return known.token_ids + self._token_ids, known.logprobs + self._logprobs, both

    def _end(self, found: Generation) -> None:
        self.answer.set_result(checked(found, self.request.budget))
        if found.finish_reason != "abort":
            self._draft.ended = found


def token_versions(meta: dict[str, Any], tokens: int) -> np.ndarray:
    """int32 [tokens] from the spans of versions (0.5.21), or from the one version of older servers."""
    spans = meta.get("weight_versions") or [{"version": meta.get("weight_version"), "start": 0, "end": tokens}]
    versions = np.full(tokens, -1, np.int32)
    try:
        for span in spans:
            versions[span["start"] : span["end"]] = Version.parse(span["version"]).encode()
    except (ValueError, TypeError) as error:
        raise BadAnswer("unknown_version", f"{error} in {spans}") from error
    if (versions < 0).any():
        raise BadAnswer("unknown_version", f"{spans} do not cover {tokens} tokens")
    return versions
