"""Examples of a page for people: its files, and its commands with what they print, section by
section."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^```(\w+) ?(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(slots=True)
class Example:
    """A section's files, by name, and its commands with the lines that they must print, in this
    order."""

    title: str
    files: dict[str, str] = field(default_factory=dict)
    commands: list[tuple[str, list[str]]] = field(default_factory=list)

    def run(self, folder: Path, timeout_s: float = 300.0) -> None:
        """Write the files to ``folder`` and run the commands there. AssertionError: one fails, or
        prints otherwise."""
        for name, text in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        (folder / "configs").symlink_to(ROOT / "configs")
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        environment = os.environ | {
            "PATH": path,
            "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),
        }
        for command, expected in self.commands:
            done = subprocess.run(
                ["bash", "-ec", command],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=timeout_s,
            )
            told = f"{self.title}: $ {command}\n{done.stdout}{done.stderr}"
            assert done.returncode == 0, told
            rest = iter((done.stdout + done.stderr).splitlines())
            for line in expected:
                assert any(line in found for found in rest), (
                    f"{line!r} is not in what is left of\n{told}"
                )


def examples(page: Path) -> Iterator[Example]:
    """Of each section with a second-level heading that has any."""
    for section in re.split(r"^## ", page.read_text(), flags=re.MULTILINE)[1:]:
        example = Example(section.partition("\n")[0])
        for kind, name, text in _BLOCK.findall(section):
            if kind == "console":
                example.commands += _commands(text)
            elif name:
                example.files[name] = text
        if example.commands:
            yield example


def _commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """Lines after `$ `, with what is printed after each; `...` stands for any lines."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, *printed = part.rstrip("\n").split("\n")
        yield command, [line for line in printed if line != "..."]
