"""A finding of `relax-hpc doctor`: a severity and one line of text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Finding:
    """One line about one setting or one property of the machine.

    `severity`: with an `error` the run would fail. With a `warning` it may fail, or the property
    could not be checked. `text` names the setting, the value found, the values allowed and the fix.
    `detail` is printed below the text without a change.
    """

    severity: Literal["error", "warning", "ok"]
    text: str
    detail: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", " ".join(self.text.split()))


def error(text: str) -> Finding:
    return Finding("error", text)


def warning(text: str) -> Finding:
    return Finding("warning", text)


def ok(text: str, detail: str = "") -> Finding:
    return Finding("ok", text, detail)
