"""The rows of a trainer role's steps: window after window, each when its rows exist."""

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
from relax_hpc.roles.step_clock import StepClock, StopBeforeStep

_LOOK_S = 0.2
DISK = ("disk", "settled on disk")
"""Cause of a trainer's wait for its rows to be on disk."""


class IdleWork:
    """Work of a trainer role while it waits for rows to train on. The default has none."""

    def due(self, step: int) -> Future | None:
        """Return a Future, in the leader, that is done when there is work to do before ``step``;
        None if there will be no work."""
        return None

    def take(self) -> dict[str, Any]:
        """Return the message, in the leader, that describes the work to all ranks."""
        raise NotImplementedError

    def do(self, message: dict[str, Any]) -> None:
        """Do the work of ``message``. It is called in every rank."""
        raise NotImplementedError


Aside = IdleWork  # Name in release 0.1.


class WindowStream:
    """Windows of one rank. Every rank creates it and makes the same calls. Only the leader talks to
    the queue.

    ::

        for window in windows.take_windows(step=7, number=0):
            learn(window.rows)
        if not windows.settled(7, claims):
            windows.give_back(7, 0, claims)
    """

    def __init__(
        self,
        context: Context,
        ranks: Ranks,
        clock: StepClock,
        settings: TrainerConfig,
        placeholders: Mapping[str, int],
        check: Callable[[], None] = lambda: None,
        idle_work: IdleWork | None = None,
    ) -> None:
        """``check`` raises errors of background work in this process, which may be the reason why
        no rows arrive. ``idle_work`` is done while none arrive."""
        self.context, self.config, self.ranks = context, context.config, ranks
        self.clock, self.check, self.idle_work = clock, check, idle_work or IdleWork()
        self.prefetch = Prefetch(context, ranks, settings, placeholders)
        self.settling: Future | None = None
        """The queue's answer to the leader about the rows of the last mini-batch."""

    def take_windows(self, step: int, number: int) -> Iterator[Window]:
        """Yield the windows of mini-batch ``number`` in ticket order, each when its rows exist.

        The next window, also of another step, is fetched during training on the present one. With
        the last window the queue is asked whether all rows are on disk.
        """
        minis = self.config.algorithm.mini_batches
        size = self.config.prompts_per_step // minis
        first = step * self.config.prompts_per_step + number * size
        leases: list[int] = []
        tickets: set[int] = set()
        if not self.prefetch.asked:
            self.prefetch.ask(0)
        while len(tickets) < size:
            # After the first update the step must be completed.
            window = self._take(step, may_end=number == 0)
            leases.append(window.claim.lease)
            check_range(window.claim, first, size)
            # A ticket whose rows were lost after the claim may appear a second time.
            tickets.update(window.claim.tickets)
            last = len(tickets) >= size
            if not last:
                self.prefetch.ask(len(leases))
            else:
                if step + 1 < self.config.steps or number + 1 < minis:
                    self.prefetch.ask(0)
                if self.ranks.leader:
                    assert self.context.client is not None
                    self.settling = self.context.client.training.settled(leases)
            yield replace(window, last=last)

    def settled(self, step: int, claims: list[Claim]) -> bool:
        """Whether all rows of ``claims``, about which `take_windows` has asked, are on disk. If
        not, some were lost."""
        with self.context.spans("wait", step=step, cause=DISK):
            held = self.ranks.tell(self.settling if self.ranks.leader else None)
        return len(held) == sum(len(claim.tickets) for claim in claims)

    def give_back(self, step: int, number: int, claims: list[Claim]) -> None:
        """Release the claims of mini-batch ``number``, and the requested window, which may belong
        to the same mini-batch."""
        for claim in claims:
            self._release(claim)
        if self.prefetch.asked:
            self._release(self._take(step, may_end=number == 0).claim)

    def _release(self, claim: Claim) -> None:
        self.ranks.ask_queue(lambda client: client.release(claim))

    def _wait(
        self,
        work: Future,
        may_end: bool,
        awaited: str = "no rows to train on came",
        other: Future | None = None,
    ) -> str:
        """Wait in the leader for ``work``, an answer of the queue, or for ``other``. If the role
        has to end before and ``may_end`` is set, return the reason.

        DeadlineError: the wait takes too long; ``awaited`` describes it.
        """
        timeout_s, client = self.config.queue.wait_timeout_s, self.context.client
        assert client is not None
        longest_s = longest_wait_s(self.config)
        until = time.monotonic() + timeout_s
        paused_before_s = client.beat.paused_s
        futures = [work, other] if other else [work]
        while not wait(futures, _LOOK_S, FIRST_COMPLETED).done:
            # The timeout does not run while a group is pending or is being replaced.
            paused_s = min(client.beat.paused_s - paused_before_s, longest_s)
            if time.monotonic() > until + paused_s:
                logs = self.context.run.root / "logs"
                raise DeadlineError(
                    f"{awaited} for {timeout_s:g} s; see relax-hpc status, and the logs of the "
                    f"group that is behind in {logs}"
                )
            self.ranks.control.extend_wait()
            self.check()
            reason = self.stop_reason() if may_end else ""
            if reason:
                return reason
        return ""

    def ask_queue(
        self, step: int, cause: tuple[str, str], request: Callable[[QueueClient], Future]
    ) -> Any:
        """Send a request to the queue and return its answer, a message, in every rank.

        StopBeforeStep: the role has to end before.
        """
        message: dict[str, Any] = {}
        with self.context.spans("wait", step=step, cause=cause):
            if self.ranks.leader:
                assert self.context.client is not None
                work = request(self.context.client)
                reason = self._wait(
                    work, may_end=True, awaited=f"{cause[0]}: {cause[1]}: no answer of the queue"
                )
                message = {"reason": reason, "answer": None if reason else work.result()}
            message = self.ranks.tell(message)
        if message["reason"]:
            raise StopBeforeStep(message["reason"])
        return message["answer"]

    def stop_reason(self) -> str:
        """Return the reason why no further step may begin; empty if it may."""
        return self.clock.stop_reason(self.context.stop.is_set())

    def _take(self, step: int, may_end: bool) -> Window:
        """Return the requested window in every rank. StopBeforeStep: the role has to end before,
        and ``may_end`` is set."""
        requested = self.prefetch.asked
        assert requested is not None
        while True:
            with self.context.spans("wait", step=step, cause=HUB) as waiting:
                message = self.ranks.tell(
                    self._next(requested, step, may_end) if self.ranks.leader else None
                )
                if message["reason"]:
                    raise StopBeforeStep(message["reason"])
                if not message["aside"]:
                    window = requested.result()
                    waiting.set_causes(window.claim.waited)
                    self.prefetch.taken()
                    return window
            self.idle_work.do(message["aside"])

    def _next(self, requested: Future, step: int, may_end: bool) -> dict[str, Any]:
        """Return the leader's message to the ranks: the reason to end, work to do while idle, or
        neither if the window exists."""
        other = self.idle_work.due(step)
        reason = self._wait(requested, may_end, other=other)
        has_idle_work = not reason and not requested.done()
        return {"reason": reason, "aside": self.idle_work.take() if has_idle_work else {}}


def check_range(claim: Claim, first: int, size: int) -> None:
    """RelaxError: the place of ``claim`` in the order of training is not among the ``size`` places
    from ``first`` on."""
    if not first <= claim.place < first + size:
        raise RelaxError(
            f"claim: found places from {claim.place} on in the order of training, expected "
            f"those of {first} to {first + size - 1}; its group restarts"
        )
