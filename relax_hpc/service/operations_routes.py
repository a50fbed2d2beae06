"""Routes of operations on engines. Paths, bodies, states and codes are those of Relax's elastic API
(docs/elastic.md has what was added), so that its clients work with another address and a token."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web

from relax_hpc.queue.client.operations import CreatedOperation
from relax_hpc.queue.operations import (
    CANCELLABLE,
    FINAL,
    FORWARD,
    HEALTH_CHECKING,
    IN,
    NOOP,
    OUT,
    PREFLIGHT,
    Operation,
    OperationRefused,
    group_of,
)
from relax_hpc.service.app import LIVE, ApiError, read_json
from relax_hpc.service.documentation import (
    BOOLEAN,
    NUMBER,
    TEXT,
    TEXTS,
    WHOLE,
    documented,
    mapping,
)
from relax_hpc.service.engine_states import describe_engines
from relax_hpc.service.live_run import HUB_S, HubAwayError, LiveRun

_KEY_HEADER = "Idempotency-Key"
_MAX_KEY = 200
_PRESENT_S = 1.0
"""Seconds to wait for the present engines, before the known ones are used."""
_OUT_BODY = mapping(
    {
        "num_replicas": {**WHOLE, "description": "Engines that the run has afterwards."},
        "relative": {**WHOLE, "description": "Engines to add."},
        "groups": {**WHOLE, "description": "Groups of engines that the run has afterwards."},
        "engine_urls": {**TEXTS, "description": "Addresses of external engines."},
        "engines": {**TEXTS, "description": "Engines that return, as GROUP/NUMBER."},
        "model_name": TEXT,
        "timeout_secs": NUMBER,
        "time": {**TEXT, "description": "Time limit of new Slurm jobs."},
        "time_min": {**TEXT, "description": "Shortest time limit that Slurm may give them."},
        "dry_run": BOOLEAN,
    }
)
_IN_BODY = mapping(
    {
        "num_replicas": {**WHOLE, "description": "Engines that remain."},
        "relative": {**WHOLE, "description": "Engines to remove."},
        "groups": {**WHOLE, "description": "Groups of engines that remain."},
        "engine_urls": {**TEXTS, "description": "Addresses of external engines."},
        "engines": {**TEXTS, "description": "Engines to remove, as GROUP/NUMBER."},
        "model_name": TEXT,
        "force": BOOLEAN,
        "timeout_secs": NUMBER,
        "dry_run": BOOLEAN,
    }
)
_ACCEPTED = mapping({"request_id": TEXT, "status": TEXT, "message": TEXT}, ["request_id", "status"])
_DETAILS = mapping(
    {
        "request_id": TEXT,
        "status": TEXT,
        "state": TEXT,
        "reason": TEXT,
        "detail": TEXT,
        "engine_ids": TEXTS,
        "failed_engines": TEXTS,
        "created_at": NUMBER,
        "updated_at": NUMBER,
        "deadline_at": NUMBER,
        "jobs": mapping({}),
        "expected_start": mapping({}),
        "history": {"type": "array"},
    },
    ["request_id", "status"],
)
_LIST = mapping({"requests": {"type": "array", "items": _DETAILS}, "total_count": WHOLE})
_CANCELLED = mapping(
    {"succeeded": TEXTS, "skipped": {"type": "array"}, "total_count": WHOLE, "dry_run": BOOLEAN}
)


def operations_routes(_live: LiveRun) -> list[web.AbstractRouteDef]:
    return [
        web.post("/rollout/scale_out", scale_out),
        web.get("/rollout/scale_out", list_scale_out),
        web.get("/rollout/scale_out/{id}", get_scale_out),
        web.post("/rollout/scale_out/{id}/cancel", cancel_scale_out),
        web.post("/rollout/scale_out_cancel", cancel_all_scale_out),
        web.post("/rollout/scale_in", scale_in),
        web.get("/rollout/scale_in", list_scale_in),
        web.get("/rollout/scale_in/{id}", get_scale_in),
        web.get("/rollout/engines", get_engines),
    ]


# -- handlers --------------------------------------------------------------------------------------


@documented(
    body=_OUT_BODY,
    answers={200: _ACCEPTED, 202: _ACCEPTED},
    errors=(400, 404, 409, 422, 429, 503),
    headers=(_KEY_HEADER,),
)
async def scale_out(request: web.Request) -> web.Response:
    """Add engines. A repeated request with the same key is the same operation."""
    return await _create(request, OUT)


@documented(
    body=_IN_BODY,
    answers={200: _ACCEPTED, 202: _ACCEPTED},
    errors=(400, 404, 409, 422, 429, 503),
    headers=(_KEY_HEADER,),
)
async def scale_in(request: web.Request) -> web.Response:
    """Remove engines. Their unfinished work continues on other engines."""
    return await _create(request, IN)


@documented(answers={200: _DETAILS}, errors=(404, 503))
async def get_scale_out(request: web.Request) -> web.Response:
    """One scale-out."""
    return web.json_response(describe_operation(await _get(request, OUT)))


@documented(answers={200: _DETAILS}, errors=(404, 503))
async def get_scale_in(request: web.Request) -> web.Response:
    """One scale-in."""
    return web.json_response(describe_operation(await _get(request, IN)))


@documented(answers={200: _LIST}, errors=(400, 503), query=("status", "model_name"))
async def list_scale_out(request: web.Request) -> web.Response:
    """Scale-outs, oldest first."""
    return await _list(request, OUT)


@documented(answers={200: _LIST}, errors=(400, 503), query=("status", "model_name"))
async def list_scale_in(request: web.Request) -> web.Response:
    """Scale-ins, oldest first."""
    return await _list(request, IN)


@documented(answers={200: _ACCEPTED}, errors=(404, 409, 503))
async def cancel_scale_out(request: web.Request) -> web.Response:
    """Cancel a scale-out whose engines have not started yet."""
    live = request.app[LIVE]
    operation = await _get(request, OUT)
    cancelled = await live.ask(live.client.operations.cancel(operation.id, timeout=HUB_S))
    return web.json_response(_accepted(cancelled, "Scale-out request cancelled"))


@documented(
    body=mapping({"model_name": TEXT, "status_filter": TEXT, "dry_run": BOOLEAN}),
    answers={200: _CANCELLED},
    errors=(400, 503),
)
async def cancel_all_scale_out(request: web.Request) -> web.Response:
    """Cancel all scale-outs that match a filter and whose engines have not started yet."""
    live, body = request.app[LIVE], await read_json(request)
    unknown = body.keys() - {"model_name", "status_filter", "dry_run"}
    if unknown:
        raise ApiError("bad_request", f"{min(unknown)!r:.80}: unknown key")
    states = _states_of_filter(OUT, body.get("status_filter"))
    operations = await live.ask(live.client.operations.list(OUT, states, timeout=HUB_S))
    matching = [item for item in operations if not item.is_final or states]
    if not _is_default_model(body.get("model_name")):
        matching = []
    is_dry = bool(body.get("dry_run"))
    succeeded, skipped = list[str](), list[dict[str, str]]()
    for operation in matching:
        reason = await _cancel_one(live, operation, is_dry)
        if reason:
            skipped.append({"request_id": operation.id, "reason": reason})
        else:
            succeeded.append(operation.id)
    filters = {name: body.get(name) for name in ("model_name", "status_filter")}
    return web.json_response(
        {
            "succeeded": succeeded,
            "skipped": skipped,
            "total_count": len(matching),
            "dry_run": is_dry,
            "filters": filters,
        }
    )


@documented(answers={200: mapping({"models": mapping({}), "total_engines": WHOLE})}, errors=(503,))
async def get_engines(request: web.Request) -> web.Response:
    """All engines with their states, and the age of the service's knowledge."""
    live = request.app[LIVE]
    with contextlib.suppress(HubAwayError):
        live.present = await live.ask(live.client.operations.present(timeout=_PRESENT_S))
    if live.status is None or live.present is None:
        raise HubAwayError("the hub of the run has not answered yet")
    if not live.present.is_reported:
        raise HubAwayError("the supervisor of the run has not reported its groups yet")
    engines = describe_engines(live.status, live.present, live.wanted)
    groups = [
        {"group": name, **group, "is_pending": group.get("state") != "running"}
        for name, group in live.present.groups.items()
    ]
    is_hub_away = live.is_hub_away
    content = {
        "models": {"default": {"engines": engines}},
        "total_engines": len(engines),
        "groups": groups,
        "ending_groups": list(live.present.ending),
        "removed_engines": list(live.present.without),
        "age_s": round(live.status_age_s, 3),
        "hub": not is_hub_away,
        "time": time.time(),
    }
    return web.json_response(content)


