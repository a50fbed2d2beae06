"""The loop of the autoscaler over a real hub: what it reads, and the operations that it creates."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.cluster.slurm.commands import SlurmError, SlurmJob, SlurmNode
from relax_hpc.config.schema import Config
from relax_hpc.queue.client import QueueStatus
from relax_hpc.queue.operations import ACTIVE, COMPLETED, IN, OUT, Operation
from relax_hpc.service.autoscaler.live_inputs import (
    count_reversals,
    is_trainer_waiting,
    measured_start_s,
    policy_state,
)
from relax_hpc.service.autoscaler.loop import Autoscaler
from relax_hpc.service.autoscaler.observations import Sample
from relax_hpc.service.autoscaler.slurm_inputs import SlurmInputs
from tests.helpers.queue_helpers import small
from tests.helpers.service_helpers import Service, service


def scaled(**policy: Any) -> Config:
    config = small()
    config.service.max_engines = 8
    config.service.autoscaler.enabled = True
    for name, value in policy.items():
        setattr(config.service.autoscaler, name, value)
    return config


def overload(autoscaler: Autoscaler, need: float = 3.0) -> None:
    """Let the trainer wait half of the time, so that ``need`` engines are needed. One engine
    serves; that of the run's only group starts."""
    end_s, period_s = time.time(), 4.0
    for second in range(-200, 1):
        position_s = second % period_s
        autoscaler.log.add(
            Sample(
                time_s=end_s + second,
                serving=1,
                generating=16,
                slots=16,
                trainer_waits=position_s >= 2.0,
                # One step of two prompt groups needs 2 s of the trainer.
                accepted_groups=second / need,
                trained_steps=int((second + 200) // period_s),
            )
        )


async def until_reported(running: Service) -> None:
    while not (running.live.present and running.live.present.is_reported):
        await asyncio.sleep(0.01)


def test_two_autoscalers_create_one_operation(tmp_path: Path) -> None:
    async def play() -> None:
        async with service(tmp_path, scaled()) as running:
            await until_reported(running)
            both = [Autoscaler(running.live) for _ in range(2)]
            for autoscaler in both:
                overload(autoscaler)
            decisions = await asyncio.gather(*(autoscaler.evaluate() for autoscaler in both))
            assert [decision.target for decision in decisions] == [4, 4]
            operations = await running.live.ask(running.live.client.operations.list())
            assert [(o.kind, o.body) for o in operations] == [(OUT, {"num_replicas": 4})]
            assert operations[0].key == "autoscaler-none-scale_out-4"
            overload(both[0])
            held = await both[0].evaluate()
            assert held.line.startswith("hold 2: operation so-000001 (PENDING)")

    asyncio.run(play())


def test_a_target_that_lost_engines_fill_creates_no_operation(tmp_path: Path) -> None:
    """The hub counts them, the autoscaler does not."""

    async def play() -> None:
        async with service(tmp_path, scaled()) as running:
            await until_reported(running)
            operations = running.live.client.operations
            urls = [f"http://127.0.0.1:{port}" for port in (1, 2, 3)]
            created = await running.live.ask(operations.create(OUT, {"engine_urls": urls}))
            for state in ("active", "lost"):
                for name in created.operation.engines:
                    await running.live.ask(operations.report_engine(name, state))
            while [engine.state for engine in running.live.wanted.external] != ["lost"] * 3:
                await running.live.wait_for_change(1.0)
            autoscaler = Autoscaler(running.live)
            autoscaler.policy.cooldown = 0.0
            for _ in range(2):
                overload(autoscaler)
                decision = await autoscaler.evaluate()
                assert decision.target > decision.engines
            assert len(await running.live.ask(operations.list())) == 1
            assert autoscaler.counts["without_effect"] == 2

    asyncio.run(play())


def test_a_dry_run_and_a_used_budget_only_explain(tmp_path: Path) -> None:
    async def play() -> None:
        config = scaled(dry_run=True, budget_node_hours=1.0)
        async with service(tmp_path, config) as running:
            await until_reported(running)
            autoscaler = Autoscaler(running.live)
            autoscaler.saved.node_hours = 0.5
            overload(autoscaler, need=6.0)
            decision = await autoscaler.evaluate()
            # The remaining 0.5 node-hours pay for three engines for `budget_reserve_s`.
            assert decision.target == 3 and "limited by the budget (0.5 of 1" in decision.reason
            assert autoscaler.counts == {"limited_by_the budget": 1}
            autoscaler.saved.node_hours = 0.0
            overload(autoscaler)
            assert (await autoscaler.evaluate()).target == 4
            assert await running.live.ask(running.live.client.operations.list()) == []
            lines = (running.run.root / "logs/autoscaler.jsonl").read_text().splitlines()
            assert len(lines) == 2 and "out 2 -> 4" in json.loads(lines[1])["decision"]

    asyncio.run(play())


def test_new_jobs_may_be_shortened_so_that_slurm_starts_them_in_gaps(tmp_path: Path) -> None:
    async def play() -> None:
        config = scaled(time="4:00:00", time_min="0:30:00")
        async with service(tmp_path, config) as running:
            autoscaler = Autoscaler(running.live)
            assert autoscaler.make_body(OUT, 4) == {"num_replicas": 4}
            config.layout = "jobs"
            limits = {"time": "4:00:00", "time_min": "0:30:00"}
            assert autoscaler.make_body(OUT, 4) == {"num_replicas": 4, **limits}
            assert autoscaler.make_body(IN, 1) == {"num_replicas": 1}

    asyncio.run(play())


def test_the_switch_survives_a_restart(tmp_path: Path) -> None:
    async def play() -> None:
        async with service(tmp_path, scaled()) as running:
            before = (await running.ask("GET", "/autoscaler/status")).content
            assert before["enabled"] and before["decision"] == "no decision yet"
            for body in ({"enabled": "no"}, {"on": True}):
                answer = await running.ask("POST", "/autoscaler/enable", body)
                assert (answer.status, answer.code) == (400, "bad_request")
            after = (await running.ask("POST", "/autoscaler/enable", {"enabled": False})).content
            assert not after["enabled"] and not Autoscaler(running.live).saved.enabled
            running.live.config.service.autoscaler.enabled = False
            await running.ask("POST", "/autoscaler/enable")
            assert not Autoscaler(running.live).saved.enabled, "the setting has changed"
            running.live.config.service.autoscaler.enabled = True
            assert (await running.ask("POST", "/autoscaler/enable")).content["enabled"]
        async with service(tmp_path / "unbounded") as running:
            answer = await running.ask("POST", "/autoscaler/enable")
            assert answer.status == 400 and "service.max_engines" in str(answer.content)

    asyncio.run(play())


def an_operation(number: int, kind: str, key: str = "", seconds: float = 10.0) -> Operation:
    return Operation(
        id=f"s{'o' if kind == OUT else 'i'}-{number:06d}",
        kind=kind,
        body={},
        key=key,
        created_at=100.0 * number,
        deadline_at=1e9,
        updated_at=100.0 * number + seconds,
        state=ACTIVE if kind == OUT else COMPLETED,
    )


def test_earlier_operations_give_cooldowns_start_times_and_reversals() -> None:
    own = "autoscaler-none-scale_out-4"
    operations = [
        an_operation(1, OUT, own, seconds=40.0),
        an_operation(2, IN),
        an_operation(3, OUT, own, seconds=60.0),
        an_operation(4, OUT, "other", seconds=80.0),
        an_operation(5, IN),
    ]
    state = policy_state(operations)
    assert (state.changed_s, state.added_s) == (500.0, 400.0)
    assert measured_start_s(operations) == 60.0 and measured_start_s([]) is None
    assert count_reversals(operations, 0.0) == 1 and count_reversals(operations, 150.0) == 0


def test_an_autoscaler_that_is_reversed_switches_itself_off(tmp_path: Path) -> None:
    async def play() -> None:
        async with service(tmp_path, scaled()) as running:
            autoscaler = Autoscaler(running.live)
            autoscaler.saved.enabled_at = 0.0
            operations = []
            for number in range(1, 7, 2):
                operations.append(an_operation(number, OUT, f"autoscaler-{number}"))
                operations.append(an_operation(number + 1, IN, "second autoscaler"))
            autoscaler._check_reversals(operations[:4])
            assert autoscaler.saved.enabled
            autoscaler._check_reversals(operations)
            described = autoscaler.describe()
            assert not described["enabled"] and "reversed 3 decisions" in described["reason_off"]

    asyncio.run(play())


@pytest.mark.parametrize(
    ("waiting", "busy_s", "waits"),
    [
        (["actor: claim: rows"], 0.0, True),
        # It asks for the next rows while it trains.
        (["actor: claim: rows"], 1.5, False),
        (["rollout: admit"], 0.0, False),
    ],
)
def test_the_trainer_waits(waiting: list[str], busy_s: float, waits: bool) -> None:
    beats = {"actor": {"group": "actor", "busy_s": busy_s}, "r": {"group": "rollout", "busy_s": 9}}
    names = QueueStatus.__dataclass_fields__
    values: dict[str, Any] = {name: 0 for name in names if name != "later"}
    status = QueueStatus(**values | {"waiting": waiting, "beats": beats})
    assert is_trainer_waiting(small(), status) is waits


class FakeSlurm:
    """Slurm with four nodes, or without an answer."""

    def __init__(self, answers: bool = True) -> None:
        self.answers = answers

    def nodes(self) -> list[SlurmNode]:
        if not self.answers:
            raise SlurmError("squeue: timed out", timed_out=True)
        rows = (
            *(("n1", "gpu", "idle"), ("n2", "gpu", "idle*"), ("n3", "gpu", "mixed")),
            *(("n4", "cpu*", "idle"), ("n5", "gpu", "idle"), ("n5", "cpu*", "idle")),
        )
        return [SlurmNode(name, part, state, "gpu:4", 8, 1024, name) for name, part, state in rows]

    def jobs(self, job: str) -> dict[str, SlurmJob]:
        return {job: SlurmJob(job, "hub", "RUNNING", 1, "n4", "", 600.0, 60.0)}


def test_idle_nodes_and_the_time_left_of_the_job() -> None:
    config = small()
    config.layout, config.site.partition = "jobs", "gpu"
    config.groups["rollout"].resources.gpus_per_node = 4
    inputs = SlurmInputs(config, FakeSlurm(), job="7")  # type: ignore[arg-type]
    inputs.update()
    assert inputs.idle_nodes == 2
    assert inputs.job_time_left_s == pytest.approx(600.0, abs=5.0)
    silent = SlurmInputs(config, FakeSlurm(answers=False), job="7")  # type: ignore[arg-type]
    silent.update()
    assert silent.idle_nodes is None and silent.job_time_left_s is None
