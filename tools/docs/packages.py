"""The packages of relax_hpc: files, lines, and which other packages they import."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NAME = "relax_hpc"
_TOP = "."


def packages(root: Path) -> dict[str, dict[str, Any]]:
    """By its path below relax_hpc each folder with modules: {files, lines, imports}, these being
    other packages of the first level; modules of the top level count as none, as everything may
    import them."""
    base, found = root / NAME, dict[str, dict[str, Any]]()
    for path in sorted(base.rglob("*.py")):
        name, text = str(path.parent.relative_to(base)), path.read_text()
        about = found.setdefault(name, {"files": 0, "lines": 0, "imports": set()})
        about["files"] += 1
        about["lines"] += text.count("\n")
        about["imports"] |= {
            other for other in imported(ast.parse(text)) if (base / other).is_dir()
        }
    for name, about in found.items():
        about["imports"] = sorted(about["imports"] - {name.partition("/")[0]})
    return found


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
    found = packages(ROOT)
    rows = [
        (f"`{'relax_hpc' if name == _TOP else name}/`", about)
        for name, about in sorted(found.items())
    ]
    total = {key: sum(about[key] for _, about in rows) for key in ("files", "lines")}
    lines = ["| package | files | lines | imports |", "|---|---|---|---|"]
    lines += [
        f"| {name} | {a['files']} | {a['lines']:,} | {', '.join(a['imports'])} |"
        for name, a in rows
    ]
    imports = sum(len(about["imports"]) for _, about in rows)
    return "\n".join([*lines, f"| `all/` | {total['files']} | {total['lines']:,} | {imports} |"])
