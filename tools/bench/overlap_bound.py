"""What the queue's rules allow: a run in which nothing but generating and training takes time, on a
clock of its own.

A place of the engine takes the next response, in the order of tickets. A ticket is admitted when
its step is at most max_staleness ahead and the rollout has room for one, of which it has
groups_per_request x requests_in_flight; its rows come together, with its last response. The trainer
takes a window as soon as the rule of the step's set (Contract 1) has one, at staleness 0 in the
order of tickets.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Sequence

from relax_hpc.config.schema import Config


class Bound:
    """One such run; `responses` are the seconds of each response by step, in the order of tickets.

    >>> config = Config(max_staleness=1, samples_per_prompt=1)
    >>> config.rollout.engine.simulated.concurrency, config.rollout.groups_per_request = 1, 1
    >>> config.actor.simulated_step_s = 1.0
    >>> Bound([[1.0], [1.0], [1.0]], config, windows=1).trained()
    [2.0, 3.0, 4.0]
    """

    def __init__(self, responses: Sequence[Sequence[float]], config: Config, windows: int) -> None:
        self.steps, self.staleness, samples = (
            len(responses),
            config.max_staleness,
            config.samples_per_prompt,
        )
        flat = [found for step in responses for found in step]
        self.groups = [flat[start : start + samples] for start in range(0, len(flat), samples)]
        self.prompts, self.idle = (
            len(responses[0]) // samples,
            config.rollout.engine.simulated.concurrency,
        )
        self.in_flight = config.rollout.groups_per_request * config.rollout.requests_in_flight
        self.window, self.window_s = (
            self.prompts // windows,
            config.actor.simulated_step_s / windows,
        )
        self.events: list[tuple[float, int, str, int]] = []
        self.numbers = itertools.count()
        self.now, self.next = 0.0, 0
        self.waiting: deque[tuple[float, int]] = deque()
        self.left: dict[int, int] = {}
        """Last step by ticket, of those that are admitted and not trained."""
        self.ready: set[int] = set()
        self.missing: dict[int, int] = {}
        """Responses by ticket."""
        self.oldest: dict[int, int] = {}
        """Version of the oldest token by ticket, of those that are being generated."""
        self.ends: list[float] = []
        self.taken, self.trains = 0, False

    def trained(self) -> list[float]:
        """When each step is trained."""
        while len(self.ends) < self.steps:
            self.generate()
            self.train()
            self.now, _, what, ticket = heapq.heappop(self.events)
            getattr(self, what)(ticket)
        return self.ends

    def later(self, seconds: float, what: str, ticket: int = 0) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.numbers), what, ticket))

    def generate(self) -> None:
        """Admit what may be, and have free places take what waits for one."""
        version = len(self.ends)
        end = min(len(self.groups), (version + self.staleness + 1) * self.prompts)
        while len(self.missing) < self.in_flight and self.next < end:
            ticket = self.next
            self.next, self.left[ticket] = ticket + 1, version + self.staleness
            self.missing[ticket] = len(self.groups[ticket])
            self.waiting += ((seconds, ticket) for seconds in self.groups[ticket])
        while self.idle and self.waiting:
            seconds, ticket = self.waiting.popleft()
            self.idle -= 1
            self.later(seconds, "responded", ticket)

    def responded(self, ticket: int) -> None:
        """A place is free; a response is of one token, which is of the version that is served when
        it comes."""
        self.idle += 1
        oldest = self.oldest.setdefault(ticket, len(self.ends))
        self.missing[ticket] -= 1
        if not self.missing[ticket]:
            del self.missing[ticket], self.oldest[ticket]
            self.ready.add(ticket)
            self.left[ticket] = oldest + self.staleness

    def train(self) -> None:
        """Take the next window, if there is one."""
        if not self.trains and (window := self.next_window()):
            self.ready.difference_update(window)
            for ticket in window:
                del self.left[ticket]
            self.taken, self.trains = self.taken + len(window), True
            self.later(self.window_s, "window_trained")

    def next_window(self) -> list[int]:
        """What is ready, nearest last steps first, if all others find places in time; else
        nothing."""
        step, free = len(self.ends), self.prompts - self.taken
        if self.staleness == 0:
            window = list(
                range(
                    step * self.prompts + self.taken, step * self.prompts + self.taken + self.window
                )
            )
            return window if self.ready.issuperset(window) else []
        window = sorted(self.ready, key=lambda ticket: (self.left[ticket], ticket))[: self.window]
        if len(window) < self.window:
            return []
        late = Counter(self.left.values()) - Counter(self.left[ticket] for ticket in window)
        counts = itertools.accumulate(late[step + ahead] for ahead in range(self.staleness + 2))
        places = itertools.count(free - len(window), self.prompts)
        return (
            window
            if all(count <= room for count, room in zip(counts, places, strict=False))
            else []
        )

    def window_trained(self, _: int) -> None:
        self.trains = False
        if self.taken == self.prompts:
            self.taken = 0
            self.ends.append(self.now)
