"""The rows of a trainer role's steps, window after window, each as soon as it is there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from typing import Any

from relax_hpc.base.errors import DeadlineError, RelaxError
from relax_hpc.config.schema import TrainerConfig
from relax_hpc.queue.client import Claim, QueueClient
from relax_hpc.queue.presence import longest_wait_s
from relax_hpc.queue.process_context import HUB, Context
from relax_hpc.roles.prefetch import Prefetch, Window
from relax_hpc.roles.ranks import Ranks
from relax_hpc.roles.step_clock import AtEdge, StepClock

_LOOK_S = 0.2
DISK = ("disk", "settled on disk")
"""Cause of a trainer's wait when rows that it has are not safe yet."""


class Aside:
    """Duties of a trainer role while it waits for rows to train on: none here."""

    def due(self, step: int) -> Future | None:
        """Future, in the leader, that is done when there is work to do before ``step``; None: none
        will come."""
        return None

    def take(self) -> dict[str, Any]:
        """Message, made in the leader, that tells all ranks of the work that is due."""
        raise NotImplementedError

    def do(self, told: dict[str, Any]) -> None:
        """Called in every rank with that message: does the work."""
        raise NotImplementedError


class WindowStream:
    """One rank's; every rank makes and calls it alike. The leader alone talks to the queue.

    >>> for window in windows.of(step=7, number=0):                              # doctest: +SKIP
    ...     learn(window.rows)
    >>> if not windows.settled(7, claims):
    ...     windows.give_back(7, 0, claims)
    """

    def __init__(
        self,
        context: Context,
        ranks: Ranks,
        clock: StepClock,
        settings: TrainerConfig,
        placeholders: Mapping[str, int],
        check: Callable[[], None] = lambda: None,
        aside: Aside | None = None,
    ) -> None:
        """``check`` raises what goes wrong elsewhere in this process, which may be why no rows
        come. ``aside``: what is done while they do not."""
        self.context, self.config, self.ranks = context, context.config, ranks
        self.clock, self.check, self.aside = clock, check, aside or Aside()
        self.prefetch = Prefetch(context, ranks, settings, placeholders)
        self.settling: Future | None = None
        """Answer to the leader about the rows of the last mini-batch."""

    def of(self, step: int, number: int) -> Iterator[Window]:
        """The windows of mini-batch ``number`` in ticket order, each as soon as its rows are there.

        While one is trained on, the next is fetched, though it be another step's. With the last one
        the queue is asked whether all rows are on disk.
        """
        minis = self.config.algorithm.mini_batches
        size = self.config.prompts_per_step // minis
        first = step * self.config.prompts_per_step + number * size
        leases: list[int] = []
        tickets: set[int] = set()
        if not self.prefetch.asked:
            self.prefetch.ask(0)
        while len(tickets) < size:
            # Beyond the first update it is too late to leave the step out.
            window = self._take(step, may_end=number == 0)
            leases.append(window.claim.lease)
            check_range(window.claim, first, size)
            # A ticket whose rows were lost since it was claimed may come again.
            tickets.update(window.claim.tickets)
            last = len(tickets) >= size
            if not last:
                self.prefetch.ask(len(leases))
            else:
                if step + 1 < self.config.steps or number + 1 < minis:
                    self.prefetch.ask(0)
                if self.ranks.leader:
                    self.settling = self.context.client.training.settled(leases)
            yield replace(window, last=last)

    def settled(self, step: int, claims: list[Claim]) -> bool:
        """Whether all rows of ``claims``, which `of` has asked about, are on disk; if not, some
        were lost."""
        with self.context.spans("wait", step=step, cause=DISK):
            held = self.ranks.tell(self.settling if self.ranks.leader else None)
        return len(held) == sum(len(claim.tickets) for claim in claims)

    def give_back(self, step: int, number: int, claims: list[Claim]) -> None:
        """Hold nothing of mini-batch ``number`` any more, nor what was asked for last: it may be of
        this one too."""
        for claim in claims:
            self._release(claim)
        if self.prefetch.asked:
            self._release(self._take(step, may_end=number == 0).claim)

    def _release(self, claim: Claim) -> None:
        self.ranks.ask(lambda client: client.release(claim))

    def _wait(
        self,
        work: Future,
        may_end: bool,
        what: str = "no rows to train on came",
        other: Future | None = None,
    ) -> str:
        """Wait for an answer of the queue, or for ``other``, in the leader; why the role has to end
        before, if it ``may_end``.

        DeadlineError, which says ``what`` was waited for in vain."""
        patience, client = self.config.queue.wait_timeout_s, self.context.client
        longest, until, stood = (
            longest_wait_s(self.config),
            time.monotonic() + patience,
            client.beat.paused_s,
        )
        while not wait([work, *([other] if other else [])], _LOOK_S, FIRST_COMPLETED).done:
            # While somebody is not there, the clock stands.
            if time.monotonic() > until + min(client.beat.paused_s - stood, longest):
                where = f"the logs of the group that is behind in {self.context.run.root / 'logs'}"
                raise DeadlineError(f"{what} for {patience:g} s; see relax-hpc status, and {where}")
            self.ranks.control.extend_wait()
            self.check()
            if may_end and (reason := self.why_end()):
                return reason
        return ""

    def ask(self, step: int, cause: tuple[str, str], ask: Callable[[QueueClient], Future]) -> Any:
        """Ask the queue and wait for its answer, a message, in every rank; AtEdge if the role has
        to end before."""
        told: dict[str, Any] = {}
        with self.context.spans("wait", step=step, cause=cause):
            if self.ranks.leader:
                work = ask(self.context.client)
                reason = self._wait(
                    work, may_end=True, what=f"{cause[0]}: {cause[1]}: waited in vain"
                )
                told = {"reason": reason, "answer": None if reason else work.result()}
            told = self.ranks.tell(told)
        if told["reason"]:
            raise AtEdge(told["reason"])
        return told["answer"]

    def why_end(self) -> str:
        """Reason why another step must not begin; empty: it may."""
        return self.clock.reason(self.context.stop.is_set())

    def _take(self, step: int, may_end: bool) -> Window:
        """The window that was asked for, in every rank; AtEdge if the role has to end before, and
        ``may_end``."""
        asked = self.prefetch.asked
        while True:
            with self.context.spans("wait", step=step, cause=HUB) as waiting:
                told = self.ranks.tell(
                    self._next(asked, step, may_end) if self.ranks.leader else None
                )
                if told["reason"]:
                    raise AtEdge(told["reason"])
                if not told["aside"]:
                    window = asked.result()
                    waiting.set_causes(window.claim.waited)
                    self.prefetch.taken()
                    return window
            self.aside.do(told["aside"])

    def _next(self, asked: Future, step: int, may_end: bool) -> dict[str, Any]:
        """Message of the leader to the ranks: why the role has to end, what is done aside, or that
        the window is there."""
        other = self.aside.due(step)
        reason = self._wait(asked, may_end, other=other)
        goes_aside = not reason and not asked.done()
        return {"reason": reason, "aside": self.aside.take() if goes_aside else {}}


def check_range(claim: Claim, first: int, size: int) -> None:
    """RelaxError unless ``claim`` has some of the ``size`` places in the order of training from
    ``first`` on."""
    if not first <= claim.place < first + size:
        found = f"places from {claim.place} on in the order of training"
        raise RelaxError(
            f"claim: found {found}, expected those of {first} to {first + size - 1}; its group "
            "starts again"
        )
