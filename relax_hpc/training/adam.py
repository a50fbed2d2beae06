"""AdamW that updates one piece of its states at a time. The states may have lower precision, or be
in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from relax_hpc.training.rounding import round_stochastically

PIECE = 2**24
"""Elements of a piece."""
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class UpdatePiece:
    """Elements of one parameter that are updated together; every tensor is [elements]."""

    group: dict[str, Any]
    step: Tensor
    """Number of steps before this one."""
    gradient: Tensor
    states: tuple[Tensor, ...]
    """The two moments, and the parameter in float32."""
    copy: Tensor | None = None
    """Copy of the parameter in the model, with another type. None: the caller writes it."""


Update = Callable[[UpdatePiece, Sequence[Tensor]], None]
"""Function that does one step of a piece. The states are a separate argument, because they may be
copies on another device."""


def update_with_torch(piece: UpdatePiece, states: Sequence[Tensor]) -> None:
    """One step in float32 by torch's AdamW. Moments of lower precision are rounded
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
        # adamw increments its argument, but the count must rise only once per parameter.
        [piece.step.clone()],
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=piece.group["lr"],
        weight_decay=piece.group["weight_decay"],
        eps=piece.group["eps"],
        maximize=False,
    )
    # float32 moments were updated in place, because `float()` returns the same tensor.
    for moment, value in zip(moments, wide, strict=True):
        if moment.dtype is not value.dtype:
            moment.copy_(round_stochastically(value, int(piece.step)))


class PiecewiseAdamW(torch.optim.AdamW):
    """The same steps as AdamW, element by element. The moments may have another type or device than
    the parameter."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        moments: Mapping[Tensor, Sequence[Tensor]],
        update: Update,
    ) -> None:
        """``groups``: parameter groups of an AdamW that this one replaces. ``moments``: zeros, two
        for each parameter."""
        super().__init__([torch.zeros(0)])
        # torch 2.13 refuses views as parameters, and megatron-core's float32 shards are views. So
        # the groups are set afterwards, as megatron-core's distributed optimizer does.
        self.param_groups = groups
        self.update = update
        for parameter, both in moments.items():
            self.state[parameter] = {
                "step": torch.zeros(()),
                **dict(zip(MOMENTS, both, strict=True)),
            }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `torch.optim.Optimizer.load_state_dict`. torch's method would create moments with the
        parameter's type and device; this one copies into the present moments."""
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for parameter, number in zip(group["params"], saved["params"], strict=True):
                for name, value in state_dict["state"].get(number, {}).items():
                    self.state[parameter][name].copy_(torch.as_tensor(value))
            group.update({name: value for name, value in saved.items() if name != "params"})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """See `torch.optim.Optimizer.step`. A ``closure`` is not supported."""
        assert closure is None
        for piece in self.pieces():
            self.update(piece, piece.states)

    def pieces(self) -> Iterator[UpdatePiece]:
        """Pieces of all parameters. The step of a parameter is counted after its last piece."""
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                gradient, copies = self.gradient_and_copies(parameter)
                tensors = (gradient, *(state[name] for name in MOMENTS), parameter, *copies)
                splits = (tensor.view(-1).split(PIECE) for tensor in tensors)
                for piece in zip(*splits, strict=True):
                    yield UpdatePiece(group, state["step"], piece[0], piece[1:4], *piece[4:])
                state["step"] += 1

    def gradient_and_copies(self, parameter: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """Gradient of a parameter, and the model's copy of it if this optimizer writes it."""
        assert parameter.grad is not None
        return parameter.grad, ()
