"""Rates of the device for a product of matrices and for copies.

Other figures are shares of them.
"""

from __future__ import annotations

import torch
from child import answer, in_turns, middle

from relax_hpc.base.host_memory import allocate_host_memory

_PRODUCTS = 10
"""Products of matrices in each round."""


def measure(device: str, size: int, copied_bytes: int, rounds: int = 10) -> dict[str, float]:
    """Operations per second of a product of bfloat16 matrices [size, size], and bytes per second of
    copies.

    A copy on the device counts each byte twice, once read and once written. Copies to and from
    pinned host memory are in one piece.
    """
    first, second = torch.randn(2, size, size, device=device, dtype=torch.bfloat16)
    source = torch.ones(copied_bytes, dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    host_memory = allocate_host_memory(copied_bytes, device == "cuda", "rates")
    acts = {
        "matmul": lambda: [first @ second for _ in range(_PRODUCTS)],
        "copy": lambda: target.copy_(source),
        "to_host": lambda: host_memory.copy_(source, non_blocking=True),
        "to_device": lambda: source.copy_(host_memory, non_blocking=True),
    }
    seconds = {name: middle(times) for name, times in in_turns(acts, rounds, device).items()}
    return {
        "matmul_flops": _PRODUCTS * 2 * size**3 / seconds["matmul"],
        "copy": 2 * copied_bytes / seconds["copy"],
        "to_host": copied_bytes / seconds["to_host"],
        "to_device": copied_bytes / seconds["to_device"],
    }


if __name__ == "__main__":
    answer(measure)
