"""`python -m relax_hpc.roles`: one rank of one role. Started by a launcher, never by hand except for debugging."""

from __future__ import annotations

import argparse
import os
import sys
import threading
import traceback
from importlib import import_module
from pathlib import Path

from relax_hpc.config import Config, load_resolved
from relax_hpc.errors import EXIT_DONE, EXIT_RETRY, RelaxError
from relax_hpc.rendezvous.process import die_with_parent, on_terminate
from relax_hpc.roles.exit_mark import leave_mark
from relax_hpc.rundir import RunDir

MODULES = {
    "rollout": "relax_hpc.roles.rollout",
    "actor": "relax_hpc.roles.actor",
    "actor_fwd": "relax_hpc.roles.forward",
    "reference": "relax_hpc.roles.forward",
    "advantages": "relax_hpc.roles.advantages",
}
WITH_RANKS = ("actor", "actor_fwd", "reference")
FINISH_FIRST = ("controller", "actor")
"""Roles that, asked to stop, first bring to an end what they are at."""


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m relax_hpc.roles", description=__doc__)
    parser.add_argument("--run_dir", type=Path, required=True)
    parser.add_argument("--group", required=True)
    parser.add_argument("--role", required=True, choices=["controller", *MODULES])
    parser.add_argument("--epoch", type=int, required=True, help="incarnation of the group, taken by its launcher")
    return parser.parse_args(argv)


def serve(args: argparse.Namespace, config: Config, run: RunDir, stop: threading.Event) -> None:
    """Run the role to its end; returns only when it is done."""
    if args.role == "controller":
        from relax_hpc.roles import controller

        if not controller.run(run, config, args.epoch, stop):
            raise RelaxError("asked to stop before the run was finished")
        return
    from relax_hpc.metrics.spans import Spans
    from relax_hpc.rendezvous.roster import Card, publish_card
    from relax_hpc.rendezvous.world import World, join
    from relax_hpc.roles.context import Context
    from relax_hpc.transfer_queue.client import QueueClient

    world = join() if args.role in WITH_RANKS else World(0, 1, 0, [{"pid": os.getpid()}])
    logs = run.logs(args.group, args.epoch)
    redirect_output(logs / f"{args.role}-rank-{world.rank}.log")
    client = QueueClient(run, config, args.group, args.epoch, args.role) if world.leader else None
    if world.leader and args.group != "hub":
        publish_card(run, Card(args.group, args.epoch, world.cards))
    spans = Spans(logs / f"spans-{args.role}-{world.rank}.jsonl", args.role)
    context = Context(run, config, args.group, args.role, args.epoch, world, client, spans, stop)
    try:
        import_module(MODULES[args.role]).run(context)
    finally:
        spans.close()
        if client:
            client.close()


def redirect_output(path: Path) -> None:
    """Send what this process prints, its libraries included, to its own log."""
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def main(argv: list[str] | None = None) -> int:
    """Run one role; its end is written to its exit mark."""
    args = parse(argv)
    die_with_parent()
    stop = on_terminate(at_once=args.role not in FINISH_FIRST)
    run = RunDir(args.run_dir)
    code, reason = EXIT_DONE, ""
    try:
        serve(args, load_resolved(run.root), run, stop)
    except RelaxError as error:
        code, reason = error.exit_code, str(error)
    except Exception as error:
        traceback.print_exc()
        code, reason = EXIT_RETRY, f"{type(error).__name__}: {error}"
    if reason:
        print(f"{args.role}: {reason}", file=sys.stderr, flush=True)
    # Where there are ranks, their leader has said that all are done (Ranks.close).
    if code != EXIT_DONE or args.role not in WITH_RANKS:
        leave_mark(run.exit_mark(args.group, args.epoch, args.role), code, reason)
    return code


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    # Library threads (gloo, zmq, engines) must not keep a finished role alive.
    os._exit(exit_code)
