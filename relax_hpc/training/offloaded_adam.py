"""AdamW whose moments lie in host memory: in a step they pass through the GPU, a piece at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from relax_hpc.host_memory import host_like

PIECE = 2**24
"""Elements that are updated at a time; of each of the two moments two pieces are on the GPU, one on its way."""
_MOMENTS = ("exp_avg", "exp_avg_sq")


class OffloadedAdamW(torch.optim.AdamW):
    """The same steps as AdamW, element by element, with `exp_avg` and `exp_avg_sq` in pinned memory of the host.

    megatron-core's HybridDeviceOptimizer, which does the whole step on the CPU, keeps as much on the GPU: its float32
    main parameters stay there too. Two bytes over the link for one there, for the GPU's speed.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        """``groups``: of another AdamW, which is given up."""
        super().__init__([torch.zeros(0)])
        # As megatron-core's distributed optimizer does: float32 shards are views, which torch would refuse.
        self.param_groups = groups
        self._rooms: list[list[Tensor]] = []
        parameters = [parameter for group in groups for parameter in group["params"]]
        pinned = any(parameter.is_cuda for parameter in parameters)
        rooms = host_like(parameters * len(_MOMENTS), pinned, "optimizer states", torch.float32)
        for number, parameter in enumerate(parameters):
            moments = dict(zip(_MOMENTS, rooms[number :: len(parameters)], strict=True))
            self.state[parameter] = {"step": torch.zeros(()), **moments}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `torch.optim.Optimizer.load_state_dict`, which would move all moments to the GPU first."""
        for group, found in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for parameter, number in zip(group["params"], found["params"], strict=True):
                for name, value in state_dict["state"].get(number, {}).items():
                    self.state[parameter][name].copy_(torch.as_tensor(value))
            group.update({name: value for name, value in found.items() if name != "params"})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """See `torch.optim.Optimizer.step`; there is no ``closure``. The host waits for the last moment to be back."""
        assert closure is None
        arriving, leaving, computing = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.current_stream()
        emptied = [torch.cuda.Event(), torch.cuda.Event()]
        # Rooms may have been made by what still runs here.
        arriving.wait_stream(computing)
        for number, piece in enumerate(self._pieces()):
            rooms = self._room(number % 2, piece.parameter)
            with torch.cuda.stream(arriving):
                arriving.wait_event(emptied[number % 2])
                moments = [room[: piece.parameter.numel()] for room in rooms]
                for moment, host in zip(moments, piece.moments, strict=True):
                    moment.copy_(host, non_blocking=True)
            computing.wait_stream(arriving)
            piece.update(moments)
            leaving.wait_stream(computing)
            with torch.cuda.stream(leaving):
                for moment, host in zip(moments, piece.moments, strict=True):
                    host.copy_(moment, non_blocking=True)
            emptied[number % 2].record(leaving)
        leaving.synchronize()

    def _room(self, number: int, like: Tensor) -> list[Tensor]:
        if not self._rooms:
            self._rooms = [[torch.empty(PIECE, device=like.device) for _ in _MOMENTS] for _ in range(2)]
        return self._rooms[number]

    def _pieces(self) -> Iterator[_Piece]:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                flat = [parameter.view(-1), parameter.grad.view(-1), *(state[name].view(-1) for name in _MOMENTS)]
                for parts in zip(*(one.split(PIECE) for one in flat), strict=True):
                    yield _Piece(group, state["step"], parts[0], parts[1], parts[2:])
                state["step"] += 1


@dataclass(frozen=True, slots=True)
class _Piece:
    """Of a parameter and its gradient, and where its moments lie."""

    group: dict[str, Any]
    steps: Tensor
    parameter: Tensor
    gradient: Tensor
    moments: tuple[Tensor, ...]

    def update(self, moments: list[Tensor]) -> None:
        """By ``moments`` on the parameter's device."""
        beta1, beta2 = self.group["betas"]
        adamw(
            [self.parameter],
            [self.gradient],
            [moments[0]],
            [moments[1]],
            [],
            # It counts the step, once for each piece.
            [self.steps.clone()],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=self.group["lr"],
            weight_decay=self.group["weight_decay"],
            eps=self.group["eps"],
            maximize=False,
        )
