"""Typed answers of the controller: the one place that knows the names in its messages.

Whatever a later controller adds to an answer is passed over, so that groups can be upgraded one by
one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from relax_hpc.queue.row_ids import row_ids, ticket_of
from relax_hpc.queue.row_schema import Row

Message = Mapping[str, Any]
Waited = tuple[str, str, float]
"""Role that was waited for, the reason, and the seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPlace:
    """Place of the log of an attempt at which an earlier owner of the ticket stopped."""

    holder: int
    """Ticket whose owner goes on with the log."""
    ticket: int
    """Ticket whose `attempt` wrote the log: another one than `holder` if the log was a spare."""
    attempt: int
    shards: Sequence[Message]
    """Descriptors of the shards, in the order of the segments in them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Tickets that an engine may start."""

    tickets: Sequence[int]
    attempts: Sequence[int]
    """Number of the attempt that begins, one for each ticket."""
    failures: Mapping[int, int]
    """Attempts that came to nothing by their own fault, by ticket; those without any are left
    out."""
    logs: Sequence[LogPlace]
    waited: Sequence[Waited]
    """Causes and seconds for which the tickets were not admitted sooner."""

    @classmethod
    def of(cls, answer: Message) -> Admission | None:
        """Admission in an answer; None: the run is finished."""
        if answer.get("finished"):
            return None
        attempts, failures = answer["attempts"], answer["failures"]
        about = {
            "attempts": attempts,
            "failures": failures,
            "waited": tuple(map(tuple, answer["waited"])),
        }
        return cls(tickets=answer["tickets"], logs=_places(answer), **about)


@dataclass(frozen=True, slots=True, kw_only=True)
class NextAttempt:
    """The attempt that follows one that came to nothing."""

    attempt: int
    failures: int
    logs: Sequence[LogPlace]
    """Log of the spare that the attempt is made of; empty if there is none."""

    @classmethod
    def of(cls, answer: Message) -> NextAttempt:
        return cls(attempt=answer["attempt"], failures=answer["failures"], logs=_places(answer))


def _places(answer: Message) -> Sequence[LogPlace]:
    shards, names = answer["shards"], ("holder", "ticket", "attempt")
    return tuple(
        LogPlace(
            **{name: log[name] for name in names},
            shards=[shards[number] for number in log["shards"]],
        )
        for log in answer["logs"]
    )


