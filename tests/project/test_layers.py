"""Imports run downward: each package knows only those below its own line. Imports in functions and
imports for type checkers count too."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "relax_hpc"
LINES = (
    ("commands",),
    ("convert",),
    ("service",),
    ("ops",),
    ("cluster",),
    ("roles",),
    ("rollout",),
    ("training",),
    ("queue",),
    ("tasks",),
    ("environments",),
    ("rewards",),
    ("data",),
    ("net",),
    ("config",),
    ("algorithms",),
    ("base",),
)
"""The packages from top to bottom. Those of one line do not know each other; single modules are
below all."""
ABOVE_ALL = ("__main__",)
"""Entry points, which import from the rooms."""
ELSEWHERE = ("examples",)
"""Packages that lie in another folder."""
KNOWN: set[tuple[str, str]] = set()
"""What is still wrong."""
WITH_CIRCLES = {"algorithms", "config", "queue", "rewards", "rollout"}
"""Packages with modules that import each other in a circle."""


def level(name: str) -> int:
    """Line of a package; modules of the top level lie below the last."""
    return next((number for number, line in enumerate(LINES) if name in line), len(LINES))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and the first name below ``relax_hpc`` of each import of a file, those for type checkers
    included."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        module = getattr(node, "module", None)
        for alias in node.names:
            _, _, inner = (f"{module}.{alias.name}" if module else alias.name).partition(
                "relax_hpc."
            )
            if inner:
                yield node.lineno, inner.split(".")[0]


def test_every_package_has_its_line() -> None:
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert packages - {*ELSEWHERE} == {name for line in LINES for name in line}


@pytest.mark.parametrize("package", ["", *(name for line in LINES for name in line)])
def test_imports_run_downward(package: str) -> None:
    files = (PACKAGE / package).rglob("*.py") if package else PACKAGE.glob("*.py")
    upward = [
        f"{path.relative_to(PACKAGE.parent)}:{line} imports {name}"
        for path in files
        if path.stem not in ABOVE_ALL
        for line, name in imports(path)
        if level(name) < len(LINES) and level(name) <= level(package) and name != package
        if (package, name) not in KNOWN
    ]
    assert not upward


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports for types only and imports inside functions count too."""
    graph = module_graph()
    circles = [
        circle
        for circle in import_circles(graph)
        if not {name.split(".")[1] for name in circle} <= WITH_CIRCLES
    ]
    assert not circles


def module_graph() -> dict[str, set[str]]:
    """Modules of the package -> the modules that each imports anywhere in its file."""
    paths = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        paths[".".join(part for part in parts if part != "__init__")] = path
    graph: dict[str, set[str]] = {}
    for name, path in paths.items():
        imported: set[str] = set()
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import):
                imported.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    imported.add(inner if inner in paths else node.module)
        graph[name] = (imported & paths.keys()) - {name}
    return graph


def import_circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Sets of two or more modules that each reach the others by imports.

    >>> import_circles({"a": {"b"}, "b": {"c"}, "c": {"b"}})
    [['b', 'c']]
    """
    reached = {name: _reachable(graph, name) for name in graph}
    circles = {
        tuple(sorted(other for other in reached[name] if name in reached[other]))
        for name in graph
        if name in reached[name]
    }
    return sorted(list(circle) for circle in circles)


def _reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    reached: set[str] = set()
    pending = [start]
    while pending:
        for name in graph[pending.pop()] - reached:
            reached.add(name)
            pending.append(name)
    return reached


def test_a_class_name_means_one_thing_in_a_package() -> None:
    """Across packages the import says which it is."""
    found = Counter(
        (path.parent, node.name)
        for path in PACKAGE.rglob("*.py")
        for node in ast.parse(path.read_bytes()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [(str(folder), name) for (folder, name), count in found.items() if count > 1] == []
