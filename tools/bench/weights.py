"""What publishing weights costs: the trainer, the readers, and until everybody serves them.

A real policy of megatron-core is published again and again, by the same code as in a run, with a
queue's controller beside. Readers are processes with staging folders of their own, as if each were
on its own node; they have two cores to share with the actor here, which bounds what is end to end.
Every figure stands beside its yardstick of the same run.

    python tools/bench/weights.py --layers 4 --readers 1 2 4 --engine --json
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from figures import Figure, print_figures

from relax_hpc.base.rundir import RunDir
from relax_hpc.base.versions import Version
from relax_hpc.config.schema import (
    Config,
    GroupConfig,
    ModelConfig,
    ParallelConfig,
    TinyModelConfig,
)
from relax_hpc.net.rendezvous.channel import RankChannel
from relax_hpc.net.rendezvous.process import die_with_parent
from relax_hpc.net.rendezvous.roster import GroupCard, claim_incarnation, publish_card
from relax_hpc.net.transport import TcpPlane
from relax_hpc.queue.client import PublishedVersion, QueueClient
from relax_hpc.queue.controller.relays import FAN_OUT
from relax_hpc.queue.controller.server import Controller
from relax_hpc.queue.plan import Plan
from relax_hpc.rollout.engines.sglang.slab_loader import copying
from relax_hpc.training import parallel
from relax_hpc.training.model import PolicyModel
from relax_hpc.training.models.hf_files import SafetensorFiles, read_config
from relax_hpc.training.models.hf_mapping import fuse
from relax_hpc.training.models.tiny_model import make_tiny_model
from relax_hpc.training.weights import delta
from relax_hpc.training.weights.manifest import Chunk, Manifest, read_manifest
from relax_hpc.training.weights.node_cache import Staging
from relax_hpc.training.weights.publisher import Publisher
from relax_hpc.training.weights.slab import MARK, open_slab
from relax_hpc.training.weights.subscriber import Subscriber
from relax_hpc.training.weights.tensors import SafetensorsFile, TensorInfo, TensorPart
from relax_hpc.training.weights.transfers import Transfers
from relax_hpc.training.weights.version_files import TENSORS

WAIT_S = 120.0
LEARNING_RATE = 1e-6
STALL, PULL, DELTA, LOAD = 1.2, 0.8, 0.1, 0.5
"""Targets: stall of one memcpy, pull of the plane's raw read, bytes of a difference of the whole, a
reader's load of a memcpy."""


# -- the actor -------------------------------------------------------------------------------------


class Actor:
    """A policy with its publisher, a queue beside it, and no training."""

    def __init__(self, folder: Path, shape: TinyModelConfig) -> None:
        self.run, self.config, self.number = RunDir(folder / "run"), Config(prompts_per_step=1), -1
        self.run.create()
        self.config.groups = {name: GroupConfig(roles=[name]) for name in ("actor", "rollout")}
        self.config.weights.file_every = 0
        make_tiny_model(self.run.model, shape, 0)
        torch.set_num_threads(1)
        parallel.initialize_alone("cpu", 0, WAIT_S)
        self.model = PolicyModel(
            read_config(self.run.model), ModelConfig(dtype="bfloat16"), ParallelConfig()
        )
        self.model.load_hf(self.run.model)

    @contextmanager
    def working(self) -> Iterator[Actor]:
        """With its queue and its publisher."""
        self.controller = Controller(self.run, Plan.from_config(self.config), 1)
        claim_incarnation(self.run, "hub")
        publish_card(self.run, GroupCard("hub", 1, [], self.controller.endpoint))
        ended = threading.Event()
        thread = threading.Thread(target=self.controller.serve, args=(ended.is_set,), daemon=True)
        thread.start()
        with QueueClient(self.run, self.config, "actor", 1) as self.client:
            self.client.connection.call("resume", step=0)
            store, tensors, slices = self.client.store, self.model.tensors(), self.model.slices()
            self.publisher = Publisher(
                self.run,
                self.client,
                lambda: RankChannel(WAIT_S),
                store.planes,
                store.pool,
                tensors,
                slices,
                3,
                self.config.weights,
            )
            yield self
            self.publisher.settle(WAIT_S)
            self.publisher.close()
        ended.set()
        thread.join()

    def publish(self) -> float:
        """One more version; how long the trainer is kept."""
        self.number += 1
        started = time.perf_counter()
        self.publisher.publish(Version(1, self.number))
        return time.perf_counter() - started

    def served_after(self, readers: int) -> float:
        """Seconds from asking for a version until so many readers say that they serve it."""
        started = time.perf_counter()
        self.publish()
        self.await_served(readers)
        return time.perf_counter() - started

    def await_served(self, readers: int) -> None:
        """Until so many readers say that they serve what was published last."""
        deadline, newest = time.monotonic() + WAIT_S, Version(1, self.number)
        while (
            sum(found == newest for _, found in self.controller.state.weights.readers.values())
            < readers
        ):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"version {self.number} is not served by {readers} readers in {WAIT_S:g} s"
                )
            time.sleep(0.001)


