"""`python -m relax_hpc.commands.head`: the program of a batch script, and of the standby on the
hub's second node.

Without --group it supervises a whole heterogeneous job, with --group one group in a separate job.
Every head begins as a candidate. A candidate that finds the lease free leads; the others wait until
the leader has ended.
"""

from __future__ import annotations

import argparse
import contextlib
import hmac
import os
import shutil
import socket
import sys
import time
from collections import deque
from pathlib import Path

from relax_hpc.base.disk_waits import await_disk_space, ignore_print_errors
from relax_hpc.base.errors import (
    EXIT_DONE,
    EXIT_RETRY,
    ConfigError,
    DeadlineError,
    FencedError,
    NoProgressError,
    RelaxError,
)
from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.elastic import make_reconciler
from relax_hpc.cluster.slurm.allocation import Allocation, node_name
from relax_hpc.cluster.slurm.commands import Slurm, SlurmError
from relax_hpc.cluster.slurm.end_mail import EndMail
from relax_hpc.cluster.slurm.expedited_requeue import allow_requeue, forbid_requeue
from relax_hpc.cluster.slurm.job_endings import stop_if_user_cancelled
from relax_hpc.cluster.slurm.jobs import GroupJob, HetJob
from relax_hpc.cluster.slurm.layout import HUB
from relax_hpc.cluster.slurm.submissions import Ledger
from relax_hpc.cluster.slurm.successors import claim_hub
from relax_hpc.cluster.supervise.attempts import latest_attempt, new_attempt, start_order
from relax_hpc.cluster.supervise.console import Terminal
from relax_hpc.cluster.supervise.disk_watch import NoDiskSpace
from relax_hpc.cluster.supervise.lease import Lease, read_outcome, write_outcome
from relax_hpc.cluster.supervise.processes import LocalLauncher
from relax_hpc.cluster.supervise.requests import read_stop_request, request_stop
from relax_hpc.cluster.supervise.supervisor import Outcome, Supervisor
from relax_hpc.commands.local import prepare
from relax_hpc.commands.on_end import FAILED, read_end, report_end
from relax_hpc.commands.run_setup import prepare_run_dir
from relax_hpc.config import Config, load_resolved
from relax_hpc.net.rendezvous.network import peer_user
from relax_hpc.net.rendezvous.process import EXIT_BUG, run_watched, set_private_umask
from relax_hpc.net.rendezvous.roster import latest_card, latest_incarnation
from relax_hpc.queue.plan import SUPERVISOR
from relax_hpc.queue.presence import longest_wait_s
from relax_hpc.training.weights.node_cache import clear_staging, staging_root

_LOOK_S = 0.2
_ASK_SLURM_S = 10.0
"""Seconds between two requests to Slurm."""
_BACKLOG = 1024
"""Pending connections to the socket of `_claim_node`. If the backlog is full, a further head counts
as the first one of its node, and waits as a candidate."""
_DEATHS, _DEATHS_S = 5, 600.0
"""Number of deaths of a head, and seconds within which so many deaths point to a broken node."""


