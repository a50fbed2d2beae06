"""Small messages between the ranks of a group, as bytes: nothing is pickled."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist


def tell(value: Any, device: torch.device) -> Any:
    """Rank 0's JSON `value`, in every rank. Collective."""
    data = json.dumps(value).encode() if dist.get_rank() == 0 else b""
    size = torch.tensor([len(data)], device=device)
    dist.broadcast(size, 0)
    buffer = torch.zeros(int(size), dtype=torch.uint8)
    buffer[: len(data)] = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)]
    buffer = buffer.to(device)
    dist.broadcast(buffer, 0)
    return json.loads(buffer.cpu().numpy().tobytes())


def sum_bytes(data: bytearray, device: torch.device) -> bytes:
    """Bytes where each rank has filled its own and left zeros elsewhere, put together. Collective."""
    if not data:
        return b""
    buffer = torch.frombuffer(data, dtype=torch.uint8).to(device)
    dist.all_reduce(buffer)
    return buffer.cpu().numpy().tobytes()
