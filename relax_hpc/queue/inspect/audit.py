"""The audit of a run by row id, from its journal: each accepted row is consumed once by every task,
or dropped.

A row has a life for every time that it was accepted; a life ends when the row is trained or
dropped. What weights did that were rolled back later does not count. Which rows a prompt group has,
who generated it has declared.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
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
"""Bytes of a line of events at most; a longer one is none of ours."""
_COPY_BYTES = 1 << 20
_NOT_OURS = LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError
"""Errors of records that no controller of ours has written."""
_DROPPED, _TRAINED = "dropped", POLICY
_Mark = tuple[str, str]
"""A task and the version that it used ("": it uses none), or _DROPPED and the reason. _TRAINED: by
all trainers."""
_Lives = list[list[_Mark]]


@dataclass(slots=True)
class Audit:
    """Result of an audit: what became of the rows of a run. `problems` is empty when all is
    well."""

    problems: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    """Ids of rows that the surviving steps should have trained, and did not; of prompt groups that
    never had any."""
    duplicated: list[str] = field(default_factory=list)
    """Ids of rows that the surviving steps trained more than once."""
    accepted: int = 0
    """Rows that were accepted, each time that they were. Each was trained, dropped or is in
    flight."""
    trained: int = 0
    in_flight: int = 0
    waiting: Counter[str] = field(default_factory=Counter)
    """Rows in flight that each task has yet to consume."""
    consumed: Counter[str] = field(default_factory=Counter)
    """Rows in flight or trained that each task has consumed."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Rows by the reason of their drop."""
    refused: Counter[str] = field(default_factory=Counter)
    """Rows among `dropped` that were never accepted."""
    failed: Counter[str] = field(default_factory=Counter)
    """Prompt groups that never came to be, by reason."""
    noted: Counter[str] = field(default_factory=Counter)
    """Events with another reason: `engine_fault/timeout`, `bad_prompt/over_long`."""
    segments: dict[str, int] = field(default_factory=dict)
    """Tokens that were appended to logs before their prompt groups were accepted, and what became
    of them: see `Segments.counts`, zeros left out. What is in a log is no accepted row."""
    torn: dict[str, int] = field(default_factory=dict)
    """Bytes at the end of journal files that do not count: see `JournalCopy`."""


def audit(run: RunDir, steps: int | None = None) -> Audit:
    """Follow every row of a run that has ended.

    ``steps``: of a run that was ended early, how many it has trained; None: all that were planned.
    JournalError if the journal is damaged; events.jsonl must be its projection to the last line.
    """
    ledger = Ledger(run)
    result = ledger.judge(ledger.plan.steps if steps is None else steps)
    result.problems += ledger.events.problems(ended_well=True)
    return result


def next_of(trained: str) -> Version:
    """The version that a step made: it survives exactly when the step does."""
    version = Version.parse(trained)
    return Version(version.incarnation, version.number + 1)


def read_events(run: RunDir) -> list[dict[str, Any]]:
    """Lines of events.jsonl; every one must be whole."""
    return [parse_json(line) for line in event_lines(run.events)]


def journal_records(run: RunDir) -> Iterator[dict[str, Any]]:
    """Everything the controllers of ``run`` journaled, in order. The run's own files stay as they
    are."""
    return JournalCopy(run).records()


class JournalCopy:
    """A journal as it is now, also of a live run: the newest file is copied first, because it seals
    the others."""

    def __init__(self, run: RunDir) -> None:
        self.folder = run.journal
        self.torn: dict[str, int] = {}
        """File -> bytes behind its last record that counts: cut off by a crash, or written after a
        successor began."""

    def records(self) -> Iterator[dict[str, Any]]:
        """All records in order; JournalError, which names the file and the offset, if a middle is
        damaged."""
        if not self.folder.is_dir():
            return
        with tempfile.TemporaryDirectory() as name:
            copy = Path(name)
            files = sorted(filter(Path.is_file, self.folder.iterdir()), reverse=True)
            self._check_room(files, copy)
            for path in files:
                with open_in_run(path) as source, (copy / path.name).open("wb") as target:
                    shutil.copyfileobj(source, target, _COPY_BYTES)
            journal = _Unsealed(copy, _AFTER_ALL_INCARNATIONS, durable=False)
            try:
                yield from journal.replay()
            except JournalError as error:
                raise JournalError(str(error).replace(name, str(self.folder))) from None
            except _NOT_OURS as error:
                raise JournalError(
                    f"{self.folder}: not laid out as a journal: {error!r}"
                ) from error
            finally:
                journal.close()
            sizes = {
                incarnation: (copy / f"inc-{int(incarnation):06d}.journal").stat().st_size
                for incarnation in journal.lengths
            }
            self.torn = {
                f"inc-{int(e):06d}.journal": sizes[e] - end for e, end in journal.lengths.items()
            }

    def _check_room(self, files: Sequence[Path], folder: Path) -> None:
        """JournalError: a copy of the journal's ``files`` would take over half of the free disk of
        ``folder``."""
        size, free = sum(path.stat().st_size for path in files), shutil.disk_usage(folder).free
        if size > free // 2:
            raise JournalError(
                f"{self.folder}: {size} bytes are copied to {folder.parent}, which has {free} "
                "free; set TMPDIR to a folder with more room"
            )

    def replay(self, state: QueueState) -> Iterator[Iterator[Event]]:
        """Apply all records to ``state``; the events of each. JournalError also if one cannot
        follow the others."""
        for number, record in enumerate(self.records(), start=1):
            try:
                state.apply(record)
            except _NOT_OURS as error:
                text = (
                    f"{self.folder}: record {number} ({record.get('op')}) cannot follow those "
                    f"before it: {error!r}"
                )
                raise JournalError(text) from error
            yield state.events.take()


