"""AdamW with states in host memory. In a step, the states pass through the GPU, one piece at a
time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from relax_hpc.training import adam
from relax_hpc.training.adam import MOMENTS, PiecewiseAdamW, Update, UpdatePiece


class OffloadedAdamW(PiecewiseAdamW):
    """The same steps as AdamW, element by element, with states in pinned memory of the host.

    The states are the moments, and the float32 main parameters of a model with another type. The
    GPU has memory for two pieces: one is updated while the other is copied.

    megatron-core 0.16.1 has HybridDeviceOptimizer. It does the whole step on the CPU, and keeps
    float32 main parameters on the GPU.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        moments: Mapping[Tensor, Sequence[Tensor]],
        gradients: Mapping[Tensor, Tensor],
        copies: Mapping[Tensor, Tensor],
        update: Update,
    ) -> None:
        """``groups``: parameter groups of an AdamW that this one replaces. ``moments``: zeros on
        the host, two for each parameter. ``gradients``: their tensors in every step. ``copies``:
        the model's parameters, if the parameters on the host are other tensors."""
        super().__init__(groups, moments, update)
        self._gradients, self._copies = gradients, copies

    def gradient_and_copies(self, parameter: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """See `PiecewiseAdamW`.

        A parameter on the host has no `grad`, because torch requires both on the same device.
        """
        copy = self._copies.get(parameter)
        return self._gradients[parameter], () if copy is None else (copy,)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """See `torch.optim.Optimizer.step`. Returns after the last piece is back on the host."""
        # Uploads, updates and downloads of consecutive pieces overlap on three streams. Two sets of
        # buffers alternate; an event protects a set until its download is complete.
        uploads, downloads = torch.cuda.Stream(), torch.cuda.Stream()
        compute = torch.cuda.current_stream()
        downloaded = [torch.cuda.Event(), torch.cuda.Event()]
        buffers: list[list[Tensor]] = []
        for number, piece in enumerate(self.pieces()):
            # Without a copy in the model, the parameter itself is on the GPU.
            host = piece.states if piece.copy is not None else piece.states[: len(MOMENTS)]
            if not buffers:
                buffers = [self._allocate_buffers(piece) for _ in downloaded]
                # torch's allocator may hand out memory that queued work of this stream still uses.
                uploads.wait_stream(compute)
            pairs = zip(buffers[number % 2], host, strict=False)
            device = [buffer[: len(state)] for buffer, state in pairs]
            with torch.cuda.stream(uploads):
                uploads.wait_event(downloaded[number % 2])
                for target, state in zip(device, host, strict=True):
                    target.copy_(state, non_blocking=True)
            compute.wait_stream(uploads)
            self.update(piece, [*device, *piece.states[len(device) :]])
            if piece.copy is not None:
                piece.copy.copy_(device[-1])
            downloads.wait_stream(compute)
            with torch.cuda.stream(downloads):
                for source, state in zip(device, host, strict=True):
                    state.copy_(source, non_blocking=True)
            downloaded[number % 2].record(downloads)
        downloads.synchronize()

    def _allocate_buffers(self, piece: UpdatePiece) -> list[Tensor]:
        """Memory on the GPU for the states of a piece."""
        states = piece.states[: len(MOMENTS) + bool(self._copies)]
        device = piece.gradient.device
        return [torch.empty(adam.PIECE, dtype=state.dtype, device=device) for state in states]