def stall(actor: Actor, rounds: int) -> list[Figure]:
    """What a publish keeps the trainer, and what a memcpy of its bytes in one piece takes, in
    turns, from memory like the parameters' to memory like the slabs'."""
    ring = actor.publisher.ring
    source = torch.ones(ring.bytes, dtype=torch.uint8).numpy()
    room = np.frombuffer(actor.client.store.pool.take(ring.bytes).memory, np.uint8)[: ring.bytes]
    kept, copied = [], []
    for _ in range(rounds):
        copied.append(timed(lambda: np.copyto(room, source)))
        kept.append(actor.publish())
        actor.publisher.settle(WAIT_S)
    ratios, times = quotients(kept, copied), [1e3 * one for one in kept]
    ratio = median(kept) / median(copied)
    return [
        Figure("weights of a rank", ring.bytes / 2**20, "MiB"),
        Figure("publish: trainer kept", median(times), "ms", rounds=times),
        Figure("publish: of one memcpy", ratio, "x", f"<= {STALL}", ratio <= STALL, ratios),
    ]


def quotients(times: Sequence[float], others: Sequence[float]) -> list[float]:
    """Of each round."""
    return [one / other for one, other in zip(times, others, strict=True)]


def differences(actor: Actor, steps: Sequence[int]) -> Iterator[Figure]:
    """Bytes of a difference after so many steps of Adam with gradients of random signs, at
    LEARNING_RATE."""
    published = [one.view().contiguous() for one in actor.model.slices()]
    exact = [tensor.float().requires_grad_() for tensor in published]
    optimizer, generator = (
        torch.optim.Adam(exact, lr=LEARNING_RATE),
        torch.Generator().manual_seed(0),
    )
    for step in range(1, max(steps) + 1):
        for tensor in exact:
            tensor.grad = torch.randn(tensor.shape, generator=generator)
        optimizer.step()
        if step in steps:
            pairs = [
                (flat(old), flat(new.detach().bfloat16()))
                for old, new in zip(published, exact, strict=True)
            ]
            share = sum(len(delta.encode(*pair, 2)) for pair in pairs) / sum(
                len(old) for old, _ in pairs
            )
            name = f"difference after {step} steps at {LEARNING_RATE:g}"
            yield Figure(name, share, "of full", f"<= {DELTA}", share <= DELTA)


def flat(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.contiguous().view(torch.uint8).numpy().reshape(-1))


def timed(act: Callable[[], object]) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


# -- readers ---------------------------------------------------------------------------------------


def reader(folder: Path, number: int, plane: str, rounds: int, relays: bool) -> None:
    """A process that follows the weights; with ``rounds`` it first measures its reads, and prints
    them. ``relays``: it reads from others like it, and they from it."""
    run, config = RunDir(folder / "run"), Config(prompts_per_step=1)
    config.groups = {name: GroupConfig(roles=[name]) for name in ("actor", "rollout")}
    with QueueClient(run, config, "rollout", 1) as client:
        planes = [one for one in client.store.planes if one.name == plane]
        subscriber = Subscriber(
            run, client, f"rollout/{number}", planes, config.weights, relays=relays
        )
        subscriber.fetcher.staging = Staging(folder / f"node-{number}")
        announced = subscriber.newer().result(WAIT_S)
        if rounds:
            print(json.dumps(reads(subscriber, announced, rounds)), flush=True)
            return
        while announced is not None:
            news, staged = subscriber.fetch(announced)
            staged.release()
            subscriber.served(Version.parse(news.version))
            announced = subscriber.newer().result(WAIT_S)


