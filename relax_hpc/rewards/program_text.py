"""The program in a response: its last fenced block of Python, by the rules of CommonMark."""

from __future__ import annotations

import ast
import re

from markdown_it import MarkdownIt

_MAX_CHARS = 100_000
"""Characters of a response that is searched: its blocks cannot be told apart from a part of it."""
# Without HTML: a fence behind a line `<answer>` would be a part of the HTML, and no fence.
_MARKDOWN = MarkdownIt("zero").enable(["fence", "code", "list", "blockquote"]).disable("inline")
_PYTHON = re.compile(r"\{?\.?(?:python|py)[\d.]*(?![\w-])", re.IGNORECASE)


_TAG_AT_FENCE = re.compile(
    r"(<answer>)[ \t]*(?=`{3}|~{3})|(?<=^```|^~~~)[ \t]*(</answer>)",
    re.IGNORECASE | re.MULTILINE,
)
"""A tag in the line of a fence, where CommonMark takes neither for a fence."""


def program_of(text: str) -> str:
    """The last fenced block that is labelled as Python, or has no label; empty if there is no such
    block.

    A block without a label behind a labelled one counts if it is a program, and not an output.

    >>> program_of("First:\\n```python\\nprint(1)\\n```\\nBetter:\\n```\\nprint(2)\\n```")
    'print(2)\\n'
    >>> program_of("```python\\nprint(1)\\n```\\nIt prints:\\n```\\n1\\n```")
    'print(1)\\n'
    """
    if len(text) > _MAX_CHARS:
        return ""
    text = _TAG_AT_FENCE.sub(_own_line, text)
    fences = [token for token in _MARKDOWN.parse(text) if token.type == "fence"]
    blocks = [(fence.info.strip(), fence.content) for fence in fences]
    unlabelled = [content for label, content in blocks if not label]
    for label, content in reversed(blocks):
        if _PYTHON.match(label) or (not label and _is_program(content)):
            return content
    return unlabelled[-1] if unlabelled else ""


def _own_line(match: re.Match[str]) -> str:
    return f"{match[1]}\n" if match[1] else f"\n{match[2]}"


def _is_program(text: str) -> bool:
    """Whether ``text`` is Python that does something: a bare value is what a program prints."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    statements = [statement for statement in tree.body if not isinstance(statement, ast.Expr)]
    return bool(statements) or any(isinstance(node, ast.Call) for node in ast.walk(tree))
