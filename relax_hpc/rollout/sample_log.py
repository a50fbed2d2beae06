"""Samples of the model's responses for people: some episodes of each step, and all episodes of
evaluations.

Each rollout rank appends to one file for each incarnation,
`samples/rollout-inc-000001-rank-0.jsonl.gz`. It writes whole gzip members, so that a kill costs at
most the last member. A sample names the shard of its row; only the journal says whether the row was
accepted.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import json
import math
import mmap
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from relax_hpc.base.background import print_log_line
from relax_hpc.base.block_summaries import Bytes
from relax_hpc.base.disk_waits import AppendFile
from relax_hpc.base.foreign_files import ForeignFileError, open_in_run
from relax_hpc.config.schema import SamplesConfig

SUFFIX = ".jsonl.gz"
CUT = "\n[... {} characters left out ...]\n"
"""Mark in the middle of a text that is longer than `samples.max_text_chars`."""
CUT_SHORT = "cut"
"""Key of the beginning and end of an outcome as JSON, if that is longer."""
_HEAD_START = 0.02
"""Share of `samples.max_bytes` that a step may use in addition to the even share so far."""
_SIZE_CHECK_S = 10.0
"""Seconds between two checks of the size that all ranks have written."""
_LEVEL = 6
"""Compression level. Level 9, the default of the module, takes nine times as long for 5 % less."""
_MAGIC = b"\x1f\x8b\x08"
_CHUNK_BYTES = 1 << 16
_MEMBER_BYTES = 8 << 20
"""Approximate bytes of text in one gzip member; more samples are written as several members."""
_MAX_MEMBER_BYTES = 64 << 20
"""Most bytes that a reader unpacks from a member. A longer member is reported and left out."""
_NEWEST_FILES = 16
"""Files that `read_newest_samples` opens, at most. A run has one for each rollout rank and
incarnation."""
_NEWEST_BYTES = 64 << 20
"""Bytes of text that `read_newest_samples` unpacks, about."""
_MAX_FALSE_STARTS = 1000
"""Places in a file that look like the start of a member and are none, at most. Compressed data has
one in 16 MiB."""
_MAX_SAMPLE_BYTES = 16 << 20
"""Most bytes of a sample. A reader leaves out a longer one."""

Sample = dict[str, Any]
"""An episode as it is stored; `relax_hpc.rollout.readable_rows` makes it."""


class SampleLog:
    """The file of one rank. A write never fails and never waits for the disk. Samples that do not
    fit are counted.

    ::

        path = run.samples / "rollout-inc-000001-rank-0.jsonl.gz"
        log = SampleLog(path, config.samples, steps=100)
        log.keep([{"id": "000000012.00.00", "step": 3, "response": "12", "reward": 1.0}], step=3)
    """

    def __init__(self, path: Path, limits: SamplesConfig, steps: int) -> None:
        """``steps``: steps of the whole run, over which `samples.max_bytes` is distributed."""
        self.path, self.limits, self.steps = path, limits, steps
        self._skipped = 0
        self._lines: AppendFile | None = None
        self._failed = False
        self._lock = threading.Lock()
        self._used, self._checked_at = 0, -math.inf

    def keep(self, samples: Sequence[Mapping[str, Any]], step: int | None = None) -> None:
        """Append episodes of ``step``. None: of an evaluation, which may use all free space."""
        if not samples:
            return
        member = b"".join(gzip.compress(text, _LEVEL, mtime=0) for text in self._texts(samples))
        with self._lock:
            if not (self._has_room(len(member), step) and self._try_to_append(member)):
                self._skipped += len(samples)

    def _texts(self, samples: Sequence[Mapping[str, Any]]) -> Iterator[bytes]:
        """Lines of ``samples``, in pieces of about `_MEMBER_BYTES`."""
        text = bytearray()
        for sample in samples:
            # default=str: components of a user's reward may have any type.
            line = json.dumps(self._short(sample), ensure_ascii=False, default=str, skipkeys=True)
            # A tokenizer may return a lone surrogate for half of a character, which UTF-8 cannot
            # encode.
            text += line.encode(errors="replace") + b"\n"
            if len(text) >= _MEMBER_BYTES:
                yield bytes(text)
                text.clear()
        if text:
            yield bytes(text)

    def _try_to_append(self, member: bytes) -> bool:
        """Append ``member``; False: that is impossible. An error must not end the run."""
        try:
            return self._append(member)
        except OSError as error:
            self._lines = None
            if not self._failed:
                print_log_line(f"{self.path}: {error.strerror}: samples are not stored")
            self._failed = True
            return False

    def _append(self, member: bytes) -> bool:
        """Append; False: the disk has been full for so long that the buffer in memory is full
        too."""
        lines = self._lines = self._lines or AppendFile(self.path)
        before = lines.dropped
        lines.write(member)
        lines.flush()
        self._used += len(member)
        return lines.dropped == before

    def _has_room(self, size: int, step: int | None) -> bool:
        """Whether ``size`` bytes fit into the part of the limit that ``step`` may use. The last
        step of a run may use all of it."""
        if time.monotonic() >= self._checked_at + _SIZE_CHECK_S:
            self._checked_at = time.monotonic()
            with contextlib.suppress(OSError):
                self._used = sum(
                    path.stat().st_size for path in self.path.parent.glob(f"*{SUFFIX}")
                )
        share = 1.0 if step is None else min(1.0, (step + 1) / self.steps + _HEAD_START)
        return self._used + size <= share * self.limits.max_bytes

    def _short(self, sample: Mapping[str, Any]) -> Sample:
        """The sample with its texts cut to their maximum length; the texts of its turns share that
        length."""
        limit = self.limits.max_text_chars
        short = {
            name: _cut(value, limit) if isinstance(value, str) else value
            for name, value in sample.items()
        }
        turns = sample.get("turns", [])
        if sum(len(turn["text"]) for turn in turns) > limit:
            share = limit // len(turns)
            short["turns"] = [turn | {"text": _cut(turn["text"], share)} for turn in turns]
        environment = sample.get("environment")
        if environment:
            text = json.dumps(environment, ensure_ascii=False, default=str, skipkeys=True)
            if len(text) > limit:
                short["environment"] = {CUT_SHORT: _cut(text, limit)}
        return short

    def take_skipped(self) -> int:
        """Number of episodes since the last call that were not stored, because of the limit or of a
        full disk."""
        with self._lock:
            skipped, self._skipped = self._skipped, 0
        return skipped

    def close(self) -> None:
        """Try once to write the bytes that are still buffered for a full disk."""
        with self._lock:
            if self._lines:
                with contextlib.suppress(OSError):
                    self._lines.close()


def _cut(text: str, limit: int) -> str:
    """Beginning and end of ``text``, together ``limit`` characters; all of a shorter text.

    >>> _cut("0123456789", 4)
    '01\\n[... 6 characters left out ...]\\n89'
    """
    if len(text) <= limit:
        return text
    half = limit // 2
    return text[:half] + CUT.format(len(text) - 2 * half) + text[-half:]


def kept_of(ticket: int, per_step: int, prompts_per_step: int, samples_per_prompt: int) -> bool:
    """Whether the episodes of ``ticket`` are selected. In each step, whole prompt groups with
    together ``per_step`` episodes are selected, evenly spread.

    >>> [ticket for ticket in range(8) if kept_of(ticket, 4, 4, 2)]
    [1, 3, 5, 7]
    """
    groups = min(prompts_per_step, -(-per_step // samples_per_prompt))
    index = ticket % prompts_per_step
    return (index + 1) * groups // prompts_per_step > index * groups // prompts_per_step


def read_samples(
    folder: Path, complain: Callable[[str], None] = lambda _: None
) -> Iterator[Sample]:
    """All samples in the files of ``folder``, in the order of the file names, each file from its
    beginning.

    Damaged parts are left out. ``complain`` is called with a line for each file that is not read
    completely because it is not a file of a run, or because it unpacks to more than samples of a
    run do.
    """
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            for member in _members(path):
                yield from parse_member(member)
        except ForeignFileError as error:
            complain(f"{path}: {error.strerror}; the samples that follow in it are left out")


def read_newest_samples(
    folder: Path, is_enough: Callable[[Sequence[Sample]], bool]
) -> list[Sample]:
    """The newest samples of each of the newest files in ``folder``, in no order.

    ``is_enough``: whether these samples of a file suffice. A file is read from its end, so that
    the time does not grow with the length of a run. Damaged parts and foreign files are left out,
    and what follows after `_NEWEST_BYTES` of text.
    """
    paths = sorted(folder.glob(f"*{SUFFIX}"), key=_modified_at, reverse=True)
    samples, size = list[Sample](), 0
    for path in paths[:_NEWEST_FILES]:
        newest = list[Sample]()
        with contextlib.suppress(ForeignFileError):
            for member in _members_backward(path):
                newest += parse_member(member)
                size += len(member)
                if is_enough(newest) or size > _NEWEST_BYTES:
                    break
        samples += newest
    return samples


def _modified_at(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0


def _members_backward(path: Path) -> Iterator[bytes]:
    """The content of each complete gzip member, the last one first. ForeignFileError: see
    `_members`."""
    try:
        with (
            open_in_run(path) as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            start, false_starts = data.rfind(_MAGIC), 0
            while start >= 0 and false_starts < _MAX_FALSE_STARTS:
                content, _ = _inflate(data, start, path)
                if content is None:
                    false_starts += 1
                else:
                    yield content
                start = data.rfind(_MAGIC, 0, start)
    except ForeignFileError:
        raise
    except (OSError, ValueError):
        # Removed, not readable, or empty.
        return


def parse_member(member: bytes) -> Iterator[Sample]:
    """Samples in the content of a gzip member. Lines that are none are left out."""
    for line in member.splitlines():
        if len(line) > _MAX_SAMPLE_BYTES:
            continue
        try:
            sample = json.loads(line, parse_constant=_number, parse_float=_number)
        except (ValueError, RecursionError):
            continue
        if isinstance(sample, dict):
            yield sample


def _number(text: str) -> float | None:
    """The number in ``text``; None for NaN and infinity, which JSON cannot represent."""
    value = float(text)
    return value if math.isfinite(value) else None


def _members(path: Path) -> Iterator[bytes]:
    """The content of each complete gzip member. ForeignFileError: the file, or a member of it, must
    not be read."""
    try:
        with (
            open_in_run(path) as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            for _, _, content in inflate_members(data, path=path):
                yield content
    except ForeignFileError:
        raise
    except (OSError, ValueError):
        # Removed, not readable, or empty.
        return


def inflate_members(
    data: Bytes, start: int = 0, path: Path | None = None
) -> Iterator[tuple[int, int, bytes]]:
    """Start, end and content of each complete gzip member from ``start`` on. ForeignFileError: a
    member must not be read."""
    start = data.find(_MAGIC, start)
    while start >= 0:
        content, end = _inflate(data, start, path)
        if content is not None:
            yield start, end, content
        start = data.find(_MAGIC, end)


def _inflate(data: Bytes, start: int, path: Path | None) -> tuple[bytes | None, int]:
    """The content of the member at ``start``, and its end. If it is damaged: None, and the position
    from which to search for the next member.

    ForeignFileError: it unpacks to more than `_MAX_MEMBER_BYTES`.
    """
    stream, pieces, size, position = zlib.decompressobj(zlib.MAX_WBITS | 16), [], 0, start
    try:
        while not stream.eof and position < len(data):
            chunk = data[position : position + _CHUNK_BYTES]
            # The size is checked after each chunk, which unpacks to at most a thousand times its
            # size.
            pieces.append(stream.decompress(chunk))
            position += len(chunk)
            size += len(pieces[-1])
            if size > _MAX_MEMBER_BYTES:
                text = (
                    f"unpacks to more than {_MAX_MEMBER_BYTES} bytes, allowed: at most that in "
                    "one part"
                )
                raise ForeignFileError(errno.EFBIG, text, str(path or ""))
    except zlib.error:
        return None, start + len(_MAGIC)
    if not stream.eof:
        return None, start + len(_MAGIC)
    return b"".join(pieces), position - len(stream.unused_data)
