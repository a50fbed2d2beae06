"""Finding of the doctor, one line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Finding:
    """`error`: the run would fail; `warning`: it may, or could not be checked. The text names key,
    found, fix; `detail` is printed below it as it is."""

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
