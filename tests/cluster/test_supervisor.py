"""Decisions of the supervisor when groups end: which group restarts, where, or that the run ends."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from relax_hpc.base.errors import (
    EXIT_CONFIG,
    EXIT_DONE,
    EXIT_RETRY,
    ConfigError,
    NoProgressError,
    RelaxError,
)
from relax_hpc.cluster.supervise import failures, requests, starts
from relax_hpc.cluster.supervise.disk_watch import NoDiskSpace
from relax_hpc.cluster.supervise.group import Unavailable
from relax_hpc.cluster.supervise.launch_records import read_mark
from relax_hpc.cluster.supervise.supervisor import Outcome
from relax_hpc.config.schema import GroupConfig
from relax_hpc.net.rendezvous.exit_mark import write_exit_mark
from relax_hpc.queue.client.status import StatusRequests
from tests.cluster.supervisor_helpers import Adopted, World, world_fixture  # noqa: F401

DISK_FULL = OSError(28, "No space left on device")


def fail_first(act: Callable[..., Any], *errors: BaseException) -> Callable[..., Any]:
    """Wrap `act` so that its first calls raise `errors`, one for each call."""
    remaining_errors = list(errors)

    def act_after_errors(*arguments: Any) -> Any:
        if remaining_errors:
            raise remaining_errors.pop(0)
        return act(*arguments)

    return act_after_errors


def test_a_failed_first_start_is_retried(world: World) -> None:
    world.start, world.plans = (
        fail_first(world.start, Unavailable("no answer")),
        {"rollout": ["done:0"]},
    )
    assert world.supervise("rollout") is Outcome.FINISHED
    assert world.started == [("rollout", 2)]


@pytest.mark.parametrize(("since_s", "is_over"), [(59.0, False), (61.0, True)])
def test_a_run_stops_cleanly_if_a_wait_for_a_group_exceeds_its_limit(
    world: World, since_s: float, is_over: bool
) -> None:
    world.config.liveness.longest_wait_s = 60.0

    def wait() -> None:
        world.supervisor.liveness.awaited_groups = {
            "actor": {"why": "is not there", "since_s": since_s}
        }

    stop = [wait, lambda: None, lambda: None, lambda: requests.request_stop(world.run)]
    assert world.supervise("hub", "rollout", then=world.once(*stop)) is Outcome.STOPPED
    stop_request = requests.read_stop_request(world.run)
    assert stop_request["code"] == (EXIT_RETRY if is_over else EXIT_DONE)
    assert ("actor: is not there, and the others have waited" in stop_request["reason"]) == is_over
    assert not world.told("down") or world.asked, "roles must be asked to stop"


def test_a_first_start_waits_for_disk_space(world: World) -> None:
    world.start, world.plans = fail_first(world.start, DISK_FULL), {"rollout": ["done:0"]}
    assert world.supervise("rollout") is Outcome.FINISHED


def test_a_stop_request_is_retried_on_a_full_disk(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.config.liveness.longest_wait_s = 60.0

    def wait() -> None:
        world.supervisor.liveness.awaited_groups = {
            "actor": {"why": "is not there", "since_s": 61.0}
        }

    monkeypatch.setattr(requests, "request_stop", fail_first(requests.request_stop, DISK_FULL))
    assert world.supervise("hub", "rollout", then=wait) is Outcome.STOPPED
    assert requests.read_stop_request(world.run)["code"] == EXIT_RETRY


@pytest.mark.parametrize(
    ("fault", "expected_log"), [("crashes", "ended with code 1"), ("killed", "ended by signal 9")]
)
def test_a_dead_group_restarts_while_the_others_continue(
    world: World, fault: str, expected_log: str
) -> None:
    world.plans = {"rollout": [fault, "done:0"], "actor": ["done:0"]}
    assert world.supervise("rollout", "actor") is Outcome.FINISHED
    assert world.started == [("rollout", 1), ("actor", 1), ("rollout", 2)]
    assert world.told("down") == [{"group": "rollout", "incarnation": 1}]
    assert expected_log in world.said()
    assert "ended by its supervisor" in read_mark(world.run, "rollout", 1, "rollout")["reason"]


def test_the_death_of_one_role_restarts_its_group(world: World) -> None:
    world.config.groups["both"] = GroupConfig(roles=["actor", "reference"])
    world.on_start = lambda name, incarnation: (
        incarnation == 1 and write_exit_mark(world.run.exit_mark("both", 1, "actor"), 75, "oh")
    )
    world.plans = {"both": ["lives", "done:0"]}

    def kill_first() -> None:
        group = world.supervisor.table.supervised["both"]
        if group.incarnation == 1:
            group.members[0].process.kill()

    assert world.supervise("both", then=kill_first) is Outcome.FINISHED
    assert world.started == [("both", 1), ("both", 2)]
    assert "both: actor: oh" in world.said()


@pytest.mark.parametrize(
    ("mark", "error", "code"), [("failed:78", ConfigError, 78), ("failed:93", NoProgressError, 93)]
)
def test_a_permanent_error_ends_the_run(world: World, mark: str, error: type, code: int) -> None:
    world.plans = {"actor": [mark]}
    with pytest.raises(error, match=r"actor: it says so \(log: .*logs/actor/inc-000001"):
        world.supervise("rollout", "actor")
    assert requests.read_stop_request(world.run)["code"] == code
    assert world.started == [("rollout", 1), ("actor", 1)]


def hub_answers(monkeypatch: pytest.MonkeyPatch, trained_steps: int, worked: list[str]) -> None:
    """Make the hub answer with this progress."""
    nothing: dict[str, Any] = {
        "accepted": 0,
        "checkpoints": [],
        "lacking": {},
        "readers": {},
        "disk": [],
        "beats": {},
    }
    answer: Future[Any] = Future()
    answer.set_result(SimpleNamespace(trained_steps=trained_steps, worked=worked, **nothing))
    monkeypatch.setattr(StatusRequests, "get", lambda self, timeout=None: answer)


def test_a_programming_error_before_progress_ends_the_run(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work of another role is not progress of this role."""
    hub_answers(monkeypatch, trained_steps=0, worked=["rollout"])
    world.plans = {"actor": ["mistyped"]}
    with pytest.raises(ConfigError, match=r"actor: NameError: name 'x' is not defined \(log: "):
        world.supervise("rollout", "actor")
    assert requests.read_stop_request(world.run)["code"] == 78
    assert world.started == [("rollout", 1), ("actor", 1)]


