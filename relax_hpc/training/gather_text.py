"""Gather of short texts from all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist


def gather_texts(text: str, device: torch.device) -> list[str]:
    """The text of each rank, on all ranks. Collective over all ranks.

    The texts travel as bytes: torch's `all_gather_object` would pickle them.
    """
    data = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
    # Collectives need equal sizes, so the lengths are exchanged first.
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(data)], device=device))
    longest = max(int(size) for size in sizes)
    padded = [torch.zeros(longest, dtype=torch.uint8, device=device) for _ in sizes]
    dist.all_gather(padded, torch.nn.functional.pad(data, (0, longest - len(data))))
    pairs = zip(padded, sizes, strict=True)
    return [bytes(values[: int(size)].tolist()).decode() for values, size in pairs]
