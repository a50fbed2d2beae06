"""The queue controller: one process, one writer. Requests come over ZeroMQ, effects go through the journal.

A request that cannot be answered yet (no rows, no ticket, no newer version) is parked and answered the moment it can,
so nobody polls. Requests are idempotent: a client that lost the reply, or its controller, asks again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

import zmq

from relax_hpc.errors import FencedError
from relax_hpc.rundir import RunDir
from relax_hpc.transfer_queue.journal import Journal
from relax_hpc.transfer_queue.plan import Plan
from relax_hpc.transfer_queue.records import OBSERVER_EPOCH, Event, Owner
from relax_hpc.transfer_queue.shard import SHARD_NAME, check_name
from relax_hpc.transfer_queue.state import QueueState
from relax_hpc.transfer_queue.wire import MAX_MESSAGE_BYTES, BadMessage, seal, unseal
from relax_hpc.versions import Version

Args = dict[str, Any]
Reply = dict[str, Any]


_LOOK_S = 0.05
"""How often at least to look for a successor while nothing changes, seconds."""
_FOR_OBSERVERS = ("beat", "status", "checkpoints")


class Refused(Exception):
    """A request that breaks a rule; the client gets `kind` and the message."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(slots=True)
class Request:
    """One message of a client, with where to send the answer."""

    peer: bytes
    id: int
    key: str
    owner: Owner
    op: str
    args: Args
    since: float
    deadline: float


