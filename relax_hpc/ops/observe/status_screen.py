"""`relax-hpc status`: print the status of a run as text or as JSON, once or repeatedly.

On a terminal, a status that is updated fits the window. State, step, estimated end, reward and
held-out score are its first lines, so that they stay visible in a small window.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.rundir import RunDir
from relax_hpc.base.terminal_text import (
    columns_of,
    escape_line,
    has_colours,
    unfiltered,
    wrap_text,
)
from relax_hpc.cluster.slurm.commands import Slurm
from relax_hpc.ops.observe.run_state import FINAL_STATES
from relax_hpc.ops.observe.status import SLURM_S, status
from relax_hpc.ops.observe.status_view import (
    COLUMNS,
    describe_stop,
    details,
    group_rows,
    held_out_scores,
    lines,
    progress,
    results,
)
from relax_hpc.ops.observe.text_table import fitted, shorten_line

MIN_WATCH_S = 2.0
_CLEAR = "\x1b[H\x1b[J"
_GAP = "  "
_INDENT = "  "
_MAX_STATE_LINES = 3
_MAX_SCORE_LINES = 2
_BOLD, _RED, _GREEN, _YELLOW = "1", "31", "32", "33"
_COLOUR_OF_STATE = {
    **dict.fromkeys(("running", "done", "finished"), _GREEN),
    **dict.fromkeys(
        ("starting", "queued", "suspect", "restarting", "stopping", "stopped", "unknown"), _YELLOW
    ),
    **dict.fromkeys(("dead", "failed", "ended", "absent"), _RED),
}
_WARNINGS = ("disk: ", "first failure: ", "nothing was learned ", "waits for ", "checkpoint: NOT ")
"""Beginnings of lines about problems."""


def main(root: str, as_json: bool = False, watch_s: float | None = None) -> int:
    """Print the status, with ``watch_s`` repeatedly until the run ends.

    Returns `run_state.exit_code`.
    """
    if watch_s is not None and watch_s < MIN_WATCH_S:
        raise ConfigError(
            f"--watch: found {watch_s:g}, allowed: at least {MIN_WATCH_S:g} s (slurmctld serves "
            "all users)"
        )
    run, slurm = RunDir(Path(root)), Slurm(timeout_s=SLURM_S, tries=1)
    clears = watch_s is not None and sys.stdout.isatty()
    while True:
        run_status = status(run, slurm=slurm)
        is_over = run_status["state"] in FINAL_STATES
        if as_json:
            print(json.dumps(run_status), flush=True)
        elif clears:
            _show(run_status, is_over, unfiltered(sys.stdout))
        else:
            print("\n".join(lines(run_status)) + ("\n" if watch_s else ""), flush=True)
        if watch_s is None or is_over:
            return run_status["exit_code"]
        time.sleep(watch_s)


@dataclass(frozen=True, slots=True)
class Screen:
    """Lines of a status that fit a terminal, without control characters."""

    state: Sequence[str]
    """Folder and state of the run."""
    results: Sequence[str]
    table: Sequence[str]
    details: Sequence[str]

    def lines(self) -> list[str]:
        """All lines."""
        return [*self.state, *self.results, *self.table, *self.details]

    def painted(self, state: str) -> Iterator[str]:
        """All lines with colours; ``state``: of the run."""
        for line in self.state:
            yield _paint(line, f"{_BOLD};{_COLOUR_OF_STATE.get(state, _YELLOW)}")
        yield from map(_paint_warning, self.results)
        for number, line in enumerate(self.table):
            yield _paint_row(line) if number else _paint(line, _BOLD)
        yield from map(_paint_warning, self.details)


def fit(run_status: dict[str, Any], width: int, height: int | None) -> Screen:
    """The status in ``width`` columns and ``height`` lines.

    If it is too long, details are dropped first, then running groups. ``height`` None: no limit.
    """
    scores = held_out_scores(run_status) or ["none"]
    scores[0] = f"held-out: {scores[0]}"
    state = _state_lines(run_status, width)
    top = [
        *_packed(progress(run_status), width, len(run_status)),
        *_packed(list(map(escape_line, scores)), width, _MAX_SCORE_LINES),
        *(shorten_line(escape_line(line), width) for line in results(run_status)),
    ]
    table = fitted(COLUMNS, group_rows(run_status), width)
    bottom = list[str]()
    for line in details(run_status):
        bottom += _indented(line, width)
    if height is None:
        return Screen(state, top, table, bottom)
    top = top[: max(0, height - len(state))]
    left = height - len(state) - len(top)
    table = _fit_height(table, left)
    return Screen(state[:height], top, table, bottom[: left - len(table)])


def screen_lines(run_status: dict[str, Any], width: int, height: int | None) -> list[str]:
    """Lines of `fit`."""
    return fit(run_status, width, height).lines()


def _show(run_status: dict[str, Any], is_over: bool, stream: TextIO) -> None:
    """Replace the content of a terminal."""
    size = shutil.get_terminal_size()
    # A terminal adds an empty line after a line of its full width, and the cursor needs a line.
    # The last status of a run stays on the screen, so it is printed completely.
    screen = fit(run_status, size.columns - 1, None if is_over else size.lines - 1)
    shown = screen.painted(run_status["state"]) if has_colours(stream) else screen.lines()
    print(_CLEAR + "\n".join(shown), file=stream, flush=True)


def _state_lines(run_status: dict[str, Any], width: int) -> list[str]:
    """Folder and state of the run. A long path is cut at its start, a long reason at its end."""
    root = escape_line(run_status["run_dir"])
    state = escape_line(" ".join(f"{run_status['state']}{describe_stop(run_status)}".split()))
    root_width = max(width // 3, width - columns_of(state) - 2)
    if columns_of(root) > root_width:
        while root and columns_of(root) > root_width - 2:
            root = root[1:]
        root = f"..{root}"
    wrapped = _indented(f"{root}: {state}", width)
    if len(wrapped) > _MAX_STATE_LINES:
        wrapped = wrapped[:_MAX_STATE_LINES]
        wrapped[-1] = shorten_line(f"{wrapped[-1]} {'.' * width}", width)
    return wrapped


def _packed(parts: Sequence[str], width: int, max_lines: int) -> list[str]:
    """``parts`` in as few lines as possible, each part whole unless it is wider than a line.

    The last of ``max_lines`` lines ends with the number of parts that do not fit.
    """
    packed = [parts[0]]
    for number, part in enumerate(parts[1:], start=1):
        longer = f"{packed[-1]}{_GAP}{part}"
        if columns_of(longer) <= width:
            packed[-1] = longer
        elif len(packed) < max_lines:
            packed.append(f"{_INDENT}{part}")
        else:
            count = f"{_GAP}+{len(parts) - number}"
            packed[-1] = f"{shorten_line(packed[-1], width - len(count))}{count}"
            break
    return [shorten_line(line, width) for line in packed]


def _indented(line: str, width: int) -> list[str]:
    """``line`` in ``width`` columns, the second and later lines indented."""
    text = escape_line(line)
    first = next(wrap_text(text, width)).rstrip()
    indent = " " * (len(text) - len(text.lstrip())) + _INDENT
    remaining = text[len(first) :].strip()
    pieces = wrap_text(remaining, width - len(indent)) if remaining else ()
    return [first, *(f"{indent}{piece.rstrip()}" for piece in pieces)]


def _fit_height(table: list[str], height: int) -> list[str]:
    """The first lines of a table; the last line has the number of groups that do not fit."""
    if len(table) <= height:
        return table
    if height <= 0:
        return []
    shown = table[: height - 1]
    # The first line of the table has the titles.
    hidden = len(table) - max(1, len(shown))
    return [*shown, f"{hidden} more groups"]


def _paint(text: str, code: str) -> str:
    return f"\x1b[{code}m{text}\x1b[0m"


def _paint_warning(line: str) -> str:
    return _paint(line, _YELLOW) if line.startswith(_WARNINGS) else line


def _paint_row(line: str) -> str:
    """A row of the table of groups, whose second cell is a state."""
    match = re.match(r"(\S+ +)(\w+)", line)
    if not match or match[2] not in _COLOUR_OF_STATE:
        return line
    return f"{match[1]}{_paint(match[2], _COLOUR_OF_STATE[match[2]])}{line[match.end() :]}"
