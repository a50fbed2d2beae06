"""Texts of all ranks, gathered in each of them."""

from __future__ import annotations

import torch
import torch.distributed as dist


def gather_texts(mine: str, device: torch.device) -> list[str]:
    """The text of each rank. Collective over all ranks; as bytes, since objects would be
    pickled."""
    text = torch.tensor(list(mine.encode()), dtype=torch.uint8, device=device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(text)], device=device))
    longest = int(max(sizes))
    texts = [torch.zeros(longest, dtype=torch.uint8, device=device) for _ in sizes]
    dist.all_gather(texts, torch.nn.functional.pad(text, (0, longest - len(text))))
    return [
        bytes(text[: int(size)].tolist()).decode() for text, size in zip(texts, sizes, strict=True)
    ]
