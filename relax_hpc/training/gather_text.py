"""Gather of short texts from all ranks."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from relax_hpc.training.models.upload import upload


def gather_texts(text: str, device: torch.device) -> list[str]:
    """The text of each rank, on all ranks. Collective over all ranks.

    The texts travel as bytes: torch's `all_gather_object` would pickle them.
    """
    data = text.encode()
    # Collectives need equal sizes, so the lengths are exchanged first.
    sizes = torch.empty(dist.get_world_size(), dtype=torch.int64, device=device)
    dist.all_gather(list(sizes.split(1)), torch.tensor([len(data)], device=device))
    lengths = sizes.tolist()
    padded = gather_padded(data, max(lengths), device)
    return [values[:size].decode() for values, size in zip(padded, lengths, strict=True)]


def gather_padded(data: bytes, size: int, device: torch.device) -> list[bytes]:
    """The ``data`` of each rank, padded with zeros to ``size`` bytes, which all ranks know.

    Collective over all ranks. The host waits for the device once.
    """
    padded = np.zeros(size, np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    gathered = torch.empty(dist.get_world_size(), size, dtype=torch.uint8, device=device)
    dist.all_gather(list(gathered.unbind()), upload(padded, device))
    return [values.tobytes() for values in gathered.cpu().numpy()]
