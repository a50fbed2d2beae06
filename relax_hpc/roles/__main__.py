"""`python -m relax_hpc.roles`: one rank of one role. A launcher starts it; start it by hand only
for debugging."""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from relax_hpc.base.cuda_allocator import expand_segments
from relax_hpc.base.disk_waits import WAITS, await_disk_space, ignore_print_errors, is_temporary
from relax_hpc.base.error_origin import describe_with_location
from relax_hpc.base.errors import (
    EXIT_DONE,
    EXIT_RETRY,
    ProgrammingError,
    RelaxError,
    StoppedError,
    find_start_error,
)
from relax_hpc.base.imports import fast_imports
from relax_hpc.base.local_dir import LOCAL_DIR, local_folder, use_folders_of_this_node
from relax_hpc.base.log_rotation import LogRotator, find_own_log
from relax_hpc.base.machine.own_environment import restart_with_compat_driver
from relax_hpc.base.orphaned_memory import sweep_orphaned_memory
from relax_hpc.base.programming_errors import describe_programming_error, plugin_names
from relax_hpc.base.rundir import RunDir
from relax_hpc.base.terminal_text import log_entry
from relax_hpc.config import Config, load_resolved, to_dict
from relax_hpc.config.groups import CONTROLLER, rank_count
from relax_hpc.config.roles import RANKED as WITH_RANKS
from relax_hpc.config.roles import ROLES
from relax_hpc.net.kernel_caches.node import open_kernel_caches, start_keeper, take_refusal
from relax_hpc.net.node_files import restart_in_local_environment
from relax_hpc.net.rendezvous.affinity import bind_to_share
from relax_hpc.net.rendezvous.exit_mark import write_exit_mark
from relax_hpc.net.rendezvous.process import (
    SignalFlag,
    describe_end,
    die_with_parent,
    flag_stop_signals,
    forbid_core_files,
    install_stack_dump,
    run_watched,
    set_private_umask,
)
from relax_hpc.queue.presence import longest_wait_s
from relax_hpc.roles.start_ahead import NotNeededError, wait_to_begin
from relax_hpc.training.weights.node_cache import clear_staging

if TYPE_CHECKING:
    from relax_hpc.base.metrics.resource_sampler import ResourceSampler
    from relax_hpc.net.rendezvous.world import World
    from relax_hpc.queue.client import QueueClient

ROLLOUT_SECTIONS = ("rollout", "data", "environment", "eval", "reward", "genrm")
"""Sections of the configuration whose plug-ins are called by roles that create rows."""
COMPILING = (*WITH_RANKS, "rollout", "genrm")
"""Roles with libraries that compile kernels."""
CONNECT_SHARE = 0.75
"""Share of liveness.start_timeout_s in which the ranks must connect to each other."""


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m relax_hpc.roles", description=__doc__)
    parser.add_argument("--run_dir", type=Path, required=True)
    parser.add_argument("--group", required=True)
    parser.add_argument("--role", required=True, choices=[CONTROLLER, *ROLES])
    parser.add_argument(
        "--incarnation",
        type=int,
        required=True,
        help="incarnation of the group, assigned by its launcher",
    )
    parser.add_argument(
        "--watch", action="store_true", help="write an exit mark, whatever ends the process"
    )
    parser.add_argument(
        "--ahead",
        action="store_true",
        help="import all libraries, then wait on standard input for the start",
    )
    parser.add_argument(
        "--led",
        action="store_true",
        help="end only when the parent process asks for it, and ignore signals of Slurm",
    )
    parser.add_argument("--deadline", type=float, help="end of the allocation, seconds since 1970")
    parser.set_defaults(kernel_caches=None)
    return parser.parse_args(argv)


