"""Processes of a group on all of its nodes."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from pathlib import Path

from relax_hpc.base.errors import RelaxError
from relax_hpc.base.rundir import read_map
from relax_hpc.cluster.slurm.container import role_python
from relax_hpc.ops.inspect.on_node import NodeProcess, read_node
from relax_hpc.ops.inspect.slurm_access import GroupAccess

_STEP_S = 120.0
"""Seconds for a step on all nodes. A node that does not answer is then reported as missing."""
_FIELDS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("node", "role", "name", "log", "stacks"), str),
    "pid": int,
    "rank": (int, type(None)),
    "is_rank": bool,
}


def read_group(
    access: GroupAccess, with_stacks: bool = False, native: bool = False
) -> list[NodeProcess]:
    """Processes of the group, ordered by role and rank. RelaxError: a node did not answer, and no
    other node has a process."""
    if access.job is None:
        return read_node(access.run, access.group, access.incarnation, with_stacks, native)
    # In the run directory, which every node of the group can write.
    logs = access.run.root / "logs"
    with tempfile.TemporaryDirectory(prefix=".inspect-", dir=logs) as folder:
        error = _run_step(access, Path(folder), with_stacks, native)
        processes = list[NodeProcess]()
        for path in sorted(Path(folder).glob("*.json")):
            processes += _read_file(path)
    if error and not processes:
        raise RelaxError(f"{access.group}: {error}")
    return sorted(processes, key=lambda item: (item.role, item.rank or 0, not item.is_rank))


def _run_step(access: GroupAccess, folder: Path, with_stacks: bool, native: bool) -> str:
    """Run `on_node` on every node. Returns an error text; empty: all nodes have answered."""
    program = [role_python(access.config), "-m", "relax_hpc.ops.inspect.on_node"]
    program += ["--run", str(access.run.root), "--name", access.group]
    program += ["--number", str(access.incarnation), "--output", str(folder)]
    program += [*(["--stacks"] if with_stacks else []), *(["--native"] if native else [])]
    command = access.srun(program)
    try:
        done = subprocess.run(
            command,
            env=access.environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_STEP_S,
            text=True,
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        return f"srun on its nodes gave no answer within {_STEP_S:g} s"
    except OSError as error:
        return f"srun cannot be started: {error.strerror}; load the site's Slurm module"
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        return f"srun on its nodes failed: {lines[-1] if lines else f'exit {done.returncode}'}"
    return ""


def _read_file(path: Path) -> list[NodeProcess]:
    processes = list[NodeProcess]()
    for value in read_map(path, processes=list).get("processes", []):
        # An incomplete entry is left out.
        with contextlib.suppress(KeyError, TypeError):
            if all(isinstance(value[name], kind) for name, kind in _FIELDS.items()):
                processes.append(NodeProcess(**value))
    return processes
