"""`relax-hpc queue VERB`: what became of the rows of a run, and the rows themselves."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser

from relax_hpc.base.errors import EXIT_CONFIG, EXIT_DONE, ConfigError, RelaxError
from relax_hpc.base.path_errors import explain_path_error
from relax_hpc.base.rundir import RunDir
from relax_hpc.commands.command import Command, Verbs, complain, run_argument
from relax_hpc.config.layer_validation import COMMAND_LINE

if TYPE_CHECKING:
    from relax_hpc.queue.inspect.audit import Audit

_ANSWER_S = 3.0
_SHOWN = 20
"""Problems on the screen; --json has all of them."""


def _audit_arguments(parser: ArgumentParser) -> None:
    run_argument(parser)
    parser.add_argument("--json", action="store_true", help="For programs")


def _export_arguments(parser: ArgumentParser) -> None:
    run_argument(parser)
    parser.add_argument("--step", type=int, metavar="N", help="Rows of this step")
    parser.add_argument("--steps", metavar="A-B", help="Rows of steps A to B")
    parser.add_argument("--format", default="jsonl", metavar="F", help="jsonl or parquet")
    parser.add_argument("--output", metavar="FILE", help="File to write")


def _of_run(verb: str, act: Callable[[RunDir, dict[str, Any]], int], given: dict[str, Any]) -> int:
    run = RunDir(Path(given.pop("run")))
    if not run.config.exists():
        raise ConfigError(f"{run.root}: no run here (config.yaml is missing); name a run directory")
    from relax_hpc.queue.controller.journal import JournalError
    from relax_hpc.queue.storage.shard import ShardError

    try:
        return act(run, given)
    except (JournalError, ShardError) as error:
        raise ConfigError(str(error)) from error
    except BrokenPipeError:
        raise
    except OSError as error:
        if explain_path_error(error):
            raise
        raise RelaxError(f"queue {verb}: {error}") from error


def _audit(run: RunDir, given: dict[str, Any]) -> int:
    from relax_hpc.queue.inspect.audit import Ledger

    ledger, finished = Ledger(run), run.finished.exists()
    live = not finished and _answers(run)
    trained, steps = ledger.state.progress.trained_steps, ledger.plan.steps
    found = ledger.judge(trained)
    if not live:
        found.problems += ledger.events.problems(ended_well=finished)
    if finished and trained < steps:
        found.problems.append(
            f"the run is marked finished, its journal has {trained} of {steps} steps trained"
        )
    about = {
        "run_dir": str(run.root),
        "state": "finished" if finished else "live" if live else "not running",
    }
    about |= {"trained_steps": trained, "steps": steps, "journal_records": ledger.records}
    about |= _figures(found, len(ledger.plan.undeclared))
    print(json.dumps(about) if given.get("json") else "\n".join(_lines(about)))
    return EXIT_CONFIG if found.problems else EXIT_DONE


def _figures(found: Audit, rows: int) -> dict[str, Any]:
    """``rows``: for how many a prompt group counts that never had any."""
    failed = Counter({reason: count * rows for reason, count in found.failed.items()})
    return {
        "accepted": found.accepted,
        "trained": found.trained,
        "dropped": dict(found.dropped - found.refused),
        "in_flight": found.in_flight,
        "waiting_for": dict(found.waiting),
        "consumed_by": dict(found.consumed),
        "never_accepted": dict(found.refused + failed),
        "segment_tokens": found.segments,
        "torn_bytes": found.torn,
        "lost": found.lost,
        "duplicated": found.duplicated,
        "problems": found.problems,
    }


def _lines(about: dict[str, Any]) -> Iterator[str]:
    """The audit as text."""
    done = (
        f"{about['trained_steps']} of {about['steps']} steps trained, "
        f"{about['journal_records']} journal records"
    )
    yield f"{about['run_dir']}: {about['state']}, {done}"
    if about["state"] == "live":
        yield "the run goes on: this is its journal as it was a moment ago"
    yield _row(
        "accepted", about["accepted"], "rows; each acceptance of one that was dropped before counts"
    )
    yield _row("trained", about["trained"], "once, by steps that were not rolled back")
    yield _row("dropped", sum(about["dropped"].values()), _list(about["dropped"]))
    waiting = _list(about["waiting_for"])
    yield _row("in flight", about["in_flight"], waiting and f"to be consumed by: {waiting}")
    if about["never_accepted"]:
        yield _row(
            "not accepted", sum(about["never_accepted"].values()), _list(about["never_accepted"])
        )
    if tokens := about["segment_tokens"]:
        fates = {fate: count for fate, count in tokens.items() if fate != "appended"}
        yield _row(
            "in segments",
            tokens["appended"],
            f"tokens, of attempts under way and spares: {_list(fates)}",
        )
    yield _row("torn bytes", sum(about["torn_bytes"].values()), _list(about["torn_bytes"]))
    yield f"consumed by: {_list(about['consumed_by']) or 'no task yet'}"
    problems = about["problems"]
    yield from (f"wrong: {problem}" for problem in problems[:_SHOWN])
    if len(problems) > _SHOWN:
        yield f"wrong: {len(problems) - _SHOWN} more, see --json"
    if not problems:
        yield "nothing is wrong"


def _row(name: str, count: int, about: str) -> str:
    return f"{name:<13}{count:>9}  {about}".rstrip()


def _list(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))


def _answers(run: RunDir) -> bool:
    """Whether a controller of the run answers."""
    from relax_hpc.config.load import load_resolved
    from relax_hpc.net.rendezvous.roster import latest_card
    from relax_hpc.net.transport.sockets import open_socket
    from relax_hpc.queue.client import QueueClient
    from relax_hpc.queue.records import OBSERVER_INCARNATION

    if (card := latest_card(run, "hub")) is None:
        return False
    try:
        # Where nothing listens any more this fails at once; the question would wait for its
        # deadline.
        open_socket(card.endpoint, _ANSWER_S).close()
        with QueueClient(run, load_resolved(run.root), "observer", OBSERVER_INCARNATION) as client:
            client.status.get(timeout=_ANSWER_S).result()
    except (OSError, RelaxError):
        return False
    return True


def _export(run: RunDir, given: dict[str, Any]) -> int:
    from relax_hpc.queue.inspect.export import KeptRows, export

    if not given.get("output"):
        raise ConfigError(f"{COMMAND_LINE}: --output: found nothing, give the file to write")
    output, wanted = Path(given["output"]), _wanted(given)
    if not output.parent.is_dir():
        raise ConfigError(f"--output: {output.parent}: no such folder")
    kept = KeptRows(run)
    there = kept.steps()
    if (gone := next((step for step in wanted if step not in there), None)) is not None:
        found = f"kept are steps {_ranges(there)}" if there else "none are kept"
        raise ConfigError(
            f"queue export: no rows of step {gone}; {found} (queue.keep_steps says how long they "
            "stay)"
        )
    kept.spell, textless = _speller(run)
    count = export(kept, wanted, given.get("format", "jsonl"), output)
    print(f"{output}: {count} rows of step {_ranges(list(wanted))}")
    if textless:
        complain(f"the rows have no text: {textless}")
    if kept.absent:
        complain(
            f"{len(kept.absent)} prompt groups left out: their shards are not, or no longer, in "
            f"{kept.folder}"
        )
    return EXIT_DONE


def _speller(run: RunDir) -> tuple[Callable[[list[int]], str] | None, str]:
    """Decoder of tokens by the run's own tokenizer, or why it cannot be had."""
    from relax_hpc.data.tokenizer import load_tokenizer

    try:
        return load_tokenizer(run.model).decode, ""
    except (ConfigError, ImportError) as error:
        return None, str(error)


