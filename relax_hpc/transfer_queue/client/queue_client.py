"""A role's connection to the controller: any thread may call, one thread talks.

It finds the controller through the roster, beats for liveness, and when the controller comes back, in a later
incarnation, it reconnects and asks again whatever was not answered.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from relax_hpc.config.schema import Config
from relax_hpc.disk import WAITS, Told, in_words
from relax_hpc.errors import DeadlineError, FencedError, RefusedError, RelaxError, StoppedError
from relax_hpc.rendezvous.roster import Card, latest_card
from relax_hpc.rendezvous.signs import identity
from relax_hpc.rundir import RunDir, write_json
from relax_hpc.transfer_queue.lengths import packed
from relax_hpc.transfer_queue.plan import GENERATED
from relax_hpc.transfer_queue.presence import longest_wait_s
from relax_hpc.transfer_queue.records import OBSERVER_INCARNATION
from relax_hpc.transfer_queue.row_schema import BadRow, Row, sample_id, with_optional
from relax_hpc.transfer_queue.storage.hdf5 import Column, column_of
from relax_hpc.transfer_queue.storage.media import MediaStore, media_by_ticket
from relax_hpc.transfer_queue.storage.shard import ShardError, aligned
from relax_hpc.transfer_queue.storage.shard_store import ShardReader, ShardStore, files_of, planes_of
from relax_hpc.transport import SlabPool
from relax_hpc.transport.sockets import Bell, Connection, Knock
from relax_hpc.transport.wire import BadMessage, pack, purpose_of, unpack

BEAT_FILE_S = 5.0
_LONG = 4096
"""Entries of a row, from which on there are better ways to look at it."""
_SETTLE_S = 5.0
"""How long a client that closes waits until all that it has put is accepted."""
_NO_HUB_S = 5.0
"""For how long there is no hub when it is taken for gone, in a run that was asked to stop: none is started any more."""
_ERRORS: dict[str, type[RelaxError]] = {"fenced": FencedError, "deadline": DeadlineError}


@dataclass(slots=True)
class _Call:
    future: Future
    message: dict[str, Any]
    until: float
    since: float
    may_stand_s: float = 0.0
    """By how much ``until`` may be put off while others are not there. The hub judges that, for each hub anew; who has
    none, or a silent one, waits for as long."""

    @property
    def latest(self) -> float:
        return self.until + self.may_stand_s

    def request(self) -> dict[str, Any]:
        """The message, with how long its answer is waited for yet."""
        now = time.monotonic()
        patience = self.until - (self.since if self.may_stand_s else now)
        return {
            **self.message,
            "patience": max(0.0, patience),
            "may_stand": max(0.0, min(self.may_stand_s, self.latest - now)),
        }


@dataclass(frozen=True, slots=True)
class Claim:
    """Prompt groups that this client holds until it acks them, with where their rows lie."""

    lease: int
    step: int
    tickets: tuple[int, ...]
    shards: tuple[dict[str, Any], ...]
    min_version: int
    """At staleness 0 the number of the weights that forward passes must use."""
    with_media: tuple[int, ...] = ()
    """Tickets whose rows name media: see `claims.check_claim`."""
    assignment: Sequence[Sequence[Sequence[int]]] = ()
    """[data rank][micro-batch][row], numbers of the rows in ticket and sample order, if it was claimed for ranks."""
    waited: Sequence[tuple[str, str, float]] = ()
    """(peer, reason, seconds): what the queue had to wait for until there was this."""

    @classmethod
    def of(cls, message: dict[str, Any]) -> Claim:
        """From the controller's answer, or from ``message()`` in another rank of the group."""
        tickets, shards = tuple(message["tickets"]), tuple(message["shards"])
        with_media, assignment = tuple(message.get("with_media", ())), message["assignment"]
        about = (message["lease"], message["step"], tickets, shards, message["min_version"], with_media, assignment)
        return cls(*about, message.get("waited", ()))

    def message(self) -> dict[str, Any]:
        """A msgpack-able copy, for the other ranks of the group."""
        return asdict(self)


