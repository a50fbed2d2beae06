"""Mistakes in the configuration, the prompts, the reward and the engine: counted, or named in one
line."""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from relax_hpc.base.errors import EXIT_CONFIG, EXIT_NO_PROGRESS, NoProgressError, RelaxError
from relax_hpc.base.metrics.first_failures import read_failures
from relax_hpc.base.metrics.spans import Spans
from relax_hpc.base.metrics.writer import GENERATED, GENERATED_SUM
from relax_hpc.base.rundir import RunDir
from relax_hpc.base.versions import Version
from relax_hpc.commands.program import main
from relax_hpc.config import dump
from relax_hpc.config.schema import Config, GroupConfig, RolloutConfig, TinyModelConfig
from relax_hpc.net.rendezvous.process import SignalFlag
from relax_hpc.net.rendezvous.world import World
from relax_hpc.ops.observe.status import status
from relax_hpc.ops.observe.status_view import lines as status_lines
from relax_hpc.queue.client import QueueClient
from relax_hpc.queue.controller.server import Controller
from relax_hpc.queue.process_context import Context
from relax_hpc.rewards import Reward, RewardInput
from relax_hpc.rewards.placement import InThread
from relax_hpc.roles import rollout as rollout_role
from relax_hpc.rollout import group_rewards, replica
from relax_hpc.rollout.engines.engine import BadAnswer, EngineFault, GenerateRequest, Generation
from relax_hpc.rollout.outcomes import Failure, Outcomes
from relax_hpc.training.models.tiny_model import make_tiny_model
from relax_hpc.training.models.tiny_tokenizer import EOS_ID
from tests.helpers.audit import audit, read_events
from tests.helpers.queue_helpers import in_thread, make_run
from tests.helpers.run_helpers import (
    LIGHT,
    SMALL,
    merged,
    queue_rows,
    running,
    trained_steps,
    write_config,
)
from tests.helpers.weights_helpers import publish
from tests.requirements import requires

pytestmark = pytest.mark.run

WAIT_S = 240.0
FICKLE = """
import os, threading

def fickle(sample):
    match sample.metadata.get("poison"):
        case "raise":
            raise RuntimeError("no answer to that")
        case "exit":
            os._exit(3)
        case "hang":
            threading.Event().wait()
    return float(len(sample.response_text))

def never(sample):
    return 1 / 0
"""
GOOD = [
    {"id": f"p{number}", "prompt": f"{number}?", "answer": f"{number}"}
    for number in range(100, 140)
]


# -- before anything is started --------------------------------------------------------------------


def busy_port() -> socket.socket:
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    return taken


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (
            ["--model.path", "/no/such/model"],
            ["model.path: found '/no/such/model'", "not a directory"],
        ),
        (
            ["--actor.parallel.tensor", "4"],
            ["actor.parallel.tensor: found 4", "num_attention_heads, 2"],
        ),
        (
            ["--algorithm.mini_batches", "3"],
            ["algorithm.mini_batches: found 3", "divisor of prompts_per_step, 4"],
        ),
        (
            ["--rollout.engine.kind", "sglang", "--rollout.engine.port", "BUSY"],
            ["rollout.engine.port: found BUSY", "in use", "0 for free ones"],
        ),
    ],
    ids=["model", "tensor", "batch", "port"],
)
def test_impossible_settings_start_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], parts: list[str]
) -> None:
    with busy_port() as taken:
        port = str(taken.getsockname()[1])
        config = write_config(tmp_path / "config.yaml")
        given = [word.replace("BUSY", port) for word in words]
        code = main(["run", "--config", str(config), "--run_dir", str(tmp_path / "run"), *given])
    captured = capsys.readouterr()
    assert code == EXIT_CONFIG and captured.out == ""
    assert captured.err.startswith("relax-hpc: error: ") and captured.err.count("\n") == 1, (
        captured.err
    )
    assert all(part.replace("BUSY", port) in captured.err for part in parts), captured.err
    assert not (tmp_path / "run").exists()


