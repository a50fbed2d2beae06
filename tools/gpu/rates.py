"""What the device can do by itself, which figures are shares of: a product of matrices, and
copies."""

from __future__ import annotations

import torch
from child import answer, in_turns, middle

from relax_hpc.base.host_memory import allocate_host_memory


def measure(device: str, size: int, copied_bytes: int, rounds: int = 10) -> dict[str, float]:
    """Operations a second of a product of bfloat16 matrices [size, size], and bytes a second of
    copies: on the device, read and written counted both; to and from pinned memory of the host, in
    one piece."""
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    here, there = (torch.ones(copied_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    room = allocate_host_memory(copied_bytes, device == "cuda", "rates")
    acts = {
        "matmul": lambda: [left @ right for _ in range(10)],
        "copy": lambda: there.copy_(here),
        "to_host": lambda: room.copy_(here, non_blocking=True),
        "to_device": lambda: here.copy_(room, non_blocking=True),
    }
    taken = {name: middle(times) for name, times in in_turns(acts, rounds, device).items()}
    found = {
        "matmul_flops": 10 * 2 * size**3 / taken["matmul"],
        "copy": 2 * copied_bytes / taken["copy"],
    }
    return found | {name: copied_bytes / taken[name] for name in ("to_host", "to_device")}


if __name__ == "__main__":
    answer(measure)