def read_rows(reader: ShardReader, claim: Claim, samples_per_prompt: int) -> list[Row]:
    """The rows of ``claim`` in ticket and sample order: the fields that its task needs, and what was put with those.

    ShardError, naming the file, if one is damaged or is another's.
    """
    names = {ticket: [sample_id(ticket, k) for k in range(samples_per_prompt)] for ticket in claim.tickets}
    merged: dict[str, Row] = {name: {} for ticket in claim.tickets for name in names[ticket]}
    for descriptor in claim.shards:
        rows = reader.read(descriptor)
        # A shard may also hold dropped rows of tickets that were generated again: only its own count.
        for ticket in descriptor["tickets"]:
            for name in names[ticket]:
                if name not in rows:
                    raise ShardError(f"{descriptor['name']}: has no sample {name}; another file has its name")
                merged[name].update(rows[name])
    reader.forget({descriptor["name"] for descriptor in claim.shards})
    return list(merged.values())


def read_columns(
    reader: ShardReader, claim: Claim, fields: Sequence[str], samples_per_prompt: int, room: memoryview | None = None
) -> dict[str, Column]:
    """``fields`` of all rows of ``claim`` in ticket and sample order, those of numbers as `flat`, rows end to end.

    They are views of the maker's memory where it can be mapped, which stays until the claim is answered; where there is
    ``room`` for the claim's shards (bytes, 64 more for each), they are copied to it, to be kept. LookupError
    if a field is not there, ShardError as `read_rows`.
    """
    names = [sample_id(ticket, k) for ticket in claim.tickets for k in range(samples_per_prompt)]
    found: dict[str, Column] = {}
    for descriptor in claim.shards:
        # A shard may also hold dropped rows of tickets that were generated again.
        columns = reader.columns(descriptor, room) if descriptor["tickets"] == list(claim.tickets) else None
        room = room[aligned(descriptor["bytes"]) :] if room else room
        if columns is None or columns.sample_ids != names:
            break
        found |= {column.name: column for column in columns.columns}
    else:
        return {field: found[field] for field in fields}
    rows = read_rows(reader, claim, samples_per_prompt)
    return {field: column_of(field, [row[field] for row in rows]) for field in fields}