def make_data(
    directory: Path, extra: Sequence[str] = (), poisoned: Mapping[int, str] | None = None
) -> dict:
    """A model and a prompt file of GOOD with `extra` lines at its end; the settings that name
    them."""
    make_tiny_model(directory / "model", TinyModelConfig(**SMALL["model"]["tiny"]), 3)
    lines = [
        json.dumps(prompt | {"poison": (poisoned or {}).get(index)})
        for index, prompt in enumerate(GOOD)
    ]
    (directory / "train.jsonl").write_text("\n".join([*lines, *extra]) + "\n")
    (directory / "fickle.py").write_text(FICKLE)
    groups = {"reference": None}  # not needed, and a start saved
    data = {
        "task": "",
        "train": str(directory / "train.jsonl"),
        "max_prompt_tokens": 8,
        "shuffle": False,
    }
    rollout = {"reward": "answer_partial"}
    return {
        "model": {"path": str(directory / "model")},
        "data": data,
        "rollout": rollout,
        "groups": groups,
    }


BAD_LINES = [
    '{"id": "torn", "prompt": ',
    '{"id": "empty", "prompt": " ", "answer": "1"}',
    '{"id": "long", "prompt": "0123456789?", "answer": "1"}',
    '{"id": "p100", "prompt": "1?", "answer": "1"}',
]
REASONS = ["broken_json", "empty_prompt", "over_long", "duplicate_id"]


def run_to_the_end(directory: Path, over: dict) -> subprocess.CompletedProcess:
    """`relax-hpc run` of SMALL with `over`."""
    config = write_config(directory / "config.yaml", over)
    line = [
        sys.executable,
        "-m",
        "relax_hpc",
        "run",
        "--config",
        str(config),
        "--run_dir",
        str(directory / "run"),
    ]
    return subprocess.run(line, capture_output=True, text=True, timeout=WAIT_S)


def assert_one_line(result: subprocess.CompletedProcess, code: int, *parts: str) -> None:
    """The run ended with `code`, and its last word was one line that holds all of `parts`."""
    assert result.returncode == code, result.stdout + result.stderr
    assert result.stderr.startswith("relax-hpc: error: ") and result.stderr.count("\n") == 1, (
        result.stderr
    )
    for part in parts:
        assert part in result.stderr


def test_too_many_bad_lines_start_nothing(tmp_path: Path) -> None:
    requires("torch")
    result = run_to_the_end(tmp_path, make_data(tmp_path, BAD_LINES))
    assert_one_line(
        result,
        EXIT_CONFIG,
        "train.jsonl: 4 of 44 lines are bad",
        "broken_json (first line 41",
        "max_bad",
    )
    assert "started" not in result.stdout
    assert not (tmp_path / "run").exists(), "the same command can be given again"


def test_an_unknown_engine_flag_starts_nothing(tmp_path: Path) -> None:
    requires("sglang")
    engine = {"kind": "sglang", "flags": {"max_total_token": 4096}}
    result = run_to_the_end(tmp_path, {"rollout": {"engine": engine}})
    assert_one_line(
        result,
        EXIT_CONFIG,
        "rollout.engine.flags.max_total_token",
        "did you mean max_total_tokens?",
    )
    assert not (tmp_path / "run").exists()


# -- counted, and the run goes on ------------------------------------------------------------------


def test_bad_lines_and_a_fickle_reward_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requires("mpi", "torch", "megatron", "transformers")
    poisoned = {1: "raise", 6: "exit", 9: "hang"}
    reward = {"rollout": {"reward": "fickle:fickle", "reward_timeout_s": 3.0}}
    over = merged(LIGHT, make_data(tmp_path, BAD_LINES, poisoned) | reward)
    over["data"]["max_bad_share"] = 0.2
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with running(tmp_path, over) as live:
        live.finish(WAIT_S)
    named = {
        event["id"]: event["reason"]
        for event in read_events(live.run)
        if event["what"] == "bad_prompt"
    }
    assert named == {f"line {line}": reason for line, reason in enumerate(REASONS, start=41)}
    note = "note: data.train: 4 of 44 rows are skipped: 1 "
    assert note in live.output.read_text()
    assert "rows left out: " in "\n".join(status_lines(status(live.run)))
    last = trained_steps(live.run)[-1]
    assert [last[f"queue/bad_prompt_{reason}"] for reason in REASONS] == [1, 1, 1, 1]
    result = audit(live.run)
    failures = {"reward_exception", "reward_died", "reward_timeout"}
    assert result.problems == [] and result.failed.keys() == failures
    assert all(
        last[f"queue/dropped_{reason}"] == 4 * result.failed[reason] >= 4 for reason in failures
    )
    assert live.incarnations("rollout") == 1, (
        "what a reward does to its process is no failure of the role"
    )
    firsts = {failure.reason: failure for failure in read_failures(live.run.root)}
    assert firsts.keys() == failures
    reward_file = tmp_path / "fickle.py"
    assert firsts["reward_timeout"].location == f"{reward_file}:11 in fickle"
    output = live.output.read_text()
    for failure in firsts.values():
        assert output.count(f"rollout: first {failure.headline}") == 1
        assert f"first failure: {failure.headline}" in "\n".join(status_lines(status(live.run)))
    prompts = {row["ticket"]: row["prompt_id"] for row in queue_rows(live.run).values()}
    assert {prompts[ticket] for ticket in range(12)}.isdisjoint({"p101", "p106", "p109"})
    assert prompts[0] == "p100" and prompts[2] == "p102", (
        "tickets without a fault keep their prompts"
    )