# -- parts of handlers -----------------------------------------------------------------------------


async def submit_operation(
    live: LiveRun, kind: str, body: Mapping[str, Any], key: str = ""
) -> CreatedOperation:
    """Create an operation. OperationRefused with a code; HubAwayError."""
    service = live.config.service
    limit_s = service.scale_out_timeout_s if kind == OUT else service.scale_in_timeout_s
    return await live.ask(
        live.client.operations.create(kind, body, key, timeout_s=limit_s, timeout=HUB_S)
    )


async def _create(request: web.Request, kind: str) -> web.Response:
    body = await read_json(request)
    if body.get("members"):
        raise ApiError("bad_request", "members: unknown, a member registers itself")
    key = request.headers.get(_KEY_HEADER, "")
    if len(key) > _MAX_KEY or not key.isprintable():
        raise ApiError("bad_request", f"{_KEY_HEADER}: allowed: at most {_MAX_KEY} characters")
    created = await submit_operation(request.app[LIVE], kind, body, key)
    operation = created.operation
    name = "Scale-out" if kind == OUT else "Scale-in"
    if operation.state == NOOP:
        return web.json_response(_accepted(operation, operation.detail or "nothing to do"))
    if body.get("dry_run"):
        content = _accepted(operation, operation.detail or f"{name} request would be accepted")
        return web.json_response({**content, "dry_run": True})
    if not created.created:
        return web.json_response(_accepted(operation, f"{name} request was accepted before"))
    content = _accepted(operation, operation.detail or f"{name} request accepted")
    return web.json_response(content, status=202)