@pytest.mark.parametrize(
    "progress",
    [{"trained_steps": 1, "worked": []}, {"trained_steps": 0, "worked": ["actor"]}, None],
    ids=["a_step", "this_role", "unknown"],
)
def test_a_programming_error_after_progress_is_retried(
    world: World, monkeypatch: pytest.MonkeyPatch, progress: dict[str, Any] | None
) -> None:
    """If the hub does not answer, the progress is unknown, and the error is retried too."""
    world.config.liveness.lease_s = 0.1
    if progress:
        hub_answers(monkeypatch, **progress)
    world.plans = {"actor": ["mistyped", "done:0"]}
    assert world.supervise("actor") is Outcome.FINISHED
    assert world.started == [("actor", 1), ("actor", 2)]


def test_on_failure_stop_run_ends_the_run(world: World) -> None:
    world.config.groups["actor"].on_failure = "stop_run"
    world.plans = {"actor": ["failed:75"]}
    with pytest.raises(RelaxError, match=r"it says so; groups.actor.on_failure is stop_run"):
        world.supervise("actor")
    assert requests.read_stop_request(world.run)["code"] == 75


@pytest.mark.parametrize(("policy", "has_all_nodes"), [("resubmit", True), ("restart", False)])
def test_a_group_moves_to_a_separate_job(world: World, policy: str, has_all_nodes: bool) -> None:
    world.config.groups["rollout"].on_failure = policy
    world.plans = {"rollout": ["crashes"]}
    world.answers |= {"whole": has_all_nodes, "hand_over": "77"}
    assert world.supervise("rollout", then=world.go_on_in_a_job) is Outcome.FINISHED
    assert world.started == [("rollout", 1)] and world.supervisor.table.detached == {
        "rollout": "77"
    }
    assert [name for name, _ in world.handed] == ["rollout"]


