"""Temporary exchange of a model's weights, so that the same ranks compute forward passes of several
policies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.host_memory import allocate_host_tensors


class SwappedWeights:
    """Named copies of this rank's part of a model's weights, in host memory. The memory is pinned
    if the model is on a GPU.

    ::

        weights = SwappedWeights(model.module)
        weights.store("old")
        with weights.in_place("old"):
            model.forward_logprobs(batches, temperature)

    The exchange is in place, so the parameters of an optimizer and of a publisher stay the same
    objects. Gradients do not change. No other thread may read the weights during the exchange.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._parameters = list(module.parameters())
        self._copies: dict[str, list[torch.Tensor]] = {}

    def store(self, name: str) -> None:
        """Copy the present weights under `name`, and replace an earlier copy of that name.

        ConfigError: the node has too little memory for one more copy.
        """
        if name not in self._copies:
            pinned = any(parameter.is_cuda for parameter in self._parameters)
            try:
                self._copies[name] = allocate_host_tensors(
                    self._parameters, pinned, f"weights {name}"
                )
            except OSError as error:
                raise ConfigError(
                    f"actor.forward: {error}; put the role into a separate group"
                ) from error
        for copy, parameter in zip(self._copies[name], self._parameters, strict=True):
            copy.copy_(parameter.detach(), non_blocking=True)

    @contextmanager
    def in_place(self, name: str) -> Iterator[None]:
        """Context in which the model has the weights `name`. After it, the model has its previous
        weights, bit for bit.

        KeyError: no copy has that name.
        """
        self._exchange(self._copies[name])
        try:
            yield
        finally:
            self._exchange(self._copies[name])

    def _exchange(self, copies: list[torch.Tensor]) -> None:
        """Exchange parameters and ``copies`` one by one, so that only one parameter at a time needs
        twice its memory on the device."""
        for copy, parameter in zip(copies, self._parameters, strict=True):
            # Not stored between calls: the optimizer may have moved the parameter into its buffers.
            live = parameter.detach()
            # All copies are queued on one stream, so the clone is complete before it is read.
            present = live.clone()
            live.copy_(copy, non_blocking=True)
            copy.copy_(present, non_blocking=True)
