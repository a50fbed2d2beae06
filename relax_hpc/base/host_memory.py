"""Host memory for copies to and from a device.

It has exactly the requested size, and its pages are allocated before they are used.
"""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_ALIGNMENT_BYTES = 64
_PAGE_BYTES = 4096
# Threads that allocate pages: the kernel zeroes about 4 GB/s in one thread.
_THREADS = 8
# A multiple of a huge page, so that no two threads allocate the same one.
_SHARE_BYTES = 64 << 20


def allocate_host_memory(size: int, pinned: bool, purpose: str) -> Tensor:
    """uint8 [size] in host memory whose pages are allocated.

    ``pinned``: a GPU can copy it asynchronously. The memory stays for the life of the process, or
    until `unpin_memory`. OSError, with ``purpose``: there is not enough memory, or it cannot be
    pinned.
    """
    import torch

    # Not torch's own pinned memory: its allocator rounds up to powers of two, which can double a
    # state that fills a third of a node.
    try:
        pages = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise OSError(
            error.errno,
            f"{purpose}: {size} bytes of host memory cannot be allocated: {error.strerror}",
        ) from error
    _allocate_pages(pages)
    buffer = torch.frombuffer(pages, dtype=torch.uint8)[:size]
    if pinned:
        pin_memory(buffer, purpose)
    return buffer


def _allocate_pages(memory: mmap.mmap) -> None:
    """Allocate the pages of ``memory`` in several threads. MAP_POPULATE would use only one."""
    # No MADV_HUGEPAGE: on a node whose memory is full of cached files, the kernel moves pages to
    # free huge ones. With Linux 6.18, that took up to ten times as long as small pages.
    first_bytes = np.frombuffer(memory, np.uint8)[::_PAGE_BYTES]
    step = _SHARE_BYTES // _PAGE_BYTES
    shares = [first_bytes[start : start + step] for start in range(0, len(first_bytes), step)]
    if len(shares) == 1:
        shares[0].fill(0)
        return
    with ThreadPoolExecutor(min(_THREADS, len(os.sched_getaffinity(0))), "host-memory") as pool:
        list(pool.map(lambda share: share.fill(0), shares))


def allocate_host_tensors(
    tensors: Sequence[Tensor], pinned: bool, purpose: str, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """Zeros with the shapes of ``tensors``, in one piece of memory, see `allocate_host_memory`.

    ``dtype``: the type of all of them; None: the types of ``tensors``.
    """
    dtypes = [dtype or tensor.dtype for tensor in tensors]
    sizes = [tensor.numel() * kind.itemsize for tensor, kind in zip(tensors, dtypes, strict=True)]
    aligned_sizes = [-(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for size in sizes]
    starts = list(itertools.accumulate(aligned_sizes, initial=0))
    buffer = allocate_host_memory(starts.pop(), pinned, purpose)
    copies = []
    for tensor, kind, start, size in zip(tensors, dtypes, starts, sizes, strict=True):
        copies.append(buffer[start : start + size].view(kind).view(tensor.shape))
    return copies


def pin_memory(buffer: Tensor, purpose: str) -> None:
    """Let a GPU copy to and from ``buffer`` asynchronously. OSError, with ``purpose``: refused."""
    import torch

    error = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)
    if error.value:
        raise OSError(
            f"{purpose}: {buffer.nbytes} bytes cannot be pinned ({error}); raise the limit of "
            "locked memory"
        )


def unpin_memory(buffer: Tensor) -> None:
    """Unpin the memory of ``buffer``. It must be called before the memory is freed."""
    import torch

    torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())
