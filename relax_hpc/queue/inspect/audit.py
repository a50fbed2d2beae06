"""The audit of a run by row id, from its journal: each accepted row is consumed once by every task,
or dropped.

A row has a life for each time that it was accepted. A life ends when the row is trained or dropped.
What rolled-back weights did does not count. The owner of a prompt group declares its rows.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relax_hpc.base.foreign_files import open_in_run, parse_json
from relax_hpc.base.rundir import RunDir
from relax_hpc.base.versions import Version
from relax_hpc.config import load_resolved
from relax_hpc.config.roles import POLICY
from relax_hpc.queue.controller.eventlog import event_lines
from relax_hpc.queue.controller.journal import Journal, JournalError
from relax_hpc.queue.controller.state.queue_state import QueueState
from relax_hpc.queue.plan import Plan
from relax_hpc.queue.records import Event
from relax_hpc.queue.row_ids import parse_row_id, ticket_of

_AFTER_ALL_INCARNATIONS = 999_999
_EVENT_BYTES = 1 << 16
"""Longest line of events, in bytes. A longer one was not written by this package."""
_COPY_BYTES = 1 << 20
_MALFORMED = LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError
"""Errors of records that this package has not written."""
_DROPPED, _TRAINED = "dropped", POLICY
_Mark = tuple[str, str]
"""A task and the version that it used ("": none), or _DROPPED and the reason. _TRAINED: by all
trainers."""
_Lives = list[list[_Mark]]


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


def journal_records(run: RunDir) -> Iterator[dict[str, Any]]:
    """All records of the controllers of ``run``, in order. The run's own files do not change."""
    return JournalCopy(run).records()


class JournalCopy:
    """A copy of the journal as it is now, also of a live run. The newest file is copied first,
    because it seals the others."""

    def __init__(self, run: RunDir) -> None:
        self.folder = run.journal
        self.torn: dict[str, int] = {}
        """File -> bytes after its last record that counts: an incomplete record of a crash, or
        records that were written after a successor started."""

    def records(self) -> Iterator[dict[str, Any]]:
        """All records in order. JournalError, naming the file and the offset: a record before the
        end is damaged."""
        if not self.folder.is_dir():
            return
        with tempfile.TemporaryDirectory() as name:
            copy = Path(name)
            files = sorted(filter(Path.is_file, self.folder.iterdir()), reverse=True)
            self._check_space(files, copy)
            for path in files:
                with open_in_run(path) as source, (copy / path.name).open("wb") as target:
                    shutil.copyfileobj(source, target, _COPY_BYTES)
            journal = _UnsealedJournal(copy, _AFTER_ALL_INCARNATIONS, durable=False)
            try:
                yield from journal.replay()
            except JournalError as error:
                raise JournalError(str(error).replace(name, str(self.folder))) from None
            except _MALFORMED as error:
                raise JournalError(
                    f"{self.folder}: not laid out as a journal: {error!r}"
                ) from error
            finally:
                journal.close()
            for incarnation, end in journal.lengths.items():
                file_name = f"inc-{int(incarnation):06d}.journal"
                self.torn[file_name] = (copy / file_name).stat().st_size - end

    def _check_space(self, files: Sequence[Path], folder: Path) -> None:
        """JournalError: a copy of the journal's ``files`` would take more than half of the free
        disk space of ``folder``."""
        size, free = sum(path.stat().st_size for path in files), shutil.disk_usage(folder).free
        if size > free // 2:
            raise JournalError(
                f"{self.folder}: {size} bytes are copied to {folder.parent}, which has {free} "
                "free; set TMPDIR to a folder with more space"
            )

    def replay(
        self, state: QueueState, before: Callable[[dict[str, Any]], None] = lambda record: None
    ) -> Iterator[Iterator[Event]]:
        """Apply all records to ``state``; the events of each. ``before`` is called with each record
        before it is applied.

        JournalError: also if a record cannot follow the earlier ones.
        """
        for number, record in enumerate(self.records(), start=1):
            try:
                before(record)
                state.apply(record)
            except _MALFORMED as error:
                text = (
                    f"{self.folder}: record {number} ({record.get('op')}) cannot follow the "
                    f"records before it: {error!r}"
                )
                raise JournalError(text) from error
            yield state.events.take()


class _UnsealedJournal(Journal):
    """A journal that writes nothing. It keeps the lengths that its seal would contain."""

    def append(self, record: dict[str, Any]) -> None:
        self.lengths: dict[str, int] = record["lengths"]


