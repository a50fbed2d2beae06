"""Supervisor of the groups of a run, in every layout. Launchers start the groups.

The supervisor reacts immediately to the end of a process. If a group fails, it starts the next
incarnation of the group while the other groups continue, and the queue gives the work of the group
to others. All its knowledge is in the run directory, so that another supervisor can take over.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum
from typing import Protocol

from relax_hpc.base.disk_waits import retry_write
from relax_hpc.base.errors import EXIT_RETRY, FencedError, RelaxError
from relax_hpc.base.model_sizes import read_seconds
from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.events.watch import EventWatch
from relax_hpc.cluster.supervise import requests
from relax_hpc.cluster.supervise.console import Terminal
from relax_hpc.cluster.supervise.disk_watch import DiskWatch
from relax_hpc.cluster.supervise.failures import Failures
from relax_hpc.cluster.supervise.group import Launcher, Member
from relax_hpc.cluster.supervise.group_table import GroupTable
from relax_hpc.cluster.supervise.launch_records import UNKNOWN, Progress, all_done
from relax_hpc.cluster.supervise.liveness import Liveness
from relax_hpc.cluster.supervise.requests import GroupRequest
from relax_hpc.cluster.supervise.starts import GroupStarts, claim
from relax_hpc.cluster.supervise.unsaved_work import find_unsaved_work
from relax_hpc.cluster.supervise.verdict import Evidence, Fate, verdict
from relax_hpc.cluster.supervise.wakeups import Wakeups
from relax_hpc.config import Config
from relax_hpc.config.groups import base_name
from relax_hpc.net.rendezvous.process import describe_end
from relax_hpc.net.rendezvous.roster import latest_card, latest_incarnation
from relax_hpc.queue.client import QueueClient
from relax_hpc.queue.presence import longest_wait_s

_STOP_LOOK_S = 0.1
"""Seconds between two checks whether groups have stopped."""
_REPORT_BEATS = 6
"""Heartbeat intervals within which all members find a new hub and report their waits to it."""
_CHECKPOINT_SIZE = 8
"""Size of a checkpoint with optimizer states, as a multiple of the weights. A checkpoint is the
largest file that a role loads."""
RELEASED = "released"
"""Reason for `hand_over` if the caller submits the next job of the group."""


class Outcome(Enum):
    """End of a supervision that did not fail."""

    FINISHED = "finished"
    STOPPED = "stopped"
    """Stopped by the user."""
    INTERRUPTED = "interrupted"
    """Interrupted by a signal, or by the end of the allocation; the run can be resumed."""
    RELEASED = "released"
    """All groups continue in other jobs."""


class Companion(Protocol):
    """A thread beside the supervisor's own."""

    def start(self) -> None:
        """Start the thread."""

    def request_end(self) -> None:
        """Ask the thread to end."""

    def close(self) -> None:
        """Wait until the thread has ended."""