class _Unsealed(Journal):
    """Keeps to itself the seal that it would write: how many bytes of each file count."""

    def append(self, record: dict[str, Any]) -> None:
        self.lengths: dict[str, int] = record["lengths"]


class Ledger:
    """The lives of all rows, as the journal of ``run`` tells them. JournalError if it is
    damaged."""

    def __init__(self, run: RunDir) -> None:
        self.plan = Plan.from_config(load_resolved(run.root))
        self.state = QueueState(self.plan)
        self.events = Projection(run.events)
        self.records = 0
        self._result = Audit()
        self._lives: dict[str, _Lives] = defaultdict(list)
        self._rows: dict[int, list[str]] = defaultdict(list)
        """Ids of the rows that were accepted last, by ticket."""
        self._counted: Counter[str] = Counter()
        """Drops by reason as the queue counts them, which may have forgotten how many rows a prompt
        group has."""
        self._marks: dict[_Mark, _Mark] = {}
        self._tasks = {task.gives[0]: name for name, task in self.plan.tasks.items() if task.gives}
        """Event of a middle task -> the task."""
        self._since: dict[str, int] = {}
        """Middle task -> lowest ticket that it consumed: one that joined at a resume owes nothing
        of those before."""
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
        ticket, *place = parse_row_id(name)
        if place == [0, 0]:
            # Another attempt may have other rows.
            self._rows[ticket] = []
        self._rows[ticket].append(name)
        self._lives[name].append([])

    def _mark(self, name: str, what: str, about: str) -> None:
        mark = (what, about)
        if self._is_alive(name):
            # Millions of rows share few marks.
            self._lives[name][-1].append(self._marks.setdefault(mark, mark))
        else:
            self._result.problems.append(
                f"{name}: {what}, although it was not accepted, or dropped since"
            )

    def _return(self, ticket: int) -> None:
        """Take the rows of ``ticket`` as untrained: a trainer has gone back, and trains on them
        once more."""
        for row in filter(self._is_alive, self._rows[ticket]):
            self._lives[row][-1] = [mark for mark in self._lives[row][-1] if mark[0] != _TRAINED]

    def _drop(self, name: str, reason: str) -> None:
        """A row, or a prompt group whose rows the queue does not know: it never had any, or has
        forgotten them."""
        if not reason:
            self._result.problems.append(f"{name}: dropped without a reason")
        whole = "." not in name
        count = len(self.plan.undeclared) if whole else 1
        self._counted[reason] += count
        alive = [
            row for row in (self._rows[ticket_of(name)] if whole else [name]) if self._is_alive(row)
        ]
        for row in alive:
            self._mark(row, _DROPPED, reason)
        self._result.dropped[reason] += len(alive) or count
        if not alive:
            self._result.refused[reason] += count

    def _is_alive(self, row: str) -> bool:
        return bool(self._lives[row]) and not _ended(self._lives[row][-1])

    def _consume(self, ticket: int, task: str) -> None:
        uses = (
            self.state.groups[ticket].old_version
            if "old_logprob_version" in self.plan.tasks[task].gives
            else 0
        )
        self._since[task] = min(ticket, self._since.get(task, ticket))
        for name in self._rows[ticket]:
            self._mark(name, task, str(Version.decode(uses)) if uses else "")

    def judge(self, steps: int) -> Audit:
        """Result for all rows, ``steps`` being trained."""
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
                self._judge(name, self._lives.pop(name, []), True)
        for name, lives in self._lives.items():
            self._judge(name, lives, False)
            if lives and ticket_of(name) >= end:
                result.problems.append(f"{name}: accepted beyond the last step")
        for reason in state.counts.dropped.keys() | self._counted.keys():
            found = self._counted[reason] + result.failed[reason] * len(self.plan.undeclared)
            if (counted := state.counts.dropped[reason]) != found:
                result.problems.append(f"dropped, {reason}: counted {counted}, found {found} rows")
        return result

    def _due(self, steps: int) -> Sequence[int]:
        """Tickets that should have been trained once ``steps`` are: all of the run, or those of the
        steps' sets."""
        state, size = self.state, self.plan.prompts_per_step
        if steps == self.plan.steps or not state.tasks.in_sets:
            return range(steps * size)
        for step in range(steps):
            if (found := len(set(state.tickets_of(step)))) != size:
                self._result.problems.append(
                    f"step {step}: trained {found} prompt groups of {size}"
                )
        late = [t for t in state.tickets.untrained if state.groups[t].last < steps]
        self._result.problems += [
            f"ticket {t}: its last step was {state.groups[t].last}, not trained" for t in late
        ]
        return [ticket for step in range(steps) for ticket in state.tickets_of(step)]

    def _judge(self, name: str, lives: _Lives, due: bool) -> None:
        """Note what is wrong with one row; ``due``: it should have been trained by now."""
        kept = [[what for what, about in life if self._survives(what, about)] for life in lives]
        trained = sum(life.count(_TRAINED) for life in kept)
        if trained > 1 or (due and not trained):
            (self._result.duplicated if trained else self._result.lost).append(name)
            self._complain(name, f"trained {trained} times in the surviving lineage", lives)
        elif not all(_ended(life) for life in lives[:-1]):
            self._complain(name, "accepted again without having been dropped", lives)
        elif any(_TRAINED in life and _DROPPED in life for life in kept):
            self._complain(name, "dropped, although it was trained", lives)
        for life in kept:
            self._count(life)
            for task in self._unlawful(ticket_of(name), life):
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

    def _unlawful(self, ticket: int, life: list[str]) -> list[str]:
        """Middle tasks that consumed the row more than once, or not at all although it was
        trained."""
        owing = {task for task, since in self._since.items() if since <= ticket} & self._needed()
        missing = owing - set(life) if _TRAINED in life else set()
        return sorted(missing | {task for task in self._since if life.count(task) > 1})

    def _needed(self) -> set[str]:
        """Tasks that a row goes through."""
        needs, tasks = set(self.plan.tasks[POLICY].needs), self.plan.tasks
        return {name for name, task in tasks.items() if needs.issuperset(task.gives)}

    def _survives(self, what: str, about: str) -> bool:
        if what == _DROPPED or not about:
            return True
        return (next_of(about) if what == _TRAINED else Version.parse(about)) in self.state.lineage

    def _complain(self, name: str, what: str, lives: _Lives) -> None:
        told = "; ".join(
            ", ".join(" ".join(mark).strip() for mark in life) or "accepted" for life in lives
        )
        self._result.problems.append(f"{name}: {what} ({told or 'never accepted'})")


