"""Check of the planes by the doctor: each probe reads from every other probe on each plane."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import msgpack

from relax_hpc.config.schema import Mode
from relax_hpc.net.transport import SlabPool
from relax_hpc.net.transport.choice import make_planes
from relax_hpc.net.transport.plane_check import (
    PlaneTrial,
    choose_planes,
    describe_missing,
    format_trials,
    make_offer,
    try_offers,
    withdraw_offer,
)
from relax_hpc.ops.doctor.finding import Finding, error, ok, warning

TRIAL_S = 3.0


class PlaneProbe:
    """The planes of the probe ``name``, which other probes reach at ``host``."""

    def __init__(self, name: str, modes: Mapping[str, Mode], token: bytes, host: str) -> None:
        self._name, self._pool = name, SlabPool()
        self._planes, self._absent = make_planes(modes, token, self._pool, host, name)

    def offer(self) -> str:
        """Description of the slabs that other probes can read, as text."""
        return b64encode(msgpack.packb(make_offer(self._name, self._planes, self._absent))).decode()

    def trials(self, offers: Iterable[str]) -> list[dict[str, Any]]:
        """Read from each of ``offers``; returns the fields of a `PlaneTrial` for each attempt."""
        decoded = [msgpack.unpackb(b64decode(text)) for text in offers]
        return [
            asdict(trial)
            for trial in try_offers(self._name, self._planes, decoded, TRIAL_S, self._absent)
        ]

    def close(self) -> None:
        """Close the planes, after all probes have finished their trials."""
        withdraw_offer(self._name, self._planes)
        for plane in self._planes.values():
            plane.close()
        self._pool.close()


def judge_planes(
    trials: list[PlaneTrial], modes: Mapping[str, Mode], several_nodes: bool
) -> Iterator[Finding]:
    """Findings: required planes that fail, pairs without a plane, and the table of all trials."""
    if not trials:
        return
    # Shared memory works only within a node, and each node of a cluster has one probe.
    required = [
        name
        for name, mode in modes.items()
        if mode == "required" and not (several_nodes and name == "shm")
    ]
    for line in describe_missing(trials, required):
        yield error(f"queue.planes: {line}")
    for (reader, maker), plane in choose_planes(trials).items():
        if not plane:
            yield warning(
                f"queue.planes: no plane lets {reader} read from {maker}; rows will pass through "
                "files"
            )
    yield ok("planes: all pairs tried (* marks the plane of rows)", format_trials(trials))
