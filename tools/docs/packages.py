"""The packages of relax_hpc: what each holds, and which other packages it imports."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAME = "relax_hpc"
_TOP = "."


@dataclass
class Package:
    """The first sentence of a package's docstring, and the packages that its modules import."""

    summary: str = ""
    imports: set[str] = field(default_factory=set)


def packages(root: Path) -> dict[str, Package]:
    """Each folder with modules, by its path below relax_hpc.

    Imports are other packages of the first level. Modules of the top level do not count, because
    every package may import them.
    """
    base = root / NAME
    by_name: dict[str, Package] = {}
    for path in sorted(base.rglob("*.py")):
        name = str(path.parent.relative_to(base))
        package = by_name.setdefault(name, Package())
        tree = ast.parse(path.read_text())
        if path.name == "__init__.py":
            package.summary = _first_sentence(ast.get_docstring(tree) or "")
        package.imports |= {other for other in imported(tree) if (base / other).is_dir()}
    for name, package in by_name.items():
        package.imports.discard(name.partition("/")[0])
    return by_name


def _first_sentence(docstring: str) -> str:
    text = " ".join(docstring.partition("\n\n")[0].split())
    return re.split(r"(?<=[.])\s", text)[0].removesuffix(".")


def imported(tree: ast.AST) -> Iterator[str]:
    """The second part of each name of relax_hpc that a module imports, within functions too, but
    not for types."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        yield from (name.split(".")[1] for name in names if name.startswith(f"{NAME}."))
        yield from imported(node)


def table(_: str) -> str:
    """Lines of the table of packages."""
    lines = ["| package | holds | imports |", "|---|---|---|"]
    for name, package in sorted(packages(ROOT).items()):
        shown = NAME if name == _TOP else name
        lines.append(f"| `{shown}/` | {package.summary} | {', '.join(sorted(package.imports))} |")
    return "\n".join(lines)
