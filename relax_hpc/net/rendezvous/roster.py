"""Roster of groups: numbered files in the run directory say who is where, and in which incarnation.

A group's launcher takes an incarnation by exclusive create; the group's leader then publishes its
card under it. Readers follow the highest one published. Nothing is ever overwritten, and a power
loss takes nothing back: an incarnation that the queue knows must not be taken twice.
"""

from __future__ import annotations

import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from relax_hpc.base.disk_waits import retry_write
from relax_hpc.base.errors import ConfigError, FencedError
from relax_hpc.base.protocol import PROTOCOL
from relax_hpc.base.rundir import RunDir, read_map, sync_directory, write_json

_CARD = re.compile(r"inc-(\d{6})\.json")
_CLAIM = re.compile(r"inc-(\d{6})\.claim")


@dataclass(frozen=True, slots=True)
class GroupCard:
    """Card of a group, by its leader: its incarnation and, for the hub, the controller's
    endpoint."""

    group: str
    incarnation: int
    ranks: list[dict[str, Any]]
    endpoint: str = ""
    protocol: int = PROTOCOL
    """Protocol of its code, see `relax_hpc.base.protocol`."""

    def check_protocol(self) -> None:
        """Raise ConfigError if this process has code of another protocol."""
        if self.protocol != PROTOCOL:
            raise ConfigError(
                f"relax_hpc.base.protocol: this code speaks {PROTOCOL}, {self.group} incarnation "
                f"{self.incarnation} speaks "
                f"{self.protocol}; groups of one run need code of one protocol: give this group "
                f"code of {self.protocol}"
            )


def claim_incarnation(run: RunDir, group: str, former: int | None = None) -> int:
    """Take the next incarnation number of ``group``; two launchers never get the same one.

    With ``former`` the one after that and no other: FencedError if somebody has been faster.
    OSError on a disk that takes nothing: it is not waited for, as what makes the caller want the
    number may be over by then.
    """
    folder = run.rendezvous(group)
    folder.mkdir(parents=True, exist_ok=True)
    incarnation = 1 + (latest_incarnation(run, group) if former is None else former)
    if incarnation == 1:
        sync_directory(folder.parent)
        sync_directory(run.root)
    while True:
        try:
            _create(folder / f"inc-{incarnation:06d}.claim")
            sync_directory(folder)
            return incarnation
        except FileExistsError:
            if former is not None:
                raise FencedError(
                    f"another has taken {group} incarnation {incarnation} just before"
                ) from None
            incarnation += 1


def _create(path: Path) -> None:
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))


def latest_incarnation(run: RunDir, group: str) -> int:
    """The highest incarnation number taken by ``group``; 0 if none was."""
    return max(_numbers(run.rendezvous(group), _CLAIM), default=0)


def publish_card(run: RunDir, card: GroupCard) -> None:
    """Publish the card by which other groups find this incarnation."""
    value = asdict(card)
    path = run.rendezvous(card.group) / f"inc-{card.incarnation:06d}.json"
    retry_write(path, lambda: write_json(path, value, sync=True))


def latest_card(run: RunDir, group: str) -> GroupCard | None:
    """Card of the newest published incarnation of ``group``, or None."""
    incarnations = _numbers(run.rendezvous(group), _CARD)
    return next(
        (
            card
            for incarnation in sorted(incarnations, reverse=True)
            if (card := read_card(run, group, incarnation))
        ),
        None,
    )


def read_card(run: RunDir, group: str, incarnation: int) -> GroupCard | None:
    """Card that an incarnation of ``group`` has published, or None."""
    path = run.rendezvous(group) / f"inc-{incarnation:06d}.json"
    value = read_map(path, group=str, incarnation=int, ranks=list, endpoint=str, protocol=int)
    if not value or (value["group"], value["incarnation"]) != (group, incarnation):
        return None
    ranks = [rank for rank in value["ranks"] if isinstance(rank, dict)]
    return GroupCard(group, incarnation, ranks, value["endpoint"], value["protocol"])


def _numbers(folder: Path, name: re.Pattern) -> list[int]:
    try:
        return [int(match[1]) for path in folder.iterdir() if (match := name.fullmatch(path.name))]
    except (FileNotFoundError, NotADirectoryError):
        return []