# -- the run ends, with one line -------------------------------------------------------------------


def test_a_reward_that_always_raises_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requires("mpi", "torch", "megatron", "transformers")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    over = merged(LIGHT, make_data(tmp_path) | {"rollout": {"reward": "fickle:never"}})
    result = run_to_the_end(tmp_path, over)
    assert_one_line(
        result,
        EXIT_NO_PROGRESS,
        "rollout: ",
        "reward_exception",
        "ZeroDivisionError",
        "max_failed_share=50%",
    )
    assert "incarnation 2" not in result.stdout
    location = f"{tmp_path / 'fickle.py'}:15 in never"
    assert location in result.stderr
    output = re.sub(r"^\[ *[\d.]+s\] ", "", result.stdout, flags=re.MULTILINE)
    first = "rollout: first reward_exception: ZeroDivisionError: division by zero (prompt p"
    assert output.count(first) == 1 and location in output
    before, _, after = output.partition(first)
    frame = f'  File "{tmp_path / "fickle.py"}", line 15, in never\n'
    assert frame in after.partition("of the last 64 prompt groups failed")[0], "before the run ends"
    assert "Traceback" not in before and after.count("Traceback") == 1


def test_an_unknown_engine_flag_ends_the_run(tmp_path: Path) -> None:
    requires("sglang", "mpi", "torch", "megatron")
    engine = {"kind": "sglang", "flags": {"max_total_token": 4096}}
    # What another environment's SGLang knows only that can say.
    over = merged(LIGHT, {"rollout": {"engine": engine}, "site": {"python": sys.executable}})
    del over["rollout"]["engine"]["simulated"]
    result = run_to_the_end(tmp_path, over)
    assert_one_line(
        result,
        EXIT_CONFIG,
        "rollout.engine.flags.max_total_token",
        "the nearest is max_total_tokens",
    )
    assert "incarnation 2" not in result.stdout


# -- the rollout role with an engine that fails ----------------------------------------------------


WHOLE = 8
"""Responses of a step: four prompt groups of two."""
MOMENT_S = 0.2