class Head:
    """One candidate for the supervision of ``groups`` in an allocation."""

    def __init__(self, run: RunDir, config: Config, group: str) -> None:
        self.run, self.config, self.group = run, config, group
        self.slurm = Slurm()
        self.allocation = Allocation.from_environment(config, group)
        self.names = [group] if group else start_order(config)
        self.name = f"{SUPERVISOR}-{group}" if group else SUPERVISOR
        self.node = node_name()
        self._ask_at = 0.0
        self._foreign = ""

    def serve(self) -> int:
        """Wait for the lease, lead, and wait again after another head has taken over. Returns the
        exit code."""
        while True:
            lease = Lease(
                self.run,
                self.name,
                self.config.liveness,
                self.node,
                self.allocation.name,
                self._has_ended,
            )
            deadline = time.monotonic() + self.config.liveness.start_timeout_s
            while not lease.is_free():
                code = read_outcome(self.run, self.name, self.allocation.name)
                if code is not None:
                    return code
                if self._foreign and time.monotonic() > deadline:
                    raise ConfigError(
                        f"run_dir: {self.run.root} is being run by job {self._foreign} already; "
                        f"end this job, or that one: relax-hpc stop {self.run.root}"
                    )
                time.sleep(_LOOK_S)
            code = read_outcome(self.run, self.name, self.allocation.name)
            if code is not None:
                return code
            try:
                return self.lead(lease)
            except (FencedError, NoDiskSpace) as error:
                lease.stop_beating()
                print(f"head: {error}; waiting as a candidate", flush=True)
                await_disk_space(self.run.root)

    def _has_ended(self, allocation: str) -> bool:
        """Whether an allocation (a job id with its number of restarts) has ended, according to
        Slurm."""
        job = allocation.rpartition("-")[0]
        if job == self.allocation.job:
            return True
        if time.monotonic() >= self._ask_at:
            self._ask_at = time.monotonic() + _ASK_SLURM_S
            with contextlib.suppress(SlurmError):
                present = self.slurm.jobs(job).get(job)
                self._foreign = job if present and present.state == "RUNNING" else ""
                return not self._foreign
        return False

    def lead(self, lease: Lease) -> int:
        """Supervise until the end. Returns the exit code, which is recorded for the other
        candidates."""
        if self.run_has_ended():
            return EXIT_DONE
        code, ledger = EXIT_RETRY, Ledger(self.run)
        kind = HetJob if self.config.layout == "het" and not self.group else GroupJob
        job = kind(self.run, self.config, self.slurm, self.allocation, self.node)
        # If the user has cancelled the previous job, its head may have been killed before it could
        # request a stop of the run.
        former = ledger.predecessor(self.allocation.job)
        if former and stop_if_user_cancelled(self.run, self.slurm, former):
            print(f"head: job {former} was cancelled, so the run stops", flush=True)
            self._report_end()
            self._announce_end(ledger, job.attempt, read_end(self.run))
            job.end(EXIT_DONE)
            return EXIT_DONE
        may_lead = self.group != HUB or claim_hub(ledger, self.allocation.job, job.attempt)
        if not may_lead or ledger.superseded(self.allocation.job, self.group):
            return EXIT_DONE
        failure = None
        try:
            code = self._supervise(lease, job)
        except (FencedError, NoDiskSpace):
            raise
        except RelaxError as error:
            code = error.exit_code
            failure = None if code == EXIT_RETRY else (FAILED, str(error))
            print(f"relax-hpc: error: {error}", file=sys.stderr, flush=True)
        # After an unexpected error this process ends without an outcome, and another candidate
        # continues.
        write_outcome(self.run, self.name, self.allocation.name, code)
        lease.release()
        self._report_end(failure)
        self._announce_end(ledger, job.attempt, read_end(self.run) or failure)
        job.end(code)
        return code

    def _report_end(self, failure: tuple[str, str] | None = None) -> None:
        if HUB in self.names:
            report_end(self.run, self.config, failure)

    def _announce_end(self, ledger: Ledger, attempt: int, end: tuple[str, str] | None) -> None:
        """Let Slurm's mail about this job say what has happened to the run."""
        if HUB in self.names:
            mail = EndMail(self.config, self.slurm, self.allocation.job)
            mail.announce(end, ledger.successors(attempt))

    def run_has_ended(self) -> bool:
        """Whether the run is finished, or a stop was requested."""
        return self.run.finished.exists() or bool(read_stop_request(self.run))

    def _supervise(self, lease: Lease, job: GroupJob | HetJob) -> int:
        with contextlib.ExitStack() as stack:
            terminal = stack.enter_context(
                contextlib.closing(Terminal(self.run, self.config, "hub" in self.names))
            )
            steps = job.launcher()
            local = LocalLauncher(self.run, self.allocation.job, steps.is_ending)
            supervisor = Supervisor(
                self.run,
                self.config,
                self.name,
                self.names,
                lambda name: local if name == "hub" or self.config.layout == "local" else steps,
                latest_attempt(self.run) or new_attempt(self.run),
                terminal,
                lease.former,
            )
            lease.acquire(supervisor.incarnation)
            # This runs after the supervisor has ended its groups, because a living group would
            # stage another version of the weights.
            stack.callback(self._clear_staging, supervisor)
            stack.enter_context(supervisor)
            if "hub" in self.names:
                if not self._prepare(terminal):
                    return EXIT_RETRY
            elif not self._await_hub(lease, supervisor, job):
                return read_stop_request(self.run).get("code", EXIT_RETRY)
            job.begin(supervisor)

            def on_round() -> None:
                lease.renew()
                job.tick(supervisor)

            def before_wait() -> None:
                lease.renew()
                job.before_wait()

            supervisor.on_round, supervisor.before_wait = on_round, before_wait
            supervisor.on_interrupt = job.on_interrupt
            if "hub" in self.names:
                supervisor.on_silence = job.silent_groups.suspect
                supervisor.companion = make_reconciler(supervisor, self.slurm)
            if isinstance(job, HetJob):
                supervisor.retire_detached = job.detached_groups.retire_group
            outcome = supervisor.supervise()
            if outcome is Outcome.FINISHED and "hub" in self.names:
                terminal.summary()
        if outcome is Outcome.STOPPED:
            return read_stop_request(self.run)["code"]
        return EXIT_RETRY if outcome is Outcome.INTERRUPTED else EXIT_DONE

    def _clear_staging(self, supervisor: Supervisor) -> None:
        # A job without the hub, or a fenced head, must not remove files of other groups on this
        # node.
        if "hub" in self.names and not supervisor.fenced:
            shutil.rmtree(staging_root(self.run), ignore_errors=True)
        else:
            clear_staging(self.run)

    def _prepare(self, terminal: Terminal) -> bool:
        """Make the model, the data and the warm start. False if a signal arrived. NoProgressError
        if this has failed in every start of the job."""
        try:
            return prepare(self.run, self.config, terminal)
        except ConfigError:
            raise
        except RelaxError as error:
            limit = self.config.liveness.max_restarts
            if self.allocation.restarts < limit or latest_incarnation(self.run, "hub"):
                raise
            request_stop(self.run, NoProgressError.exit_code, str(error))
            raise NoProgressError(f"{error}; allowed liveness.max_restarts={limit}") from error

    def _await_hub(self, lease: Lease, supervisor: Supervisor, job: GroupJob | HetJob) -> bool:
        """Wait for the hub before the group starts, because Slurm starts jobs in any order.

        False if this job must end first. DeadlineError if the wait is too long.
        """
        limit, began = longest_wait_s(self.config), time.monotonic()
        if latest_card(self.run, "hub") is None:
            supervisor.terminal.say("waits for the hub, which has not started yet")
        while latest_card(self.run, "hub") is None:
            if supervisor.interrupted or read_stop_request(self.run):
                return False
            supervisor.check_fenced()
            if time.monotonic() - began > limit:
                raise DeadlineError(
                    f"hub: has not started within liveness.longest_wait_s={limit:g}; see its job "
                    "in squeue, and its logs"
                )
            lease.renew()
            job.check_ending(supervisor)
            time.sleep(_LOOK_S)
        return True


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m relax_hpc.commands.head", description=__doc__)
    parser.add_argument(
        "--run_dir", type=Path, help="Run directory that relax-hpc submit has created."
    )
    parser.add_argument("--group", default="", help="Supervise only this group.")
    parser.add_argument(
        "--standby",
        action="store_true",
        help="End immediately if a head of the run is on this node already.",
    )
    parser.add_argument(
        "--config", action="append", default=[], help="Create the run directory from these files."
    )
    return parser.parse_args(argv)


