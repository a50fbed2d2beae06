"""torch.distributed in a process that has no other ranks: no socket, no store, and collectives that are copies.

gloo would listen on a port for each of megatron-core's two dozen groups, and NCCL on one, for nobody.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from relax_hpc.errors import ConfigError


def initialize(timeout: timedelta) -> None:
    """Make the default group, of torch's backend `fake`. ConfigError: its collectives are no copies in this torch."""
    # It registers the backend. Written for torch's tests; what older versions of it return is not always right.
    import torch.testing._internal.distributed.fake_pg

    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    if wrong := wrong_collectives():
        found = f"{', '.join(wrong)} of one rank give wrong values"
        raise ConfigError(f"torch {torch.__version__}: {found}; install the version of env/requirements-*.txt")


def wrong_collectives(device: str = "cpu") -> list[str]:
    """Names of the collectives whose results are not what they were given; each takes a few microseconds."""
    given = torch.arange(1.0, 5.0, device=device)
    calls: dict[str, Any] = {
        "all_reduce": lambda out: dist.all_reduce(out.copy_(given)),
        "reduce": lambda out: dist.reduce(out.copy_(given), 0),
        "broadcast": lambda out: dist.broadcast(out.copy_(given), 0),
        "all_gather": lambda out: dist.all_gather([out], given),
        "all_gather_single": lambda out: _newer("all_gather_single", "all_gather_into_tensor")(out, given),
        "gather": lambda out: dist.gather(given, [out], 0),
        "scatter": lambda out: dist.scatter(out, [given], 0),
        "reduce_scatter": lambda out: dist.reduce_scatter(out, [given]),
        "reduce_scatter_single": lambda out: _newer("reduce_scatter_single", "reduce_scatter_tensor")(out, given),
        "all_to_all": lambda out: dist.all_to_all([out], [given]),
        "all_to_all_single": lambda out: dist.all_to_all_single(out, given),
    }
    wrong = []
    for name, call in calls.items():
        call(out := torch.zeros_like(given))
        if not torch.equal(out, given):
            wrong.append(name)
    return wrong


def _newer(name: str, older: str) -> Any:
    return getattr(dist, name, None) or getattr(dist, older)


def keep_groups_alike() -> None:
    """Make all of megatron-core's groups of one kind: it asks for gloo groups beside the others, to send from the
    host."""
    from megatron.core import parallel_state

    create = parallel_state.create_group

    def create_group(*args: Any, **kwargs: Any) -> Any:
        if dist.get_backend() == "fake":
            kwargs.pop("backend", None)
        return create(*args, **kwargs)

    if not hasattr(create, "alike"):
        create_group.alike = True
        parallel_state.create_group = create_group