class FaultyEngine:
    """An engine whose batches and answers are faults, as `script` says: one entry a batch, that is,
    for the whole step or for what is asked within a moment; then all is well. The first
    `bad_updates` updates fail, and leave weights of which nothing is known."""

    name = "faulty"
    pause_s = 0.0

    def __init__(self, script: list[str], bad_updates: list[int] | None = None) -> None:
        self.script, self.bad_updates = script, bad_updates or []
        self.version: Version | None = None
        self.closed = False
        self.gathered: list[tuple[GenerateRequest, asyncio.Future[Generation]]] = []
        self.last: asyncio.TimerHandle | None = None
        self.batches: set[asyncio.Task[None]] = set()

    async def start(self) -> None: ...

    async def close(self) -> None:
        self.closed = True

    phase = ""

    async def wait_dead(self) -> str:
        return await asyncio.get_running_loop().create_future()

    async def update_weights(self, directory: Path, version: Version) -> None:
        assert (directory / "model.safetensors").exists() and not self.closed
        self.version = None
        if self.bad_updates and self.bad_updates.pop():
            raise EngineFault("update_failed", f"{version}: half of it")
        self.version = version

    async def generate(self, request: GenerateRequest) -> Generation:
        assert self.version, "never asked while its weights are not known"
        answer = asyncio.get_running_loop().create_future()
        self.gathered.append((request, answer))
        if self.last:
            self.last.cancel()
        self.last = asyncio.get_running_loop().call_later(
            0.0 if len(self.gathered) == WHOLE else MOMENT_S, self.begin
        )
        return await answer

    def begin(self) -> None:
        asked, self.gathered = self.gathered, []
        self.batches.add(asyncio.create_task(self.answer(asked)))

    async def answer(self, asked: list[tuple[GenerateRequest, asyncio.Future[Generation]]]) -> None:
        found = await self.batch([request for request, _ in asked])
        for (_, answer), made in zip(asked, found, strict=True):
            if not answer.done():
                (answer.set_exception if isinstance(made, EngineFault) else answer.set_result)(made)

    async def batch(self, requests: Sequence[GenerateRequest]) -> list[Generation | EngineFault]:
        what = self.script.pop(0) if self.script else "well"
        if what == "timeout":
            return [EngineFault("timeout", "/generate: no answer within 2 s") for _ in requests]
        if what == "old":
            return [EngineFault("old_version", "found tokens of version 0") for _ in requests]
        versions = np.full(2, self.version.encode(), np.int32)
        answers: list = [Generation([7, EOS_ID], [-0.5, -0.5], versions, "stop") for _ in requests]
        if what == "nan":
            answers[1] = BadAnswer("nan_logprob", "found nan at response token 0")
        return answers


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest):
    """A run whose queue is served in a thread, with one published version; `world.rollout(script)`
    runs the role. A parameter is `eval.every`."""
    run = make_run(tmp_path / "run")
    settings = make_data(tmp_path)
    (tmp_path / "model").rename(run.model)
    config = Config(steps=1, prompts_per_step=4, samples_per_prompt=2)
    config.eval.every, config.queue.wait_timeout_s = getattr(request, "param", 0), 20.0
    config.data.train, config.rollout.groups_per_request = settings["data"]["train"], 4
    config.groups = {name: GroupConfig(roles=[name]) for name in ("rollout", "actor")}
    with in_thread(run, config) as controller, QueueClient(run, config, "actor", 1) as actor:
        actor.connection.call("resume", step=0)
        publish(run, actor, Version(1, 0), {"weight": torch.zeros(1)})

        def act(
            script: list[str],
            incarnation: int = 1,
            bad_updates: list[int] | None = None,
            kind=FaultyEngine,
        ) -> None:
            monkeypatch.setattr(replica, "make_engine", lambda *_: kind(script, bad_updates))
            with QueueClient(run, config, "rollout", incarnation) as client:
                spans = Spans(tmp_path / "spans.jsonl", "rollout")
                world = World(0, 1, 0, [{}])
                rollout_role.run(
                    Context(
                        run,
                        config,
                        "rollout",
                        "rollout",
                        incarnation,
                        world,
                        client,
                        spans,
                        SignalFlag(),
                    )
                )

        yield SimpleNamespace(
            run=run, config=config, controller=controller, actor=actor, rollout=act
        )


def use_reward(monkeypatch: pytest.MonkeyPatch, reward: Reward) -> None:
    """Have the role compute it, in its threads."""
    monkeypatch.setattr(
        group_rewards,
        "make_rewards",
        lambda name, workers, limit_s, *about: InThread(reward, limit_s),
    )


def train_the_step(actor: QueueClient, run: RunDir) -> None:
    """What an actor does with the only step of the run."""
    leases, tickets = [], 0
    while tickets < 4:
        claim = actor.claim("actor", 1 << 20)
        leases, tickets = [*leases, claim.lease], tickets + len(claim.tickets)
    publish(run, actor, Version(1, 1), {"weight": torch.ones(1)})
    actor.connection.call("trained", step=0, leases=leases)
    actor.connection.call("checkpoint", step=1, name="i000001-step-000001", digest="")


def test_faults_of_the_engine_are_counted_and_the_run_goes_on(world: SimpleNamespace) -> None:
    trainer = threading.Thread(target=train_the_step, args=(world.actor, world.run))
    trainer.start()
    world.rollout(["timeout", "timeout", "nan"])
    trainer.join(20.0)
    state: Controller = world.controller.state
    assert state.progress.finished() and state.counts.noted == {"engine_fault/timeout": 2}
    assert state.counts.dropped == {"nan_logprob": 2}, (
        "both samples of the prompt group whose second one was bad"
    )


def test_an_engine_with_half_an_update_is_replaced(world: SimpleNamespace) -> None:
    trainer = threading.Thread(target=train_the_step, args=(world.actor, world.run))
    trainer.start()
    world.rollout([], bad_updates=[0, 1, 1])
    trainer.join(20.0)
    assert world.controller.state.progress.finished()
    assert world.controller.state.counts.noted == {"engine_fault/update_failed": 2}


