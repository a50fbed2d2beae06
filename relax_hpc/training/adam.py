"""AdamW that goes over its states a piece at a time: they may be of lower precision, or lie in host
memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from relax_hpc.training.rounding import round_stochastically

PIECE = 2**24
"""Elements that are updated at a time."""
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class UpdatePiece:
    """Elements of one parameter that are updated together; every tensor is [elements]."""

    group: dict[str, Any]
    step: Tensor
    """Number of steps before this one."""
    gradient: Tensor
    states: tuple[Tensor, ...]
    """States: the two moments, and the parameter itself, in float32."""
    copy: Tensor | None = None
    """Copy of the parameter in the model, of another type, if it is to be written too."""


Update = Callable[[UpdatePiece, Sequence[Tensor]], None]
"""Function that makes a step of a piece, whose states are given apart: they may be copies at
another place."""


def update_with_torch(piece: UpdatePiece, states: Sequence[Tensor]) -> None:
    """One step in float32 by torch's AdamW; moments of lower precision are rounded
    stochastically."""
    *moments, parameter = states
    wide = [moment.float() for moment in moments]
    beta1, beta2 = piece.group["betas"]
    adamw(
        [parameter],
        [piece.gradient],
        wide[:1],
        wide[1:],
        [],
        # It counts the step, once for each piece.
        [piece.step.clone()],
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=piece.group["lr"],
        weight_decay=piece.group["weight_decay"],
        eps=piece.group["eps"],
        maximize=False,
    )
    for moment, value in zip(moments, wide, strict=True):
        if moment.dtype is not value.dtype:
            moment.copy_(round_stochastically(value, int(piece.step)))


class PiecewiseAdamW(torch.optim.AdamW):
    """The same steps as AdamW, element by element, with moments of a type and in a place of their
    own."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        moments: Mapping[Tensor, Sequence[Tensor]],
        update: Update,
    ) -> None:
        """``groups``: of another AdamW, which is given up; ``moments``: zeros, two for each
        parameter."""
        super().__init__([torch.zeros(0)])
        # As megatron-core's distributed optimizer does: float32 shards are views, which torch would
        # refuse.
        self.param_groups = groups
        self.update = update
        for parameter, both in moments.items():
            self.state[parameter] = {
                "step": torch.zeros(()),
                **dict(zip(MOMENTS, both, strict=True)),
            }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `torch.optim.Optimizer.load_state_dict`, which would make moments of the parameter's
        type and place."""
        for group, found in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for parameter, number in zip(group["params"], found["params"], strict=True):
                for name, value in state_dict["state"].get(number, {}).items():
                    self.state[parameter][name].copy_(torch.as_tensor(value))
            group.update({name: value for name, value in found.items() if name != "params"})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """See `torch.optim.Optimizer.step`; there is no ``closure``."""
        assert closure is None
        for piece in self.pieces():
            self.update(piece, piece.states)

    def pieces(self) -> Iterator[UpdatePiece]:
        """Pieces of all parameters; each parameter counts its step after its last piece."""
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                gradient, copies = self.beside(parameter)
                flat = (gradient, *(state[name] for name in MOMENTS), parameter, *copies)
                for part in zip(*(one.view(-1).split(PIECE) for one in flat), strict=True):
                    yield UpdatePiece(group, state["step"], part[0], part[1:4], *part[4:])
                state["step"] += 1

    def beside(self, parameter: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """Gradient of a parameter, and the model's copy of it if it is to be written."""
        return parameter.grad, ()