class QueueClient:
    """See the module. Close it, or use it as a context manager.

    >>> with QueueClient(run, config, "reference", incarnation=1) as client:           # doctest: +SKIP
    ...     claim = client.claim("reference", budget=8192)
    ...     rows = client.rows(claim)
    ...     client.put([{**row, "ref_logprobs": score(row)} for row in rows], ("ref_logprobs",), claim)
    """

    def __init__(self, run: RunDir, config: Config, group: str, incarnation: int, member: str = "") -> None:
        self.run, self.config, self.group, self.incarnation = run, config, group, incarnation
        self.member = member or group
        self.name = f"{group}-i{incarnation:06d}-{os.getpid()}-{os.urandom(4).hex()}"
        self._store: ShardStore | None = None
        self._store_lock = threading.Lock()
        self._told: Future = Future()
        """The answer to what was last said to be saved."""
        self._told.set_result(None)
        self.progress = 0
        self.busy: Callable[[], float] = lambda: 0.0
        """Seconds that this process has been at one piece of work."""
        self.loads: Callable[[], bool] = lambda: False
        """Whether it has yet to begin."""
        self._doing, self._doing_since, self._awaits = "", 0.0, False
        self.unsaved: dict[str, Any] = {}
        """Of an actor whose last checkpoints could not be written: the step of the one that was, since when (of the
        wall clock), how many failed, and why."""
        self.stood_s = 0.0
        """For how long, so far, there was no hub, or it let clocks stand."""
        self._stands = True
        self.waits: Told = {}
        """Which disk somebody waits for, as the hub said last."""
        self._waited_at = -math.inf
        self._connected_at = time.monotonic()
        self._beaten = 0.0
        self._gap = 0.0
        self._token = run.token()
        self._ids = itertools.count(1)
        self._shard_ids = itertools.count(1)
        self._calls: dict[int, _Call] = {}
        self._line = _Line(run, self._token)
        self._lock = threading.Lock()
        """Of the calls, and of what is sent."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._talk, name=f"queue-{self.member}", daemon=True)
        self._thread.start()

    # -- requests ----------------------------------------------------------------------------------------------

    def submit(self, op: str, timeout: float | None = None, **args: Any) -> Future:
        """Send a request; the future has its result, or DeadlineError, FencedError, RefusedError.

        Without a ``timeout`` it is queue.wait_timeout_s, not counting time in which somebody is not there yet.
        """
        may_stand_s = longest_wait_s(self.config) if timeout is None else 0.0
        timeout = self.config.queue.wait_timeout_s if timeout is None else timeout
        number, now = next(self._ids), time.monotonic()
        message = {
            "id": number,
            "client": self.name,
            "group": self.group,
            "incarnation": self.incarnation,
            "op": op,
            "args": args,
        }
        call = _Call(_running(), message, now + timeout, now, may_stand_s)
        with self._lock:
            if open_yet := not self._closing.is_set():
                self._calls[number] = call
                self._line.send(call)
        if not open_yet:
            call.future.set_exception(RelaxError(f"{op}: this connection to the queue is closed"))
        return call.future

    def call(self, op: str, timeout: float | None = None, **args: Any) -> dict[str, Any]:
        """``submit`` and wait."""
        return self.submit(op, timeout, **args).result()

    def claim_later(
        self, task: str, budget: int, boundary: int = 0, timeout: float | None = None, **dealt: int
    ) -> Future:
        """A future Claim of the next window of ``task`` (None when the run is finished); see QueueState.claimable.

        ``dealt`` to data ranks: ``ranks``, ``max_tokens`` of a micro-batch, ``batch``; see QueueState.assignment.
        """
        boundary = boundary or self.config.prompts_per_step
        return then(self.submit("claim", timeout, task=task, budget=budget, boundary=boundary, **dealt), _claim)

    def claim(self, task: str, budget: int, boundary: int = 0, **dealt: int) -> Claim | None:
        """Wait for ``claim_later``."""
        return self.claim_later(task, budget, boundary, **dealt).result()

    def give_back(self, claim: Claim) -> None:
        """Hold ``claim`` no more: what is still wanted of it is offered again."""
        self.call("release", lease=claim.lease)

    def rows(self, claim: Claim) -> list[Row]:
        """``read_rows`` through this client's store."""
        return read_rows(self.store, claim, self.config.samples_per_prompt)

    def columns(self, claim: Claim, fields: Sequence[str], room: memoryview | None = None) -> dict[str, Column]:
        """``read_columns`` through this client's store: much cheaper than rows where rows are many or small."""
        return read_columns(self.store, claim, fields, self.config.samples_per_prompt, room)

    def put(
        self,
        rows: Sequence[Row],
        fields: Sequence[str],
        claim: Claim | None = None,
        extras: Sequence[dict[str, Any]] = (),
    ) -> dict[int, str]:
        """Add ``fields`` to whole prompt groups; with ``claim``, ack it in the same message. ``extras``: see the desk.

        Returns why tickets were refused, by ticket (`rolled_back`, `stale_version`, `lease_lost`, `duplicate`...).
        RefusedError, naming the field, if a row is not as the schema says.
        """
        name = self.next_shard()
        try:
            shard, saved = self.store.make(name, rows, fields, {"group": self.group, "incarnation": self.incarnation})
        except BadRow as error:
            raise RefusedError(f"put: {error}") from error
        lease = claim.lease if claim else 0
        self.progress += 1
        summary, names = _summarise(rows, fields), list(fields)
        also = {"extras": list(extras)} if extras else {}
        refused = self.call("put", shard=shard, rows=summary, fields=names, lease=lease, saved=saved, **also)["refused"]
        if not saved and len(refused) < len(summary):
            self.store.save(name)
        elif not saved:
            self.store.discard(name)
        return refused

    def next_shard(self) -> str:
        """A name that no other shard has."""
        return f"{self.name.replace('/', '-')}-{next(self._shard_ids):06d}.h5"

    @property
    def store(self) -> ShardStore:
        """The shards of this process; made when they are first needed, which they are not by who only looks."""
        with self._store_lock:
            if self._store is None:
                pool, files = SlabPool(), files_of(self.run, self.config)
                planes = planes_of(self.run, self.config, self.group, self.name, pool)
                self._store = ShardStore(files, planes, pool, self.config.queue.memory_bytes, self._saved)
            return self._store

    @cached_property
    def media(self) -> MediaStore:
        """Of this process, which remembers what it has found sound; see `store` for when it is made."""
        return MediaStore(self.run.media, self.config.queue.durability == "commit", self.config.queue.max_medium_bytes)

    def _saved(self, names: list[str]) -> None:
        """The files of shards are written; the queue is told, and told again if its controller changes."""
        self._told = self.submit("saved", names=names)

    def generated(self, rows: Sequence[Row], reused: Mapping[int, int] | None = None) -> dict[int, str]:
        """Put freshly generated prompt groups; ``reused``: by ticket, how many tokens of them were kept before."""
        extras = [{"ticket": ticket, "reused": tokens} for ticket, tokens in (reused or {}).items()]
        if any(row.get("spans") for row in rows):
            try:
                extras += [{"ticket": ticket, "media": ids} for ticket, ids in media_by_ticket(rows).items()]
            except BadRow as error:
                raise RefusedError(f"put: {error}") from error
        return self.put(*with_optional(rows, GENERATED), extras=extras)

    # -- the talking thread ------------------------------------------------------------------------------------

    def _talk(self) -> None:
        error = RelaxError("the connection to the queue was closed before the answer came")
        try:
            self._serve()
        except Exception as failure:
            error = RelaxError(f"the connection to the queue broke: {type(failure).__name__}: {failure}")
            error.__cause__ = failure
        finally:
            with self._lock:
                self._closing.set()
                self._line.close()
            self._fail(self._take_calls(), error)

    def _take_calls(self, late: float | None = None) -> list[_Call]:
        """Calls that are waited for no more: all, or those whose time was over at ``late``."""
        with self._lock:
            since = float("inf") if late is None else late - self._line.grace_s
            taken = [number for number, call in self._calls.items() if call.latest < since]
            return [self._calls.pop(number) for number in taken]

    def _fail(self, calls: list[_Call], error: RelaxError) -> None:
        """Nobody waits for an answer that cannot come."""
        for call in calls:
            call.future.set_exception(error)

    def _serve(self) -> None:
        beat_at, file_at, beat_s = 0.0, 0.0, self.config.liveness.beat_s
        while not self._closing.is_set():
            now = time.monotonic()
            if now >= beat_at:
                connection = self._line.found(now, 2 * beat_s, beat_s)
                self._look_at_end(connection is not None or self._line.connected, now)
                beat = self._beat_call(now)
                with self._lock:
                    if connection:
                        self._line.take(connection)
                    self._line.send(beat)
                    for call in self._calls.values() if connection else ():
                        self._line.send(call)
                if now >= file_at and self.incarnation != OBSERVER_INCARNATION:
                    self._write_beat()
                    file_at = now + BEAT_FILE_S
                beat_at = now + beat_s
            self._expire(now)
            self._line.wait(max(0.0, min(beat_at, self._due()) - time.monotonic()))
            with self._lock:
                replies, broken = self._line.replies()
            for reply in replies:
                self._settle(reply)
            if broken:
                beat_at = 0.0

    def _look_at_end(self, connected: bool, now: float) -> None:
        """Once a beat: who waits for an answer that nobody will give is to end instead."""
        if connected or self.incarnation == OBSERVER_INCARNATION:
            self._connected_at = now
        elif now - self._connected_at > _NO_HUB_S and self.run.stop.exists():
            self._fail(self._take_calls(), StoppedError("the run stops, and its hub has gone before"))

    def _write_beat(self) -> None:
        """For `status` while the hub does not answer. A full disk must not end the talking."""
        path = self.run.rendezvous(self.group) / f"beat-{self.member}.json"
        with contextlib.suppress(OSError):
            write_json(path, {"time": time.time(), "incarnation": self.incarnation, **identity(), **self._about()})

    def at_work(self, doing: str, waits: bool = False) -> None:
        """Have beats tell people what this process is at, and since when; empty: nothing that they need to know.

        ``waits``: for others. Then it loads nothing, and the others do not wait for it.
        """
        self._awaits = waits
        if doing != self._doing:
            self._doing, self._doing_since = doing, time.monotonic()

    @property
    def hindered(self) -> bool:
        """Whether somebody, this process or another, waits for a disk, or there is no hub to answer."""
        told = WAITS.told()
        return bool(self.waits or (told and not told["loose"]) or not self._line.connected)

    def _about(self) -> dict[str, Any]:
        """What a beat says: work done, how long it is at one piece, its longest gap between beats so far, whether it is
        loading, and what it is at; while it loads, how long one part takes. Who waits for others, for a disk, its own
        or another's, or has no hub to answer, is at no work."""
        told, now = WAITS.told(), time.monotonic()
        if self.hindered or self._awaits:
            self._waited_at = now
        busy_s = min(self.busy(), now - self._waited_at)
        loads = self.loads() and not self._awaits
        about = {"progress": self.progress, "busy_s": busy_s, "gap_s": self._gap, "loads": loads}
        if self._doing:
            about |= {"doing": self._doing, "doing_s": now - self._doing_since}
        if self._doing and about["loads"]:
            about["loading_s"] = now - max(self._doing_since, self._waited_at)
        return about | ({"disk": told} if told else {}) | ({"unsaved": self.unsaved} if self.unsaved else {})

    def _beat_call(self, now: float) -> _Call:
        message = {"id": 0, "client": self.name, "group": self.group, "incarnation": self.incarnation, "op": "beat"}
        passed = now - (self._beaten or now)
        self._gap = max(self._gap, passed)
        # Until a hub says otherwise: who beats in vain has none.
        self.stood_s, self._stands = self.stood_s + passed * self._stands, True
        self._beaten = now
        holds = self._store.holds() if self._store else []
        message["args"] = {"member": self.member, "holds": holds, **self._about()}
        return _Call(_running(), message, now + 1.0, now)

    def _due(self) -> float:
        """When the next call is to be given up."""
        with self._lock:
            return min((call.latest for call in self._calls.values()), default=float("inf")) + self._line.grace_s

    def _expire(self, now: float) -> None:
        for call in self._take_calls(late=now):
            card = latest_card(self.run, "hub")
            log = self.run.logs("hub", card.incarnation if card else 1)
            text = f"{call.message['op']}: the hub has not answered for {now - call.since:.0f} s; open {log}"
            call.future.set_exception(DeadlineError(text))

    def _settle(self, reply: dict[str, Any]) -> None:
        """Hand an answer to who waits for it. One that no controller would give is none, and ends nothing."""
        number, kind, error = reply.get("id"), reply.get("kind"), reply.get("error")
        refused = type(kind) is type(error) is str
        if type(number) is not int or not (refused or "result" in reply):
            return
        if refused and kind == "fenced":
            self._fail(self._take_calls(), FencedError(error))
        with self._lock:
            call = self._calls.pop(number, None)
        if call is None:
            self._free(reply.get("result"))
        elif refused:
            call.future.set_exception(_ERRORS.get(kind, RefusedError)(error))
        else:
            call.future.set_result(reply["result"])

    def settle(self, timeout: float | None = None) -> None:
        """Wait until everything put here is accepted: saved, as durably as configured, and journaled. DeadlineError."""
        timeout = self.config.queue.wait_timeout_s if timeout is None else timeout
        if self._store and not self._store.settle(timeout):
            why = self._store.failure or (in_words(told) if (told := WAITS.told()) else "its disk is slow")
            raise DeadlineError(f"settle: what was put is not saved after {timeout:.0f} s: {why}")
        self._told.result(timeout)

    def _free(self, answer: Any) -> None:
        """What a beat is answered: which shards nobody needs any more, whether clocks stand, and for which disk."""
        if not isinstance(answer, dict):
            return
        if "stands" in answer:
            self._stands = bool(answer["stands"])
            self.waits = found if isinstance(found := answer.get("waits"), dict) else {}
        if self._store and isinstance(names := answer.get("free"), list) and names:
            self._store.free([name for name in names if isinstance(name, str)])

    def close(self) -> None:
        """Save what was put, and stop talking; what was not answered fails."""
        if self._store:
            with contextlib.suppress(Exception):
                self.settle(_SETTLE_S)
            self._store.close()
        self._closing.set()
        self._line.bell.ring()
        self._thread.join(timeout=5.0)
        self._line.bell.close()

    def __enter__(self) -> QueueClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Line:
    """The connection to the controller of the highest incarnation."""

    def __init__(self, run: RunDir, token: bytes) -> None:
        self.run, self.token, self.bell = run, token, Bell()
        self._card: Card | None = None
        self._knock: tuple[int, Knock] | None = None
        """A connection in the making, to the controller of this incarnation."""
        self._connection: Connection | None = None
        self._heard = 0.0
        self._broken = False

    def found(self, now: float, patience: float, seconds: float) -> Connection | None:
        """A new connection, if there is none, or this one is silent for ``patience`` and there is a newer controller.

        It takes ``seconds`` at most, and goes on where it was when it is called again.
        """
        if self._connection and now - self._heard < patience:
            return None
        card = latest_card(self.run, "hub")
        if card is None or (self._connection and self._card and card.incarnation <= self._card.incarnation):
            return None
        try:
            connection = self._knock_at(card, seconds).proceed(seconds)
        except OSError:
            self._knock = None
            return None
        if connection:
            self._card, self._knock = card, None
        return connection

    def _knock_at(self, card: Card, seconds: float) -> Knock:
        if self._knock and self._knock[0] != card.incarnation:
            self._knock[1].close()
            self._knock = None
        if not self._knock:
            self._knock = card.incarnation, Knock(card.endpoint, self.token, purpose_of(card.incarnation), seconds)
        return self._knock[1]

    @property
    def connected(self) -> bool:
        return self._connection is not None and not self._broken

    @property
    def grace_s(self) -> float:
        """How much longer than its patience a call may wait: who is connected gets the controller's own words."""
        return 1.0 if self._connection else 0.0

    def take(self, connection: Connection) -> None:
        """Go on with ``connection``."""
        self.close()
        self._connection, self._broken, self._heard = connection, False, time.monotonic()

    def send(self, call: _Call) -> None:
        """Now, or with whatever connection is found next."""
        if self._connection and not self._broken:
            try:
                self._connection.send(pack(call.request()))
            except OSError:
                self._broken = True
            if self._broken or self._connection.waits:
                self.bell.ring()

    def wait(self, seconds: float) -> None:
        """Until there may be replies, or the bell rings."""
        self.bell.wait(None if self._broken else self._connection, seconds)

    def replies(self) -> tuple[list[dict[str, Any]], bool]:
        """What has come; and whether the connection has just broken."""
        replies: list[dict[str, Any]] = []
        if self._connection is None:
            return replies, False
        try:
            self._connection.flush()
            if not self._broken:
                self._connection.receive()
                replies = [unpack(payload) for payload in self._connection.payloads()]
        except (OSError, BadMessage):
            self._broken = True
        if replies:
            self._heard = time.monotonic()
        if broken := self._broken:
            self.close()
        return replies, broken

    def close(self) -> None:
        if self._connection:
            self._connection.close()
            self._connection = None
        if self._knock:
            self._knock[1].close()
            self._knock = None


