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
"""Columns of a line, one less than a terminal's usual 80: a wider one would wrap, and not be
overwritten."""
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
    """One aligned line of at most `width` characters; what is missing from `values` shows as a
    dash.

    Args:
        step: the step just finished, from 0, as in metrics.jsonl.
        steps: steps of the whole run.
        values: reward/mean, staleness/mean, perf/rollout_tokens_per_s, or, where nothing is drawn,
        loss/policy and
            perf/train_tokens_per_s; eval/<set>/<reward> where an evaluation has just come in, and
            idle/<role> (share
            of time, 0 to 1); other tags are left alone.
        eta_s: seconds to the end of the run, if known.
        width: what comes last and does not fit is left out: of idle roles, of evaluations, and so
        on.

    >>> values = {"reward/mean": 0.5, "staleness/mean": 0, "idle/actor": 0.25}
    >>> progress_line(7, 300, values, eta_s=90)
    'eta  1m30s  step   7/300  reward 0.500  stale 0.0      - tok/s  idle actor 25%'
    """
    parts = [
        f"eta {_duration(eta_s):>6}",
        f"step {step:{len(str(steps))}d}/{steps}",
        *_learned(values),
    ]
    parts += [
        f"{tag.split('/')[1]} {_number(values[tag], '.3f')}"
        for tag in sorted(values)
        if _is_score(tag)
    ]
    line = "  ".join(_fitting(parts, "  ", width))
    tags = sorted(
        (tag for tag in values if tag.startswith("idle/") and not is_by_peer(tag)), key=_place
    )
    idle = [f"{tag[5:]} {_percent(values[tag]):>3}" for tag in tags]
    shown = _fitting(idle, " ", width - len(f"{line}  idle "))
    return f"{line}  idle {' '.join(shown)}" if shown else line


def _learned(values: Mapping[str, float]) -> list[str]:
    """Reward of the policy for what it draws, and the speed; or, where nothing is drawn, its
    loss."""
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


def _fitting(parts: Sequence[str], between: str, width: int) -> list[str]:
    """The first of ``parts`` that fit in a line together."""
    ends = accumulate(len(part) + len(between) for part in parts)
    return [part for part, end in zip(parts, ends, strict=True) if end - len(between) <= width]


class Progress:
    """Prints progress lines: every step in a log; on a terminal one that overwrites itself, some of
    which stay."""

    def __init__(self, steps: int, stream: TextIO | None = None, keep_every: int = 10) -> None:
        """`keep_every`: steps between lines that stay on a terminal, besides those with evaluations
        and the last."""
        self._steps = steps
        self._stream = unfiltered(sys.stdout) if stream is None else stream
        self._keep_every = keep_every
        self.terminal = self._stream.isatty()
        self._open = False
        self._ends: deque[tuple[int, float]] = deque(maxlen=_WINDOW)
        self._speed = math.nan

    def update(self, step: int, values: Mapping[str, float], at: float | None = None) -> None:
        """Show a step that was finished at wall-clock time `at` (now, if left out)."""
        # Where generation is ahead of training, it may be that none of it ended within a step.
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
        """Show ``text`` on a terminal, as a line that the next one overwrites; cut to its width."""
        if self.terminal:
            self._write(
                f"\r{escape_line(text)[: shutil.get_terminal_size().columns - 1]}{_TO_LINE_END}"
            )
            self._open = True

    def close(self) -> None:
        """Leave the cursor at the start of a fresh line."""
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
        """Seconds left at the pace of the last steps; None until there is a pace."""
        if self._ends and step < self._ends[-1][0]:
            self._ends.clear()
        if not self._ends or step > self._ends[-1][0]:
            self._ends.append((step, now))
        left = max(0, self._steps - 1 - step)
        if left == 0:
            return 0.0
        (first, since), (last, until) = self._ends[0], self._ends[-1]
        return left * (until - since) / (last - first) if last > first else None


def _place(tag: str) -> tuple[int, str]:
    """Key by which roles are sorted: the two whose idleness costs most come first."""
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
