"""Names of SGLang's server arguments, read from its source: importing it takes seconds, and needs what nodes have."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

_FIELDS = "srt/arg_groups/fields"
"""Where SGLang 0.5.21 declares them, one class a file."""


def server_flags() -> frozenset[str]:
    """All of them; none if there is no SGLang here, or if it keeps them elsewhere."""
    spec = find_spec("sglang")
    folders = [Path(folder) / _FIELDS for folder in spec.submodule_search_locations or ()] if spec else []
    classes = (
        node
        for folder in folders
        for file in folder.glob("*.py")
        for node in ast.parse(file.read_bytes()).body
        if isinstance(node, ast.ClassDef)
    )
    declared = (line.target for node in classes for line in node.body if isinstance(line, ast.AnnAssign))
    return frozenset(target.id for target in declared if isinstance(target, ast.Name))
