"""When a trainer role ends early: at a step's edge, also one at which it waits, and in time for its
checkpoint."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest

from relax_hpc.base.errors import DeadlineError, FencedError, RelaxError, StoppedError
from relax_hpc.base.metrics.spans import OpenSpan
from relax_hpc.base.rundir import RunDir
from relax_hpc.config.schema import Config
from relax_hpc.queue.client import Checkpoint, Claim
from relax_hpc.queue.client.training import TrainingRequests
from tests.requirements import requires

requires("torch", "megatron")

from relax_hpc.data.multimodal.medium import Kind  # noqa: E402
from relax_hpc.net.rendezvous.channel import RankChannel  # noqa: E402
from relax_hpc.roles.checkpoints import Checkpoints  # noqa: E402
from relax_hpc.roles.prefetch import Window  # noqa: E402
from relax_hpc.roles.step_clock import StepClock, StopBeforeStep  # noqa: E402
from relax_hpc.roles.step_report import StepResult, StepTally, correction_report, mfu_report  # noqa: E402
from relax_hpc.roles.trainer_role import TrainerHooks, TrainerRole  # noqa: E402
from relax_hpc.roles.window_stream import WindowStream  # noqa: E402
from relax_hpc.training.checkpoint.store import CheckpointError  # noqa: E402
from relax_hpc.training.models.families import spec_from_config  # noqa: E402
from relax_hpc.training.models.flops import peak_flops  # noqa: E402
from relax_hpc.training.models.qwen3 import Qwen3  # noqa: E402
from tests.helpers.media_helpers import QWEN3_VL  # noqa: E402

CLAIM = Claim(5, 3, (12, 13), (), 0, 12, assignment=[[[0, 3], [1]], [[2]]])

SPAN = OpenSpan("wait", None, "", ("", ""), 0.0, 0.0)


def test_what_the_correction_did_is_reported() -> None:
    means = {"rollout_ratio_max": 3.0, "rollout_inverse_ratio_max": 4.0}
    means |= {"correction_weight": 0.5, "correction_square": 0.5, "correction_cut": 0.25}
    assert correction_report(means) == {
        "correction/weight": 0.5,
        "correction/cut_share": 0.25,
        "correction/effective_share": 0.5,
        "correction/ratio_min": 0.25,
        "correction/ratio_max": 3.0,
    }
    assert not any(correction_report({}).values()), "a step without tokens"


def test_mfu_is_of_the_whole_step_and_of_what_the_model_needs() -> None:
    """Rows of 3 and 5 tokens through 2 layers of width 8, four heads of 4, a vocabulary of 10,
    twice."""
    sizes = {
        "hidden": 8,
        "inner": 16,
        "layers": 2,
        "heads": 4,
        "groups": 2,
        "head_dim": 4,
        "vocab": 10,
    }
    spec = Qwen3(**sizes, tied=True)
    matrices = 2 * (8 * 16 + 2 * 8 * 8 + 16 * 8 + 3 * 8 * 16) + 8 * 10
    attention = 2 * 2 * 16 * (3 * 3 + 5 * 5)
    tally = StepTally()
    tally.row_tokens = [3, 5]
    result = StepResult([{}], 1, tally, 0.1, 2.0)
    expected = 2 * 3 * (2 * matrices * 8 + attention) / (2.0 * 1e6)
    assert mfu_report(result, spec, 2, 1e6) == {"perf/mfu": pytest.approx(expected)}
    tally.media = {"seen": (Kind.IMAGE, (1, 2, 4))}
    other = {"moving": (Kind.VIDEO, (2, 4, 2)), **tally.media}
    tally.gather(
        SimpleNamespace(
            gather=lambda mine: [msgpack.unpackb(msgpack.packb(one)) for one in (mine, other)]
        )
    )
    seeing = replace(spec, towers=spec_from_config(QWEN3_VL).towers)
    (seen,) = (
        tower.multiply_adds((1, 2, 4)) + tower.multiply_adds((2, 4, 2)) for tower in seeing.towers
    )
    for frozen, times in ((), 3), (("visual",), 1):
        more = 2 * times * 2 * seen / (2.0 * 1e6)
        assert mfu_report(result, seeing, 2, 1e6, frozen) == {
            "perf/mfu": pytest.approx(expected + more)
        }
    assert mfu_report(result, spec, 2, None) == {} and peak_flops("NVIDIA H100 PCIe") == 756e12


def test_without_a_time_limit_there_is_always_room() -> None:
    clock = StepClock(None)
    clock.step_s = clock.save_s = 1e9
    assert (
        clock.has_room()
        and clock.stop_reason(False) == ""
        and clock.stop_reason(True) == "asked to stop"
    )


def test_a_step_that_cannot_end_before_the_limit_is_not_started() -> None:
    clock = StepClock(time.time() + 100.0)
    assert clock.has_room(), "nothing was measured yet"
    clock.step_s, clock.save_s = 40.0, 20.0
    assert clock.has_room(), "90 s of 100"
    clock.save_s = 30.0
    assert clock.stop_reason(False) == "the time limit leaves no room for a step", "105 s of 100"
    assert clock.stop_reason(True) == "asked to stop"
    assert not StepClock(time.time() - 1.0).has_room()


class Queue:
    """Answers claims when it is told to."""

    def __init__(self) -> None:
        self.beat, self.training = SimpleNamespace(paused_s=0.0), TrainingRequests(self.submit)
        self.claims: list[Future] = []
        self.dealt: list[int] = []
        self.asked = threading.Event()

    def submit_claim(
        self, task: str, budget: int, boundary: int, timeout: float, **dealt: int
    ) -> Future:
        self.claims.append(Future())
        self.dealt.append(dealt["batch"])
        self.asked.set()
        return self.claims[-1]

    def submit(self, op: str, timeout: float | None = None, **args: Any) -> Future:
        future: Future = Future()
        future.set_result(self.answer(op, **args))
        return future

    def answer(self, op: str, **args: Any) -> dict:
        return {"tickets": []}

    def release(self, claim: Claim) -> Future:
        return self.submit("release", lease=claim.lease)


def waiting(deadline: float | None = None, client: Queue | None = None) -> Any:
    """An actor of one rank without a model, between steps."""
    actor: Any = TrainerRole.__new__(TrainerRole)
    actor.config = Config(prompts_per_step=4)
    actor.config.algorithm.mini_batches = 2
    actor.settings = actor.config.actor
    spans = {"spans": lambda *_, **__: nullcontext(SPAN), "role": "actor"}
    actor.route_watch = SimpleNamespace(agree=lambda *_: True)
    about = {"run": RunDir(Path("run")), "model": Path("model"), "stop": threading.Event()}
    actor.context = SimpleNamespace(config=actor.config, client=client or Queue(), **about, **spans)
    layout, alone = SimpleNamespace(data_size=1), RankChannel(10.0)
    ways = {
        "tell": alone.broadcast,
        "control": alone,
        "rows": lambda *_: [],
        "channel": lambda: alone,
    }
    actor.ranks = SimpleNamespace(
        leader=True, layout=layout, ask_queue=lambda ask: ask(actor.context.client), **ways
    )
    actor.clock = StepClock(deadline)
    actor.hooks = TrainerHooks()
    actor.checkpoints = SimpleNamespace(saver=SimpleNamespace(check=lambda: None))
    actor.windows = WindowStream(
        actor.context, actor.ranks, actor.clock, actor.settings, {}, actor.check
    )
    return actor


def later(actor: Any, act: Callable[[], None]) -> threading.Thread:
    """Do something once the actor waits for rows."""
    thread = threading.Thread(target=lambda: (actor.context.client.asked.wait(60), act()))
    thread.start()
    return thread


def test_who_waits_for_the_first_rows_of_a_step_ends_when_asked_to() -> None:
    actor = waiting()
    thread = later(actor, actor.context.stop.set)
    with pytest.raises(StopBeforeStep, match="asked to stop"):
        next(actor.windows.take_windows(3, 0))
    thread.join()


def test_who_waits_until_the_limit_is_near_ends_too() -> None:
    actor = waiting(time.time() + 10.0)
    actor.clock.step_s = 10.0
    with pytest.raises(StopBeforeStep, match="the time limit leaves no room"):
        next(actor.windows.take_windows(3, 0))


def test_a_step_whose_weights_have_changed_is_brought_to_its_end() -> None:
    actor = waiting()
    actor.context.stop.set()
    last = claim(5, 14, 15)
    thread = later(actor, lambda: actor.context.client.claims[0].set_result(last))
    assert list(actor.windows.take_windows(3, 1)) == [Window(last, [], last=True)]
    thread.join()


class Giving(Queue):
    """Has a claim at once, whenever it is asked."""

    def __init__(self, *claims: Claim) -> None:
        super().__init__()
        self.left = list(claims)

    def submit_claim(self, *args: Any, **dealt: int) -> Future:
        future = super().submit_claim(*args, **dealt)
        if self.left:
            future.set_result(self.left.pop(0))
        return future


def giving(*claims: Claim) -> Any:
    return waiting(client=Giving(*claims))


def claim(lease: int, *tickets: int) -> Claim:
    return Claim(lease, 3, tickets, (), 0, tickets[0])


def test_rows_that_are_there_are_trained_on() -> None:
    actor = giving(CLAIM)
    actor.context.stop.set()
    assert list(actor.windows.take_windows(3, 0)) == [Window(CLAIM, [], last=True)]


def test_while_one_window_is_trained_on_the_next_is_asked_for() -> None:
    actor = giving(claim(1, 12), claim(2, 13), claim(3, 14, 15), claim(4, 16, 17))
    assert [(window.claim.lease, window.last) for window in actor.windows.take_windows(3, 0)] == [
        (1, False),
        (2, True),
    ]
    assert [window.claim.lease for window in actor.windows.take_windows(3, 1)] == [3]
    assert actor.windows.prefetch.asked.result(10).claim.lease == 4, "of the next step"
    assert actor.context.client.dealt == [0, 1, 0, 0]


def test_behind_the_last_step_nothing_is_asked_for() -> None:
    actor = giving(claim(1, 12, 13), claim(2, 14, 15))
    actor.config.steps = 4
    assert [
        window.claim.lease for number in (0, 1) for window in actor.windows.take_windows(3, number)
    ] == [
        1,
        2,
    ]
    assert actor.windows.prefetch.asked is None


def test_a_claim_whose_rows_are_lost_before_all_ranks_have_them_is_followed_by_another() -> None:
    actor, found = giving(CLAIM, again := claim(6, 12, 13)), iter([None, []])
    actor.ranks.rows = lambda *_: next(found)
    actor.windows.prefetch.ask(0)
    assert actor.windows.prefetch.asked.result(10) == Window(again, [])


def test_rows_that_never_come_end_the_wait() -> None:
    actor = waiting()
    actor.config.queue.wait_timeout_s = 0.0
    with pytest.raises(
        DeadlineError, match=r"no rows to train on came for 0 s; .* logs of the group"
    ):
        next(actor.windows.take_windows(3, 0))


def test_a_claim_of_other_tickets_is_not_trained_on() -> None:
    with pytest.raises(RelaxError, match=r"found places from 14 on .*, expected those of 12 to 13"):
        next(giving(claim(1, 14, 15)).windows.take_windows(3, 0))


def test_ranks_wait_together_until_the_queue_knows_of_a_step() -> None:
    """A full disk, or a hub that is away, may take hours: a rank that went on alone would give the
    others up."""
    actor, heard = giving(), list[Any]()
    actor.step_ack = future = Future()
    future.set_result({})
    actor.ranks.tell = lambda message: heard.append(message) or {}
    actor.await_step_ack(3)
    assert heard == [future], "what the others hear of meanwhile"
    actor.ranks.leader, actor.step_ack = False, None
    actor.await_step_ack(3)
    assert heard == [future, None], "they are in it too"


class Losing(Giving):
    """The first time, rows of what is claimed are lost before they are saved."""

    def __init__(self, *claims: Claim) -> None:
        super().__init__(*claims)
        self.held: list[list[int]] = [[12], [12, 13]]
        self.released: list[int] = []

    def answer(self, op: str, **args: Any) -> dict:
        if op == "settled":
            return {"tickets": self.held.pop(0)}
        assert op == "release"
        self.released.append(args["lease"])
        return {}


def test_rows_that_are_lost_with_their_maker_cost_a_gradient() -> None:
    lost, again = claim(6, 13), claim(7, 12, 13)
    queue, done, tally = Losing(CLAIM, lost, again), [], StepTally()
    actor = waiting(client=queue)
    actor.batches = lambda window: [window.claim.lease]
    taken = {
        "accumulate": lambda batches, last: done.append((batches, last)),
        "discard": lambda: done.append("discarded"),
    }
    actor.trainer = SimpleNamespace(**taken)
    assert actor.gradients(3, 0, tally) == ([again], [[7]])
    assert done == [([5], True), "discarded", ([7], True)]
    assert queue.released == [5, 6], "what was asked for already may be of the same mini-batch"
    assert actor.windows.prefetch.asked, "the first window of the next one"


def test_a_ticket_that_comes_twice_does_not_count_for_another() -> None:
    first, tally = (claim(5, 12), claim(6, 12), claim(7, 13), claim(8, 14)), StepTally()
    queue = Losing(*first, claim(9, 12), claim(10, 13))
    actor = waiting(client=queue)
    queue.held = [[12, 13], [12, 13]]
    actor.batches = lambda window: []
    said: list[bool] = []
    actor.trainer = SimpleNamespace(
        accumulate=lambda _, last: said.append(last), discard=lambda: None
    )
    claims, _ = actor.gradients(3, 0, tally)
    assert [found.lease for found in claims] == [9, 10]
    assert said == [False, False, True, False, True], "the last window is that with the last ticket"
    assert queue.released == [5, 6, 7, 8]


def test_what_goes_wrong_beside_training_is_why_no_rows_come() -> None:
    actor = waiting()

    def check() -> None:
        raise RelaxError("weights/i000001-v000004: No space left on device")

    actor.hooks.check = check
    with pytest.raises(RelaxError, match="No space left"):
        next(actor.windows.take_windows(3, 0))


def test_a_claim_that_fails_says_so() -> None:
    actor = waiting()
    thread = later(
        actor,
        lambda: actor.context.client.claims[0].set_exception(FencedError("incarnation 1 is over")),
    )
    with pytest.raises(FencedError):
        next(actor.windows.take_windows(3, 0))
    thread.join()


class Recorded(TrainerRole):
    """A role that only counts; it comes to an edge at ``ends_at``."""

    def __init__(self, ends_at: int, saves: tuple[int, ...] = (), in_step: bool = False) -> None:
        self.ends_at, self.saves, self.in_step = ends_at, saves, in_step
        self.config, self.clock, self.hooks, self.windows = (
            Config(steps=5),
            StepClock(None),
            TrainerHooks(),
            None,
        )
        self.settings = self.config.actor
        self.profiler = SimpleNamespace(reach=lambda step: None, close=lambda: None)
        self.is_only_trainer = True
        self.step, self.saved = 0, []
        self.saver = SimpleNamespace(seconds=0.0, failure="")
        self.checkpoints = SimpleNamespace(
            saver=self.saver,
            load=lambda: 0,
            save=self.saved.append,
            needs_save=self.needs_save,
            settle=self.settled,
        )
        self.ranks = SimpleNamespace(
            tell=lambda message: message, close=lambda: self.saved.append("closed")
        )

    def check_edge(self) -> None:
        if self.step == self.ends_at and not self.in_step:
            raise StopBeforeStep("asked to stop")

    def await_step_ack(self, step: int) -> None: ...

    def train(self, step: int) -> bool:
        if step == self.ends_at:
            raise StopBeforeStep("asked to stop")
        self.step = step + 1
        return self.step in self.saves

    def needs_save(self, step: int, saved: int) -> bool:
        return step > saved or bool(self.saver.failure)

    def settled(self) -> None:
        self.saved.append("settled")


@pytest.mark.parametrize("in_step", [False, True])
@pytest.mark.parametrize(("saves", "saved"), [((), [3]), ((2,), [3]), ((3,), [])])
def test_what_is_not_saved_yet_is_saved_at_the_edge(
    saves: tuple[int, ...], saved: list[int], in_step: bool
) -> None:
    made = Recorded(3, saves, in_step)
    with pytest.raises(StoppedError, match="asked to stop: saved step 3"):
        made.run()
    assert made.saved == [*saved, "settled"]


def test_what_could_not_be_saved_is_saved_at_the_edge() -> None:
    made = Recorded(3, saves=(3,))
    made.saver.failure = "no room"
    with pytest.raises(StoppedError):
        made.run()
    assert made.saved == [3, "settled"]


def test_the_last_step_ends_the_role() -> None:
    made = Recorded(99)
    made.run()
    assert made.step == 5 and made.saved == ["settled", "closed"]


def test_a_run_none_of_whose_checkpoints_verifies_does_not_begin_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would lose all that they hold: what a disk cannot read now it may read later."""
    found = [
        Checkpoint(step=step, incarnation=1, name=f"step-{step}", digest="d") for step in (10, 20)
    ]
    resumed: list[int] = []

    def load(directory: Path, *_: Any) -> dict[str, Any]:
        if directory.name not in sound:
            raise CheckpointError(f"{directory}: damaged")
        return {"step": directory.name.removeprefix("step-")}

    def answered(points: list[Checkpoint]) -> Future:
        future: Future = Future()
        future.set_result(points)
        return future

    monkeypatch.setattr("relax_hpc.roles.checkpoints.store.load", load)
    checkpoints: Any = Checkpoints.__new__(Checkpoints)
    checkpoints.context = SimpleNamespace(
        role="actor", run=RunDir(Path("run")), report_phase=lambda _: None
    )
    checkpoints.saver = SimpleNamespace(prepare=lambda: None, ready=lambda: None)
    training = SimpleNamespace(
        checkpoints=lambda _: answered(found), resume=lambda step, _: resumed.append(step)
    )

    def ask(question: Callable[[Any], Any]) -> Any:
        answer = question(SimpleNamespace(training=training))
        return answer.result() if isinstance(answer, Future) else answer

    checkpoints.ranks, checkpoints.trainer = SimpleNamespace(ask_queue=ask, control=None), None
    sound = {"step-10"}
    assert checkpoints.load() == 10 and resumed == [10]
    sound.clear()
    with pytest.raises(
        RelaxError, match=r"none of 2 verifies .*step-20: damaged.*restore one of them"
    ):
        checkpoints.load()
    found.clear()
    assert checkpoints.load() == 0 and resumed == [10, 0]
