"""The queue controller: one process, one writer. Requests come over ZeroMQ, effects go through the journal.

A request that cannot be answered yet (no rows, no ticket, no newer version) is parked and answered the moment it can,
so nobody polls. Requests are idempotent: a client that lost the reply, or its controller, asks again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zmq

from relax_hpc.rundir import RunDir
from relax_hpc.transfer_queue.journal import Journal
from relax_hpc.transfer_queue.plan import Plan
from relax_hpc.transfer_queue.state import Owner, QueueState
from relax_hpc.transfer_queue.wire import BadMessage, seal, unseal
from relax_hpc.versions import Version

Args = dict[str, Any]
Reply = dict[str, Any]


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
        self.events_file = run.events.open("a")
        self.parked: list[Request] = []
        self.beats: dict[str, dict[str, Any]] = {}
        self.refused_frames = 0
        self.next_shard = 1 + max(self.state.shards, default=0)
        self.on_report: Callable[[str, int, dict[str, float], dict[str, float]], None] = lambda *_: None
        self.on_trained: Callable[[int], None] = lambda _: None
        self.on_resume: Callable[[int], None] = lambda _: None
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 1000)
        self.endpoint = f"tcp://{host}:{self.socket.bind_to_random_port(f'tcp://{host}')}"

    # -- loop --------------------------------------------------------------------------------------------------

    def serve(self, until: Callable[[], bool]) -> None:
        """Answer requests until ``until()``; it is asked at least once a second."""
        poller = zmq.Poller()
        poller.register(self.socket, zmq.POLLIN)
        while not until():
            poller.poll(self._patience() * 1000)
            replies = self._drain()
            self.journal.commit()
            for peer, reply in replies:
                self.socket.send_multipart([peer, seal(self.token, reply)])
            self._after_replies()

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
            deadline = time.monotonic() + float(message["patience"])
            return Request(peer, int(message["id"]), key, owner, str(message["op"]), args, deadline)
        except (BadMessage, KeyError, TypeError, ValueError):
            self.refused_frames += 1
            return None

    def _answer(self, request: Request, replies: list[tuple[bytes, Reply]]) -> None:
        try:
            result = self._handle(request)
        except Refused as refusal:
            replies.append((request.peer, self._reply(request, error=str(refusal), kind=refusal.kind)))
            return
        except (KeyError, TypeError, ValueError, IndexError) as error:
            text = f"{request.op}: malformed arguments: {type(error).__name__}: {error}"
            replies.append((request.peer, self._reply(request, error=text, kind="refused")))
            return
        if result is not None:
            replies.append((request.peer, self._reply(request, result=result)))
        elif time.monotonic() >= request.deadline:
            replies.append((request.peer, self._reply(request, error=f"{request.op}: nothing came", kind="deadline")))
        else:
            self.parked.append(request)

    def _reply(self, request: Request, **content: Any) -> Reply:
        return {"id": request.id, "hub_epoch": self.epoch, **content}

    def _handle(self, request: Request) -> Any:
        """The result of a request; None: not yet."""
        handler = getattr(self, "_do_" + request.op, None)
        if handler is None:
            raise Refused("refused", f"unknown request {request.op!r}")
        group, epoch = request.owner
        known = self.state.epochs.get(group, 0)
        if epoch < known:
            raise Refused("fenced", f"{group} epoch {epoch} is over: epoch {known} has taken its place")
        if epoch > known:
            self._record(op="register", group=group, epoch=epoch)
        return handler(request, **request.args)

    def _record(self, **record: Any) -> None:
        self.journal.append(record)
        self.state.apply(record)

    def _after_replies(self) -> None:
        lines = [
            json.dumps({"id": e.id, "what": e.what, "step": e.step, "version": e.version, "reason": e.reason})
            for e in self.state.take_events()
        ]
        if lines:
            self.events_file.write("\n".join(lines) + "\n")
            self.events_file.flush()
        garbage, self.state.garbage = self.state.garbage, []
        for name in garbage:
            (self.run.shards / name).unlink(missing_ok=True)

    # -- requests ----------------------------------------------------------------------------------------------

    def _do_beat(self, request: Request, member: str, progress: int) -> Any:
        self.beats[member] = {
            "group": request.owner[0],
            "epoch": request.owner[1],
            "progress": progress,
            "at": time.monotonic(),
        }
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
        group = self.state.groups[ticket]
        if group.owner == request.owner and group.attempt == attempt and not group.present:
            self._record(op="fail", ticket=ticket, reason=reason)
        return {"attempt": self.state.groups[ticket].attempt}

    def _do_put(self, request: Request, shard: dict, rows: list[dict], fields: list[str], lease: int = 0) -> Any:
        refused = {row["ticket"]: self.state.refusal(request.owner, row, lease) for row in rows}
        taken = [row for row in rows if not refused[row["ticket"]]]
        if taken:
            self._record(op="put", number=self.next_shard, shard=shard, rows=taken, fields=fields)
            self.next_shard += 1
        else:
            self.state.garbage.append(shard["name"])
        for ticket, reason in refused.items():
            if reason in ("rolled_back", "stale_version"):
                self._record(op="reject", ticket=ticket, reason=reason)
        if lease in self.state.leases and self.state.leases[lease].owner == request.owner:
            self._record(op="ack", lease=lease)
        return {"refused": {ticket: reason for ticket, reason in refused.items() if reason}}

    def _do_claim(self, request: Request, task: str, budget: int, boundary: int) -> Any:
        number = self.state.lease_keys.get(request.key, 0)
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
        groups = [self.state.groups[ticket] for ticket in tickets]
        shards = sorted({part for group in groups for part, _ in group.parts})
        return {
            "lease": number,
            "step": self.plan.step_of(tickets[0]) if tickets else 0,
            "tickets": list(tickets),
            "shards": [self.state.shards[shard].descriptor for shard in shards],
            "min_version": self.plan.step_of(tickets[0]) if tickets and not self.plan.max_staleness else 0,
        }

    def _do_ack(self, request: Request, lease: int) -> Any:
        held = self.state.leases.get(lease)
        if held and held.owner == request.owner:
            self._record(op="ack", lease=lease)
        return {}

    def _do_trained(self, request: Request, step: int, leases: list[int]) -> Any:
        if step >= self.state.trained_steps:
            lost = [lease for lease in leases if lease not in self.state.leases]
            if step != self.state.trained_steps or lost:
                expected = self.state.trained_steps
                raise Refused("refused", f"trained: step {step} (expected {expected}), leases lost: {lost}")
            self._record(op="trained", step=step, leases=leases)
            self.on_trained(step)
        return {"staleness": self.state.staleness(step)}

    def _do_resume(self, request: Request, step: int) -> Any:
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
        retire = [str(old) for old in self.state.retirable()]
        if retire:
            self._record(op="retire", versions=retire)
        return {"retire": retire}

    def _do_next_version(self, request: Request, after: str) -> Any:
        """The newest published version once it is above ``after``."""
        newest = self.state.newest
        if newest is not None and newest > Version.parse(after):
            return {"version": str(newest), "digest": self.state.published[newest]["digest"]}
        return {"finished": True} if self.state.finished() else None

    def _do_serve(self, request: Request, reader: str, version: str) -> Any:
        self._record(op="serve", reader=reader, owner=list(request.owner), version=version)
        number = Version.parse(version).number
        return {"eval_due": self.plan.eval_due(self.state.evaluated, number)}

    def _do_evaluated(self, request: Request, version: int, values: dict[str, float]) -> Any:
        self.on_report("eval", version, values, {})
        self._record(op="evaluated", version=version)
        return {}

    def _do_note(self, request: Request, what: str, name: str, reason: str) -> Any:
        """Count something that went wrong outside of a ticket: an engine's fault, a broken line of a prompt file."""
        self._record(op="note", what=what, name=name, reason=reason)
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

    def _do_watch(self, request: Request, after: int) -> Any:
        """Answered once more than ``after`` steps are trained, or the run is finished."""
        if self.state.trained_steps != after or self.state.finished():
            return {"trained_steps": self.state.trained_steps, "finished": self.state.finished()}
        return None
