"""States of all engines of a run, from the newest answers of its hub."""

from __future__ import annotations

from typing import Any

from relax_hpc.queue.client import QueueStatus
from relax_hpc.queue.client.operations import PresentReport, WantedState
from relax_hpc.queue.operations import (
    ENGINE_DRAINING,
    JOINING,
    LEFT,
    LOST,
    SERVING,
    ExternalEngine,
)

_NOTHING = "i000000-v000000"
"""Version of a reader that serves no weights."""
_FOR_CLIENTS = {
    JOINING: "CREATING",
    SERVING: "ACTIVE",
    ENGINE_DRAINING: "DRAINING",
    LOST: "UNHEALTHY",
    LEFT: "REMOVED",
}
"""States by the names that clients of Relax expect in `status`."""


def describe_engines(
    status: QueueStatus, present: PresentReport, wanted: WantedState
) -> list[dict[str, Any]]:
    """Each engine that is wanted or still serves, with its `state`: joining, active, draining, lost
    or left."""
    served = {name: version for name, version in status.readers.items() if version != _NOTHING}
    engines = []
    for group, content in present.groups.items():
        for number in range(int(content.get("engines", 0))):
            name = f"{group}/{number}"
            is_removed = name in present.without
            engines.append(_describe_own(name, content, served, is_removed))
    for group in present.ending:
        names = [name for name in served if name.rpartition("/")[0] == group]
        engines += [_describe(name, ENGINE_DRAINING, served.get(name, "")) for name in names]
    known = wanted.external or present.external
    engines += [_describe_external(engine, served) for engine in known if _is_shown(engine)]
    return engines


def _describe_own(
    name: str, group: dict[str, Any] | Any, served: dict[str, str], is_removed: bool
) -> dict[str, Any]:
    version = served.get(name, "")
    if is_removed:
        state = ENGINE_DRAINING if version else LEFT
    else:
        state = SERVING if version else JOINING
    entry = _describe(name, state, version)
    if state == JOINING:
        entry |= {
            "job": group.get("job", ""),
            "expected_start": group.get("expected_start") or None,
            "detail": group.get("detail", ""),
        }
    return entry


def _is_shown(engine: ExternalEngine) -> bool:
    return engine.wanted or engine.state != LEFT


def _describe_external(engine: ExternalEngine, served: dict[str, str]) -> dict[str, Any]:
    return _describe(engine.name, engine.state, served.get(engine.name, "")) | {
        "url": engine.url,
        "member": engine.member,
        "is_external": True,
        "phase": engine.phase,
        "reason": engine.reason,
        "detail": engine.detail,
        "since": engine.since,
        "next_try": engine.next_try or None,
    }


def _describe(name: str, state: str, version: str) -> dict[str, Any]:
    return {
        "engine_id": name,
        "url": "",
        "status": _FOR_CLIENTS[state],
        "is_healthy": state == SERVING,
        "state": state,
        "version": version,
        "group": name.rpartition("/")[0],
        "is_external": False,
    }