def reads(subscriber: Subscriber, news: PublishedVersion, rounds: int) -> dict[str, list[float]]:
    """Seconds of pulls into memory that is there already, and of the plane's reads alone, in turns.

    What a plane has mapped is copied for the second, as a reader has to.
    """
    fetcher = subscriber.fetcher
    manifest = read_manifest(fetcher.run.weights / news.version, news.digest)
    [plane] = fetcher.puller.planes
    room = np.ones(max(chunk.bytes for chunk in manifest.chunks), np.uint8)

    def raw() -> None:
        for chunk in manifest.chunks:
            record = plane.read(chunk.planes[plane.name], WAIT_S)
            if plane.name == "shm":
                np.copyto(room[: chunk.bytes], np.frombuffer(record, np.uint8))

    found: dict[str, list[float]] = {"pull": [], "raw": []}
    path = fetcher.staging.root / TENSORS
    path.parent.mkdir(parents=True)
    for turn in range(rounds + 1):
        with SafetensorsFile(path, manifest.tensors) as file:
            times = {
                "raw": timed(raw),
                "pull": timed(lambda: fetcher.puller.pull(manifest, manifest.chunks, file)),
            }
        # The first brings connections and pages.
        found = {name: [*found[name], *([times[name]] if turn else [])] for name in found}
    return found


@contextmanager
def processes(kind: str, *arguments: Sequence[object]) -> Iterator[list[subprocess.Popen]]:
    """This program again, once for each of ``arguments``."""
    started: list[subprocess.Popen] = []
    try:
        for words in arguments:
            command = [sys.executable, "-W", "ignore", __file__, f"--{kind}", *map(str, words)]
            started.append(
                subprocess.Popen(
                    command, stdout=subprocess.PIPE, text=True, preexec_fn=die_with_parent
                )
            )
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def pulls(actor: Actor, folder: Path, rounds: int) -> Iterator[Figure]:
    for number, plane in enumerate(("shm", "tcp"), start=90):
        actor.publish()
        with processes("reader", (folder, number, plane, rounds, 0)) as [process]:
            found = json.loads(process.stdout.readline())
        speeds = [actor.publisher.ring.bytes / seconds / 1e9 for seconds in found["pull"]]
        ratios, ratio = (
            quotients(found["raw"], found["pull"]),
            median(found["raw"]) / median(found["pull"]),
        )
        yield Figure(f"pull by {plane}", median(speeds), "GB/s", rounds=speeds)
        yield Figure(
            f"pull by {plane}: of its raw read", ratio, "x", f">= {PULL}", ratio >= PULL, ratios
        )


def until_served(
    actor: Actor, folder: Path, counts: Sequence[int], rounds: int
) -> Iterator[Figure]:
    """From the end of a step to the last reader: from reader to reader, by the actor alone, and a
    broadcast of the same tensors to as many beside."""
    for count in counts:
        served, kept, sent = followed(actor, folder, count, rounds, relays=True)
        alone, _, sent_alone = followed(actor, folder, count, rounds, relays=False)
        with processes(
            "broadcast", *((folder, rank, count + 1, rounds) for rank in range(count + 1))
        ) as ranks:
            together = json.loads(ranks[0].stdout.readline())
        who = f"{count} reader{'s' * (count > 1)}"
        most = min(count, FAN_OUT)
        yield Figure(
            f"{who}: sent by the actor",
            median(sent),
            "versions",
            f"<= {most}",
            median(sent) <= most,
            sent,
        )
        yield Figure(
            f"{who}: sent by it where nobody passes on",
            median(sent_alone),
            "versions",
            rounds=sent_alone,
        )
        yield Figure(f"{who} served after", median(served), "s", rounds=served)
        yield Figure(
            f"{who} served after, where nobody passes on", median(alone), "s", rounds=alone
        )
        yield Figure(f"broadcast to {who} (gloo)", median(together), "s", rounds=together)
        yield Figure(
            f"{who}: trainer kept, of the broadcast's", median(kept) / median(together), "x"
        )


