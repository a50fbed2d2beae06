"""`relax-hpc queue VERB`: audit the rows of a run, and export them."""

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
from relax_hpc.commands.command import (
    Command,
    CommandGroup,
    complain,
    json_argument,
    run_argument,
)
from relax_hpc.config.layer_validation import COMMAND_LINE

if TYPE_CHECKING:
    from relax_hpc.queue.inspect.audit import Audit

ROWS_FILE = "rows.jsonl"
"""File in a run directory with all rows of a run that only generates."""
_ANSWER_S = 3.0
_SHOWN = 20
"""Number of problems on the screen; --json prints all of them."""


def _audit_arguments(parser: ArgumentParser) -> None:
    run_argument(parser)
    parser.add_argument(
        "--full",
        action="store_true",
        help="Read the whole journal and every event, also if a summary of them exists.",
    )
    json_argument(parser)


def _export_arguments(parser: ArgumentParser) -> None:
    run_argument(parser)
    parser.add_argument("--step", type=int, metavar="N", help="Export the rows of this step.")
    parser.add_argument("--steps", metavar="A-B", help="Export the rows of steps A to B.")
    parser.add_argument(
        "--format", default="jsonl", metavar="F", help="Format of the file: jsonl or parquet."
    )
    parser.add_argument("--output", metavar="FILE", help="File to write.")


def _on_run(
    verb: str, act: Callable[[RunDir, dict[str, Any]], int], arguments: dict[str, Any]
) -> int:
    """Call ``act`` on the run of the command line, with errors of one line."""
    run = RunDir(Path(arguments.pop("run")))
    if not run.config.exists():
        raise ConfigError(f"{run.root}: no run here (config.yaml is missing); name a run directory")
    from relax_hpc.queue.controller.journal import JournalError
    from relax_hpc.queue.storage.shard import ShardError

    try:
        return act(run, arguments)
    except (JournalError, ShardError) as error:
        raise ConfigError(str(error)) from error
    except BrokenPipeError:
        raise
    except OSError as error:
        if explain_path_error(error):
            raise
        raise RelaxError(f"queue {verb}: {error}") from error


def _audit(run: RunDir, arguments: dict[str, Any]) -> int:
    from relax_hpc.queue.inspect.audit import Ledger

    is_full = arguments.get("full", False)
    ledger = Ledger(run) if is_full else Ledger.from_summary(run)
    finished = run.finished.exists()
    live = not finished and _answers(run)
    trained, steps = ledger.state.progress.trained_steps, ledger.plan.steps
    audit = ledger.judge(trained)
    if not live:
        audit.problems += ledger.events.problems(ended_well=finished)
    if finished and trained < steps:
        audit.problems.append(
            f"the run is marked finished, its journal has {trained} of {steps} steps trained"
        )
    state = "live" if live else "not running"
    report: dict[str, Any] = {
        "run_dir": str(run.root),
        "state": "finished" if finished else state,
        "trained_steps": trained,
        "steps": steps,
        "journal_records": ledger.records,
        "summarised_records": ledger.summarised_records,
    }
    report |= _count_rows(audit, len(ledger.plan.undeclared))
    print(json.dumps(report) if arguments.get("json") else "\n".join(_audit_lines(report)))
    return EXIT_CONFIG if audit.problems else EXIT_DONE


def _count_rows(audit: Audit, rows: int) -> dict[str, Any]:
    """Numbers of an audit. A prompt group that never had any rows counts as ``rows`` rows."""
    failed = Counter({reason: count * rows for reason, count in audit.failed.items()})
    return {
        "accepted": audit.accepted,
        "trained": audit.trained,
        "dropped": dict(audit.dropped - audit.refused),
        "in_flight": audit.in_flight,
        "waiting_for": dict(audit.waiting),
        "consumed_by": dict(audit.consumed),
        "never_accepted": dict(audit.refused + failed),
        "segment_tokens": audit.segments,
        "torn_bytes": audit.torn,
        "lost": audit.lost,
        "duplicated": audit.duplicated,
        "problems": audit.problems,
    }


def _audit_lines(report: dict[str, Any]) -> Iterator[str]:
    """The audit as text."""
    progress = (
        f"{report['trained_steps']} of {report['steps']} steps trained, "
        f"{report['journal_records']} journal records"
    )
    yield f"{report['run_dir']}: {report['state']}, {progress}"
    if report["summarised_records"]:
        yield (
            f"{report['summarised_records']} of the records from the hub's summary, whose bytes "
            "were compared with the journal; --full reads all"
        )
    if report["state"] == "live":
        yield "the run continues: these are the numbers of a moment ago"
    yield _row(
        "accepted",
        report["accepted"],
        "rows; a row that was dropped and accepted again counts each time",
    )
    yield _row("trained", report["trained"], "once, by steps that were not rolled back")
    yield _row("dropped", sum(report["dropped"].values()), _list(report["dropped"]))
    waiting = _list(report["waiting_for"])
    yield _row("in flight", report["in_flight"], waiting and f"to be consumed by: {waiting}")
    if report["never_accepted"]:
        yield _row(
            "not accepted", sum(report["never_accepted"].values()), _list(report["never_accepted"])
        )
    if tokens := report["segment_tokens"]:
        fates = {fate: count for fate, count in tokens.items() if fate != "appended"}
        yield _row(
            "in segments",
            tokens["appended"],
            f"tokens, of attempts under way and spares: {_list(fates)}",
        )
    yield _row("torn bytes", sum(report["torn_bytes"].values()), _list(report["torn_bytes"]))
    yield f"consumed by: {_list(report['consumed_by']) or 'no task yet'}"
    problems = report["problems"]
    yield from (f"wrong: {problem}" for problem in problems[:_SHOWN])
    if len(problems) > _SHOWN:
        yield f"wrong: {len(problems) - _SHOWN} more problems, see --json"
    if not problems:
        yield "nothing is wrong"


