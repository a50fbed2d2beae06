"""Extraction of the program in a response: its last fenced block of Python, by the rules of
CommonMark."""

from __future__ import annotations

import ast
import re

from markdown_it import MarkdownIt

_MAX_CHARS = 100_000
"""Maximum length of a response. A longer one has no program: blocks of a cut text are ambiguous."""
# HTML is disabled: a fence after a line `<answer>` would belong to the HTML and be ignored.
_MARKDOWN = MarkdownIt("zero").enable(["fence", "code", "list", "blockquote"]).disable("inline")
_PYTHON = re.compile(r"\{?\.?(?:python|py)[\d.]*(?![\w-])", re.IGNORECASE)


_TAG_AT_FENCE = re.compile(
    r"(<answer>)[ \t]*(?=`{3}|~{3})|(?<=^```|^~~~)[ \t]*(</answer>)",
    re.IGNORECASE | re.MULTILINE,
)
"""A tag in the line of a fence. CommonMark does not recognize a fence in such a line."""


def program_of(text: str) -> str:
    """The last fenced block that is labelled as Python, or has no label; empty if there is no such
    block.

    After a labelled block, a block without a label counts only if it is a program, not an output.

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
    """Whether ``text`` is Python with a statement or a call. A bare value is probably an output."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    statements = [statement for statement in tree.body if not isinstance(statement, ast.Expr)]
    return bool(statements) or any(isinstance(node, ast.Call) for node in ast.walk(tree))
