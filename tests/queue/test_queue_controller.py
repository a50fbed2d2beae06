"""The controller with real clients: whole steps, notification without polling, requests that are
asked twice."""

from __future__ import annotations

import itertools
import json
import time
from types import SimpleNamespace

import numpy as np
import pytest

from relax_hpc.base.versions import Version
from relax_hpc.net.transport.wire import pack, unpack
from relax_hpc.queue.client import QueueClient
from relax_hpc.queue.controller.server import Controller
from relax_hpc.queue.lengths import pack_lengths
from tests.helpers.queue_helpers import (
    BUDGET,
    Roles,
    dial,
    in_thread,
    make_run,
    next_payload,
    rows_of,
    small,
)


@pytest.mark.parametrize(("staleness", "episodes"), [(0, b"\1\1"), (2, b"\3\1")])
def test_a_run_from_its_first_to_its_last_step(tmp_path, staleness, episodes):
    run, config = make_run(tmp_path / "run"), small(steps=3, staleness=staleness, keep_steps=0)
    with in_thread(run, config) as controller, Roles(run, config, episodes=episodes) as roles:
        version = roles.start()
        for step in range(3):
            if step == 0 or not staleness:
                tickets = roles.generate(Version(1, step))
                assert tickets == list(range(2 * step, 2 * (step + 1 + staleness)))
            while controller.state.tasks["advantages"].position < 2 * (step + 1):
                roles.learn(version if staleness else Version(1, step))
            rows = roles.train(step)
            assert [row["row_id"] for row in rows] == [
                f"{ticket:09d}.{episode:02d}.{row:02d}"
                for ticket, episode in itertools.product((2 * step, 2 * step + 1), range(2))
                for row in range(episodes[episode])
            ]
            assert np.array_equal(rows[0]["ref_logprobs"], rows[0]["rollout_logprobs"] * 2)
            roles["actor"].connection.call("checkpoint", step=step + 1, name=f"c{step}", digest="d")
        assert roles["reference"].claim("reference", BUDGET) is None
        roles["actor"].connection.call("status")
        assert list(run.shards.iterdir()) == []
    events = [json.loads(line) for line in run.events.read_text().splitlines()]
    trained = [event["id"] for event in events if event["what"] == "trained"]
    assert len(trained) == len(set(trained)) == 6 * sum(episodes)


def test_status_names_the_roles_that_have_worked(tmp_path):
    """So that a supervisor can tell a first failure of a role from one after work. It survives a
    restart of the hub."""
    run, config = make_run(tmp_path / "run"), small(steps=3)
    with in_thread(run, config), Roles(run, config) as roles:
        version = roles.start()
        tickets = roles.admit(version)
        assert roles["actor"].status.get().result(60).worked == []
        assert roles["rollout"].put_generated(rows_of(tickets, version)) == {}
        roles["rollout"].settle()
        assert roles["actor"].status.get().result(60).worked == ["rollout"]
        roles.learn(version)
    with in_thread(run, config), Roles(run, config) as roles:
        middle = ["actor_fwd", "advantages", "reference"]
        assert roles["actor"].status.get().result(60).worked == [*middle, "rollout"]
        roles.train(0)
        assert "actor" in roles["actor"].status.get().result(60).worked


def test_nobody_is_told_what_a_maker_had_in_memory_whose_lease_is_over(tmp_path):
    run, config = make_run(tmp_path / "run"), small()
    with in_thread(run, config), Roles(run, config) as roles:
        roles.generate(roles.start())
        reader = roles["reference"]
        claim = reader.claim("reference", BUDGET)
        assert [list(shard["planes"]) for shard in claim.shards] == [["shm", "tcp"]]
        reader.return_claim(claim)
        roles["actor"].connection.call("down", group="rollout", incarnation=1)
        claim = reader.claim("reference", BUDGET)
        assert [shard["planes"] for shard in claim.shards] == [{}]
        assert len(reader.rows(claim)) == 4 and reader.store.plane_counts.shards == {"file": 1}


def test_a_waiting_consumer_is_told_by_the_put_itself(tmp_path):
    """No polling quantum: with a controller that would sleep for an hour, the answer still comes at
    once."""
    run, config = make_run(tmp_path / "run"), small()
    config.liveness.beat_s = 300.0
    with in_thread(run, config) as controller, Roles(run, config) as roles:
        controller._wait_s = lambda: 3600.0
        version = roles.start()
        tickets = roles.admit(version)
        waiting = roles["reference"].submit_claim("reference", BUDGET)
        news = roles["rollout"].connection.submit("next_version", after=str(version))
        roles["reference"].connection.call("status")
        roles["rollout"].put_generated(rows_of(tickets, version))
        assert waiting.result(timeout=60).tickets == (0, 1)
        roles["actor"].connection.call("publish", version="i000001-v000001", digest="d")
        assert news.result(timeout=60)["version"] == "i000001-v000001"


