"""Publishing tensors that no model has."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from relax_hpc.base.rundir import RunDir
from relax_hpc.base.versions import Version
from relax_hpc.config.schema import WeightsConfig
from relax_hpc.net.rendezvous.channel import RankChannel
from relax_hpc.queue.client import QueueClient
from relax_hpc.training.weights.file_form import FileForm
from relax_hpc.training.weights.publisher import Publisher
from relax_hpc.training.weights.ring import WeightSlice
from relax_hpc.training.weights.tensors import TensorInfo

TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
WAIT_S = 120.0


class Source:
    """The publisher of a rank that has all of ``tensors``; change them in place and publish
    again."""

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
        described = {
            name: TensorInfo(TYPES[one.dtype], tuple(one.shape)) for name, one in tensors.items()
        }
        slices = [
            WeightSlice(name, 0, 0, len(one), lambda one=one: one) for name, one in tensors.items()
        ]
        store, config = client.store, WeightsConfig(**settings)
        device = 0 if any(one.is_cuda for one in tensors.values()) else None
        self.publisher = Publisher(
            run,
            client,
            lambda: RankChannel(WAIT_S),
            store.planes,
            store.pool,
            described,
            slices,
            slabs,
            config,
            device=device,
            form=form,
        )

    def publish(self, version: Version, last: bool = False) -> None:
        """Until it is announced, and its files are written if due."""
        self.publisher.publish(version, last)
        self.publisher.settle(WAIT_S)


def publish(
    run: RunDir, client: QueueClient, version: Version, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Once, with files; afterwards they are all that is left of it."""
    source = Source(run, client, tensors)
    source.publish(version)
    source.publisher.close()
