"""Tries every plane between every two processes once, before the run needs them.

Each process makes an offer, all offers reach all processes (by whatever brings them there), and
each process tries those of the others::

    offer = make_offer("rollout/0", planes, absent={"rdma": "there is no package nixl-cu12"})
    offers = world.allgather(offer)
    trials = try_offers("rollout/0", planes, offers, timeout_s=5.0)
    print(table(trials))                     # of one process, or of all of them together
    withdraw("rollout/0", planes)
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
"""Planes, best first."""
TRIAL_BYTES = 64 << 10
_GRACE_S = 1.0
"""Seconds beyond its deadline for a plane that does not keep it."""

Offer = dict[str, Any]
"""`process`; `planes`: descriptor by plane; `absent`: by plane why it is not offered.
Msgpack-able."""


@dataclass(frozen=True, slots=True)
class PlaneTrial:
    """Result of one plane from `maker` to `reader`: `path` is how the bytes come, `why` why they do
    not."""

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
    """Publish a record of ``size`` bytes on each of ``planes``; ``absent`` says why others are not
    among them."""
    offer: Offer = {"process": process, "planes": {}, "absent": dict(absent or {}), "bytes": size}
    for name, plane in planes.items():
        try:
            offer["planes"][name] = plane.publish(
                _record_name(process), memoryview(_record(process, size))
            )
        except PlaneError as error:
            offer["absent"][name] = str(error)
    return offer


def withdraw_offer(process: str, planes: Mapping[str, Plane]) -> None:
    """Retire what `make_offer` published, once all have tried it."""
    for plane in planes.values():
        plane.retire(_record_name(process))


def try_offers(
    process: str,
    planes: Mapping[str, Plane],
    offers: Iterable[Offer],
    timeout_s: float,
    absent: Mapping[str, str] | None = None,
) -> list[PlaneTrial]:
    """One trial for each plane of each other process, or that this one has: ``timeout_s`` for each,
    and no longer."""
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
        return PlaneTrial(
            process,
            maker,
            name,
            False,
            0.0,
            why=f"{maker}: {offer['absent'].get(name, 'not offered')}",
        )
    if plane is None:
        return PlaneTrial(
            process, maker, name, False, 0.0, why=f"{process}: {absent.get(name, 'not here')}"
        )
    start = time.monotonic()
    path, why = _within(timeout_s + _GRACE_S, lambda: _read(plane, descriptor, offer, timeout_s))
    return PlaneTrial(process, maker, name, not why, time.monotonic() - start, path, why)


def _read(plane: Plane, descriptor: Descriptor, offer: Offer, timeout_s: float) -> tuple[str, str]:
    """Way by which the record comes, and what is wrong with that."""
    path = ""
    try:
        path = plane.path(descriptor)
        right = plane.read(descriptor, timeout_s) == _record(offer["process"], offer["bytes"])
    # Whatever it is, it goes to the table, and the other planes are tried.
    except Exception as error:
        return path, str(error) or type(error).__name__
    return path, "" if right else "other bytes came than were published"


def _within(seconds: float, work: Callable[[], tuple[str, str]]) -> tuple[str, str]:
    """Result of ``work`` in a thread, which is left behind if it takes longer."""
    found: list[tuple[str, str]] = []
    thread = threading.Thread(
        target=lambda: found.append(work()), name="plane-preflight", daemon=True
    )
    thread.start()
    thread.join(seconds)
    return found[0] if found else ("", f"hangs: no answer and no error in {seconds:g} s")


def choose_planes(trials: Iterable[PlaneTrial]) -> dict[tuple[str, str], str]:
    """The plane to use by (reader, maker): the first of PREFERENCE that works, "" if none does."""
    working: dict[tuple[str, str], set[str]] = {}
    for trial in trials:
        names = working.setdefault((trial.reader, trial.maker), set())
        if trial.ok:
            names.add(trial.plane)
    return {pair: next(iter(_in_order(names)), "") for pair, names in working.items()}


def describe_missing(trials: Iterable[PlaneTrial], required: Iterable[str]) -> list[str]:
    """A line for each trial that failed although its plane is among ``required``."""
    wanted = set(required)
    return [
        f"plane {trial.plane} is required, but {trial.reader} cannot read {trial.maker} by it: "
        f"{trial.why}"
        for trial in trials
        if trial.plane in wanted and not trial.ok
    ]


def format_trials(trials: Sequence[PlaneTrial]) -> str:
    """The trials as text, one a line; the plane to use of a pair has a star."""
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
    """Record of bytes that no other process offers."""
    seed = blake2b(process.encode()).digest()
    return (seed * (size // len(seed) + 1))[:size]