def test_who_holds_many_shards_finds_the_next_controller_too(tmp_path):
    run, config = make_run(tmp_path / "run"), small()
    config.liveness.beat_s = 0.1
    names = [f"rollout-i000001-{number:060d}.h5" for number in range(2000)]
    with QueueClient(run, config, "rollout", 1) as client:
        freed: list[str] = []
        client._store = client.connection.shards = SimpleNamespace(
            holds=lambda: names[len(freed) :],
            free=freed.extend,
            settle=lambda _: True,
            close=lambda: None,
        )
        for _ in range(2):
            freed.clear()
            with in_thread(run, config):
                assert client.connection.call("status", timeout=10.0)["trained_steps"] == 0
                deadline = time.monotonic() + 10.0
                while freed != names:
                    assert time.monotonic() < deadline, "nobody needs them"


class Wire:
    """Speaks the protocol by hand, so that a request can be repeated with its key."""

    def __init__(self, controller: Controller) -> None:
        self.connection = dial(controller.run, controller.endpoint, controller.incarnation)

    def ask(self, group: str, number: int, op: str, **args):
        message = {
            "id": number,
            "client": f"{group}-wire",
            "group": group,
            "incarnation": 1,
            "op": op,
            "args": args,
        }
        self.connection.send(pack({**message, "patience": 5.0}))
        reply = unpack(next_payload(self.connection))
        assert "error" not in reply, reply
        return reply["result"]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.connection.close()


def requests(group_rows: list[dict]):
    """A step as raw requests, in order: (group, op, arguments from earlier answers)."""
    version = "i000001-v000000"
    yield "actor", "resume", {"step": 0}
    yield "actor", "publish", {"version": version, "digest": "d"}
    yield "rollout", "serve", {"reader": "r", "version": version}
    tickets = (yield "rollout", "admit", {"reader": "r", "count": 9})["tickets"]
    assert tickets == [0, 1]
    yield "rollout", "fail", {"ticket": 0, "attempt": 0, "reason": "reward"}
    fields = ["token_ids", "reward"]
    yield (
        "rollout",
        "put",
        {"shard": {"name": "gen"}, "rows": group_rows, "fields": fields, "lease": 0},
    )
    for task, gives in (
        ("actor_fwd", ["old_logprobs", "old_logprob_version"]),
        ("reference", ["ref_logprobs"]),
    ):
        window = {"task": task, "budget": BUDGET, "boundary": 2}
        claim = yield task, "claim", window
        yield task, "release", {"lease": claim["lease"]}
        again = yield task, "claim", window
        assert again == {**claim, "lease": claim["lease"] + 1}
        versions = group_rows[0]["versions"] if task == "actor_fwd" else []
        rows = [{**row, "lengths": b"", "versions": versions} for row in group_rows]
        yield (
            task,
            "put",
            {"shard": {"name": task}, "rows": rows, "fields": gives, "lease": again["lease"]},
        )
    claim = yield "hub", "claim", {"task": "advantages", "budget": BUDGET, "boundary": 2}
    put = {
        "shard": {"name": "adv"},
        "rows": rows,
        "fields": ["advantages"],
        "lease": claim["lease"],
    }
    yield "hub", "put", put
    dealt = {"ranks": 2, "max_tokens": 10, "batch": 1}
    claim = yield "actor", "claim", {"task": "actor", "budget": BUDGET, "boundary": 2, **dealt}
    assert sorted(row for rank in claim["assignment"] for part in rank for row in part) == [
        0,
        1,
        2,
        3,
    ]
    assert [shard["name"] for shard in claim["shards"]] == ["gen", "actor_fwd", "reference", "adv"]
    yield "actor", "publish", {"version": "i000001-v000001", "digest": "d"}
    yield "actor", "trained", {"step": 0, "leases": [claim["lease"]]}
    yield "actor", "checkpoint", {"step": 1, "name": "c", "digest": "d"}


@pytest.mark.parametrize("restart", [False, True])
def test_every_request_asked_twice_has_the_effect_of_one(tmp_path, restart):
    run, config = make_run(tmp_path / "run"), small()
    rows = [
        {
            "ticket": t,
            "episodes": b"\1\1",
            "lengths": pack_lengths([5, 5]),
            "versions": [Version(1, 0).encode()],
        }
        for t in (0, 1)
    ]
    script = requests(rows)
    group, op, args = next(script)
    for name in ("gen", "actor_fwd", "reference", "adv"):
        (run.shards / name).touch()
    for number in itertools.count(1):
        with in_thread(run, config) as controller, Wire(controller) as wire:
            answer = wire.ask(group, number, op, **args)
            if not restart:
                assert wire.ask(group, number, op, **args) == answer
        if restart:
            with in_thread(run, config) as controller, Wire(controller) as wire:
                before = len(controller.state.events.batches)
                assert wire.ask(group, number, op, **args) == answer
                assert len(controller.state.events.batches) == before == 0, op
        try:
            group, op, args = script.send(answer)
        except StopIteration:
            break
    assert controller.state.progress.trained_steps == 1
    assert controller.state.counts.dropped == {"reward": 2}
    assert len(controller.state.progress.checkpoints) == 1
    assert {path.name for path in run.shards.iterdir()} == {"gen", "actor_fwd", "reference", "adv"}
