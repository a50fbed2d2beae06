"""Offload of a trainer's state from its device to host memory, so that other processes can use the
device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from relax_hpc.base.errors import ConfigError, RelaxError
from relax_hpc.base.host_memory import allocate_host_tensors
from relax_hpc.training.gradients import gradient_buffers
from relax_hpc.training.trainer import Trainer


class DeviceOffload:
    """Weights, main parameters and moments of one rank move to pinned host memory and return bit
    for bit. Gradients are zero between steps, so their memory is only freed and zeroed again.

    ::

        state = DeviceOffload(trainer)
        state.offload()
        state.restore()

    Every tensor stays the same object; only its memory is freed. No tensor may be used before
    `restore`.
    """

    def __init__(self, trainer: Trainer) -> None:
        """``trainer``: its optimizer must already have its state. ConfigError: some of its memory
        cannot be freed, or the host has too little memory."""
        self.device = trainer.model.device
        kept = self._storages(_state_tensors(trainer))
        # A storage that holds both state and gradients is copied, not zeroed.
        zeroed = self._storages(_gradient_tensors(trainer))
        self._kept = list(kept.values())
        self._gradients = [storage for address, storage in zeroed.items() if address not in kept]
        for storage in (*self._kept, *self._gradients):
            if not storage.resizable():
                raise ConfigError(
                    f"colocate: {storage.nbytes()} bytes of the actor's state cannot be freed; set "
                    "it false"
                )
        self._sizes = [storage.nbytes() for storage in self._kept]
        self._gradient_sizes = [storage.nbytes() for storage in self._gradients]
        try:
            self._copies = allocate_host_tensors(
                [_as_bytes(storage) for storage in self._kept],
                self.device.type == "cuda",
                "colocate",
            )
        except OSError as error:
            raise ConfigError(
                f"{error}; the actor's state is stored there while engines generate"
            ) from error
        self.is_offloaded = False

    def _storages(self, tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
        """Storages of ``tensors`` on the device by address. Several tensors may share one."""
        storages = {}
        for tensor in tensors:
            if tensor.device.type == self.device.type:
                storage = tensor.detach().untyped_storage()
                if storage.nbytes():
                    storages[storage.data_ptr()] = storage
        return storages

    @property
    def bytes(self) -> int:
        """Bytes of device memory that `offload` frees."""
        return sum(self._sizes) + sum(self._gradient_sizes)

    @torch.no_grad()
    def offload(self) -> None:
        """Free the device's memory. Call it between steps."""
        if self.is_offloaded:
            return
        for storage, copy in zip(self._kept, self._copies, strict=True):
            copy.copy_(_as_bytes(storage), non_blocking=True)
        self._await_copies()
        self.is_offloaded = True
        for storage in (*self._kept, *self._gradients):
            storage.resize_(0)
        if self.device.type == "cuda":
            # torch's allocator would keep the freed memory for its own tensors.
            torch.cuda.empty_cache()

    @torch.no_grad()
    def restore(self) -> None:
        """Move the state back to the device. RelaxError: the engines have not freed enough
        memory."""
        if not self.is_offloaded:
            return
        try:
            for storage, size in zip(self._kept, self._sizes, strict=True):
                storage.resize_(size)
            for storage, size in zip(self._gradients, self._gradient_sizes, strict=True):
                storage.resize_(size)
        except RuntimeError as error:
            raise RelaxError(
                f"colocate: {self.bytes} bytes of the actor's state do not fit on {self.device} "
                f"({error}); give engines less by rollout.engine.flags.mem_fraction_static"
            ) from error
        for storage, copy in zip(self._kept, self._copies, strict=True):
            _as_bytes(storage).copy_(copy, non_blocking=True)
        for storage in self._gradients:
            _as_bytes(storage).zero_()
        self._await_copies()
        self.is_offloaded = False

    def _await_copies(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()


def _gradient_tensors(trainer: Trainer) -> Iterator[torch.Tensor]:
    for buffer in gradient_buffers(trainer.module):
        yield buffer.grad_data


def _state_tensors(trainer: Trainer) -> Iterator[torch.Tensor]:
    """Weights, and all tensors of the optimizer."""
    yield from trainer.model.module.parameters()
    for optimizer in trainer.optimizer.chained_optimizers:
        for group in optimizer.optimizer.param_groups:
            yield from group["params"]
        for state in optimizer.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
