"""`relax-hpc samples`: what the model has written in steps and evaluations, and what it was given for it."""

from __future__ import annotations

import heapq
import json
import math
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relax_hpc.errors import EXIT_DONE, ConfigError
from relax_hpc.observe.sample_page import page
from relax_hpc.observe.terminal_text import harmless, wrapped
from relax_hpc.rollout.sample_log import Sample, read_samples
from relax_hpc.rundir import RunDir, is_map, write_atomic
from relax_hpc.transfer_queue.controller.journal import JournalError
from relax_hpc.transfer_queue.inspect.fates import Fate, Fates, read_fates

LIMIT, PAGE_LIMIT = 10, 5000
"""Samples that are shown unless --limit says otherwise: printed, or on a page."""
_NOTHING = type(None)
_ENTRIES = {
    **dict.fromkeys(("id", "prompt", "response", "finish_reason"), str),
    **dict.fromkeys(("reward", "step", "time"), (int, float)),
    **dict.fromkeys(("eval", "shard", "answer", "prompt_id"), (str, _NOTHING)),
    "tokens": (int, _NOTHING),
    "versions": (list, _NOTHING),
    "components": (dict, _NOTHING),
    "media": (list, _NOTHING),
}
"""Types of the fields that every sample has, and may have."""
_OF_MEDIUM = {"kind": str, "about": str, "picture": (str, _NOTHING)}
_COUNTED = ("accepted", "trained", "evaluated", "unknown")
_LABEL_WIDTH, _LEAST_WIDTH = 9, 20
_BOLD, _DIM, _RED, _GREEN, _YELLOW = 1, 2, 31, 32, 33


@dataclass(frozen=True, slots=True)
class Wanted:
    """Selection of samples, and their order."""

    step: int | None = None
    """Step that trained them, or that they are admitted for and not trained in yet; of evaluations the version."""
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
        return of_step and self.of in (None, sample.get("eval", "")) and self.reason in ("", sample["finish_reason"])

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
        for sample in whole(read_samples(run.samples)):
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


def whole(samples: Iterable[Sample]) -> Iterator[Sample]:
    """Samples that have what they must; a run directory is its user's, who may have put anything there."""
    for sample in samples:
        if is_map(sample, **_ENTRIES) and math.isfinite(sample["reward"]):
            known = {name: value for name, value in sample.items() if value is not None}
            media = [one for one in known.pop("media", []) if is_map(one, **_OF_MEDIUM)]
            yield known | {"components": _numbers(known.get("components", {}))} | ({"media": media} if media else {})


def fate_of(sample: Sample, fates: Fates | None) -> Fate:
    """Fate of ``sample`` by the journal; ``fates`` is None if that cannot be read."""
    if "eval" in sample:
        return Fate("evaluated")
    if fates is None:
        return Fate("unknown")
    ticket = sample["id"].partition(".")[0]
    return fates.get((int(ticket) if ticket.isdecimal() else -1, str(sample.get("shard"))), Fate("never accepted"))


def _fates(run: RunDir) -> Fates | None:
    try:
        return read_fates(run)
    except JournalError as error:
        print(f"{error}; what became of the samples is not known", file=sys.stderr)
        return None


def main(folder: str, wanted: Wanted, as_json: bool = False, html: str = "") -> int:
    """Print what is wanted, or write it to the file ``html``. ConfigError: there is no run, or no such evaluation."""
    run = RunDir(Path(folder))
    if not run.config.exists():
        raise ConfigError(f"{run.root}: no run here (config.yaml is missing); name a run directory")
    found = find(run, wanted)
    if wanted.of and wanted.of not in found.sets:
        there = f"allowed: {', '.join(sorted(found.sets))}" if found.sets else "no evaluation has been kept so far"
        raise ConfigError(f"--eval: found {wanted.of!r}, {there}")
    left_out = "; ".join(_left_out(found))
    if html:
        text = page({"run": str(run.root), "left_out": left_out}, found.samples)
        try:
            write_atomic(Path(html), text.encode(errors="replace"))
        except OSError as error:
            raise ConfigError(f"--html: {html}: {error.strerror}; name a file in a folder of yours") from error
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
        yield ", ".join(f"{count} {fate}" for fate, count in sorted(found.hidden.items())) + ": left out, see --dropped"


def show(samples: Iterable[Sample]) -> None:
    """Print for people; on a terminal in colours, unless NO_COLOR is set, and fitted to its width."""
    terminal = sys.stdout.isatty()
    paint = _painted if terminal and not os.environ.get("NO_COLOR") else _plain
    width = max(_LEAST_WIDTH, shutil.get_terminal_size().columns - _LABEL_WIDTH - 1) if terminal else sys.maxsize
    for sample in samples:
        print("\n".join(lines(sample, width, paint)), end="\n\n")


def lines(sample: Sample, width: int, paint: Callable[[str, int], str]) -> Iterator[str]:
    """A sample as text: what is known of it, then its texts, ``width`` columns wide, without what a terminal obeys."""
    reward = sample["reward"]
    tone = _GREEN if reward > 0 else _RED if reward < 0 else _YELLOW
    parts = ", ".join(f"{name} {value:.4g}" for name, value in sample["components"].items())
    place = f"{sample['eval']} at version {sample['step']}" if "eval" in sample else f"step {sample['step']}"
    told = [sample["finish_reason"], f"{sample.get('tokens', '?')} tokens", *sample.get("versions", []), sample["fate"]]
    about = "  ".join(map(str, [f"({parts})" if parts else "", *told, sample["id"], sample.get("prompt_id", "")]))
    head = f"{paint(harmless(place), _BOLD)}  {paint(f'reward {reward:.4g}', tone)}  {paint(harmless(about), _DIM)}"
    yield head
    for one in sample.get("media", []):
        label = paint(f"{harmless(one['kind']):<{_LABEL_WIDTH}}", _DIM)
        yield f"{label}{harmless(one['about'])}"
    for name in ("prompt", "response", *(("answer",) if sample.get("answer") else ())):
        for number, line in enumerate(wrapped(harmless(sample[name]), width)):
            label = paint(f"{'' if number else name:<{_LABEL_WIDTH}}", _DIM)
            yield f"{label}{line}".rstrip()


def _numbers(found: Mapping[str, Any]) -> dict[str, float]:
    """Numbers among the components of a reward."""
    return {name: v for name, v in found.items() if isinstance(v, int | float) and math.isfinite(v)}


def _painted(text: str, colour: int) -> str:
    return f"\x1b[{colour}m{text}\x1b[0m"


def _plain(text: str, colour: int) -> str:
    return text