def test_an_engine_whose_later_update_fails_is_replaced_too(world: SimpleNamespace) -> None:
    trainer = threading.Thread(target=train_the_step, args=(world.actor, world.run))
    trainer.start()
    world.rollout([], bad_updates=[1, 0])
    trainer.join(20.0)
    assert world.controller.state.progress.finished()
    assert world.controller.state.counts.noted == {"engine_fault/update_failed": 1}


def test_an_engine_that_answers_by_older_weights_is_replaced(world: SimpleNamespace) -> None:
    trainer = threading.Thread(target=train_the_step, args=(world.actor, world.run))
    trainer.start()
    world.rollout(["old", "well", "old"])
    trainer.join(20.0)
    state: Controller = world.controller.state
    assert (
        state.progress.finished()
        and state.counts.noted == {"engine_fault/old_version": 1}
        and not state.counts.dropped
    )


class OldGreedyEngine(FaultyEngine):
    """As many greedy requests as there are `faults` are answered by older weights."""

    faults: list[str]

    async def generate(self, request: GenerateRequest) -> Generation:
        if request.sampling.temperature or not self.faults:
            return await super().generate(request)
        self.faults.pop()
        raise EngineFault("old_version", "found tokens of version 0")


@pytest.mark.parametrize("world", [1], indirect=True)
def test_an_engine_that_evaluates_by_older_weights_is_replaced_and_evaluates(
    world: SimpleNamespace,
) -> None:
    world.config.data.eval = {"heldout": world.config.data.train}
    trainer = threading.Thread(target=train_the_step, args=(world.actor, world.run))
    trainer.start()
    world.rollout([], kind=type("Old", (OldGreedyEngine,), {"faults": ["old"]}))
    trainer.join(20.0)
    state: Controller = world.controller.state
    assert state.progress.finished() and state.counts.noted == {"engine_fault/old_version": 1}


def test_a_group_whose_engines_all_answer_by_older_weights_ends(world: SimpleNamespace) -> None:
    with pytest.raises(RelaxError, match=r"faulty: 3 engines in a row, last: old_version"):
        world.rollout(["old"] * 9)


def test_a_group_whose_updates_all_fail_ends(world: SimpleNamespace) -> None:
    with pytest.raises(
        RelaxError, match=r"faulty: 3 engines in a row, last: update_failed: .* half of it"
    ):
        world.rollout([], bad_updates=[1] * 9)


