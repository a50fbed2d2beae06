"""The audit of a run by row id, from its journal: each accepted row is consumed once by every task,
or dropped.

A row has a life for each time that it was accepted. A life ends when the row is trained or dropped.
What rolled-back weights did does not count. The owner of a prompt group declares its rows.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from relax_hpc.base.foreign_files import parse_json
from relax_hpc.base.rundir import RunDir
from relax_hpc.base.versions import Version
from relax_hpc.config import load_resolved
from relax_hpc.config.roles import POLICY
from relax_hpc.queue.controller.eventlog import event_lines
from relax_hpc.queue.controller.state.events import expand, to_line
from relax_hpc.queue.controller.state.queue_state import QueueState
from relax_hpc.queue.inspect.event_extent import lines_after_extent
from relax_hpc.queue.inspect.journal_copy import MALFORMED, DifferentJournalError, JournalCopy
from relax_hpc.queue.inspect.journal_summary import JournalSummary, read_summary
from relax_hpc.queue.inspect.row_lives import History, Lives, Mark, RowLives
from relax_hpc.queue.plan import Plan
from relax_hpc.queue.records import Event
from relax_hpc.queue.row_ids import parse_row_id, ticket_of

_EVENT_BYTES = 1 << 16
"""Longest line of events, in bytes. A longer one was not written by this package."""
_DROPPED, _TRAINED = "dropped", POLICY
"""Uses in a mark. _TRAINED: by all trainers."""
_COUNTED_EVENTS = ("dropped", "refused", "failed", "noted")
"""Numbers of an audit that follow from single events."""


@dataclass(slots=True)
class Audit:
    """Result of an audit: the fates of the rows of a run. `problems` is empty if the run is
    correct."""

    problems: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    """Ids of rows that the surviving steps should have trained and did not; for prompt groups that
    never had rows, their ids."""
    duplicated: list[str] = field(default_factory=list)
    """Ids of rows that the surviving steps trained more than once."""
    accepted: int = 0
    """Rows that were accepted; a row that was accepted again counts again. Each was trained,
    dropped or is in flight."""
    trained: int = 0
    in_flight: int = 0
    waiting: Counter[str] = field(default_factory=Counter)
    """Rows in flight that each task has not consumed yet."""
    consumed: Counter[str] = field(default_factory=Counter)
    """Rows in flight or trained that each task has consumed."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Dropped rows by reason."""
    refused: Counter[str] = field(default_factory=Counter)
    """Rows of `dropped` that were never accepted."""
    failed: Counter[str] = field(default_factory=Counter)
    """Failed attempts at prompt groups, by reason."""
    noted: Counter[str] = field(default_factory=Counter)
    """Other events with a reason: `engine_fault/timeout`, `bad_prompt/over_long`."""
    segments: dict[str, int] = field(default_factory=dict)
    """Tokens that were appended to logs before their prompt groups were accepted, by their fate:
    see `Segments.counts`, without zeros. A log has no accepted rows."""
    torn: dict[str, int] = field(default_factory=dict)
    """Bytes at the end of journal files that do not count: see `JournalCopy`."""

    @property
    def has_problems(self) -> bool:
        return bool(self.problems or self.lost or self.duplicated)

    def add(self, other: Audit, times: int = 1) -> None:
        """Add the numbers and problems of rows, ``times`` times."""
        self.problems += other.problems * times
        self.lost += other.lost * times
        self.duplicated += other.duplicated * times
        self.accepted += other.accepted * times
        self.trained += other.trained * times
        self.in_flight += other.in_flight * times
        for task, count in other.waiting.items():
            self.waiting[task] += count * times
        for task, count in other.consumed.items():
            self.consumed[task] += count * times


def audit(run: RunDir, steps: int | None = None) -> Audit:
    """Follow every row of a run that has ended.

    ``steps``: steps that a run has trained which was ended early; None: all planned steps.
    JournalError: the journal is damaged. events.jsonl must match the journal to the last line.
    """
    ledger = Ledger(run)
    result = ledger.judge(ledger.plan.steps if steps is None else steps)
    result.problems += ledger.events.problems(ended_well=True)
    return result