class Controller:
    """Serves one run. `on_report(role, step, values, seconds)` receives what roles report (the hub writes metrics)."""

    def __init__(self, run: RunDir, plan: Plan, epoch: int, host: str = "127.0.0.1") -> None:
        self.run, self.plan, self.epoch = run, plan, epoch
        self.token = run.token()
        self.state = QueueState(plan)
        self.journal = Journal(run.journal, epoch)
        for record in self.journal.replay():
            self.state.apply(record)
        self.state.events.clear()
        self._end_former_groups()
        self._sweep()
        self.events_file = run.events.open("ab", buffering=0)
        self.parked: list[Request] = []
        self.changed = False
        """Something happened that parked requests may wait for."""
        self.beats: dict[str, dict[str, Any]] = {}
        self.refused_frames = 0
        self.on_report: Callable[[str, int, dict[str, float], dict[str, float]], None] = lambda *_: None
        self.on_resume: Callable[[int], None] = lambda _: None
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 1000)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self.endpoint = f"tcp://{host}:{self.socket.bind_to_random_port(f'tcp://{host}')}"

    # -- loop --------------------------------------------------------------------------------------------------

    def serve(self, until: Callable[[], bool]) -> None:
        """Answer requests until ``until()``; asked at least once a second. FencedError once there is a successor."""
        poller = zmq.Poller()
        poller.register(self.socket, zmq.POLLIN)
        look_at = 0.0
        while not until():
            poller.poll(self._patience() * 1000)
            replies = self._drain()
            wrote = self.journal.commit()
            # A change counts only if a successor replays it, so look before telling of it; other answers may be late.
            if wrote or time.monotonic() >= look_at:
                look_at = time.monotonic() + _LOOK_S
                self._check_successor()
            for peer, reply in replies:
                self.socket.send_multipart([peer, seal(self.token, reply)])
            self._after_replies()

    def _check_successor(self) -> None:
        if successor := self.journal.superseded():
            raise FencedError(f"hub epoch {self.epoch} is over: epoch {successor} has taken its place")

    def _end_former_groups(self) -> None:
        """After a resume with other groups nobody speaks for the old ones: what they hold comes back."""
        for group, epoch in self.state.epochs.items():
            if group not in self.plan.groups and not self.state.over((group, epoch)):
                self._record(op="down", group=group, epoch=epoch)

    def _sweep(self) -> None:
        """Remove the files of shards that are garbage, or were never put by a group incarnation that is over.

        A living one's are left alone: its put may have been sent to an earlier controller and be sent again.
        """
        needed = {shard.descriptor["name"] for shard in self.state.shards.values()}
        garbage = set(self.state.garbage)
        self.state.garbage.clear()
        for path in self.run.shards.iterdir():
            made = SHARD_NAME.match(path.name)
            orphan = made and path.name not in needed and self.state.over((made[1], int(made[2])))
            if orphan or path.name in garbage:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Flush and release everything."""
        self._after_replies()
        self.events_file.close()
        self.journal.close()
        self.socket.close()
        self.context.term()

    def _patience(self) -> float:
        next_deadline = min((request.deadline for request in self.parked), default=float("inf"))
        return max(0.0, min(1.0, next_deadline - time.monotonic()))

    def _drain(self) -> list[tuple[bytes, Reply]]:
        replies: list[tuple[bytes, Reply]] = []
        for _ in range(1000):
            try:
                peer, frame = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            except ValueError:
                self.refused_frames += 1
                continue
            request = self._parse(peer, frame)
            if request is not None:
                self._answer(request, replies)
        if self.changed or any(request.deadline <= time.monotonic() for request in self.parked):
            self.changed = False
            waiting, self.parked = self.parked, []
            for request in waiting:
                self._answer(request, replies)
        return replies

    def _parse(self, peer: bytes, frame: bytes) -> Request | None:
        try:
            message = unseal(self.token, frame)
            owner = (str(message["group"]), int(message["epoch"]))
            args = dict(message["args"])
            key = f"{message['client']}#{message['id']}"
            patience = max(0.0, float(message["patience"]))
            since = time.monotonic()
            return Request(peer, int(message["id"]), key, owner, str(message["op"]), args, since, since + patience)
        except (BadMessage, KeyError, TypeError, ValueError, OverflowError):
            self.refused_frames += 1
            return None

    def _answer(self, request: Request, replies: list[tuple[bytes, Reply]]) -> None:
        try:
            result = self._handle(request)
        except Refused as refusal:
            replies.append((request.peer, self._reply(request, error=str(refusal), kind=refusal.kind)))
            return
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            text = f"{request.op}: malformed arguments: {type(error).__name__}: {error}"
            replies.append((request.peer, self._reply(request, error=text, kind="refused")))
            return
        if result is not None:
            replies.append((request.peer, self._reply(request, result=result)))
        elif time.monotonic() >= request.deadline:
            replies.append((request.peer, self._reply(request, error=self._overdue(request), kind="deadline")))
        else:
            self.parked.append(request)

    def _overdue(self, request: Request) -> str:
        """What was waited for, how long, how far the run is, and where to look."""
        what = " ".join([request.op, *(str(request.args[name]) for name in ("task", "reader") if name in request.args)])
        at = ", ".join(f"{count} {name}" for name, count in self.state.depth().items())
        return (
            f"{what}: nothing came for {time.monotonic() - request.since:.1f} s; trained steps: "
            f"{self.state.trained_steps}, prompt groups: {at}; open the logs of the group that is behind in "
            f"{self.run.root / 'logs'}"
        )

    def _reply(self, request: Request, **content: Any) -> Reply:
        return {"id": request.id, "hub_epoch": self.epoch, **content}

    def _handle(self, request: Request) -> Any:
        """The result of a request; None: not yet."""
        handler = getattr(self, "_do_" + request.op, None)
        if handler is None:
            raise Refused("refused", f"unknown request {request.op!r}")
        group, epoch = request.owner
        if epoch == OBSERVER_EPOCH:
            if request.op not in _FOR_OBSERVERS:
                raise Refused("refused", f"{request.op}: not for an observer, allowed {', '.join(_FOR_OBSERVERS)}")
            return handler(request, **request.args)
        if lowest := self.state.over(request.owner):
            raise Refused("fenced", f"{group} epoch {epoch} is over: only epoch {lowest} or later may go on")
        if epoch > self.state.epochs.get(group, 0):
            self._record(op="register", group=group, epoch=epoch)
        return handler(request, **request.args)

    def _record(self, **record: Any) -> None:
        # What cannot be applied must not be journaled: its replay would fail for ever.
        self.state.apply(record)
        self.journal.append(record)
        self.changed = True

    def _after_replies(self) -> None:
        if lines := [_line(event) for event in self.state.take_events()]:
            self.events_file.write("".join(lines).encode())
        garbage, self.state.garbage = self.state.garbage, []
        for name in garbage:
            (self.run.shards / name).unlink(missing_ok=True)

    # -- requests ----------------------------------------------------------------------------------------------

    def _do_beat(self, request: Request, member: str, progress: int) -> Any:
        group, epoch = request.owner
        if epoch:
            self.beats[member] = {"group": group, "epoch": epoch, "progress": progress, "at": time.monotonic()}
        return {}

    def _do_down(self, request: Request, group: str, epoch: int) -> Any:
        """The supervisor saw an incarnation end."""
        self._record(op="down", group=group, epoch=epoch)
        self.parked = [parked for parked in self.parked if parked.owner != (group, epoch)]
        self.beats = {name: b for name, b in self.beats.items() if (b["group"], b["epoch"]) != (group, epoch)}
        return {}

    def _do_admit(self, request: Request, reader: str, count: int) -> Any:
        """Tickets that the engine ``reader`` may start with the version it serves; parked until there are any."""
        _, version = self.state.readers.get(reader, (None, None))
        if request.key in self.state.admissions:
            tickets = self.state.admissions[request.key]
        elif version is not None and (tickets := self.state.admissible(version, count)):
            owner = list(request.owner)
            self._record(op="admit", owner=owner, key=request.key, tickets=tickets, version=str(version))
        elif self.state.finished():
            return {"finished": True}
        else:
            return None
        attempts = [self.state.groups[ticket].attempt for ticket in tickets]
        return {"tickets": tickets, "attempts": attempts}

    def _do_fail(self, request: Request, ticket: int, attempt: int, reason: str) -> Any:
        group, reason = self.state.groups[ticket], str(reason)
        if group.owner == request.owner and group.attempt == attempt and not group.present:
            self._record(op="fail", ticket=ticket, reason=reason)
        return {"attempt": self.state.groups[ticket].attempt}

    def _do_put(self, request: Request, shard: dict, rows: list[dict], fields: list[str], lease: int = 0) -> Any:
        if request.key not in self.state.puts:
            check_name(shard["name"])
            if ("token_ids" in fields) == bool(lease):
                raise Refused("refused", f"put: {list(fields)} {'with' if lease else 'without'} a lease")
            refused = {row["ticket"]: self.state.refusal(request.owner, row, lease) for row in rows}
            taken = [row for row in rows if not refused[row["ticket"]]]
            refused = {ticket: reason for ticket, reason in refused.items() if reason}
            held = self.state.leases.get(lease)
            lease = lease if held and held.owner == request.owner else 0
            self._record(
                op="put", key=request.key, shard=shard, rows=taken, fields=fields, refused=refused, lease=lease
            )
        return {"refused": self.state.puts[request.key]}

    def _do_claim(self, request: Request, task: str, budget: int, boundary: int) -> Any:
        number = self.state.lease_keys.get(request.key, 0)
        if number and not self.state.leases[number].tickets:
            # Asked again after everything in it was dropped.
            self._record(op="release", lease=number)
            number = 0
        if not number:
            tickets = self.state.claimable(task, budget, boundary)
            if not tickets:
                return {"finished": True} if self.state.finished() else None
            number = self.state.next_lease
            owner, key = list(request.owner), request.key
            self._record(op="claim", task=task, owner=owner, key=key, number=number, tickets=list(tickets))
        return self._describe(number)

    def _describe(self, number: int) -> dict[str, Any]:
        """A lease as its holder needs it: the tickets and the shards where their rows lie."""
        tickets = self.state.leases[number].tickets
        shards: dict[int, list[int]] = {}
        for ticket in tickets:
            for shard, _ in self.state.groups[ticket].parts:
                shards.setdefault(shard, []).append(ticket)
        return {
            "lease": number,
            "step": self.plan.step_of(tickets[0]) if tickets else 0,
            "tickets": list(tickets),
            "shards": [{**self.state.shards[n].descriptor, "tickets": shards[n]} for n in sorted(shards)],
            "min_version": self.plan.step_of(tickets[0]) if tickets and not self.plan.max_staleness else 0,
        }

    def _do_release(self, request: Request, lease: int) -> Any:
        """The holder cannot use what it has claimed."""
        held = self.state.leases.get(lease)
        if held and held.owner == request.owner:
            self._record(op="release", lease=lease)
        return {}

    def _do_trained(self, request: Request, step: int, leases: list[int]) -> Any:
        if step >= self.state.trained_steps:
            self._check_trained(request.owner, step, leases)
            self._record(op="trained", step=step, leases=leases)
        return {"staleness": self.state.staleness(step)}

    def _check_trained(self, owner: Owner, step: int, leases: list[int]) -> None:
        """Step t is trained on exactly the tickets of t, all of them held by this actor."""
        held = [self.state.leases.get(lease) for lease in leases]
        mine = [found is not None and (found.task, found.owner) == ("actor", owner) for found in held]
        lost = [lease for lease, found in zip(leases, mine, strict=True) if not found]
        tickets = sorted(ticket for found in held if found for ticket in found.tickets)
        size, expected = self.plan.groups_per_step, self.state.trained_steps
        if step != expected or lost or tickets != list(range(step * size, (step + 1) * size)):
            raise Refused(
                "refused", f"trained: step {step} (expected {expected}) with tickets {tickets}, leases lost: {lost}"
            )

    def _do_resume(self, request: Request, step: int) -> Any:
        if not 0 <= step <= self.plan.steps:
            raise Refused("refused", f"resume: step {step}, the run has {self.plan.steps}")
        if not self.state.lineage or self.state.lineage[-1][0] < request.owner[1]:
            self._record(op="resume", epoch=request.owner[1], step=step)
            self.on_resume(step)
        return {}

    def _do_checkpoints(self, request: Request) -> Any:
        return {"checkpoints": self.state.checkpoints}

    def _do_checkpoint(self, request: Request, step: int, name: str, digest: str) -> Any:
        point = {"step": step, "epoch": request.owner[1], "name": name, "digest": digest}
        if point not in self.state.checkpoints:
            self._record(op="checkpoint", **point)
        return {}

    def _do_publish(self, request: Request, version: str, digest: str) -> Any:
        found = Version.parse(version)
        if found.epoch != request.owner[1]:
            raise Refused("fenced", f"publish: version {version} is not of actor epoch {request.owner[1]}")
        if found not in self.state.published:
            self._record(op="publish", version=version, digest=digest)
        if retire := [str(old) for old in self.state.retirable()]:
            self._record(op="retire", versions=retire)
        return {"keep": [str(kept) for kept in self.state.published]}

    def _do_next_version(self, request: Request, after: str) -> Any:
        """The newest published version once it is above ``after``."""
        if newest := self.state.newer(Version.parse(after)):
            return {"version": str(newest), "digest": self.state.published[newest]}
        return {"finished": True} if self.state.finished() else None

    def _do_serve(self, request: Request, reader: str, version: str) -> Any:
        found = Version.parse(version)
        self._record(op="serve", reader=reader, owner=list(request.owner), version=version)
        due = self.state.in_lineage(found) and self.plan.eval_due(self.state.evaluated, found.number)
        return {"eval_due": due}

    def _do_evaluated(self, request: Request, version: int, values: dict[str, float]) -> Any:
        """Counts if the asking group still serves that number in the lineage: it may be rolled back by now."""
        served = [found for owner, found in self.state.readers.values() if owner == request.owner]
        if any(found.number == version and self.state.in_lineage(found) for found in served):
            self._record(op="evaluated", version=version)
            self.on_report("eval", version, values, {})
        return {}

    def _do_note(self, request: Request, what: str, name: str, reason: str) -> Any:
        """Count something that went wrong outside of a ticket: an engine's fault, a broken line of a prompt file."""
        self._record(op="note", what=str(what), name=str(name), reason=str(reason))
        return {}

    def _do_report(self, request: Request, role: str, step: int, values: dict, seconds: dict) -> Any:
        self.on_report(role, step, values, seconds)
        return {}

    def _do_status(self, request: Request) -> Any:
        state, now = self.state, time.monotonic()
        beats = {name: {**beat, "age_s": now - beat["at"]} for name, beat in self.beats.items()}
        return {
            "trained_steps": state.trained_steps,
            "steps": self.plan.steps,
            "newest": str(state.newest) if state.newest else "",
            "readers": {name: str(version) for name, (_, version) in state.readers.items()},
            "depth": state.depth(),
            "dropped": dict(state.dropped),
            "noted": dict(state.noted),
            "refused_frames": self.refused_frames,
            "checkpoints": state.checkpoints,
            "epochs": state.epochs,
            "beats": beats,
            "finished": state.finished(),
            "waiting": [f"{r.owner[0]}: {r.op}" for r in self.parked],
        }


def _line(event: Event) -> str:
    """A line of events.jsonl; a step writes hundreds, so the JSON is put together by hand."""
    return (
        f'{{"id": {quoted(event.id)}, "what": {quoted(event.what)}, "step": {event.step}, '
        f'"version": {quoted(event.version)}, "reason": {quoted(event.reason)}}}\n'
    )
