"""Seconds and device memory of a forward and backward pass."""

from __future__ import annotations

import time
from collections.abc import Callable

from child import middle, sync


def host_and_total_s(act: Callable[[], object], rounds: int, device: str) -> tuple[float, float]:
    """Median seconds until ``act`` returns, and until the device has finished its work."""
    host, total = [], []
    for _ in range(rounds):
        sync(device)
        started = time.perf_counter()
        act()
        host.append(time.perf_counter() - started)
        sync(device)
        total.append(time.perf_counter() - started)
    return middle(host), middle(total)


def reset_peak(device: str) -> None:
    """Free unused device memory, and restart the measurement of the peak."""
    if device == "cuda":
        import torch

        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_gib(device: str) -> float:
    """Largest device memory of tensors since `reset_peak`, in GiB; 0 on a CPU."""
    if device != "cuda":
        return 0.0
    import torch

    return torch.cuda.max_memory_allocated() / 2**30