def next_version(trained: str) -> Version:
    """The version that a step has produced. It survives exactly when the step does."""
    version = Version.parse(trained)
    return Version(version.incarnation, version.number + 1)


def read_events(run: RunDir) -> list[dict[str, Any]]:
    """Lines of events.jsonl. Every line must be valid."""
    return [parse_json(line) for line in event_lines(run.events)]


class Ledger:
    """The lives of all rows, from the journal of ``run``. JournalError: it is damaged."""

    def __init__(self, run: RunDir) -> None:
        self._start(run, Plan.from_config(load_resolved(run.root)))
        self._read(JournalCopy(run))

    @classmethod
    def from_summary(cls, run: RunDir) -> Ledger:
        """The same lives, from the summary of the journal and the records after it. If there is no
        summary, or the run's files do not begin with the bytes that it was made of, the whole
        journal is read."""
        plan = Plan.from_config(load_resolved(run.root))
        summary = read_summary(run, plan)
        if summary:
            try:
                return cls._resume(run, plan, summary)
            except (DifferentJournalError, *MALFORMED, zlib.error):
                # The journal itself decides what is wrong.
                pass
        self = cls.empty(run, plan)
        self._read(JournalCopy(run))
        return self

    @classmethod
    def empty(cls, run: RunDir, plan: Plan) -> Ledger:
        """A ledger that has read nothing."""
        self = cls.__new__(cls)
        self._start(run, plan)
        return self

    @classmethod
    def _resume(cls, run: RunDir, plan: Plan, summary: JournalSummary) -> Ledger:
        self = cls.empty(run, plan)
        lines = lines_after_extent(run.events, summary.events)
        if lines is None:
            raise DifferentJournalError(f"{run.events}: differs from its summary")
        self.load(summary)
        self.events = Projection(lines, self.events_taken)
        self._read(JournalCopy(run, summary.prefix))
        return self

    def load(self, summary: JournalSummary) -> None:
        """Continue after the records of a summary. LookupError, TypeError, ValueError,
        zlib.error: it is none."""
        values = summary.ledger
        self.state = QueueState.load(self.plan, summary.state)
        self.records = self.summarised_records = values["records"]
        self.events_taken = values["events"]
        self._lives.load(values["lives"])
        self._result.problems = list(values["problems"])
        for name, counts in zip(_COUNTED_EVENTS, values["counts"], strict=True):
            setattr(self._result, name, Counter(counts))
        self._counted.update(values["counted"])
        self._since.update(values["since"])

    def _start(self, run: RunDir, plan: Plan) -> None:
        self.plan = plan
        self.state = QueueState(self.plan)
        self.records = self.summarised_records = self.events_taken = 0
        """Records of the journal, those of the summary, and events of all of them."""
        self.events = Projection(event_lines(run.events))
        self._result = Audit()
        self._lives = RowLives()
        self._counted: Counter[str] = Counter()
        """Drops by reason, counted like the queue counts them. It may have forgotten the number of
        rows of a prompt group."""
        self._marks: dict[Mark, Mark] = {}
        self._tasks = {task.gives[0]: name for name, task in self.plan.tasks.items() if task.gives}
        """Event of a task that adds fields -> the task."""
        self._since: dict[str, int] = {}
        """Task -> lowest ticket that it consumed. A task that joined at a resume need not consume
        earlier tickets."""
        self._verdicts: dict[tuple[int, bool, tuple[str, ...]], tuple[Audit | None, int]] = {}
        """Result of each history, and the number of prompt groups that have it."""
        self._surviving: dict[Mark, bool] = {}
        """Whether the version of each mark survives."""

    def _read(self, copy: JournalCopy) -> None:
        for batches in copy.replay(self.state):
            for event in expand(batches):
                self.events.compare(event)
                self.take(event)
            self.records += 1
        self._result.torn = {name: size for name, size in copy.torn.items() if size}

    def dump(self) -> Any:
        """Everything that follows from the events so far, for a summary."""
        result = self._result
        return {
            "records": self.records,
            "events": self.events_taken,
            "lives": self._lives.dump(),
            "problems": result.problems,
            "counts": [dict(getattr(result, name)) for name in _COUNTED_EVENTS],
            "counted": dict(self._counted),
            "since": self._since,
        }

    def take(self, event: Event) -> None:
        """Follow the next event of the journal."""
        result = self._result
        self.events_taken += 1
        if event.what == "accepted":
            self._accept(event.id)
        elif event.what == "trained":
            self._mark(event.id, _TRAINED, event.version)
        elif event.what == "returned":
            self._return(int(event.id))
        elif event.what == "dropped":
            self._drop(event.id, event.reason)
        elif event.what in self._tasks:
            self._consume(int(event.id), self._tasks[event.what])
        elif event.what == "failed":
            result.failed[event.reason] += 1
        elif event.reason:
            result.noted[f"{event.what}/{event.reason}"] += 1

    def _accept(self, name: str) -> None:
        ticket, *in_group = parse_row_id(name)
        self._lives.open(ticket)
        if in_group == [0, 0]:
            # Another attempt may have other rows.
            self._lives.rows[ticket] = []
        self._lives.rows[ticket].append(name)
        self._lives.lives[ticket].setdefault(name, []).append([])

    def _mark(self, name: str, use: str, detail: str) -> None:
        """Add a mark to the present life of a row: a task and its version, or a drop and its
        reason."""
        mark = (use, detail)
        life = self._present_life(name)
        if life is None:
            self._result.problems.append(
                f"{name}: {use}, although it was not accepted, or dropped since"
            )
        else:
            # Millions of rows share few mark objects.
            life.append(self._marks.setdefault(mark, mark))

    def _return(self, ticket: int) -> None:
        """Mark the rows of ``ticket`` as untrained: a trainer has resumed earlier and trains on
        them again."""
        for row in self._rows_of(ticket):
            life = self._present_life(row)
            if life:
                life[:] = [mark for mark in life if mark[0] != _TRAINED]

    def _drop(self, name: str, reason: str) -> None:
        """Drop a row, or a prompt group whose rows the queue does not know, because it never had
        any or has forgotten them."""
        if not reason:
            self._result.problems.append(f"{name}: dropped without a reason")
        is_group = "." not in name
        count = len(self.plan.undeclared) if is_group else 1
        self._counted[reason] += count
        rows = self._rows_of(ticket_of(name)) if is_group else [name]
        alive = [row for row in rows if self._present_life(row) is not None]
        for row in alive:
            self._mark(row, _DROPPED, reason)
        self._result.dropped[reason] += len(alive) or count
        if not alive:
            self._result.refused[reason] += count

    def _rows_of(self, ticket: int) -> list[str]:
        """Ids of the rows of ``ticket`` that were last accepted."""
        self._lives.open(ticket)
        return self._lives.rows[ticket]

    def _present_life(self, name: str) -> list[Mark] | None:
        """The present life of a row; None: it was not accepted, or dropped since."""
        ticket = ticket_of(name)
        self._lives.open(ticket)
        lives = self._lives.lives[ticket].get(name)
        return lives[-1] if lives and not _ended(lives[-1]) else None

    def _consume(self, ticket: int, task: str) -> None:
        version = 0
        if "old_logprob_version" in self.plan.tasks[task].gives:
            version = self.state.groups[ticket].old_version
        self._since[task] = min(ticket, self._since.get(task, ticket))
        for name in self._rows_of(ticket):
            self._mark(name, task, str(Version.decode(version)) if version else "")

    def judge(self, steps: int) -> Audit:
        """Result for all rows, if ``steps`` were trained."""
        result, state = self._result, self.state
        result.segments = {
            fate: tokens for fate, tokens in state.segments.counts().items() if tokens
        }
        if 2 * state.segments.appended != sum(result.segments.values()):
            result.problems.append(
                f"tokens appended: {state.segments.appended}, found: {result.segments}"
            )
        self._verdicts.clear()
        self._surviving.clear()
        due = self._due(steps)
        for ticket in due:
            self._judge_ticket(ticket, True)
        was_due = due if isinstance(due, range) else set(due)
        for ticket in list(self._lives.tickets()):
            if ticket not in was_due:
                self._judge_ticket(ticket, False)
        for verdict, count in self._verdicts.values():
            if verdict:
                result.add(verdict, count)
        for reason in state.counts.dropped.keys() | self._counted.keys():
            events = self._counted[reason] + result.failed[reason] * len(self.plan.undeclared)
            counted = state.counts.dropped[reason]
            if counted != events:
                result.problems.append(f"dropped, {reason}: counted {counted}, found {events} rows")
        return result

    def _judge_ticket(self, ticket: int, due: bool) -> None:
        """Judge all rows of a prompt group; ``due``: it should have been trained by now."""
        history = self._lives.frozen.get(ticket)
        if history is None or ticket >= self.plan.steps * self.plan.prompts_per_step:
            self._result.add(self._judge_rows(ticket, due))
            return
        tasks = tuple(task for task, since in self._since.items() if since <= ticket)
        # Equal histories are one object, which lives as long as the ledger.
        key = id(history), due, tasks
        if key not in self._verdicts:
            self._verdicts[key] = self._judge_history(history, ticket, due), 0
        verdict, count = self._verdicts[key]
        self._verdicts[key] = verdict, count + 1
        if verdict is None:
            self._result.add(self._judge_rows(ticket, due))

    def _judge_history(self, history: History, ticket: int, due: bool) -> Audit | None:
        """Numbers of all prompt groups with this history, such as ``ticket``. None: they have
        problems, or their rows must be judged one by one."""
        result, missing = Audit(), set(history.rows)
        if due and not missing:
            return None
        for ends, lives in history.lives:
            is_due = due and missing.issuperset(ends)
            if due and not is_due and not missing.isdisjoint(ends):
                return None
            missing.difference_update(ends)
            one_row = Audit()
            self._judge_row(one_row, f"{ticket:09d}{ends[0]}", list(map(list, lives)), is_due)
            if one_row.has_problems:
                return None
            result.add(one_row, len(ends))
        return None if due and missing else result

    def _judge_rows(self, ticket: int, due: bool) -> Audit:
        """Numbers and problems of the rows of one prompt group."""
        result, judged = Audit(), set[str]()
        self._lives.open(ticket)
        lives_by_row, rows = self._lives.lives[ticket], self._lives.rows[ticket]
        if due:
            for name in rows or [f"{ticket:09d}"]:
                # The rows of a prompt group are due once: a second time they are missing.
                lives = [] if name in judged else lives_by_row.get(name, [])
                self._judge_row(result, name, lives, True)
                judged.add(name)
        for name, lives in lives_by_row.items():
            if name not in judged:
                self._judge_row(result, name, lives, False)
                if lives and ticket >= self.plan.steps * self.plan.prompts_per_step:
                    result.problems.append(f"{name}: accepted beyond the last step")
        return result

    def _due(self, steps: int) -> Sequence[int]:
        """Tickets that should have been trained in the first ``steps``: all of the run, or those of
        the steps' sets."""
        state, size = self.state, self.plan.prompts_per_step
        if steps == self.plan.steps or not state.tasks.in_sets:
            return range(steps * size)
        tickets: list[int] = []
        for step in range(steps):
            trained = state.tickets_of(step)
            tickets += trained
            if len(set(trained)) != size:
                self._result.problems.append(
                    f"step {step}: trained {len(set(trained))} prompt groups of {size}"
                )
        late = [t for t in state.tickets.untrained if state.groups[t].last_step < steps]
        self._result.problems += [
            f"ticket {t}: its last step was {state.groups[t].last_step}, not trained" for t in late
        ]
        return tickets

    def _judge_row(self, result: Audit, name: str, lives: Lives, due: bool) -> None:
        """Add the problems of one row; ``due``: it should have been trained by now."""
        surviving = [[use for use, detail in life if self._survives(use, detail)] for life in lives]
        trained = sum(life.count(_TRAINED) for life in surviving)
        if trained > 1 or (due and not trained):
            (result.duplicated if trained else result.lost).append(name)
            self._complain(result, name, f"trained {trained} times in the surviving lineage", lives)
        elif not all(_ended(life) for life in lives[:-1]):
            self._complain(result, name, "accepted again without having been dropped", lives)
        elif any(_TRAINED in life and _DROPPED in life for life in surviving):
            self._complain(result, name, "dropped, although it was trained", lives)
        for life in surviving:
            self._count(result, life)
            for task in self._violated_tasks(ticket_of(name), life):
                self._complain(result, name, f"consumed {life.count(task)} times by {task}", lives)

    def _count(self, result: Audit, life: list[str]) -> None:
        result.accepted += 1
        if _DROPPED in life:
            return
        result.consumed.update(set(life))
        if _TRAINED in life:
            result.trained += 1
        else:
            result.in_flight += 1
            result.waiting.update(task for task in self._needed() if task not in life)

    def _violated_tasks(self, ticket: int, life: list[str]) -> list[str]:
        """Tasks that consumed the row more than once, or did not consume it although it was
        trained."""
        owing = {task for task, since in self._since.items() if since <= ticket} & self._needed()
        missing = owing - set(life) if _TRAINED in life else set()
        return sorted(missing | {task for task in self._since if life.count(task) > 1})

    def _needed(self) -> set[str]:
        """Tasks that add fields which training needs."""
        needs, tasks = set(self.plan.tasks[POLICY].needs), self.plan.tasks
        return {name for name, task in tasks.items() if needs.issuperset(task.gives)}

    def _survives(self, use: str, detail: str) -> bool:
        if use == _DROPPED or not detail:
            return True
        mark = (use, detail)
        if mark not in self._surviving:
            version = next_version(detail) if use == _TRAINED else Version.parse(detail)
            self._surviving[mark] = version in self.state.lineage
        return self._surviving[mark]

    @staticmethod
    def _complain(result: Audit, name: str, problem: str, lives: Lives) -> None:
        texts = []
        for life in lives:
            marks = [" ".join(mark).strip() for mark in life]
            texts.append(", ".join(marks) or "accepted")
        history = "; ".join(texts) or "never accepted"
        result.problems.append(f"{name}: {problem} ({history})")


