"""A role's connection to the queue: this class puts, claims and reads rows. Five objects of it send
all other requests."""

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
from relax_hpc.queue.client.connection import QueueConnection, ignore_answer, then
from relax_hpc.queue.client.operations import OperationRequests
from relax_hpc.queue.client.reading import read_columns, read_rows
from relax_hpc.queue.client.status import StatusRequests
from relax_hpc.queue.client.summary import summarize_groups, summarize_media
from relax_hpc.queue.client.tickets import TicketRequests
from relax_hpc.queue.client.training import TrainingRequests
from relax_hpc.queue.client.weights import WeightRequests
from relax_hpc.queue.plan import GENERATED
from relax_hpc.queue.row_schema import BadRow, Row, add_optional_fields
from relax_hpc.queue.storage.columns import Column
from relax_hpc.queue.storage.media import MediaStore
from relax_hpc.queue.storage.record_file import SUFFIX
from relax_hpc.queue.storage.shard_store import ShardStore, open_planes, shard_files

_SETTLE_S = 5.0
"""Seconds for which a closing client waits until its puts are accepted."""


class QueueClient:
    """Client of the queue for one member of a group. Close it, or use it as a context manager.

    ::

        with QueueClient(run, config, "reference", incarnation=1) as client:
            claim = client.claim("reference", budget=8192)
            rows = client.rows(claim)
            scored = [{**row, "ref_logprobs": score(row)} for row in rows]
            client.put(scored, ("ref_logprobs",), claim)
            client.status.get().result().trained_steps
    """

    def __init__(
        self, run: RunDir, config: Config, group: str, incarnation: int, member: str = ""
    ) -> None:
        self.run, self.config, self.group, self.incarnation = run, config, group, incarnation
        self.member = member or group
        self.connection = QueueConnection(run, config, group, incarnation, self.member)
        self.name, self.beat = self.connection.name, self.connection.beat
        submit = self.connection.submit
        self.tickets, self.weights = TicketRequests(submit), WeightRequests(submit)
        self.training, self.status = TrainingRequests(submit), StatusRequests(submit)
        self.operations = OperationRequests(submit)
        self._store: ShardStore | None = None
        self._store_lock = threading.Lock()
        self._shard_ids = itertools.count(1)
        self._saved_report: Future = Future()
        """Answer to the last report of saved shards."""
        self._saved_report.set_result(None)

    # -- claims ------------------------------------------------------------------------------------

    def submit_claim(
        self,
        task: str,
        budget: int,
        boundary: int = 0,
        timeout: float | None = None,
        **assignment: int,
    ) -> Future[Claim | None]:
        """A future Claim of the next window of ``task`` (None: the run is finished); see
        planning.claims.claimable.

        ``assignment`` of rows to data ranks: ``ranks``, ``max_tokens`` of a micro-batch, ``batch``,
        ``max_media``; see planning.claims.assign_rows.
        """
        args = {
            "task": task,
            "budget": budget,
            "boundary": boundary or self.config.prompts_per_step,
            **assignment,
        }
        return then(self.connection.submit("claim", timeout, **args), Claim.from_answer)

    def claim(self, task: str, budget: int, boundary: int = 0, **assignment: int) -> Claim | None:
        """Send the request of `submit_claim`, and wait for the answer."""
        return self.submit_claim(task, budget, boundary, **assignment).result()

    def release(self, claim: Claim) -> Future[None]:
        """Release ``claim``: rows that are still valid are offered again."""
        return then(self.connection.submit("release", lease=claim.lease), ignore_answer)

    def return_claim(self, claim: Claim) -> None:
        """Call `release`, and wait for the answer."""
        self.release(claim).result()

    def quarantine(self, claim: Claim, tickets: Sequence[int], reason: str) -> None:
        """Drop these prompt groups of ``claim``, so that no task uses them. Their tickets are
        generated again from other prompts."""
        self.connection.call("quarantine", lease=claim.lease, tickets=list(tickets), reason=reason)

    def rows(self, claim: Claim) -> list[Row]:
        """Rows of a claim; see `read_rows`."""
        return read_rows(self.store, claim)

    def columns(
        self, claim: Claim, fields: Sequence[str], buffer: memoryview | None = None
    ) -> dict[str, Column]:
        """Columns of a claim, see `read_columns`: much faster than `rows` for many or small
        rows."""
        return read_columns(self.store, claim, fields, buffer)

    # -- puts --------------------------------------------------------------------------------------

    def put(
        self,
        rows: Sequence[Row],
        fields: Sequence[str],
        claim: Claim | None = None,
        extras: Sequence[dict[str, Any]] = (),
        name: str = "",
    ) -> dict[int, str]:
        """Add ``fields`` to whole prompt groups; with ``claim``, acknowledge it in the same
        message.

        ``extras``: see `handlers.rows.put`. ``name``: of their shard, from `next_shard`, if the
        caller needs to know it.

        Returns why tickets were refused, by ticket (`rolled_back`, `stale_version`, `lease_lost`,
        `duplicate`...). RefusedError, naming the field: a row does not match the schema.
        """
        name = name or self.next_shard()
        try:
            shard, saved = self.store.make(
                name, rows, fields, {"group": self.group, "incarnation": self.incarnation}
            )
            summary = summarize_groups(rows, fields)
        except BadRow as error:
            self.store.discard(name)
            raise RefusedError(f"put: {error}") from error
        self.beat.progress += 1
        args: dict[str, Any] = {
            "shard": shard,
            "rows": summary,
            "fields": list(fields),
            "lease": claim.lease if claim else 0,
            "saved": saved,
        }
        if extras:
            args["extras"] = list(extras)
        refused = self.connection.call("put", **args)["refused"]
        if not saved and len(refused) < len(summary):
            self.store.save(name)
        elif not saved:
            self.store.discard(name)
        return refused

    def next_shard(self) -> str:
        """A new unique name of a shard."""
        return f"{self.name.replace('/', '-')}-{next(self._shard_ids):06d}{SUFFIX}"

    @property
    def store(self) -> ShardStore:
        """The shards of this process; created at the first use, because a client that only reads
        status needs none."""
        with self._store_lock:
            if self._store is None:
                pool, files = SlabPool(), shard_files(self.run, self.config)
                planes = open_planes(self.run, self.config, self.group, self.name, pool)
                self._store = ShardStore(
                    files, planes, pool, self.config.queue.memory_bytes, self._report_saved
                )
                self.connection.shards = self._store
            return self._store

    @cached_property
    def media(self) -> MediaStore:
        """Media store of this process. It remembers which media it has checked. Created at the
        first use."""
        return MediaStore(
            self.run.media,
            self.config.queue.durability == "commit",
            self.config.queue.max_medium_bytes,
        )

    def _report_saved(self, names: list[str]) -> None:
        """Report that the files of shards are written. The report is repeated if the controller
        changes."""
        self._saved_report = self.connection.submit("saved", names=names)

    def put_generated(
        self, rows: Sequence[Row], name: str = "", fields: Sequence[str] = GENERATED
    ) -> dict[int, str]:
        """Put new prompt groups with these ``fields``, and with optional fields that rows have."""
        extras: list[dict[str, Any]] = []
        if any(row.get("spans") for row in rows):
            try:
                extras = summarize_media(rows)
            except BadRow as error:
                raise RefusedError(f"put: {error}") from error
        return self.put(*add_optional_fields(rows, fields), extras=extras, name=name)

    def settle(self, timeout: float | None = None) -> None:
        """Wait until all puts of this client are accepted: saved as durably as configured, and
        journaled. DeadlineError."""
        timeout = self.config.queue.wait_timeout_s if timeout is None else timeout
        if self._store and not self._store.settle(timeout):
            wait = WAITS.longest()
            cause = describe_wait(wait) if wait else "its disk is slow"
            reason = self._store.failure or cause
            raise DeadlineError(f"settle: puts are not saved after {timeout:.0f} s: {reason}")
        self._saved_report.result(timeout)

    def close(self) -> None:
        """Save all puts, and end the communication. Requests without an answer fail."""
        if self._store:
            with contextlib.suppress(Exception):
                self.settle(_SETTLE_S)
            self._store.close()
        self.connection.close()

    def __enter__(self) -> QueueClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
