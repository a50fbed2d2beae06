"""Roster of groups: numbered files in the run directory with the incarnation and address of each.

The launcher of a group claims an incarnation by exclusive creation of a file. The leader of the
group then publishes a card with this number. Readers use the card with the highest number. Files
are never overwritten, and they survive a power loss, because an incarnation that the queue knows
must not be claimed twice.
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
    """Card of a group, which its leader publishes: incarnation, ranks, and the hub's endpoint."""

    group: str
    incarnation: int
    ranks: list[dict[str, Any]]
    endpoint: str = ""
    protocol: int = PROTOCOL
    """Protocol of the group's code, see `relax_hpc.base.protocol`."""

    def check_protocol(self) -> None:
        """Raise ConfigError if the code of this process has another protocol."""
        if self.protocol != PROTOCOL:
            raise ConfigError(
                f"relax_hpc.base.protocol: this code has protocol {PROTOCOL}, {self.group} "
                f"incarnation {self.incarnation} has {self.protocol}; all groups of a run need the "
                f"same protocol: start this group with code of protocol {self.protocol}"
            )


def claim_incarnation(run: RunDir, group: str, former: int | None = None) -> int:
    """Claim the next incarnation of ``group``. Two launchers never get the same number.

    ``former``: claim exactly the number after this one. FencedError: another process has claimed
    it. OSError: the disk is full. It is not waited for, because the reason for the claim may be
    gone by then.
    """
    folder = run.rendezvous(group)
    folder.mkdir(parents=True, exist_ok=True)
    incarnation = 1 + (latest_incarnation(run, group) if former is None else former)
    if incarnation == 1:
        # The folders are new. Without this, a power loss could remove them with the claim.
        sync_directory(folder.parent)
        sync_directory(run.root)
    while True:
        try:
            _create(folder / f"inc-{incarnation:06d}.claim")
            sync_directory(folder)
            return incarnation
        except FileExistsError:
            # Over NFS, an exclusive creation whose reply was lost is sent again, and can fail with
            # EEXIST although it has succeeded. The number is then skipped, which is harmless.
            if former is not None:
                raise FencedError(
                    f"another process has just claimed {group} incarnation {incarnation}"
                ) from None
            incarnation += 1


def _create(path: Path) -> None:
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))


def latest_incarnation(run: RunDir, group: str) -> int:
    """The highest claimed incarnation of ``group``; 0: none was claimed."""
    return max(_numbers(run.rendezvous(group), _CLAIM), default=0)


def publish_card(run: RunDir, card: GroupCard) -> None:
    """Publish the card, by which other groups reach this incarnation."""
    value = asdict(card)
    path = run.rendezvous(card.group) / f"inc-{card.incarnation:06d}.json"
    retry_write(path, lambda: write_json(path, value, sync=True))


def latest_card(run: RunDir, group: str) -> GroupCard | None:
    """Card of the newest published incarnation of ``group``. None: no card is published."""
    incarnations = _numbers(run.rendezvous(group), _CARD)
    for incarnation in sorted(incarnations, reverse=True):
        card = read_card(run, group, incarnation)
        if card:
            return card
    return None


def read_card(run: RunDir, group: str, incarnation: int) -> GroupCard | None:
    """Card of one incarnation of ``group``. None: it has published none, or an invalid one."""
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
