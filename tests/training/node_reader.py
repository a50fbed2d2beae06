"""`python -m tests.training.node_reader RUN NAME FOLDER SILENCE_S`: a reader of weights on a node of its
own, for all it knows.

It does what lines on stdin say, and prints what it did as lines of JSON. `fetch N`: get the newest
version, standing still once it has N records of it, until a line says `go`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import xxhash

from relax_hpc.base.rundir import RunDir
from relax_hpc.net.rendezvous.process import die_with_parent
from relax_hpc.queue.client import QueueClient
from relax_hpc.training.weights import relay
from relax_hpc.training.weights.manifest import Chunk
from relax_hpc.training.weights.node_cache import Staging
from relax_hpc.training.weights.subscriber import NOTHING, Subscriber
from relax_hpc.training.weights.version_files import TENSORS
from tests.helpers.queue_helpers import small

WAIT_S = 120.0


class Node:
    """Such a process, from outside."""

    def __init__(self, run: RunDir, name: str, folder: Path, silence_s: float) -> None:
        self.folder = folder / name
        words = [
            sys.executable,
            "-m",
            "tests.training.node_reader",
            str(run.root),
            name,
            str(self.folder),
            str(silence_s),
        ]
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def say(self, line: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout
        return json.loads(self.process.stdout.readline())

    def fetch(self) -> dict[str, Any]:
        """What it has got, by which ways."""
        self.say("fetch")
        return self.hear()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


def _tell(**what: object) -> None:
    print(json.dumps(what), flush=True)


class _Reader:
    def __init__(self, run: RunDir, client: QueueClient, name: str, folder: Path) -> None:
        planes = [plane for plane in client.store.planes if plane.name == "tcp"]
        settings = client.config.weights
        self.subscriber = Subscriber(run, client, f"rollout/{name}", planes, settings, relays=True)
        self.subscriber.fetcher.staging = Staging(folder)
        self.go, self.hold_at, self.count, self.lock = threading.Event(), 0, 0, threading.Lock()
        add = relay.SharedVersion.add

        def added(share: relay.SharedVersion, chunk: Chunk) -> None:
            add(share, chunk)
            with self.lock:
                self.count += 1
                if hold := self.count == self.hold_at:
                    _tell(has=self.count, bytes=self.subscriber.fetcher.puller.bytes)
                if hold or (self.hold_at and self.count > self.hold_at and not self.go.is_set()):
                    self.go.wait(WAIT_S)

        relay.SharedVersion.add = added

    def fetch(self, hold_at: int) -> None:
        self.go.clear()
        self.hold_at, self.count = hold_at, 0
        fetcher = self.subscriber.fetcher
        fetcher.puller.bytes.clear()
        news = self.subscriber.client.weights.newer(NOTHING).result(WAIT_S)
        staged = fetcher.fetch(news)
        found = xxhash.xxh3_64_hexdigest((staged.path / TENSORS).read_bytes())
        staged.release()
        fetcher.forget_before(news.version)
        _tell(version=news.version, digest=found, bytes=fetcher.puller.bytes)


def main(root: str, name: str, folder: str, silence_s: str) -> None:
    die_with_parent()
    relay._SILENCE_S = float(silence_s)
    run = RunDir(Path(root))
    with QueueClient(run, small(), "rollout", 1, name) as client:
        reader = _Reader(run, client, name, Path(folder))
        _tell(ready=name)
        for line in sys.stdin:
            word, _, hold_at = line.strip().partition(" ")
            if word == "go":
                reader.go.set()
            else:
                threading.Thread(
                    target=reader.fetch, args=(int(hold_at or 0),), daemon=True
                ).start()


if __name__ == "__main__":
    main(*sys.argv[1:])
