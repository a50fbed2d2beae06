"""`relax-hpc samples`: print responses of the policy and their rewards."""

from __future__ import annotations

import heapq
import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from relax_hpc.base.errors import EXIT_DONE, ConfigError
from relax_hpc.base.rundir import RunDir, write_atomic
from relax_hpc.ops.observe.sample_page import render_page
from relax_hpc.ops.observe.sample_reading import valid_samples
from relax_hpc.ops.observe.sample_text import print_samples
from relax_hpc.queue.controller.journal import JournalError
from relax_hpc.queue.inspect.fates import Fate, Fates, read_fates
from relax_hpc.rollout.sample_log import Sample, read_samples

LIMIT, PAGE_LIMIT = 10, 5000
"""Default of --limit for printed samples, and for a page."""
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

    def fits(self, sample: Sample) -> bool:
        """Whether ``sample`` is selected, regardless of its fate."""
        is_of_step = self.step is None or sample["step"] == self.step
        is_of_set = self.eval_set in (None, sample.get("eval", ""))
        return is_of_step and is_of_set and self.reason in ("", sample["finish_reason"])

    def sort_key(self, sample: Sample) -> tuple[float, float, float]:
        """Key by which samples are sorted, largest first."""
        reward = {"best": sample["reward"], "worst": -sample["reward"]}.get(self.order, 0.0)
        return reward, sample["step"], sample["time"]


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


def select_samples(run: RunDir, selection: SampleFilter) -> SelectedSamples:
    """Selected samples of ``run``, live or finished."""
    result, fates = SelectedSamples(), _fates(run)

    def matching() -> Iterator[Sample]:
        for sample in valid_samples(read_samples(run.samples, _complain)):
            result.sets.add(sample.get("eval", ""))
            fate = fate_of(sample, fates)
            if fate.step is not None:
                sample["step"] = fate.step
            if not selection.fits(sample):
                continue
            if selection.dropped or fate.state in _COUNTED:
                result.matching += 1
                yield sample | {"fate": str(fate)}
            else:
                result.hidden[str(fate)] += 1

    limit = selection.limit or sys.maxsize
    result.samples = heapq.nlargest(limit, matching(), key=selection.sort_key)
    result.sets.discard("")
    return result


def fate_of(sample: Sample, fates: Fates | None) -> Fate:
    """Fate of ``sample``; ``fates`` is None if the journal cannot be read."""
    if "eval" in sample:
        return Fate("evaluated")
    if fates is None:
        return Fate("unknown")
    ticket = sample["id"].partition(".")[0]
    key = int(ticket) if ticket.isdecimal() else -1, str(sample.get("shard"))
    return fates.get(key, Fate("never accepted"))


def _complain(text: str) -> None:
    print(text, file=sys.stderr)


def _fates(run: RunDir) -> Fates | None:
    try:
        return read_fates(run)
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
