"""Numbers that the processes of one run must agree on; they rise when what they stand for changes.

Groups are replaced one by one while the others go on, also by newer code (`relax-hpc resubmit
--code`): that works between codes of one protocol, and a run directory is gone on with by code of
its format alone.
"""

from __future__ import annotations

import ast
from pathlib import Path

PROTOCOL = 8
"""Protocol of groups with each other: requests and answers, rows, manifests, and the files by which
they meet."""
RUN_FORMAT = 3
"""Format of a run directory: its names, its journal, and the rows in its shards."""


def read_protocol(code: Path) -> int | None:
    """The protocol of the package relax_hpc below ``code``, read and not run; None if there is none
    that says it."""
    try:
        tree = ast.parse((code / "relax_hpc" / "base" / Path(__file__).name).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    for node in tree.body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [
            "PROTOCOL"
        ]:
            return node.value.value if isinstance(node.value, ast.Constant) else None
    return None


def describe_protocol_mismatch(code: Path) -> str:
    """Reason why groups of this code's protocol cannot work with the package below ``code``; empty
    if they can."""
    found = read_protocol(code)
    if found == PROTOCOL:
        return ""
    what = (
        "no package relax_hpc that names its protocol"
        if found is None
        else f"code of protocol {found}"
    )
    return f"found {what} in {code}, allowed: protocol {PROTOCOL}, that of the other groups"
