"""`relax-hpc samples`: print responses of the policy and their rewards."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from relax_hpc.base.errors import EXIT_DONE, ConfigError
from relax_hpc.base.rundir import RunDir, write_atomic
from relax_hpc.ops.observe.sample_page import render_page
from relax_hpc.ops.observe.sample_reading import valid_samples
from relax_hpc.ops.observe.sample_text import print_samples
from relax_hpc.queue.controller.journal import JournalError
from relax_hpc.queue.inspect.fates import Fate, Fates, read_fates
from relax_hpc.rollout.sample_index import SampleIndex, read_index
from relax_hpc.rollout.sample_log import Sample

LIMIT, PAGE_LIMIT = 10, 5000
"""Default of --limit for printed samples, and for a page."""
_EVALUATED = -2
"""Number that stands for the ticket of a sample of an evaluation."""
_COUNTED = ("accepted", "trained", "evaluated", "unknown")


@dataclass(frozen=True, slots=True)
class SampleFilter:
    """Selection of samples, and their order."""

    step: int | None = None
    """Step that trained them, or else that they are admitted for; of evaluations the version."""
    eval_set: str | None = ""
    """Evaluation set; empty: training; None: both."""
    reason: str = ""
    """Finish reason; empty: any."""
    order: str = "newest"
    """Order: `newest`, `best` or `worst` first."""
    limit: int = LIMIT
    """Maximum number of samples; 0: all."""
    dropped: bool = False
    """Whether to include samples that were dropped or never accepted."""

    def select(self, index: SampleIndex, step: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Entries of ``index`` that are selected, regardless of their fates. ``step``: step of each
        entry."""
        is_selected = np.ones(len(index), np.bool_)
        if self.step is not None:
            is_selected &= step == self.step
        if self.eval_set is not None:
            numbers = [number for number, text in enumerate(index.texts) if text == self.eval_set]
            is_selected &= np.isin(index.eval, [*numbers, -1] if not self.eval_set else numbers)
        if self.reason:
            numbers = [number for number, text in enumerate(index.texts) if text == self.reason]
            is_selected &= np.isin(index.reason, numbers)
        return is_selected

    def sort(
        self, index: SampleIndex, step: NDArray[np.float64], is_shown: NDArray[np.bool_]
    ) -> NDArray[np.int64]:
        """The first `limit` entries that are shown, in the order of the selection."""
        rows = np.flatnonzero(is_shown)
        sign = {"best": -1.0, "worst": 1.0}.get(self.order, 0.0)
        # The last key counts most. Equal entries stay in the order of the index.
        keys = (-index.time[rows], -step[rows], sign * index.reward[rows])
        rows = rows[np.lexsort(keys)]
        return rows[: self.limit] if self.limit else rows


@dataclass(slots=True)
class SelectedSamples:
    """Selected samples with a field `fate`, in their order."""

    samples: list[Sample] = field(default_factory=list)
    matching: int = 0
    """Number of samples that match, including those beyond the limit."""
    hidden: Counter[str] = field(default_factory=Counter)
    """Numbers of excluded samples by their fate."""
    sets: set[str] = field(default_factory=set)
    """Names of the evaluation sets that have samples."""


def select_samples(
    run: RunDir, selection: SampleFilter, with_summary: bool = True
) -> SelectedSamples:
    """Selected samples of ``run``, live or finished.

    ``with_summary``: use the run's summaries, see `base.block_summaries`. The result is the same
    without them.
    """
    fates = _fates(run, with_summary)
    index = read_index(run, _complain, with_summary)
    fate_numbers, distinct_fates = _fates_of_entries(index, fates)
    steps = np.array([math.nan if fate.step is None else fate.step for fate in distinct_fates])
    step = np.where(np.isnan(steps[fate_numbers]), index.step, steps[fate_numbers])
    is_selected = selection.select(index, step)
    is_counted = np.array([fate.state in _COUNTED for fate in distinct_fates])[fate_numbers]
    is_shown = is_selected & (is_counted | selection.dropped)
    result = SelectedSamples(matching=int(is_shown.sum()))
    hidden = fate_numbers[is_selected & ~is_shown]
    for number, count in zip(*np.unique(hidden, return_counts=True), strict=True):
        result.hidden[str(distinct_fates[number])] += int(count)
    result.sets = {index.texts[number] for number in np.unique(index.eval) if number >= 0} - {""}
    for row in selection.sort(index, step, is_shown).tolist():
        fate = distinct_fates[fate_numbers[row]]
        for sample in valid_samples([index.read(row) or {}]):
            if fate.step is not None:
                sample["step"] = fate.step
            result.samples.append(sample | {"fate": str(fate)})
    return result