class Projection:
    """events.jsonl, compared with the events of the journal one by one."""

    def __init__(self, lines: Iterator[bytes], before: int = 0) -> None:
        """``lines``: of the file, after ``before`` lines that are known to match."""
        self._lines = lines
        self._journaled = self._read = self._same = before
        self._torn = False

    def compare(self, event: Event) -> None:
        """Compare the next event of the journal."""
        line = next(self._lines, None) if self._same == self._journaled else None
        if line is not None:
            self._read += 1
            if line == to_line(event):
                self._same += 1
                self._torn = False
            else:
                fields = _event_fields(line)
                self._same += fields == (event.id, event.what, event.version, event.reason)
                self._torn = not fields
        self._journaled += 1

    def problems(self, ended_well: bool) -> list[str]:
        """Differences between the file and the journal. After a kill of the controller, the last
        lines may be missing or incomplete."""
        total = self._read + sum(1 for _ in self._lines)
        behind = total == self._same + self._torn and total <= self._journaled
        if self._same == self._journaled == total or (behind and not ended_well):
            return []
        text = f"events.jsonl has {total} lines, the journal says {self._journaled}"
        return [f"{text}; line {self._same + 1} is the first that differs"]


def _event_fields(line: bytes) -> tuple[str, ...]:
    """Fields of one line of events.jsonl; empty: it is incomplete."""
    if len(line) > _EVENT_BYTES:
        return ()
    try:
        event = parse_json(line)
        return (event["id"], event["what"], event["version"], event["reason"])
    except (ValueError, LookupError, TypeError):
        return ()


def _ended(life: list[Mark]) -> bool:
    return bool(life) and life[-1][0] == _DROPPED
