"""Move of a trainer's state from its device to host memory and back: others have the device
meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from relax_hpc.base.errors import ConfigError, RelaxError
from relax_hpc.base.host_memory import allocate_host_tensors
from relax_hpc.training.gradients import gradient_buffers
from relax_hpc.training.trainer import Trainer


class DeviceOffload:
    """Weights, main parameters and moments of one rank go to pinned host memory, at the speed of
    the link, and come back bit for bit; gradients, which are zero between steps, give their memory
    back and come back as zeros.

    ::

        away = DeviceOffload(trainer)
        away.offload()
        away.restore()

    Every tensor stays the object that it is; its memory alone goes. Nobody may use one before
    `restore`.
    """

    def __init__(self, trainer: Trainer) -> None:
        """``trainer``: with its optimizer's state, as it stays from now on. ConfigError: some of
        its memory cannot be given back, or the host has too little."""
        self.device = trainer.model.device
        kept, zero = self._memory(_state(trainer)), self._memory(_gradients(trainer))
        self._kept = list(kept.values())
        self._gradients = [one for place, one in zero.items() if place not in kept]
        for one in (*self._kept, *self._gradients):
            if not one.resizable():
                size = one.nbytes()
                raise ConfigError(
                    f"colocate: {size} bytes of the actor's state cannot be given back; set it "
                    "false"
                )
        self._sizes = [one.nbytes() for one in self._kept]
        self._gradient_sizes = [one.nbytes() for one in self._gradients]
        try:
            self._rooms = allocate_host_tensors(
                [_whole(one) for one in self._kept], self.device.type == "cuda", "colocate"
            )
        except OSError as error:
            raise ConfigError(
                f"{error}; the actor's state goes there while engines generate"
            ) from error
        self.is_offloaded = False

    def _memory(self, tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
        """Storages of ``tensors`` on the device by address; several tensors may share one."""
        found = (
            one.detach().untyped_storage() for one in tensors if one.device.type == self.device.type
        )
        return {one.data_ptr(): one for one in found if one.nbytes()}

    @property
    def bytes(self) -> int:
        """Bytes that the device gets back."""
        return sum(self._sizes) + sum(self._gradient_sizes)

    @torch.no_grad()
    def offload(self) -> None:
        """Give the device's memory back; between steps."""
        if self.is_offloaded:
            return
        for one, room in zip(self._kept, self._rooms, strict=True):
            room.copy_(_whole(one), non_blocking=True)
        self._arrived()
        self.is_offloaded = True
        for one in (*self._kept, *self._gradients):
            one.resize_(0)
        if self.device.type == "cuda":
            # Else torch would keep it, for tensors of its own.
            torch.cuda.empty_cache()

    @torch.no_grad()
    def restore(self) -> None:
        """Take the device's memory again. RelaxError: the device has no room, as its engines have
        not made any."""
        if not self.is_offloaded:
            return
        try:
            for one, size in zip(self._kept, self._sizes, strict=True):
                one.resize_(size)
            for one, size in zip(self._gradients, self._gradient_sizes, strict=True):
                one.resize_(size)
        except RuntimeError as error:
            raise RelaxError(
                f"colocate: {self.bytes} bytes of the actor's state have no room on {self.device} "
                f"({error}); give engines less by rollout.engine.flags.mem_fraction_static"
            ) from error
        for one, room in zip(self._kept, self._rooms, strict=True):
            _whole(one).copy_(room, non_blocking=True)
        for one in self._gradients:
            _whole(one).zero_()
        self._arrived()
        self.is_offloaded = False

    def _arrived(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()


def _gradients(trainer: Trainer) -> Iterator[torch.Tensor]:
    yield from (buffer.grad_data for buffer in gradient_buffers(trainer.module))


def _state(trainer: Trainer) -> Iterator[torch.Tensor]:
    """Weights, and all tensors that the optimizer goes on from."""
    yield from trainer.model.module.parameters()
    for part in trainer.optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            yield from group["params"]
        for state in part.optimizer.state.values():
            yield from (one for one in state.values() if isinstance(one, torch.Tensor))


def _whole(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
