"""Pictures of docs/architecture.md, as SVG: the layers of the packages, and the way of a ticket.

The layers come from LINES in tests/project/test_layers.py. Each record that the second picture names must
be a record of the queue's journal, `@applies("name")` in the code; a name that is not there ends
the generator with an error.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
_WIDTH, _ROW, _GAP, _MARGIN = 960, 48, 10, 16
_STYLE = (
    "text{font-family:system-ui,sans-serif;font-size:14px;fill:#1f2933}.name{font-weight:600}.small{font-size:12px}"
    ".box{fill:#eef2f7;stroke:#7b8794}.hub{fill:#fdf3d8;stroke:#b08900}.line{stroke:#52606d;stroke-width:1.5;fill:none}"
)
ROOMS = {
    "commands": "command line and entry points of the launcher",
    "convert": "Hugging Face to training format and back",
    "ops": "status, report, samples, logs, doctor, checks, plan",
    "cluster": "Slurm jobs and steps, layouts, supervisor, leases",
    "roles": "the table of roles, one short file each",
    "rollout": "episodes, engines, agents",
    "training": "trainer, models, weights, checkpoints",
    "queue": "client, requests, planning, state, storage",
    "tasks": "data source, episode and reward of a task",
    "environments": "what episodes of several turns are played against",
    "rewards": "functions that give a response its reward",
    "data": "rows, prompts, chat templates, media",
    "net": "planes, rendezvous, worker processes",
    "config": "settings and their checks",
    "algorithms": "one file an algorithm, no torch at import",
    "base": "errors, fields, metrics, small helpers",
}
"""What a package holds, where its own docstring does not say it."""


class Step(NamedTuple):
    """One station on the way of a ticket."""

    who: str
    what: str
    detail: str
    records: tuple[str, ...]


TICKET = (
    Step(
        "queue",
        "admit",
        "An engine serves version >= step - max_staleness: the ticket starts.",
        ("admit",),
    ),
    Step(
        "rollout",
        "generate",
        "Engines draw the episodes. Segments of them are logged.",
        ("append",),
    ),
    Step(
        "rollout", "put", "Rows with their rewards go into memory; readers may use them.", ("put",)
    ),
    Step(
        "queue", "accept", "Shard and journal record are on disk: never lost from here.", ("saved",)
    ),
    Step(
        "actor_fwd, reference",
        "score",
        "Forward roles claim the rows and add log-probabilities.",
        ("claim",),
    ),
    Step(
        "hub",
        "advantages",
        "The advantages role compares the rewards of a prompt.",
        ("claim", "put"),
    ),
    Step(
        "actor",
        "train",
        "Gradients are gathered; the update counts with this record.",
        ("gathered", "trained"),
    ),
    Step(
        "actor",
        "publish",
        "A new version of the weights, then a checkpoint.",
        ("publish", "checkpoint"),
    ),
)
RETURNS = (
    Step(
        "queue",
        "again",
        "The owner died or the group failed: the ticket is free again.",
        ("fail", "give_back"),
    ),
    Step(
        "queue",
        "roll back",
        "The actor resumes earlier: rows of lost versions are dropped.",
        ("resume",),
    ),
)


def pictures() -> dict[str, str]:
    """Text of each picture by its path below docs/."""
    known = _journal_records()
    named = {record for step in (*TICKET, *RETURNS) for record in step.records}
    if missing := sorted(named - known):
        raise SystemExit(
            f"tools/docs/pictures.py: TICKET: found records {missing}, allowed: {sorted(known)}"
        )
    layers = _layers(ROOT / "tests" / "project" / "test_layers.py")
    return {"pictures/rooms.svg": rooms_svg(layers), "pictures/ticket.svg": ticket_svg()}


def rooms_svg(layers: tuple[tuple[str, ...], ...]) -> str:
    """One row a layer; a package imports only from rows below its own."""
    parts = [_text(_MARGIN, 24, "Packages: each imports only from rows below its own", "name")]
    y = 40
    for layer in layers:
        width = (_WIDTH - 2 * _MARGIN - (len(layer) - 1) * _GAP) / len(layer)
        for number, name in enumerate(layer):
            x = _MARGIN + number * (width + _GAP)
            # A character of the small text is 6.4 pixels wide in the mean.
            detail = _shortened(_description(name), int((width - 170) / 6.4)) if width > 400 else ""
            parts += [_box(x, y, width, 30), _text(x + 10, y + 20, name, "name")]
            parts += [_text(x + 150, y + 20, detail, "small")] if detail else []
        y += 30 + _GAP
    return _svg(y + _MARGIN, parts)


def ticket_svg() -> str:
    """Stations from top to bottom, with who acts on the left and the journal's record on the
    right."""
    parts = [
        _text(_MARGIN, 24, "who", "name"),
        _text(190, 24, "what happens to the ticket and its rows", "name"),
        _text(770, 24, "record in the journal", "name"),
    ]
    y = 40
    for number, step in enumerate(TICKET):
        parts += _station(y, step, "box")
        if number < len(TICKET) - 1:
            parts.append(
                f'<path class="line" d="M450 {y + _ROW} v{_GAP + 6}" marker-end="url(#arrow)"/>'
            )
        y += _ROW + _GAP + 6
    parts.append(_text(_MARGIN, y + 20, "Ways back", "name"))
    y += 36
    for step in RETURNS:
        parts += _station(y, step, "hub")
        y += _ROW + _GAP
    return _svg(y + _MARGIN, parts)


def _station(y: float, step: Step, kind: str) -> Iterator[str]:
    yield _text(_MARGIN, y + 28, step.who, "small")
    yield _box(190, y, 560, _ROW, kind)
    yield _text(204, y + 20, step.what, "name")
    yield _text(204, y + 38, step.detail, "small")
    yield _text(770, y + 28, ", ".join(step.records), "small")


def _journal_records() -> set[str]:
    files = (ROOT / "relax_hpc").rglob("*.py")
    return {
        name
        for path in files
        for name in re.findall(r'^@applies\("(\w+)"', path.read_text(), re.MULTILINE)
    }


def _layers(path: Path) -> tuple[tuple[str, ...], ...]:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LINES":
            return ast.literal_eval(node.value)
    raise SystemExit(f"{path}: found no LINES, the table of the layers")


def _description(name: str) -> str:
    """First sentence of a package's docstring, or the entry of ROOMS; empty: neither."""
    path = ROOT / "relax_hpc" / name / "__init__.py"
    docstring = (ast.get_docstring(ast.parse(path.read_text())) if path.exists() else "") or ""
    first = re.split(r"[.;]\s|[.;]$", " ".join(docstring.partition("\n\n")[0].split()))[0]
    return ROOMS.get(name, first)


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3].rsplit(' ', 1)[0]} ..."


def _box(x: float, y: float, width: float, height: float, kind: str = "box") -> str:
    return (
        f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5"/>'
    )


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(text)}</text>'


def _svg(height: float, parts: list[str]) -> str:
    size = 'markerWidth="8" markerHeight="8" refX="6" refY="3" orient="auto"'
    arrow = f'<marker id="arrow" {size}><path d="M0 0 L6 3 L0 6z"/></marker>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:g}" role="img">'
    background = f'<rect width="{_WIDTH}" height="{height:g}" fill="#ffffff"/>'
    return "\n".join(
        [head, f"<style>{_STYLE}</style><defs>{arrow}</defs>", background, *parts, "</svg>", ""]
    )