def test_a_group_without_another_job_restarts_on_the_remaining_nodes(world: World) -> None:
    world.plans = {"rollout": ["crashes", "done:0"]}
    world.answers |= {"whole": False}
    assert world.supervise("rollout") is Outcome.FINISHED
    assert world.started == [("rollout", 1), ("rollout", 2)] and len(world.handed) == 1


def test_the_job_ends_if_a_group_has_no_nodes_and_no_other_job(world: World) -> None:
    world.plans = {"rollout": ["crashes"]}
    world.answers |= {"whole": False, "lost": True}
    assert world.supervise("rollout", "actor") is Outcome.INTERRUPTED
    assert (
        world.started == [("rollout", 1), ("actor", 1)]
        and "sbatch_on_nodes and spares" in world.said()
    )


def end_when_rollout_is_back(world: World) -> None:
    if ("rollout", 2) in world.started and "actor" in world.supervisor.table.supervised:
        world.end_the_actor()


@pytest.mark.parametrize(
    "error", [Unavailable("slurmctld is down"), OSError(28, "No space left on device")]
)
def test_a_restart_waits_for_the_end_of_an_outage(world: World, error: Exception) -> None:
    world.plans = {"rollout": ["crashes", "done:0"]}
    world.answers |= {"whole": [error, False, True], "hand_over": [error]}
    assert (
        world.supervise("rollout", "actor", then=lambda: end_when_rollout_is_back(world))
        is Outcome.FINISHED
    )
    assert world.started == [("rollout", 1), ("actor", 1), ("rollout", 2)]
    assert world.said().count("rollout: cannot be restarted yet") == 2


