"""Requests of commands to supervisors: numbered files in the run directory, answered by files.

Any present or future supervisor of the group can answer.

release   stop a group cleanly and release its nodes; a separate job takes over
restart   stop a group cleanly and restart it in place with the present settings
start     start a further member of a group (layout local; else each member has a separate job)
stop      stop the whole run (`<run>/stop.json`, which stays until the run is resumed)
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_hpc.base.errors import DeadlineError
from relax_hpc.base.rundir import RunDir, read_map, write_json, write_numbered

LOOK_S = 0.2
"""Seconds between two checks for an answer."""
OPS = ("release", "restart", "start")
_NAME = re.compile(r"(\d{6})\.json", re.ASCII)


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """A request about one group."""

    number: int
    op: str
    group: str


def send_request(run: RunDir, op: str, group: str) -> GroupRequest:
    """Write a request for the supervisor of ``group``."""
    path = write_numbered(_folder(run), ".json", json.dumps({"op": op, "group": group}).encode())
    return GroupRequest(int(path.stem), op, group)


def pending_requests(run: RunDir, serves: Callable[[str], bool]) -> list[GroupRequest]:
    """Unanswered requests about groups for which ``serves`` is true, oldest first.

    A malformed request gets an error as its answer. Files with other names are ignored.
    """
    unanswered = []
    for path in sorted(_folder(run).glob("*.json")):
        match = _NAME.fullmatch(path.name)
        if match is None or _answer(run, int(match[1])).exists():
            continue
        value = read_map(path, op=str, group=str)
        request = GroupRequest(int(match[1]), value.get("op", ""), value.get("group", ""))
        if request.op in OPS:
            unanswered.append(request)
        else:
            # On a full disk a later call answers it.
            with contextlib.suppress(OSError):
                answer(
                    run,
                    request,
                    error=f"{path}: no request: op must be one of {', '.join(OPS)}, group the "
                    "name of a group",
                )
    return [request for request in unanswered if serves(request.group)]


def answer(run: RunDir, request: GroupRequest, **content: Any) -> None:
    """Write the answer to a request."""
    write_json(_answer(run, request.number), content)


def wait_for_answer(run: RunDir, request: GroupRequest, seconds: float) -> dict[str, Any]:
    """The answer to a request. If no supervisor answers, the request is withdrawn and a
    DeadlineError raised."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        content = read_map(_answer(run, request.number))
        if content:
            return content
        time.sleep(LOOK_S)
    answer(run, request, error="withdrawn")
    raise DeadlineError(
        f"{request.op} {request.group}: no supervisor has answered for {seconds:.0f} s; "
        f"see whether the run lives: relax-hpc status {run.root}"
    )


def request_stop(
    run: RunDir, code: int = 0, reason: str = "asked to stop", now: bool = False
) -> None:
    """Ask every supervisor of the run to stop its groups cleanly. The first reason is kept.

    ``now``: supervisors must not wait for groups to save.
    """
    request = read_stop_request(run)
    if request and not now:
        return
    request = request or {"code": code, "reason": reason}
    if now:
        request["now"] = True
    write_json(run.stop, request, sync=True)


def read_stop_request(run: RunDir) -> dict[str, Any]:
    """Present request to stop the run: code, reason, and `now` if it is set. Empty if there is
    none."""
    return read_map(run.stop, code=int, reason=str)


def _folder(run: RunDir) -> Path:
    return run.root / "requests"


def _answer(run: RunDir, number: int) -> Path:
    return _folder(run) / f"{number:06d}.answer.json"