class Ledger:
    """The lives of all rows, from the journal of ``run``. JournalError: it is damaged."""

    def __init__(self, run: RunDir) -> None:
        self.plan = Plan.from_config(load_resolved(run.root))
        self.state = QueueState(self.plan)
        self.events = Projection(run.events)
        self.records = 0
        self._result = Audit()
        self._lives: dict[str, _Lives] = defaultdict(list)
        self._rows: dict[int, list[str]] = defaultdict(list)
        """Ids of the rows that were last accepted, by ticket."""
        self._counted: Counter[str] = Counter()
        """Drops by reason, counted like the queue counts them. It may have forgotten the number of
        rows of a prompt group."""
        self._marks: dict[_Mark, _Mark] = {}
        self._tasks = {task.gives[0]: name for name, task in self.plan.tasks.items() if task.gives}
        """Event of a task that adds fields -> the task."""
        self._since: dict[str, int] = {}
        """Task -> lowest ticket that it consumed. A task that joined at a resume need not consume
        earlier tickets."""
        copy = JournalCopy(run)
        for events in copy.replay(self.state):
            self.records += 1
            for event in events:
                self.events.compare(event)
                self._take(event)
        self._result.torn = {name: size for name, size in copy.torn.items() if size}

    def _take(self, event: Event) -> None:
        result = self._result
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
        if in_group == [0, 0]:
            # Another attempt may have other rows.
            self._rows[ticket] = []
        self._rows[ticket].append(name)
        self._lives[name].append([])

    def _mark(self, name: str, use: str, detail: str) -> None:
        """Add a mark to the present life of a row: a task and its version, or a drop and its
        reason."""
        mark = (use, detail)
        if self._is_alive(name):
            # Millions of rows share few mark objects.
            self._lives[name][-1].append(self._marks.setdefault(mark, mark))
        else:
            self._result.problems.append(
                f"{name}: {use}, although it was not accepted, or dropped since"
            )

    def _return(self, ticket: int) -> None:
        """Mark the rows of ``ticket`` as untrained: a trainer has resumed earlier and trains on
        them again."""
        for row in filter(self._is_alive, self._rows[ticket]):
            self._lives[row][-1] = [mark for mark in self._lives[row][-1] if mark[0] != _TRAINED]

    def _drop(self, name: str, reason: str) -> None:
        """Drop a row, or a prompt group whose rows the queue does not know, because it never had
        any or has forgotten them."""
        if not reason:
            self._result.problems.append(f"{name}: dropped without a reason")
        is_group = "." not in name
        count = len(self.plan.undeclared) if is_group else 1
        self._counted[reason] += count
        rows = self._rows[ticket_of(name)] if is_group else [name]
        alive = [row for row in rows if self._is_alive(row)]
        for row in alive:
            self._mark(row, _DROPPED, reason)
        self._result.dropped[reason] += len(alive) or count
        if not alive:
            self._result.refused[reason] += count

    def _is_alive(self, row: str) -> bool:
        return bool(self._lives[row]) and not _ended(self._lives[row][-1])

    def _consume(self, ticket: int, task: str) -> None:
        version = 0
        if "old_logprob_version" in self.plan.tasks[task].gives:
            version = self.state.groups[ticket].old_version
        self._since[task] = min(ticket, self._since.get(task, ticket))
        for name in self._rows[ticket]:
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
        end = self.plan.steps * self.plan.prompts_per_step
        for ticket in self._due(steps):
            for name in self._rows.get(ticket) or [f"{ticket:09d}"]:
                self._judge_row(name, self._lives.pop(name, []), True)
        for name, lives in self._lives.items():
            self._judge_row(name, lives, False)
            if lives and ticket_of(name) >= end:
                result.problems.append(f"{name}: accepted beyond the last step")
        for reason in state.counts.dropped.keys() | self._counted.keys():
            events = self._counted[reason] + result.failed[reason] * len(self.plan.undeclared)
            counted = state.counts.dropped[reason]
            if counted != events:
                result.problems.append(f"dropped, {reason}: counted {counted}, found {events} rows")
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

    def _judge_row(self, name: str, lives: _Lives, due: bool) -> None:
        """Add the problems of one row; ``due``: it should have been trained by now."""
        surviving = [[use for use, detail in life if self._survives(use, detail)] for life in lives]
        trained = sum(life.count(_TRAINED) for life in surviving)
        if trained > 1 or (due and not trained):
            (self._result.duplicated if trained else self._result.lost).append(name)
            self._complain(name, f"trained {trained} times in the surviving lineage", lives)
        elif not all(_ended(life) for life in lives[:-1]):
            self._complain(name, "accepted again without having been dropped", lives)
        elif any(_TRAINED in life and _DROPPED in life for life in surviving):
            self._complain(name, "dropped, although it was trained", lives)
        for life in surviving:
            self._count(life)
            for task in self._violated_tasks(ticket_of(name), life):
                self._complain(name, f"consumed {life.count(task)} times by {task}", lives)

    def _count(self, life: list[str]) -> None:
        result = self._result
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
        version = next_version(detail) if use == _TRAINED else Version.parse(detail)
        return version in self.state.lineage

    def _complain(self, name: str, problem: str, lives: _Lives) -> None:
        texts = []
        for life in lives:
            marks = [" ".join(mark).strip() for mark in life]
            texts.append(", ".join(marks) or "accepted")
        history = "; ".join(texts) or "never accepted"
        self._result.problems.append(f"{name}: {problem} ({history})")


class Projection:
    """events.jsonl, compared with the events of the journal one by one."""

    def __init__(self, path: Path) -> None:
        self._lines = event_lines(path)
        self._journaled = self._read = self._same = 0
        self._torn = False

    def compare(self, event: Event) -> None:
        """Compare the next event of the journal."""
        line = next(self._lines, None) if self._same == self._journaled else None
        if line is not None:
            fields = _event_fields(line)
            self._read += 1
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


def _ended(life: list[_Mark]) -> bool:
    return bool(life) and life[-1][0] == _DROPPED
