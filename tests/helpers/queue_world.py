"""A whole run in memory: the controller's real request handlers, and roles that work, die and come
back at will.

Nothing here waits or talks to a socket; every request is sent twice, as after a lost reply.
"""

from __future__ import annotations

import itertools
from typing import Any

import msgpack

from relax_hpc.base.versions import Version
from relax_hpc.queue.controller.gathering import covered_steps, journal_files, plan_files
from relax_hpc.queue.controller.messages import Refused, Request
from relax_hpc.queue.controller.service import QueueService
from relax_hpc.queue.controller.state.queue_state import QueueState
from relax_hpc.queue.controller.waiting import NotYet
from relax_hpc.queue.lengths import pack_lengths
from relax_hpc.queue.plan import GENERATED, UNSCORED, Plan
from relax_hpc.queue.row_ids import row_ids
from tests.helpers.queue_helpers import GIVES

NOTHING = Version(0, 0)
GROUPS = {role: role for role in ("rollout", "actor", "actor_fwd", "reference")} | {
    "advantages": "hub"
}
RANKS, MAX_TOKENS = 2, 12
"""The actor's data ranks, and what a micro-batch of theirs holds."""
BYTES = 100
"""Of a prompt group in any shard."""
IGNORED = ("plan", "events", "woken")


class Log(list):
    """A journal in memory; records go through msgpack as in a file."""

    def append(self, record: dict[str, Any]) -> None:
        super().append(msgpack.packb(record))


