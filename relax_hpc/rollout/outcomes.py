"""Outcomes of generated prompt groups. If too many groups fail, the role ends."""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from relax_hpc.base.error_origin import NO_ORIGIN, ErrorOrigin
from relax_hpc.base.errors import NoProgressError
from relax_hpc.base.metrics.length_counts import count_lengths
from relax_hpc.base.metrics.writer import GENERATED, GENERATED_SUM
from relax_hpc.base.programming_errors import REMEDY, is_description
from relax_hpc.config.schema import RolloutConfig
from relax_hpc.data.generation import Episode, Generation
from relax_hpc.queue.records import FILTERED
from relax_hpc.queue.row_schema import Row
from relax_hpc.rollout.engines.engine import BadAnswer

_FAILURE_WINDOW = 64
_FILTER_WINDOW = 256
_TICKETS = 4096
_FIRST_GROUPS = 16
"""If this number of prompt groups fails at the same line and none succeeds, the line is wrong."""
_WRONG_RESULTS = ("reward_wrong_count", "reward_not_a_number", "environment_answer")
"""Reasons of failures by a result of a wrong type. They raise no exception in the user's code."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Reason why a prompt group has no rows: `reason` is counted, `detail` is for people."""

    reason: str
    detail: str
    rewards: tuple[float, ...] = ()
    """Rewards of all episodes, if the filter has dropped the group."""
    origin: ErrorOrigin = field(default=NO_ORIGIN, compare=False)
    """Line of a user's code that failed, if that is the cause."""

    @property
    def as_programming_error(self) -> str:
        """One line for a failure of every prompt group, in a run without progress."""
        return (
            f"{self.detail_with_location}, for each of the first {_FIRST_GROUPS} prompt groups; "
            f"{REMEDY}"
        )

    @property
    def detail_with_location(self) -> str:
        """`detail` in one line, with the file and line that failed."""
        detail = " ".join(self.detail.split())
        return f"{detail} at {self.origin.location}" if self.origin.location else detail


def generated_metrics(groups: Iterable[list[Row] | Failure]) -> dict[str, float]:
    """Number of episodes with a reward in ``groups``, including filtered groups, and the sum of
    their rewards."""
    rewards: list[float] = []
    for group in groups:
        if isinstance(group, Failure):
            rewards += group.rewards
        else:
            # Once for each episode: all rows of an episode have its reward.
            rewards += [row["reward"] for row in group if not row["row"]]
    return {GENERATED: float(len(rewards)), GENERATED_SUM: float(sum(rewards))}


def count_generated_lengths(
    answers: Iterable[Generation | Episode | BadAnswer], budget: int
) -> dict[str, float]:
    """Metrics of the sampled tokens of each episode that has ended; ``budget``: see
    `bounds_of`."""
    lengths: list[int] = []
    for answer in answers:
        if isinstance(answer, BadAnswer) or answer.finish_reason in ("abort", "partial"):
            continue
        lengths.append(sum(map(_sampled_tokens, _parts_of(answer))))
    return count_lengths("generated", lengths, budget)


def _parts_of(answer: Generation | Episode) -> list[Generation]:
    if isinstance(answer, Episode):
        return [row.generation for row in answer.rows]
    return [answer]


def _sampled_tokens(generation: Generation) -> int:
    return int(np.count_nonzero(generation.token_versions))


class Outcomes:
    """Counts the last groups of all engines of a role. NoProgressError: too many have failed or
    were filtered out."""

    def __init__(self, settings: RolloutConfig) -> None:
        self._settings = settings
        self._worked: deque[bool] = deque(maxlen=_FAILURE_WINDOW)
        self._passed: deque[bool] = deque(maxlen=_FILTER_WINDOW)
        self._has_succeeded = False
        self._failures_by_line: Counter[str] = Counter()
        """Failures that may be a programming error, by location."""
        self._failures: dict[int, int] = {}
        """Number of failures by ticket, for the tickets that failed last."""

    def count(self, group: object) -> None:
        """Count a group: rows, or a `Failure`."""
        reason = group.reason if isinstance(group, Failure) else ""
        self._worked.append(reason in ("", FILTERED))
        if reason in ("", FILTERED):
            self._passed.append(not reason)
            self._has_succeeded = True

    def count_lost(self, ticket: int, failures: int, reason: str) -> None:
        """Count groups of ``ticket`` that were good here and were dropped later. The queue assigns
        the ticket again, with the number of its ``failures``."""
        uncounted = failures - self._failures.get(ticket, 0)
        self.note_failures(ticket, failures)
        for _ in range(uncounted):
            with contextlib.suppress(ValueError):
                self._worked.remove(True)
            self._worked.append(False)
        if uncounted > 0:
            self.check_share(Failure(reason, reason))

    def note_failures(self, ticket: int, failures: int) -> None:
        """Record that ``failures`` of ``ticket`` have been counted."""
        self._failures.pop(ticket, None)
        self._failures[ticket] = failures
        if len(self._failures) > _TICKETS:
            del self._failures[next(iter(self._failures))]

    def is_programming_error(self, failure: Failure) -> bool:
        """Count ``failure``. Return whether `_FIRST_GROUPS` groups have failed at its line and none
        has succeeded, so that data is not the cause. True once for each line."""
        is_suspect = is_description(failure.detail) or failure.reason in _WRONG_RESULTS
        # A failure without a location is not in the user's code. The exception is the check of an
        # environment's answer, which has no location.
        line = failure.origin.location
        if not line and failure.reason == "environment_answer":
            line = failure.reason
        if self._has_succeeded or not (is_suspect and line):
            return False
        self._failures_by_line[line] += 1
        return self._failures_by_line[line] == _FIRST_GROUPS

    def check_share(self, failure: Failure) -> None:
        """NoProgressError if too many of the last groups ended like this one."""
        settings = self._settings
        if failure.reason != FILTERED:
            share = _bad_share(self._worked)
            if share > settings.max_failed_share or share == 1.0:
                raise NoProgressError(
                    f"{share:.0%} of the last {_FAILURE_WINDOW} prompt groups failed, the last by "
                    f"{failure.detail_with_location}; "
                    f"allowed rollout.max_failed_share={settings.max_failed_share:.0%}; look at "
                    "the prompts and the reward"
                )
            return
        share = _bad_share(self._passed)
        if share > settings.max_filtered_share:
            raise NoProgressError(
                f"rollout.filter {settings.filter} dropped {share:.1%} of the last "
                f"{_FILTER_WINDOW} prompt groups, the last with {failure.detail}; allowed "
                f"rollout.max_filtered_share={settings.max_filtered_share:.0%}; choose prompts of "
                "another difficulty, more samples a group, or another reward"
            )


def _bad_share(good: deque[bool]) -> float:
    """Share of bad groups; 0 until the window is full."""
    return 1.0 - sum(good) / len(good) if len(good) == good.maxlen else 0.0
