"""A whole run in memory: roles that work, die and restart, on a `CheckedQueue`."""

from __future__ import annotations

import itertools
from typing import Any

from relax_hpc.base.versions import Version
from relax_hpc.queue.controller.messages import Refused
from relax_hpc.queue.row_ids import row_ids
from tests.helpers.checked_queue import GROUPS, GoneError
from tests.helpers.checked_rollout import NOTHING, CheckedRollout
from tests.helpers.queue_helpers import GIVES
from tests.helpers.queue_in_memory import contents

RANKS, MAX_TOKENS = 2, 12
"""Data ranks of the actor, and tokens of one of its micro-batches."""


class World(CheckedRollout):
    """All roles of a run. `act` lets a role do one thing; `kill` ends its process."""

    def reset_memory(self, role: str) -> None:
        if role == "actor":
            self.step, self.leases, self.held, self.announced, self.ahead = -1, [], [], False, None
        elif role == "actor_fwd":
            self.scoring, self.scored = NOTHING, None
        else:
            super().reset_memory(role)

    def act(self, role: str, choice: int = 0) -> bool:
        """Let ``role`` do one thing, and return whether it did. ``choice`` selects among several."""
        if choice % 3 == 0 and self.save(role):
            return True
        if choice % 7 == 1:
            self.gather()
        try:
            return getattr(self, "act_" + role)(choice)
        except GoneError:
            return True

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
        """Load the next version into actor_fwd."""
        version = self.pull("actor_fwd", self.scoring)
        self.scoring = version or self.scoring
        return version is not None

    def score(self, role: str) -> bool:
        """Claim rows, or put the fields of the rows that ``role`` has claimed."""
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
        return self.score("reference")

    def act_advantages(self, choice: int) -> bool:
        return self.score("advantages")

    def claim(self, task: str) -> dict[str, Any] | None:
        boundary = self.plan.prompts_per_step // (self.minis if task == "actor" else 1)
        assignment = (
            {"ranks": RANKS, "max_tokens": MAX_TOKENS, "batch": len(self.leases)}
            if task == "actor"
            else {}
        )
        claim = self.ask(
            task, "claim", task=task, budget=self.budget, boundary=boundary, **assignment
        )
        if claim is None or claim.get("finished"):
            return None
        tickets = claim["tickets"]
        lengths = list[int]()
        for row in self.read(task, claim).values():
            lengths += row["lengths"]
        first, last = tickets[0], tickets[-1]
        if assignment and self.service.state.tasks.in_sets:
            first = last = claim["place"]
        assert tickets == sorted(tickets) and first // boundary == last // boundary
        assert len(tickets) == 1 or sum(lengths) <= self.budget
        for rank in claim["assignment"]:
            for batch in rank:
                assert len(batch) == 1 or sum(lengths[row] for row in batch) <= MAX_TOKENS
        return claim

    def act_actor(self, choice: int) -> bool:
        if self.step < 0:
            return self.resume()
        if self.announced:
            return self.save_or_continue()
        if self.step >= self.plan.steps:
            return False
        if len(self.held) < self.plan.prompts_per_step:
            return self.quarantine() if choice == 11 else self.take_window()
        if choice % 4 and self.look_ahead():
            return True
        moved = self.settle() if self.settles else None
        if moved is not None:
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
        """Ask whether all held rows are on disk: None if they are, False if the actor has to wait.

        If some rows were lost, release all leases, so that the step starts again: True.
        """
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

    def save_or_continue(self) -> bool:
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
        """Quarantine one prompt group of a window, and release the other ones."""
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
        """Claim the next step's first window before this step is trained.

        If rows of this step were lost, the claim may be for this step.
        """
        if self.ahead or not self.settles or self.step + 1 >= self.plan.steps:
            return False
        self.ahead = self.window(self.step + 1)
        return self.ahead is not None

    def window(self, step: int) -> dict[str, Any] | None:
        """A claim for ``step``, or for the step before."""
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

    def go_to_the_end(self, rounds: int = 600) -> None:
        """Run without faults to the end. Rows of the newest put of each ticket must be trained
        once."""
        for round_ in range(rounds):
            moved = [
                self.act(role, choice) for role, choice in itertools.product(GROUPS, (0, 1, 2, 3))
            ]
            if self.service.state.progress.finished() and not any(moved):
                break
            assert any(moved), f"deadlock in round {round_}: {contents(self.service.state)}"
        assert self.service.state.progress.finished(), contents(self.service.state)
        assert len(self.declared) == self.plan.steps * self.plan.prompts_per_step
        declared = set[str]()
        for ticket, episodes in self.declared.items():
            declared.update(row_ids(ticket, episodes))
        assert {name for name, status in self.status.items() if status == "trained"} == declared
        assert set(self.status.values()) <= {"trained", "dropped"}
        assert contents(self.service.replayed()) == contents(self.service.state)
        assert not self.service.state.segments.logs
