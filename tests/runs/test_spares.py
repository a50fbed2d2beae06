"""Over-sampling: spare groups are there when a group is filtered out or fails, and change nothing
else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_hpc.base.versions import Version
from relax_hpc.config import dump
from relax_hpc.data.tokenizer import load_tokenizer
from relax_hpc.data.visits import prompt_at
from relax_hpc.queue.client import QueueClient
from relax_hpc.queue.client.segments import append_segments
from relax_hpc.queue.controller.server import Controller
from relax_hpc.rollout import segment_log
from relax_hpc.rollout.attempt import Attempt
from relax_hpc.rollout.engines.engine import BadAnswer, EngineFault, GenerateRequest, Generation
from relax_hpc.rollout.prompt_source import PromptSource
from relax_hpc.rollout.spares import has_spare
from relax_hpc.tasks.files import open_train
from tests.helpers.audit import audit
from tests.helpers.faulty_engine import (
    FaultyEngine,
    train_the_step,
    use_reward,
    world,  # noqa: F401
)
from tests.helpers.run_helpers import queue_rows

PROMPTS, V0 = 40, Version(1, 0)


def prompt_of(ticket: int, attempt: int) -> str:
    return f"p{100 + prompt_at(ticket, attempt, PROMPTS, 0, False)}"


class Drawing(FaultyEngine):
    """Puts its answers into the drafts, as a real engine does; what `hold` says of a prompt group
    comes first."""

    hold: Callable[[str], bool] = staticmethod(lambda key: False)
    fails: frozenset[str] = frozenset()
    """Of whom the first answer is bad."""
    asked: list[list[str]]

    async def generate(self, request: GenerateRequest) -> Generation:
        while self.hold(request.prompt_id):
            await asyncio.sleep(0.001)
        request.draft.ended = await super().generate(request)
        return request.draft.ended

    async def batch(self, requests: Sequence[GenerateRequest]) -> list[Generation | EngineFault]:
        keys = list(dict.fromkeys(request.prompt_id for request in requests))
        self.asked.append(keys)
        answers = await super().batch(requests)
        for number, request in enumerate(requests):
            if request.prompt_id in self.fails:
                answers[number] = BadAnswer("nan_logprob", "found nan at response token 0")
        self.fails = self.fails.difference(keys)
        return answers


def run(
    world: SimpleNamespace,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    **about: object,
) -> tuple[Controller, list[list[str]]]:
    """The role and an actor until the only step is trained; the queue, and what was asked of the
    engine."""
    world.config.data.shuffle = False
    kind = type("Scripted", (Drawing,), {"asked": [], **about})
    trainer = threading.Thread(target=train_the_step, args=(world.actor, world.run))
    trainer.start()
    world.rollout([], kind=kind)
    trainer.join(20.0)
    assert world.controller.state.progress.finished()
    dump(world.config, world.run.config)
    return world.controller, kind.asked


def trained_prompts(world: SimpleNamespace) -> dict[int, str]:  # noqa: F811
    return {row["ticket"]: row["prompt_id"] for row in queue_rows(world.run).values()}


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_at_staleness_0_spares_save_attempts_and_change_nothing(world, monkeypatch, share):  # noqa: F811
    """Prompts with odd numbers are filtered out."""
    world.config.rollout.filter, world.config.rollout.over_sampling = (
        "tests.runs.test_faulty_engines:all_rewards_are_zero",
        share,
    )
    use_reward(monkeypatch, lambda sample: float(int(sample.prompt[:-1]) % 2))
    controller, asked = run(world, monkeypatch)
    attempts = {
        ticket: next(a for a in range(99) if int(prompt_of(ticket, a)[1:]) % 2 == 0)
        for ticket in range(4)
    }
    assert trained_prompts(world) == {
        ticket: prompt_of(ticket, attempt) for ticket, attempt in attempts.items()
    }
    spare = {ticket for ticket in range(4) if has_spare(ticket, share)}
    unused = sum(attempts[ticket] == 0 for ticket in spare)
    expected = {"filtered": 2 * sum(attempts.values()), "surplus": 2 * unused}
    assert controller.state.counts.dropped == {
        reason: samples for reason, samples in expected.items() if samples
    }
    first = {f"{ticket}/{prompt_of(ticket, 0)}" for ticket in range(4)}
    early = {f"{ticket}/{prompt_of(ticket, 1)}" for ticket in spare}
    assert set(asked[0]) | set(asked[1] if spare else ()) >= first | early, (
        "spares are begun beside the others"
    )
    drawn = [key for keys in asked for key in keys]
    assert len(drawn) == len(set(drawn)), "of nothing there was a second draw"
    result = audit(world.run)
    assert result.problems == [] and result.failed["surplus"] == unused


def test_spares_that_nobody_waits_for_are_aborted_at_staleness_0(world, monkeypatch):  # noqa: F811
    world.config.rollout.over_sampling = 1.0
    spares = {f"{ticket}/{prompt_of(ticket, 1)}" for ticket in range(4)}
    controller, asked = run(world, monkeypatch, hold=staticmethod(lambda key: key in spares))
    assert not spares.intersection(*asked) and controller.state.counts.dropped == {"surplus": 8}


def test_spares_take_the_place_of_others_that_fail(world, monkeypatch):  # noqa: F811
    """The second request waits for the surplus of the first one; its spares are never finished."""
    config, logs = world.config, world.controller.state.segments
    config.max_staleness, config.rollout.over_sampling = 1, 1.0
    config.rollout.groups_per_request, config.rollout.requests_in_flight = 2, 1
    groups = world.controller.state.groups
    surplus = {f"{ticket}/{prompt_of(ticket, 1)}" for ticket in (0, 1)}
    later = {f"{ticket}/{prompt_of(ticket, 0)}" for ticket in (2, 3)}
    never = {f"{ticket}/{prompt_of(ticket, 1)}" for ticket in (2, 3)}

    def hold(key: str) -> bool:
        # A ticket that finds spares is given one, and draws nothing.
        early = key in surplus and 2 not in groups
        return early or key in never or (key in later and not logs.spares and not logs.used)

    controller, _ = run(world, monkeypatch, hold=staticmethod(hold), fails={f"2/{prompt_of(2, 0)}"})
    trained = trained_prompts(world)
    assert trained.pop(2) in {prompt_of(0, 1), prompt_of(1, 1)}, "whichever was handed over first"
    assert trained == {ticket: prompt_of(ticket, 0) for ticket in (0, 1, 3)}
    assert controller.state.counts.dropped["nan_logprob"] == 2
    assert logs.used == 4 and logs.lost.keys() <= {"unwanted"}
    assert audit(world.run).problems == []


def test_a_spare_that_came_to_nothing_is_drawn_again(world, monkeypatch):  # noqa: F811
    """As an attempt: it is no failure of the ticket."""
    world.config.rollout.over_sampling = 1.0
    fails = frozenset({f"0/{prompt_of(0, 0)}", f"0/{prompt_of(0, 1)}"})
    controller, asked = run(world, monkeypatch, fails=fails)
    assert trained_prompts(world)[0] == prompt_of(0, 1)
    assert controller.state.counts.dropped == {"nan_logprob": 2, "surplus": 6}
    assert sum(f"0/{prompt_of(0, 1)}" in keys for keys in asked) == 2


def test_a_spare_that_cannot_be_appended_is_no_loss(world, monkeypatch, capsys):  # noqa: F811
    def broken(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(segment_log, "append_segments", broken)
    config, waits = world.config, iter([True] * 50)
    config.max_staleness, config.rollout.over_sampling, config.rollout.groups_per_request = (
        1,
        1.0,
        2,
    )
    config.rollout.requests_in_flight = 1
    later = {f"{ticket}/{prompt_of(ticket, 0)}" for ticket in (2, 3)}
    controller, _ = run(
        world, monkeypatch, hold=staticmethod(lambda key: key in later and next(waits, False))
    )
    assert not controller.state.counts.dropped and controller.state.segments.appended == 0
    assert (
        "2 segments of unfinished prompt groups were not appended: no space left"
        in capsys.readouterr().out
    )


def test_a_log_that_cannot_be_used_is_drawn_anew_and_counted(world, capsys):  # noqa: F811
    """One is damaged; of the other the prompt file has changed since."""
    with QueueClient(world.run, world.config, "rollout", 1) as client:
        client.connection.call("serve", reader="rollout/0", version=str(V0))
        admitted = client.tickets.admit("rollout/0", 4).result()
        source = PromptSource(
            open_train(world.run, world.config, load_tokenizer(world.run.model)), world.config
        )
        for ticket, prompt in ((0, source.prompt(0, 0)), (1, source.prompt(3, 0))):
            attempt = Attempt(ticket, 0, prompt, 2)
            attempt.drafts[1].add([5, 6], [-1.0, -1.0], [V0.encode()] * 2)
            assert append_segments(client, attempt.new_segments(True, 8), {ticket: 0}) == {}
    first = min(world.run.shards.glob("*.shard"))
    first.write_bytes(first.read_bytes()[:-8])
    trainer = threading.Thread(target=train_the_step, args=(world.actor, world.run))
    trainer.start()
    world.rollout([], incarnation=2)
    trainer.join(20.0)
    state, said = world.controller.state, capsys.readouterr().out
    assert admitted.tickets == [0, 1, 2, 3] and state.progress.finished()
    assert state.segments.counts() == {"appended": 4, "used": 0, "held": 0, "lost/unusable": 4}
    assert (
        f"ticket 0 is generated again: {first}" in said
        and "ticket 1 is generated again: its prompt" in said
    )


@given(tickets=st.integers(1, 2000), share=st.floats(0, 1))
def test_spares_are_spread_evenly(tickets, share):
    found = [
        sum(has_spare(ticket, share) for ticket in range(count)) for count in (tickets, 2 * tickets)
    ]
    assert found == [int(tickets * share), int(2 * tickets * share)]
