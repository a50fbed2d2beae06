"""Samples of the model's responses, kept for people to read: some episodes of every step, all of an
evaluation.

Each rollout rank appends to a file of its own incarnation,
`samples/rollout-inc-000001-rank-0.jsonl.gz`, one gzip member at a time, so that a killed writer
costs the last one alone. Whether an episode was accepted only the journal says: each names the
shard it was put in.
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
from relax_hpc.base.disk_waits import AppendFile
from relax_hpc.base.foreign_files import ForeignFileError, open_in_run
from relax_hpc.config.schema import SamplesConfig

SUFFIX = ".jsonl.gz"
CUT = "\n[... {} characters left out ...]\n"
"""Mark in the middle of a text that is longer than `samples.max_text_chars`."""
CUT_SHORT = "cut"
"""Name of what an environment has said last, as JSON, where it is longer than that."""
_HEAD_START = 0.02
"""Share of `samples.max_bytes` that steps may use ahead of their even share."""
_LOOK_S = 10.0
"""Seconds between two looks at how much the other ranks have written."""
_LEVEL = 6
"""Level of compression: 9, the module's own choice, takes nine times as long for a twentieth
less."""
_MAGIC = b"\x1f\x8b\x08"
_CHUNK_BYTES = 1 << 16
_MEMBER_BYTES = 8 << 20
"""Bytes of text in one gzip member, about: a longer group of samples is written as several."""
_MOST_MEMBER_BYTES = 64 << 20
"""Bytes that a member may unpack to. A longer one is left out, and said."""
_MOST_SAMPLE_BYTES = 16 << 20
"""Bytes of one sample. A longer one is left out."""

Sample = dict[str, Any]
"""An episode as it is kept; `relax_hpc.rollout.samples_of` makes it."""


class SampleLog:
    """The file of one rank. Writing to it never fails and never waits for its disk; what finds no
    room is counted.

    ::

        path = run.samples / "rollout-inc-000001-rank-0.jsonl.gz"
        log = SampleLog(path, config.samples, steps=100)
        log.keep([{"id": "000000012.00.00", "step": 3, "response": "12", "reward": 1.0}], step=3)
    """

    def __init__(self, path: Path, limits: SamplesConfig, steps: int) -> None:
        """``steps``: of the whole run, over which `samples.max_bytes` is spread."""
        self.path, self.limits, self.steps = path, limits, steps
        self._skipped = 0
        self._lines: AppendFile | None = None
        self._failed = False
        self._lock = threading.Lock()
        self._used, self._looked_at = 0, -math.inf

    def keep(self, samples: Sequence[Mapping[str, Any]], step: int | None = None) -> None:
        """Append episodes of ``step``; of None: of an evaluation, which may use all the room that
        is left."""
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
            # What a user's reward says of itself may be anything.
            line = json.dumps(self._short(sample), ensure_ascii=False, default=str, skipkeys=True)
            # A lone surrogate, as a tokenizer may give for half of a character, is no UTF-8.
            text += line.encode(errors="replace") + b"\n"
            if len(text) >= _MEMBER_BYTES:
                yield bytes(text)
                text.clear()
        if text:
            yield bytes(text)

    def _try_to_append(self, member: bytes) -> bool:
        """Append if possible; False: not to such a folder, or file, or disk. A sample is not worth
        a run."""
        try:
            return self._append(member)
        except OSError as error:
            self._lines = None
            if not self._failed:
                print_log_line(f"{self.path}: {error.strerror}: samples are not kept")
            self._failed = True
            return False

    def _append(self, member: bytes) -> bool:
        """Append; False: the disk has been full for so long that no more is kept for it in
        memory."""
        lines = self._lines = self._lines or AppendFile(self.path)
        before = lines.dropped
        lines.write(member)
        lines.flush()
        self._used += len(member)
        return lines.dropped == before

    def _has_room(self, size: int, step: int | None) -> bool:
        """Whether ``size`` bytes fit into the part of the bound that ``step`` may use, which is all
        of it for a run's last step."""
        if time.monotonic() >= self._looked_at + _LOOK_S:
            self._looked_at = time.monotonic()
            with contextlib.suppress(OSError):
                self._used = sum(
                    path.stat().st_size for path in self.path.parent.glob(f"*{SUFFIX}")
                )
        share = 1.0 if step is None else min(1.0, (step + 1) / self.steps + _HEAD_START)
        return self._used + size <= share * self.limits.max_bytes

    def _short(self, sample: Mapping[str, Any]) -> Sample:
        """Sample whose texts are cut to the length that they may have; those of its turns share
        it."""
        most = self.limits.max_text_chars
        short = {
            name: _cut(value, most) if isinstance(value, str) else value
            for name, value in sample.items()
        }
        if turns := sample.get("turns", []):
            whole = sum(len(turn["text"]) for turn in turns) <= most
            short["turns"] = (
                turns
                if whole
                else [turn | {"text": _cut(turn["text"], most // len(turns))} for turn in turns]
            )
        if told := sample.get("environment"):
            text = json.dumps(told, ensure_ascii=False, default=str, skipkeys=True)
            short["environment"] = told if len(text) <= most else {CUT_SHORT: _cut(text, most)}
        return short

    def take_skipped(self) -> int:
        """Episodes since the last call that found no room, within the bound or on a disk that was
        full for long."""
        with self._lock:
            skipped, self._skipped = self._skipped, 0
        return skipped

    def close(self) -> None:
        """Write what the disk has not taken so far, if it does now."""
        with self._lock:
            if self._lines:
                with contextlib.suppress(OSError):
                    self._lines.close()


def _cut(text: str, most: int) -> str:
    """Beginning and end of ``text``.

    >>> _cut("0123456789", 4)
    '01\\n[... 6 characters left out ...]\\n89'
    """
    half = most // 2
    return (
        text if len(text) <= most else text[:half] + CUT.format(len(text) - 2 * half) + text[-half:]
    )


def kept_of(ticket: int, per_step: int, prompts_per_step: int, samples_per_prompt: int) -> bool:
    """Whether the episodes of ``ticket`` are kept: of every step as many whole prompt groups as
    hold ``per_step`` episodes, evenly spread.

    >>> [ticket for ticket in range(8) if kept_of(ticket, 4, 4, 2)]
    [1, 3, 5, 7]
    """
    groups, place = (
        min(prompts_per_step, -(-per_step // samples_per_prompt)),
        ticket % prompts_per_step,
    )
    return (place + 1) * groups // prompts_per_step > place * groups // prompts_per_step


def read_samples(
    folder: Path, complain: Callable[[str], None] = lambda _: None
) -> Iterator[Sample]:
    """Everything in the files of ``folder``, file by file in the order of their names, each from
    its beginning.

    What is torn or damaged is left out. ``complain`` is called with a line for each file that is
    not read whole because it is no file of a run, or unpacks to more than samples of a run do.
    """
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            for member in _members(path):
                yield from _samples(member)
        except ForeignFileError as error:
            complain(f"{path}: {error.strerror}; the samples that follow in it are left out")


def _samples(member: bytes) -> Iterator[Sample]:
    for line in member.splitlines():
        if len(line) > _MOST_SAMPLE_BYTES:
            continue
        try:
            sample = json.loads(line, parse_constant=_number, parse_float=_number)
        except (ValueError, RecursionError):
            continue
        if isinstance(sample, dict):
            yield sample


def _number(text: str) -> float | None:
    """None for what is no number: a page could not hold it."""
    return value if math.isfinite(value := float(text)) else None


def _members(path: Path) -> Iterator[bytes]:
    """The content of each gzip member that is whole. ForeignFileError: the file, or a member of it,
    is not read."""
    try:
        with (
            open_in_run(path) as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            start = data.find(_MAGIC)
            while start >= 0:
                content, end = _inflate(data, start, path)
                if content is not None:
                    yield content
                start = data.find(_MAGIC, end)
    except ForeignFileError:
        raise
    except (OSError, ValueError):
        # Removed, not readable, or empty.
        return


def _inflate(data: mmap.mmap, start: int, path: Path) -> tuple[bytes | None, int]:
    """The content of the member at ``start``, and its end; None if it is damaged, and where to look
    for the next.

    ForeignFileError: it unpacks to more than `_MOST_MEMBER_BYTES`.
    """
    stream, parts, size, at = zlib.decompressobj(zlib.MAX_WBITS | 16), [], 0, start
    try:
        while not stream.eof and at < len(data):
            piece = data[at : at + _CHUNK_BYTES]
            # A chunk unpacks to a thousand times as much, at most.
            parts.append(stream.decompress(piece))
            at += len(piece)
            size += len(parts[-1])
            if size > _MOST_MEMBER_BYTES:
                text = (
                    f"unpacks to more than {_MOST_MEMBER_BYTES} bytes, allowed: at most that in "
                    "one part"
                )
                raise ForeignFileError(errno.EFBIG, text, str(path))
    except zlib.error:
        return None, start + len(_MAGIC)
    if not stream.eof:
        return None, start + len(_MAGIC)
    return b"".join(parts), at - len(stream.unused_data)
