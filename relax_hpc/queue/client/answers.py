"""Typed answers of the controller: the only module that knows the keys of its answers.

Unknown keys of a newer controller are ignored, so that groups can be upgraded one by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from relax_hpc.queue.row_ids import row_ids, ticket_of
from relax_hpc.queue.row_schema import Row

Message = Mapping[str, Any]
Waited = tuple[str, str, float]
"""Role for which the client waited, the reason, and the seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptLog:
    """Log of an attempt, at which an earlier owner of the ticket stopped."""

    holder: int
    """Ticket whose owner continues the log."""
    ticket: int
    """Ticket whose `attempt` wrote the log. If the log was a spare, it differs from `holder`."""
    attempt: int
    shards: Sequence[Message]
    """Descriptors of the shards, in the order of the segments in them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Tickets that an engine may generate."""

    tickets: Sequence[int]
    attempts: Sequence[int]
    """Number of the attempt that begins, for each ticket."""
    failures: Mapping[int, int]
    """Failed attempts by ticket, without those that a filter dropped. Tickets without any are left
    out."""
    logs: Sequence[AttemptLog]
    waited: Sequence[Waited]
    """Reasons and seconds for which the tickets were not admitted earlier."""

    @classmethod
    def from_answer(cls, answer: Message) -> Admission | None:
        """The admission in an answer; None: the run is finished."""
        if answer.get("finished"):
            return None
        return cls(
            tickets=answer["tickets"],
            attempts=answer["attempts"],
            failures=answer["failures"],
            logs=_attempt_logs(answer),
            waited=tuple(map(tuple, answer["waited"])),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NextAttempt:
    """The attempt that follows a failed one."""

    attempt: int
    failures: int
    logs: Sequence[AttemptLog]
    """Log of the spare that the attempt uses; empty: it uses no spare."""

    @classmethod
    def from_answer(cls, answer: Message) -> NextAttempt:
        return cls(
            attempt=answer["attempt"], failures=answer["failures"], logs=_attempt_logs(answer)
        )


def _attempt_logs(answer: Message) -> Sequence[AttemptLog]:
    shards = answer["shards"]
    return tuple(
        AttemptLog(
            holder=log["holder"],
            ticket=log["ticket"],
            attempt=log["attempt"],
            shards=[shards[number] for number in log["shards"]],
        )
        for log in answer["logs"]
    )


@dataclass(frozen=True, slots=True)
class Claim:
    """Prompt groups that this client holds until it acknowledges them, and the shards of their
    rows. The fields have the names of the keys in messages."""

    lease: int
    step: int
    tickets: tuple[int, ...]
    shards: tuple[dict[str, Any], ...]
    min_version: int
    """Number of the weights that forward passes must use, at staleness 0."""
    place: int = 0
    """Position of the first of these prompt groups in the order of training, if they have one."""
    with_media: tuple[int, ...] = ()
    """Tickets whose rows refer to media: see `check_claim`."""
    episodes: tuple[bytes, ...] = ()
    """Rows of each episode, one byte for each, one entry for each ticket."""
    assignment: Sequence[Sequence[Sequence[int]]] = ()
    """Numbers of the rows as [data rank][micro-batch][row], in the order of their ids, if the claim
    was for ranks."""
    waited: Sequence[Waited] = ()
    """Reasons and seconds for which the claim had to wait."""
    given: tuple[int, ...] = ()
    """Tickets of a whole step that already have the fields that the task adds: the task only reads
    them."""

    @classmethod
    def from_message(cls, message: Message) -> Claim:
        """The claim in the controller's answer, or in ``message()`` from another rank of the
        group."""
        tickets = tuple(message["tickets"])
        return cls(
            message["lease"],
            message["step"],
            tickets,
            tuple(message["shards"]),
            message["min_version"],
            message.get("place", tickets[0] if tickets else 0),
            with_media=tuple(message.get("with_media", ())),
            episodes=tuple(message["episodes"]),
            assignment=message["assignment"],
            waited=message.get("waited", ()),
            given=tuple(message.get("given", ())),
        )

    @classmethod
    def from_answer(cls, answer: Message) -> Claim | None:
        """The claim in an answer; None: the run is finished."""
        return None if answer.get("finished") else cls.from_message(answer)

    def without_results(self, rows: Sequence[Row]) -> Sequence[Row]:
        """The ``rows`` that do not have the fields of the task yet."""
        if not self.given:
            return rows
        return [row for row in rows if ticket_of(row["row_id"]) not in self.given]

    def row_ids(self) -> list[str]:
        """Ids of all its rows, in order."""
        names: list[str] = []
        for ticket, episodes in zip(self.tickets, self.episodes, strict=True):
            names += row_ids(ticket, episodes)
        return names

    def message(self) -> dict[str, Any]:
        """A copy for msgpack, for the other ranks of the group."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedVersion:
    """A published version: the digest of its manifest, and of the listing of its files once they
    are written."""

    version: str
    digest: str
    files: str = ""

    @classmethod
    def from_answer(cls, answer: Message) -> PublishedVersion | None:
        """The version in an answer; None: there is no such version, or none will follow."""
        if answer.get("evaluate"):
            return EVALUATION_DUE
        if "version" not in answer:
            return None
        return cls(
            version=answer["version"], digest=answer["digest"], files=answer.get("files", "")
        )


EVALUATION_DUE = PublishedVersion(version="", digest="")
"""Answer without a version: the reader has to evaluate the version that it serves first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrained:
    """The queue's answer after a trained step."""

    staleness: Sequence[int]
    """Staleness of each prompt group: the version trained minus the oldest version of its
    tokens."""
    lag: int
    """Publish lag: the trained version minus the oldest one with which any role generates or
    scores."""
    save_next: bool = False
    """Whether a checkpoint is due after the next step because `checkpoint.every_s` has passed."""

    @classmethod
    def from_answer(cls, answer: Message) -> StepTrained:
        return cls(
            staleness=answer["staleness"],
            lag=answer["lag"],
            # A hub with older code decides by steps only, and does not send this key.
            save_next=answer.get("save_next", False),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A trainer's part of a checkpoint. The digest verifies its folder."""

    step: int
    incarnation: int
    name: str
    digest: str
    whole: bool = True
    """Whether all trainers of the run have saved their parts of this step. Only then can a trainer
    resume from it."""

    @classmethod
    def list_from_answer(cls, answer: Message) -> list[Checkpoint]:
        """Checkpoints of the surviving lineage, oldest first."""
        names = ("step", "incarnation", "name", "digest")
        points = answer["checkpoints"]
        return [
            cls(**{name: point[name] for name in names}, whole=point.get("whole", True))
            for point in points
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStatus:
    """Progress of a run and of its processes, as JSON values of `relax-hpc status --json`."""

    trained_steps: int
    steps: int
    accepted: int
    """Rows accepted so far, including those that were dropped later."""
    newest: str
    """Newest version; empty before the first one."""
    readers: Mapping[str, str]
    """Version with which each reader generates or scores."""
    depth: Mapping[str, int]
    """Number of prompt groups in each state."""
    oldest_s: Mapping[str, float]
    untrained_bytes: int
    dropped: Mapping[str, int]
    """Rows by reason. A prompt group that never had rows counts as one row for each episode."""
    noted: Mapping[str, int]
    disk: Sequence[Message]
    """Disks on which writes fail, see `Waits.longest`."""
    segments: Mapping[str, int]
    refused_connections: int
    checkpoints: Sequence[Message]
    incarnations: Mapping[str, int]
    beats: Mapping[str, Message]
    """Last beat of each member."""
    lacking: Mapping[str, Message]
    """Groups for which others wait, see `GroupPresence.report`. The field has the name of the
    message's key; elsewhere it is `awaited_groups`."""
    finished: bool
    waiting: Sequence[str]
    """Requests that cannot be answered yet, described in text."""
    worked: Sequence[str] = ()
    """Roles that have added rows or fields, or trained a step. It is complete only until the first
    step is trained, because the queue then forgets the rows."""
    later: Message = field(default_factory=dict)
    """Fields of a newer controller that this program does not have."""

    @classmethod
    def from_answer(cls, answer: Message) -> QueueStatus:
        fields = {name for name in cls.__slots__ if name != "later"}
        present = {name: value for name, value in answer.items() if name in fields}
        later = {name: value for name, value in answer.items() if name not in fields}
        return cls(**present, later=later)

    def message(self) -> dict[str, Any]:
        """Status as JSON values, including fields of a newer controller."""
        values = asdict(self)
        return values | dict(values.pop("later"))