def head(args: argparse.Namespace) -> int:
    """Run a head until it ends. Returns its exit code."""
    ignore_print_errors()
    try:
        run, config = _load_run(args)
        candidate = Head(run, config, args.group)
        # The claim lasts as long as this socket exists.
        claim = _claim_node(run, args.group, candidate.allocation.name)
        if args.standby and claim is None:
            return EXIT_DONE
        if args.group and not args.standby:
            allow_requeue(config, args.group, Slurm())
        return candidate.serve()
    except RelaxError as error:
        print(f"relax-hpc: error: {error}", file=sys.stderr, flush=True)
        return error.exit_code


def _claim_node(run: RunDir, group: str, allocation: str) -> socket.socket | None:
    """Socket that shows further heads of this allocation that one runs on this node. It lasts as
    long as this process. None if another head runs here already.

    Other users of the node can see the name of the socket, and can take it after this process has
    ended. A socket of another user therefore does not count.
    """
    key = "\0".join([str(run.root), group, allocation, node_name()]).encode()
    name = f"\0relax-head-{hmac.new(run.token(), key, 'sha256').hexdigest()[:32]}"
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(name)
        claim.listen(_BACKLOG)
    except OSError:
        if _is_own_head(name):
            claim.close()
            return None
    return claim


def _is_own_head(name: str) -> bool:
    """Whether a process of this user listens on the socket ``name``."""
    with socket.socket(socket.AF_UNIX) as client:
        client.setblocking(False)
        try:
            client.connect(name)
            return peer_user(client) == os.getuid()
        except OSError:
            return False


def _load_run(args: argparse.Namespace) -> tuple[RunDir, Config]:
    if not args.config:
        return RunDir(args.run_dir), load_resolved(args.run_dir, args.group)
    from relax_hpc.config import load

    overrides = {"run_dir": str(args.run_dir)} if args.run_dir else {}
    return prepare_run_dir(load(args.config, overrides), resume=True)


def main(argv: list[str] | None = None) -> int:
    """Run a head. If it is killed or fails unexpectedly, it is restarted immediately as a
    candidate."""
    set_private_umask()
    args = parse(argv)
    deaths: deque[float] = deque(maxlen=_DEATHS)

    def ended(code: int) -> int | None:
        if code >= 0 and code != EXIT_BUG:
            return code
        deaths.append(time.monotonic())
        end = f"ended by signal {-code}" if code < 0 else "failed"
        print(f"head: {end}", file=sys.stderr, flush=True)
        looping = len(deaths) == _DEATHS and deaths[-1] - deaths[0] < _DEATHS_S
        return EXIT_RETRY if looping else None

    code = run_watched(lambda: head(args), ended)
    if code and args.group and not args.standby:
        with contextlib.suppress(RelaxError, OSError):
            forbid_requeue(load_resolved(args.run_dir, args.group), args.group, Slurm())
    return code


if __name__ == "__main__":
    sys.exit(main())
