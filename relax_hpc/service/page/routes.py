"""Routes of the page of a live run. Their handlers check the session of the browser themselves."""

from __future__ import annotations

import hmac
import json
from typing import Any
from urllib.parse import parse_qs

from aiohttp import web

from relax_hpc.base.errors import RelaxError
from relax_hpc.cluster.slurm.commands import Slurm
from relax_hpc.net.http_limits import read_body
from relax_hpc.ops.observe.status import SLURM_S
from relax_hpc.rollout.sample_log import Sample
from relax_hpc.service.app import LIMITS, TOKEN, error_response
from relax_hpc.service.live_run import LiveRun
from relax_hpc.service.page.document import render_document, render_login
from relax_hpc.service.page.session import SESSION_S, cookie_name, is_session, make_session
from relax_hpc.service.page.shared_reading import SharedReading
from relax_hpc.service.page.snapshot import ask_operations, newest_samples, take_state

_STATE_S, _SAMPLES_S = 4.0, 30.0
"""Shortest seconds between two readings of the state, and of samples."""
_FORM_BYTES = 4096
_FROM_HERE = ("", "same-origin", "none")
"""Values of Sec-Fetch-Site of requests that no other site has caused. Programs send none."""
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""Headers of all answers. The documents themselves have the rest of the content policy."""


def routes(live: LiveRun) -> list[web.AbstractRouteDef]:
    """Routes of the page of ``live``."""
    page = _Page(live)
    return [
        web.get("/page", page.show),
        web.get("/page/login", page.leave_form),
        web.post("/page/login", page.log_in),
        web.post("/page/logout", page.log_out),
        web.get("/page/state", page.send_state),
        web.get("/page/samples", page.send_samples),
    ]


class _Page:
    """Handlers of the page."""

    def __init__(self, live: LiveRun) -> None:
        self._live = live
        self._document = ""
        self._state: SharedReading[dict[str, Any]] = SharedReading(self._read_state, _STATE_S)
        self._samples: SharedReading[list[Sample]] = SharedReading(
            lambda: newest_samples(live.run), _SAMPLES_S
        )

    async def show(self, request: web.Request) -> web.Response:
        """The page, or the form for the token."""
        if not _has_session(request):
            return _send_html(render_login("page/login"), 401)
        if not self._document:
            self._document = render_document({"live": True})
        return _send_html(self._document)

    async def leave_form(self, _request: web.Request) -> web.Response:
        """Lead a browser that opens the address of the form to the page."""
        return _redirect_to_page()

    async def log_in(self, request: web.Request) -> web.Response:
        """Open a session for the token in the form of the body."""
        if not _is_from_here(request):
            return _repeat_form("Another site has sent this form.", 403)
        try:
            body = await read_body(request, _FORM_BYTES)
            fields = parse_qs(body.decode("ascii", errors="replace"), max_num_fields=4)
        except (ValueError, TimeoutError, web.RequestPayloadError):
            # ValueError: TooLargeError, or too many fields.
            return _repeat_form("The form could not be read.", 400)
        given = fields.get("token", [""])[0].strip()
        token = request.app[TOKEN]
        if not hmac.compare_digest(given.encode(errors="surrogateescape"), token):
            request.app[LIMITS].refused["unauthorized"] += 1
            return _repeat_form("This is not the token of this run.", 401)
        response = _redirect_to_page()
        # Without a path, the browser takes the folder of the address that it knows, which a proxy
        # of a site may have changed.
        response.set_cookie(
            cookie_name(token),
            make_session(token),
            max_age=SESSION_S,
            path="",
            httponly=True,
            samesite="Strict",
        )
        return response

    async def log_out(self, request: web.Request) -> web.Response:
        """Remove the cookie."""
        response = _redirect_to_page()
        if _is_from_here(request):
            response.set_cookie(
                cookie_name(request.app[TOKEN]),
                "",
                max_age=0,
                path="",
                httponly=True,
                samesite="Strict",
            )
        return response

    async def send_state(self, request: web.Request) -> web.Response:
        """State of the run, see `describe_run`, and its age."""
        return await self._send(request, "state", self._state)

    async def send_samples(self, request: web.Request) -> web.Response:
        """The newest samples, and their age."""
        return await self._send(request, "samples", self._samples)

    async def _send(
        self, request: web.Request, name: str, reading: SharedReading[Any]
    ) -> web.Response:
        if not _has_session(request):
            return error_response("unauthorized", "the session has expired; open /page")
        try:
            value, age_s = await reading.get()
        except (RelaxError, OSError) as error:
            return error_response("hub_away", f"the run cannot be read now: {error}")
        text = json.dumps({name: value, "age_s": round(age_s, 1)}, allow_nan=False)
        return web.Response(text=text, content_type="application/json", headers=_HEADERS)

    def _read_state(self) -> dict[str, Any]:
        live = self._live
        slurm = Slurm(timeout_s=SLURM_S, tries=1)
        if live.status is None or live.is_hub_away:
            wanted = live.wanted
            return take_state(live.run, slurm, {}, wanted.operations, wanted.external)
        operations, external = ask_operations(live.client)
        return take_state(live.run, slurm, live.status.message(), operations, external)


def _has_session(request: web.Request) -> bool:
    token = request.app[TOKEN]
    is_valid = is_session(token, request.cookies.get(cookie_name(token), ""))
    if is_valid:
        request.app[LIMITS].prove(request.protocol)
    return is_valid


def _is_from_here(request: web.Request) -> bool:
    return request.headers.get("Sec-Fetch-Site", "") in _FROM_HERE


def _redirect_to_page() -> web.Response:
    return web.Response(status=303, headers=_HEADERS | {"Location": "../page"})


def _repeat_form(message: str, status: int) -> web.Response:
    """The form, as the answer at its own address."""
    return _send_html(render_login("login", message), status)


def _send_html(text: str, status: int = 200) -> web.Response:
    return web.Response(text=text, content_type="text/html", status=status, headers=_HEADERS)
