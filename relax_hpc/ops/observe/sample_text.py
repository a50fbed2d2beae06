"""Samples as text for a terminal, with colours, line breaks and escaped control characters."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator

from relax_hpc.base.terminal_text import (
    escape_controls,
    escape_line,
    has_colours,
    unfiltered,
    wrap_text,
)
from relax_hpc.rollout.sample_log import Sample

_LABEL_WIDTH, _MIN_WIDTH = 9, 20
_BOLD, _DIM, _RED, _GREEN, _YELLOW = 1, 2, 31, 32, 33
_SPEAKERS = {"environment": "observed"}
Paint = Callable[[str, int], str]


def print_samples(samples: Iterable[Sample]) -> None:
    """Print samples as text.

    On a terminal lines fit its width, and have colours unless NO_COLOR is set.
    """
    is_terminal = sys.stdout.isatty()
    paint = _painted if has_colours(sys.stdout) else _plain
    width = sys.maxsize
    if is_terminal:
        width = max(_MIN_WIDTH, shutil.get_terminal_size().columns - _LABEL_WIDTH - 1)
    for sample in samples:
        print("\n".join(lines(sample, width, paint)), end="\n\n", file=unfiltered(sys.stdout))


def lines(sample: Sample, width: int, paint: Paint) -> Iterator[str]:
    """A sample as text of ``width`` columns: its values, then its texts.

    Control characters in it are escaped.
    """
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
        outcome = json.dumps(sample["environment"], ensure_ascii=False)
        yield from _text("outcome", outcome, width, paint)


def _head(sample: Sample, paint: Paint) -> str:
    """First line of a sample: step, reward, and other values."""
    reward = sample["reward"]
    colour = _YELLOW
    if reward:
        colour = _GREEN if reward > 0 else _RED
    step = f"step {sample['step']}"
    if "eval" in sample:
        step = f"{sample['eval']} at version {sample['step']}"
    components = ", ".join(f"{name} {value:.4g}" for name, value in sample["components"].items())
    values = [
        f"({components})" if components else "",
        sample["finish_reason"],
        *token_counts(sample),
        *sample.get("versions", []),
        sample["fate"],
        sample["id"],
        sample.get("prompt_id", ""),
    ]
    rest_of_line = "  ".join(map(str, values))
    return (
        f"{paint(escape_line(step), _BOLD)}  {paint(f'reward {reward:.4g}', colour)}  "
        f"{paint(escape_line(rest_of_line), _DIM)}"
    )


def token_counts(record: Sample) -> Iterator[str]:
    """Number of tokens of a sample or a turn, and of trained tokens if it differs."""
    yield f"{record.get('tokens', '?')} tokens"
    if record.get("trained", record.get("tokens")) != record.get("tokens"):
        yield f"{record['trained']} trained on"


def _turn(turn: Sample, width: int, paint: Paint) -> Iterator[str]:
    speaker = _SPEAKERS.get(turn["by"], turn["by"])
    values = "  ".join(map(str, [*token_counts(turn), *turn["versions"]]))
    yield paint(escape_line(f"{speaker:<{_LABEL_WIDTH}}{values}"), _DIM)
    yield from _media(turn, paint)
    yield from _text("", turn["text"].strip("\n"), width, paint)
    for call in turn.get("tool_calls", []):
        arguments = json.dumps(call.get("arguments"), ensure_ascii=False)
        text = call.get("error") or f"{call.get('name')} {arguments}"
        yield from _text("call", text, width, paint)


def _media(record: Sample, paint: Paint) -> Iterator[str]:
    for medium in record.get("media", []):
        label = paint(f"{escape_line(medium['kind']):<{_LABEL_WIDTH}}", _DIM)
        yield f"{label}{escape_line(medium['about'])}"


def _text(name: str, text: str, width: int, paint: Paint) -> Iterator[str]:
    for number, line in enumerate(wrap_text(escape_controls(text), width)):
        label = paint(f"{'' if number else name:<{_LABEL_WIDTH}}", _DIM)
        yield f"{label}{line}".rstrip()


def _painted(text: str, colour: int) -> str:
    return f"\x1b[{colour}m{text}\x1b[0m"


def _plain(text: str, colour: int) -> str:
    return text
