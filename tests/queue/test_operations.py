"""Operations on engines in the queue: which requests are accepted, which engines they concern, and
in which state they end, also after a restart of the hub."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgpack
import pytest

from relax_hpc.base.errors import DeadlineError
from relax_hpc.base.versions import Version
from relax_hpc.queue.client import QueueClient
from relax_hpc.queue.controller.handlers import operations as handlers
from relax_hpc.queue.controller.state.operations import KEPT
from relax_hpc.queue.controller.state.queue_state import QueueState
from relax_hpc.queue.operations import IN, OUT, OperationRefused
from relax_hpc.queue.plan import EnginePlan, Plan
from tests.helpers.queue_helpers import in_thread, make_run, small
from tests.helpers.queue_in_memory import InMemory, contents

FIRST = Version(1, 0)
URLS = ["http://10.0.0.1:30000", "http://10.0.0.2:30000"]


class Hub(InMemory):
    """A hub in memory whose clock the test moves, and whose engines the test lets serve."""

    def __init__(self, plan: EnginePlan, monkeypatch: pytest.MonkeyPatch) -> None:
        config = small()
        super().__init__(Plan.from_config(config))
        object.__setattr__(self.plan, "engine_plan", plan)
        self.now, self.numbers = 1000.0, iter(range(1, 10_000))
        monkeypatch.setattr(handlers.time, "time", lambda: self.now)
        self.report({"rollout": plan.engines})

    def request(self, op: str, /, group: str = "hub", **args: Any) -> dict[str, Any]:
        return self.ask(group, 1, str(next(self.numbers)), op, **args)

    def report(
        self, groups: dict[str, int], without: Sequence[str] = (), taken: Sequence[str] = ()
    ) -> None:
        content = {name: {"engines": count} for name, count in groups.items()}
        self.request(
            "engines_report",
            group="supervisor",
            groups=content,
            without=[*without],
            taken=[*taken],
        )

    def create(self, kind: str, key: str = "", **body: Any) -> dict[str, Any]:
        answer = self.request("operation_create", kind=kind, body=body, timeout_s=60.0, key=key)
        return answer.get("operation", answer) | {"created": answer.get("created")}

    def refusal(self, kind: str, key: str = "", **body: Any) -> str:
        answer = self.request("operation_create", kind=kind, body=body, timeout_s=60.0, key=key)
        return answer.get("refused", "")

    def serve(self, *engines: str, version: Version = FIRST) -> None:
        for engine in engines:
            self.request(
                "serve", group=engine.partition("/")[0], reader=engine, version=str(version)
            )
        self.update_operations()

    def leave(self, *engines: str) -> None:
        self.serve(*engines, version=Version(0, 0))

    def get(self, id: str) -> dict[str, Any]:
        return self.request("operation_get", id=id)["operation"]

    def state_of(self, id: str) -> str:
        return self.get(id)["state"]


@pytest.fixture
def make_hub(monkeypatch: pytest.MonkeyPatch):
    def make(**plan: Any) -> Hub:
        return Hub(EnginePlan(**{"engines": 2, **plan}), monkeypatch)

    return make


# -- which engines a request concerns --------------------------------------------------------------


def test_targets_use_removed_engines_first_and_round_up_to_whole_groups(make_hub) -> None:
    hub = make_hub()
    hub.report({"rollout": 2, "rollout-3": 2}, without=["rollout/1"], taken=["rollout-2"])
    made = hub.create(OUT, num_replicas=5)
    assert made["engines"] == ["rollout/1", "rollout-4/0", "rollout-4/1"]
    assert made["detail"] == "rounded up to whole groups of 2 engines: 6 instead of 5"
    assert made["state"] == "PENDING" and made["id"] == "so-000001"


def test_new_groups_have_as_many_engines_as_the_resubmitted_group(make_hub) -> None:
    hub = make_hub()
    hub.report({"rollout": 1})
    assert hub.create(OUT, groups=2)["engines"] == ["rollout-2/0"]


def test_the_last_engines_leave_first_and_one_of_each_process_stays(make_hub) -> None:
    groups = {"rollout": 4, "rollout-2": 4, "rollout-10": 4}
    for target, engines in (
        (8, ["rollout-10/0", "rollout-10/1", "rollout-10/2", "rollout-10/3"]),
        (3, 9),
        (2, 10),
    ):
        hub = make_hub(engines=4, processes=2)
        hub.report(groups)
        made = hub.create(IN, num_replicas=target)
        if isinstance(engines, list):
            assert made["engines"] == engines
        else:
            assert len(made["engines"]) == engines
            assert {"rollout/0", "rollout/2"}.isdisjoint(made["engines"])
    hub = make_hub(engines=4, processes=2)
    assert hub.refusal(IN, num_replicas=1) == "protected"
    assert hub.refusal(IN, engines=["rollout/2", "rollout/3"]) == "protected"
    assert hub.create(IN, engines=["rollout/3"])["engines"] == ["rollout/3"]


def test_a_part_of_a_member_stays_when_a_target_would_cut_it(make_hub) -> None:
    hub = make_hub()
    hub.report({"rollout": 2, "rollout-2": 2})
    made = hub.create(IN, num_replicas=3)
    assert (made["state"], made["engines"]) == ("NOOP", [])
    assert "rounded up to whole groups" in made["detail"]
    assert hub.create(IN, relative=2)["engines"] == ["rollout-2/0", "rollout-2/1"]


@pytest.mark.parametrize(
    ("kind", "body", "code"),
    [
        (OUT, {}, "bad_request"),
        (OUT, {"num_replicas": 2, "relative": 1}, "bad_request"),
        (OUT, {"num_replicas": -1}, "bad_request"),
        (OUT, {"num_replicas": True}, "bad_request"),
        (OUT, {"num_replicas": "4"}, "bad_request"),
        (OUT, {"num_replicas": 9}, "bad_request"),
        (OUT, {"replicas": 4}, "bad_request"),
        (OUT, {"num_replicas": 4, "model_name": "other"}, "bad_request"),
        (OUT, {"num_replicas": 4, "timeout_secs": 0}, "bad_request"),
        (OUT, {"num_replicas": 4, "force": True}, "bad_request"),
        (OUT, {"engine_urls": ["ftp://a"]}, "bad_request"),
        (OUT, {"engine_urls": ["http://user:password@a:1"]}, "bad_request"),
        (OUT, {"engine_urls": ["http://a:99999"]}, "bad_request"),
        (OUT, {"engine_urls": [7]}, "bad_request"),
        (OUT, {"engines": ["rollout/7"]}, "unknown_engine"),
        (IN, {"engines": ["rollout-9/0"]}, "unknown_engine"),
        (IN, {"engine_urls": URLS}, "unknown_engine"),
        (IN, {"engines": ["rollout/0", "rollout/1"]}, "protected"),
        (IN, {"relative": 2}, "below_minimum"),
    ],
)
def test_a_bad_request_is_refused_with_its_code(make_hub, kind, body, code) -> None:
    hub = make_hub(max_engines=8)
    assert hub.refusal(kind, **body) == code
    assert not hub.state.operations.by_id and hub.state.operations.revision == 0


def test_groups_with_other_roles_have_no_members(make_hub) -> None:
    assert make_hub(has_members=False).refusal(OUT, num_replicas=4) == "bad_request"
    assert make_hub(colocated=True).refusal(OUT, num_replicas=4) == "colocate"
    assert make_hub(group="").refusal(OUT, num_replicas=4) == "bad_request"


def test_without_a_report_of_the_supervisor_nothing_is_decided(make_hub) -> None:
    hub = make_hub()
    hub.reported_groups.present = None
    assert hub.refusal(OUT, num_replicas=4) == "hub_away"


# -- repeated and concurrent requests --------------------------------------------------------------


def test_a_repeated_request_is_the_same_operation(make_hub) -> None:
    hub = make_hub()
    first = hub.create(OUT, "a key", num_replicas=4)
    assert first["created"]
    assert hub.create(OUT, "a key", num_replicas=4) == first | {"created": False}
    assert hub.refusal(OUT, "a key", num_replicas=6) == "key_reused"
    assert hub.create(OUT, num_replicas=4)["id"] == first["id"], "the same body, no key"
    assert hub.refusal(OUT, num_replicas=6) == "busy"
    assert hub.refusal(IN, engines=["rollout/1"]) == "busy"
    hub.serve(*first["engines"])
    hub.restart()
    assert hub.create(OUT, "a key", num_replicas=4)["state"] == "ACTIVE"


def test_a_dry_run_changes_nothing(make_hub) -> None:
    hub = make_hub()
    made = hub.create(OUT, num_replicas=4, dry_run=True)
    assert made["engines"] == ["rollout-2/0", "rollout-2/1"]
    assert not hub.state.operations.by_id


# -- states ----------------------------------------------------------------------------------------


def test_engines_that_serve_complete_a_scale_out(make_hub) -> None:
    hub = make_hub()
    id = hub.create(OUT, num_replicas=4)["id"]
    hub.request("operation_advance", id=id, state="CREATING", jobs={"rollout-2": "17"})
    hub.request("operation_advance", id=id, state="HEALTH_CHECKING")
    hub.request("operation_advance", id=id, state="CREATING", expected_start={"rollout-2": 5.0})
    assert hub.state_of(id) == "HEALTH_CHECKING", "states only go forward"
    hub.serve("rollout-2/0")
    assert hub.get(id)["done"] == ["rollout-2/0"]
    hub.serve("rollout-2/1")
    end = hub.get(id)
    assert [name for name, _ in end["history"]] == [
        *("PENDING", "CREATING", "HEALTH_CHECKING", "READY", "ACTIVE")
    ]
    assert end["jobs"] == {"rollout-2": "17"}
    hub.request("operation_advance", id=id, state="FAILED", reason="late")
    assert hub.get(id) == end, "a final state never changes"
    assert hub.request("operation_cancel", id=id)["refused"] == "too_late"


def test_the_hub_ends_an_operation_at_its_deadline(make_hub) -> None:
    hub = make_hub()
    id = hub.create(OUT, num_replicas=4, timeout_secs=10)["id"]
    hub.serve("rollout-2/0")
    hub.now += 10.0
    hub.update_operations()
    end = hub.get(id)
    assert (end["state"], end["reason"], end["leftover"]) == (
        *("PARTIAL", "timeout"),
        ["rollout-2/1"],
    )
    assert hub.refusal(OUT, num_replicas=8) == "busy", "its leftover is still being removed"
    hub.request("operation_removed", id=id, engines=["rollout-2/1"])
    assert hub.create(OUT, num_replicas=8)["created"]


def test_a_cancelled_operation_leaves_what_it_has_started(make_hub) -> None:
    hub = make_hub()
    id = hub.create(OUT, num_replicas=4)["id"]
    assert hub.request("operation_cancel", id=id)["operation"]["state"] == "CANCELLED"
    assert hub.request("operation_cancel", id=id)["operation"]["leftover"] == [
        *("rollout-2/0", "rollout-2/1")
    ]
    assert hub.request("operation_cancel", id="so-9")["refused"] == "unknown_operation"
    hub.serve("rollout-2/0", "rollout-2/1")
    assert hub.state_of(id) == "CANCELLED"


def test_engines_that_leave_move_a_scale_in_forward(make_hub) -> None:
    hub = make_hub()
    hub.serve("rollout/0", "rollout/1")
    id = hub.create(IN, engines=["rollout/1"])["id"]
    hub.request("operation_advance", id=id, state="DRAINING")
    hub.leave("rollout/1")
    assert hub.state_of(id) == "REMOVING"
    hub.request("operation_advance", id=id, state="COMPLETED")
    assert hub.get(id)["done"] == ["rollout/1"] and hub.state_of(id) == "COMPLETED"


# -- external engines ------------------------------------------------------------------------------


def test_an_operation_follows_its_external_engines(make_hub) -> None:
    hub = make_hub()
    made = hub.create(OUT, engine_urls=[*URLS, f"{URLS[0]}/"])
    assert made["engines"] == ["rollout/1000", "rollout/1001"]
    for phase in ("HEALTH_CHECKING", "PREFLIGHT", "WEIGHT_SYNCING"):
        for name in made["engines"]:
            hub.request("engine_report", name=name, state="joining", phase=phase)
        assert hub.state_of(made["id"]) == phase
    hub.request("engine_report", name="rollout/1000", state="active")
    hub.request(
        "engine_report",
        name="rollout/1001",
        state="left",
        reason="model_mismatch",
        detail="rope_theta: found 100, expected 1000000",
    )
    end = hub.get(made["id"])
    assert (end["state"], end["reason"], end["done"]) == (
        *("PARTIAL", "model_mismatch"),
        ["rollout/1000"],
    )
    hub.request("operation_removed", id=made["id"], engines=end["leftover"])
    again = hub.create(OUT, engine_urls=URLS)
    assert again["engines"] == ["rollout/1002"], "a number is never used again"
    hub.request("engine_report", name="rollout/1002", state="active")
    out = hub.create(IN, engine_urls=[URLS[1]])
    assert not hub.state.operations.external[1002].wanted
    hub.request("engine_report", name="rollout/1002", state="draining")
    assert hub.state_of(out["id"]) == "DRAINING"
    answer = hub.request("engine_report", name="rollout/1002", state="left")
    assert not answer["wanted"] and hub.state_of(out["id"]) == "COMPLETED"
    # A late report of its process does not bring it back.
    assert not hub.request("engine_report", name="rollout/1002", state="active")["wanted"]


def test_a_lost_engine_stays_wanted(make_hub) -> None:
    hub = make_hub()
    name = hub.create(OUT, engine_urls=URLS[:1])["engines"][0]
    hub.request("engine_report", name=name, state="active")
    hub.request("engine_report", name=name, state="lost", next_try=2000.0)
    assert hub.create(OUT, engine_urls=URLS[:1])["state"] == "NOOP"
    present = hub.request("engines_present")["external"][0]
    assert (present["state"], present["wanted"], present["next_try"]) == ("lost", True, 2000.0)


# -- the journal -----------------------------------------------------------------------------------


def test_a_replay_and_a_snapshot_give_the_same_operations(make_hub) -> None:
    hub = make_hub()
    for number in range(KEPT + 3):
        id = hub.create(OUT, str(number), engine_urls=[f"http://10.0.0.1:{number + 1}"])["id"]
        hub.request("engine_report", name=f"rollout/{1000 + number}", state="left")
        hub.request("operation_removed", id=id, engines=[f"rollout/{1000 + number}"])
    token = hub.request("member_token_add", digest="d" * 64, label="site B")["id"]
    hub.request("member_token_revoke", id=token)
    assert len(hub.state.operations.by_id) == KEPT
    assert len(hub.state.operations.external) == KEPT
    assert contents(hub.replayed()) == contents(hub.state)
    image = msgpack.unpackb(msgpack.packb(hub.state.dump()), strict_map_key=False)
    assert contents(QueueState.load(hub.plan, image)) == contents(hub.state)


def test_a_watcher_gets_each_change_and_only_supervisors_report_groups(tmp_path: Path) -> None:
    run, config = make_run(tmp_path), small()
    with in_thread(run, config), QueueClient(run, config, "supervisor", 1) as client:
        requests = client.operations
        with pytest.raises(OperationRefused, match="has not reported"):
            requests.create(OUT, {"num_replicas": 2}).result()
        requests.report_groups({"rollout": {"engines": 1, "state": "running"}}).result()
        assert requests.present().result().groups["rollout"]["state"] == "running"
        start = requests.watch(-1).result()
        assert requests.watch_change(start.revision, 0.05) is None
        watching = requests.watch(start.revision, 10.0)
        made = requests.create(OUT, {"num_replicas": 2}).result()
        assert made.created
        assert [operation.id for operation in watching.result().operations] == [made.operation.id]
        with pytest.raises(OperationRefused) as refused:
            requests.create(OUT, {"num_replicas": 3}).result()
        assert refused.value.code == "busy"
        assert requests.list(OUT, ["PENDING"]).result() == [made.operation]
        with pytest.raises(DeadlineError):
            requests.watch(watching.result().revision, 0.05).result()


def test_an_engine_that_serves_nothing_keeps_no_version(make_hub) -> None:
    hub = make_hub()
    hub.create(OUT, engine_urls=URLS[:1])
    weights = hub.state.weights
    for name, version in (("rollout/0", Version(1, 3)), ("rollout/1000", Version(0, 0))):
        hub.request("serve", group="rollout", reader=name, version=str(version))
    weights.published = {Version(1, number): "digest" for number in range(4)}
    weights.newest = Version(1, 3)
    assert weights.retirable(0) == [Version(1, number) for number in range(3)]
    hub.request("engine_report", group="rollout", name="rollout/1000", state="left")
    assert set(weights.readers) == {"rollout/0"}
