"""Check of every plane between every two processes, before the run needs them.

Each process makes an offer. All offers are sent to all processes, by any means. Each process then
reads the records of the other offers::

    offer = make_offer("rollout/0", planes, absent={"rdma": "there is no package nixl-cu12"})
    offers = world.allgather(offer)
    trials = try_offers("rollout/0", planes, offers, timeout_s=5.0)
    print(format_trials(trials))             # of one process, or of all processes together
    withdraw_offer("rollout/0", planes)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from relax_hpc.net.transport.plane import Descriptor, Plane, PlaneError

PREFERENCE = ("shm", "rdma", "tcp", "file")
"""Planes, the best first."""
TRIAL_BYTES = 64 << 10
_GRACE_S = 1.0
"""Seconds that a trial waits beyond the deadline of its plane, in case the plane hangs."""

Offer = dict[str, Any]
"""{process, planes: descriptor by plane, absent: reason by plane that is not offered, bytes}.
msgpack can encode it."""


@dataclass(frozen=True, slots=True)
class PlaneTrial:
    """Result of reading on one plane from `maker` to `reader`.

    `path`: path of the bytes, see `Plane.path`. `why`: reason of a failure.
    """

    reader: str
    maker: str
    plane: str
    ok: bool
    seconds: float
    path: str = ""
    why: str = ""


def make_offer(
    process: str,
    planes: Mapping[str, Plane],
    absent: Mapping[str, str] | None = None,
    size: int = TRIAL_BYTES,
) -> Offer:
    """Publish a record of ``size`` bytes on each of ``planes``.

    ``absent``: reasons why other planes are not available.
    """
    offer: Offer = {"process": process, "planes": {}, "absent": dict(absent or {}), "bytes": size}
    for name, plane in planes.items():
        record = memoryview(_record(process, size))
        try:
            offer["planes"][name] = plane.publish(_record_name(process), record)
        except PlaneError as error:
            offer["absent"][name] = str(error)
    return offer


def withdraw_offer(process: str, planes: Mapping[str, Plane]) -> None:
    """Retire the records of `make_offer`, after all processes have read them."""
    for plane in planes.values():
        plane.retire(_record_name(process))


def try_offers(
    process: str,
    planes: Mapping[str, Plane],
    offers: Iterable[Offer],
    timeout_s: float,
    absent: Mapping[str, str] | None = None,
) -> list[PlaneTrial]:
    """One trial for each other process and each plane that one of the two has.

    A trial takes at most ``timeout_s``. ``absent``: planes that this process does not have, with
    reasons.
    """
    trials = []
    for offer in offers:
        if offer["process"] == process:
            continue
        for name in _in_order({*planes, *offer["planes"], *offer["absent"]}):
            trials.append(_try(process, name, planes.get(name), offer, timeout_s, absent or {}))
    return trials


def _try(
    process: str,
    name: str,
    plane: Plane | None,
    offer: Offer,
    timeout_s: float,
    absent: Mapping[str, str],
) -> PlaneTrial:
    maker, descriptor = offer["process"], offer["planes"].get(name)
    if descriptor is None:
        reason = f"{maker}: {offer['absent'].get(name, 'not offered')}"
        return PlaneTrial(process, maker, name, False, 0.0, why=reason)
    if plane is None:
        reason = f"{process}: {absent.get(name, 'not available')}"
        return PlaneTrial(process, maker, name, False, 0.0, why=reason)
    start = time.monotonic()
    path, reason = _within(timeout_s + _GRACE_S, lambda: _read(plane, descriptor, offer, timeout_s))
    return PlaneTrial(process, maker, name, not reason, time.monotonic() - start, path, reason)


def _read(plane: Plane, descriptor: Descriptor, offer: Offer, timeout_s: float) -> tuple[str, str]:
    """Path of the record, and the reason why it could not be read; empty: it was read."""
    path = ""
    try:
        path = plane.path(descriptor)
        is_equal = plane.read(descriptor, timeout_s) == _record(offer["process"], offer["bytes"])
    except Exception as error:  # of any kind: the table shows it, and the other planes are tried
        return path, str(error) or type(error).__name__
    return path, "" if is_equal else "the bytes differ from those that were published"


def _within(seconds: float, work: Callable[[], tuple[str, str]]) -> tuple[str, str]:
    """Result of ``work`` in a daemon thread, which is abandoned after ``seconds``."""
    # A read on a broken plane can hang in native code, which nothing interrupts.
    results: list[tuple[str, str]] = []
    thread = threading.Thread(
        target=lambda: results.append(work()), name="plane-preflight", daemon=True
    )
    thread.start()
    thread.join(seconds)
    return results[0] if results else ("", f"hangs: no answer and no error in {seconds:g} s")


def choose_planes(trials: Iterable[PlaneTrial]) -> dict[tuple[str, str], str]:
    """Plane to use by (reader, maker): the first of PREFERENCE that works. Empty: none works."""
    working: dict[tuple[str, str], set[str]] = {}
    for trial in trials:
        names = working.setdefault((trial.reader, trial.maker), set())
        if trial.ok:
            names.add(trial.plane)
    return {pair: next(iter(_in_order(names)), "") for pair, names in working.items()}


def describe_missing(trials: Iterable[PlaneTrial], required: Iterable[str]) -> list[str]:
    """A line for each failed trial of a plane in ``required``."""
    wanted = set(required)
    return [
        f"plane {trial.plane} is required, but {trial.reader} cannot read {trial.maker} by it: "
        f"{trial.why}"
        for trial in trials
        if trial.plane in wanted and not trial.ok
    ]


def format_trials(trials: Sequence[PlaneTrial]) -> str:
    """The trials as a table. The plane to use of each pair has a star."""
    chosen = choose_planes(trials)
    lines = [("reader", "maker", "plane", "", "seconds", "path", "why not")]
    for trial in trials:
        star = " *" if chosen[trial.reader, trial.maker] == trial.plane else ""
        seconds = f"{trial.seconds:.4f}" if trial.seconds else ""
        mark = f"{'ok' if trial.ok else '--'}{star}"
        lines.append((trial.reader, trial.maker, trial.plane, mark, seconds, trial.path, trial.why))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = (
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )
    return "\n".join(line.rstrip() for line in padded)


def _in_order(names: Iterable[str]) -> list[str]:
    return sorted(
        names,
        key=lambda name: (PREFERENCE.index(name) if name in PREFERENCE else len(PREFERENCE), name),
    )


def _record_name(process: str) -> str:
    return f"preflight-{process.replace('/', '-')}"


def _record(process: str, size: int) -> bytes:
    """Bytes that only this process offers."""
    seed = blake2b(process.encode()).digest()
    return (seed * (size // len(seed) + 1))[:size]