def _fates_of_entries(
    index: SampleIndex, fates: Fates | None
) -> tuple[NDArray[np.int64], list[Fate]]:
    """Number of the fate of each entry of ``index``, and the fates by number.

    ``fates``: None if the journal cannot be read.
    """
    numbers: dict[Fate, int] = {}
    ticket = np.where(index.eval >= 0, _EVALUATED, index.ticket)
    pairs, inverse = np.unique(np.stack([ticket, index.shard]), axis=1, return_inverse=True)
    by_pair = list[int]()
    for ticket_number, shard in pairs.T.tolist():
        if ticket_number == _EVALUATED:
            fate = Fate("evaluated")
        elif fates is None:
            fate = Fate("unknown")
        else:
            fate = fates.get((ticket_number, index.texts[shard]), Fate("never accepted"))
        by_pair.append(numbers.setdefault(fate, len(numbers)))
    return np.array(by_pair, np.int64)[inverse.reshape(-1)], list(numbers) or [Fate("unknown")]


def _complain(text: str) -> None:
    print(text, file=sys.stderr)


def _fates(run: RunDir, with_summary: bool) -> Fates | None:
    try:
        return read_fates(run, with_summary)
    except JournalError as error:
        _complain(f"{error}; the fates of samples are unknown")
        return None


def main(folder: str, selection: SampleFilter, as_json: bool = False, html: str = "") -> int:
    """Print the selected samples, or write them to the page ``html``.

    ConfigError: there is no run, or no such evaluation set.
    """
    run = RunDir(Path(folder))
    if not run.config.exists():
        raise ConfigError(f"{run.root}: no run here (config.yaml is missing); name a run directory")
    result = select_samples(run, selection)
    if selection.eval_set and selection.eval_set not in result.sets:
        allowed = "no evaluation has stored samples yet"
        if result.sets:
            allowed = f"allowed: {', '.join(sorted(result.sets))}"
        raise ConfigError(f"--eval: found {selection.eval_set!r}, {allowed}")
    hint = "; ".join(_hidden_hints(result))
    if html:
        _write_page(run, html, result, hint)
    elif as_json:
        head = {
            "run_dir": str(run.root),
            "matching": result.matching,
            "hidden": dict(result.hidden),
        }
        print(json.dumps(head | {"samples": result.samples}))
    else:
        # The newest sample is printed last, just above the shell's prompt.
        newest_last = selection.order == "newest"
        print_samples(result.samples[::-1] if newest_last else result.samples)
    if hint and not as_json:
        print(hint, file=sys.stderr)
    return EXIT_DONE


def _write_page(run: RunDir, html: str, result: SelectedSamples, hint: str) -> None:
    text = render_page({"run": str(run.root), "left_out": hint}, result.samples)
    try:
        write_atomic(Path(html), text.encode(errors="replace"))
    except OSError as error:
        raise ConfigError(
            f"--html: {html}: {error.strerror}; name a file in a folder of yours"
        ) from error
    print(f"{html}: {len(result.samples)} episodes")


def _hidden_hints(result: SelectedSamples) -> Iterator[str]:
    """Hints about samples that are not shown."""
    if not result.matching:
        yield "no kept episode matches"
    beyond_limit = result.matching - len(result.samples)
    if beyond_limit:
        yield f"{beyond_limit} more, see --limit"
    if result.hidden:
        counts = [f"{count} {fate}" for fate, count in sorted(result.hidden.items())]
        yield f"{', '.join(counts)}: left out, see --dropped"
