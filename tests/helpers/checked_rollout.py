"""The rollout role in a `CheckedQueue`: it generates, appends segments, and resumes from logs."""

from __future__ import annotations

from typing import Any

from relax_hpc.base.versions import Version
from relax_hpc.queue.plan import GENERATED, UNSCORED
from tests.helpers.checked_queue import BYTES, CheckedQueue

NOTHING = Version(0, 0)


class CheckedRollout(CheckedQueue):
    """Acts of the rollout role. An act returns whether it changed anything.

    The argument ``choice`` of an act selects among several possible ones.
    """

    def reset_memory(self, role: str) -> None:
        if role == "rollout":
            self.serving, self.flight, self.due, self.known = NOTHING, [], None, {}
        else:
            super().reset_memory(role)

    def pull(self, role: str, serving: Version) -> Version | None:
        """Load the next version after ``serving``. None if there is no newer version."""
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
        shards_by_number: dict[int, dict],
        holder: int,
        ticket: int,
        attempt: int,
        shards: list[int],
    ) -> None:
        """Resume ``holder`` from a log of an earlier incarnation. A spare is put unchanged."""
        tokens: dict[int, list[int]] = {}
        version_codes = set[int]()
        for number in shards:
            segment = self.shards[shards_by_number[number]["name"]][ticket]
            version_codes.update(segment["made_by"])
            for episode, (start, appended) in segment["episodes"].items():
                tokens[episode] = [*tokens.get(episode, [])[:start], *appended]
        made_by = sorted(version_codes)
        assert all(self.alive(Version.decode(code)) for code in made_by)
        lowest = min(Version.decode(code).number for code in made_by)
        assert lowest >= self.plan.step_of(holder) - self.plan.max_staleness
        if (ticket, attempt) == (holder, work[holder]):
            assert tokens == self.durable[holder], "no appended token may be lost"
            self.known[holder] = {"tokens": tokens, "made_by": made_by}
            return
        del work[holder]
        rows = {holder: self.generated(holder, made_by)}
        assert self.put("rollout", rows, GENERATED) == {}

    def give_back(self, choice: int) -> bool:
        """Release the tickets of an engine that stops. Their next owner resumes from the log."""
        tickets, *_ = self.flight.pop(choice % len(self.flight))
        for ticket in tickets:
            self.ask("rollout", "give_back", ticket=ticket)
            self.known.pop(ticket, None)
        return True

    def append_some(self, choice: int) -> bool:
        """Append a few tokens of one episode, or drop an attempt that cannot be read."""
        tickets, attempts, version = self.flight[choice % len(self.flight)]
        ticket, episode = tickets[0], choice % 2
        code = max(version, self.serving).encode()
        if choice % 9 == 8:
            self.ask(
                "rollout", "drop_attempt", ticket=ticket, attempt=attempts[0], reason="unusable"
            )
            self.known.pop(ticket, None)
            return True
        log = self.known.get(ticket, {"tokens": {}, "made_by": []})
        before = log["tokens"].get(episode, [])
        # Append up to two earlier tokens again, as after a lost reply.
        start = max(0, len(before) - choice % 3)
        new_tokens = [next(self.drawn) for _ in range(1 + choice % 3)]
        segment = {
            "episodes": {episode: (start, [*before[start:], *new_tokens])},
            "made_by": sorted({*log["made_by"], code}),
        }
        refused = self.append(ticket, attempts[0], segment)
        # After a rollback the engine may continue with weights that are too old for the step. Then
        # its tokens are dropped.
        rolled_back = (
            {"stale_version", "gap"} if len(self.service.state.lineage.starts) > 1 else set()
        )
        assert set(refused.values()) <= {"rolled_back", "not_owner", *rolled_back}, refused
        if not refused:
            tokens = log["tokens"] | {episode: [*before, *new_tokens]}
            self.known[ticket] = {"tokens": tokens, "made_by": segment["made_by"]}
            self.durable[ticket] = dict(tokens)
        return True

    def over_sample(self, choice: int) -> bool:
        """Append a whole attempt without a ticket."""
        if self.serving == NOTHING:
            return False
        segment = {
            "episodes": {0: (0, [1, 2]), 1: (0, [3] * (1 + choice % 3))},
            "made_by": [self.serving.encode()],
        }
        refused = self.append(choice, 100, segment, spare=True)
        assert set(refused.values()) <= {
            "rolled_back",
            "stale_version",
            "no_room",
            "unwanted",
            "duplicate",
        }, refused
        return True

    def append(
        self, ticket: int, attempt: int, segment: dict, spare: bool = False
    ) -> dict[int, str]:
        """Append a segment of an attempt, and return the reason of each refused ticket."""
        name = f"s{next(self.names)}"
        self.shards[name] = {ticket: segment}
        segments = [
            [episode, 0, start, len(tokens), int(spare)]
            for episode, (start, tokens) in segment["episodes"].items()
        ]
        log = {
            "ticket": ticket,
            "attempt": attempt,
            "segments": segments,
            "versions": segment["made_by"],
        }
        put = {"shard": {"name": name, "bytes": BYTES}, "logs": [log], "fields": list(UNSCORED)}
        reply = self.ask("rollout", "append", spare=spare, **put)
        self.remove_garbage()
        return reply["refused"]

    def check_room(self, tickets: list[int]) -> None:
        """Check that later steps than the next one only start if the queue has room for them."""
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
            log = self.known.pop(ticket, {"made_by": []})
            made_by = sorted({version.encode(), self.serving.encode(), *log["made_by"]})
            rows[ticket] = self.generated(ticket, made_by)
        refused = self.put("rollout", rows, GENERATED)
        assert set(refused.values()) <= {"rolled_back"}, refused
        return True

    def generated(self, ticket: int, made_by: list[int]) -> dict[str, Any]:
        """Rows of a prompt group. The number of rows of its episodes varies with the attempt."""
        shape = next(self.shapes)
        episodes = bytes(max(1, (shape + 5 * k) % 4) for k in range(self.plan.samples_per_prompt))
        lengths = [3 + (7 * ticket + 3 * k) % 5 for k in range(sum(episodes))]
        return {"episodes": episodes, "lengths": lengths, "made_by": made_by, "generated": made_by}
