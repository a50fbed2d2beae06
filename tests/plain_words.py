"""Count vague names, idioms and dense expressions in Python files and pages.

`python -m tests.plain_words PATH...` prints each finding with its file and line, then the counts.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

VAGUE_NAMES = {
    *("found", "about", "made", "mine", "one", "others", "told", "said", "asked", "given", "rest"),
    *("way", "ways", "place", "places", "own", "beside", "known", "left", "seen", "here"),
    *("elsewhere", "again", "word", "words", "what", "how", "who", "why", "still", "more", "look"),
    *("part", "parts", "most", "least"),
}
IDIOM = re.compile(
    r"\b(whoever|whom|nobody|by itself|at once|beside|is told|are told|was told|of its own"
    r"|of their own|of one's own|there is none|there are none|what is|what it|what was|who has"
    r"|who is|as they are|goes on|go on|gone on|going on|gives up|given up|begins anew|anew)\b"
)
DIRECTIVE = re.compile(r"#\s*(noqa|type:|!|pragma|mypy:|ruff:)")
"""Comments that are for tools, not for readers."""
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass
class Counts:
    """Sums over files; `findings` are lines `path:line: text`, by the name of the rule."""

    lines: int = 0
    comments: int = 0
    functions: int = 0
    page_words: int = 0
    findings: dict[str, list[str]] = field(default_factory=dict)

    def add(self, rule: str, path: Path, line: int, text: str) -> None:
        self.findings.setdefault(rule, []).append(f"{path}:{line}: {rule}: {text}")

    def number(self, rule: str) -> int:
        return len(self.findings.get(rule, ()))

    @property
    def vague_names_per_100_functions(self) -> float:
        return 100 * self.number("vague name") / max(self.functions, 1)

    @property
    def idioms_per_1000_lines(self) -> float:
        return 1000 * self.number("idiom") / max(self.lines, 1)

    @property
    def idioms_per_1000_page_words(self) -> float:
        return 1000 * self.number("idiom of a page") / max(self.page_words, 1)

    @property
    def comment_percent(self) -> float:
        return 100 * self.comments / max(self.lines, 1)


def count(paths: list[Path]) -> Counts:
    """Counts over all Python files and Markdown pages at or below `paths`."""
    counts = Counts()
    for root in paths:
        files = [root] if root.is_file() else sorted([*root.rglob("*.py"), *root.rglob("*.md")])
        for path in files:
            text = path.read_text(encoding="utf-8")
            if path.suffix == ".py":
                _count_code(path, text, counts)
            else:
                _count_page(path, text, counts)
    return counts


def public_classes(package: Path) -> dict[str, list[str]]:
    """Folders in which a public class of each name is defined at the top level of a module."""
    folders: dict[str, set[str]] = {}
    for path in package.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                folders.setdefault(node.name, set()).add(str(path.parent))
    return {name: sorted(where) for name, where in folders.items()}


def _count_page(path: Path, text: str, counts: Counts) -> None:
    counts.page_words += len(text.split())
    for line, found in _idioms(text):
        counts.add("idiom of a page", path, line, found)


def _count_code(path: Path, text: str, counts: Counts) -> None:
    counts.lines += text.count("\n") + 1
    for line, found in _idioms(text):
        counts.add("idiom", path, line, found)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not DIRECTIVE.match(token.string):
            counts.comments += 1
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, FUNCTIONS):
            counts.functions += 1
            if node.name == "of":
                counts.add("method called of", path, node.lineno, "def of")
            for name in sorted(_local_names(node) & VAGUE_NAMES):
                counts.add("vague name", path, node.lineno, f"{name} in {node.name}()")
        elif isinstance(node, COMPREHENSIONS):
            if len(node.generators) > 1 or any(len(part.ifs) > 1 for part in node.generators):
                counts.add("dense comprehension", path, node.lineno, "more than one for or if")
        elif isinstance(node, ast.IfExp):
            inner = [child for child in ast.walk(node) if isinstance(child, ast.IfExp)]
            if len(inner) > 1:
                counts.add("nested conditional", path, node.lineno, "an if in an if")


def _local_names(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Names that a function assigns, and those of its parameters."""
    arguments = function.args
    names = {
        argument.arg
        for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    }
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def _idioms(text: str) -> Iterator[tuple[int, str]]:
    """Line number and text of each idiom; one that a line break splits counts too."""
    for match in IDIOM.finditer(text):
        yield text.count("\n", 0, match.start()) + 1, match.group()


def main() -> None:
    counts = count([Path(word) for word in sys.argv[1:]])
    for findings in counts.findings.values():
        print("\n".join(findings))
    print(f"lines {counts.lines}, functions {counts.functions}, page words {counts.page_words}")
    print(f"vague names per 100 functions {counts.vague_names_per_100_functions:.1f}")
    print(f"idioms per 1,000 lines {counts.idioms_per_1000_lines:.1f}")
    print(f"idioms per 1,000 words of pages {counts.idioms_per_1000_page_words:.1f}")
    print(f"comment lines {counts.comment_percent:.1f} %")
    for rule in ("method called of", "dense comprehension", "nested conditional"):
        print(f"{rule}: {counts.number(rule)}")


if __name__ == "__main__":
    main()
