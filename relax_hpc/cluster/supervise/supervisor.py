"""Supervisor of the groups of a run, to their end and in every layout; launchers say how a group is
started.

The supervisor acts on the end of a process at once. A group that ends before its time is started
again as the next incarnation while the others go on; the queue gives back what it held. What it
must know lies in the run directory, so that another supervisor can take over.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum

from relax_hpc.base.disk_waits import retry_write
from relax_hpc.base.errors import EXIT_RETRY, FencedError, RelaxError
from relax_hpc.base.model_sizes import read_seconds
from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.supervise import requests
from relax_hpc.cluster.supervise.console import Terminal
from relax_hpc.cluster.supervise.disk_watch import DiskWatch
from relax_hpc.cluster.supervise.failures import Failures
from relax_hpc.cluster.supervise.group import Launcher, Member
from relax_hpc.cluster.supervise.group_table import Roll
from relax_hpc.cluster.supervise.launch_records import UNKNOWN, Progress, all_done
from relax_hpc.cluster.supervise.liveness import Liveness
from relax_hpc.cluster.supervise.requests import Request
from relax_hpc.cluster.supervise.starts import Starts, claim
from relax_hpc.cluster.supervise.unsaved_work import unsaved
from relax_hpc.cluster.supervise.verdict import Evidence, Fate, verdict
from relax_hpc.cluster.supervise.wakeups import Wakeups
from relax_hpc.config import Config
from relax_hpc.config.groups import base_name
from relax_hpc.net.rendezvous.roster import latest_card, latest_incarnation
from relax_hpc.queue.client import QueueClient
from relax_hpc.queue.presence import longest_wait_s

_STOP_LOOK_S = 0.1
_TOLD_BEATS = 6
"""Beats within which everybody has found a new hub and told it what it waits for."""
_CHECKPOINT_SIZE = 8
"""Size of a checkpoint in sizes of the weights, optimizer included: nothing that is loaded is
larger."""
RELEASED = "released"
"""Reason of a handing over after which somebody else submits the job."""


class Outcome(Enum):
    """End of a supervision that did not fail."""

    FINISHED = "finished"
    STOPPED = "stopped"
    """Stopped by the user."""
    INTERRUPTED = "interrupted"
    """Interrupted by a signal, or by the end of the allocation; the run can go on."""
    RELEASED = "released"
    """All groups go on in other jobs."""


class Supervisor:
    """Starts the groups, restarts what dies, ends everything. Use it as a context manager.

    ``launcher`` gives each group's launcher. Children of this process never outlive it; what runs
    elsewhere is ended too, unless a newer supervisor has taken over.
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
        """``former``: the supervisor whose place it takes, see `claim_incarnation`; without it, the
        newest."""
        self.run, self.config, self.name, self.launcher = run, config, name, launcher
        self.terminal = terminal
        self.roll = Roll(run, config, names)
        self.elastic = config.layout == "local"
        """Whether this supervisor starts and ends further members of groups; else these have jobs
        of their own."""
        self.interrupted = 0
        """Signals, and other reasons to end this job although the run goes on."""
        self.fenced = False
        self.each_tick: Callable[[], None] = lambda: None
        """Called once a round; for what a layout has to look after besides."""
        self.each_wait: Callable[[], None] = lambda: None
        """Called before whatever may take long, such as waiting, ending groups, and asking
        Slurm."""
        self.on_interrupt: Callable[[], None] = lambda: None
        """Called on a signal before anything is ended; it may find that the run was asked to
        stop."""
        self.take_along: Callable[[str], bool] = lambda _name: False
        """Called with a group that is supervised elsewhere before this ends, not for good; whether
        that ends too."""
        self.on_silence: Callable[[str, int], None] = lambda _name, _incarnation: None
        """Called with a group (and its incarnation) supervised elsewhere, when a member gives no
        sign for a lease."""
        self.incarnation = claim(run, name, former)
        self.client: QueueClient | None = None
        self.liveness: Liveness | None = None
        self.disk = DiskWatch(
            run, longest_wait_s(config), terminal.say, _TOLD_BEATS * config.liveness.beat_s
        )
        self.failures = Failures(run, config, attempt, self.progress, self.disk)
        self.wakeups = Wakeups(self.interrupt)
        self.starts = Starts(
            run,
            config,
            self.roll,
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
        if self.client:
            self.client.close()
        # After a bug, or what else nobody has thought of, the next supervisor finds the groups as
        # they are.
        leaves = self.fenced or (error is not None and not issubclass(error, RelaxError))
        for group in self.roll.here.values():
            if (
                leaves
                and group.outlives
                and group.incarnation == latest_incarnation(self.run, group.name)
            ):
                group.leave()
            else:
                group.end()
        self.wakeups.__exit__()

    def interrupt(self) -> None:
        """End this job soon, in good order."""
        self.interrupted += 1

    # -- the run -----------------------------------------------------------------------------------

    def supervise(self) -> Outcome:
        """Start or take over all groups, and watch them to the end."""
        self.client = QueueClient(self.run, self.config, self.name, self.incarnation)
        model = self.config.model
        others = model.reference_path, model.teacher_path, model.critic_path, self.config.genrm.path
        read = map(read_seconds, filter(None, others))
        read_s = max([_CHECKPOINT_SIZE * read_seconds(self.run.model), *read])
        self.liveness = Liveness(
            self.client, self.config.liveness, self.wakeups.wake, self._hub_incarnation, read_s
        )
        for name in self.roll.names:
            self.check_fenced()
            self.each_wait()
            if name in self.roll.unfit:
                self.starts.turn_away(name, self.roll.unfit[name])
            elif name not in self.roll.elsewhere:
                self.starts.begin(name)
        while not self.at_next_look(self.roll.finished):
            if self.interrupted or self.at_next_look(lambda: requests.asked_to_stop(self.run)):
                return self.stop()
            self.wait(self.config.liveness.beat_s)
            self.check_fenced()
            self.at_next_look(self.look_around)
            self.look_at_disk()
            if self.roll.all_released():
                return Outcome.RELEASED
        self.end_hub()
        return Outcome.FINISHED

    def at_next_look(self, look: Callable[[], object]) -> bool:
        """Whether ``look`` finds something. What a file system that is ill for a while does not let
        be read is found in another round."""
        try:
            return bool(look())
        except OSError as error:
            self.disk.met(self.run.root, error)
            return False

    def look_around(self) -> None:
        """One round. Whatever of it is done twice, as another part of it could not be, does no
        harm."""
        self.look_after_groups()
        self.look_after_waits()
        self.terminal.show_doing(
            {name: words for name, words in self.liveness.doing.items() if name in self.roll.here}
        )
        if "hub" in self.roll.names and self.liveness.beats:
            self.terminal.show_unsaved(
                unsaved(self.config, self.liveness.beats, self.liveness.progress[0])
            )
        self.try_again()
        self.each_wait()
        self.starts.ahead.look(self.roll.here, self.liveness.beats, self.roll.done)
        self.serve_requests()
        self.each_tick()
        self.terminal.show_progress()

    def progress(self) -> Progress:
        """Progress of the run, as the hub said last."""
        return self.liveness.progress if self.liveness else UNKNOWN

    def wait(self, seconds: float) -> None:
        """Sleep until a process ends, a signal comes or ``seconds`` are over."""
        self.each_wait()
        self.wakeups.wait(seconds)

    def check_fenced(self) -> None:
        """FencedError once another supervisor has taken over: it may touch nothing any more.

        While the disk does not say whether one has, it touches nothing either, up to a signal or
        for too long: OSError.
        """
        signals, folder = self.interrupted, self.run.rendezvous(self.name)
        latest = retry_write(
            folder, self._latest, lambda: self.interrupted > signals or bool(self.disk.too_long())
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
            self.disk.met(self.run.rendezvous(self.name), error)
            raise

    # -- ends of groups ----------------------------------------------------------------------------

    def look_after_groups(self) -> None:
        """Handle every member that is gone, and every one that hangs."""
        for name, group in list(self.roll.here.items()):
            for member in group.ended():
                if (
                    f"{name}/{member.role}" not in self.roll.done
                    and self.roll.here.get(name) is group
                ):
                    self.ended(name, member)
        for name, role, incarnation, reason in self.liveness.look(self.roll.here, self.roll.done):
            self.hangs(name, role, incarnation, reason)
        for name, incarnation in self.liveness.silent:
            self.on_silence(name, incarnation)

    def look_after_waits(self) -> None:
        """End the run if a group has been waited for too long: others that wait for it are not
        judged meanwhile."""
        limit = longest_wait_s(self.config)
        for name, wait in self.liveness.lacking.items() if "hub" in self.roll.names else ():
            if wait["since_s"] > limit and not all_done(self.run, self.config, name):
                text = (
                    f"{name}: {wait['why']}, and the others have waited for it for "
                    f"{wait['since_s']:.0f} s"
                )
                text = (
                    f"{text}, allowed liveness.longest_wait_s={limit:g}; see its logs, and its "
                    "job in squeue"
                )
                # On a full disk at the next look, unless the wait for that ends the run before.
                with contextlib.suppress(OSError):
                    requests.ask_to_stop(self.run, EXIT_RETRY, text)

    def look_at_disk(self) -> None:
        """Say which disk the run waits for; RelaxError, all groups having been asked to save, once
        that is too long."""
        self.disk.look(self.liveness.disk, self.liveness.answered_at)
        if why := self.disk.too_long():
            self.stop()
            raise RelaxError(f"{why}; allowed liveness.longest_wait_s={self.disk.limit_s:g}")

    def ended(self, name: str, member: Member) -> None:
        """A process is gone: done if it left its mark, else its group goes and comes again."""
        self.each_wait()
        self.wakeups.unwatch(member)
        limits, mark = self.config.liveness, self.roll.here[name].mark(member)
        reason = "" if mark else self._unmarked(name, member)
        has_progress = functools.cache(lambda: self.has_progress(member.role))
        found = Evidence(mark=mark, exit=lambda: reason, has_progress=has_progress)
        said = verdict(found, limits)
        if said.fate is Fate.DONE:
            self.roll.done.add(f"{name}/{member.role}")
            return
        self.terminal.say(
            f"{name}: {said.reason}"
            if member.role == name
            else f"{name}: {member.role}: {said.reason}"
        )
        if requests.asked_to_stop(self.run):
            # The others end it too; this one does at its next round.
            return
        # Asked once people know: Slurm may take seconds to answer.
        said = verdict(replace(found, ends=self.launcher(name).ending), limits)
        if said.fate is Fate.LEAVES:
            # Or the actor has seen the time limit come.
            self.interrupt()
        elif said.fate is Fate.HOPELESS:
            self.failures.give_up(name, said.reason, said.code)
        else:
            self.failed(name, said.reason)

    def has_progress(self, role: str) -> bool:
        """Whether the run has trained a step, or ``role`` has worked in it; true if the hub does
        not answer."""
        if self.progress()[0] > 0:
            return True
        lease_s = self.config.liveness.lease_s
        try:
            status = self.client.status.get(timeout=lease_s).result(lease_s)
        except (RelaxError, TimeoutError):
            return True
        return status.trained_steps > 0 or role in status.worked

    def _unmarked(self, name: str, member: Member) -> str:
        """Cause of the end of a member that could not say anything itself."""
        code = member.process.wait(timeout=30) if member.process else 0
        if code < 0:
            return f"ended by signal {-code}"
        return ": ".join(
            [f"ended with code {code} and without a mark", self.roll.here[name].last_words(member)]
        )

    def hangs(self, name: str, role: str, incarnation: int, reason: str) -> None:
        """A role lives but is of no use: its group is dead, unless that incarnation is another's
        already."""
        group = self.roll.here.get(name)
        if not role and group is None and "hub" in self.roll.here:
            # Its own supervisor may be as dead: at least what it held goes to others.
            self.terminal.say(
                f"{name}: {reason}; what incarnation {incarnation} held is given to others"
            )
            self.client.status.down(name, incarnation)
        if group is None or (incarnation and incarnation != group.incarnation):
            return
        self.terminal.say(
            f"{name}: {role} {reason}, taken for dead; stacks: "
            f"{self.run.logs(name, group.incarnation)}"
        )
        group.dump_stacks()
        self.failed(name, reason)

    def _hub_incarnation(self) -> int:
        card = latest_card(self.run, "hub")
        return card.incarnation if card else 0

    def failed(self, name: str, reason: str) -> None:
        """End what is left of a group, tell the queue, and have it started again where its policy
        says."""
        self.check_fenced()
        self.forget(name)
        # If not now it is judged at its next end.
        self.at_next_look(lambda: self.failures.judge(name, reason))
        error = self._read_start_error(name)
        if error:
            self.terminal.say(f"{name}: not started again, the run continues without it: {error}")
            self.leave_out(name)
        else:
            self.bring_back(name, reason)

    def _read_start_error(self, name: str) -> str:
        """Error by which a further member of a group never starts; empty for groups of the
        configuration, without which there is no run."""
        if name in self.config.groups:
            return ""
        with contextlib.suppress(OSError):
            return self.failures.repeated_start_error(name)
        return ""

    def leave_out(self, name: str) -> None:
        """Supervise a group no more, which has ended for good."""
        if self.elastic:
            self.roll.names = [other for other in self.roll.names if other != name]
        else:
            self.launcher(name).hand_over(name, RELEASED)
            self.roll.elsewhere[name] = ""
            self.roll.released.add(name)

    def bring_back(self, name: str, reason: str) -> None:
        """Have a group started again; see `Starts.bring_back`."""
        self.each_wait()
        self.starts.bring_back(name, reason)

    def try_again(self) -> None:
        """Bring back what could not be brought back before."""
        for name, reason in self.starts.due_again():
            self.check_fenced()
            self.bring_back(name, reason)

    def forget(self, name: str) -> None:
        """End what is left of a group and stop watching it; the queue takes back what it held."""
        group = self.roll.here[name]
        for member in group.members:
            self.wakeups.unwatch(member)
        group.end()
        self.roll.remove(name)
        if self.client and name != "hub":
            self.client.status.down(name, group.incarnation)

    # -- requests ----------------------------------------------------------------------------------

    def serve_requests(self) -> None:
        """Do what commands ask of these groups."""
        for request in requests.pending(self.run, self._serves):
            if self.disk.hinders():
                # Without an answer it would be served again and again.
                return
            self.terminal.say(f"{request.group}: asked to {request.op}")
            self._serve(request)
            requests.answer(self.run, request, done=request.op)

    def _serves(self, name: str) -> bool:
        """Whether a request about ``name`` is for this supervisor; groups elsewhere have their
        own."""
        return (
            name in self.roll.here
            or name in self.starts.again
            or (self.elastic and bool(base_name(name, self.config.groups)))
        )

    def _serve(self, request: Request) -> None:
        name = request.group
        # Whatever it was changed to: it shall find no rank that began before.
        self.starts.ahead.drop(name)
        if request.op != "start":
            self.starts.again.pop(name, None)
        if name in self.roll.here and request.op != "start":
            self.end_in_order([name])
            self.forget(name)
        if request.op in ("start", "restart") and name not in self.roll.here:
            self.roll.names += [name] if name not in self.roll.names else []
            self.starts.start_soon(name)
        elif request.op == "release":
            self.leave_out(name)

    # -- the end -----------------------------------------------------------------------------------

    def end_hub(self) -> None:
        """End the hub when all others are done: let the controller flush and go."""
        if "hub" in self.roll.here:
            self.end_in_order(["hub"])
        self.terminal.show_progress()

    def stop(self) -> Outcome:
        """Asked to end early: the actor saves at its next step's edge, then everything goes."""
        self.check_fenced()
        self.starts.ahead.dismiss()
        if self.interrupted:
            self.on_interrupt()
        asked = requests.asked_to_stop(self.run)
        self.terminal.say(
            f"stopping: {asked['reason']}" if asked else "stopping; a second signal stops at once"
        )
        for part in self.roll.stop_order():
            part = [
                name for name in part if name in self.roll.here or asked or self.take_along(name)
            ]
            own = set(part) & self.roll.here.keys()
            # Others are waited for by who comes after them, no more: of some there may be nobody
            # left.
            self.end_in_order(sorted(own) if own == self.roll.here.keys() else part)
            for name in own:
                self.forget(name)
        self.terminal.say("stopped")
        return Outcome.STOPPED if asked else Outcome.INTERRUPTED

    def end_in_order(self, names: list[str]) -> None:
        """Ask groups to end, and wait for it; one more signal, a deadline, or a stop at once cuts
        the waiting short."""
        signals = self.interrupted
        for name in set(names) & self.roll.here.keys():
            self.roll.here[name].ask_to_end()
        deadline = time.monotonic() + self.config.liveness.stop_timeout_s
        while (
            any(map(self.roll.lives, names))
            and self.interrupted == signals
            and time.monotonic() < deadline
        ):
            if requests.asked_to_stop(self.run).get("now"):
                return
            self.wait(_STOP_LOOK_S)
