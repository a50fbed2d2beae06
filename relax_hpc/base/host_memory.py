"""Memory of the host for copies to and from a device: exactly as large as asked for, and there
before it is needed."""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_ALIGNED = 64


def allocate_host_memory(size: int, pinned: bool, what: str) -> Tensor:
    """uint8 [size] whose pages are there already; ``pinned`` for copies that a GPU makes by itself.
    It stays for the life of the process, or until `unpin_memory`.

    torch's own pinned memory comes in powers of two: up to twice of a state that fills a third of a
    node. OSError names ``what`` it was for: there is no such memory, or it cannot be pinned.
    """
    import torch

    try:
        pages = mmap.mmap(
            -1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
        )
    except OSError as error:
        raise OSError(
            error.errno, f"{what}: {size} bytes of host memory are not to be had: {error.strerror}"
        ) from error
    room = torch.frombuffer(pages, dtype=torch.uint8)[:size]
    if pinned:
        pin_memory(room, what)
    return room


def allocate_host_tensors(
    tensors: Sequence[Tensor], pinned: bool, what: str, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """Zeros of the shapes of ``tensors``, and of their types unless ``dtype`` is given, in one
    `allocate_host_memory`."""
    kinds = [dtype or one.dtype for one in tensors]
    sizes = [one.numel() * kind.itemsize for one, kind in zip(tensors, kinds, strict=True)]
    ends = list(
        itertools.accumulate((-(-size // _ALIGNED) * _ALIGNED for size in sizes), initial=0)
    )
    room = allocate_host_memory(ends[-1], pinned, what)
    parts = [room[at : at + size] for at, size in zip(ends, sizes, strict=False)]
    return [
        part.view(kind).view(one.shape)
        for part, kind, one in zip(parts, kinds, tensors, strict=True)
    ]


def pin_memory(room: Tensor, what: str) -> None:
    """Let a GPU copy to and from ``room`` beside all else. OSError names ``what`` it is for."""
    import torch

    error = torch.cuda.cudart().cudaHostRegister(room.data_ptr(), room.nbytes, 0)
    if error.value:
        raise OSError(
            f"{what}: {room.nbytes} bytes cannot be pinned ({error}); raise the limit of locked "
            "memory"
        )


def unpin_memory(room: Tensor) -> None:
    """Unpin the memory of ``room``, before it may go."""
    import torch

    torch.cuda.cudart().cudaHostUnregister(room.data_ptr())