@pytest.mark.parametrize(
    "function",
    ["requests.pending_requests", "requests.read_stop_request", "failures.count_fruitless_starts"],
)
def test_a_failed_read_is_retried(
    world: World, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    """Reads fail as on a shared file system whose server does not answer. A group that ended in the
    meantime restarts."""
    module_name, _, name = function.partition(".")
    module = {"requests": requests, "failures": failures}[module_name]
    original, errors = getattr(module, name), [OSError(5, "Input/output error")] * 3

    def read(*arguments: Any, **keywords: Any) -> Any:
        if errors and len(world.started) > 1:
            raise errors.pop()
        return original(*arguments, **keywords)

    monkeypatch.setattr(module, name, read)
    world.plans = {"rollout": ["crashes", "crashes", "crashes", "crashes", "done:0"]}
    assert (
        world.supervise("rollout", "actor", then=lambda: end_when_rollout_is_back(world))
        is Outcome.FINISHED
    )
    assert not errors and [name for name, _ in world.started].count("rollout") == 5
    # On a busy machine the wait can end between two errors. Then the log has the line again.
    assert "Input/output error; see whether its file system is well" in world.said()


def test_no_job_is_submitted_while_the_disk_is_full(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job could not be recorded, so the next attempt would submit another."""
    monkeypatch.setattr(starts, "_AGAIN_S", 0.0)
    world.plans, world.answers["whole"], disk_errors = {"actor": ["killed"]}, False, [True, True]

    def check_space() -> None:
        if "actor" in world.supervisor.table.supervised or not disk_errors:
            return
        disk_errors.pop()
        assert not world.handed
        raise NoDiskSpace("full")

    def then() -> None:
        world.supervisor.disk.check_space = check_space
        if world.handed:
            requests.request_stop(world.run)

    world.answers["hand_over"] = "12"
    world.on_start = lambda *_: setattr(world.supervisor.disk, "check_space", check_space)
    assert world.supervise("actor", then=then) is Outcome.STOPPED
    assert [name for name, _ in world.handed] == ["actor"] and not disk_errors


def test_a_permanent_slurm_error_is_raised(world: World) -> None:
    error = Unavailable("sbatch: invalid partition")
    error.is_temporary = False
    world.plans, world.answers = {"rollout": ["crashes"]}, world.answers | {"whole": error}
    with pytest.raises(Unavailable):
        world.supervise("rollout")


def test_restarts_without_progress_end_the_run(world: World) -> None:
    world.config.liveness.max_restarts = 2
    world.plans = {"rollout": ["crashes"]}
    with pytest.raises(
        NoProgressError, match=r"rollout: ended 3 times without new samples.*max_restarts=2"
    ):
        world.supervise("rollout", "actor")
    assert world.started == [("rollout", 1), ("actor", 1), ("rollout", 2), ("rollout", 3)]
    assert requests.read_stop_request(world.run)["code"] == 93


MEMORY_ERROR = (
    "engine:ValueError: Loaded weights leave no memory, raise mem_fraction_static above 0.14"
)


def test_an_engine_that_fails_twice_with_the_same_error_ends_the_run(world: World) -> None:
    """Numbers in the error can differ, and other roles can work in the meantime."""
    world.plans = {"rollout": [f"{MEMORY_ERROR}6", f"{MEMORY_ERROR}7"]}

    def progress(name: str, incarnation: int) -> None:
        world.supervisor.liveness.progress = (incarnation, 0, 0)

    world.on_start = progress
    text = r"rollout: cannot start.*same error: ValueError: .*above 0\.147; correct"
    with pytest.raises(ConfigError, match=text):
        world.supervise("rollout", "actor")
    assert world.started == [("rollout", 1), ("actor", 1), ("rollout", 2)]
    assert requests.read_stop_request(world.run)["code"] == EXIT_CONFIG


@pytest.mark.parametrize(
    "plan",
    [
        [MEMORY_ERROR, "engine:OSError: Stale file handle", MEMORY_ERROR, "done:0"],
        ["crashes", MEMORY_ERROR, MEMORY_ERROR, "done:0"],
        [MEMORY_ERROR, "killed", MEMORY_ERROR, "done:0"],
    ],
    ids=["other_errors", "worked_before", "killed_between"],
)
def test_an_engine_with_different_errors_is_restarted(world: World, plan: list[str]) -> None:
    world.plans = {"rollout": plan}
    assert world.supervise("rollout") is Outcome.FINISHED
    assert len(world.started) == 4


@pytest.mark.parametrize("layout", ["local", "jobs"])
def test_an_additional_group_that_never_starts_is_left_out(world: World, layout: str) -> None:
    world.config.layout = layout
    world.plans = {"rollout": ["done:0"], "rollout-2": [MEMORY_ERROR]}
    names = ["rollout", "rollout-2"] if layout == "local" else ["rollout-2"]
    outcome = world.supervise(*names)
    assert outcome is (Outcome.FINISHED if layout == "local" else Outcome.RELEASED)
    assert [name for name, _ in world.started].count("rollout-2") == 2
    text = "rollout-2: not started again, the run continues without it: ValueError: Loaded"
    assert text in world.said()
    assert not requests.read_stop_request(world.run)


def test_progress_between_restarts_resets_their_count(world: World) -> None:
    world.config.liveness.max_restarts = 1
    world.plans = {"rollout": [*["crashes"] * 5, "done:0"]}

    def progress(name: str, incarnation: int) -> None:
        world.supervisor.liveness.progress = (incarnation, 0, 0)

    world.on_start = progress
    assert world.supervise("rollout") is Outcome.FINISHED
    assert len(world.started) == 6


def test_a_hanging_role_restarts_its_group(world: World) -> None:
    world.plans = {"rollout": ["deaf", "done:0"]}
    hangs = world.once(
        lambda: world.supervisor.handle_dead_role("rollout", "rollout", 1, "has given no sign")
    )
    assert world.supervise("rollout", then=hangs) is Outcome.FINISHED
    world.supervisor.handle_dead_role("rollout", "rollout", 1, "of an incarnation that is over")
    assert world.started == [("rollout", 1), ("rollout", 2)]


@pytest.mark.parametrize("layout", ["jobs", "het"])
def test_the_hub_releases_tickets_of_a_silent_group(world: World, layout: str) -> None:
    names = ("hub", "actor") if layout == "het" else ("actor",)
    silent = world.once(
        lambda: world.supervisor.handle_dead_role("rollout-2", "", 3, "has given no sign"),
        lambda: requests.request_stop(world.run),
    )
    world.supervise(*names, then=silent)
    expected = [{"group": "rollout-2", "incarnation": 3}] if "hub" in names else []
    assert [message for message in world.told("down") if message["group"] != "actor"] == expected
    assert [name for name, _ in world.started] == list(names)
