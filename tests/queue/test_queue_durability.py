"""What accepted means without durability: the journal may be late, and a dead controller has all
groups begin again."""

from __future__ import annotations

import pytest

from relax_hpc.base.errors import FencedError
from relax_hpc.net.rendezvous.roster import claim_incarnation
from relax_hpc.queue import Controller, Plan, QueueClient, serving
from relax_hpc.queue.controller.messages import Request
from tests.helpers.queue_helpers import Roles, make_run, small


@pytest.fixture
def config():
    made = small(steps=2, samples=2)
    made.queue.durability = "none"
    return made


def ask(controller: Controller, number: int, op: str, **args) -> dict:
    return controller.service.handle(
        Request(0, number, f"c#{number}", ("actor", 1), op, args, 0.0, 0.0)
    )


def test_nobody_waits_for_the_journal_and_it_is_not_late_for_long(tmp_path, config, monkeypatch):
    run = make_run(tmp_path / "run")
    controller = Controller(run, Plan.from_config(config), 1, durability="none")
    assert not controller._commit() and (start := controller.journal.position.offset)
    ask(controller, 1, "resume", step=0)
    assert not controller._commit() and controller.journal.position.offset == start
    monkeypatch.setattr(controller, "_commit_at", 0.0)
    assert controller._commit() and controller.journal.position.offset > start
    ask(controller, 2, "publish", version="i000001-v000000", digest="d")
    controller.close()
    assert Controller(run, Plan.from_config(config), 2).state.weights.published, (
        "who ends in good order leaves nothing out"
    )


def test_what_a_killed_controller_had_not_journaled_is_gone_and_all_begin_again(tmp_path, config):
    run = make_run(tmp_path / "run")
    killed = Controller(
        run, Plan.from_config(config), claim_incarnation(run, "hub"), durability="none"
    )
    ask(killed, 1, "resume", step=0)
    killed.journal.commit()
    ask(killed, 2, "publish", version="i000001-v000000", digest="d")
    with serving(run, config) as controller, QueueClient(run, config, "actor", 1) as late:
        assert (
            controller.incarnation == 2
            and controller.state.lineage.starts == [(1, 0)]
            and controller.state.weights.newest is None
        )
        with pytest.raises(FencedError, match="actor incarnation 1 is over"):
            late.connection.call("resume", step=0)
        with QueueClient(run, config, "supervisor", 1) as supervisor:
            assert supervisor.connection.call("status")["trained_steps"] == 0
        with Roles(run, config, incarnation=2) as roles:
            roles.start()
            assert len(roles.step(0)) == 4


def test_with_durability_they_go_on(tmp_path, config):
    config.queue.durability = "flush"
    run = make_run(tmp_path / "run")
    with serving(run, config), Roles(run, config) as roles:
        roles.start()
        roles.step(0)
    with serving(run, config), Roles(run, config) as roles:
        roles.step(1)
