"""torch.distributed for a group of one rank: no socket, and collectives that copy.

gloo would open a listening port for each of megatron-core's two dozen groups, NCCL one in total.
torch's backend `fake` opens no port, but in some releases its collectives do not copy: in torch
2.11, gather, scatter, reduce_scatter and all_to_all do not write their outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from relax_hpc.base.errors import ConfigError

if TYPE_CHECKING:
    # torch's stubs declare overloads and parameter names that one method per collective cannot
    # have, so the type checker does not see the base class.
    _ProcessGroup = Any
else:
    _ProcessGroup = dist.ProcessGroup

BACKEND = "alone"


def initialize(timeout: timedelta) -> None:
    """Create the default group with this process as its only rank. ConfigError: collectives of this
    torch do not copy."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            BACKEND, SingleRankGroup, extended_api=True, devices=["cpu", "cuda"]
        )
    dist.init_process_group(BACKEND, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    wrong = wrong_collectives()
    if wrong:
        names = ", ".join(wrong)
        raise ConfigError(
            f"torch {torch.__version__}: {names} of one rank give wrong values; install the "
            "version of env/requirements-*.txt"
        )


class SingleRankGroup(_ProcessGroup):
    """A group of one rank. Its collectives copy their input on the current stream of its device.

    torch calls these methods. Releases before torch 2.13 use the names that begin with an
    underscore, `alltoall_base`, and the names that end with `tensor_coalesced`.
    """

    def __init__(self, creation: Any, options: Any) -> None:
        """``creation``: torch's `_DistributedBackendOptions`; ``options``: not used."""
        super().__init__(creation.group_rank, creation.group_size)
        self._name = creation.group_id

    @property
    def group_name(self) -> str:
        """Name in torch's table of groups. torch's property reads it from a backend, which this
        group does not have."""
        return self._name

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        """Do nothing: a sum, a mean or a maximum over one rank is its value."""
        return _finished()

    allreduce_coalesced = broadcast = reduce = allreduce

    def barrier(self, opts: Any = None) -> dist.Work:
        """Do nothing: no other rank has to arrive."""
        return _finished()

    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        """Copy each of ``inputs`` to the only tensor of its list in ``outputs``."""
        return _copy([tensor for (tensor,) in outputs], inputs)

    gather = allgather

    def scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> dist.Work:
        """Copy the only tensor of each list in ``inputs`` to its place in ``outputs``."""
        return _copy(outputs, [tensor for (tensor,) in inputs])

    reduce_scatter = scatter

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> dist.Work:
        """Copy ``source`` to ``output``."""
        return _copy([output], [source])

    _allgather_base = reduce_scatter_single = _reduce_scatter_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        """Copy each of ``inputs`` to its place in ``outputs``."""
        return _copy(outputs, inputs)

    allgather_into_tensor_coalesced = reduce_scatter_single_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = alltoall = all_gather_single_coalesced

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        """Copy each of ``inputs`` to its place in the only list of ``outputs``."""
        return _copy(outputs[0], inputs)

    def all_to_all_single(
        self,
        output: Tensor,
        source: Tensor,
        output_sizes: Any = None,
        source_sizes: Any = None,
        opts: Any = None,
    ) -> dist.Work:
        """Copy ``source`` to ``output``. With one rank, each has one part of any size."""
        return _copy([output], [source])

    alltoall_base = all_to_all_single

    def _start_coalescing(self, device: torch.device) -> None:
        """Do nothing: each collective has copied when it returns."""

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        return _finished()

    def getBackendName(self) -> str:
        """Name of the backend in torch's messages."""
        return BACKEND


def _copy(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> dist.Work:
    for output, source in zip(outputs, inputs, strict=True):
        # Detached, because collectives are invisible to autograd. The shapes may differ.
        output.detach().view(-1).copy_(source.detach().reshape(-1))
    return _finished()


def _finished() -> dist.Work:
    """Handle of completed work."""
    done: torch.futures.Future[None] = torch.futures.Future()
    done.set_result(None)
    # torch's stubs lack this function.
    c10d: Any = torch._C._distributed_c10d
    return c10d._create_work_from_future(done)


def wrong_collectives(device: str = "cpu") -> list[str]:
    """Names of the collectives whose results differ from their input. Each takes a few
    microseconds."""
    values = torch.arange(1.0, 5.0, device=device)
    gather_single = _newest("all_gather_single", "all_gather_into_tensor")
    scatter_single = _newest("reduce_scatter_single", "reduce_scatter_tensor")
    calls: dict[str, Callable[[Tensor], Any]] = {
        "all_reduce": lambda out: dist.all_reduce(out.copy_(values)),
        "reduce": lambda out: dist.reduce(out.copy_(values), 0),
        "broadcast": lambda out: dist.broadcast(out.copy_(values), 0),
        "all_gather": lambda out: dist.all_gather([out], values),
        "all_gather_single": lambda out: gather_single(out, values),
        "gather": lambda out: dist.gather(values, [out], 0),
        "scatter": lambda out: dist.scatter(out, [values], 0),
        "reduce_scatter": lambda out: dist.reduce_scatter(out, [values]),
        "reduce_scatter_single": lambda out: scatter_single(out, values),
        "all_to_all": lambda out: dist.all_to_all([out], [values]),
        "all_to_all_single": lambda out: dist.all_to_all_single(out, values),
    }
    wrong = []
    for name, call in calls.items():
        out = torch.zeros_like(values)
        call(out)
        if not torch.equal(out, values):
            wrong.append(name)
    return wrong


def _newest(name: str, older_name: str) -> Callable[..., Any]:
    """A collective by its name in torch 2.13, or by its name in earlier releases."""
    return getattr(dist, name, None) or getattr(dist, older_name)


def use_one_backend() -> None:
    """Make megatron-core create all its groups with the backend of the default group, except with
    gloo and NCCL.

    megatron-core 0.16.1 creates gloo groups besides the others, to send from the host. They would
    open sockets, while the default group of one rank opens none.
    """
    from megatron.core import parallel_state

    original: Any = parallel_state.create_group
    if hasattr(original, "uses_one_backend"):
        return

    def create_group(*args: Any, **kwargs: Any) -> Any:
        if dist.get_backend() not in ("gloo", "nccl"):
            kwargs.pop("backend", None)
        return original(*args, **kwargs)

    replacement: Any = create_group
    replacement.uses_one_backend = True
    parallel_state.create_group = replacement
