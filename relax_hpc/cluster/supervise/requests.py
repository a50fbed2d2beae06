"""Requests of commands to supervisors: numbered files that are answered by files, whoever
supervises at the time.

release   stop a group in good order and give its nodes back; a job of its own takes over
restart   stop a group in good order and start it again in place, with the settings of now
start     start a further member of a group (layout local; elsewhere members have jobs of their own)
stop      of the whole run (`<run>/stop.json`, which stays until the run is resumed)
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


OPS = ("release", "restart", "start")
_NAME = re.compile(r"(\d{6})\.json", re.ASCII)


@dataclass(frozen=True, slots=True)
class Request:
    number: int
    op: str
    group: str


def ask(run: RunDir, op: str, group: str) -> Request:
    """Leave a request for whoever supervises ``group``."""
    path = write_numbered(_folder(run), ".json", json.dumps({"op": op, "group": group}).encode())
    return Request(int(path.stem), op, group)


def pending(run: RunDir, serves: Callable[[str], bool]) -> list[Request]:
    """Requests about groups that ``serves`` takes and that nobody has answered, oldest first.

    What is no request is answered here; files of other names are left alone.
    """
    found = []
    for path in sorted(_folder(run).glob("*.json")):
        match = _NAME.fullmatch(path.name)
        if match is None or _answer(run, int(match[1])).exists():
            continue
        value = read_map(path, op=str, group=str)
        request = Request(int(match[1]), value.get("op", ""), value.get("group", ""))
        if request.op in OPS:
            found.append(request)
        else:
            # On a full disk at a later look.
            with contextlib.suppress(OSError):
                answer(
                    run,
                    request,
                    error=f"{path}: no request: op is one of {', '.join(OPS)}, group the name "
                    "of one",
                )
    return [request for request in found if serves(request.group)]


def answer(run: RunDir, request: Request, **content: Any) -> None:
    """Tell who asked what came of it."""
    write_json(_answer(run, request.number), content)


def wait_for_answer(run: RunDir, request: Request, seconds: float) -> dict[str, Any]:
    """The answer; DeadlineError if no supervisor gives one, and the request is withdrawn."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := read_map(_answer(run, request.number)):
            return found
        time.sleep(LOOK_S)
    answer(run, request, error="withdrawn")
    raise DeadlineError(
        f"{request.op} {request.group}: no supervisor has answered for {seconds:.0f} s; "
        f"see whether the run lives: relax-hpc status {run.root}"
    )


def ask_to_stop(
    run: RunDir, code: int = 0, reason: str = "asked to stop", now: bool = False
) -> None:
    """Have every supervisor of the run end its groups in good order; the first reason stays.

    ``now``: they shall wait for nothing any more.
    """
    asked = asked_to_stop(run)
    if not asked or now:
        write_json(
            run.stop,
            (asked or {"code": code, "reason": reason}) | ({"now": True} if now else {}),
            sync=True,
        )


def asked_to_stop(run: RunDir) -> dict[str, Any]:
    """{code, reason, and now where it is so} of a stop that was asked for; empty while there is
    none."""
    return read_map(run.stop, code=int, reason=str)


def _folder(run: RunDir) -> Path:
    return run.root / "requests"


def _answer(run: RunDir, number: int) -> Path:
    return _folder(run) / f"{number:06d}.answer.json"
