"""AdamW whose states lie in host memory: in a step they pass through the GPU, a piece at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from relax_hpc.training import adam
from relax_hpc.training.adam import MOMENTS, PiecewiseAdamW, Update, UpdatePiece


class OffloadedAdamW(PiecewiseAdamW):
    """The same steps as AdamW, element by element, with all that they go on from in pinned memory
    of the host: the moments, and float32 main parameters of a model of another type. Of each two
    pieces are on the GPU, one on its way.

    megatron-core's HybridDeviceOptimizer, which does the whole step on the CPU, keeps its float32
    main parameters on the GPU.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        moments: Mapping[Tensor, Sequence[Tensor]],
        gradients: Mapping[Tensor, Tensor],
        copies: Mapping[Tensor, Tensor],
        update: Update,
    ) -> None:
        """``groups``: of another AdamW, which is given up. ``moments``: zeros on the host, two for
        each parameter. ``gradients``: of each, where they will be in every step. ``copies``: what
        the model has of parameters that are on the host, which are others than its own."""
        super().__init__(groups, moments, update)
        self._gradients, self._copies = gradients, copies

    def beside(self, parameter: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """See `PiecewiseAdamW`. A parameter on the host has no gradient of its own: torch wants
        them in one place."""
        copy = self._copies.get(parameter)
        return self._gradients[parameter], () if copy is None else (copy,)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """See `torch.optim.Optimizer.step`. The host waits until the last piece is back."""
        arriving, leaving, computing = (
            torch.cuda.Stream(),
            torch.cuda.Stream(),
            torch.cuda.current_stream(),
        )
        emptied = [torch.cuda.Event(), torch.cuda.Event()]
        rooms: list[list[Tensor]] = []
        for number, piece in enumerate(self.pieces()):
            away = piece.states if piece.copy is not None else piece.states[: len(MOMENTS)]
            if not rooms:
                rooms = [self._room(piece) for _ in emptied]
                # Their memory may have been of what still runs here.
                arriving.wait_stream(computing)
            here = [room[: len(one)] for room, one in zip(rooms[number % 2], away, strict=False)]
            with torch.cuda.stream(arriving):
                arriving.wait_event(emptied[number % 2])
                for room, one in zip(here, away, strict=True):
                    room.copy_(one, non_blocking=True)
            computing.wait_stream(arriving)
            self.update(piece, [*here, *piece.states[len(here) :]])
            if piece.copy is not None:
                piece.copy.copy_(here[-1])
            leaving.wait_stream(computing)
            with torch.cuda.stream(leaving):
                for room, one in zip(here, away, strict=True):
                    one.copy_(room, non_blocking=True)
            emptied[number % 2].record(leaving)
        leaving.synchronize()

    def _room(self, piece: UpdatePiece) -> list[Tensor]:
        """Memory on the GPU for the states of a piece."""
        kinds = [one.dtype for one in piece.states[: len(MOMENTS) + bool(self._copies)]]
        return [torch.empty(adam.PIECE, dtype=kind, device=piece.gradient.device) for kind in kinds]
