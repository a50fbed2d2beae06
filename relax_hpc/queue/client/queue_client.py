"""A role's connection to the queue: rows are put, claimed and read here; all else is asked in four
parts of it."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from functools import cached_property
from typing import Any

from relax_hpc.base.disk_waits import WAITS, describe_wait
from relax_hpc.base.errors import DeadlineError, RefusedError
from relax_hpc.base.rundir import RunDir
from relax_hpc.config.schema import Config
from relax_hpc.net.transport import SlabPool
from relax_hpc.queue.client.answers import Claim
from relax_hpc.queue.client.connection import Connection, nothing, then
from relax_hpc.queue.client.reading import read_columns, read_rows
from relax_hpc.queue.client.status import Status
from relax_hpc.queue.client.summary import media_of_groups, summarise
from relax_hpc.queue.client.tickets import Tickets
from relax_hpc.queue.client.training import Training
from relax_hpc.queue.client.weights import Weights
from relax_hpc.queue.plan import GENERATED
from relax_hpc.queue.row_schema import BadRow, Row, add_optional_fields
from relax_hpc.queue.storage.columns import Column
from relax_hpc.queue.storage.media import MediaStore
from relax_hpc.queue.storage.record_file import SUFFIX
from relax_hpc.queue.storage.shard_store import ShardStore, files_of, planes_of

_SETTLE_S = 5.0
"""Seconds that a closing client waits until all that it has put is accepted."""


class QueueClient:
    """Client of the queue for one member of a group. Close it, or use it as a context manager.

    >>> with QueueClient(run, config, "reference", incarnation=1) as client:  # doctest: +SKIP
    ...     claim = client.claim("reference", budget=8192)
    ...     rows = client.rows(claim)
    ...     scored = [{**row, "ref_logprobs": score(row)} for row in rows]
    ...     client.put(scored, ("ref_logprobs",), claim)
    ...     client.status.get().result().trained_steps
    """

    def __init__(
        self, run: RunDir, config: Config, group: str, incarnation: int, member: str = ""
    ) -> None:
        self.run, self.config, self.group, self.incarnation = run, config, group, incarnation
        self.member = member or group
        self.connection = Connection(run, config, group, incarnation, self.member)
        self.name, self.beat = self.connection.name, self.connection.beat
        submit = self.connection.submit
        self.tickets, self.weights = Tickets(submit), Weights(submit)
        self.training, self.status = Training(submit), Status(submit)
        self._store: ShardStore | None = None
        self._store_lock = threading.Lock()
        self._shard_ids = itertools.count(1)
        self._told: Future = Future()
        """Future of the answer to the last report of saved shards."""
        self._told.set_result(None)

    # -- claims ------------------------------------------------------------------------------------

    def claim_later(
        self, task: str, budget: int, boundary: int = 0, timeout: float | None = None, **dealt: int
    ) -> Future[Claim | None]:
        """A future Claim of the next window of ``task`` (None when the run is finished); see
        planning.claims.claimable.

        ``dealt`` to data ranks: ``ranks``, ``max_tokens`` of a micro-batch, ``batch``; see
        planning.claims.assignment.
        """
        about = {
            "task": task,
            "budget": budget,
            "boundary": boundary or self.config.prompts_per_step,
            **dealt,
        }
        return then(self.connection.submit("claim", timeout, **about), Claim.of_answer)

    def claim(self, task: str, budget: int, boundary: int = 0, **dealt: int) -> Claim | None:
        """Claim by `claim_later`, and wait for it."""
        return self.claim_later(task, budget, boundary, **dealt).result()

    def release(self, claim: Claim) -> Future[None]:
        """Hold ``claim`` no more: what is still wanted of it is offered again."""
        return then(self.connection.submit("release", lease=claim.lease), nothing)

    def give_back(self, claim: Claim) -> None:
        """Give a claim back by `release`, and wait for it."""
        self.release(claim).result()

    def quarantine(self, claim: Claim, tickets: Sequence[int], reason: str) -> None:
        """Nobody may use these prompt groups of ``claim``: they are dropped, and made again from
        other prompts."""
        self.connection.call("quarantine", lease=claim.lease, tickets=list(tickets), reason=reason)

    def rows(self, claim: Claim) -> list[Row]:
        """Rows of a claim, by `read_rows` through this client's store."""
        return read_rows(self.store, claim)

    def columns(
        self, claim: Claim, fields: Sequence[str], room: memoryview | None = None
    ) -> dict[str, Column]:
        """``read_columns`` through this client's store: much cheaper than rows where rows are many
        or small."""
        return read_columns(self.store, claim, fields, room)

    # -- puts --------------------------------------------------------------------------------------

    def put(
        self,
        rows: Sequence[Row],
        fields: Sequence[str],
        claim: Claim | None = None,
        extras: Sequence[dict[str, Any]] = (),
        name: str = "",
    ) -> dict[int, str]:
        """Add ``fields`` to whole prompt groups; with ``claim``, ack it in the same message.

        ``extras``: see `handlers.rows.put`. ``name``: of their shard, from `next_shard`, for who
        has to know it.

        Returns why tickets were refused, by ticket (`rolled_back`, `stale_version`, `lease_lost`,
        `duplicate`...). RefusedError, naming the field, if a row is not as the schema says.
        """
        name = name or self.next_shard()
        try:
            shard, saved = self.store.make(
                name, rows, fields, {"group": self.group, "incarnation": self.incarnation}
            )
            summary = summarise(rows, fields)
        except BadRow as error:
            self.store.discard(name)
            raise RefusedError(f"put: {error}") from error
        lease, names = claim.lease if claim else 0, list(fields)
        self.beat.progress += 1
        also = {"extras": list(extras)} if extras else {}
        about = {
            "shard": shard,
            "rows": summary,
            "fields": names,
            "lease": lease,
            "saved": saved,
            **also,
        }
        refused = self.connection.call("put", **about)["refused"]
        if not saved and len(refused) < len(summary):
            self.store.save(name)
        elif not saved:
            self.store.discard(name)
        return refused

    def next_shard(self) -> str:
        """Name that no other shard has."""
        return f"{self.name.replace('/', '-')}-{next(self._shard_ids):06d}{SUFFIX}"

    @property
    def store(self) -> ShardStore:
        """The shards of this process; made when they are first needed, which they are not by who
        only looks."""
        with self._store_lock:
            if self._store is None:
                pool, files = SlabPool(), files_of(self.run, self.config)
                planes = planes_of(self.run, self.config, self.group, self.name, pool)
                self._store = ShardStore(
                    files, planes, pool, self.config.queue.memory_bytes, self._saved
                )
                self.connection.shards = self._store
            return self._store

    @cached_property
    def media(self) -> MediaStore:
        """Media store of this process, which remembers what it has found sound; see `store` for
        when it is made."""
        return MediaStore(
            self.run.media,
            self.config.queue.durability == "commit",
            self.config.queue.max_medium_bytes,
        )

    def _saved(self, names: list[str]) -> None:
        """The files of shards are written; the queue is told, and told again if its controller
        changes."""
        self._told = self.connection.submit("saved", names=names)

    def generated(
        self, rows: Sequence[Row], name: str = "", fields: Sequence[str] = GENERATED
    ) -> dict[int, str]:
        """Put new prompt groups with these ``fields``, and those optional ones that rows have."""
        extras: list[dict[str, Any]] = []
        if any(row.get("spans") for row in rows):
            try:
                extras = media_of_groups(rows)
            except BadRow as error:
                raise RefusedError(f"put: {error}") from error
        return self.put(*add_optional_fields(rows, fields), extras=extras, name=name)

    def settle(self, timeout: float | None = None) -> None:
        """Wait until everything put here is accepted: saved, as durably as configured, and
        journaled. DeadlineError."""
        timeout = self.config.queue.wait_timeout_s if timeout is None else timeout
        if self._store and not self._store.settle(timeout):
            why = self._store.failure or (
                describe_wait(wait) if (wait := WAITS.longest()) else "its disk is slow"
            )
            raise DeadlineError(f"settle: what was put is not saved after {timeout:.0f} s: {why}")
        self._told.result(timeout)

    def close(self) -> None:
        """Save what was put, and stop talking; what was not answered fails."""
        if self._store:
            with contextlib.suppress(Exception):
                self.settle(_SETTLE_S)
            self._store.close()
        self.connection.close()

    def __enter__(self) -> QueueClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
