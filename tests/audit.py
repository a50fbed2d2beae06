"""The audit of a run by sample id: nothing accepted may be lost, and nothing trained twice."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from relax_hpc.config import load_resolved
from relax_hpc.rundir import RunDir
from relax_hpc.transfer_queue.plan import Plan
from relax_hpc.transfer_queue.schema import sample_id
from relax_hpc.transfer_queue.state import QueueState
from relax_hpc.versions import Version
from tests.run_helpers import journal_records


@dataclass(slots=True)
class Audit:
    """What became of the samples of a run. `problems` is empty when all is well."""

    problems: list[str] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    """Samples by the reason of their drop; some were refused before they were accepted."""
    failed: Counter[str] = field(default_factory=Counter)
    """Prompt groups that never came to be, by reason."""
    noted: Counter[str] = field(default_factory=Counter)
    """Other events with a reason: `engine_fault/timeout`, `bad_prompt/over_long`."""


def read_events(run: RunDir) -> list[dict[str, Any]]:
    """Lines of events.jsonl; every one must be whole."""
    return [json.loads(line) for line in run.events.read_text().splitlines()]


def audit(run: RunDir) -> Audit:
    """Follow every sample through events.jsonl, and compare the file with the journal, whose projection it is."""
    plan = Plan.of(load_resolved(run.root))
    state, result, events = QueueState(plan), Audit(), read_events(run)
    for record in journal_records(run):
        state.apply(record)
    journaled = [(event.id, event.what, event.version, event.reason) for event in state.take_events()]
    if journaled != [(e["id"], e["what"], e["version"], e["reason"]) for e in events]:
        result.problems.append(f"events.jsonl has {len(events)} lines, the journal says {len(journaled)}")
    lives = _lives(events, plan.samples_per_group, result)
    for ticket in range(plan.steps * plan.groups_per_step):
        for k in range(plan.samples_per_group):
            name = sample_id(ticket, k)
            if problem := _judge(lives.pop(name, []), state):
                result.problems.append(f"{name}: {problem}")
    result.problems += [f"{name}: accepted beyond the last step" for name in lives]
    return result


def _lives(events: list[dict[str, Any]], samples: int, result: Audit) -> dict[str, list[list[str]]]:
    """Sample id -> of each acceptance what followed: versions that trained it, then perhaps "dropped"."""
    lives: dict[str, list[list[str]]] = defaultdict(list)
    for event in events:
        name, what, reason = event["id"], event["what"], event["reason"]
        if what == "accepted":
            lives[name].append([])
        elif what == "trained":
            lives[name][-1].append(event["version"])
        elif what == "dropped":
            result.dropped[reason] += 1
            if not reason:
                result.problems.append(f"{name}: dropped without a reason")
            if lives[name]:
                lives[name][-1].append("dropped")
        elif what == "failed":
            result.failed[reason] += 1
        elif reason:
            result.noted[f"{what}/{reason}"] += 1
    return lives


def _judge(lives: list[list[str]], state: QueueState) -> str:
    """What is wrong with one sample; versions that were rolled back do not count as trained."""
    trained = [v for life in lives for v in life if v != "dropped" and state.in_lineage(next_of(v))]
    if len(trained) != 1:
        return f"trained {len(trained)} times in the surviving lineage ({lives})"
    early = [life for life in lives[:-1] if life[-1:] != ["dropped"]]
    return f"accepted again without having been dropped ({lives})" if early else ""


def next_of(trained: str) -> Version:
    """The version that a step made: it survives exactly when the step does."""
    version = Version.parse(trained)
    return Version(version.epoch, version.number + 1)