def test_a_reward_that_hangs_costs_its_request(
    world: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang, calls = threading.Event(), iter([True])

    def reward(_: RewardInput) -> float:
        if next(calls, False):
            hang.wait(WAIT_S)
        return 1.0

    use_reward(monkeypatch, reward)
    world.config.rollout.reward_timeout_s = 0.3
    trainer = threading.Thread(target=train_the_step, args=(world.actor, world.run))
    trainer.start()
    try:
        world.rollout([])
    finally:
        hang.set()
        trainer.join(20.0)
    state: Controller = world.controller.state
    assert state.progress.finished() and state.counts.dropped.keys() == {"reward_timeout"}


def test_a_reward_that_would_end_the_process_costs_its_group(
    world: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    calls = iter([True])
    use_reward(monkeypatch, lambda _: sys.exit(3) if next(calls, False) else 1.0)
    trainer = threading.Thread(target=train_the_step, args=(world.actor, world.run))
    trainer.start()
    world.rollout([])
    trainer.join(20.0)
    state: Controller = world.controller.state
    assert state.progress.finished() and state.counts.dropped == {"reward_exception": 2}
    assert "reward_exception: SystemExit: 3 (prompt p" in capsys.readouterr().out


def test_a_ticket_may_fail_as_often_as_the_share_of_failures_allows(
    world: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here three of four prompts fail, whichever they are tried for; each is counted, and others
    take their tickets."""

    def reward(sample: RewardInput) -> float:
        return 1 / (int(sample.prompt[:-1]) % 4 == 3)

    use_reward(monkeypatch, reward)
    world.config.rollout.max_failed_share = 0.9
    trainer = threading.Thread(target=train_the_step, args=(world.actor, world.run))
    trainer.start()
    world.rollout([])
    trainer.join(20.0)
    state: Controller = world.controller.state
    failures = [group.failures for group in state.groups.values()]
    assert state.progress.finished() and max(failures) > 4, failures
    assert state.counts.dropped == {"reward_exception": 2 * sum(failures)}


def test_the_share_alone_says_how_much_may_fail() -> None:
    """A fifth of all, at random, for as long as one likes; but not what was found bad once it was
    put; nor all."""
    draw, shape = random.Random(5), RolloutConfig(max_failed_share=0.5)
    failure, outcomes = Failure("reward_exception", "no"), Outcomes(shape)
    for _ in range(20_000):
        outcomes.count(failure if draw.random() < 0.2 else [])
        outcomes.check_share(failure)
    outcomes.note_failures(7, 9)
    outcomes.count_lost(7, 9, "is known")
    with pytest.raises(
        NoProgressError, match="% of the last 64 prompt groups failed, the last by it was put"
    ):
        for ticket in range(100):
            outcomes.count([])
            outcomes.count_lost(ticket, 1, "it was put")
    everything = Outcomes(RolloutConfig(max_failed_share=1.0))
    with pytest.raises(NoProgressError, match="100% of the last 64"):
        for _ in range(64):
            everything.count(failure)
            everything.check_share(failure)


def test_bad_lines_are_counted_once_a_run(world: SimpleNamespace) -> None:
    path = Path(world.config.data.train)
    path.write_text("\n".join([path.read_text().strip(), *BAD_LINES]))
    world.config.data.max_bad_share, world.config.data.max_prompt_tokens = 0.2, 8
    for incarnation in (1, 2):
        with pytest.raises(RelaxError, match="faulty failed 3 times"):
            world.rollout(["timeout"] * 3, incarnation)
    noted = world.controller.state.counts.noted
    assert noted == {f"bad_prompt/{reason}": 1 for reason in REASONS} | {"engine_fault/timeout": 6}


def test_an_engine_that_only_fails_ends_its_group(world: SimpleNamespace) -> None:
    with pytest.raises(
        RelaxError, match=r"faulty failed 3 times in a row, last: timeout: .* within 2 s"
    ):
        world.rollout(["timeout"] * 3)
    assert world.controller.state.counts.noted == {"engine_fault/timeout": 3}


def test_a_filter_that_drops_some_groups_has_them_replaced(
    world: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts that are odd are dropped."""
    world.config.rollout.filter = "tests.runs.test_bad_input:never_equal"
    use_reward(monkeypatch, lambda sample: float(int(sample.prompt[:-1]) % 2))
    reported: list[dict[str, float]] = []
    world.controller.service.on_report = lambda role, step, values, seconds: reported.append(values)
    trainer = threading.Thread(target=train_the_step, args=(world.actor, world.run))
    trainer.start()
    world.rollout([])
    trainer.join(20.0)
    state: Controller = world.controller.state
    assert (
        state.progress.finished()
        and state.counts.dropped["filtered"]
        == 2 * sum(g.filtered for g in state.groups.values())
        > 0
    )
    dump(world.config, world.run.config)
    assert all(int(row["prompt_id"][1:]) % 2 == 0 for row in queue_rows(world.run).values())
    drawn, rewards = (
        sum(values.get(tag, 0.0) for values in reported) for tag in (GENERATED, GENERATED_SUM)
    )
    assert (drawn, rewards) == (
        state.counts.dropped["filtered"] + 8,
        state.counts.dropped["filtered"],
    ), "odd ones gave 1, even ones 0"
    assert {event["reason"] for event in read_events(world.run) if event["what"] == "failed"} == {
        "filtered"
    }


def never_equal(rewards: Sequence[float]) -> bool:
    """A user's filter: groups of odd prompts are not wanted."""
    return not any(rewards)


def test_a_filter_that_drops_everything_ends_the_run(world: SimpleNamespace) -> None:
    world.config.rollout.filter = "rewards_differ"
    expected = (
        r"filter rewards_differ dropped 100.0% of the last 256 prompt groups, the last "
        r"with "
        r"rewards \[0.0\]"
    )
    with pytest.raises(NoProgressError, match=expected):
        world.rollout([])
    assert world.controller.state.counts.dropped["filtered"] >= 2 * 256 - 8


def test_too_large_a_share_of_failures_ends_the_run(world: SimpleNamespace) -> None:
    world.config.samples_per_prompt = 2
    world.config.rollout.reward = "builtins:len"
    with pytest.raises(
        NoProgressError, match=r"100% of the last 64 prompt groups failed.*reward_.*=50%"
    ):
        world.rollout([])
