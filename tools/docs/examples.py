"""Code blocks of docs/extending/ that are files of examples/."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "examples"


def block(name: str) -> str:
    """The file examples/``name``.py as a code block, whose first line names the file."""
    return f"```python examples/{name}.py\n{(FOLDER / name).with_suffix('.py').read_text()}```"