class Supervisor:
    """Starts groups, restarts those that fail, and ends all of them. Use it as a context manager.

    ``launcher`` returns the launcher of a group. Children of this process never outlive it. Slurm
    steps are ended too, unless a newer supervisor has taken over.
    """

    def __init__(
        self,
        run: RunDir,
        config: Config,
        name: str,
        names: Sequence[str],
        launcher: Callable[[str], Launcher],
        attempt: int,
        terminal: Terminal,
        former: int | None = None,
    ) -> None:
        """``former``: number of the supervisor that this one replaces, see `claim_incarnation`;
        None: the newest."""
        self.run, self.config, self.name, self.launcher = run, config, name, launcher
        self.terminal = terminal
        self.table = GroupTable(run, config, names)
        self.starts_members = config.layout == "local"
        """Whether this supervisor starts and ends further members of groups. Otherwise each of
        them has a separate job."""
        self.interrupted = 0
        """Number of signals and other reasons to end this job while the run continues."""
        self.fenced = False
        """Whether a newer supervisor has taken over."""
        self.on_round: Callable[[], None] = lambda: None
        """Called once in each round, for the further tasks of a layout."""
        self.before_wait: Callable[[], None] = lambda: None
        """Called before an operation that may take long: a wait, the end of groups, a request to
        Slurm."""
        self.on_interrupt: Callable[[], None] = lambda: None
        """Called on a signal before a group is ended. It may request a stop of the run."""
        self.retire_detached: Callable[[str], bool] = lambda _name: False
        """Called with each detached group when this job ends for its successor. Returns whether the
        job of that group ends too."""
        self.on_silence: Callable[[str, int], None] = lambda _name, _incarnation: None
        """Called with a group under another supervisor, and its incarnation, if a member has sent
        no heartbeat for the length of a lease."""
        self.companion: Companion | None = None
        """Thread that starts when this supervisor can send requests to the queue."""
        self.incarnation = claim(run, name, former)
        self.client: QueueClient | None = None
        self.liveness: Liveness | None = None
        self.events: EventWatch | None = None
        """Watch that reports events to people, if this supervisor has the hub."""
        self.disk = DiskWatch(
            run, longest_wait_s(config), terminal.say, _REPORT_BEATS * config.liveness.beat_s
        )
        self.failures = Failures(run, config, attempt, self.progress, self.disk)
        self.wakeups = Wakeups(self.interrupt)
        self.starts = GroupStarts(
            run,
            config,
            self.table,
            launcher,
            self.failures,
            self.wakeups,
            terminal.say,
            leave=self.interrupt,
        )

    def __enter__(self) -> Supervisor:
        self.wakeups.__enter__()
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self.starts.ahead.drop(*self.starts.ahead.waiting)
        if self.companion:
            self.companion.request_end()
        if self.events:
            self.events.close(with_command=not self.fenced)
        if self.client:
            self.client.close()
        if self.companion:
            self.companion.close()
        # After an unexpected error the groups keep running, and the next supervisor adopts them.
        keep_running = self.fenced or (error is not None and not issubclass(error, RelaxError))
        for group in self.table.supervised.values():
            if (
                keep_running
                and group.outlives_supervisor
                and group.incarnation == latest_incarnation(self.run, group.name)
            ):
                group.detach()
            else:
                group.end()
        self.wakeups.__exit__()

    @property
    def hub_liveness(self) -> Liveness:
        """Liveness client, which exists while `supervise` runs."""
        assert self.liveness is not None
        return self.liveness

    def interrupt(self) -> None:
        """End this job soon and cleanly."""
        self.interrupted += 1

    # -- the run -----------------------------------------------------------------------------------

    def supervise(self) -> Outcome:
        """Start or take over all groups, and supervise them until they end."""
        self.client = QueueClient(self.run, self.config, self.name, self.incarnation)
        self.liveness = Liveness(
            self.client,
            self.config.liveness,
            self.wakeups.wake,
            self._hub_incarnation,
            self._longest_read_s(),
        )
        if self.companion:
            self.companion.start()
        if "hub" in self.table.names:
            self.events = EventWatch(self.run, self.config, self.terminal.say)
        for name in self.table.names:
            self.check_fenced()
            self.before_wait()
            if name in self.table.unfit:
                self.starts.refuse_start(name, self.table.unfit[name])
            elif name not in self.table.detached:
                self.starts.adopt_or_start(name)
        while not self.try_read(self.table.is_finished):
            if self.interrupted or self.try_read(lambda: requests.read_stop_request(self.run)):
                return self.stop()
            self.wait(self.config.liveness.beat_s)
            self.check_fenced()
            self.try_read(self.do_round)
            self.check_disk()
            if self.table.all_released():
                return Outcome.RELEASED
        self.end_hub()
        return Outcome.FINISHED

    def _longest_read_s(self) -> float:
        """Seconds in which a slow disk delivers the largest file that a role loads."""
        model = self.config.model
        paths = (
            model.reference_path,
            model.teacher_path,
            model.critic_path,
            self.config.genrm.path,
        )
        checkpoint_s = _CHECKPOINT_SIZE * read_seconds(self.run.model)
        return max([checkpoint_s, *(read_seconds(path) for path in paths if path)])

    def try_read(self, read: Callable[[], object]) -> bool:
        """Whether ``read`` returns a true value. If a broken file system prevents it, the answer is
        false, and the next round tries it again."""
        try:
            return bool(read())
        except OSError as error:
            self.disk.handle_error(self.run.root, error)
            return False

    def do_round(self) -> None:
        """One round of supervision. Each part may be repeated without harm, which happens if a
        later part fails."""
        liveness = self.hub_liveness
        self.check_groups()
        self.check_waits()
        self.terminal.show_activities(
            {
                name: activity
                for name, activity in liveness.activities.items()
                if name in self.table.supervised
            }
        )
        if "hub" in self.table.names and liveness.beats:
            self.terminal.show_unsaved(
                find_unsaved_work(self.config, liveness.beats, liveness.progress[0])
            )
        if self.events and self.client:
            self.events.update(liveness, self.client, self.disk.waits)
        self.retry_groups()
        self.before_wait()
        self.starts.ahead.update(self.table.supervised, liveness.beats, self.table.done)
        self.serve_requests()
        self.on_round()
        self.terminal.show_progress()

    def progress(self) -> Progress:
        """Progress of the run, by the newest answer of the hub."""
        return self.liveness.progress if self.liveness else UNKNOWN

    def wait(self, seconds: float) -> None:
        """Sleep until a process ends, a signal arrives, or ``seconds`` have passed."""
        self.before_wait()
        self.wakeups.wait(seconds)

    def check_fenced(self) -> None:
        """Raise FencedError if another supervisor has taken over, because this one must not act any
        more.

        While the disk cannot be read, this method waits. It raises OSError after a signal, or when
        the wait is too long.
        """
        signals, folder = self.interrupted, self.run.rendezvous(self.name)
        latest = retry_write(
            folder,
            self._latest,
            lambda: self.interrupted > signals or bool(self.disk.timeout_reason()),
        )
        if latest > self.incarnation:
            self.fenced = True
            raise FencedError(
                f"supervisor {latest} has taken over {self.run.root}; this one was "
                f"{self.incarnation}"
            )

    def _latest(self) -> int:
        try:
            return latest_incarnation(self.run, self.name)
        except OSError as error:
            self.disk.handle_error(self.run.rendezvous(self.name), error)
            raise

    # -- ends of groups ----------------------------------------------------------------------------

    def check_groups(self) -> None:
        """Handle every member that has ended or hangs."""
        for name, group in list(self.table.supervised.items()):
            for member in group.ended_members():
                if (
                    f"{name}/{member.role}" not in self.table.done
                    and self.table.supervised.get(name) is group
                ):
                    self.handle_end(name, member)
        dead_roles = self.hub_liveness.poll(self.table.supervised, self.table.done)
        for name, role, incarnation, reason in dead_roles:
            self.handle_dead_role(name, role, incarnation, reason)
        for name, incarnation in self.hub_liveness.silent:
            self.on_silence(name, incarnation)

    def check_waits(self) -> None:
        """End the run if other groups have waited for a group for too long. Waiting groups are not
        judged as hanging."""
        if "hub" not in self.table.names:
            return
        limit = longest_wait_s(self.config)
        for name, wait in self.hub_liveness.awaited_groups.items():
            if wait["since_s"] > limit and not all_done(self.run, self.config, name):
                text = (
                    f"{name}: {wait['why']}, and the others have waited for it for "
                    f"{wait['since_s']:.0f} s, allowed liveness.longest_wait_s={limit:g}; see its "
                    "logs, and its job in squeue"
                )
                # On a full disk the next round tries again.
                with contextlib.suppress(OSError):
                    requests.request_stop(self.run, EXIT_RETRY, text)

    def check_disk(self) -> None:
        """Report the disks that the run waits for. After too long a wait, ask all groups to save
        and raise RelaxError."""
        self.disk.update(self.hub_liveness.disk, self.hub_liveness.answered_at)
        reason = self.disk.timeout_reason()
        if reason:
            self.stop()
            raise RelaxError(f"{reason}; allowed liveness.longest_wait_s={self.disk.limit_s:g}")

    def handle_end(self, name: str, member: Member) -> None:
        """Handle the end of a member's process: it is done, or its group is restarted."""
        self.before_wait()
        self.wakeups.unwatch(member)
        limits, mark = self.config.liveness, self.table.supervised[name].exit_mark(member)
        reason = "" if mark else self._describe_unmarked_end(name, member)
        has_progress = functools.cache(lambda: self.has_progress(member.role))
        evidence = Evidence(mark=mark, exit=lambda: reason, has_progress=has_progress)
        judgement = verdict(evidence, limits)
        if judgement.fate is Fate.DONE:
            self.table.done.add(f"{name}/{member.role}")
            return
        role = "" if member.role == name else f"{member.role}: "
        self.terminal.say(f"{name}: {role}{judgement.reason}")
        if requests.read_stop_request(self.run):
            # The other supervisors stop their groups too. This one stops in its next round.
            return
        # The user sees the message first, because Slurm may take seconds to answer.
        evidence = replace(evidence, is_allocation_ending=self.launcher(name).is_ending)
        judgement = verdict(evidence, limits)
        if judgement.fate is Fate.LEAVES:
            # The allocation ends, or the actor has stopped because of the time limit.
            self.interrupt()
        elif judgement.fate is Fate.HOPELESS:
            self.failures.end_run(name, judgement.reason, judgement.code)
        else:
            self.handle_failure(name, judgement.reason)

    def has_progress(self, role: str) -> bool:
        """Whether the run has trained a step, or ``role`` has worked in it. True if the hub does
        not answer."""
        if self.progress()[0] > 0:
            return True
        lease_s = self.config.liveness.lease_s
        assert self.client is not None
        try:
            status = self.client.status.get(timeout=lease_s).result(lease_s)
        except (RelaxError, TimeoutError):
            return True
        return status.trained_steps > 0 or role in status.worked

    def _describe_unmarked_end(self, name: str, member: Member) -> str:
        """Cause of the end of a member that wrote no exit mark."""
        code = member.process.wait(timeout=30) if member.process else 0
        if code < 0:
            group = self.table.supervised[name]
            log = self.run.rank_log(name, group.incarnation, member.role, 0)
            return describe_end(code, log).removeprefix("was ")
        output = self.table.supervised[name].last_output(member)
        return f"ended with code {code} and without a mark: {output}"

    def handle_dead_role(self, name: str, role: str, incarnation: int, reason: str) -> None:
        """Handle a role that hangs or is silent, or a hub that does not answer: its group is dead,
        unless a newer incarnation has started."""
        group = self.table.supervised.get(name)
        if not role and group is None and "hub" in self.table.supervised:
            # The group's own supervisor may be dead too. Other groups take over its work at least.
            self.terminal.say(
                f"{name}: {reason}; other groups take over the work of incarnation {incarnation}"
            )
            assert self.client is not None
            self.client.status.down(name, incarnation)
        if group is None or (incarnation and incarnation != group.incarnation):
            return
        self.terminal.say(
            f"{name}: {role} {reason}, taken for dead; stacks: "
            f"{self.run.logs(name, group.incarnation)}"
        )
        group.dump_stacks()
        self.handle_failure(name, reason)

    def _hub_incarnation(self) -> int:
        card = latest_card(self.run, "hub")
        return card.incarnation if card else 0

    def handle_failure(self, name: str, reason: str) -> None:
        """End the remaining processes of a group, report it to the queue, and restart the group
        according to its policy.

        `remove_group` sends `down` to the queue, except for the hub. There
        queue/controller/state/members.py: _end_incarnations releases the leases and tickets of the
        group, drops rows that are only in its memory, and ends its readers of weights; the rows of
        an actor are rolled back when it resumes (state/progress.py: _resume_policy).
        `Failures.check_failure` may end the run. Otherwise `GroupStarts.bring_back` restarts the
        group. Lost jobs of groups that have their own are handled in cluster/slurm/lost_jobs.py.
        """
        self.check_fenced()
        self.starts.detected_at[name] = time.time()
        self.remove_group(name)
        # If the records cannot be read, the next failure of the group is checked again.
        self.try_read(lambda: self.failures.check_failure(name, reason))
        error = self._read_start_error(name)
        if error:
            self.terminal.say(f"{name}: not started again, the run continues without it: {error}")
            self.drop_group(name)
        else:
            self.restart_group(name, reason)

    def _read_start_error(self, name: str) -> str:
        """Error that prevents every start of a further member of a group. Empty for groups of the
        configuration, because the run cannot continue without them."""
        if name in self.config.groups:
            return ""
        with contextlib.suppress(OSError):
            return self.failures.repeated_start_error(name)
        return ""

    def drop_group(self, name: str) -> None:
        """Remove a group that will not be started again."""
        if self.starts_members:
            self.table.names = [member for member in self.table.names if member != name]
        else:
            self.launcher(name).hand_over(name, RELEASED)
            self.table.detached[name] = ""
            self.table.released.add(name)

    def restart_group(self, name: str, reason: str) -> None:
        """Restart a group; see `GroupStarts.bring_back`."""
        self.before_wait()
        self.starts.bring_back(name, reason)

    def retry_groups(self) -> None:
        """Restart groups whose next attempt is due."""
        for name, reason in self.starts.due_retries():
            self.check_fenced()
            self.restart_group(name, reason)

    def remove_group(self, name: str) -> None:
        """End the remaining processes of a group. The queue gives its work to other groups."""
        group = self.table.supervised[name]
        for member in group.members:
            self.wakeups.unwatch(member)
        group.end()
        self.table.remove(name)
        if self.client and name != "hub":
            self.client.status.down(name, group.incarnation)

    # -- requests ----------------------------------------------------------------------------------

    def serve_requests(self) -> None:
        """Serve the requests of commands about these groups."""
        for request in requests.pending_requests(self.run, self._serves):
            if self.disk.is_full():
                # The answer could not be written, and the request would be served repeatedly.
                return
            self.terminal.say(f"{request.group}: asked to {request.op}")
            self._serve(request)
            requests.answer(self.run, request, done=request.op)

    def _serves(self, name: str) -> bool:
        """Whether a request about ``name`` is for this supervisor. Detached groups have their own
        supervisors."""
        return (
            name in self.table.supervised
            or name in self.starts.retries
            or (self.starts_members and bool(base_name(name, self.config.groups)))
        )

    def _serve(self, request: GroupRequest) -> None:
        name = request.group
        # Ranks that were started ahead have the old settings.
        self.starts.ahead.drop(name)
        if request.op != "start":
            self.starts.retries.pop(name, None)
        if name in self.table.supervised and request.op != "start":
            self.end_gracefully([name])
            self.remove_group(name)
        if request.op in ("start", "restart") and name not in self.table.supervised:
            self.table.names += [name] if name not in self.table.names else []
            self.starts.start_soon(name)
        elif request.op == "release":
            self.drop_group(name)

    # -- the end -----------------------------------------------------------------------------------

    def end_hub(self) -> None:
        """End the hub after all other groups are done, so that the controller writes its last
        records."""
        if "hub" in self.table.supervised:
            self.end_gracefully(["hub"])
        self.terminal.show_progress()

    def stop(self) -> Outcome:
        """Stop early: the actor saves after its present step, then all groups end."""
        self.check_fenced()
        self.starts.ahead.dismiss()
        if self.interrupted:
            self.on_interrupt()
        request = requests.read_stop_request(self.run)
        reason = f": {request['reason']}" if request else "; a second signal stops immediately"
        self.terminal.say(f"stopping{reason}")
        for names in self.table.stop_order():
            ending = [
                name
                for name in names
                if name in self.table.supervised or request or self.retire_detached(name)
            ]
            supervised = set(ending) & self.table.supervised.keys()
            if supervised == self.table.supervised.keys():
                # These are the last groups of this supervisor. It does not wait for detached
                # groups any more, because their supervisors may be dead.
                ending = sorted(supervised)
            self.end_gracefully(ending)
            for name in supervised:
                self.remove_group(name)
        self.terminal.say("stopped")
        return Outcome.STOPPED if request else Outcome.INTERRUPTED

    def end_gracefully(self, names: list[str]) -> None:
        """Ask groups to end, and wait for them. A further signal, the deadline, or a request to
        stop immediately ends the wait."""
        signals = self.interrupted
        for name in set(names) & self.table.supervised.keys():
            self.table.supervised[name].request_end()
        deadline = time.monotonic() + self.config.liveness.stop_timeout_s
        while (
            any(map(self.table.is_alive, names))
            and self.interrupted == signals
            and time.monotonic() < deadline
        ):
            if requests.read_stop_request(self.run).get("now"):
                return
            self.wait(_STOP_LOOK_S)