def _summarise(rows: Sequence[Row], fields: Sequence[str]) -> list[dict[str, Any]]:
    """Per prompt group what the controller must know: ticket, which samples, their lengths, versions."""
    groups: dict[int, dict[str, Any]] = {}
    for row in rows:
        ticket, _, k = row["sample_id"].partition(".")
        summary = groups.setdefault(int(ticket), {"ticket": int(ticket), "mask": 0, "lengths": {}, "versions": set()})
        summary["mask"] |= 1 << int(k)
        if "token_ids" in fields:
            summary["lengths"][int(k)] = len(row["token_ids"])
            summary["versions"] |= _distinct(row["token_versions"][row["prompt_len"] :])
        if "old_logprob_version" in fields:
            summary["versions"].add(int(row["old_logprob_version"]))
    for summary in groups.values():
        lengths = summary["lengths"]
        summary["lengths"] = packed([lengths[k] for k in sorted(lengths)])
        summary["versions"] = sorted(summary["versions"])
    return list(groups.values())


def _distinct(codes: np.ndarray) -> set[int]:
    """The values in ``codes``, of which there is almost always one."""
    # Comparing bytes is cheaper than numpy's reductions for a short row, and dearer for a long one.
    if len(codes) > _LONG:
        alike = codes.min() == codes.max()
    else:
        data = codes.tobytes()
        alike = len(codes) and data == data[: codes.itemsize] * len(codes)
    return {int(codes[0])} if alike else set(np.unique(codes).tolist())


def _claim(result: dict[str, Any]) -> Claim | None:
    return None if result.get("finished") else Claim.of(result)


def _running() -> Future:
    """A future that cannot be cancelled: an asyncio waiter that goes away must not disturb the talking thread."""
    future: Future = Future()
    future.set_running_or_notify_cancel()
    return future


def then(future: Future, function: Any) -> Future:
    """A future with ``function`` of the result, or with what went wrong on the way there."""
    after = _running()

    def finish(done: Future) -> None:
        try:
            after.set_result(function(done.result()))
        except Exception as error:
            after.set_exception(error)

    future.add_done_callback(finish)
    return after