class Projection:
    """events.jsonl, compared with the events of the journal as these come."""

    def __init__(self, path: Path) -> None:
        self._lines = event_lines(path)
        self._journaled = self._read = self._same = 0
        self._torn = False

    def compare(self, event: Event) -> None:
        """Compare the next event of the journal."""
        if self._same == self._journaled and (line := next(self._lines, None)) is not None:
            told = _told(line)
            self._read += 1
            self._same += told == (event.id, event.what, event.version, event.reason)
            self._torn = not told
        self._journaled += 1

    def problems(self, ended_well: bool) -> list[str]:
        """Differences of the file. A controller that was killed may have left out the last lines,
        or torn one."""
        total = self._read + sum(1 for _ in self._lines)
        behind = total == self._same + self._torn and total <= self._journaled
        if self._same == self._journaled == total or (behind and not ended_well):
            return []
        text = f"events.jsonl has {total} lines, the journal says {self._journaled}"
        return [f"{text}; line {self._same + 1} is the first that differs"]


def _told(line: bytes) -> tuple[str, ...]:
    """Fields of one line of events.jsonl; none if it is torn."""
    if len(line) > _EVENT_BYTES:
        return ()
    try:
        event = parse_json(line)
        return (event["id"], event["what"], event["version"], event["reason"])
    except (ValueError, LookupError, TypeError):
        return ()


def _ended(life: list[_Mark]) -> bool:
    return bool(life) and life[-1][0] == _DROPPED
