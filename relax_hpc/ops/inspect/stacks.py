"""`relax-hpc stacks`: the stacks of all threads of all processes of a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from relax_hpc.base.errors import EXIT_DONE, EXIT_RETRY, ConfigError, RelaxError
from relax_hpc.base.rundir import RunDir, check_owner
from relax_hpc.base.terminal_text import escape_line
from relax_hpc.cluster.supervise.launch_records import all_ended, members_of
from relax_hpc.config import load_resolved
from relax_hpc.net.rendezvous.roster import latest_incarnation
from relax_hpc.ops.inspect.group_processes import read_group
from relax_hpc.ops.inspect.on_node import NodeProcess
from relax_hpc.ops.inspect.slurm_access import open_group


def main(root: str, group: str = "", rank: int | None = None, native: bool = False) -> int:
    """Print the stacks of all running groups, or of ``group``, or of one ``rank`` of it.

    The exit code is 75 if a group could not be read, or if no process was found.
    """
    run = open_run(root)
    count, failed = 0, False
    for name in [group] if group else running_groups(run):
        try:
            processes = read_group(open_group(run, name), with_stacks=True, native=native)
        except ConfigError:
            raise
        except RelaxError as error:
            print(escape_line(f"== {error}"), flush=True)
            failed = True
            continue
        for process in processes:
            if rank is None or process.rank == rank:
                print("\n".join(_lines(name, process)), flush=True)
                count += 1
    if not count:
        raise RelaxError(f"{run.root}: no running process was found; see relax-hpc status")
    return EXIT_RETRY if failed else EXIT_DONE


def open_run(root: str) -> RunDir:
    """The run of this user in ``root``. ConfigError: there is no run, or it is of another user."""
    run = RunDir(Path(root))
    if not run.config.exists():
        raise ConfigError(f"{run.root}: no run here (config.yaml is missing); name a run directory")
    check_owner(run.root, "this command")
    return run


def running_groups(run: RunDir) -> list[str]:
    """Groups that have started and not ended."""
    config = load_resolved(run.root)
    names = members_of(run, config)
    return [
        name for name in names if latest_incarnation(run, name) and not all_ended(run, config, name)
    ]


def _lines(group: str, process: NodeProcess) -> Iterator[str]:
    rank = "" if process.rank is None else f" rank {process.rank}"
    child = "" if process.is_rank else f", child {process.name}"
    yield escape_line(
        f"== {group}/{process.role}{rank}{child}, process {process.pid} on {process.node}"
    )
    yield from map(escape_line, process.stacks.splitlines())
    yield ""
