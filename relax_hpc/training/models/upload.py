"""Copies from the host to a device that do not wait for the work that the device has."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def upload(values: np.ndarray, device: str | torch.device) -> Tensor:
    """``values`` on ``device``, for what that is asked next; on a CPU they share memory.

    From pageable memory torch would wait until a GPU has done all that it was asked before, which
    then has nothing to do while the next micro-batch is put together.
    """
    found = torch.from_numpy(values)
    return (
        found.pin_memory().to(device, non_blocking=True)
        if torch.device(device).type == "cuda"
        else found
    )
