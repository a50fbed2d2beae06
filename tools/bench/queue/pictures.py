"""Media from the process that stores them to one that claims the samples which name them, checks
and reads them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from data import ALL, Load, Memcpy, config_of
from work import VERSION, begin, hub, process, receive

from relax_hpc.base.rundir import RunDir
from relax_hpc.config.schema import Config
from relax_hpc.queue import Claim, Plan, QueueClient
from relax_hpc.queue.client.claims import check_claim
from relax_hpc.queue.client.media_client import store_media
from relax_hpc.queue.row_ids import row_id
from relax_hpc.queue.row_schema import Row
from relax_hpc.queue.storage.media import media_ids

PLACEHOLDER = 99


@dataclass(frozen=True, slots=True)
class Pictures:
    """Prompt groups whose samples all name the same media, of `size` bytes each."""

    name: str = "pictures of 1024 x 1024"
    groups: int = 16
    samples: int = 8
    pictures: int = 2
    size: int = 3 << 20
    tokens: int = 256
    """Of a medium, and of a response."""

    @property
    def bytes(self) -> int:
        return self.groups * self.pictures * self.size

    def peer_load(self) -> tuple[list[int], int]:
        """Lengths and fields of int32 rows that have the same bytes, each medium once."""
        return [self.size // 4] * (self.groups * self.pictures), 1

    def config(self) -> Config:
        config = config_of(Load(self.groups * self.samples, self.tokens, 1), "flush")
        config.prompts_per_step, config.samples_per_prompt = self.groups, self.samples
        return config

    def rows(self, ticket: int, ids: list[str]) -> list[Row]:
        prompt = np.full(self.pictures * self.tokens, PLACEHOLDER, np.int32)
        tokens = np.concatenate([prompt, np.arange(200, 200 + self.tokens, dtype=np.int32)])
        versions = np.where(np.arange(len(tokens)) < len(prompt), 0, VERSION.encode()).astype(
            np.int32
        )
        places = {"kind": "image", "length": self.tokens}
        row = {
            "prompt_id": "p",
            "ticket": ticket,
            "token_ids": tokens,
            "prompt_len": len(prompt),
            "loss_mask": (versions != 0).astype(np.uint8),
            "rollout_logprobs": np.zeros(len(tokens), np.float32),
            "token_versions": versions,
            "reward": 1.0,
            "finish_reason": "stop",
            "spans": [
                {**places, "start": self.tokens * k, "media_id": name} for k, name in enumerate(ids)
            ],
            "media_tokens": dict.fromkeys(ids, self.tokens),
        }
        return [
            {"row_id": row_id(ticket, k), "episode": k, "row": 0, **row}
            for k in range(self.samples)
        ]


def make(run: RunDir, about: Pictures, pipe: Connection) -> None:
    """Store media that nobody has seen, and put the rows that name them; tell the seconds of
    each."""
    random = np.random.default_rng(0)
    with QueueClient(run, about.config(), "rollout", 1) as client:
        client.connection.call("serve", reader="r", version=str(VERSION))
        pipe.send("ready")
        while pipe.recv() != "end":
            tickets = client.connection.call("admit", reader="r", count=about.groups)["tickets"]
            media = [
                [random.integers(0, 256, about.size, np.uint8) for _ in range(about.pictures)]
                for _ in tickets
            ]
            began = time.perf_counter()
            ids = [
                store_media(client, ticket, found)
                for ticket, found in zip(tickets, media, strict=True)
            ]
            stored = time.perf_counter()
            rows = [
                row
                for ticket, names in zip(tickets, ids, strict=True)
                for row in about.rows(ticket, names)
            ]
            made = time.perf_counter()
            assert client.put_generated(rows) == {}
            seconds = {"store": stored - began, "put": time.perf_counter() - made}
            client.settle()
            pipe.send(seconds)
    pipe.send("ended")


class Gallery:
    """A process that stores, and this one, which reads."""

    def __init__(self, client: QueueClient, maker: Connection, about: Pictures) -> None:
        self.client, self.maker, self.memcpy, self.step = client, maker, Memcpy(about.bytes), 0
        self.room = np.zeros(about.bytes, np.uint8)

    def round(self) -> dict[str, float]:
        """Seconds to store the media of a step, to put and claim the rows that name them, to check
        these and read everything, to check once more, and of a memcpy of the media."""
        self.maker.send("next")
        seconds = receive(self.maker)
        began = time.perf_counter()
        claim = self.client.claim("actor", ALL)
        assert claim is not None
        seconds["claim"] = time.perf_counter() - began
        seconds |= {
            "check": self._check(claim),
            "read": self._read(claim),
            "check again": self._check(claim),
        }
        seconds["memcpy"] = self.memcpy()
        self.client.connection.call("trained", step=self.step, leases=[claim.lease])
        self.step += 1
        self.client.connection.call("checkpoint", step=self.step, name=f"c{self.step}", digest="d")
        return seconds

    def _check(self, claim: Claim) -> float:
        started = time.perf_counter()
        assert check_claim(self.client, claim, {"image": PLACEHOLDER})
        return time.perf_counter() - started

    def _read(self, claim: Claim) -> float:
        started, end = time.perf_counter(), 0
        for media_id in media_ids(self.client.rows(claim)):
            blob = np.frombuffer(self.client.media.read(media_id), np.uint8)
            begin, end = end, end + len(blob)
            np.copyto(self.room[begin:end], blob)
        assert end == len(self.room), f"{end} bytes of {len(self.room)}"
        return time.perf_counter() - started


@contextmanager
def gallery(folder: Path, about: Pictures) -> Iterator[Gallery]:
    config = about.config()
    with hub(folder, Plan.from_config(config), "flush") as server:
        with (
            QueueClient(server.run, config, "actor", 1) as client,
            process(make, server.run, about) as maker,
        ):
            begin(lambda _, op, **args: client.connection.call(op, **args))
            receive(maker)
            yield Gallery(client, maker, about)
            maker.send("end")
            receive(maker)
        server.end()
