"""`python -m relax_hpc.ops.inspect.on_node`: processes of a group on this node, with their stacks,
as a file. `relax-hpc stacks` and `relax-hpc attach` start it on each node of a group."""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from relax_hpc.base.errors import EXIT_DONE
from relax_hpc.base.rundir import RunDir, write_json
from relax_hpc.cluster.slurm.allocation import node_name
from relax_hpc.ops.inspect.rank_processes import RankProcess, find_processes
from relax_hpc.ops.inspect.thread_stacks import describe_process

_AT_ONCE = 8
"""Processes whose stacks are read at the same time, so that the stacks show about the same
moment."""


@dataclass(frozen=True, slots=True)
class NodeProcess:
    """A process of a group, its node, and its stacks if they were read."""

    node: str
    pid: int
    role: str
    rank: int | None
    name: str
    is_rank: bool
    log: str
    stacks: str = ""


def read_node(
    run: RunDir, group: str, incarnation: int, with_stacks: bool, native: bool = False
) -> list[NodeProcess]:
    """Processes of a group on this node. ``native``: stacks have frames of C code too."""

    def describe(process: RankProcess) -> NodeProcess:
        stacks = describe_process(process, native) if with_stacks else ""
        return NodeProcess(node_name(), **asdict(process), stacks=stacks)

    processes = find_processes(run, group, incarnation)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(describe, processes))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m relax_hpc.ops.inspect.on_node")
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--name", required=True, help="the group")
    parser.add_argument("--number", type=int, required=True, help="its incarnation")
    parser.add_argument("--output", type=Path, required=True, help="folder for the file")
    parser.add_argument("--stacks", action="store_true")
    parser.add_argument("--native", action="store_true")
    args = parser.parse_args(arguments)
    # srun may have put the tasks of other groups on this node. Each node writes one file a group.
    processes = read_node(RunDir(args.run), args.name, args.number, args.stacks, args.native)
    path = args.output / f"{args.name}-{node_name()}.json"
    write_json(path, {"processes": [asdict(process) for process in processes]})
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
