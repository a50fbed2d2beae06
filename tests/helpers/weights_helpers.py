"""Publishers of tensors that belong to no model, and a run whose versions a test reads."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from relax_hpc.base.rundir import RunDir
from relax_hpc.base.versions import Version
from relax_hpc.config.schema import Config, WeightsConfig
from relax_hpc.net.rendezvous.channel import RankChannel
from relax_hpc.queue.client import QueueClient
from relax_hpc.queue.controller.server import Controller
from relax_hpc.training.weights.file_form import FileForm
from relax_hpc.training.weights.node_cache import staging_root
from relax_hpc.training.weights.publisher import Publisher
from relax_hpc.training.weights.ring import WeightSlice
from relax_hpc.training.weights.subscriber import NOTHING, Subscriber
from relax_hpc.training.weights.tensors import TensorInfo
from relax_hpc.training.weights.version_files import TENSORS
from tests.helpers.queue_helpers import in_thread, make_run, small
from tests.requirements import DEVICE

TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
WAIT_S = 120.0
SOON_S = 5.0
"""Deadline of an event that follows without delay."""


class Source:
    """Publisher of a rank that has all of ``tensors``. To publish new values, change them in
    place."""

    def __init__(
        self,
        run: RunDir,
        client: QueueClient,
        tensors: Mapping[str, torch.Tensor],
        slabs: int = 2,
        form: FileForm | None = None,
        **settings: int,
    ) -> None:
        self.tensors = dict(tensors)
        infos = {
            name: TensorInfo(TYPES[tensor.dtype], tuple(tensor.shape))
            for name, tensor in tensors.items()
        }
        slices = [
            WeightSlice(name, 0, 0, len(tensor), lambda tensor=tensor: tensor)
            for name, tensor in tensors.items()
        ]
        store, config = client.store, WeightsConfig(**settings)
        device = 0 if any(tensor.is_cuda for tensor in tensors.values()) else None
        self.publisher = Publisher(
            run,
            client,
            lambda: RankChannel(WAIT_S),
            store.planes,
            store.pool,
            infos,
            slices,
            slabs,
            config,
            device=device,
            form=form,
        )

    def publish(self, version: Version, last: bool = False) -> None:
        """Publish, and wait until the version is announced and its files are written."""
        self.publisher.publish(version, last)
        self.publisher.settle(WAIT_S)


def publish(
    run: RunDir, client: QueueClient, version: Version, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Publish one version with files. Its memory is freed, so only the files remain."""
    source = Source(run, client, tensors)
    source.publish(version)
    source.publisher.close()


class Stage:
    """A run with a controller, an actor that publishes, and the client of a rollout."""

    def __init__(
        self,
        run: RunDir,
        config: Config,
        actor: QueueClient,
        rollout: QueueClient,
        controller: Controller,
    ) -> None:
        self.run, self.config, self.controller = run, config, controller
        self.actor, self.rollout = actor, rollout
        self.source: Source | None = None

    def put(self, *numbers: int, last: bool = False, **settings: int) -> None:
        """Publish the versions ``numbers``. All elements of a version have its number."""
        if self.source is None:
            half = torch.zeros(5, 2, dtype=torch.bfloat16, device=DEVICE)
            tensors = {"w": torch.zeros(3, device=DEVICE), "half": half}
            self.source = Source(self.run, self.actor, tensors, **settings)
        for number in numbers:
            for tensor in self.source.tensors.values():
                tensor.fill_(number)
            self.source.publish(Version(1, number), last)

    def end_actor(self) -> None:
        """Free the actor's memory, as its death does."""
        self.source.publisher.close()

    def reader(self, name: str = "rollout/0", timeout_s: float = 0.3) -> Subscriber:
        settings = WeightsConfig(read_timeout_s=timeout_s)
        return Subscriber(self.run, self.rollout, name, self.rollout.store.planes, settings)

    def fetch(self, reader: Subscriber) -> int | None:
        """Number of the version that ``reader`` gets and that is complete, or None."""
        fetched = reader.fetch(reader.newer().result(timeout=SOON_S))
        if fetched is None:
            return None
        news, staged = fetched
        number = Version.parse(news.version).number
        weights = load_file(staged.path / TENSORS)
        assert weights["w"].tolist() == [number] * 3 and weights["half"].shape == (5, 2)
        assert (weights["half"] == number).all() and weights["half"].dtype is torch.bfloat16
        staged.release()
        return number

    def announced(self, method: str) -> str:
        """Version that the controller announces to a new reader by ``method``."""
        return self.rollout.connection.call(method, after=str(NOTHING))["version"]

    def directories(self) -> list[str]:
        return sorted(path.name for path in self.run.weights.iterdir())


@contextmanager
def staged_run(folder: Path) -> Iterator[Stage]:
    run, config = make_run(folder / "run"), small()
    run.model.mkdir()
    (run.model / "config.json").write_text("{}")
    (run.model / TENSORS).write_bytes(b"old")
    with in_thread(run, config) as controller, QueueClient(run, config, "actor", 1) as actor:
        actor.connection.call("resume", step=0)
        with QueueClient(run, config, "rollout", 1) as rollout:
            yield Stage(run, config, actor, rollout, controller)
    shutil.rmtree(staging_root(run), ignore_errors=True)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    """A run in which `stage.put(number, ...)` publishes."""
    with staged_run(tmp_path) as stage:
        yield stage
