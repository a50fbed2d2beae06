"""Outcomes of prompt groups that were generated, and the end of a role too many of whose groups are
bad."""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from relax_hpc.base.error_origin import NO_ORIGIN, ErrorOrigin
from relax_hpc.base.errors import NoProgressError
from relax_hpc.base.metrics.writer import GENERATED, GENERATED_SUM
from relax_hpc.base.programming_errors import REMEDY, is_description
from relax_hpc.config.schema import RolloutConfig
from relax_hpc.queue.records import FILTERED
from relax_hpc.queue.row_schema import Row

_FAILURE_WINDOW = 64
_FILTER_WINDOW = 256
_TICKETS = 4096
_FIRST_GROUPS = 16
"""Prompt groups that fail at the same line, and none that succeeds, after which the line is
wrong."""
_WRONG_RESULTS = ("reward_wrong_count", "reward_not_a_number", "environment_answer")
"""Reasons of failures by a result of a wrong type, which raise no exception in the user's code."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Reason why a prompt group came to nothing: `reason` is counted, `detail` is for whoever reads
    the error."""

    reason: str
    detail: str
    rewards: tuple[float, ...] = ()
    """Rewards of all episodes, where there are any: of a group that the filter dropped."""
    origin: ErrorOrigin = field(default=NO_ORIGIN, compare=False)
    """Place in a user's code that failed, if one did."""

    @property
    def as_programming_error(self) -> str:
        """One line for a failure that every prompt group has, in a run without progress."""
        return (
            f"{self.detail_with_location}, for each of the first {_FIRST_GROUPS} prompt groups; "
            f"{REMEDY}"
        )

    @property
    def detail_with_location(self) -> str:
        """`detail` in one line, and the file and line that failed."""
        detail = " ".join(self.detail.split())
        return f"{detail} at {self.origin.location}" if self.origin.location else detail


def generated(groups: Iterable[list[Row] | Failure]) -> dict[str, float]:
    """Number of episodes with a reward in ``groups``, those included that are not kept, and the sum
    of their rewards."""
    rewards = [
        reward
        for group in groups
        for reward in (
            group.rewards
            if isinstance(group, Failure)
            else [row["reward"] for row in group if not row["row"]]
        )
    ]
    return {GENERATED: float(len(rewards)), GENERATED_SUM: float(sum(rewards))}


class Outcomes:
    """Counts the last groups of all engines of a role; NoProgressError where too many failed or
    were filtered out."""

    def __init__(self, shape: RolloutConfig) -> None:
        self._shape = shape
        self._worked: deque[bool] = deque(maxlen=_FAILURE_WINDOW)
        self._passed: deque[bool] = deque(maxlen=_FILTER_WINDOW)
        self._has_succeeded = False
        self._failures_by_line: Counter[str] = Counter()
        """Failures by what may be a programming error, by its location."""
        self._failures: dict[int, int] = {}
        """Failures by ticket, of the last tickets that failed."""

    def count(self, group: object) -> None:
        """Count a group: rows, or a `Failure`."""
        reason = group.reason if isinstance(group, Failure) else ""
        self._worked.append(reason in ("", FILTERED))
        if reason in ("", FILTERED):
            self._passed.append(not reason)
            self._has_succeeded = True

    def count_lost(self, ticket: int, failures: int, reason: str) -> None:
        """Count failures of ``ticket``, which is given out again after so many ``failures``: those
        that were good here were found bad later."""
        later = failures - self._failures.get(ticket, 0)
        self.note_failures(ticket, failures)
        for _ in range(later):
            with contextlib.suppress(ValueError):
                self._worked.remove(True)
            self._worked.append(False)
        if later > 0:
            self.check_share(Failure(reason, reason))

    def note_failures(self, ticket: int, failures: int) -> None:
        """Note that so many ``failures`` of ``ticket`` are counted by now."""
        self._failures.pop(ticket, None)
        self._failures[ticket] = failures
        if len(self._failures) > _TICKETS:
            del self._failures[next(iter(self._failures))]

    def is_programming_error(self, failure: Failure) -> bool:
        """Count ``failure``; whether so many have failed at its line, and no group has succeeded,
        that data is not the cause. True once for each line."""
        is_suspect = is_description(failure.detail) or failure.reason in _WRONG_RESULTS
        # The check of an environment's answer has no location. Without one, the code is not the
        # user's.
        line = failure.origin.location or (
            failure.reason if failure.reason == "environment_answer" else ""
        )
        if self._has_succeeded or not (is_suspect and line):
            return False
        self._failures_by_line[line] += 1
        return self._failures_by_line[line] == _FIRST_GROUPS

    def check_share(self, failure: Failure) -> None:
        """NoProgressError if too many of the last groups ended like this one."""
        shape = self._shape
        if failure.reason != FILTERED:
            if (share := _share(self._worked)) > shape.max_failed_share or share == 1.0:
                raise NoProgressError(
                    f"{share:.0%} of the last {_FAILURE_WINDOW} prompt groups failed, the last by "
                    f"{failure.detail_with_location}; "
                    f"allowed rollout.max_failed_share={shape.max_failed_share:.0%}; look at the "
                    "prompts and the reward"
                )
        elif (share := _share(self._passed)) > shape.max_filtered_share:
            raise NoProgressError(
                f"rollout.filter {shape.filter} dropped {share:.1%} of the last {_FILTER_WINDOW} "
                f"prompt groups, the last with {failure.detail}; allowed "
                f"rollout.max_filtered_share={shape.max_filtered_share:.0%}; choose prompts of "
                "another difficulty, more samples a group, or another reward"
            )


def _share(good: deque[bool]) -> float:
    """Share of the bad ones; 0 before there are enough to tell."""
    return 1.0 - sum(good) / len(good) if len(good) == good.maxlen else 0.0
