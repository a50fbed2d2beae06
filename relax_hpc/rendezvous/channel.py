"""Small messages between the ranks of one group, by sockets and as bytes: nothing is pickled, nobody burns a core."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import msgpack


class Channel:
    """A gloo group of all ranks of the default one. It is used by one thread of each rank, all in the same order.

    Making it is collective. A wait for a rank that has died ends after ``timeout_s`` seconds with RuntimeError.
    """

    def __init__(self, timeout_s: float) -> None:
        import torch.distributed as dist

        met = dist.is_initialized()
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if met else (0, 1)
        # A rank alone has one kind of groups, without sockets; gloo would listen.
        backend = "gloo" if self.size > 1 else None
        self.group = dist.new_group(backend=backend, timeout=timedelta(seconds=timeout_s)) if met else None
        """For what else the same thread has to agree on; None in a process that has no ranks."""

    def tell(self, message: Any) -> Any:
        """What rank 0 passes, in every rank: None, numbers, strings, bytes, and lists and maps of them."""
        import torch
        import torch.distributed as dist

        if self.size == 1:
            return message
        leads = self.rank == 0
        data = torch.frombuffer(bytearray(msgpack.packb(message) if leads else b"\0"), dtype=torch.uint8)
        size = torch.tensor([len(data)])
        dist.broadcast(size, 0, group=self.group)
        data = data if leads else torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(data, 0, group=self.group)
        return msgpack.unpackb(data.numpy().tobytes())

    def gather(self, message: Any) -> list[Any] | None:
        """What all ranks pass, by rank, in rank 0; None elsewhere."""
        import torch
        import torch.distributed as dist

        if self.size == 1:
            return [message]
        data = torch.frombuffer(bytearray(msgpack.packb(message)), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(data)]), group=self.group)
        most = max(int(size) for size in sizes)
        padded = torch.nn.functional.pad(data, (0, most - len(data)))
        rooms = [torch.empty(most, dtype=torch.uint8) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(padded, rooms, 0, group=self.group)
        if rooms is None:
            return None
        return [msgpack.unpackb(room.numpy().tobytes()[: int(size)]) for room, size in zip(rooms, sizes, strict=True)]

    def reduce_sum(self, values: Any) -> None:
        """Add up float32 ``values`` [n], a tensor, in rank 0."""
        import torch.distributed as dist

        if self.size > 1:
            dist.reduce(values, 0, group=self.group)

    def meet(self) -> None:
        """Wait for all ranks."""
        import torch.distributed as dist

        if self.size > 1:
            dist.barrier(group=self.group)
