"""Decisions about new operations: whether a request is accepted, and which engines it concerns. All
functions only read their arguments. `operation_progress` has what follows."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

from relax_hpc.queue.controller.state.operations import Operations
from relax_hpc.queue.operations import (
    FORWARD,
    IN,
    NOOP,
    OUT,
    ExternalEngine,
    Operation,
    OperationRefused,
    group_of,
    is_external,
    number_of,
)
from relax_hpc.queue.plan import EnginePlan

_KEYS: dict[str, type | tuple[type, ...]] = {
    "model_name": str,
    "num_replicas": int,
    "relative": int,
    "groups": int,
    "engine_urls": list,
    "engines": list,
    "members": list,
    "force": bool,
    "dry_run": bool,
    "timeout_secs": (int, float),
    "time": str,
    "time_min": str,
}
"""Keys of the body of a request, and their types."""
_MODEL = "default"
"""The only name of a model that a run has."""
MAX_ENGINES = 4096
"""Most engines of a run, so that no request makes the hub work for long."""
_MAX_URLS = 256
_MAX_URL = 512
_MAX_S = 30 * 86400.0
_TIME = re.compile(r"[0-9]{1,6}([-:][0-9]{1,2}){0,3}", re.ASCII)


@dataclass(frozen=True, slots=True)
class PresentEngines:
    """Engines of the run's own groups, as the supervisor of the hub's group reports them."""

    groups: Mapping[str, int]
    """Number of engines of each group that is wanted, by its name. The first is the configured
    group, the others are further members."""
    without: Collection[str] = ()
    """Engines of these groups that were removed, as GROUP/NUMBER."""
    taken: Collection[str] = ()
    """Groups that still end. Their names cannot be used yet."""

    def names(self) -> list[str]:
        """Engines that are wanted."""
        return [name for name in self.all_names() if name not in self.without]

    def removed(self) -> list[str]:
        return [name for name in self.all_names() if name in self.without]

    def all_names(self) -> list[str]:
        names = list[str]()
        for group in sorted(self.groups, key=member_number):
            names += [f"{group}/{number}" for number in range(self.groups[group])]
        return names


@dataclass(slots=True)
class _Choice:
    """The engines that a request concerns."""

    engines: list[str] = field(default_factory=list)
    external: list[dict[str, Any]] = field(default_factory=list)
    """Url, or member and token, of each new external engine."""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Planned:
    """Result of `plan_operation`."""

    operation: Operation
    external: Sequence[ExternalEngine] = ()
    is_new: bool = True


def member_number(group: str) -> int:
    """Number of a member of an elastic group; 1 for the configured group itself.

    >>> [member_number(name) for name in ("rollout", "rollout-2", "rollout-12")]
    [1, 2, 12]
    """
    match = re.fullmatch(r".+-([1-9]\d*)", group)
    return int(match[1]) if match else 1


def digest_request(kind: str, body: Mapping[str, Any]) -> str:
    """Digest of a request. It is the same for equal requests."""
    text = json.dumps([kind, body], sort_keys=True, default=repr)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def plan_operation(
    operations: Operations,
    present: PresentEngines,
    plan: EnginePlan,
    kind: str,
    body: Mapping[str, Any],
    key: str,
    now: float,
    timeout_s: float,
) -> Planned:
    """The operation that answers a request: a new one, or the one that the same request created
    before. OperationRefused: with the code for the client."""
    if kind not in FORWARD:
        raise OperationRefused("bad_request", f"kind: found {kind!r:.40}, allowed: {OUT}, {IN}")
    digest = digest_request(kind, body)
    former = operations.by_key(key)
    if former and former.digest != digest:
        text = f"the key was used for operation {former.id} with another body; use a new key"
        raise OperationRefused("key_reused", text)
    if former:
        return Planned(former, is_new=False)
    _check_body(kind, body)
    unfinished = operations.unfinished()
    if unfinished:
        if not key and unfinished[-1].digest == digest and not unfinished[-1].is_final:
            return Planned(unfinished[-1], is_new=False)
        busy = unfinished[0]
        state = "is being undone" if busy.is_final else f"is {busy.state}"
        raise OperationRefused("busy", f"operation {busy.id} {state}; wait for its end")
    if plan.colocated:
        text = (
            "the actor and the engines take turns on the same devices (colocate), so that their "
            "number is fixed; stop the run and resume it with another rollout.replicas"
        )
        raise OperationRefused("colocate", text)
    # A resubmission may have changed the engines of a group. New members have the same number.
    plan = replace(plan, engines=present.groups.get(plan.group, plan.engines))
    chosen = _choose(operations, present, plan, kind, body)
    return _make_operation(operations, plan, kind, body, key, digest, now, timeout_s, chosen)


def _make_operation(
    operations: Operations,
    plan: EnginePlan,
    kind: str,
    body: Mapping[str, Any],
    key: str,
    digest: str,
    now: float,
    timeout_s: float,
    chosen: _Choice,
) -> Planned:
    prefix = "so" if kind == OUT else "si"
    operation = Operation(
        id=f"{prefix}-{operations.count + 1:06d}",
        kind=kind,
        body=dict(body),
        created_at=now,
        deadline_at=now + min(float(body.get("timeout_secs") or timeout_s), _MAX_S),
        key=key,
        digest=digest,
        engines=list(chosen.engines),
        detail=chosen.detail,
        updated_at=now,
    )
    external = []
    for offset, origin in enumerate(chosen.external):
        number = operations.next_external + offset
        name = f"{plan.group}/{number}"
        operation.engines.append(name)
        external.append(
            ExternalEngine(number=number, name=name, operation=operation.id, since=now, **origin)
        )
    if not operation.engines:
        operation.state = NOOP
    operation.history = [[operation.state, now]]
    return Planned(operation, external)


# -- the body of a request -------------------------------------------------------------------------


def _check_body(kind: str, body: Mapping[str, Any]) -> None:
    """OperationRefused: an entry of ``body`` is unknown, or has a wrong type or value."""
    for name, value in body.items():
        kinds = _KEYS.get(name)
        if kinds is None:
            raise OperationRefused(
                "bad_request", f"{name!r:.80}: unknown, allowed: {', '.join(_KEYS)}"
            )
        is_number = isinstance(value, bool) and kinds is not bool
        if value is not None and (is_number or not isinstance(value, kinds)):
            names = kinds.__name__ if isinstance(kinds, type) else "number"
            raise OperationRefused("bad_request", f"{name}: found {value!r:.80}, allowed: {names}")
    if (body.get("model_name") or _MODEL) != _MODEL:
        text = f"model_name: found {body['model_name']!r:.80}, allowed: {_MODEL}"
        raise OperationRefused("bad_request", text)
    timeout = body.get("timeout_secs")
    if timeout is not None and not (math.isfinite(timeout) and timeout > 0):
        raise OperationRefused("bad_request", f"timeout_secs: found {timeout}, allowed: above 0")
    for name in ("num_replicas", "relative", "groups"):
        if (body.get(name) or 0) < 0:
            raise OperationRefused("bad_request", f"{name}: found {body[name]}, allowed: above 0")
    for name in ("time", "time_min"):
        if body.get(name) and not _TIME.fullmatch(body[name]):
            text = f"{name}: found {body[name]!r:.40}, allowed: a time limit of sbatch"
            raise OperationRefused("bad_request", text)
    _check_names(body)
    goals = [name for name in ("relative", "groups", "engines", "members") if body.get(name)]
    if body.get("num_replicas") or body.get("engine_urls"):
        goals.append("num_replicas" if body.get("num_replicas") else "engine_urls")
    if len(goals) != 1:
        allowed = "num_replicas, relative, groups, engine_urls or engines"
        found = " and ".join(goals) or "none"
        raise OperationRefused("bad_request", f"found {found}, allowed: one of {allowed}")
    if kind == OUT and body.get("force"):
        raise OperationRefused("bad_request", "force: found with scale_out, allowed: scale_in")
    if kind == IN and body.get("members"):
        raise OperationRefused("bad_request", "members: found with scale_in, allowed: engines")


def _check_names(body: Mapping[str, Any]) -> None:
    """OperationRefused: an entry of a list is no text, too long, or no address."""
    for name in ("engine_urls", "engines"):
        values = body.get(name) or []
        if len(values) > _MAX_URLS:
            text = f"{name}: found {len(values)} entries, allowed: {_MAX_URLS}"
            raise OperationRefused("bad_request", text)
        for value in values:
            if not isinstance(value, str) or not 0 < len(value) <= _MAX_URL:
                raise OperationRefused("bad_request", f"{name}: found {value!r:.80}, allowed: text")
            if name == "engine_urls" and not _is_address(value):
                raise OperationRefused(
                    "bad_request",
                    f"engine_urls: found {value!r:.80}, allowed: http://HOST:PORT or "
                    "https://HOST:PORT, without user and password",
                )


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        has_port_or_default = parts.port is None or parts.port > 0
    except ValueError:
        return False
    is_plain = url.isascii() and url.isprintable() and " " not in url
    return (
        is_plain
        and parts.scheme in ("http", "https")
        and bool(parts.hostname)
        and "@" not in parts.netloc
        and has_port_or_default
    )


# -- the choice of engines -------------------------------------------------------------------------


def _choose(
    operations: Operations,
    present: PresentEngines,
    plan: EnginePlan,
    kind: str,
    body: Mapping[str, Any],
) -> _Choice:
    external = operations.wanted_external()
    count = len(present.names()) + len(external)
    target = body.get("num_replicas") or 0
    if body.get("relative"):
        target = count + body["relative"] * (1 if kind == OUT else -1)
    if body.get("groups"):
        return _choose_groups(present, plan, kind, body["groups"], count)
    is_counted = bool(body.get("num_replicas") or body.get("relative"))
    if kind == OUT:
        if is_counted:
            return _choose_to_add(present, plan, target, count)
        if body.get("engines"):
            return _choose_to_return(present, plan, body["engines"], count)
        return _choose_external(external, plan, body, count)
    if is_counted:
        return _choose_to_remove(external, present, plan, target, count)
    return _choose_named(external, present, plan, body, count)


def _choose_groups(
    present: PresentEngines, plan: EnginePlan, kind: str, target: int, count: int
) -> _Choice:
    """Whole groups, so that ``target`` of them exist, with the configured one. The members with the
    highest numbers leave first."""
    if kind == OUT and target > 1 and not plan.has_members:
        text = f"group {plan.group} has other roles than rollout, so that it has no members"
        raise OperationRefused("bad_request", text)
    members = sorted(present.groups.keys() - {plan.group}, key=member_number)
    if kind == IN:
        leaving = [name for name in members if member_number(name) > target][::-1]
        names = present.names()
        engines = list[str]()
        for group in leaving:
            engines += [name for name in names if group_of(name) == group]
        _check_minimum(plan, count - len(engines))
        return _Choice(engines, detail="" if engines else f"the run has {len(members) + 1} groups")
    _check_maximum(plan, target * plan.engines if kind == OUT else 0)
    wanted = [f"{plan.group}-{number}" for number in range(2, target + 1)]
    missing = [name for name in wanted if name not in members and name not in present.taken]
    engines = list[str]()
    for group in missing:
        engines += [f"{group}/{number}" for number in range(plan.engines)]
    _check_maximum(plan, count + len(engines))
    return _Choice(engines, detail="" if engines else f"the run has {len(members) + 1} groups")


def _check_maximum(plan: EnginePlan, count: int) -> None:
    if count > MAX_ENGINES:
        text = f"{count} engines, allowed at most {MAX_ENGINES} in a run"
        raise OperationRefused("bad_request", text)
    if plan.max_engines and count > plan.max_engines:
        text = f"{count} engines, allowed service.max_engines={plan.max_engines}"
        raise OperationRefused("bad_request", text)


def _choose_to_add(present: PresentEngines, plan: EnginePlan, target: int, count: int) -> _Choice:
    """Engines that were removed return first, then further members start."""
    _check_maximum(plan, target)
    missing = target - count
    if missing <= 0:
        return _Choice(detail=f"the run has {count} engines already")
    engines = present.removed()[:missing]
    missing -= len(engines)
    if missing and not plan.has_members:
        raise OperationRefused(
            "bad_request",
            f"group {plan.group} has other roles than rollout, so that it has no further members: "
            f"at most {count + len(engines)} engines; external engines can join by engine_urls",
        )
    number = 2
    while missing > 0:
        name = f"{plan.group}-{number}"
        if name not in present.groups and name not in present.taken:
            engines += [f"{name}/{index}" for index in range(plan.engines)]
            missing -= plan.engines
        number += 1
    total = count + len(engines)
    _check_maximum(plan, total)
    return _Choice(engines, detail=_describe_rounding(plan, target, total))


def _describe_rounding(plan: EnginePlan, target: int, total: int) -> str:
    if total == target:
        return ""
    return f"rounded up to whole groups of {plan.engines} engines: {total} instead of {target}"


def _choose_to_return(
    present: PresentEngines, plan: EnginePlan, names: Sequence[str], count: int
) -> _Choice:
    """Named engines that were removed before."""
    unknown = [name for name in names if name not in present.all_names()]
    if unknown:
        raise OperationRefused("unknown_engine", _describe_unknown(unknown, present.removed()))
    engines = [name for name in present.removed() if name in names]
    _check_maximum(plan, count + len(engines))
    return _Choice(engines, detail="" if engines else "these engines are wanted already")


def _choose_external(
    external: Sequence[ExternalEngine], plan: EnginePlan, body: Mapping[str, Any], count: int
) -> _Choice:
    """External engines that are not wanted yet."""
    if body.get("members"):
        present = {engine.member for engine in external}
        origins = [
            {"member": item["member"], "token": item.get("token", ""), "url": item.get("url", "")}
            for item in body["members"]
            if item["member"] not in present
        ]
    else:
        present = {engine.url for engine in external}
        urls = list(dict.fromkeys(url.rstrip("/") for url in body["engine_urls"]))
        origins = [{"url": url} for url in urls if url not in present]
    _check_maximum(plan, count + len(origins))
    return _Choice(external=origins, detail="" if origins else "these engines are wanted already")


def _choose_to_remove(
    external: Sequence[ExternalEngine],
    present: PresentEngines,
    plan: EnginePlan,
    target: int,
    count: int,
) -> _Choice:
    """The engines that were added last leave first: external ones, then whole members, then engines
    of the configured group."""
    surplus = count - target
    if surplus <= 0:
        return _Choice(detail=f"the run has {count} engines already")
    _check_minimum(plan, target)
    last_first = sorted(external, key=lambda engine: engine.number, reverse=True)
    engines = [engine.name for engine in last_first[:surplus]]
    surplus -= len(engines)
    wanted = present.names()
    members = sorted(present.groups.keys() - {plan.group}, key=member_number, reverse=True)
    is_rounded = False
    for group in members:
        names = [name for name in wanted if group_of(name) == group]
        if not is_rounded and len(names) <= surplus:
            engines += names
            surplus -= len(names)
        elif surplus:
            is_rounded = True
    if surplus and not is_rounded:
        own = [name for name in wanted if group_of(name) == plan.group]
        removable = _removable(own, _per_process(present, plan, plan.group))
        if len(removable) < surplus:
            raise OperationRefused("protected", _describe_protected(plan))
        engines += removable[:surplus]
    total = count - len(engines)
    return _Choice(engines, detail=_describe_rounding(plan, target, total))


def _per_process(present: PresentEngines, plan: EnginePlan, group: str) -> int:
    """Engines of each process of ``group``, whose size may differ from the configured one."""
    return max(1, present.groups.get(group, plan.engines) // plan.processes)


def _removable(names: Sequence[str], size: int) -> list[str]:
    """Engines of one group that may leave, the last first: one engine of each process stays, which
    has ``size`` of them."""
    kept = {number_of(name) // size: name for name in reversed(names)}
    return [name for name in reversed(names) if name not in kept.values()]


def _describe_protected(plan: EnginePlan) -> str:
    return (
        f"the last engine of each process of group {plan.group} stays, because the process also "
        "serves external engines; to end the run: relax-hpc stop"
    )


def _check_minimum(plan: EnginePlan, target: int) -> None:
    if target < plan.min_engines:
        text = f"{target} engines would remain, allowed service.min_engines={plan.min_engines}"
        raise OperationRefused("below_minimum", text)


def _choose_named(
    external: Sequence[ExternalEngine],
    present: PresentEngines,
    plan: EnginePlan,
    body: Mapping[str, Any],
    count: int,
) -> _Choice:
    """Engines that the client names, by name or by address."""
    wanted = [*present.names(), *(engine.name for engine in external)]
    if body.get("engines"):
        unknown = [name for name in body["engines"] if name not in wanted]
        if unknown:
            raise OperationRefused("unknown_engine", _describe_unknown(unknown, wanted))
        engines = [name for name in wanted if name in body["engines"]]
    else:
        by_url = {engine.url: engine.name for engine in external if engine.url}
        urls = list(dict.fromkeys(url.rstrip("/") for url in body["engine_urls"]))
        unknown = [url for url in urls if url not in by_url]
        if unknown:
            raise OperationRefused("unknown_engine", _describe_unknown(unknown, list(by_url)))
        engines = [by_url[url] for url in urls]
    _check_stays(present, plan, wanted, engines)
    _check_minimum(plan, count - len(engines))
    return _Choice(engines)


def _check_stays(
    present: PresentEngines, plan: EnginePlan, wanted: Sequence[str], leaving: Sequence[str]
) -> None:
    """OperationRefused: a process of a group that stays would have no engine."""
    groups = dict.fromkeys(group_of(name) for name in leaving if not is_external(name))
    for group in groups:
        own = [name for name in wanted if group_of(name) == group and not is_external(name)]
        if group != plan.group and set(own) <= set(leaving):
            continue
        size = _per_process(present, plan, group)
        before = {number_of(name) // size for name in own}
        after = {number_of(name) // size for name in own if name not in leaving}
        if before != after:
            raise OperationRefused("protected", _describe_protected(plan))


def _describe_unknown(unknown: Sequence[str], known: Sequence[str]) -> str:
    return f"found {', '.join(unknown[:4])}, allowed: {', '.join(known[:20]) or 'none'}"
