"""The first failure of each kind in a run: of a reward, an environment, a filter, an engine.

Failures are counted by reason. A count does not tell which line of a user's code failed. Therefore
the hub also writes the first failure of each kind, with its traceback, to failures.jsonl. The
terminal shows new lines of this file immediately.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from relax_hpc.base.disk_waits import AppendFile
from relax_hpc.base.error_origin import ErrorOrigin, shorten
from relax_hpc.base.errors import ConfigError
from relax_hpc.base.foreign_files import ForeignFileError, parse_json, read_in_run

FAILURES_FILE = "failures.jsonl"
_MAX_KINDS = 64
"""Kinds in one file, at most. A user's code may raise at any number of lines."""
_MAX_DETAIL_CHARS = 1000
_TEXTS = ("group", "reason", "detail", "location", "traceback")


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstFailure:
    """The first failure of its kind in a run."""

    group: str
    """Group of the process in which it happened."""
    reason: str
    """Name under which failures of this kind are counted, such as reward_exception."""
    detail: str
    """Description in one line."""
    location: str = ""
    """`FILE:LINE in FUNCTION` of the user's code; empty: none was involved."""
    traceback: str = ""
    """Traceback or stack; may be empty."""

    @classmethod
    def from_origin(cls, group: str, reason: str, detail: str, origin: ErrorOrigin) -> FirstFailure:
        """Bound the texts, which may come from a user's code."""
        location = shorten(origin.location, _MAX_DETAIL_CHARS)
        detail = " ".join(shorten(detail, _MAX_DETAIL_CHARS).split())
        return cls(
            group=group,
            reason=reason,
            detail=detail,
            location=location,
            traceback=shorten(origin.traceback),
        )

    @property
    def kind(self) -> tuple[str, str]:
        """Reason and location. A timeout can interrupt a call at any line, so that its location
        does not count."""
        return self.reason, "" if self.reason.endswith("timeout") else self.location

    @property
    def headline(self) -> str:
        """Reason, description and location in one line."""
        # Some details begin with the reason.
        detail = self.detail.removeprefix(f"{self.reason}: ")
        where = f" at {self.location}" if self.location else ""
        return f"{self.reason}: {detail}{where}"


class FirstFailures:
    """Kinds of failures that have occurred, up to a bound."""

    def __init__(self) -> None:
        self._kinds: set[tuple[str, str]] = set()

    def is_first(self, failure: FirstFailure) -> bool:
        """Whether ``failure`` is the first of its kind. Its kind is then stored."""
        if failure.kind in self._kinds or len(self._kinds) >= _MAX_KINDS:
            return False
        self._kinds.add(failure.kind)
        return True


class FailureWriter:
    """Writes failures.jsonl of a run, for the hub alone."""

    def __init__(self, run_dir: Path) -> None:
        self._first_failures = FirstFailures()
        self._path = run_dir / FAILURES_FILE
        self._lines: AppendFile | None = None

    def write(self, failure: FirstFailure) -> None:
        """Append ``failure`` if it is the first of its kind since the hub began."""
        if not self._first_failures.is_first(failure):
            return
        if self._lines is None:
            self._lines = AppendFile(self._path)
        line = {"time": time.time(), **asdict(failure)}
        self._lines.write(json.dumps(line).encode() + b"\n")
        self._lines.flush()

    def close(self) -> None:
        """Close the file if it was opened."""
        if self._lines:
            self._lines.close()


def parse_failure(line: bytes) -> FirstFailure | None:
    """Failure in a line of failures.jsonl. None: the line is incomplete, or has other fields."""
    try:
        fields = parse_json(line)
    except ValueError:
        return None
    if not isinstance(fields, Mapping):
        return None
    texts: dict[str, Any] = {name: fields.get(name) for name in _TEXTS}
    if not all(isinstance(text, str) for text in texts.values()):
        return None
    return FirstFailure(**texts)


def read_failures(run_dir: Path) -> list[FirstFailure]:
    """The first failure of each kind in a run, in the order of their occurrence.

    ConfigError: the file is not a regular file of a run, or is too large.
    """
    path = run_dir / FAILURES_FILE
    try:
        lines = read_in_run(path).splitlines()
    except FileNotFoundError:
        return []
    except ForeignFileError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    first_failures = FirstFailures()
    parsed = map(parse_failure, lines)
    return [failure for failure in parsed if failure and first_failures.is_first(failure)]
