"""The ranks of a group. The leader decides, the other ranks follow, and all read the same rows."""

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
"""Maximum number of seconds by which a wait for the leader's message may be longer than the
leader's wait for the queue."""


class Ranks:
    """The ranks of one training or forward group. Every method is collective."""

    def __init__(self, context: Context, shape: ParallelConfig) -> None:
        config, world = context.config, context.world
        patience_s = config.queue.wait_timeout_s
        torch.set_num_threads(config.threads)
        start_timeout_s = patience_s + _LATER_S
        store = make_store(world, context.run.token(), start_timeout_s)
        parallel.initialize(
            shape,
            world.rank,
            world.size,
            world.local_rank,
            store,
            config.model.device,
            config.seed,
            config.liveness.collective_timeout_s or start_timeout_s,
        )
        self.layout = parallel.layout()
        self._mark = context.run.exit_mark(context.group, context.incarnation, context.role)
        self.leader = world.is_leader
        self.size = world.size
        self.pool = context.client.store.pool if context.client else SlabPool()
        """Memory of the records that this rank offers to the planes of `reader`."""
        self.reader = context.client.store if context.client else self._own_reader(context)
        self._timeout_s = patience_s + min(patience_s, _LATER_S)
        # Commands are received from sockets: a pending MPI or NCCL call would occupy a core or a
        # GPU.
        self.control = self.channel()
        self._client = context.client
        self._media = MediaReader(partial(_media_store, context), context.model)

    def channel(self, patience_s: float = 0.0) -> RankChannel:
        """Return another channel for small messages between the ranks, for one thread of each rank.
        A wait may take at least ``patience_s`` seconds."""
        return RankChannel(max(self._timeout_s, patience_s))

    def _own_reader(self, context: Context) -> ShardReader:
        owner = f"{context.group}-i{context.incarnation:06d}-rank-{context.world.rank}"
        planes = open_planes(context.run, context.config, context.group, owner, self.pool)
        return ShardReader(shard_files(context.run, context.config), planes)

    def tell(self, message: dict[str, Any] | Future | None) -> dict[str, Any]:
        """Return the leader's ``message``, or its result if it is a Future, in every rank."""
        return self.control.broadcast(message)

    def ask_queue(self, request: Callable[[QueueClient], Future]) -> Any:
        """Send a request from the leader to the queue, and return the answer, a message, in every
        rank; see `RankChannel.broadcast`."""
        return self.tell(request(self._client) if self._client else None)

    def rows(self, claim: Claim, channel: RankChannel) -> list[Row] | None:
        """Return all rows of ``claim``. Each rank reads them itself.

        Return None in all ranks if rows were lost with the process that created them before every
        rank had read them; the claim is then given back. ShardError: this rank cannot read rows
        that are on disk.
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
        """Return the media that ``rows`` name, or None. Each rank reads them itself, and the call
        is not collective. MediaError: see `MediaReader`."""
        return self._media.read(rows)

    def _holds(self, claim: Claim) -> bool:
        """Wait until it is known whether all rows of ``claim`` are on disk. If not, give the claim
        back. It runs in the leader."""
        assert self._client is not None
        if is_on_disk(self._client, claim):
            return True
        self._client.return_claim(claim)
        return False

    def assign_micro_batches(
        self, rows: Sequence[Row], settings: TrainerConfig | ForwardConfig
    ) -> list[list[int]]:
        """Return the micro-batches of this data-parallel rank, as numbers of rows. All ranks have
        similar numbers of tokens and the same number of micro-batches, see `samplers`."""
        limits = settings.pack_tokens, settings.pack_media_tokens
        assignment = assign_groups(group_sizes(rows), self.layout.data_size, *limits)
        return assignment[self.layout.data_rank]

    def collect(
        self,
        rows: Sequence[Row],
        own_rows: Sequence[int],
        values: Sequence[np.ndarray] | None,
        tail: tuple[int, ...] = (),
    ) -> list[np.ndarray]:
        """Return the values of all rows in order, [tokens, *tail] float32 each, in the leader.
        Data-parallel leaders pass ``values`` for ``own_rows``."""
        if self.size == 1:
            assert values is not None
            pairs = zip(own_rows, values, strict=True)
            return [value for _, value in sorted(pairs, key=itemgetter(0))]
        lengths = [len(row["token_ids"]) for row in rows]
        starts = np.concatenate([[0], np.cumsum(lengths)])
        flat = torch.zeros((int(starts[-1]), *tail), dtype=torch.float32)
        if self.layout.leader and values is not None:
            for index, value in zip(own_rows, values, strict=False):
                contiguous = torch.from_numpy(np.ascontiguousarray(value))
                flat[starts[index] : starts[index + 1]] = contiguous
        self.control.reduce_sum(flat)
        return np.split(flat.numpy(), starts[1:-1])

    def close(self) -> None:
        """End the role: the leader, whose work is done, writes the exit mark, and all ranks end
        together.

        Some launchers kill the other ranks as soon as one rank has ended.
        """
        if self.leader:
            write_exit_mark(self._mark)
        self.control.await_all_ranks()
        parallel.destroy()


def _media_store(context: Context) -> MediaStore:
    return context.client.media if context.client else MediaStore(context.run.media, durable=False)
