"""Other weights in a model's place for a while: forward passes of several policies by the ranks of
one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.host_memory import allocate_host_tensors


class SwappedWeights:
    """Copies of this rank's part of a model's weights by name, in host memory, pinned if the model
    is on a GPU.

    ::

        weights = SwappedWeights(model.module)
        weights.keep("old")
        with weights.in_place("old"):
            model.forward_logprobs(batches, temperature)

    Swapping is in place, so an optimizer and a publisher keep the parameters they know; gradients
    are not touched. Nobody else may read the weights meanwhile.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._parameters = list(module.parameters())
        self._copies: dict[str, list[torch.Tensor]] = {}

    def keep(self, name: str) -> None:
        """Copy the present weights as `name`, over what had that name before. ConfigError: the node
        has too little memory for one more copy."""
        if name not in self._copies:
            pinned = any(parameter.is_cuda for parameter in self._parameters)
            try:
                self._copies[name] = allocate_host_tensors(
                    self._parameters, pinned, f"weights {name}"
                )
            except OSError as error:
                raise ConfigError(
                    f"actor.forward: {error}; give the role a group of its own"
                ) from error
        for copy, parameter in zip(self._copies[name], self._parameters, strict=True):
            copy.copy_(parameter.detach(), non_blocking=True)

    @contextmanager
    def in_place(self, name: str) -> Iterator[None]:
        """Give the model weights `name` inside of the block, and its own again, bit for bit, after
        it.

        KeyError: none were kept under that name.
        """
        self._exchange(self._copies[name])
        try:
            yield
        finally:
            self._exchange(self._copies[name])

    def _exchange(self, copies: list[torch.Tensor]) -> None:
        """Exchange parameters and ``copies`` one by one: one parameter at a time is on the device
        twice, none in host memory."""
        for copy, parameter in zip(copies, self._parameters, strict=True):
            # A detached alias is taken anew each time: the optimizer may have moved parameters into
            # its buffers.
            live = parameter.detach()
            present = live.clone()
            live.copy_(copy, non_blocking=True)
            copy.copy_(present, non_blocking=True)