def serve(args: argparse.Namespace, config: Config, run: RunDir, stop: SignalFlag) -> None:
    """Run the role to its end. Return only when its work is done."""
    if args.role == CONTROLLER:
        from relax_hpc.roles import controller

        LogRotator(find_own_log())
        if not controller.run(run, config, args.incarnation, stop):
            raise StoppedError("asked to stop before the run was finished")
        return
    from relax_hpc.base.metrics.spans import Spans, process_start_time
    from relax_hpc.net.rendezvous.network import own_address
    from relax_hpc.net.rendezvous.roster import GroupCard, publish_card
    from relax_hpc.net.rendezvous.visible_gpus import check_visible_gpus
    from relax_hpc.net.rendezvous.world import join_world, single_rank_world
    from relax_hpc.net.transport.choice import check_required
    from relax_hpc.queue.client import QueueClient
    from relax_hpc.queue.process_context import Context

    check_required(config)
    if not ROLES[args.role].on_cpus:
        check_visible_gpus(config, args.group, args.role)
    ranks = rank_count(config, args.group, args.role)
    if LOCAL_DIR in os.environ:
        # Libraries read this variable when they first write compiled code.
        local_folder()
    address = own_address(config, args.group)
    world = (
        single_rank_world(address)
        if ranks == 1
        else join_world(address, ranks, config.site.mpi, connect_timeout_s(config))
    )
    logs = run.logs(args.group, args.incarnation)
    redirect_output(run.rank_log(args.group, args.incarnation, args.role, world.rank))
    began = process_start_time()
    if args.ahead:
        wait_to_begin(
            run, args, partial(import_role, args.role, config, None), world.is_leader, stop
        )
        began = time.monotonic()
    log_rotator = LogRotator(find_own_log())
    has_client = world.is_leader or ROLES[args.role].serves
    member = args.role if world.is_leader else f"{args.role}-{world.rank}"
    client = None
    if has_client:
        client = QueueClient(run, config, args.group, args.incarnation, member)
    if world.is_leader and args.group != "hub":
        publish_card(run, GroupCard(args.group, args.incarnation, world.cards))
    spans = Spans(logs / f"spans-{args.role}-{world.rank}.jsonl", args.role, began)
    resources = start_resource_sampler(args, config, world, logs, client)
    context = Context(
        run,
        config,
        args.group,
        args.role,
        args.incarnation,
        world,
        client,
        spans,
        stop,
        deadline=args.deadline,
        log_rotator=log_rotator,
        resources=resources,
    )
    if client:
        client.beat.busy, client.beat.loads = spans.longest_work_s, spans.is_starting
        refusal = take_refusal(args.kernel_caches) if args.kernel_caches else ""
        if refusal:
            client.status.note("kernel_archive_ignored", args.group, refusal)
    try:
        context.report_phase("importing libraries")
        import_role(args.role, config, world.local_rank).run(context)
        # The exit mark needs disk space. Wait for it here, while heartbeats are still sent: without
        # them the process is considered dead.
        await_disk_space(logs)
    except Exception as error:
        if not (context.has_worked or stop.is_set()):
            raise_programming_error(error, config, args.role)
        raise
    finally:
        resources.close()
        spans.close()
        if client:
            client.close()


def start_resource_sampler(
    args: argparse.Namespace,
    config: Config,
    world: World,
    logs: Path,
    client: QueueClient | None,
) -> ResourceSampler:
    """Start to sample the resources of this process. The first rank of a node samples its GPUs."""
    from relax_hpc.base.metrics.resource_sampler import ResourceSampler
    from relax_hpc.config.gpus import gpu_vendor

    samples_gpus = world.local_rank == 0 and config.model.device == "cuda"
    return ResourceSampler(
        logs,
        args.role,
        world.rank,
        config.metrics.resources_s,
        gpu_vendor(config) if samples_gpus else None,
        gathers=world.is_leader and world.size > 1,
        on_gpu_error=partial(note_gpu_error, client, args.group) if client else None,
    )


def note_gpu_error(client: QueueClient, group: str, node: str, code: str) -> None:
    """Count an error that the driver of a GPU has reported on ``node``. `status` shows it."""
    client.status.note("gpu_error", f"{group}/{node}", f"xid_{code}")


def raise_programming_error(error: Exception, config: Config, role: str) -> None:
    """Raise ProgrammingError if ``error`` is a programming error in a plug-in that ``role``
    uses."""
    text = describe_programming_error(error, plugin_names(settings_of_role(config, role)))
    if text:
        raise ProgrammingError(text) from error


def settings_of_role(config: Config, role: str) -> dict[str, Any]:
    """Return the sections of ``config`` without those whose plug-ins ``role`` imports but never
    calls."""
    not_called: tuple[str, ...] = ()
    if role in (*WITH_RANKS, "advantages"):
        not_called = ROLLOUT_SECTIONS
    if not (ROLES[role].trains or role == "advantages"):
        not_called = (*not_called, "algorithm")
    return {name: value for name, value in to_dict(config).items() if name not in not_called}


def import_role(name: str, config: Config, local_rank: int | None) -> ModuleType:
    """Import the module of a role and the libraries of its computation. If ``local_rank`` is None,
    no device is used."""
    if name in WITH_RANKS and config.model.device == "cuda":
        expand_segments(os.environ)
    with fast_imports(for_good=True):
        role = import_module(ROLES[name].module)
        if name in WITH_RANKS:
            from relax_hpc.training.parallel import import_libraries

            import_libraries(config.model.device, local_rank, trains=ROLES[name].trains)
    return role


def connect_timeout_s(config: Config) -> float:
    """Return the seconds in which ranks must connect to each other.

    The limit ends before the supervisor's, whose clock started before this process. The error then
    names the missing ranks, and not only missing heartbeats.
    """
    from relax_hpc.base.metrics.spans import process_start_time

    elapsed_s = time.monotonic() - process_start_time()
    return max(1.0, CONNECT_SHARE * config.liveness.start_timeout_s - elapsed_s)