async def _get(request: web.Request, kind: str) -> Operation:
    live, id = request.app[LIVE], request.match_info["id"]
    operation = await live.ask(live.client.operations.get(id[:80], timeout=HUB_S))
    if operation.kind != kind:
        raise OperationRefused("unknown_operation", f"found {id!r:.80}, which is no {kind}")
    return operation


async def _list(request: web.Request, kind: str) -> web.Response:
    live, query = request.app[LIVE], request.query
    states = _states_of_filter(kind, query.get("status"))
    operations: Sequence[Operation] = []
    if _is_default_model(query.get("model_name")):
        operations = await live.ask(live.client.operations.list(kind, states, timeout=HUB_S))
    return web.json_response(
        {
            "requests": [describe_operation(operation) for operation in operations],
            "total_count": len(operations),
            "model_name": query.get("model_name"),
            "status_filter": query.get("status"),
        }
    )


def _states_of_filter(kind: str, status: Any) -> list[str]:
    """States that a client's filter means. ApiError: there is no such state."""
    if status is None or status == "":
        return []
    known = (*FORWARD[kind], *FINAL[kind])
    if status not in known:
        text = f"status: found {status!r:.40}, allowed: {', '.join(known)}"
        raise ApiError("bad_request", text)
    return [HEALTH_CHECKING, PREFLIGHT] if status == HEALTH_CHECKING else [str(status)]


def _is_default_model(name: Any) -> bool:
    return name in (None, "", "default")


async def _cancel_one(live: LiveRun, operation: Operation, is_dry: bool) -> str:
    """Cancel an operation; reason why it is not possible, or empty."""
    if operation.state not in CANCELLABLE:
        return f"it is {operation.state}"
    if is_dry:
        return ""
    try:
        await live.ask(live.client.operations.cancel(operation.id, timeout=HUB_S))
    except OperationRefused as refusal:
        return str(refusal)
    return ""


def _accepted(operation: Operation, message: str) -> dict[str, Any]:
    return {
        "request_id": operation.id,
        "status": _status_for_clients(operation),
        "message": message,
        "engine_ids": operation.engines,
    }


def _status_for_clients(operation: Operation) -> str:
    """The state by Relax's names, which have no PREFLIGHT."""
    return HEALTH_CHECKING if operation.state == PREFLIGHT else operation.state


def describe_operation(operation: Operation) -> dict[str, Any]:
    """An operation with the keys of Relax's answers, and those that were added."""
    body = operation.body
    has_ended = operation.is_final
    failed = [name for name in operation.engines if has_ended and name not in operation.done]
    common = {
        "request_id": operation.id,
        "status": _status_for_clients(operation),
        "model_name": body.get("model_name") or "default",
        "num_replicas": body.get("num_replicas") or 0,
        "engine_urls": body.get("engine_urls") or [],
        "failed_engines": failed,
        "created_at": operation.created_at,
        "updated_at": operation.updated_at,
        "error_message": _error_message(operation),
        "kind": operation.kind,
        "state": operation.state,
        "reason": operation.reason,
        "detail": _detail(operation),
        "deadline_at": operation.deadline_at,
        "groups": sorted(set(map(group_of, operation.engines))),
        "jobs": operation.jobs,
        "expected_start": operation.expected_start,
        "history": operation.history,
    }
    if operation.kind == OUT:
        return {**common, "engine_ids": operation.engines, "weight_version": None}
    return {
        **common,
        "timeout_secs": operation.deadline_at - operation.created_at,
        "force": bool(body.get("force")),
        "dry_run": False,
        "selected_engines": operation.engines,
        "removed_engines": operation.done,
    }


def _detail(operation: Operation) -> str:
    if operation.state != PREFLIGHT:
        return operation.detail
    return operation.detail or "PREFLIGHT: the engine is compared with the engines of the run"


def _error_message(operation: Operation) -> str | None:
    if not operation.reason:
        return None
    return f"{operation.reason}: {operation.detail}" if operation.detail else operation.reason
