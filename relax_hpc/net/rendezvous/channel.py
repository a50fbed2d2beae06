"""Small messages between the ranks of one group, over gloo. Messages are msgpack, never pickled.

Ranks that wait sleep, and keep no core busy.
"""

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
"""Seconds between two checks of a Future, and between two messages that extend a wait, at most."""
_YET = {"yet": True}
"""Message that only extends a wait."""


class RankChannel:
    """A gloo group of all ranks of the default process group.

    Its creation is collective. One thread of each rank uses it, and all ranks call its methods in
    the same order. A wait for a dead rank ends after ``timeout_s`` seconds with RuntimeError. Work
    of the leader, rank 0, may take longer, see `broadcast`, `run_on_leader` and `extend_wait`.
    """

    def __init__(self, timeout_s: float) -> None:
        import torch.distributed as dist

        has_ranks = dist.is_initialized()
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if has_ranks else (0, 1)
        # A single rank uses the default backend. gloo would open a listening socket.
        backend = "gloo" if self.size > 1 else None
        timeout = timedelta(seconds=timeout_s)
        self.group = dist.new_group(backend=backend, timeout=timeout) if has_ranks else None
        """Process group for other collectives of the same thread. None: there are no ranks."""
        self._sent_at = time.monotonic()
        self._tell_s = min(_TELL_S, timeout_s / 4)

    def broadcast(self, message: Any) -> Any:
        """In every rank, the message of rank 0, or the result of its Future.

        A message is None, a number, string or bytes, or a list or map of them.
        """
        if isinstance(message, Future):
            # The other ranks wait in a collective, whose timeout must not expire.
            while not wait([message], _LOOK_S).done:
                self.extend_wait()
            message = message.result()
        self._sent_at = time.monotonic()
        while True:
            received = self._broadcast(message)
            if received != _YET:
                return received

    def run_on_leader(self, act: Callable[[], T]) -> T:
        """Result of ``act`` in every rank. Only rank 0 calls it, and it may take any time."""
        if self.size == 1:
            return act()
        return self.broadcast(run_in_thread(act) if self.rank == 0 else None)

    def run_while_others_wait(self, act: Callable[[], T]) -> T:
        """Result of ``act``. Only rank 0 calls this, while all other ranks are in `broadcast`."""
        if self.size == 1:
            return act()
        work = run_in_thread(act)
        while not wait([work], _LOOK_S).done:
            self.extend_wait()
        return work.result()

    def extend_wait(self) -> None:
        """Restart the timeout of the other ranks, which are in `broadcast`.

        Rank 0 may wait for hours, while the timeout of a collective is minutes. It may call this as
        often as it likes; a message is sent only if the last one is old enough.
        """
        if self.size > 1 and time.monotonic() - self._sent_at > self._tell_s:
            self._sent_at = time.monotonic()
            self._broadcast(_YET)

    def all_agree(self, is_true: bool) -> bool:
        """Whether ``is_true`` holds in all ranks. The result is the same in every rank."""
        import torch
        import torch.distributed as dist

        if self.size == 1:
            return is_true
        minimum = torch.tensor([int(is_true)])
        dist.all_reduce(minimum, dist.ReduceOp.MIN, group=self.group)
        return bool(minimum)

    def _broadcast(self, message: Any) -> Any:
        import torch
        import torch.distributed as dist

        if self.size == 1:
            return message
        is_leader = self.rank == 0
        packed = bytearray(msgpack.packb(message) if is_leader else b"\0")
        data = torch.frombuffer(packed, dtype=torch.uint8)
        # All ranks of a broadcast must pass tensors of the same size, so the size is sent first.
        size = torch.tensor([len(data)])
        dist.broadcast(size, 0, group=self.group)
        if not is_leader:
            data = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(data, 0, group=self.group)
        return msgpack.unpackb(data.numpy().tobytes())

    def gather(self, message: Any) -> list[Any] | None:
        """Messages of all ranks, by rank, in rank 0; None in the other ranks."""
        import torch
        import torch.distributed as dist

        if self.size == 1:
            return [message]
        data = torch.frombuffer(bytearray(msgpack.packb(message)), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(data)]), group=self.group)
        largest = max(int(size) for size in sizes)
        padded = torch.nn.functional.pad(data, (0, largest - len(data)))
        if self.rank != 0:
            dist.gather(padded, None, 0, group=self.group)
            return None
        buffers = [torch.empty(largest, dtype=torch.uint8) for _ in range(self.size)]
        dist.gather(padded, buffers, 0, group=self.group)
        return [
            msgpack.unpackb(buffer.numpy().tobytes()[: int(size)])
            for buffer, size in zip(buffers, sizes, strict=True)
        ]

    def reduce_sum(self, values: Any) -> None:
        """Sum the tensor ``values``, float32 [n], over all ranks, in place in rank 0."""
        import torch.distributed as dist

        if self.size > 1:
            dist.reduce(values, 0, group=self.group)

    def await_all_ranks(self) -> None:
        """Wait until all ranks have called this."""
        import torch.distributed as dist

        if self.size > 1:
            dist.barrier(group=self.group)
