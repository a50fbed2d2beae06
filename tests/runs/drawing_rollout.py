"""The rollout role in processes that are killed: with its real engine, which writes down each token
that it draws."""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.process
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from multiprocessing import forkserver
from pathlib import Path

from relax_hpc.base.metrics.spans import Spans
from relax_hpc.base.rundir import RunDir
from relax_hpc.base.transformers_hook import install_transformers_hook
from relax_hpc.config import load_resolved
from relax_hpc.config.schema import Config, GroupConfig
from relax_hpc.net.rendezvous.process import SignalFlag
from relax_hpc.net.rendezvous.world import World
from relax_hpc.queue.client import QueueClient
from relax_hpc.queue.process_context import Context
from relax_hpc.rewards import RewardInput
from relax_hpc.roles import rollout as rollout_role
from relax_hpc.rollout import rollout_rank
from relax_hpc.rollout.engines import transformers_engine as engine

install_transformers_hook()
import_module("transformers.models.qwen3.modeling_qwen3")

PROCESSES = multiprocessing.get_context("forkserver")
"""So that the libraries are imported once, and not by every incarnation."""
LONG = 12
"""Tokens of every response."""
LONGER = 200
"""Tokens that SGLang needs some time for."""


def config_of(run: RunDir, mode: str, every_s: float = 0.1) -> Config:
    config = Config(steps=1, prompts_per_step=4, samples_per_prompt=2)
    config.eval.every, config.queue.wait_timeout_s, config.liveness.beat_s = 0, 60.0, 0.05
    config.data.train, config.data.shuffle = str(run.root.parent / "train.jsonl"), False
    (
        config.rollout.max_new_tokens,
        config.rollout.groups_per_request,
        config.rollout.requests_in_flight,
    ) = LONG, 2, 1
    config.rollout.engine.kind, config.rollout.save_partial = "transformers", mode
    config.rollout.save_partial_every_s = every_s
    # A process of its own would have to import all that this one has.
    config.rollout.reward, config.rollout.reward_workers = f"{__name__}:counted", 0
    config.groups = {name: GroupConfig(roles=[name]) for name in ("rollout", "actor")}
    return config


def sglang_process(path: Path, incarnation: int) -> None:
    """The rollout role with SGLang, responses long enough to be killed in, and what there is of
    them told at once."""
    os.chdir(path.parent)
    run = RunDir(path)
    config = config_of(run, "tokens")
    config.rollout.engine.kind, config.rollout.max_new_tokens = "sglang", LONGER
    config.rollout.engine.flags = {"stream_interval": 4}
    serve(run, config, incarnation)


def routes_process(path: Path, incarnation: int) -> None:
    """The rollout role with an engine of one's own, which declares a field."""
    os.chdir(path.parent)
    run = RunDir(path)
    serve(run, load_resolved(path), incarnation)


def rollout_process(
    path: Path, incarnation: int, draws: int, mode: str, every_s: float, turn: int
) -> None:
    """The rollout role with its real engine, which writes down each token that it draws and hangs
    after ``draws``. ``turn``: tokens of one of several turns, against an environment; 0: an episode
    is one response."""
    os.chdir(path.parent)
    run, real, made = RunDir(path), engine.keyed_uniform, 0
    config = config_of(run, mode, every_s)
    if turn:
        config.environment.kind, config.rollout.max_new_tokens = (
            "tests.runs.turns_environments:Thrice",
            4 * LONG,
        )
        config.rollout.reward = "environment"
        # The environment's process has to find it too.
        os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])

    def keyed_uniform(seed: int, prompt_id: str, sample: int, position: int) -> float:
        nonlocal made
        if made == draws:
            threading.Event().wait()
        made += 1
        with (path.parent / "drawn.jsonl").open("a") as log:
            log.write(json.dumps([prompt_id, sample, position]) + "\n")
        return real(seed, prompt_id, sample, position)

    engine.keyed_uniform = keyed_uniform
    if turn:
        engine.Stops.met = lambda self, token_ids, begun=0: len(token_ids) == begun + turn
    # No token is an end: every response is as long as allowed.
    engine._build = lambda *args, build=engine._build: (build(*args)[0], set())
    rollout_rank.load_tokenizer = lambda *args, load=rollout_rank.load_tokenizer: Endless(
        load(*args)
    )
    serve(run, config, incarnation)


def serve(run: RunDir, config: Config, incarnation: int) -> None:
    with QueueClient(run, config, "rollout", incarnation) as client:
        spans = Spans(run.root / f"spans-{incarnation}.jsonl", "rollout")
        world = World(0, 1, 0, [{}])
        rollout_role.run(
            Context(
                run, config, "rollout", "rollout", incarnation, world, client, spans, SignalFlag()
            )
        )


def counted(sample: RewardInput) -> float:
    """A reward that does not come while there is a file `slow` in the working directory."""
    if Path("slow").exists():
        threading.Event().wait()
    return float(len(sample.response_text))


class Endless:
    """A tokenizer that knows no end token."""

    eos_ids = ()

    def __init__(self, real) -> None:
        self.real = real

    def __getattr__(self, name: str):
        return getattr(self.real, name)


@contextmanager
def rollout_of(
    run: RunDir, incarnation: int, draws: int, mode: str, every_s: float = 0.1, turn: int = 0
) -> Iterator[multiprocessing.process.BaseProcess]:
    with in_process(rollout_process, run.root, incarnation, draws, mode, every_s, turn) as process:
        yield process


@contextmanager
def in_process(
    target: Callable[..., None], *args: object
) -> Iterator[multiprocessing.process.BaseProcess]:
    """A role's process, which is killed at the end."""
    PROCESSES.set_forkserver_preload([__name__])
    process = PROCESSES.Process(target=target, args=args)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join(20.0)
        assert process.exitcode is not None


def drawn(run: RunDir) -> Counter[tuple[str, int, int]]:
    """How often each token was drawn: (prompt, sample, position)."""
    path = run.root.parent / "drawn.jsonl"
    return (
        Counter(tuple(json.loads(line)) for line in path.read_text().splitlines())
        if path.exists()
        else Counter()
    )


def stop_server() -> None:
    """End the process from which the others are forked."""
    forkserver._forkserver._stop()