class InMemory(QueueService):
    """A queue service whose journal is in memory."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan, 1, QueueState(plan), Log())

    def replayed(self) -> QueueState:
        """A fresh state that saw the same journal."""
        state = QueueState(self.plan)
        for record in self.journal:
            state.apply(msgpack.unpackb(record, strict_map_key=False))
        return state

    def restart(self) -> None:
        told, garbage = self.state.events.batches, self.state.shards.garbage
        self.state = self.replayed()
        self.state.events.batches, self.state.shards.garbage = told, garbage

    def ask(self, group: str, incarnation: int, key: str, op: str, /, **args: Any) -> Any:
        """The answer; None: not yet."""
        try:
            return self.handle(
                Request(
                    0, 0, f"{group}-{incarnation}#{key}", (group, incarnation), op, args, 0.0, 0.0
                )
            )
        except NotYet:
            return None


def contents(state: QueueState) -> dict[str, Any]:
    return {name: value for name, value in vars(state).items() if name not in IGNORED}


class GoneError(Exception):
    """Rows that were claimed cannot be read: they were only in the memory of a process that
    ended."""


class World:
    """The run and what must hold of it. `act` lets a role do one thing; `kill` ends its process.

    ``slow_disk``: rows are put before they are on disk. ``settles``: the actor asks for that before
    it trains.
    """

    def __init__(
        self,
        plan: Plan,
        budget: int,
        minis: int = 1,
        save_every: int = 1,
        slow_disk: bool = False,
        settles: bool = True,
    ) -> None:
        self.plan, self.budget, self.minis, self.save_every = plan, budget, minis, save_every
        self.slow_disk, self.settles = slow_disk, settles
        self.unsaved: dict[str, list[str]] = {role: [] for role in GROUPS}
        self.gone: set[str] = set()
        self.service = InMemory(plan)
        self.keys = itertools.count()
        self.names, self.shapes, self.drawn = (
            itertools.count(),
            itertools.count(),
            itertools.count(),
        )
        self.declared: dict[int, bytes] = {}
        """By ticket, how many rows each episode had that was put last."""
        self.incarnations = dict.fromkeys(GROUPS, 1)
        self.shards: dict[str, dict[int, dict[str, Any]]] = {}
        self.status: dict[str, str] = {}
        self.older = 0
        self.lost_steps = 0
        self.begun: set[int] = set()
        self.durable: dict[int, dict[int, int]] = {}
        """By ticket, the tokens of each episode that were appended last."""
        for role in GROUPS:
            self.reborn(role)

    def reborn(self, role: str) -> None:
        """The memory of a fresh process."""
        if role == "rollout":
            self.serving, self.flight, self.due, self.known = NOTHING, [], None, {}
        elif role == "actor":
            self.step, self.leases, self.held, self.announced, self.ahead = -1, [], [], False, None
        elif role == "actor_fwd":
            self.scoring, self.scored = NOTHING, None
        else:
            setattr(self, role, None)

    def kill(self, role: str, noticed: bool) -> None:
        """End a process; `noticed`: the supervisor says so before the next one registers."""
        if noticed:
            self.ask_as(
                "supervisor", 1, "down", group=GROUPS[role], incarnation=self.incarnations[role]
            )
        self.incarnations[role] += 1
        self.gone.update(self.unsaved[role])
        self.unsaved[role] = []
        self.reborn(role)

    def ask(self, role: str, op: str, /, **args: Any) -> Any:
        return self.ask_as(GROUPS[role], self.incarnations[role], op, **args)

    def ask_as(self, group: str, incarnation: int, op: str, /, **args: Any) -> Any:
        key = f"k{next(self.keys)}"
        first = self.service.ask(group, incarnation, key, op, **args)
        if first is not None and op not in ("next_version", "note", "settled"):
            before = contents(self.service.replayed()) if len(self.service.journal) < 40 else None
            if next(self.keys) % 5 == 0:
                self.service.restart()
            again = self.service.ask(group, incarnation, key, op, **args)
            assert again == first, (op, first, again)
            assert before is None or contents(self.service.state) == before, op
        self.audit()
        return first

    # -- the ledger --------------------------------------------------------------------------------

    def audit(self) -> None:
        """Every accepted row is in one place: waiting, trained, or dropped."""
        for event in self.service.state.events.take():
            if event.what == "accepted":
                assert self.status.get(event.id) in (None, "dropped"), event
            elif event.what == "trained":
                assert self.status[event.id] == "accepted", event
            elif event.what == "returned":
                for name in self.named(event.id):
                    assert self.status[name] == "trained", event
                    self.status[name] = "accepted"
            if event.what in ("accepted", "trained", "dropped"):
                self.status |= dict.fromkeys(self.named(event.id), event.what)
            if event.what == "dropped":
                assert event.reason, event
            assert event.what != "old_logprobs" or Version.parse(event.version), event
        logs = self.service.state.segments
        assert logs.appended == logs.used + logs.held + logs.lost.total(), (
            "every token is in one place"
        )
        for held in self.service.state.leases.values():
            dealt = sorted(row for rank in held.assignment for batch in rank for row in batch)
            rows = sum(len(row_ids(ticket, self.declared[ticket])) for ticket in held.tickets)
            assert dealt == (list(range(rows)) if held.task == "actor" else []), (
                "each row is one rank's"
            )

    def named(self, name: str) -> list[str]:
        """Rows by their id; by that of a prompt group those of it that are not dropped."""
        return [
            n for n in self.status if n.startswith(f"{name}.") and self.status[n] != "dropped"
        ] or ([name] if "." in name else [])

    def rows(self, claim: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """As `read_rows` puts them together, however late: the shards of a claim stay as long as
        its lease."""
        if not self.gone.isdisjoint(shard["name"] for shard in claim["shards"]):
            raise GoneError
        merged: dict[int, dict[str, Any]] = {ticket: {} for ticket in claim["tickets"]}
        for shard in claim["shards"]:
            for ticket in shard["tickets"]:
                merged[ticket].update(self.shards[shard["name"]][ticket])
        assert [row["episodes"] for row in merged.values()] == claim["episodes"]
        return merged

    def read(self, role: str, claim: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """`rows`; what cannot be read is given back."""
        try:
            return self.rows(claim)
        except GoneError:
            self.ask(role, "release", lease=claim["lease"])
            raise

    def put(
        self,
        role: str,
        rows: dict[int, dict[str, Any]],
        fields: tuple[str, ...],
        lease: int = 0,
    ) -> dict[int, str]:
        name = f"s{next(self.names)}"
        self.shards[name] = rows
        summary = [
            {
                "ticket": t,
                "episodes": row["episodes"],
                "lengths": pack_lengths(row.get("lengths", [])),
            }
            | {"versions": row.get("made_by", [])}
            for t, row in rows.items()
        ]
        put = {
            "shard": {"name": name, "bytes": BYTES * len(rows)},
            "rows": summary,
            "fields": list(fields),
        }
        reply = self.ask(role, "put", lease=lease, saved=not self.slow_disk, **put)
        if self.slow_disk:
            self.unsaved[role].append(name)
        if not lease:
            self.declared |= {
                t: row["episodes"] for t, row in rows.items() if t not in reply["refused"]
            }
        self.tidy_up()
        return reply["refused"]

    def tidy_up(self) -> None:
        for garbage in self.service.state.shards.garbage:
            self.shards.pop(garbage, None)
        self.service.state.shards.garbage.clear()

    def gather(self) -> None:
        """What the hub does beside all work with rows that stay."""
        steps = covered_steps(self.service.state)
        work = plan_files(self.service.state, steps, 1, next(self.names))
        for one in work:
            rows = self.shards[one.name] = {}
            for ticket, parts in one.parts.items():
                rows[ticket] = {
                    k: v for n, _ in parts for k, v in self.shards[one.shards[n]][ticket].items()
                }
        journal_files(self.service, steps.stop, [(one, BYTES * len(one.parts)) for one in work])
        self.tidy_up()

    def save(self, role: str) -> bool:
        names, self.unsaved[role] = self.unsaved[role], []
        if names:
            self.ask(role, "saved", names=names)
            self.tidy_up()
        return bool(names)

    # -- roles -------------------------------------------------------------------------------------

    def act(self, role: str, choice: int = 0) -> bool:
        """Let ``role`` do its next thing (``choice`` picks among several); whether it could."""
        if choice % 3 == 0 and self.save(role):
            return True
        if choice % 7 == 1:
            self.gather()
        try:
            return getattr(self, "act_" + role)(choice)
        except GoneError:
            return True

    def pull(self, role: str, serving: Version) -> Version | None:
        news = self.ask(role, "next_version", after=str(serving))
        if news is None or "version" not in news:
            return None
        version = Version.parse(news["version"])
        reply = self.ask(
            role, "serve", reader=role, version=news["version"], evaluates=role == "rollout"
        )
        if role == "rollout" and reply["eval_due"]:
            self.due = version
        return version

    def act_rollout(self, choice: int) -> bool:
        acts = [self.swap, self.evaluate, self.finish, self.admit]
        order = acts[choice % 4 :] + acts[: choice % 4]
        return any(act(choice) for act in order)

    def swap(self, choice: int) -> bool:
        version = self.pull("rollout", self.serving)
        self.serving = version or self.serving
        return version is not None

    def evaluate(self, choice: int) -> bool:
        due, self.due = self.due, None
        if due:
            self.ask("rollout", "evaluated", version=due.number, values={})
        return due is not None

    def admit(self, choice: int) -> bool:
        if self.serving == NOTHING:
            return False
        reply = self.ask("rollout", "admit", reader="rollout", count=1 + choice % 3)
        if reply is None or "tickets" not in reply:
            return False
        for ticket in reply["tickets"]:
            assert self.serving.number >= self.plan.step_of(ticket) - self.plan.max_staleness
            assert self.alive(self.serving)
        self.check_room(reply["tickets"])
        work = dict(zip(reply["tickets"], reply["attempts"], strict=True))
        for log in reply["logs"]:
            self.take_log(work, reply["shards"], **log)
        if work:
            self.flight.append((list(work), list(work.values()), self.serving))
        return True

    def take_log(
        self,
        work: dict[int, int],
        where: dict[int, dict],
        holder: int,
        ticket: int,
        attempt: int,
        shards: list[int],
    ) -> None:
        """What an earlier incarnation has made is still there; spares are put as they are."""
        lies = [self.shards[where[number]["name"]][ticket] for number in shards]
        tokens: dict[int, list[int]] = {}
        for part in lies:
            tokens |= {
                k: [*tokens.get(k, [])[:start], *made]
                for k, (start, made) in part["episodes"].items()
            }
        made_by = sorted({code for part in lies for code in part["made_by"]})
        assert all(self.alive(Version.decode(code)) for code in made_by)
        lowest = min(Version.decode(code).number for code in made_by)
        assert lowest >= self.plan.step_of(holder) - self.plan.max_staleness
        if (ticket, attempt) == (holder, work[holder]):
            assert tokens == self.durable[holder], "nothing that was appended is lost"
            self.known[holder] = {"tokens": tokens, "made_by": made_by}
            return
        del work[holder]
        rows = {holder: self.generated(holder, made_by)}
        assert self.put("rollout", rows, GENERATED) == {}

    def give_back(self, choice: int) -> bool:
        """An engine leaves: whoever is admitted next goes on with what the log has."""
        tickets, *_ = self.flight.pop(choice % len(self.flight))
        for ticket in tickets:
            self.ask("rollout", "give_back", ticket=ticket)
            self.known.pop(ticket, None)
        return True

    def append_some(self, choice: int) -> bool:
        """Append a few tokens more of one episode, or drop what cannot be read."""
        tickets, attempts, version = self.flight[choice % len(self.flight)]
        ticket, k, code = tickets[0], choice % 2, max(version, self.serving).encode()
        if choice % 9 == 8:
            self.ask(
                "rollout", "drop_attempt", ticket=ticket, attempt=attempts[0], reason="unusable"
            )
            self.known.pop(ticket, None)
            return True
        known = self.known.get(ticket, {"tokens": {}, "made_by": []})
        before = known["tokens"].get(k, [])
        # Of those before, the last ones again: the answer to whoever appended them may have been
        # lost.
        start, fresh = (
            max(0, len(before) - choice % 3),
            [next(self.drawn) for _ in range(1 + choice % 3)],
        )
        part = {
            "episodes": {k: (start, [*before[start:], *fresh])},
            "made_by": sorted({*known["made_by"], code}),
        }
        refused = self.append(ticket, attempts[0], part)
        # After a rollback the engine may go on by weights that are too old for the step, with
        # tokens that are dropped.
        rolled_back = (
            {"stale_version", "gap"} if len(self.service.state.lineage.starts) > 1 else set()
        )
        assert set(refused.values()) <= {"rolled_back", "not_owner", *rolled_back}, refused
        if not refused:
            tokens = known["tokens"] | {k: [*before, *fresh]}
            self.known[ticket] = {"tokens": tokens, "made_by": part["made_by"]}
            self.durable[ticket] = dict(tokens)
        return True

    def over_sample(self, choice: int) -> bool:
        """Append a whole attempt that no ticket asked for."""
        if self.serving == NOTHING:
            return False
        part = {
            "episodes": {0: (0, [1, 2]), 1: (0, [3] * (1 + choice % 3))},
            "made_by": [self.serving.encode()],
        }
        refused = self.append(choice, 100, part, spare=True)
        assert set(refused.values()) <= {
            "rolled_back",
            "stale_version",
            "no_room",
            "unwanted",
            "duplicate",
        }, refused
        return True

    def append(self, ticket: int, attempt: int, part: dict, spare: bool = False) -> dict[int, str]:
        name = f"s{next(self.names)}"
        self.shards[name] = {ticket: part}
        segments = [
            [k, 0, start, len(made), int(spare)] for k, (start, made) in part["episodes"].items()
        ]
        log = {
            "ticket": ticket,
            "attempt": attempt,
            "segments": segments,
            "versions": part["made_by"],
        }
        put = {"shard": {"name": name, "bytes": BYTES}, "logs": [log], "fields": list(UNSCORED)}
        reply = self.ask("rollout", "append", spare=spare, **put)
        self.tidy_up()
        return reply["refused"]

    def check_room(self, tickets: list[int]) -> None:
        """Beyond the step that is trained next, nothing starts for which there is no room."""
        state, plan = self.service.state, self.plan
        ahead = [
            ticket for ticket in tickets if plan.step_of(ticket) > state.progress.trained_steps
        ]
        fresh = [
            ticket
            for ticket in ahead
            if state.groups[ticket].attempt == 0 and ticket not in self.begun
        ]
        waiting = sum(sum(self.declared[ticket]) for ticket in state.tickets.untrained)
        rows = waiting + len(state.tickets.generating) * plan.samples_per_prompt
        assert not ahead or state.shards.untrained_bytes < plan.max_bytes
        assert not fresh or rows <= plan.max_rows
        self.begun.update(tickets)

    def finish(self, choice: int) -> bool:
        if choice % 6 == 5:
            return self.over_sample(choice)
        if not self.flight:
            return False
        if choice % 5 == 4:
            return self.append_some(choice)
        if choice % 8 == 7:
            return self.give_back(choice)
        tickets, attempts, version = self.flight.pop(choice % len(self.flight))
        if choice % 7 == 6:
            answer = self.ask(
                "rollout", "fail", ticket=tickets[0], attempt=attempts[0], reason="reward"
            )
            self.known.pop(tickets[0], None)
            work = {tickets[0]: answer["attempt"]}
            for log in answer["logs"]:
                self.take_log(work, answer["shards"], **log)
            tickets = [*work, *tickets[1:]]
            if not tickets:
                return True
        rows = {}
        for ticket in tickets:
            known = self.known.pop(ticket, {"made_by": []})
            made_by = sorted({version.encode(), self.serving.encode(), *known["made_by"]})
            rows[ticket] = self.generated(ticket, made_by)
        refused = self.put("rollout", rows, GENERATED)
        assert set(refused.values()) <= {"rolled_back"}, refused
        return True

    def generated(self, ticket: int, made_by: list[int]) -> dict[str, Any]:
        """Rows of a prompt group, whose episodes have one or more, other ones at every attempt."""
        attempt = next(self.shapes)
        episodes = bytes(max(1, (attempt + 5 * k) % 4) for k in range(self.plan.samples_per_prompt))
        lengths = [3 + (7 * ticket + 3 * k) % 5 for k in range(sum(episodes))]
        return {"episodes": episodes, "lengths": lengths, "made_by": made_by, "generated": made_by}

    def alive(self, version: Version) -> bool:
        return version in self.service.state.lineage

    def act_actor_fwd(self, choice: int) -> bool:
        if (self.scoring == NOTHING or choice % 3 < 2) and self.follow():
            return True
        if self.scoring == NOTHING:
            return False
        if self.scored is None:
            self.scored = self.claim("actor_fwd")
            return self.scored is not None
        claim, self.scored = self.scored, None
        if self.scoring.number < claim["min_version"]:
            self.ask("actor_fwd", "release", lease=claim["lease"])
            return self.follow()
        self.read("actor_fwd", claim)
        code = self.scoring.encode()
        rows = {
            ticket: {"made_by": [code], "old": code, "episodes": self.declared[ticket]}
            for ticket in claim["tickets"]
        }
        self.put("actor_fwd", rows, GIVES["actor_fwd"], claim["lease"])
        return True

    def follow(self) -> bool:
        version = self.pull("actor_fwd", self.scoring)
        self.scoring = version or self.scoring
        return version is not None

    def middle(self, role: str) -> bool:
        claim = getattr(self, role)
        if claim is None:
            setattr(self, role, self.claim(role))
            return getattr(self, role) is not None
        setattr(self, role, None)
        self.read(role, claim)
        rows = {ticket: {"episodes": self.declared[ticket]} for ticket in claim["tickets"]}
        self.put(role, rows, GIVES[role], claim["lease"])
        return True

    def act_reference(self, choice: int) -> bool:
        return self.middle("reference")

    def act_advantages(self, choice: int) -> bool:
        return self.middle("advantages")

    def claim(self, task: str) -> dict[str, Any] | None:
        boundary = self.plan.prompts_per_step // (self.minis if task == "actor" else 1)
        dealt = (
            {"ranks": RANKS, "max_tokens": MAX_TOKENS, "batch": len(self.leases)}
            if task == "actor"
            else {}
        )
        claim = self.ask(task, "claim", task=task, budget=self.budget, boundary=boundary, **dealt)
        if claim is None or claim.get("finished"):
            return None
        tickets = claim["tickets"]
        place = claim["place"] if dealt and self.service.state.tasks.in_sets else tickets[0]
        at_once = 1 if dealt and self.service.state.tasks.in_sets else tickets[-1] - tickets[0] + 1
        rows = [tokens for row in self.read(task, claim).values() for tokens in row["lengths"]]
        assert tickets == sorted(tickets) and place // boundary == (place + at_once - 1) // boundary
        assert len(tickets) == 1 or sum(rows) <= self.budget
        for batch in [batch for rank in claim["assignment"] for batch in rank]:
            assert len(batch) == 1 or sum(rows[number] for number in batch) <= MAX_TOKENS
        return claim

    def act_actor(self, choice: int) -> bool:
        if self.step < 0:
            return self.resume()
        if self.announced:
            return self.save_or_go_on()
        if self.step >= self.plan.steps:
            return False
        if len(self.held) < self.plan.prompts_per_step:
            return self.quarantine() if choice == 11 else self.take_window()
        if choice % 4 and self.look_ahead():
            return True
        if self.settles and (moved := self.settle()) is not None:
            return moved
        self.ask(
            "actor",
            "publish",
            version=str(Version(self.incarnations["actor"], self.step + 1)),
            digest="d",
        )
        try:
            if self.ask("actor", "trained", step=self.step, leases=self.leases) is None:
                return False
        except Refused:
            assert self.slow_disk and not self.settles
            self.lost_steps += 1
            self.kill("actor", False)
            return True
        self.step, self.leases, self.held, self.announced = self.step + 1, [], [], True
        return True

    def settle(self) -> bool | None:
        """None when all that is held is on disk; begins the step anew if some of it was lost."""
        held = self.ask("actor", "settled", leases=self.leases)
        if held is None:
            return False
        if held["tickets"] == sorted(self.held):
            return None
        for lease in [*self.leases, *([self.ahead["lease"]] if self.ahead else [])]:
            self.ask("actor", "release", lease=lease)
        self.leases, self.held, self.ahead = [], [], None
        self.lost_steps += 1
        return True

    def resume(self) -> bool:
        points = [0, *(point["step"] for point in self.ask("actor", "checkpoints")["checkpoints"])]
        self.step = points[max(0, len(points) - 1 - self.older)]
        self.older = 0
        self.ask("actor", "resume", step=self.step)
        self.ask(
            "actor",
            "publish",
            version=str(Version(self.incarnations["actor"], self.step)),
            digest="d",
        )
        return True

    def save_or_go_on(self) -> bool:
        self.announced = False
        if self.step % self.save_every == 0 or self.step == self.plan.steps:
            self.ask(
                "actor",
                "checkpoint",
                step=self.step,
                name=f"{self.incarnations['actor']}-{self.step}",
                digest="d",
            )
        return True

    def quarantine(self) -> bool:
        """Find a row of a window bad, and give the rest of it back."""
        claim = self.claim("actor")
        if claim is None:
            return False
        self.ask(
            "actor",
            "quarantine",
            lease=claim["lease"],
            tickets=claim["tickets"][:1],
            reason="media_mismatch",
        )
        self.ask("actor", "release", lease=claim["lease"])
        return True

    def take_window(self) -> bool:
        claim, self.ahead = self.ahead or self.window(self.step), None
        if claim is None:
            return False
        assert claim["step"] == self.step
        self.leases.append(claim["lease"])
        self.held.extend(claim["tickets"])
        return True

    def look_ahead(self) -> bool:
        """Take the next step's first window, or one of this step whose rows were lost, before this
        step is trained."""
        if self.ahead or not self.settles or self.step + 1 >= self.plan.steps:
            return False
        self.ahead = self.window(self.step + 1)
        return self.ahead is not None

    def window(self, step: int) -> dict[str, Any] | None:
        """A claim of ``step``, or of the one before."""
        claim = self.claim("actor")
        for ticket, row in self.rows(claim).items() if claim else ():
            made_for = claim["step"]
            assert self.service.state.tasks.in_sets or made_for == self.plan.step_of(ticket)
            assert made_for in (self.step, step)
            versions = [Version.decode(code) for code in row["generated"]]
            assert all(self.alive(version) for version in versions)
            assert min(version.number for version in versions) >= made_for - self.plan.max_staleness
            old = Version.decode(row["old"])
            assert self.alive(old) and (self.plan.max_staleness or old.number == made_for)
        return claim

    # -- the end -----------------------------------------------------------------------------------

    def go_to_the_end(self, rounds: int = 600) -> None:
        """No more faults: the run must finish, with every row that was declared last trained
        once."""
        for round_ in range(rounds):
            moved = [self.act(role, choice) for role in GROUPS for choice in (0, 1, 2, 3)]
            if self.service.state.progress.finished() and not any(moved):
                break
            assert any(moved), f"deadlock in round {round_}: {contents(self.service.state)}"
        assert self.service.state.progress.finished(), contents(self.service.state)
        assert len(self.declared) == self.plan.steps * self.plan.prompts_per_step
        last = {
            name for ticket, episodes in self.declared.items() for name in row_ids(ticket, episodes)
        }
        assert {name for name, what in self.status.items() if what == "trained"} == last
        assert set(self.status.values()) <= {"trained", "dropped"}
        assert contents(self.service.replayed()) == contents(self.service.state)
        assert not self.service.state.segments.logs


def refused_kind(service: InMemory, *args: Any, **kwargs: Any) -> str:
    """The kind of refusal of a request, '' if it is taken."""
    try:
        service.ask(*args, **kwargs)
    except Refused as refusal:
        return refusal.kind
    return ""
