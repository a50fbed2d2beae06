"""Queues for tests: small configurations, rows, and controllers in a thread or in a process of
their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from relax_hpc.base.rundir import RunDir
from relax_hpc.base.versions import Version
from relax_hpc.config.schema import Config, Durability, optional_groups
from relax_hpc.net.rendezvous.roster import GroupCard, claim_incarnation, publish_card
from relax_hpc.net.transport.sockets import FrameConnection, connect, wake_listener
from relax_hpc.net.transport.wire import controller_purpose
from relax_hpc.queue.client import QueueClient
from relax_hpc.queue.controller.server import Controller
from relax_hpc.queue.controller.snapshots import RECORDS
from relax_hpc.queue.plan import Plan
from relax_hpc.queue.row_ids import row_id
from relax_hpc.queue.row_schema import Row

BUDGET = 1 << 30
SERVER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.helpers.queue_helpers import serve_here, small
serve_here(Path(sys.argv[2]), int(sys.argv[3]), snapshot_every=int(sys.argv[4]))
"""


def small(
    groups: int = 2, samples: int = 2, steps: int = 4, staleness: int = 0, **more: int
) -> Config:
    """A run of few samples with every role, without evaluation and with quick beats."""
    config = Config(
        steps=steps, prompts_per_step=groups, samples_per_prompt=samples, max_staleness=staleness
    )
    config.groups |= {name: group for name, group in optional_groups().items() if name in GIVES}
    config.eval.every = more.get("eval_every", 0)
    config.queue.keep_steps = more.get("keep_steps", 2)
    config.queue.wait_timeout_s = 20.0
    config.liveness.beat_s = 0.05
    return config


def make_run(path: Path) -> RunDir:
    run = RunDir(path)
    run.create()
    return run


def serve_here(
    path: Path,
    incarnation: int,
    config: Config | None = None,
    snapshot_every: int = RECORDS,
    gathers: bool = False,
) -> None:
    """What a controller process of a test does, until it is killed."""
    run = RunDir(path)
    controller = Controller(
        run,
        Plan.from_config(config or small()),
        incarnation,
        snapshot_every=snapshot_every,
        gathers=gathers,
    )
    publish_card(run, GroupCard("hub", incarnation, [], controller.endpoint))
    controller.serve(lambda: False)


@contextmanager
def in_thread(
    run: RunDir, config: Config, snapshot_every: int = RECORDS, durability: Durability = "commit"
) -> Iterator[Controller]:
    """A controller of the next hub incarnation in a thread of this process."""
    incarnation = claim_incarnation(run, "hub")
    controller = Controller(
        run,
        Plan.from_config(config),
        incarnation,
        durability=durability,
        snapshot_every=snapshot_every,
    )
    publish_card(run, GroupCard("hub", incarnation, [], controller.endpoint))
    stop = threading.Event()
    thread = threading.Thread(target=lambda: controller.serve(stop.is_set))
    thread.start()
    try:
        yield controller
    finally:
        stop.set()
        wake_listener(controller.endpoint, 10.0)
        thread.join(timeout=60)
        controller.close()


def dial(run: RunDir, endpoint: str, incarnation: int) -> FrameConnection:
    """A connection of who holds the run's token to the controller of this hub incarnation."""
    return connect(endpoint, run.token(), controller_purpose(incarnation), 10.0)


def next_payload(connection: FrameConnection, seconds: float = 5.0) -> memoryview:
    """What comes first. TimeoutError: nothing does."""
    connection.socket.settimeout(seconds)
    while not (payloads := connection.payloads(1)):
        connection.receive()
    return payloads[0]


