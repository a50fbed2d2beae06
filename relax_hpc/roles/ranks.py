"""A group of ranks that follow their leader: it decides, the others are told, all read the same
rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from relax_hpc.config.schema import ForwardConfig, ParallelConfig, TrainerConfig
from relax_hpc.net.rendezvous.channel import RankChannel
from relax_hpc.net.rendezvous.exit_mark import write_exit_mark
from relax_hpc.net.transport import SlabPool
from relax_hpc.queue.client import Claim, QueueClient, read_rows
from relax_hpc.queue.client.claims import APPEARS_S, is_on_disk
from relax_hpc.queue.group_sizes import group_sizes
from relax_hpc.queue.process_context import Context
from relax_hpc.queue.row_schema import Row
from relax_hpc.queue.samplers import assign_groups
from relax_hpc.queue.storage.media import MediaStore
from relax_hpc.queue.storage.shard import ShardError
from relax_hpc.queue.storage.shard_store import ShardReader, open_planes, shard_files
from relax_hpc.roles.media_reader import MediaReader
from relax_hpc.training import parallel
from relax_hpc.training.authenticated_store import make_store
from relax_hpc.training.models.towers.media import RowMedia

_LOOK_S = 0.5
_LATER_S = 60.0
"""Seconds that a wait for the leader's word may be longer than the leader's for the queue's, at
most."""


class Ranks:
    """The ranks of one training or forward group; every method is collective."""

    def __init__(self, context: Context, shape: ParallelConfig) -> None:
        config, world, patience_s = (
            context.config,
            context.world,
            context.config.queue.wait_timeout_s,
        )
        torch.set_num_threads(config.threads)
        timeout = patience_s + _LATER_S
        store = make_store(world, context.run.token(), timeout)
        parallel.initialize(
            shape,
            world.rank,
            world.size,
            world.local_rank,
            store,
            config.model.device,
            config.seed,
            timeout,
        )
        self.layout = parallel.layout()
        self._mark = context.run.exit_mark(context.group, context.incarnation, context.role)
        self.leader = world.is_leader
        self.size = world.size
        self.pool = context.client.store.pool if context.client else SlabPool()
        """Memory of the records that this rank offers on the planes of `reader`."""
        self.reader = context.client.store if context.client else self._own_reader(context)
        self._timeout_s = patience_s + min(patience_s, _LATER_S)
        # Commands wait on sockets, not in an MPI or NCCL call that would burn a core or a GPU.
        self.control = self.channel()
        self._client = context.client
        self._media = MediaReader(partial(_media_store, context), context.model)

    def channel(self, patience_s: float = 0.0) -> RankChannel:
        """One more way for small messages between the ranks, for one thread of each, whose waits
        may take so long."""
        return RankChannel(max(self._timeout_s, patience_s))

    def _own_reader(self, context: Context) -> ShardReader:
        owner = f"{context.group}-i{context.incarnation:06d}-rank-{context.world.rank}"
        planes = open_planes(context.run, context.config, context.group, owner, self.pool)
        return ShardReader(shard_files(context.run, context.config), planes)

    def tell(self, message: dict[str, Any] | Future | None) -> dict[str, Any]:
        """The leader's ``message``, or what it is to become, in every rank."""
        return self.control.broadcast(message)

    def ask(self, ask: Callable[[QueueClient], Future]) -> Any:
        """Answer of the queue to the leader, in every rank: a message, see `Channel.tell`."""
        return self.tell(ask(self._client) if self._client else None)

    def rows(self, claim: Claim, channel: RankChannel) -> list[Row] | None:
        """All rows of ``claim``, read by each rank for itself.

        None, in all ranks, if some were lost with their maker before every rank had them: the claim
        is given back then. ShardError, in the ranks that it is about, if what is on disk cannot be
        read there.
        """
        until = time.monotonic() + APPEARS_S
        while True:
            rows, failure = None, None
            try:
                rows = read_rows(self.reader, claim)
            except ShardError as error:
                failure = error
            if channel.all_agree(rows is not None):
                return rows
            if not channel.run_on_leader(partial(self._holds, claim)):
                return None
            if failure and time.monotonic() > until:
                raise failure
            time.sleep(_LOOK_S)

    def media(self, rows: Sequence[Row]) -> RowMedia | None:
        """Media that ``rows`` name, read by this rank for itself; None: there are none. Not
        collective. MediaError: see `MediaReader`."""
        return self._media.of(rows)

    def _holds(self, claim: Claim) -> bool:
        """The leader's part: whether all rows of ``claim`` are on disk, once that is decided; else
        it is given back."""
        assert self._client is not None
        if is_on_disk(self._client, claim):
            return True
        self._client.return_claim(claim)
        return False

    def parts(
        self, rows: Sequence[Row], settings: TrainerConfig | ForwardConfig
    ) -> list[list[int]]:
        """The micro-batches of this data-parallel rank, as numbers of rows: of about as many tokens
        as the others', and as many, see `samplers.dealt`."""
        most = settings.pack_tokens, settings.pack_media_tokens
        return assign_groups(group_sizes(rows), self.layout.data_size, *most)[self.layout.data_rank]

    def collect(
        self,
        rows: Sequence[Row],
        mine: Sequence[int],
        values: Sequence[np.ndarray] | None,
        tail: tuple[int, ...] = (),
    ) -> list[np.ndarray]:
        """Values of all rows in order, [tokens, *tail] float32 each, in the leader; data-parallel
        leaders have ``values`` for ``mine``."""
        if self.size == 1:
            assert values is not None
            return [value for _, value in sorted(zip(mine, values, strict=True), key=itemgetter(0))]
        lengths = [len(row["token_ids"]) for row in rows]
        starts = np.concatenate([[0], np.cumsum(lengths)])
        flat = torch.zeros((int(starts[-1]), *tail), dtype=torch.float32)
        for index, value in zip(
            mine, values if self.layout.leader and values is not None else [], strict=False
        ):
            flat[starts[index] : starts[index + 1]] = torch.from_numpy(np.ascontiguousarray(value))
        self.control.reduce_sum(flat)
        return np.split(flat.numpy(), starts[1:-1])

    def close(self) -> None:
        """The role is done: the leader, whose work is over, marks that, and all leave together.

        Some launchers kill the other ranks as soon as one has ended.
        """
        if self.leader:
            write_exit_mark(self._mark)
        self.control.await_all_ranks()
        parallel.destroy()


def _media_store(context: Context) -> MediaStore:
    return context.client.media if context.client else MediaStore(context.run.media, durable=False)
