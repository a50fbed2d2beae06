"""The bound of staleness at the queue's door: what is too old is refused where it is put, whoever
let it be made.

Admission and forward roles keep to the bound by themselves; these are the checks that hold when one
of them errs.
"""

from __future__ import annotations

import pytest

from relax_hpc.base.versions import Version
from relax_hpc.queue.lengths import pack_lengths
from relax_hpc.queue.plan import GENERATED, Plan
from tests.helpers.queue_helpers import BUDGET, GIVES, small
from tests.helpers.queue_in_memory import InMemory


class Queue(InMemory):
    """One prompt group a step, so that tickets are steps. The actor has published all versions up
    to ``newest``."""

    def __init__(self, staleness: int, newest: int) -> None:
        super().__init__(Plan.from_config(small(groups=1, steps=6, staleness=staleness)))
        self.names = iter(range(100))
        self.by("actor", "resume", step=0)
        for number in range(newest + 1):
            self.by("actor", "publish", version=str(Version(1, number)), digest="d")

    def by(self, group: str, op: str, **args: object) -> dict:
        answer = self.ask(group, 1, f"k{next(self.names)}", op, **args)
        assert answer is not None, f"{op} waits"
        return answer

    def admit(self, version: int) -> list[int]:
        """All tickets that an engine which serves this version may start."""
        self.by("rollout", "serve", reader="engine", version=str(Version(1, version)))
        return self.by("rollout", "admit", reader="engine", count=BUDGET)["tickets"]

    def put(
        self,
        group: str,
        ticket: int,
        versions: list[int],
        fields: tuple[str, ...] = GENERATED,
        lease: int = 0,
    ) -> dict:
        """Why what these versions made for a ticket was refused, if it was."""
        codes = [Version(1, number).encode() for number in versions]
        lengths = pack_lengths([] if lease else [3, 3])
        rows = [{"ticket": ticket, "episodes": b"\1\1", "lengths": lengths, "versions": codes}]
        shard = {"name": f"{group}-i000001-{next(self.names)}"}
        return self.by(group, "put", shard=shard, rows=rows, fields=list(fields), lease=lease)[
            "refused"
        ]

    def claim(self, group: str) -> dict:
        return self.by(group, "claim", task=group, budget=BUDGET, boundary=1)


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_rows_with_a_token_one_version_too_old_are_refused(staleness):
    queue = Queue(staleness, newest=1)
    last = queue.admit(version=1)[-1]
    assert last == 1 + staleness, "the newest step that version 1 may make rows for"
    for versions, refused in (
        ([0], {last: "stale_version"}),
        ([0, 1], {last: "stale_version"}),
        ([1], {}),
    ):
        assert queue.put("rollout", last, versions) == refused
        assert not refused or queue.admit(version=1) == [last], "its ticket is given again"


def generated(staleness: int) -> tuple[Queue, dict]:
    """Version 1 has come, and actor_fwd has claimed step 1."""
    queue = Queue(staleness, newest=1)
    for ticket in queue.admit(version=1):
        assert queue.put("rollout", ticket, [1]) == {}
    assert queue.claim("actor_fwd")["tickets"] == [0]
    return queue, queue.claim("actor_fwd")


@pytest.mark.parametrize(
    ("staleness", "version", "refused"),
    [(0, 0, {1: "stale_version"}), (0, 1, {}), (1, 0, {}), (1, 1, {})],
)
def test_at_staleness_0_scores_by_older_weights_are_refused(staleness, version, refused):
    queue, claim = generated(staleness)
    assert queue.put("actor_fwd", 1, [version], GIVES["actor_fwd"], claim["lease"]) == refused


@pytest.mark.parametrize(("staleness", "least"), [(0, 1), (1, 0)])
def test_at_staleness_0_a_claim_says_which_weights_must_score_it(staleness, least):
    """Else a forward role that has not heard of a version yet would score its step with the one
    before."""
    _, claim = generated(staleness)
    assert (claim["step"], claim["min_version"]) == (1, least)