def _wanted(given: dict[str, Any]) -> range:
    """The steps that --step or --steps names."""
    step, steps = given.get("step"), given.get("steps")
    if (step is None) == (steps is None):
        raise ConfigError(f"{COMMAND_LINE}: give one of --step N and --steps A-B")
    if step is not None:
        return range(step, step + 1)
    ends = re.fullmatch(r"(\d+)-(\d+)", steps)
    if not ends or int(ends[1]) > int(ends[2]):
        raise ConfigError(
            f"{COMMAND_LINE}: --steps: found {steps!r}, allowed: A-B with A at most B, as in 3-7"
        )
    return range(int(ends[1]), int(ends[2]) + 1)


def _ranges(steps: list[int]) -> str:
    """Ascending numbers, as people write them.

    >>> _ranges([1, 2, 3, 5])
    '1-3, 5'
    """
    runs: list[list[int]] = []
    for step in steps:
        if runs and step == runs[-1][1] + 1:
            runs[-1][1] = step
        else:
            runs.append([step, step])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


QUEUE = Verbs(
    "What became of every row of a run, and the rows themselves.",
    {
        "audit": Command(
            "Prove from the journal that each accepted row was consumed once by every task, or "
            "dropped.",
            "RUN [--json]",
            _audit_arguments,
            partial(_of_run, "audit", _audit),
            only_reads=True,
            for_others=True,
        ),
        "export": Command(
            "Write the rows of steps that are still kept, with what their tokens say.",
            "RUN (--step N | --steps A-B) [--format jsonl|parquet] --output FILE",
            _export_arguments,
            partial(_of_run, "export", _export),
            only_reads=True,
            for_others=True,
        ),
    },
)
