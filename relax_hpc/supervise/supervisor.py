"""Supervisor of the groups of a run, to their end and in every layout; launchers say how a group is started.

The supervisor acts on the end of a process at once. A group that ends before its time is started again as the next
incarnation while the others go on; the queue gives back what it held. What it must know lies in the run directory, so
that another supervisor can take over.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum

from relax_hpc.config import Config
from relax_hpc.config.groups import base_name, group_of, roles_of, trainers_of
from relax_hpc.disk import for_at_most, may_pass, patiently, with_cure
from relax_hpc.errors import (
    EXIT_CONFIG,
    EXIT_NO_PROGRESS,
    EXIT_RETRY,
    ConfigError,
    FencedError,
    NoProgressError,
    RelaxError,
)
from relax_hpc.models.sizes import read_seconds
from relax_hpc.rendezvous.process import STOP_SIGNALS
from relax_hpc.rendezvous.roster import claim_incarnation, latest_card, latest_incarnation
from relax_hpc.rundir import RunDir
from relax_hpc.supervise import requests
from relax_hpc.supervise.ahead import Ahead
from relax_hpc.supervise.console import Terminal
from relax_hpc.supervise.disk_watch import DiskWatch, NoRoom
from relax_hpc.supervise.group import Incarnation, Launcher, Member, Unavailable
from relax_hpc.supervise.launch_records import (
    UNKNOWN,
    Launch,
    Progress,
    all_done,
    all_ended,
    fruitless,
    is_done,
    last_beat_s,
    members_of,
    record,
)
from relax_hpc.supervise.liveness import Liveness
from relax_hpc.supervise.requests import Request
from relax_hpc.supervise.unsaved import unsaved
from relax_hpc.supervise.verdict import Evidence, Fate, verdict
from relax_hpc.transfer_queue.client import QueueClient
from relax_hpc.transfer_queue.presence import longest_wait_s

_STOP_LOOK_S = 0.1
_AGAIN_S, _OUTAGE_S = 10.0, 3600.0
"""Seconds between tries to bring back a group that cannot be now, and seconds for which it is tried."""
_TOLD_BEATS = 6
"""Beats within which everybody has found a new hub and told it what it waits for."""
_CHECKPOINT_SIZE = 8
"""Size of a checkpoint in sizes of the weights, optimizer included: nothing that is loaded is larger."""
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

    ``launcher`` gives each group's launcher. Children of this process never outlive it; what runs elsewhere is ended
    too, unless a newer supervisor has taken over.
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
        """``former``: the supervisor whose place it takes, see `claim_incarnation`; without it, the newest."""
        self.run, self.config, self.name, self.launcher = run, config, name, launcher
        self.names = list(names)
        self.attempt, self.terminal = attempt, terminal
        self.groups: dict[str, Incarnation] = {}
        self.elsewhere: dict[str, str] = {}
        """Slurm job that supervises a group now, by group; empty until that is submitted."""
        self.unfit: dict[str, str] = {}
        """Groups whose nodes must not be used, and why."""
        self.released: set[str] = set()
        """Groups that have other jobs by now, or are to get them: they were asked for."""
        self.elastic = config.layout == "local"
        """Whether this supervisor starts and ends further members of groups; else these have jobs of their own."""
        self.again: dict[str, tuple[str, float, float]] = {}
        """Groups that could not be brought back yet: why they ended, when, and when they are tried again."""
        self.done: set[str] = set()
        self.interrupted = 0
        self.fenced = False
        self.disk = DiskWatch(run, longest_wait_s(config), terminal.say, _TOLD_BEATS * config.liveness.beat_s)
        self.each_tick: Callable[[], None] = lambda: None
        """Called once a round; for what a layout has to look after besides."""
        self.each_wait: Callable[[], None] = lambda: None
        """Called before whatever may take long, such as waiting, ending groups, and asking Slurm."""
        self.on_interrupt: Callable[[], None] = lambda: None
        """Called on a signal before anything is ended; it may find that the run was asked to stop."""
        self.take_along: Callable[[str], bool] = lambda _name: False
        """Called with a group that is supervised elsewhere before this ends, not for good; whether that ends too."""
        self.on_silence: Callable[[str, int], None] = lambda _name, _incarnation: None
        """Called with a group (and its incarnation) supervised elsewhere, when a member gives no sign for a lease."""
        self.incarnation = self._claim(name, former)
        self.client: QueueClient | None = None
        self.liveness: Liveness | None = None
        self.ahead = Ahead(run, config, launcher, terminal.say)
        self.selector = selectors.DefaultSelector()
        self.wake_out, self.wake_in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.selector.register(self.wake_out, selectors.EVENT_READ, None)

    def _claim(self, name: str, former: int | None = None) -> int:
        """Number of the next incarnation. NoRoom: on a disk that takes nothing."""
        try:
            return claim_incarnation(self.run, name, former)
        except OSError as error:
            if not may_pass(error):
                raise
            raise NoRoom(with_cure(self.run.rendezvous(name), error)) from error

    def __enter__(self) -> Supervisor:
        signal.set_wakeup_fd(self.wake_in)
        for number in STOP_SIGNALS:
            signal.signal(number, self._interrupt)
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self.ahead.drop(*self.ahead.waiting)
        if self.client:
            self.client.close()
        # After a bug, or what else nobody has thought of, the next supervisor finds the groups as they are.
        leaves = self.fenced or (error is not None and not issubclass(error, RelaxError))
        for group in self.groups.values():
            if leaves and group.outlives and group.incarnation == latest_incarnation(self.run, group.name):
                group.leave()
            else:
                group.end()
        signal.set_wakeup_fd(-1)
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        self.selector.close()
        os.close(self.wake_in)
        os.close(self.wake_out)

    def _interrupt(self, *_: object) -> None:
        self.interrupted += 1

    # -- the run -----------------------------------------------------------------------------------------------

    def supervise(self) -> Outcome:
        """Start or take over all groups, and watch them to the end."""
        self.client = QueueClient(self.run, self.config, self.name, self.incarnation)
        read_s = _CHECKPOINT_SIZE * read_seconds(self.run.model)
        self.liveness = Liveness(self.client, self.config.liveness, self._wake, self._hub_incarnation, read_s)
        for name in self.names:
            self.check_fenced()
            if name in self.unfit:
                self.turn_away(name, self.unfit[name])
            elif name not in self.elsewhere:
                self.begin(name)
        while not self.at_next_look(self.finished):
            if self.interrupted or self.at_next_look(lambda: requests.asked_to_stop(self.run)):
                return self.stop()
            self.wait(self.config.liveness.beat_s)
            self.check_fenced()
            self.at_next_look(self.look_around)
            self.look_at_disk()
            if self.released.issuperset(self.names):
                return Outcome.RELEASED
        self.end_hub()
        return Outcome.FINISHED

    def at_next_look(self, look: Callable[[], object]) -> bool:
        """Whether ``look`` finds something. What a file system that is ill for a while does not let be read is found
        in another round."""
        try:
            return bool(look())
        except OSError as error:
            self.disk.met(self.run.root, error)
            return False

    def look_around(self) -> None:
        """One round. Whatever of it is done twice, as another part of it could not be, does no harm."""
        self.look_after_groups()
        self.look_after_waits()
        self.terminal.show_doing({name: words for name, words in self.liveness.doing.items() if name in self.groups})
        if "hub" in self.names and self.liveness.beats:
            self.terminal.show_unsaved(unsaved(self.config, self.liveness.beats, self.liveness.progress[0]))
        self.try_again()
        self.each_wait()
        self.ahead.look(self.groups, self.liveness.beats, self.done)
        self.serve_requests()
        self.each_tick()
        self.terminal.show_progress()

    def begin(self, name: str) -> None:
        """Take over what runs of a group, or start it."""
        self.each_wait()
        launcher, incarnation = self.launcher(name), latest_incarnation(self.run, name)
        if incarnation and (group := launcher.adopt(name, incarnation)):
            self.groups[name] = group
            self.terminal.say(f"{name}: taken over at incarnation {incarnation}")
        elif name == "hub" or not self._all_done(name):
            # Whoever is not done needs the controller, whatever became of the roles beside it.
            self.start_soon(name)

    def start_soon(self, name: str) -> None:
        """Start a group, now or as soon as what that needs answers."""
        try:
            self.start(name)
        except (Unavailable, OSError) as error:
            if not (may_pass(error) or getattr(error, "later", False)):
                raise
            now = time.monotonic()
            self.again[name] = (str(error), now, now)

    def turn_away(self, name: str, reason: str) -> None:
        """Refuse to start a group on its nodes; counts as a start, so that this does not go on for ever."""
        try:
            record(self.run, name, self._claim(name), Launch(self.attempt, self.progress()))
        except (NoRoom, OSError) as error:
            # It does not begin before there is room.
            if not (may_pass(error) or isinstance(error, NoRoom)):
                raise
        self._count_failure(name, reason)
        self.bring_back(name, reason)

    def start(self, name: str) -> None:
        """Start the next incarnation of a group."""
        self.disk.check_room()
        self.again.pop(name, None)
        incarnation, ahead = self.ahead.next(name, self._claim)
        launch = Launch(self.attempt, self.progress())
        self.groups[name] = group = self.launcher(name).start(name, incarnation, launch, ahead)
        self.ahead.begin(name, incarnation)
        for member in group.members:
            self.selector.register(member.pidfd, selectors.EVENT_READ, member)
        roles = ", ".join(member.role for member in group.members)
        self.terminal.say(f"{name}: started incarnation {incarnation} ({roles}){', which waited' if ahead else ''}")

    def progress(self) -> Progress:
        return self.liveness.progress if self.liveness else UNKNOWN

    def wait(self, seconds: float) -> None:
        """Sleep until a process ends, a signal comes or ``seconds`` are over."""
        self.each_wait()
        for key, _ in self.selector.select(seconds):
            if key.data is None:
                os.read(self.wake_out, 4096)

    def _wake(self) -> None:
        """Let `wait` return; any thread may call it."""
        # A full pipe wakes as well, and after the end there is nobody to wake.
        with contextlib.suppress(OSError):
            os.write(self.wake_in, b"\0")

    def check_fenced(self) -> None:
        """FencedError once another supervisor has taken over: it may touch nothing any more.

        While the disk does not say whether one has, it touches nothing either, up to a signal or for too long: OSError.
        """
        signals, folder = self.interrupted, self.run.rendezvous(self.name)
        latest = patiently(folder, self._latest, lambda: self.interrupted > signals or bool(self.disk.too_long()))
        if latest > self.incarnation:
            self.fenced = True
            raise FencedError(f"supervisor {latest} has taken over {self.run.root}; this one was {self.incarnation}")

    def _latest(self) -> int:
        try:
            return latest_incarnation(self.run, self.name)
        except OSError as error:
            self.disk.met(self.run.rendezvous(self.name), error)
            raise

    # -- ends of groups ----------------------------------------------------------------------------------------

    def look_after_groups(self) -> None:
        """Handle every member that is gone, and every one that hangs."""
        for name, group in list(self.groups.items()):
            for member in group.ended():
                if f"{name}/{member.role}" not in self.done and self.groups.get(name) is group:
                    self.ended(name, member)
        for name, role, incarnation, reason in self.liveness.look(self.groups, self.done):
            self.hangs(name, role, incarnation, reason)
        for name, incarnation in self.liveness.silent:
            self.on_silence(name, incarnation)

    def look_after_waits(self) -> None:
        """End the run if a group has been waited for too long: others that wait for it are not judged meanwhile."""
        limit = longest_wait_s(self.config)
        for name, wait in self.liveness.lacking.items() if "hub" in self.names else ():
            if wait["since_s"] > limit and not all_done(self.run, self.config, name):
                text = f"{name}: {wait['why']}, and the others have waited for it for {wait['since_s']:.0f} s"
                text = f"{text}, allowed liveness.longest_wait_s={limit:g}; see its logs, and its job in squeue"
                # On a full disk at the next look, unless the wait for that ends the run before.
                with contextlib.suppress(OSError):
                    requests.ask_to_stop(self.run, EXIT_RETRY, text)

    def look_at_disk(self) -> None:
        """Say which disk the run waits for; RelaxError, all groups having been asked to save, once that is too long."""
        self.disk.look(self.liveness.disk, self.liveness.answered_at)
        if why := self.disk.too_long():
            self.stop()
            raise RelaxError(f"{why}; allowed liveness.longest_wait_s={self.disk.limit_s:g}")

    def ended(self, name: str, member: Member) -> None:
        """A process is gone: done if it left its mark, else its group goes and comes again."""
        self.each_wait()
        self._unwatch(member)
        limits, mark = self.config.liveness, self.groups[name].mark(member)
        reason = "" if mark else self._unmarked(name, member)
        found = Evidence(mark=mark, exit=lambda: reason)
        said = verdict(found, limits)
        if said.fate is Fate.DONE:
            self.done.add(f"{name}/{member.role}")
            return
        self.terminal.say(f"{name}: {said.reason}" if member.role == name else f"{name}: {member.role}: {said.reason}")
        if requests.asked_to_stop(self.run):
            # The others end it too; this one does at its next round.
            return
        # Asked once people know: Slurm may take seconds to answer.
        said = verdict(replace(found, ends=self.launcher(name).ending), limits)
        if said.fate is Fate.LEAVES:
            # Or the actor has seen the time limit come.
            self.interrupted += 1
        elif said.fate is Fate.HOPELESS:
            self.give_up(name, said.reason, said.code)
        else:
            self.failed(name, said.reason)

    def _unmarked(self, name: str, member: Member) -> str:
        """Cause of the end of a member that could not say anything itself."""
        code = member.process.wait(timeout=30) if member.process else 0
        if code < 0:
            return f"ended by signal {-code}"
        return ": ".join([f"ended with code {code} and without a mark", self.groups[name].last_words(member)])

    def hangs(self, name: str, role: str, incarnation: int, reason: str) -> None:
        """A role lives but is of no use: its group is dead, unless that incarnation is another's already."""
        group = self.groups.get(name)
        if not role and group is None and "hub" in self.groups:
            # Its own supervisor may be as dead: at least what it held goes to others.
            self.terminal.say(f"{name}: {reason}; what incarnation {incarnation} held is given to others")
            self.client.status.down(name, incarnation)
        if group is None or (incarnation and incarnation != group.incarnation):
            return
        self.terminal.say(f"{name}: {role} {reason}, taken for dead; stacks: {self.run.logs(name, group.incarnation)}")
        group.dump_stacks()
        self.failed(name, reason)

    def _hub_incarnation(self) -> int:
        card = latest_card(self.run, "hub")
        return card.incarnation if card else 0

    def failed(self, name: str, reason: str) -> None:
        """End what is left of a group, tell the queue, and have it started again where its policy says."""
        self.check_fenced()
        self.forget(name)
        # If not now it is judged at its next end.
        self.at_next_look(lambda: self.judge(name, reason))
        self.bring_back(name, reason)

    def judge(self, name: str, reason: str) -> None:
        """Give up the run where that is the policy of a group that has failed, and on one that goes in circles."""
        if group_of(self.config, name).on_failure == "stop_run":
            self.give_up(name, f"{reason}; groups.{name}.on_failure is stop_run", RelaxError.exit_code)
        self._count_failure(name, reason)

    def bring_back(self, name: str, reason: str) -> None:
        """Have a group started again as its policy says; later, if what that needs does not answer now."""
        self.each_wait()
        now = time.monotonic()
        _, since, _ = self.again.pop(name, ("", now, now))
        try:
            in_place = group_of(self.config, name).on_failure == "restart" and name not in self.unfit
            if in_place and self.launcher(name).whole(name):
                self.start(name)
            else:
                self.hand_over(name, reason)
        except (Unavailable, OSError) as error:
            passes = isinstance(error, NoRoom) or may_pass(error)
            if not passes and (now - since > _OUTAGE_S or not getattr(error, "later", True)):
                raise
            self.again[name] = (reason, since, time.monotonic() + _AGAIN_S)
            self.terminal.say(f"{name}: cannot be brought back yet, tried again in {_AGAIN_S:.0f} s: {error}")

    def try_again(self) -> None:
        """Bring back what could not be brought back before."""
        for name, (reason, _, due) in list(self.again.items()):
            if time.monotonic() >= due:
                self.check_fenced()
                self.bring_back(name, reason)

    def _count_failure(self, name: str, reason: str) -> None:
        """Give up on a group that goes in circles, if not for want of room on a disk."""
        limit = self.config.liveness.max_restarts
        times = fruitless(self.run, name, self.attempt, self.progress())
        if times > limit and not self.disk.hinders():
            text = f"ended {times} times without new samples, steps or checkpoints between"
            text = f"{text}, allowed liveness.max_restarts={limit}; the last time: {reason}"
            self.give_up(name, text, EXIT_NO_PROGRESS)

    def hand_over(self, name: str, reason: str) -> None:
        """Give a group to a job of its own; where that cannot be, start it again in place, or make way."""
        self.disk.check_room()
        self.ahead.drop(name)
        self.terminal.say(f"{name}: not here any more: {reason}")
        if job := self.launcher(name).hand_over(name, reason):
            self.elsewhere[name] = job
            self.terminal.say(f"{name}: goes on in job {job}")
        elif self.launcher(name).lost(name):
            self.make_way(name)
        else:
            self.start(name)

    def make_way(self, name: str) -> None:
        """End the job for its successor: there is no place for a group in this one."""
        self.terminal.say(f"{name}: no other job can be had for it (see site.sbatch_on_nodes and spares): making way")
        self.interrupted += 1

    def replace_elsewhere(self, name: str, reason: str) -> None:
        """Replace a group that ran in a job of its own and has lost that too."""
        self.terminal.say(f"{name}: {reason}")
        self.judge(name, reason)
        if job := self.launcher(name).hand_over(name, reason):
            self.elsewhere[name] = job
        else:
            self.make_way(name)

    def forget(self, name: str) -> None:
        """End what is left of a group and stop watching it; the queue takes back what it held."""
        group = self.groups[name]
        for member in group.members:
            self._unwatch(member)
        group.end()
        del self.groups[name]
        self.done -= {f"{name}/{role}" for role in roles_of(self.config, name)}
        if self.client and name != "hub":
            self.client.status.down(name, group.incarnation)

    def _unwatch(self, member: Member) -> None:
        if member.pidfd >= 0 and member.pidfd in self.selector.get_map():
            self.selector.unregister(member.pidfd)

    def give_up(self, name: str, reason: str, code: int) -> None:
        """End the run with an error that says where to look; other supervisors of the run end theirs too."""
        text = f"{name}: {reason} (log: {self.run.logs(name, latest_incarnation(self.run, name))})"
        with contextlib.suppress(OSError):
            patiently(self.run.stop, lambda: requests.ask_to_stop(self.run, code, text), for_at_most(_AGAIN_S))
        raise {EXIT_CONFIG: ConfigError, EXIT_NO_PROGRESS: NoProgressError}.get(code, RelaxError)(text)

    # -- requests ----------------------------------------------------------------------------------------------

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
        """Whether a request about ``name`` is for this supervisor; groups elsewhere have their own."""
        return name in self.groups or name in self.again or (self.elastic and bool(base_name(name, self.config.groups)))

    def _serve(self, request: Request) -> None:
        name = request.group
        # Whatever it was changed to: it shall find no rank that began before.
        self.ahead.drop(name)
        if request.op != "start":
            self.again.pop(name, None)
        if name in self.groups and request.op != "start":
            self.end_in_order([name])
            self.forget(name)
        if request.op in ("start", "restart") and name not in self.groups:
            self.names += [name] if name not in self.names else []
            self.start_soon(name)
        elif request.op == "release" and self.elastic:
            self.names = [other for other in self.names if other != name]
        elif request.op == "release":
            self.launcher(name).hand_over(name, RELEASED)
            self.elsewhere[name] = ""
            self.released.add(name)

    # -- the end -----------------------------------------------------------------------------------------------

    def finished(self) -> bool:
        """Every role of these groups but the controller is done; with the hub here, of all groups of the run."""
        if not all(self._all_done(name) for name in self.names):
            return False
        return "hub" not in self.names or all(self._left(name) for name in self._others())

    def _all_done(self, name: str) -> bool:
        roles = {f"{name}/{role}" for role in roles_of(self.config, name)} - {"hub/controller"}
        if name not in self.groups:
            self.done |= {key for key in roles - self.done if is_done(self.run, name, key.partition("/")[2])}
        return roles <= self.done

    def _others(self) -> list[str]:
        """Groups of the run that are supervised elsewhere."""
        return [name for name in members_of(self.run, self.config) if name not in self.groups]

    def _left(self, name: str) -> bool:
        """Whether a group that is supervised elsewhere needs the hub no more."""
        gone = self.run.finished.exists() and last_beat_s(self.run, name) > self.config.liveness.lease_s
        return gone or all_ended(self.run, self.config, name)

    def end_hub(self) -> None:
        """End the hub when all others are done: let the controller flush and go."""
        if "hub" in self.groups:
            self.end_in_order(["hub"])
        self.terminal.show_progress()

    def stop(self) -> Outcome:
        """Asked to end early: the actor saves at its next step's edge, then everything goes."""
        self.check_fenced()
        self.ahead.dismiss()
        if self.interrupted:
            self.on_interrupt()
        asked = requests.asked_to_stop(self.run)
        self.terminal.say(f"stopping: {asked['reason']}" if asked else "stopping; a second signal stops at once")
        for part in self._stop_order([*self.groups, *self._others()]):
            part = [name for name in part if name in self.groups or asked or self.take_along(name)]
            own = set(part) & self.groups.keys()
            # Others are waited for by who comes after them, no more: of some there may be nobody left.
            self.end_in_order(sorted(own) if own == self.groups.keys() else part)
            for name in own:
                self.forget(name)
        self.terminal.say("stopped")
        return Outcome.STOPPED if asked else Outcome.INTERRUPTED

    def end_in_order(self, names: list[str]) -> None:
        """Ask groups to end, and wait for it; one more signal, a deadline, or a stop at once cuts the waiting short."""
        signals = self.interrupted
        for name in set(names) & self.groups.keys():
            self.groups[name].ask_to_end()
        deadline = time.monotonic() + self.config.liveness.stop_timeout_s
        while any(map(self._lives, names)) and self.interrupted == signals and time.monotonic() < deadline:
            if requests.asked_to_stop(self.run).get("now"):
                return
            self.wait(_STOP_LOOK_S)

    def _lives(self, name: str) -> bool:
        group = self.groups.get(name)
        return group.alive() if group else not all_ended(self.run, self.config, name)

    def _stop_order(self, names: list[str]) -> list[list[str]]:
        """Order in which groups are stopped: trainers while they can still be fed, the others together, the hub
        last."""
        trainers = set(trainers_of(self.config.groups).values())
        fed = [name for name in names if name != "hub" and name in trainers]
        others = [name for name in names if name not in (*fed, "hub")]
        return [fed, others, ["hub"] if "hub" in names else []]
