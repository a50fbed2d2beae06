"""Columns of all stored samples of a run, by which samples are selected before they are read."""

from __future__ import annotations

import math
import mmap
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_hpc.base import block_summaries
from relax_hpc.base.block_summaries import (
    BlockFormat,
    Bytes,
    read_blocks,
    read_with_summary,
    summary_of,
)
from relax_hpc.base.foreign_files import ForeignFileError, open_in_run
from relax_hpc.base.rundir import RunDir, is_map
from relax_hpc.rollout.sample_log import SUFFIX, Sample, inflate_members, parse_member

_NONE = type(None)
FIELDS: Mapping[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("id", "prompt", "response", "finish_reason"), str),
    **dict.fromkeys(("reward", "step", "time"), (int, float)),
    **dict.fromkeys(("eval", "shard", "answer", "prompt_id"), (str, _NONE)),
    **dict.fromkeys(("tokens", "trained"), (int, _NONE)),
    **dict.fromkeys(("versions", "media", "turns"), (list, _NONE)),
    **dict.fromkeys(("components", "environment", "recording"), (dict, _NONE)),
}
"""Types of the fields of a sample; those with a None type are optional."""
_INTEGERS = ("ticket", "shard", "eval", "reason", "member", "number")
_FLOATS = ("step", "time", "reward")
NO_TICKET = -1
_MAX_TICKET = 1 << 62


def is_valid(sample: object) -> bool:
    """Whether a sample has all required fields, and no field of a wrong type."""
    return is_map(sample, **FIELDS) and math.isfinite(sample["reward"])


@dataclass(slots=True)
class SampleIndex:
    """Columns of the valid samples, in the order of `read_samples`. Each has an entry for each
    sample."""

    texts: list[str] = field(default_factory=list)
    """Distinct texts. An integer column of texts has indices into them."""
    ticket: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """NO_TICKET: the id has none."""
    shard: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """Index of the name of the row's shard."""
    eval: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """Index of the name of the evaluation set; -1: of training."""
    reason: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """Index of the finish reason."""
    step: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    time: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    reward: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    file: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """Index into `paths`."""
    member: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """Offset of the gzip member in its file."""
    number: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """Number of the sample in its member."""
    paths: list[Path] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.ticket)

    def read(self, row: int) -> Sample | None:
        """The sample of an entry; None: its file has changed since."""
        start, number = int(self.member[row]), int(self.number[row])
        try:
            with (
                open_in_run(self.paths[self.file[row]]) as file,
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
            ):
                _, _, content = next(inflate_members(data, start))
        except (OSError, ValueError, StopIteration):
            return None
        samples = list(parse_member(content))
        return samples[number] if number < len(samples) else None


def read_index(
    run: RunDir, complain: Callable[[str], None] = lambda _: None, with_summary: bool = True
) -> SampleIndex:
    """Index of all samples of ``run``.

    ``complain``: see `read_samples`. ``with_summary``: use the columns in the run's summaries, see
    `base.block_summaries`. The result is the same without them.
    """
    if with_summary:
        return read_with_summary(partial(_read_index, run, complain))
    return _read_index(run, complain, False)


def _read_index(run: RunDir, complain: Callable[[str], None], with_summary: bool) -> SampleIndex:
    texts: dict[str, int] = {}
    columns: dict[str, list[NDArray[Any]]] = {name: [] for name in (*_INTEGERS, *_FLOATS, "file")}
    paths = sorted(run.samples.glob(f"*{SUFFIX}"))
    for file_number, path in enumerate(paths):
        for at, content in _blocks(run, path, with_summary):
            new = [texts.setdefault(text, len(texts)) for text in content["texts"]]
            # The last entry is that of -1.
            numbers = np.array([*new, -1], np.int64)
            block = {
                name: np.frombuffer(content[name], np.int64 if name in _INTEGERS else np.float64)
                for name in (*_INTEGERS, *_FLOATS)
            }
            for name in ("shard", "eval", "reason"):
                block[name] = numbers[block[name]]
            block["member"] = block["member"] + at
            block["file"] = np.full(len(block["ticket"]), file_number)
            for name, column in block.items():
                columns[name].append(column)
            if content["complaint"]:
                text = f"{path}: {content['complaint']}; the samples that follow in it are left out"
                complain(text)
                break
    joined = {name: np.concatenate(pieces) for name, pieces in columns.items() if pieces}
    return SampleIndex(texts=list(texts), paths=paths, **joined)


def _blocks(run: RunDir, path: Path, with_summary: bool) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Blocks of a file of samples, each with its offset."""
    at = 0
    try:
        summary = summary_of(run.root, path) if with_summary else None
        for content in read_blocks(path, summary, BLOCKS):
            yield at, content
            at += content["bytes"]
    except ForeignFileError as error:
        yield at, _Columns().content(0, error.strerror or str(error))
    except (OSError, ValueError):
        # Removed, not readable, or empty.
        return


class _Columns:
    """Columns of the samples of a block."""

    def __init__(self) -> None:
        self._texts: dict[str, int] = {}
        self._integers = {name: array("q") for name in _INTEGERS}
        self._floats = {name: array("d") for name in _FLOATS}

    def add(self, sample: Sample, member: int, number: int) -> None:
        ticket = sample["id"].partition(".")[0]
        ticket_number = int(ticket) if ticket.isdecimal() else NO_TICKET
        eval_set = sample.get("eval")
        values = {
            "ticket": ticket_number if ticket_number < _MAX_TICKET else NO_TICKET,
            "shard": self._number(str(sample.get("shard"))),
            "eval": -1 if eval_set is None else self._number(eval_set),
            "reason": self._number(sample["finish_reason"]),
            "member": member,
            "number": number,
        }
        for name, value in values.items():
            self._integers[name].append(value)
        for name, numbers in self._floats.items():
            numbers.append(float(sample[name]))

    def _number(self, text: str) -> int:
        return self._texts.setdefault(text, len(self._texts))

    def content(self, size: int, complaint: str) -> dict[str, Any]:
        """Content of a block of ``size`` bytes. ``complaint``: why the samples after it are left
        out, or empty."""
        packed = {name: column.tobytes() for name, column in self._integers.items()}
        packed |= {name: column.tobytes() for name, column in self._floats.items()}
        return {"bytes": size, "complaint": complaint, "texts": list(self._texts), **packed}


def _parse_block(data: bytes) -> dict[str, Any]:
    columns, complaint = _Columns(), ""
    try:
        for start, _, content in inflate_members(data):
            for number, sample in enumerate(parse_member(content)):
                if is_valid(sample):
                    columns.add(sample, start, number)
    except ForeignFileError as error:
        complaint = error.strerror or str(error)
    return columns.content(len(data), complaint)


def _cut(data: Bytes, start: int) -> int:
    """End of the first gzip member that ends at least `BLOCK_BYTES` after ``start``; 0: none."""
    if len(data) - start < block_summaries.BLOCK_BYTES:
        return 0
    try:
        for _, end, _ in inflate_members(data, start):
            if end >= start + block_summaries.BLOCK_BYTES:
                return end
    except ForeignFileError:
        pass
    return 0


BLOCKS = BlockFormat(1, _parse_block, _cut)
"""Blocks of files of samples."""
