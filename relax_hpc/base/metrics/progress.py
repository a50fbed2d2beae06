"""The line that a run shows after each step, in a log file or overwriting itself on a terminal."""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TextIO

from relax_hpc.base.metrics.shares import is_by_peer
from relax_hpc.base.terminal_text import escape_controls, escape_line, unfiltered

WIDTH = 79
"""Columns of a line, one less than the usual 80 of a terminal. A wider line would wrap, and the
next line could not overwrite it."""
_WINDOW = 20
_SPEED, _TRAINED, _LOSS = "perf/rollout_tokens_per_s", "perf/train_tokens_per_s", "loss/policy"
_TO_LINE_END = "\x1b[K"


def progress_line(
    step: int,
    steps: int,
    values: Mapping[str, float],
    eta_s: float | None = None,
    width: int = WIDTH,
) -> str:
    """One aligned line of at most `width` characters. A missing value appears as a dash.

    Args:
        step: the step just finished, from 0, as in metrics.jsonl.
        steps: steps of the whole run.
        values: reward/mean, staleness/mean and perf/rollout_tokens_per_s; or, if the run does not
            sample, loss/policy and perf/train_tokens_per_s; eval/<set>/<reward> of new
            evaluations; idle/<role> (share of time, 0 to 1). Other tags are ignored.
        eta_s: seconds to the end of the run, if known.
        width: entries at the end of the line that do not fit are left out, idle roles first.

    >>> values = {"reward/mean": 0.5, "staleness/mean": 0, "idle/actor": 0.25}
    >>> progress_line(7, 300, values, eta_s=90)
    'eta  1m30s  step   7/300  reward 0.500  stale 0.0      - tok/s  idle actor 25%'
    """
    entries = [
        f"eta {_duration(eta_s):>6}",
        f"step {step:{len(str(steps))}d}/{steps}",
        *_result_entries(values),
    ]
    entries += [
        f"{tag.split('/')[1]} {_number(values[tag], '.3f')}"
        for tag in sorted(values)
        if _is_score(tag)
    ]
    line = "  ".join(_first_that_fit(entries, "  ", width))
    idle_tags = [tag for tag in values if tag.startswith("idle/") and not is_by_peer(tag)]
    idle_tags.sort(key=_idle_order)
    idle = [f"{tag[5:]} {_percent(values[tag]):>3}" for tag in idle_tags]
    shown = _first_that_fit(idle, " ", width - len(f"{line}  idle "))
    return f"{line}  idle {' '.join(shown)}" if shown else line


def _result_entries(values: Mapping[str, float]) -> list[str]:
    """Reward, staleness and speed of sampling; if the run does not sample, loss and speed of
    training."""
    if _LOSS in values and "reward/mean" not in values:
        return [
            f"loss {_number(values[_LOSS], '.4f')}",
            f"{_thousands(values.get(_TRAINED)):>5} tok/s",
        ]
    return [
        f"reward {_number(values.get('reward/mean'), '.3f'):>5}",
        f"stale {_number(values.get('staleness/mean'), '.1f'):>3}",
        f"{_thousands(values.get(_SPEED)):>5} tok/s",
    ]


def _first_that_fit(entries: Sequence[str], separator: str, width: int) -> list[str]:
    """The first of ``entries`` that fit in a line of ``width`` characters."""
    ends = accumulate(len(entry) + len(separator) for entry in entries)
    return [
        entry for entry, end in zip(entries, ends, strict=True) if end - len(separator) <= width
    ]


class Progress:
    """Prints progress lines. In a log, every line stays; on a terminal, most lines are
    overwritten."""

    def __init__(self, steps: int, stream: TextIO | None = None, keep_every: int = 10) -> None:
        """`keep_every`: steps between lines that stay on a terminal. Lines with evaluations and the
        last line also stay."""
        self._steps = steps
        self._stream = unfiltered(sys.stdout) if stream is None else stream
        self._keep_every = keep_every
        self.terminal = self._stream.isatty()
        self._open = False
        self._ends: deque[tuple[int, float]] = deque(maxlen=_WINDOW)
        self._speed = math.nan

    def update(self, step: int, values: Mapping[str, float], at: float | None = None) -> None:
        """Show a step that was finished at wall-clock time `at`; None: now."""
        # If generation is ahead of training, possibly no generation has ended within this step.
        self._speed = values.get(_SPEED, self._speed)
        width = shutil.get_terminal_size().columns - 1 if self.terminal else WIDTH
        eta_s = self._eta(step, time.time() if at is None else at)
        line = escape_controls(
            progress_line(step, self._steps, {**values, _SPEED: self._speed}, eta_s, width)
        )
        if self.terminal and not self._stays(step, values):
            self.show(line)
        else:
            self._write(f"\r{line}{_TO_LINE_END}\n" if self.terminal else f"{line}\n")
            self._open = False

    def show(self, text: str) -> None:
        """Show ``text`` on a terminal, cut to its width. The next line overwrites it."""
        if self.terminal:
            self._write(
                f"\r{escape_line(text)[: shutil.get_terminal_size().columns - 1]}{_TO_LINE_END}"
            )
            self._open = True

    def close(self) -> None:
        """Move the cursor to the start of a new line."""
        if self._open:
            self._write("\n")
            self._open = False

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()

    def _stays(self, step: int, values: Mapping[str, float]) -> bool:
        return (
            step % self._keep_every == 0 or step >= self._steps - 1 or any(map(_is_score, values))
        )

    def _eta(self, step: int, now: float) -> float | None:
        """Remaining seconds at the speed of the last steps. None: the speed is unknown."""
        if self._ends and step < self._ends[-1][0]:
            self._ends.clear()
        if not self._ends or step > self._ends[-1][0]:
            self._ends.append((step, now))
        remaining_steps = max(0, self._steps - 1 - step)
        if remaining_steps == 0:
            return 0.0
        (first, begin), (last, end) = self._ends[0], self._ends[-1]
        return remaining_steps * (end - begin) / (last - first) if last > first else None


def _idle_order(tag: str) -> tuple[int, str]:
    """Sort key of roles. The two roles whose idle time is most expensive come first."""
    first = ("idle/actor", "idle/rollout")
    return (first.index(tag) if tag in first else len(first)), tag


def _is_score(tag: str) -> bool:
    return tag.startswith("eval/") and tag.count("/") == 2


def _number(value: float | None, form: str) -> str:
    return "-" if value is None or math.isnan(value) else format(value, form)


def _percent(share: float) -> str:
    return _number(share, ".0%")


def _thousands(value: float | None) -> str:
    """Number in five characters at most: 9500, 123k, 1.2M."""
    if value is None or not value >= 1e4:
        return _number(value, ".0f")
    return _number(value / 1e3, ".0f") + "k" if value < 1e6 else _number(value / 1e6, ".1f") + "M"


def _duration(seconds: float | None) -> str:
    """Duration in six characters at most: 42s, 4m07s, 3h12m, 2d03h."""
    if seconds is None:
        return "-"
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days}d{h:02d}h"
    if hours:
        return f"{h}h{m:02d}m"
    return f"{m}m{s:02d}s" if minutes else f"{s}s"