@dataclass(frozen=True, slots=True)
class Claim:
    """Prompt groups that this client holds until it acks them, with where their rows lie."""

    lease: int
    step: int
    tickets: tuple[int, ...]
    shards: tuple[dict[str, Any], ...]
    min_version: int
    """Number of the weights that forward passes must use, at staleness 0."""
    place: int = 0
    """First place in the order of training of these prompt groups, if they have places."""
    with_media: tuple[int, ...] = ()
    """Tickets whose rows name media: see `check_claim`."""
    episodes: tuple[bytes, ...] = ()
    """Rows of each episode, a byte an episode, one entry for each ticket."""
    assignment: Sequence[Sequence[Sequence[int]]] = ()
    """Numbers of the rows as [data rank][micro-batch][row], in the order of their ids, if it was
    claimed for ranks."""
    waited: Sequence[Waited] = ()
    """Causes and seconds for which the claim had to wait."""
    given: tuple[int, ...] = ()
    """Tickets of a whole step that already have what the task gives: they are only to be looked
    at."""

    @classmethod
    def of(cls, message: Message) -> Claim:
        """The claim in the controller's answer, or in ``message()`` from another rank of the
        group."""
        tickets, shards = tuple(message["tickets"]), tuple(message["shards"])
        with_media, assignment = tuple(message.get("with_media", ())), message["assignment"]
        place = message.get("place", tickets[0] if tickets else 0)
        about = {
            "with_media": with_media,
            "assignment": assignment,
            "waited": message.get("waited", ()),
        }
        about |= {"given": tuple(message.get("given", ())), "episodes": tuple(message["episodes"])}
        return cls(
            message["lease"],
            message["step"],
            tickets,
            shards,
            message["min_version"],
            place,
            **about,
        )

    @classmethod
    def of_answer(cls, answer: Message) -> Claim | None:
        """Claim in an answer; None: the run is finished."""
        return None if answer.get("finished") else cls.of(answer)

    def lacking(self, rows: Sequence[Row]) -> Sequence[Row]:
        """Rows among ``rows`` that do not have yet what the task gives."""
        return (
            [row for row in rows if ticket_of(row["row_id"]) not in self.given]
            if self.given
            else rows
        )

    def row_ids(self) -> list[str]:
        """Ids of all its rows, in their order."""
        pairs = zip(self.tickets, self.episodes, strict=True)
        return [name for ticket, episodes in pairs for name in row_ids(ticket, episodes)]

    def message(self) -> dict[str, Any]:
        """A msgpack-able copy, for the other ranks of the group."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """A published version: the digest of its manifest, and of the listing of its files once there
    are any."""

    version: str
    digest: str
    files: str = ""

    @classmethod
    def of(cls, answer: Message) -> News | None:
        """News in an answer; None: no such version comes any more, or there is none."""
        if answer.get("evaluate"):
            return OWED
        if "version" not in answer:
            return None
        return cls(
            version=answer["version"], digest=answer["digest"], files=answer.get("files", "")
        )


OWED = News(version="", digest="")
"""News of no version: the reader that asked owes an evaluation of the one that it serves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrained:
    """The queue's answer about a step that was trained."""

    staleness: Sequence[int]
    """Staleness of each prompt group: the version trained minus the oldest version of its
    tokens."""
    lag: int
    """Publish lag: the version trained minus the oldest that anybody generates or scores with."""
    save_next: bool = False
    """Whether a checkpoint is due after the next step because `checkpoint.every_s` is over."""

    @classmethod
    def of(cls, answer: Message) -> StepTrained:
        return cls(
            staleness=answer["staleness"],
            lag=answer["lag"],
            # A hub of older code knows steps alone.
            save_next=answer.get("save_next", False),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A trainer's part of one: what is in its folder is judged by the digest."""

    step: int
    incarnation: int
    name: str
    digest: str
    whole: bool = True
    """Whether all trainers of the run have their part of that step, without which nobody resumes
    from it."""

    @classmethod
    def of_answer(cls, answer: Message) -> list[Checkpoint]:
        """Checkpoints of the surviving lineage, oldest first."""
        names = ("step", "incarnation", "name", "digest")
        points = answer["checkpoints"]
        return [
            cls(**{name: point[name] for name in names}, whole=point.get("whole", True))
            for point in points
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStatus:
    """Progress of a run, and what each member is doing; JSON values, as `relax-hpc status --json`
    prints them."""

    trained_steps: int
    steps: int
    accepted: int
    """Rows accepted so far, also those that were dropped since."""
    newest: str
    """Newest version; empty before the first one."""
    readers: Mapping[str, str]
    """Version that each reader serves or scores with."""
    depth: Mapping[str, int]
    """Prompt groups by how far they are."""
    oldest_s: Mapping[str, float]
    untrained_bytes: int
    dropped: Mapping[str, int]
    """Rows by reason; of prompt groups that never had any, one an episode."""
    noted: Mapping[str, int]
    disk: Sequence[Message]
    """Disks at which writes do not succeed, see `Waits.longest`."""
    segments: Mapping[str, int]
    refused_connections: int
    checkpoints: Sequence[Message]
    incarnations: Mapping[str, int]
    beats: Mapping[str, Message]
    """Last beat of each member."""
    lacking: Mapping[str, Message]
    """Groups that the others wait for, see `Presence.report`."""
    finished: bool
    waiting: Sequence[str]
    """Requests that cannot be answered yet, in words."""
    worked: Sequence[str] = ()
    """Roles that have given rows or fields, or trained a step. Complete only until a step is
    trained, because then the queue forgets its rows."""
    later: Message = field(default_factory=dict)
    """Fields of a newer controller that this program does not know."""

    @classmethod
    def of(cls, answer: Message) -> QueueStatus:
        known = {
            name: value
            for name, value in answer.items()
            if name in cls.__slots__ and name != "later"
        }
        return cls(
            **known, later={name: value for name, value in answer.items() if name not in known}
        )

    def message(self) -> dict[str, Any]:
        """Status as JSON values, also of fields that are not known here."""
        about = asdict(self)
        return about | dict(about.pop("later"))
