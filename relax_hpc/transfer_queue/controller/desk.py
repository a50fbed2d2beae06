"""Where requests are taken: each is checked, journaled, applied and answered; no sockets here.

A handler's name is ``_do_`` and the operation; the annotations of its arguments are the operation's schema. It returns
the answer, or raises Parked with what the request waits for. Requests are idempotent: a client that lost the reply,
or its controller, asks again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from types import MappingProxyType
from typing import Any

from relax_hpc.disk import WAITS, Told
from relax_hpc.errors import RelaxError
from relax_hpc.transfer_queue.controller import rules
from relax_hpc.transfer_queue.controller.gathering import Gathering
from relax_hpc.transfer_queue.controller.handing import (
    HandingDesk,
    check_extras,
    kept_for,
    reused_of,
    surplus_for,
    without_media,
)
from relax_hpc.transfer_queue.controller.journal import Journal
from relax_hpc.transfer_queue.controller.messages import Refused, Request, Schema, check_size, rows_of
from relax_hpc.transfer_queue.controller.parking import Parked, Parking
from relax_hpc.transfer_queue.controller.state import QueueState
from relax_hpc.transfer_queue.controller.stock import ADMISSION, DISK, NEWS, rows_for
from relax_hpc.transfer_queue.controller.tasks import HELD
from relax_hpc.transfer_queue.controller.turns_desk import TurnsDesk
from relax_hpc.transfer_queue.plan import NEEDED, Plan
from relax_hpc.transfer_queue.presence import Presence
from relax_hpc.transfer_queue.records import NO_STEP, OBSERVER_INCARNATION, Lease, Owner, Part
from relax_hpc.transfer_queue.storage.shard import SHARD_NAME, check_name
from relax_hpc.versions import Version

_FOR_OBSERVERS = ("beat", "status", "checkpoints")
LEASE_S = 30.0
NO_WAIT: dict = MappingProxyType({})
_FRESH_S = 10.0
"""So long clocks stand for what a member said that it waits for, unless it says so again."""
MAX_RANKS = 1 << 13
"""To which a claim may be dealt."""


class BrokenStateError(RelaxError):
    """A record could not be applied after it was checked: only a replay of the journal gives a state to go on with."""


class Desk(HandingDesk, TurnsDesk):
    """`on_report(role, step, values, seconds)` receives what roles report (the hub writes metrics)."""

    def __init__(
        self, plan: Plan, incarnation: int, state: QueueState, journal: Journal, lease_s: float = LEASE_S
    ) -> None:
        """``lease_s``: of groups; one without beats for so long is not there."""
        self.plan, self.incarnation, self.state, self.journal = plan, incarnation, state, journal
        self.parking = Parking()
        self.presence = Presence(plan.groups, lease_s, time.monotonic())
        self.beats: dict[str, dict[str, Any]] = {}
        self.told_waits: dict[str, tuple[float, Told]] = {}
        """By member, when it said last which of its writes does not succeed."""
        self.refused_connections = 0
        self.on_report: Callable[[str, int, dict[str, float], dict[str, float]], None] = lambda *_: None
        self.on_show: Callable[[int, list[str]], None] = lambda *_: None
        self.on_resume: Callable[[int], None] = lambda _: None

    def handle(self, request: Request) -> Any:
        """The answer. Refused or Parked: there is none, or not yet."""
        schema = SCHEMAS.get(request.op)
        if schema is None:
            raise Refused("refused", f"unknown request {request.op!r:.40}")
        group, incarnation = request.owner
        if incarnation == OBSERVER_INCARNATION and request.op not in _FOR_OBSERVERS:
            raise Refused("refused", f"{request.op}: not for an observer, allowed {', '.join(_FOR_OBSERVERS)}")
        if lowest := self.state.over(request.owner) if incarnation != OBSERVER_INCARNATION else 0:
            raise Refused(
                "fenced", f"{group} incarnation {incarnation} is over: only incarnation {lowest} or later may go on"
            )
        if complaint := schema.complaint(request.args):
            raise Refused("refused", f"{request.op}: malformed arguments: {complaint}")
        if incarnation > self.state.incarnations.get(group, 0):
            self._record(op="register", group=group, incarnation=incarnation)
        try:
            return getattr(self, "_do_" + request.op)(request, **request.args)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
            text = f"{request.op}: malformed arguments: {type(error).__name__}: {error}"
            raise Refused("refused", text) from error

    def _record(self, **record: Any) -> None:
        try:
            self.state.apply(record)
        except Exception as error:
            # It is not journaled: its replay would fail for ever.
            raise BrokenStateError(f"{record['op']}: cannot be applied: {type(error).__name__}: {error}") from error
        self.journal.append(record)

    # -- groups ------------------------------------------------------------------------------------------------

    def _do_beat(self, request: Request, member: str, holds: list[str] = (), disk: dict = NO_WAIT, **about: Any) -> Any:
        """Of the shards that the client ``holds`` in memory, all of them put and on disk, those that nobody needs any
        more; whether clocks stand, and for which ``disk`` somebody waits."""
        group, incarnation = request.owner
        check_size("beat", about)
        check_told(disk)
        if incarnation:
            name, now = f"{group}/{member}", time.monotonic()
            self.beats[name] = {"group": group, "incarnation": incarnation, **about, "at": now}
            self.told_waits.pop(name, None)
            if disk:
                self.told_waits[name] = now, dict(disk)
        shelf = self.state.shelf
        # An answer to `saved` may have been lost, and with a journal's end what it was about.
        unsaved = {shelf.shards[number].descriptor["name"]: number for number in shelf.unsaved.get(request.owner, ())}
        self._save([unsaved[name] for name in holds if name in unsaved])
        free, waits = [name for name in holds if name not in shelf.numbers], self.waits()
        return {"free": free, "stands": self.presence.stands, **({"waits": waits} if waits else {})}

    def waits(self) -> Told:
        """A write that does not succeed and that somebody waits for; empty: there is none."""
        if not WAITS and not self.told_waits:
            return {}
        since = time.monotonic() - _FRESH_S
        told = [WAITS.told(), *(told for at, told in self.told_waits.values() if at > since)]
        return next((found for found in told if found and not found["loose"]), {})

    def all_waits(self) -> list[dict[str, Any]]:
        """Every member's write that does not succeed, its own first."""
        own = [{"who": "hub/controller", **told}] if (told := WAITS.told()) else []
        return own + [{"who": name, **told} for name, (_, told) in sorted(self.told_waits.items())]

    def _do_down(self, request: Request, group: str, incarnation: int) -> Any:
        """The supervisor saw an incarnation end."""
        self._record(op="down", group=group, incarnation=incarnation)
        self.parking.drop((group, incarnation))
        for name in [name for name, b in self.beats.items() if (b["group"], b["incarnation"]) == (group, incarnation)]:
            del self.beats[name]
            self.told_waits.pop(name, None)
        return {}

    # -- rows --------------------------------------------------------------------------------------------------

    def _do_admit(self, request: Request, reader: str, count: int) -> Any:
        """Tickets that the engine ``reader`` may start with the version it serves."""
        state, (_, version) = self.state, self.state.readers.get(reader, (None, None))
        tickets = state.admissions.recall(request.key)
        if tickets is None and version and (tickets := rules.admissible(state, version, count)):
            owner, surplus = list(request.owner), surplus_for(state, tickets, version.number)
            also = {"surplus": surplus} if surplus else {}
            self._record(op="admit", owner=owner, key=request.key, tickets=tickets, version=str(version), **also)
        if tickets:
            groups = [state.groups[ticket] for ticket in tickets]
            attempts = [group.attempt for group in groups]
            failures = {t: group.failures for t, group in zip(tickets, groups, strict=True) if group.failures}
            about = {"attempts": attempts, "failures": failures, "waited": request.told()}
            return {"tickets": tickets, "kept": kept_for(state, tickets), **about}
        if state.finished():
            return {"finished": True}
        raise Parked(ADMISSION, *rules.why_not(state, version))

    def _do_fail(self, request: Request, ticket: int, attempt: int, reason: str) -> Any:
        """An attempt came to nothing; the number of the next one, and a surplus group in its place if there is any."""
        group = self.state.groups[ticket]
        mine = group.owner == request.owner
        if mine and group.attempt == attempt:
            self._record(op="fail", ticket=ticket, reason=reason)
            if surplus := surplus_for(self.state, [ticket], group.last - self.plan.max_staleness):
                self._record(op="bind", surplus=surplus)
        kept = kept_for(self.state, [ticket] if mine else [])
        return {"attempt": group.attempt, "failures": group.failures, "kept": kept}

    def _do_put(
        self,
        request: Request,
        shard: dict,
        rows: list[dict],
        fields: list[str],
        lease: int = 0,
        saved: bool = True,
        extras: list[dict] = (),
    ) -> Any:
        """Rows of a new shard. Not ``saved``, they can be read, and count once `saved` names the shard.

        ``extras``: of some tickets the ids of their `media`, and how many tokens are `reused` that were kept before.
        """
        if (refused := self.state.puts.recall(request.key)) is not None:
            return {"refused": refused}
        if check_name(shard["name"]) in self.state.shelf.numbers:
            raise Refused("refused", f"put: the queue has a shard {shard['name']}; a name is used once")
        held = self.state.leases.get(lease)
        self._check_fields(fields, lease, held.task if held else "")
        check_size("put: shard", shard)
        groups, owner = rows_of(rows, fields), request.owner
        refused = rules.refusals(self.state, owner, groups, lease)
        also: dict[str, Any] = {}
        if extras:
            check_extras(extras, [] if lease else [row[0] for row in groups])
            refused = without_media(self.state, extras) | refused
            also["reused"] = reused_of(self.state, [extra for extra in extras if extra["ticket"] not in refused])
        taken = [(ticket, lengths, codes) for ticket, _, lengths, codes in groups if ticket not in refused]
        about = {"owner": list(owner), "lease": lease if held and held.owner == owner else 0, "saved": saved}
        self._record(
            op="put", key=request.key, shard=shard, rows=taken, fields=fields, refused=refused, **about, **also
        )
        return {"refused": refused}

    def _check_fields(self, fields: list[str], lease: int, task: str) -> None:
        """Generated rows come whole and without a lease; a task adds what it gives, and perhaps more."""
        if ("token_ids" in fields) == bool(lease):
            raise Refused("refused", f"put: {fields} {'with' if lease else 'without'} a lease")
        needed = self.plan.tasks[task].gives if task else () if lease else NEEDED
        if (task and not needed) or not set(needed).issubset(fields):
            raise Refused("refused", f"put: {task or 'generated rows'}: found {fields}, needed {list(needed)}")

    def _do_saved(self, request: Request, names: list[str]) -> Any:
        """The shards ``names``, all of them put by this incarnation, are on disk: their rows count."""
        shelf = self.state.shelf
        numbers = {shelf.numbers[name] for name in names if name in shelf.numbers}
        if others := [name for name in names if name in shelf.numbers and not self._made(request.owner, name)]:
            raise Refused("refused", f"saved: {others[0]} was put by another incarnation")
        self._save(numbers)
        # Of shards that nobody needs any more the files came too late to be removed with the others.
        shelf.garbage += [name for name in names if name not in shelf.numbers and _names_maker(name, request.owner)]
        return {}

    def gathered(self, end: int, found: Sequence[tuple[Gathering, int]]) -> None:
        """The rows of steps below ``end`` lie in files of so many bytes. What has changed meanwhile stays as it is."""
        files = []
        for gathering, size in found:
            tickets = [ticket for ticket, parts in gathering.parts.items() if self._is_at_rest(ticket, parts)]
            if tickets:
                files.append(({"name": gathering.name, "bytes": size, "planes": {}}, tickets))
            else:
                self.state.shelf.garbage.append(gathering.name)
        self._record(op="gathered", owner=["hub", self.incarnation], end=end, files=files)

    def _is_at_rest(self, ticket: int, parts: Sequence[Part]) -> bool:
        """Whether ``ticket`` is trained on, in nobody's hands, and where it was."""
        state = self.state
        group, trained = state.groups.get(ticket), self.plan.step_of(ticket) < state.trained_steps
        return bool(trained and group and group.parts == parts) and not any(
            queue.statuses[ticket] == HELD for queue in state.tasks.values()
        )

    def _save(self, numbers: Iterable[int]) -> None:
        """These shards are on disk: accept the rows of those that are not known to be."""
        if waited := sorted(number for number in numbers if self.state.shards[number].unsaved):
            self._record(op="saved", shards=waited)

    def _made(self, owner: Owner, name: str) -> bool:
        return self.state.shards[self.state.shelf.numbers[name]].owner == owner

    def _do_claim(
        self,
        request: Request,
        task: str,
        budget: int,
        boundary: int,
        ranks: int = 0,
        max_tokens: int = 0,
        batch: int = 0,
    ) -> Any:
        """The next window of ``task``; with ``ranks``, its rows are dealt to them, see `QueueState.assignment`.

        The assignment is in the journal before any rank sees it: whoever asks again finds the same.
        """
        state = self.state
        if not 0 <= ranks <= MAX_RANKS or (ranks and max_tokens < 1):
            found = f"{ranks} ranks, micro-batches of {max_tokens} tokens"
            raise Refused("refused", f"claim: found {found}, allowed at most {MAX_RANKS} and at least 1")
        if task not in state.tasks or boundary < 1:
            allowed = f"a task ({', '.join(state.tasks)}) and a boundary of at least 1"
            raise Refused("refused", f"claim: found {task!r:.40} and {boundary}, allowed {allowed}")
        number = state.lease_keys.get(request.key, 0)
        if number and not state.leases[number].tickets:
            # Asked again after everything in it was dropped.
            self._record(op="release", lease=number)
            number = 0
        if not number:
            tickets = state.claimable(task, budget, boundary, padded=not ranks)
            if not tickets and state.finished():
                return {"finished": True}
            if not tickets:
                peer, what = state.awaited(task, budget, boundary, padded=not ranks)
                raise Parked(rows_for(task), f"waits for {what}", not state.tasks[task].in_order, (peer, what))
            number = state.next_lease
            about = {"task": task, "owner": list(request.owner), "key": request.key, "number": number}
            assignment = state.assignment(tickets, ranks, max_tokens, batch) if ranks else []
            self._record(op="claim", **about, tickets=list(tickets), assignment=assignment)
        return {**self._describe(number), "waited": request.told()}

    def _describe(self, number: int) -> dict[str, Any]:
        """A lease as its holder needs it: the tickets, the shards with the fields of its task, and who takes which."""
        held = self.state.leases[number]
        tickets, queue = held.tickets, self.state.tasks[held.task]
        needs, seen = queue.needs, tickets if queue.whole_step else ()
        shards: dict[int, list[int]] = {}
        for ticket in tickets:
            for shard in self.state.places(self.state.groups[ticket], needs):
                shards.setdefault(shard, []).append(ticket)
        step = self.state.step_of(tickets[0]) if tickets else 0
        return {
            "lease": number,
            "step": step,
            "place": self._place(tickets),
            "tickets": list(tickets),
            "shards": [{**self._where(n), "tickets": shards[n]} for n in sorted(shards)],
            "min_version": 0 if self.plan.max_staleness else step,
            "with_media": [ticket for ticket in tickets if ticket in self.state.media.holders],
            "assignment": held.assignment,
            "given": [ticket for ticket in seen if self.state.has(self.state.groups[ticket], queue.gives)],
        }

    def _place(self, tickets: Sequence[int]) -> int:
        """The first in the order of training that these have."""
        places = [self.state.groups[ticket].place for ticket in tickets]
        return min((place for place in places if place != NO_STEP), default=min(tickets, default=0))

    def _where(self, number: int) -> dict[str, Any]:
        """A shard's descriptor. What a maker had in memory whose lease is over nobody need try: reads could hang."""
        shard = self.state.shards[number]
        return {**shard.descriptor, "planes": {}} if self.state.over(shard.owner) else shard.descriptor

    def _do_release(self, request: Request, lease: int) -> Any:
        """The holder cannot use what it has claimed."""
        held = self.state.leases.get(lease)
        if held and held.owner == request.owner:
            self._record(op="release", lease=lease)
        return {}

    # -- training ----------------------------------------------------------------------------------------------

    def _do_settled(self, request: Request, leases: list[int]) -> Any:
        """What of its leases the asking group still holds as it was claimed, once all of that is on disk: nothing can
        take it away then.

        An actor asks before it changes its weights; rows that were lost with their maker cost no more than gradients.
        """
        held = [self.state.leases.get(lease) for lease in leases]
        mine = [found for found in held if found and found.owner == request.owner]
        tickets = {ticket for found in mine for ticket in found.tickets if self._is_as_claimed(found, ticket)}
        if self.state.shelf.waits_for_disk(tickets):
            raise Parked(DISK, "rows are not saved yet")
        return {"tickets": sorted(tickets)}

    def _is_as_claimed(self, lease: Lease, ticket: int) -> bool:
        """Whether none of the fields that the task needs was lost since, also if it was given again."""
        group, needs = self.state.groups[ticket], self.state.tasks[lease.task].needs
        return self.state.has(group, needs) and set(self.state.places(group, needs)).issubset(lease.shards)

    def _do_trained(self, request: Request, step: int, leases: list[int]) -> Any:
        """Training step ``step`` was done; answered when all its rows are on disk."""
        if step >= self.state.trained_steps:
            self._check_trained(request.owner, step, leases)
            if not self.state.safe(self.state.tickets_of(step), self.state.tasks["actor"].needs):
                raise Parked(DISK, f"rows of step {step} are not saved yet")
            self._record(op="trained", step=step, leases=leases)
        return {"staleness": self.state.staleness(step), "lag": self.state.publish_lag(step)}

    def _check_trained(self, owner: Owner, step: int, leases: list[int]) -> None:
        """Step t is trained on exactly the tickets of its set, all of them held by this actor."""
        held = [self.state.leases.get(lease) for lease in leases]
        mine = [found is not None and (found.task, found.owner) == ("actor", owner) for found in held]
        lost = [lease for lease, found in zip(leases, mine, strict=True) if not found]
        tickets = sorted(ticket for found in held if found for ticket in found.tickets)
        expected = self.state.trained_steps
        theirs = sorted(self.state.tickets_of(step))
        if step != expected or lost or tickets != theirs or len(theirs) != self.plan.prompts_per_step:
            raise Refused(
                "refused", f"trained: step {step} (expected {expected}) with tickets {tickets}, leases lost: {lost}"
            )

    def _do_resume(self, request: Request, step: int) -> Any:
        if not 0 <= step <= self.plan.steps:
            raise Refused("refused", f"resume: step {step}, the run has {self.plan.steps}")
        if not self.state.lineage or self.state.lineage[-1][0] < request.owner[1]:
            self._record(op="resume", incarnation=request.owner[1], step=step)
            self.on_resume(step)
        return {}

    def _do_checkpoints(self, request: Request) -> Any:
        return {"checkpoints": self.state.checkpoints}

    def _do_checkpoint(self, request: Request, step: int, name: str, digest: str) -> Any:
        point = {"step": step, "incarnation": request.owner[1], "name": check_name(name), "digest": digest}
        if point not in self.state.checkpoints:
            if not 0 <= step <= self.state.trained_steps:
                raise Refused("refused", f"checkpoint: step {step}, trained are {self.state.trained_steps}")
            self._record(op="checkpoint", **point)
        return {}

    # -- weights -----------------------------------------------------------------------------------------------

    def _do_publish(self, request: Request, version: str, digest: str) -> Any:
        found = Version.parse(version)
        if found.incarnation != request.owner[1]:
            raise Refused("fenced", f"publish: version {version} is not of actor incarnation {request.owner[1]}")
        if found not in self.state.published:
            self._record(op="publish", version=version, digest=digest)
        if retire := [str(old) for old in self.state.retirable()]:
            self._record(op="retire", versions=retire)
        return {"keep": [str(kept) for kept in self.state.published]}

    def _do_next_version(self, request: Request, after: str, multiple_of: int = 1) -> Any:
        """The newest published version whose number is a multiple, once it is above ``after``."""
        if newest := self.state.newer(Version.parse(after), multiple_of):
            return self._news(newest)
        if self.state.finished():
            return {"finished": True}
        raise Parked(NEWS)

    def _news(self, version: Version) -> dict[str, str]:
        files = self.state.filed.get(version, "")
        return {"version": str(version), "digest": self.state.published[version], "files": files}

    def _do_filed(self, request: Request, version: str, digest: str) -> Any:
        """The files of ``version`` are written."""
        found = Version.parse(version)
        if found.incarnation != request.owner[1]:
            raise Refused("fenced", f"filed: version {version} is not of actor incarnation {request.owner[1]}")
        if found in self.state.published and found not in self.state.filed:
            self._record(op="filed", version=version, digest=digest)
        return {}

    def _do_filed_version(self, request: Request, after: str, multiple_of: int = 1) -> Any:
        """The newest published version above ``after`` that has files; {} if there is none."""
        newest = self.state.newest_filed(multiple_of)
        return self._news(newest) if newest is not None and newest > Version.parse(after) else {}

    def _do_serve(self, request: Request, reader: str, version: str) -> Any:
        found = Version.parse(version)
        self._record(op="serve", reader=reader, owner=list(request.owner), version=version)
        due = self.state.in_lineage(found) and self.plan.eval_due(self.state.evaluated, found.number)
        return {"eval_due": due}

    def _do_evaluated(self, request: Request, version: int, values: dict[str, float]) -> Any:
        """Counts once, if the asking group still serves that number in the lineage: it may be rolled back by now."""
        served = [found for owner, found in self.state.readers.values() if owner == request.owner]
        first = version > self.state.evaluated
        if first and any(found.number == version and self.state.in_lineage(found) for found in served):
            self._record(op="evaluated", version=version)
            self.on_report("eval", version, values, {})
        return {}

    # -- telling -----------------------------------------------------------------------------------------------

    def _do_note(self, request: Request, what: str, name: str, reason: str) -> Any:
        """Count something that went wrong outside of a ticket: an engine's fault, a broken line of a prompt file."""
        self._record(op="note", what=what, name=name, reason=reason)
        return {}

    def _do_report(
        self, request: Request, role: str, step: int, values: dict[str, float], seconds: dict[str, float]
    ) -> Any:
        self.on_report(role, step, values, seconds)
        return {}

    def _do_show(self, request: Request, step: int, texts: list[str]) -> Any:
        """Texts for people, such as what was generated for ``step``."""
        self.on_show(step, texts)
        return {}

    def _do_status(self, request: Request) -> Any:
        state, now = self.state, time.monotonic()
        beats = {name: {**beat, "age_s": now - beat["at"]} for name, beat in self.beats.items()}
        return {
            "trained_steps": state.trained_steps,
            "accepted": state.accepted,
            "steps": self.plan.steps,
            "newest": str(state.newest) if state.newest else "",
            "readers": {name: str(version) for name, (_, version) in state.readers.items()},
            "depth": state.depth(),
            "oldest_s": {"generating": state.generating.oldest_s(), "ready": state.untrained.oldest_s()},
            "untrained_bytes": state.shelf.untrained_bytes,
            "dropped": dict(state.dropped),
            "noted": dict(state.noted),
            "disk": self.all_waits(),
            "kept": state.kept.counts(),
            "refused_connections": self.refused_connections,
            "checkpoints": state.checkpoints,
            "incarnations": state.incarnations,
            "beats": beats,
            "lacking": self.presence.told(now),
            "finished": state.finished(),
            "waiting": [": ".join(filter(None, (r.owner[0], r.op, r.why))) for r in self.parking],
        }


def check_told(disk: dict) -> None:
    """Refused unless it is empty, or says of a write that does not succeed what `Waits.told` does."""
    kinds = {"path": str, "errno": int, "seconds": float, "loose": bool}
    if disk and {name: type(value) for name, value in disk.items()} != kinds:
        raise Refused("refused", f"beat: disk: found {disk!r:.80}, expected {', '.join(kinds)}")


def _names_maker(name: str, owner: Owner) -> bool:
    """Whether a file of this name is of that incarnation."""
    made = SHARD_NAME.match(check_name(name))
    return made is not None and (made[1], int(made[2])) == owner


SCHEMAS = {name.removeprefix("_do_"): Schema(getattr(Desk, name)) for name in dir(Desk) if name.startswith("_do_")}
"""By operation."""
