"""How roles hand over what is not whole, or not wanted yet, and get back what an earlier incarnation has made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from relax_hpc.errors import RefusedError
from relax_hpc.transfer_queue.controller.handlers.kept import UNSCORED
from relax_hpc.transfer_queue.plan import GENERATED
from relax_hpc.transfer_queue.row_ids import place_of, row_id
from relax_hpc.transfer_queue.row_schema import BadRow, Row, sampled_versions, with_optional
from relax_hpc.transfer_queue.storage.shard import ShardError, pack
from relax_hpc.transfer_queue.storage.shard_files import ShardFiles
from relax_hpc.transfer_queue.storage.shard_store import files_of

if TYPE_CHECKING:
    from relax_hpc.transfer_queue.client import QueueClient
    from relax_hpc.transfer_queue.client.answers import Partial

PARTIAL = "partial"
"""`finish_reason` of a sample that has not ended yet."""


@dataclass(frozen=True, slots=True)
class Leftover:
    """What somebody before has made of a ticket: by sample, under the ids of the ticket that they were made for."""

    source: int
    attempt: int
    rows: dict[int, Row]

    @property
    def tokens(self) -> int:
        """Of all responses."""
        return sum(len(row["token_ids"]) - int(row["prompt_len"]) for row in self.rows.values())

    def is_part_of(self, ticket: int, attempt: int) -> bool:
        """Of this attempt, and not a whole group that was left over from another one."""
        return (self.source, self.attempt) == (ticket, attempt)

    def whole(self, samples: int) -> bool:
        """Whether nothing of it is still to be drawn."""
        return len(self.rows) == samples and all(row["finish_reason"] != PARTIAL for row in self.rows.values())

    def as_ticket(self, ticket: int) -> list[Row]:
        """The rows as those of ``ticket``."""
        return [row | {"row_id": row_id(ticket, k), "ticket": ticket} for k, row in sorted(self.rows.items())]


def keep(
    client: QueueClient,
    rows: Sequence[Row],
    attempts: Mapping[int, int],
    reused: Mapping[int, int] | None = None,
    surplus: bool = False,
    timeout: float | None = None,
) -> dict[int, str]:
    """Hand over rows of prompt groups in generation, finished or not: from the return on they survive this process.

    ``attempts``: by ticket. ``reused``: by ticket, how many tokens of these rows the queue had kept before. With
    ``surplus`` they are whole groups, rewards included, that wait for a later ticket. Returns why tickets were refused.
    """
    whole, fields = with_optional(rows, GENERATED if surplus else UNSCORED)
    name, origin = client.next_shard(), {"group": client.group, "incarnation": client.incarnation}
    try:
        record = pack(whole, fields, origin)
    except BadRow as error:
        raise RefusedError(f"keep: {error}") from error
    shard = files_of(client.run, client.config).write(name, record)
    summary = _summarise(rows, attempts, reused or {})
    return client.tickets.keep(shard, summary, fields, surplus, timeout).result()


def _summarise(rows: Sequence[Row], attempts: Mapping[int, int], reused: Mapping[int, int]) -> list[dict[str, Any]]:
    groups: dict[int, dict[str, Any]] = {}
    for row in rows:
        ticket, k, _ = place_of(row["row_id"])
        about = {"ticket": ticket, "attempt": attempts[ticket], "reused": reused.get(ticket, 0)}
        group = groups.setdefault(ticket, {**about, "samples": [], "versions": set()})
        made = len(row["token_ids"]) - int(row["prompt_len"])
        group["samples"].append([k, made, int(row["finish_reason"] != PARTIAL)])
        group["versions"] |= sampled_versions(row)
    return [{**group, "versions": sorted(group["versions"])} for group in groups.values()]


def kept_rows(client: QueueClient, told: Sequence[Partial]) -> dict[int, Leftover]:
    """By ticket, what the queue has kept of some, as it has ``told`` whom it gave them to.

    What cannot be read is left out: the tickets are generated anew, and the queue counts the tokens.
    """
    files = files_of(client.run, client.config)
    found: dict[int, Leftover] = {}
    for kept in told:
        try:
            rows = _read(files, kept)
        except ShardError as error:
            print(f"ticket {kept.ticket} is generated anew: {error}", flush=True)
            continue
        found[kept.ticket] = Leftover(kept.source, kept.attempt, rows)
    return found


def _read(files: ShardFiles, kept: Partial) -> dict[int, Row]:
    rows: dict[int, Row] = {}
    for descriptor in kept.shards:
        lies = files.read(descriptor)
        rows |= {k: lies[row_id(kept.source, k)] for k in descriptor["samples"]}
    return rows
