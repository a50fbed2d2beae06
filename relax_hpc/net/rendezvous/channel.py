"""Small messages between the ranks of one group, by sockets and as bytes: nothing is pickled,
nobody burns a core."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any, TypeVar

import msgpack

from relax_hpc.base.background import run_in_thread

T = TypeVar("T")
_LOOK_S, _TELL_S = 0.5, 30.0
_YET = {"yet": True}


class RankChannel:
    """A gloo group of all ranks of the default one. It is used by one thread of each rank, all in
    the same order.

    Making it is collective. A wait for a rank that has died ends after ``timeout_s`` seconds with
    RuntimeError; what the leader, rank 0, waits for itself may take longer (`tell`, `lead`,
    `still_waits`).
    """

    def __init__(self, timeout_s: float) -> None:
        import torch.distributed as dist

        met = dist.is_initialized()
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if met else (0, 1)
        # A rank alone has one kind of groups, without sockets; gloo would listen.
        backend = "gloo" if self.size > 1 else None
        self.group = (
            dist.new_group(backend=backend, timeout=timedelta(seconds=timeout_s)) if met else None
        )
        """Process group for other agreements of the same thread; None in a process that has no
        ranks."""
        self._told = time.monotonic()
        self._tell_s = min(_TELL_S, timeout_s / 4)

    def broadcast(self, message: Any) -> Any:
        """Message that rank 0 passes, or the result of the Future that it passes, in every rank.

        It is None, a number, string or bytes, or a list or map of them.
        """
        if isinstance(message, Future):
            while not wait([message], _LOOK_S).done:
                self.extend_wait()
            message = message.result()
        self._told = time.monotonic()
        while (said := self._broadcast(message)) == _YET:
            pass
        return said

    def run_on_leader(self, act: Callable[[], T]) -> T:
        """Result of ``act`` in every rank; rank 0 alone calls it, however long that takes."""
        if self.size == 1:
            return act()
        return self.broadcast(run_in_thread(act) if self.rank == 0 else None)

    def run_while_others_wait(self, act: Callable[[], T]) -> T:
        """Result of ``act``, for rank 0 alone, while all others are in `tell`."""
        if self.size == 1:
            return act()
        work = run_in_thread(act)
        while not wait([work], _LOOK_S).done:
            self.extend_wait()
        return work.result()

    def extend_wait(self) -> None:
        """Rank 0 has nothing to tell yet, and may not for hours: who waits for its word has a
        deadline of minutes.

        As often as it likes, while all others are in `tell`.
        """
        if self.size > 1 and time.monotonic() - self._told > self._tell_s:
            self._told = time.monotonic()
            self._broadcast(_YET)

    def all_agree(self, mine: bool) -> bool:
        """Whether ``mine`` is true in all ranks; the same answer in every rank."""
        import torch
        import torch.distributed as dist

        if self.size == 1:
            return mine
        everybody = torch.tensor([int(mine)])
        dist.all_reduce(everybody, dist.ReduceOp.MIN, group=self.group)
        return bool(everybody)

    def _broadcast(self, message: Any) -> Any:
        import torch
        import torch.distributed as dist

        if self.size == 1:
            return message
        leads = self.rank == 0
        data = torch.frombuffer(
            bytearray(msgpack.packb(message) if leads else b"\0"), dtype=torch.uint8
        )
        size = torch.tensor([len(data)])
        dist.broadcast(size, 0, group=self.group)
        data = data if leads else torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(data, 0, group=self.group)
        return msgpack.unpackb(data.numpy().tobytes())

    def gather(self, message: Any) -> list[Any] | None:
        """Messages of all ranks, by rank, in rank 0; None elsewhere."""
        import torch
        import torch.distributed as dist

        if self.size == 1:
            return [message]
        data = torch.frombuffer(bytearray(msgpack.packb(message)), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(data)]), group=self.group)
        most = max(int(size) for size in sizes)
        padded = torch.nn.functional.pad(data, (0, most - len(data)))
        rooms = (
            [torch.empty(most, dtype=torch.uint8) for _ in range(self.size)]
            if self.rank == 0
            else None
        )
        dist.gather(padded, rooms, 0, group=self.group)
        if rooms is None:
            return None
        return [
            msgpack.unpackb(room.numpy().tobytes()[: int(size)])
            for room, size in zip(rooms, sizes, strict=True)
        ]

    def reduce_sum(self, values: Any) -> None:
        """Add up float32 ``values`` [n], a tensor, in rank 0."""
        import torch.distributed as dist

        if self.size > 1:
            dist.reduce(values, 0, group=self.group)

    def await_all_ranks(self) -> None:
        """Wait for all ranks."""
        import torch.distributed as dist

        if self.size > 1:
            dist.barrier(group=self.group)
