"""Samples as text for a terminal: fitted to its width, in its colours, and nothing in them that it
would obey."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator

from relax_hpc.base.terminal_text import escape_controls, escape_line, unfiltered, wrap_text
from relax_hpc.rollout.sample_log import Sample

_LABEL_WIDTH, _LEAST_WIDTH = 9, 20
_BOLD, _DIM, _RED, _GREEN, _YELLOW = 1, 2, 31, 32, 33
_SPEAKERS = {"environment": "observed"}
Paint = Callable[[str, int], str]


def show(samples: Iterable[Sample]) -> None:
    """Print for people; on a terminal in colours, unless NO_COLOR is set, and fitted to its
    width."""
    terminal = sys.stdout.isatty()
    paint = _painted if terminal and not os.environ.get("NO_COLOR") else _plain
    width = (
        max(_LEAST_WIDTH, shutil.get_terminal_size().columns - _LABEL_WIDTH - 1)
        if terminal
        else sys.maxsize
    )
    for sample in samples:
        print("\n".join(lines(sample, width, paint)), end="\n\n", file=unfiltered(sys.stdout))


def lines(sample: Sample, width: int, paint: Paint) -> Iterator[str]:
    """A sample as text: what is known of it, then its texts, ``width`` columns wide, without what a
    terminal obeys."""
    yield _head(sample, paint)
    yield from _media(sample, paint)
    yield from _text("prompt", sample["prompt"], width, paint)
    for turn in sample.get("turns", []):
        yield from _turn(turn, width, paint)
    if "turns" not in sample:
        yield from _text("response", sample["response"], width, paint)
    if sample.get("answer"):
        yield from _text("answer", sample["answer"], width, paint)
    if sample.get("environment"):
        yield from _text(
            "outcome", json.dumps(sample["environment"], ensure_ascii=False), width, paint
        )


def _head(sample: Sample, paint: Paint) -> str:
    reward = sample["reward"]
    tone = _GREEN if reward > 0 else _RED if reward < 0 else _YELLOW
    parts = ", ".join(f"{name} {value:.4g}" for name, value in sample["components"].items())
    place = (
        f"{sample['eval']} at version {sample['step']}"
        if "eval" in sample
        else f"step {sample['step']}"
    )
    told = [sample["finish_reason"], *known(sample), *sample.get("versions", []), sample["fate"]]
    about = "  ".join(
        map(str, [f"({parts})" if parts else "", *told, sample["id"], sample.get("prompt_id", "")])
    )
    return (
        f"{paint(escape_line(place), _BOLD)}  {paint(f'reward {reward:.4g}', tone)}  "
        f"{paint(escape_line(about), _DIM)}"
    )


def known(part: Sample) -> Iterator[str]:
    """Number of tokens of a sample, or of a turn, and of those that are trained on, where not all
    are."""
    yield f"{part.get('tokens', '?')} tokens"
    if part.get("trained", part.get("tokens")) != part.get("tokens"):
        yield f"{part['trained']} trained on"


def _turn(turn: Sample, width: int, paint: Paint) -> Iterator[str]:
    about = "  ".join(map(str, [*known(turn), *turn["versions"]]))
    yield paint(
        escape_line(f"{_SPEAKERS.get(turn['by'], turn['by']):<{_LABEL_WIDTH}}{about}"), _DIM
    )
    yield from _media(turn, paint)
    yield from _text("", turn["text"].strip("\n"), width, paint)
    for call in turn.get("tool_calls", []):
        arguments = json.dumps(call.get("arguments"), ensure_ascii=False)
        yield from _text(
            "call", call.get("error") or f"{call.get('name')} {arguments}", width, paint
        )


def _media(part: Sample, paint: Paint) -> Iterator[str]:
    for one in part.get("media", []):
        label = paint(f"{escape_line(one['kind']):<{_LABEL_WIDTH}}", _DIM)
        yield f"{label}{escape_line(one['about'])}"


def _text(name: str, text: str, width: int, paint: Paint) -> Iterator[str]:
    for number, line in enumerate(wrap_text(escape_controls(text), width)):
        label = paint(f"{'' if number else name:<{_LABEL_WIDTH}}", _DIM)
        yield f"{label}{line}".rstrip()


def _painted(text: str, colour: int) -> str:
    return f"\x1b[{colour}m{text}\x1b[0m"


def _plain(text: str, colour: int) -> str:
    return text
