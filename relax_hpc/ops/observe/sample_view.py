"""`relax-hpc samples`: what the model has written in steps and evaluations, and what it was given
for it."""

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
from relax_hpc.ops.observe.sample_page import page
from relax_hpc.ops.observe.sample_reading import whole
from relax_hpc.ops.observe.sample_text import show
from relax_hpc.queue.controller.journal import JournalError
from relax_hpc.queue.inspect.fates import Fate, Fates, read_fates
from relax_hpc.rollout.sample_log import Sample, read_samples

LIMIT, PAGE_LIMIT = 10, 5000
"""Samples that are shown unless --limit says otherwise: printed, or on a page."""
_COUNTED = ("accepted", "trained", "evaluated", "unknown")


@dataclass(frozen=True, slots=True)
class Wanted:
    """Selection of samples, and their order."""

    step: int | None = None
    """Step that trained them, or that they are admitted for and not trained in yet; of evaluations
    the version."""
    of: str | None = ""
    """Evaluation set; empty: training; None: both."""
    reason: str = ""
    """Finish reason; empty: any."""
    order: str = "newest"
    """Order: newest
     best
     worst."""
    limit: int = LIMIT
    """Samples to show at most; 0: all."""
    dropped: bool = False
    """Whether samples that were dropped or never accepted are wanted too."""

    def fits(self, sample: Sample) -> bool:
        """Whether ``sample`` is wanted, whatever became of it."""
        of_step = self.step is None or sample["step"] == self.step
        return (
            of_step
            and self.of in (None, sample.get("eval", ""))
            and self.reason in ("", sample["finish_reason"])
        )

    def place(self, sample: Sample) -> tuple[float, float, float]:
        """Sorting key of ``sample``: the larger, the sooner it is wanted."""
        reward = {"best": sample["reward"], "worst": -sample["reward"]}.get(self.order, 0.0)
        return reward, sample["step"], sample["time"]


@dataclass(slots=True)
class Found:
    """Samples, each with its `fate`, in the order in which they are wanted."""

    samples: list[Sample] = field(default_factory=list)
    matching: int = 0
    """Number of samples that match, those beyond the limit too."""
    hidden: Counter[str] = field(default_factory=Counter)
    """Samples left out, by what became of them."""
    sets: set[str] = field(default_factory=set)
    """Names of the evaluation sets of which there are any samples."""


def find(run: RunDir, wanted: Wanted) -> Found:
    """Wanted samples of ``run``, finished or not."""
    found, fates = Found(), _fates(run)

    def chosen() -> Iterator[Sample]:
        for sample in whole(read_samples(run.samples, _complain)):
            found.sets.add(sample.get("eval", ""))
            fate = fate_of(sample, fates)
            if fate.step is not None:
                sample["step"] = fate.step
            if not wanted.fits(sample):
                continue
            if wanted.dropped or fate.state in _COUNTED:
                found.matching += 1
                yield sample | {"fate": str(fate)}
            else:
                found.hidden[str(fate)] += 1

    found.samples = heapq.nlargest(wanted.limit or sys.maxsize, chosen(), key=wanted.place)
    found.sets.discard("")
    return found


def fate_of(sample: Sample, fates: Fates | None) -> Fate:
    """Fate of ``sample`` by the journal; ``fates`` is None if that cannot be read."""
    if "eval" in sample:
        return Fate("evaluated")
    if fates is None:
        return Fate("unknown")
    ticket = sample["id"].partition(".")[0]
    return fates.get(
        (int(ticket) if ticket.isdecimal() else -1, str(sample.get("shard"))),
        Fate("never accepted"),
    )


def _complain(text: str) -> None:
    print(text, file=sys.stderr)


def _fates(run: RunDir) -> Fates | None:
    try:
        return read_fates(run)
    except JournalError as error:
        print(f"{error}; what became of the samples is not known", file=sys.stderr)
        return None


def main(folder: str, wanted: Wanted, as_json: bool = False, html: str = "") -> int:
    """Print what is wanted, or write it to the file ``html``. ConfigError: there is no run, or no
    such evaluation."""
    run = RunDir(Path(folder))
    if not run.config.exists():
        raise ConfigError(f"{run.root}: no run here (config.yaml is missing); name a run directory")
    found = find(run, wanted)
    if wanted.of and wanted.of not in found.sets:
        there = (
            f"allowed: {', '.join(sorted(found.sets))}"
            if found.sets
            else "no evaluation has been kept so far"
        )
        raise ConfigError(f"--eval: found {wanted.of!r}, {there}")
    left_out = "; ".join(_left_out(found))
    if html:
        text = page({"run": str(run.root), "left_out": left_out}, found.samples)
        try:
            write_atomic(Path(html), text.encode(errors="replace"))
        except OSError as error:
            raise ConfigError(
                f"--html: {html}: {error.strerror}; name a file in a folder of yours"
            ) from error
        print(f"{html}: {len(found.samples)} episodes")
    elif as_json:
        about = {"run_dir": str(run.root), "matching": found.matching, "hidden": dict(found.hidden)}
        print(json.dumps(about | {"samples": found.samples}))
    else:
        # The newest is printed last, above the prompt.
        shown = found.samples if wanted.order != "newest" else found.samples[::-1]
        show(shown)
    if left_out and not as_json:
        print(left_out, file=sys.stderr)
    return EXIT_DONE


def _left_out(found: Found) -> Iterator[str]:
    if not found.matching:
        yield "no kept episode matches"
    if more := found.matching - len(found.samples):
        yield f"{more} more, see --limit"
    if found.hidden:
        yield (
            ", ".join(f"{count} {fate}" for fate, count in sorted(found.hidden.items()))
            + ": left out, see --dropped"
        )
