"""Routes of the autoscaler: its state, and its switch."""

from __future__ import annotations

import asyncio

from aiohttp import web

from relax_hpc.service.app import ApiError, read_json
from relax_hpc.service.autoscaler.loop import Autoscaler
from relax_hpc.service.documentation import BOOLEAN, NUMBER, TEXT, WHOLE, documented, mapping
from relax_hpc.service.live_run import LiveRun

_STATUS = mapping(
    {
        "enabled": BOOLEAN,
        "dry_run": BOOLEAN,
        "reason_off": TEXT,
        "engines": WHOLE,
        "target": WHOLE,
        "decision": TEXT,
        "limit": TEXT,
        "decided_at": NUMBER,
        "node_hours": NUMBER,
        "limits": mapping({"least": WHOLE, "most": WHOLE}),
        "policy": mapping({}),
        "counts": mapping({}),
        "history": {"type": "array"},
    },
    ["enabled", "decision"],
)
_SWITCH = mapping({"enabled": BOOLEAN}, ["enabled"])


def routes(live: LiveRun, autoscaler: Autoscaler) -> list[web.AbstractRouteDef]:
    """Routes of the ``autoscaler`` of ``live``."""

    @documented(answers={200: _STATUS})
    async def get_status(request: web.Request) -> web.Response:
        """The autoscaler's last decision in one line, its settings, and its earlier decisions."""
        return web.json_response(autoscaler.describe())

    @documented(body=_SWITCH, answers={200: _STATUS}, errors=(400,))
    async def enable(request: web.Request) -> web.Response:
        """Switch the autoscaler on or off, until it is switched again."""
        body = await read_json(request)
        enabled = body.get("enabled", True)
        if not isinstance(enabled, bool) or set(body) - {"enabled"}:
            text = f'found {str(body)[:80]}, allowed: {{"enabled": true}} or {{"enabled": false}}'
            raise ApiError("bad_request", text)
        if enabled and not live.config.service.max_engines:
            text = "service.max_engines: found 0, allowed with an autoscaler: at least 1"
            raise ApiError("bad_request", text)
        await asyncio.to_thread(autoscaler.set_enabled, enabled)
        return web.json_response(autoscaler.describe())

    return [
        web.get("/autoscaler/status", get_status),
        web.post("/autoscaler/enable", enable),
    ]
