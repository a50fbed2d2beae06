"""The collector: takes the rows of a run that only generates, in place of the actor.

It claims the rows of each step and reports the step as trained, so that the queue counts every row
once, and a restarted run continues where it was. It computes no model and needs no GPU. The rows
stay on disk for the export.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import numpy as np

from relax_hpc.base.errors import DeadlineError, StoppedError
from relax_hpc.base.metrics.length_counts import count_lengths
from relax_hpc.base.rundir import checkpoint_name
from relax_hpc.base.versions import Version
from relax_hpc.config.roles import POLICY
from relax_hpc.queue.client import Claim, QueueClient
from relax_hpc.queue.client.claims import check_claim
from relax_hpc.queue.presence import longest_wait_s
from relax_hpc.queue.process_context import HUB, Context
from relax_hpc.queue.row_schema import NO_VERSION, Row

T = TypeVar("T")
_LOOK_S = 0.2
_AHEAD_S = 30 * 86400.0
_BUDGET_TOKENS = 1 << 40
"""More tokens than a step has: a window is as large as the rows that are ready."""


def run(context: Context) -> None:
    """Collect the rows of all steps. StoppedError: the run was asked to stop before."""
    assert context.client is not None
    Collector(context, context.client).serve()


class Collector:
    """The state of the role."""

    def __init__(self, context: Context, client: QueueClient) -> None:
        self.context, self.config, self.client = context, context.config, client

    def serve(self) -> None:
        """Announce the start weights, and collect the rows of each step."""
        status = self.client.status.get().result()
        self.client.training.resume(status.trained_steps).result()
        if not status.newest:
            # Engines load no version. They learn under which name they serve their weights.
            start = Version(self.context.incarnation, status.trained_steps)
            self.client.weights.publish(start, "").result()
        self.context.report_phase("")
        for step in range(status.trained_steps, self.config.steps):
            self.collect(step)
        self.finish()

    def collect(self, step: int) -> None:
        """Take all rows of ``step``, and report it."""
        claims, rows = list[Claim](), list[Row]()
        tickets: set[int] = set()
        while len(tickets) < self.config.prompts_per_step:
            claim = self.next_claim(step)
            with self.context.spans("queue", step=step):
                if not check_claim(self.client, claim):
                    continue
                rows += self.client.rows(claim)
            claims.append(claim)
            tickets.update(claim.tickets)
        leases = [claim.lease for claim in claims]
        settled = self.await_answer(step, self.client.training.settled(leases))
        if len(settled) < len(tickets):
            # Rows were lost with their producer. They are generated again.
            for claim in claims:
                self.client.return_claim(claim)
            self.collect(step)
            return
        self.await_answer(step, self.client.training.trained(step, leases))
        values = values_of(rows, self.config.rollout.max_new_tokens)
        self.client.status.report(POLICY, step, values, self.context.spans.take())

    def next_claim(self, step: int) -> Claim:
        """The next window of rows."""
        answer = self.client.submit_claim(
            POLICY, _BUDGET_TOKENS, self.config.prompts_per_step, _AHEAD_S
        )
        claim = self.await_answer(step, answer)
        assert claim is not None
        return claim

    def finish(self) -> None:
        """Report that no step remains. The queue ends a run when its last step is saved; here, rows
        are all that is saved, and they are on disk."""
        steps = self.config.steps
        name = checkpoint_name("", self.context.incarnation, steps)
        self.client.training.checkpoint(steps, name, "").result()

    def await_answer(self, step: int, answer: Future[T]) -> T:
        """An answer of the queue. StoppedError, DeadlineError."""
        limit_s, began = self.config.queue.wait_timeout_s, time.monotonic()
        paused_before_s = self.client.beat.paused_s
        with self.context.spans("wait", step=step, cause=HUB) as waiting:
            while not wait([answer], _LOOK_S).done:
                if self.context.stop.is_set():
                    raise StoppedError(f"asked to stop: collected {step} steps")
                paused_s = self.client.beat.paused_s - paused_before_s
                allowed_s = limit_s + min(paused_s, longest_wait_s(self.config))
                if time.monotonic() > began + allowed_s:
                    raise DeadlineError(
                        f"no rows to collect came for {limit_s:g} s; see relax-hpc status"
                    )
            result = answer.result()
            if isinstance(result, Claim):
                waiting.set_causes(result.waited)
        return result


def values_of(rows: list[Row], budget: int) -> dict[str, Any]:
    """Metrics of the rows of a step; ``budget``: see `count_lengths`."""
    rewards: dict[tuple[int, int], float] = {}
    lengths: dict[tuple[int, int], int] = {}
    for row in rows:
        episode = int(row["ticket"]), int(row["episode"])
        sampled = int(np.count_nonzero(np.asarray(row["token_versions"]) != NO_VERSION))
        rewards[episode] = float(row["reward"])
        lengths[episode] = lengths.get(episode, 0) + sampled
    values = np.array(list(rewards.values()))
    return {
        "reward/mean": float(values.mean()),
        "reward/std": float(values.std()),
        "reward/response_tokens": sum(lengths.values()) / len(lengths),
        **count_lengths("trained", lengths.values(), budget),
    }
