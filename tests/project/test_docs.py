"""Pages of the documentation: links, generated parts, glossary, and docstrings of the code."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from relax_hpc.config.options import options

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "env" / "README.md"])
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_LINES = 119
_NO_SUBJECT = re.compile(
    r"(how|it|its|that|their|these|they|those|what|where|which|who|why)\b(?!-)", re.IGNORECASE
)
"""First word of a docstring that does not name its subject. An editor shows a docstring alone."""


def anchors(page: Path) -> set[str]:
    """Anchors of the headings, as GitHub generates them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_have_a_target(page: Path) -> None:
    for link in _LINK.findall(page.read_text()):
        if not link.startswith(("https://", "http://")):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), f"{link}: no such file"
            assert not anchor or anchor in anchors(target), (
                f"{link}: allowed {sorted(anchors(target))}"
            )


def test_the_readme_is_short() -> None:
    """The navigation of the site leads to every page: tests/project/test_docs_site.py."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= _LINES


def test_generated_pages_are_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, "tools/docs", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def section_rows(page: Path, heading: str) -> list[tuple[str, str]]:
    """Rows of the table under a heading, without its head."""
    section = page.read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| (.+?) \| (.+) \|$", section, re.MULTILINE)[1:]


def defined_names(path: Path) -> set[str]:
    """Functions, classes and methods of a file; methods with and without their class."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{getattr(member, 'name', '')}" for member in node.body}
    return names


def test_the_places_to_look_exist() -> None:
    """A name in an answer is defined in the file before it. An answer has at most two files."""
    rows = section_rows(ROOT / "docs" / "architecture.md", "Where to look")
    assert len(rows) == 10
    missing = []
    for question, answer in rows:
        files = list[Path]()
        for name in re.findall(r"`(.+?)`", answer):
            if name.endswith(".py"):
                files.append(ROOT / "relax_hpc" / name)
                missing += [] if files[-1].is_file() else [name]
            elif name not in defined_names(files[-1]):
                missing.append(f"{files[-1].name}: {name}")
        assert 1 <= len(files) <= 2, question
    assert not missing


def glossary_rows(heading: str) -> list[tuple[str, str]]:
    """Rows of the glossary's table under a heading, without the first two lines."""
    text = (ROOT / "docs" / "glossary.md").read_text()
    section = text.partition(heading)[2].partition("\n## ")[0]
    return re.findall(r"^\| (.+?) \| (.+) \|$", section, re.MULTILINE)[1:]


def test_the_glossary_has_few_words_and_each_is_in_use() -> None:
    terms = list[str]()
    for cell, _ in glossary_rows("# Glossary"):
        terms += re.findall(r"\*\*(.+?)\*\*", cell)
    assert len(terms) == len(set(terms)) <= 20
    text = (
        " ".join(path.read_text() for path in sorted((ROOT / "relax_hpc").rglob("*.py")))
        .replace("_", " ")
        .lower()
    )
    assert not [term for term in terms if not re.search(rf"\b{term}", text)]


def test_names_that_are_not_used_do_not_come_back() -> None:
    unused = set[str]()
    for cell, _ in glossary_rows("## Names that are not used"):
        unused.update(re.findall(r"`(\w+)`", cell))
    uses = []
    for path in sorted((ROOT / "relax_hpc").rglob("*.py")):
        tree = ast.parse(path.read_text())
        names = [
            path.stem,
            *(node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)),
        ]
        uses += [f"{path.name}: {name}" for name in names if unused & words_of_name(name)]
    schema = {option.key.rpartition(".")[2] for option in options()}
    assert not uses and not unused & schema


def words_of_name(name: str) -> set[str]:
    """Words of an identifier in lower case.

    >>> sorted(words_of_name("TurnsDesk") | words_of_name("turns_desk"))
    ['desk', 'turns']
    """
    return {match.lower() for match in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)}


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of everything that documents a module, class, function, constant or field."""
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.lineno, node.value.value.strip()


def test_docstrings_begin_with_their_subject() -> None:
    findings = list[str]()
    for path in sorted((ROOT / "relax_hpc").rglob("*.py")):
        for line, text in docstrings(path.read_text()):
            if _NO_SUBJECT.match(text):
                findings.append(f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}")
    assert not findings, "begin with a noun, a unit or a verb:\n" + "\n".join(findings)