class HubProcess:
    """A controller (of ``small()``) in a process of its own, to be killed."""

    def __init__(self, run: RunDir, snapshot_every: int = RECORDS) -> None:
        self.incarnation = claim_incarnation(run, "hub")
        root = str(Path(__file__).resolve().parents[2])
        words = [
            sys.executable,
            "-c",
            SERVER,
            root,
            str(run.root),
            str(self.incarnation),
            str(snapshot_every),
        ]
        self.process = subprocess.Popen(words)

    def kill(self) -> None:
        """Without a chance to tidy up."""
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(timeout=60)

    def __enter__(self) -> HubProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def rows_of(
    tickets: Sequence[int],
    version: Version,
    samples: int = 2,
    length: int = 5,
    episodes: bytes = b"",
) -> list[Row]:
    """Whole generated prompt groups: two prompt tokens, then ``length - 2`` by ``version``.

    ``episodes``: how many rows each has, instead of one for each of ``samples``.
    """
    versions = np.array([0, 0] + [version.encode()] * (length - 2), dtype=np.int32)
    return [
        {
            "row_id": row_id(ticket, k, row),
            "prompt_id": f"p{ticket}",
            "ticket": ticket,
            "episode": k,
            "row": row,
            "token_ids": np.arange(length, dtype=np.int32) + 100 * ticket + 10 * k + row,
            "prompt_len": 2,
            "loss_mask": (versions > 0).astype(np.uint8),
            "rollout_logprobs": np.full(length, -1.0 - k, np.float32),
            "token_versions": versions,
            "reward": float(k),
            "spans": [],
            "finish_reason": "stop",
        }
        for ticket in tickets
        for k, count in enumerate(episodes or bytes([1]) * samples)
        for row in range(count)
    ]


def learned(rows: Sequence[Row], version: Version) -> list[Row]:
    """``rows`` with what the forward roles and the advantages add."""
    return [
        {
            **row,
            "old_logprobs": row["rollout_logprobs"],
            "old_logprob_version": version.encode(),
            "ref_logprobs": row["rollout_logprobs"] * 2,
            "advantages": row["loss_mask"].astype(np.float32),
        }
        for row in rows
    ]


GIVES = {
    "actor_fwd": ("old_logprobs", "old_logprob_version"),
    "reference": ("ref_logprobs",),
    "advantages": ("advantages",),
}


class Roles:
    """One client a role, each with its step of work. ``episodes``: rows of each, instead of one."""

    def __init__(
        self, run: RunDir, config: Config, incarnation: int = 1, episodes: bytes = b""
    ) -> None:
        self.config, self.incarnation, self.episodes = config, incarnation, episodes
        groups = {
            "actor": "actor",
            "rollout": "rollout",
            "actor_fwd": "actor_fwd",
            "reference": "reference",
        }
        groups["advantages"] = "hub"
        self.clients = {
            role: QueueClient(run, config, group, incarnation, role)
            for role, group in groups.items()
        }

    def __getitem__(self, role: str) -> QueueClient:
        return self.clients[role]

    def waits(self, text: str) -> bool:
        """Whether status says, soon, that somebody waits for what ``text`` says: nothing orders
        what is asked on one connection before what is asked on another."""
        until = time.monotonic() + self.config.queue.wait_timeout_s
        while not (
            found := any(
                text in why for why in self["advantages"].connection.call("status")["waiting"]
            )
        ):
            if time.monotonic() > until:
                break
        return found

    def start(self, step: int = 0) -> Version:
        """Resume at ``step`` and publish its weights."""
        version = Version(self.incarnation, step)
        self["actor"].connection.call("resume", step=step)
        self["actor"].connection.call("publish", version=str(version), digest="d")
        return version

    def admit(self, version: Version, count: int = BUDGET) -> list[int]:
        self["rollout"].connection.call("serve", reader="rollout/0", version=str(version))
        return self["rollout"].connection.call("admit", reader="rollout/0", count=count)["tickets"]

    def generate(self, version: Version) -> list[int]:
        tickets = self.admit(version)
        made = rows_of(tickets, version, self.config.samples_per_prompt, episodes=self.episodes)
        assert self["rollout"].put_generated(made) == {}
        self["rollout"].settle()
        return tickets

    def learn(self, version: Version) -> None:
        """Each middle role takes one window and answers it."""
        for role, fields in GIVES.items():
            claim = self[role].claim(role, BUDGET)
            assert claim is not None
            assert self[role].put(learned(self[role].rows(claim), version), fields, claim) == {}
            self[role].settle()

    def train(self, step: int) -> list[Row]:
        claim = self["actor"].claim("actor", BUDGET)
        assert claim is not None and claim.step == step
        rows = self["actor"].rows(claim)
        self["actor"].connection.call(
            "publish", version=str(Version(self.incarnation, step + 1)), digest="d"
        )
        self["actor"].connection.call("trained", step=step, leases=[claim.lease])
        return rows

    def step(self, step: int) -> list[Row]:
        """A whole synchronous step."""
        version = Version(self.incarnation, step)
        self.generate(version)
        self.learn(version)
        return self.train(step)

    def __enter__(self) -> Roles:
        return self

    def __exit__(self, *_: object) -> None:
        for client in self.clients.values():
            client.close()
