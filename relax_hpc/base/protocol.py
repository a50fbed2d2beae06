"""Version numbers of the protocol between groups and of the format of a run directory.

Each number increases when its subject changes. `relax-hpc resubmit --code` replaces the code of one
group while the other groups continue, which works only between versions of the code with the same
protocol. A run directory can be resumed only by code with the same format.
"""

from __future__ import annotations

import ast
from pathlib import Path

PROTOCOL = 9
"""Protocol between groups: requests and answers, rows, manifests, and the files in the rendezvous
folders."""
RUN_FORMAT = 4
"""Format of a run directory: its names, its journal, and the rows in its shards."""


def read_protocol(code: Path) -> int | None:
    """Protocol of the package relax_hpc below ``code``. The code is parsed, not run.

    None: there is no such package, or it does not define its protocol.
    """
    try:
        tree = ast.parse((code / "relax_hpc" / "base" / Path(__file__).name).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    for node in tree.body:
        if not isinstance(node, ast.Assign):
            continue
        if [ast.unparse(target) for target in node.targets] != ["PROTOCOL"]:
            continue
        value = node.value.value if isinstance(node.value, ast.Constant) else None
        return value if isinstance(value, int) else None
    return None


def describe_protocol_mismatch(code: Path) -> str:
    """Reason why this code's groups cannot work with the package below ``code``; empty: they
    can."""
    protocol = read_protocol(code)
    if protocol == PROTOCOL:
        return ""
    if protocol is None:
        description = "no package relax_hpc that names its protocol"
    else:
        description = f"code of protocol {protocol}"
    return f"found {description} in {code}, allowed: protocol {PROTOCOL}, that of the other groups"