def followed(
    actor: Actor, folder: Path, count: int, rounds: int, relays: bool
) -> tuple[list[float], list[float], list[float]]:
    """Of ``count`` readers on nodes of their own: seconds until all serve a version, seconds that
    the trainer is kept by one, and how often the actor has sent it."""
    [plane] = [plane for plane in actor.client.store.planes if isinstance(plane, TcpPlane)]
    served, kept, sent = [], [], []
    with processes("reader", *((folder, number, "tcp", 0, int(relays)) for number in range(count))):
        actor.served_after(count)
        for _ in range(rounds):
            before = plane.sent_bytes
            served.append(actor.served_after(count))
            sent.append((plane.sent_bytes - before) / actor.publisher.ring.bytes)
            actor.publisher.settle(WAIT_S)
            kept.append(actor.publish())
            # What they read of it must not count for the next.
            actor.await_served(count)
            actor.publisher.settle(WAIT_S)
    return served, kept, sent


def broadcast(folder: Path, rank: int, world: int, rounds: int) -> None:
    """A rank of a group in which rank 0 sends every tensor to all others; it prints the seconds of
    each round."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting-{world}", rank=rank, world_size=world
    )
    with (folder / "shapes.json").open() as file:
        tensors = [torch.ones(shape, dtype=torch.bfloat16) for shape in json.load(file)]
    times = []
    for _ in range(rounds + 1):
        dist.barrier()
        started = time.perf_counter()
        for tensor in tensors:
            dist.broadcast(tensor, 0)
        dist.barrier()
        times.append(time.perf_counter() - started)
    print(json.dumps(times[1:]), flush=True)


def into_parameters(actor: Actor, folder: Path, rounds: int) -> Iterator[Figure]:
    """From a node's memory into a reader's live parameters, whole models of actor_fwd's kind and of
    SGLang's slices, in turns with a memcpy of as many bytes in one piece; and the way it was: each
    parameter fused of copies first."""
    tensors = actor.model.tensors()
    slabs = [slab_of(tensors, folder / f"slab-{number}") for number in range(2)]
    # As on a node, which has each version in the memory of the one before the last.
    turns, size = itertools.cycle(slabs), (slabs[0] / TENSORS).stat().st_size
    source, room = np.ones(size, np.uint8), np.ones(size, np.uint8)
    live, transfers = dict(actor.model.module.named_parameters()), Transfers(torch.device("cpu"))
    engine = {name: torch.zeros(one.shape, dtype=torch.bfloat16) for name, one in tensors.items()}

    def as_it_was() -> None:
        with SafetensorFiles(next(turns)) as files:
            for entry in actor.model._entries:
                parts = [files[piece.name][:] for piece in entry.pieces]
                live[entry.name].detach().copy_(fuse(entry, parts, actor.model.spec))

    def into_engine() -> None:
        views = open_slab(next(turns))
        with copying(transfers, list(views.values())):
            for name, view in views.items():
                engine[name].copy_(view)

    acts = {
        "memcpy": lambda: np.copyto(room, source),
        "reader's parameters": lambda: actor.model.load_tensors(open_slab(next(turns))),
        "reader's parameters, as it was": as_it_was,
        "engine's parameters": into_engine,
    }
    found: dict[str, list[float]] = {name: [] for name in acts}
    for turn in range(rounds + 1):
        times = {name: timed(act) for name, act in acts.items()}
        # The first brings pages.
        found = {name: [*found[name], *([times[name]] if turn else [])] for name in acts}
    copied = found.pop("memcpy")
    for name, seconds in found.items():
        ratio = median(copied) / median(seconds)
        target = (None, None) if name.endswith("was") else (f">= {LOAD}", ratio >= LOAD)
        yield Figure(
            f"slab to {name}: of a memcpy", ratio, "x", *target, quotients(copied, seconds)
        )


def slab_of(tensors: Mapping[str, TensorInfo], folder: Path) -> Path:
    """What a node has of a version."""
    folder.mkdir(mode=0o700)
    with SafetensorsFile(folder / TENSORS, tensors):
        pass
    ends = itertools.accumulate((one.bytes for one in tensors.values()), initial=0)
    parts = tuple(
        TensorPart(name, 0, 0, tensors[name].shape[0], at)
        for name, at in zip(tensors, ends, strict=False)
    )
    whole = Chunk("all", sum(one.bytes for one in tensors.values()), "", parts)
    (folder / MARK).write_bytes(Manifest(folder.name, dict(tensors), (whole,)).encode())
    return folder


# -- an engine -------------------------------------------------------------------------------------


def engine_pause(folder: Path, rounds: int) -> list[Figure]:
    """How long a real SGLang server that is generating stands still for an update of a small model,
    and why."""
    from relax_hpc.rollout.engines.engine import GenerateRequest, Sampling
    from relax_hpc.rollout.engines.sglang.engine import SglangEngine

    model = make_tiny_model(folder / "served", TinyModelConfig(), 0) or folder / "served"
    config = Config()
    parts: dict[str, list[float]] = {
        "pause_generation": [],
        "update_weights_from_disk": [],
        "continue_generation": [],
    }

    async def scene() -> list[float]:
        engine = SglangEngine(config, 0, model, Version(1, 0), folder)
        await engine.start()
        try:
            call = engine._client._call

            async def timed_call(path: str, *arguments: Any) -> Any:
                started = time.perf_counter()
                answer = await call(path, *arguments)
                if path[1:] in parts:
                    parts[path[1:]].append(time.perf_counter() - started)
                return answer

            engine._client._call = timed_call
            sampling, pauses = Sampling(1.0, 1.0, (), 0), []
            work = [
                GenerateRequest((1, 3, 4), f"p{number}", 0, sampling, 200) for number in range(8)
            ]

            async def generate() -> None:
                while True:
                    await asyncio.gather(*map(engine.generate, work))

            crowd = [asyncio.create_task(generate()) for _ in range(4)]
            for number in range(rounds):
                await asyncio.sleep(0.2)
                await engine.update_weights(model, Version(1, number + 1))
                pauses.append(engine.pause_s)
            for one in crowd:
                one.cancel()
            await asyncio.wait(crowd)
            return pauses
        finally:
            await engine.close()

    pauses = asyncio.run(scene())
    found = {"engine paused (SGLang, small model)": pauses} | {
        f"  of it {name}": one for name, one in parts.items()
    }
    times = {name: [1e3 * seconds for seconds in one] for name, one in found.items()}
    return [Figure(name, median(one), "ms", rounds=one) for name, one in times.items()]


# -- the program -----------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument(
        "--hidden", type=int, default=2048, help="of each layer; 2048: the layers of Qwen3-1.7B"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--readers", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument(
        "--steps",
        type=int,
        nargs="*",
        default=[1, 4, 8],
        help="after which differences are measured",
    )
    parser.add_argument("--engine", action="store_true", help="pause of a real SGLang server too")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--reader", nargs=5, help=argparse.SUPPRESS)
    parser.add_argument("--broadcast", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.reader:
        reader(
            Path(args.reader[0]),
            int(args.reader[1]),
            args.reader[2],
            int(args.reader[3]),
            args.reader[4] == "1",
        )
    elif args.broadcast:
        broadcast(Path(args.broadcast[0]), *map(int, args.broadcast[1:]))
    else:
        settings = {"layers": args.layers, "hidden": args.hidden, "rounds": args.rounds}
        print_figures(measure(args), settings, args.json)


def measure(args: argparse.Namespace) -> Iterator[Figure]:
    """As they are measured."""
    shape = TinyModelConfig(
        hidden_size=args.hidden,
        num_layers=args.layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=args.hidden // 16,
        intermediate_size=3 * args.hidden,
    )
    with ExitStack() as stack:
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="relax-bench-", dir=memory()))
        )
        actor = stack.enter_context(Actor(folder, shape).working())
        shapes = [one.shape for one in actor.model.tensors().values()]
        (folder / "shapes.json").write_text(json.dumps(shapes))
        yield from stall(actor, args.rounds)
        yield from into_parameters(actor, folder, args.rounds)
        yield from pulls(actor, folder, args.rounds)
        yield from until_served(actor, folder, args.readers, args.rounds)
        yield from differences(actor, args.steps) if args.steps else ()
        yield from engine_pause(folder, args.rounds) if args.engine else ()


def memory() -> str | None:
    """A folder in memory, like the one in which nodes keep weights."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


if __name__ == "__main__":
    main()