def redirect_output(path: Path) -> None:
    """Redirect the output of this process and its libraries to its own log."""
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError as error:
        if is_temporary(error):
            return
        raise
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def work(args: argparse.Namespace) -> int:
    """Run one role and write its exit mark. Return the exit code."""
    die_with_parent()
    ignore_print_errors()
    install_stack_dump()
    stop = flag_stop_signals(
        raises=not (args.role == CONTROLLER or ROLES[args.role].finishes_first), is_led=args.led
    )
    run = RunDir(args.run_dir)
    code, reason, stopped, start_error = EXIT_DONE, "", False, ""
    is_programming_error = False
    try:
        config = load_resolved(run.root, args.group)
        WAITS.limit_s = longest_wait_s(config)
        serve(args, config, run, stop)
    except NotNeededError as error:
        # No such incarnation exists, so no supervisor reads an exit mark of it.
        print(log_entry(f"{args.role}: {error}"), file=sys.stderr, flush=True)
        return EXIT_DONE
    except RelaxError as error:
        code, reason = error.exit_code, str(error)
        stopped = stop.is_set() or isinstance(error, StoppedError)
        is_programming_error = isinstance(error, ProgrammingError)
        if is_programming_error:
            print(log_entry(traceback.format_exc().rstrip()), file=sys.stderr, flush=True)
        start_error = find_start_error(error)
    except Exception as error:
        code, reason = EXIT_RETRY, describe_with_location(error)
        start_error = find_start_error(error)
        stop_error = find_stop_error(error) if stop.is_set() else None
        if stop_error:
            reason, stopped = str(stop_error), True
        else:
            print(log_entry(traceback.format_exc().rstrip()), file=sys.stderr, flush=True)
    if reason:
        print(log_entry(f"{args.role}: {reason}"), file=sys.stderr, flush=True)
    # If a role with several ranks is done, its leader has already written the mark (Ranks.close).
    if code != EXIT_DONE or args.role not in WITH_RANKS:
        mark = run.exit_mark(args.group, args.incarnation, args.role)
        write_exit_mark(
            mark,
            code,
            reason,
            stopped,
            start_error=start_error,
            is_programming_error=is_programming_error,
        )
    return code


def find_stop_error(error: BaseException) -> RelaxError | None:
    """Return the error behind ``error`` that a stop signal raised, or None.

    If it was raised while a thread waited for a lock, Python then fails to release the lock, and
    the `with` statement raises a RuntimeError that hides it.
    """
    cause = error.__context__
    while cause is not None:
        if isinstance(cause, RelaxError):
            return cause
        cause = cause.__context__
    return None


def main(
    argv: list[str] | None = None,
    module: str = "relax_hpc.roles",
    sidecar: Callable[[], None] | None = None,
) -> int:
    """Run one role. With --watch a parent process watches it, because Slurm reports the end of a
    single task late.

    ``module``: name of this program. ``sidecar``: see `run_watched`.
    """
    set_private_umask()
    forbid_core_files()
    args = parse(argv)
    run = RunDir(args.run_dir)
    mark = run.exit_mark(args.group, args.incarnation, args.role)
    use_folders_of_this_node()
    try:
        config = load_resolved(args.run_dir, args.group)
        if config.model.device == "cuda":
            restart_with_compat_driver(module, argv or sys.argv[1:])
        restart_in_local_environment(config, module, argv or sys.argv[1:])
    except (RelaxError, OSError) as error:
        write_exit_mark(mark, EXIT_RETRY, f"copying the environment to this node: {error}")
        return EXIT_RETRY
    bind_to_share(config, args.group, args.role)
    if args.role in COMPILING:
        args.kernel_caches = open_kernel_caches(config, run.model)
    keeper = start_keeper(args.kernel_caches)
    code = work_watched(args, config, sidecar) if args.watch else work(args)
    if keeper and code == EXIT_DONE:
        keeper.finish()
    return code


def work_watched(
    args: argparse.Namespace, config: Config, sidecar: Callable[[], None] | None
) -> int:
    """Run one role in a child process, and write its exit mark if a signal ends it. Return the exit
    code."""
    run = RunDir(args.run_dir)
    mark = run.exit_mark(args.group, args.incarnation, args.role)
    rank = int(os.environ.get("SLURM_PROCID", "0"))

    def handle_end(code: int) -> int:
        if code < 0:
            log = run.rank_log(args.group, args.incarnation, args.role, rank)
            write_exit_mark(mark, EXIT_RETRY, f"rank {rank} {describe_end(code, log)}")
        # The supervisor may run on another node and cannot clean up here.
        clear_staging(run)
        sweep_orphaned_memory()
        return EXIT_RETRY if code < 0 else code

    return run_watched(lambda: work(args), handle_end, sidecar)


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    # Threads of libraries (gloo, engines) would keep the finished process alive.
    os._exit(exit_code)