def _row(name: str, count: int, text: str) -> str:
    return f"{name:<13}{count:>9}  {text}".rstrip()


def _list(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))


def _answers(run: RunDir) -> bool:
    """Whether a controller of the run answers."""
    from relax_hpc.config.load import load_resolved
    from relax_hpc.net.rendezvous.roster import latest_card
    from relax_hpc.net.transport.sockets import open_socket
    from relax_hpc.queue.client import QueueClient
    from relax_hpc.queue.records import OBSERVER_INCARNATION

    card = latest_card(run, "hub")
    if card is None:
        return False
    try:
        # If no process listens, this fails immediately, while the request would wait for its
        # deadline.
        open_socket(card.endpoint, _ANSWER_S).close()
        with QueueClient(run, load_resolved(run.root), "observer", OBSERVER_INCARNATION) as client:
            client.status.get(timeout=_ANSWER_S).result()
    except (OSError, RelaxError):
        return False
    return True


def _export(run: RunDir, arguments: dict[str, Any]) -> int:
    from relax_hpc.queue.inspect.export import KeptRows, export

    if not arguments.get("output"):
        raise ConfigError(f"{COMMAND_LINE}: --output: found nothing, give the file to write")
    output, wanted = Path(arguments["output"]), _requested_steps(arguments)
    if not output.parent.is_dir():
        raise ConfigError(f"--output: {output.parent}: no such folder")
    kept = KeptRows(run)
    stored = kept.steps()
    missing = next((step for step in wanted if step not in stored), None)
    if missing is not None:
        present = f"steps {_ranges(stored)} are kept" if stored else "no steps are kept"
        raise ConfigError(
            f"queue export: no rows of step {missing}; {present} (queue.keep_steps says how long "
            "they stay)"
        )
    kept.decode_tokens, textless = _speller(run)
    count = export(kept, wanted, arguments.get("format", "jsonl"), output)
    print(f"{output}: {count} rows of step {_ranges(list(wanted))}")
    if textless:
        complain(f"the rows have no text: {textless}")
    if kept.absent:
        complain(
            f"{len(kept.absent)} prompt groups left out: their shards are not, or no longer, in "
            f"{kept.folder}"
        )
    return EXIT_DONE


def export_all_rows(run: RunDir) -> str:
    """Write all rows of a run that has ended to rows.jsonl in its directory. Returns a line about
    the file."""
    from relax_hpc.queue.inspect.export import KeptRows, export

    kept, output = KeptRows(run), run.root / ROWS_FILE
    kept.decode_tokens, _ = _speller(run)
    steps = kept.steps()
    count = export(kept, steps, "jsonl", output)
    return f"{output}: {count} rows of step {_ranges(steps)}"


def _speller(run: RunDir) -> tuple[Callable[[list[int]], str] | None, str]:
    """Decoder of tokens with the tokenizer of the run, or the reason why it cannot be loaded."""
    from relax_hpc.data.tokenizer import load_tokenizer

    try:
        return load_tokenizer(run.model).decode, ""
    except (ConfigError, ImportError) as error:
        return None, str(error)


def _requested_steps(arguments: dict[str, Any]) -> range:
    """The steps that --step or --steps names."""
    step, steps = arguments.get("step"), arguments.get("steps")
    if step is not None and steps is None:
        return range(step, step + 1)
    if step is not None or steps is None:
        raise ConfigError(f"{COMMAND_LINE}: give one of --step N and --steps A-B")
    ends = re.fullmatch(r"(\d+)-(\d+)", steps)
    if not ends or int(ends[1]) > int(ends[2]):
        raise ConfigError(
            f"{COMMAND_LINE}: --steps: found {steps!r}, allowed: A-B with A at most B, as in 3-7"
        )
    return range(int(ends[1]), int(ends[2]) + 1)


def _ranges(steps: list[int]) -> str:
    """Ascending numbers in a short form.

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


QUEUE = CommandGroup(
    "Audit the rows of a run, or export them.",
    {
        "audit": Command(
            "Prove from the journal that every task has consumed each accepted row exactly once, "
            "or that the row was dropped for a reason.",
            "RUN [--full] [--json]",
            _audit_arguments,
            partial(_on_run, "audit", _audit),
            only_reads=True,
            for_others=True,
        ),
        "export": Command(
            "Write the rows of steps that are still kept to a file, with the text of their tokens.",
            "RUN (--step N | --steps A-B) [--format jsonl|parquet] --output FILE",
            _export_arguments,
            partial(_on_run, "export", _export),
            only_reads=True,
            for_others=True,
        ),
    },
)
