"""Collectives of training on NCCL with one rank: which fail, and with which message. On a CPU, gloo
replaces NCCL.

NCCL refuses some types and all tensors of the host, which gloo accepts. Each collective must
return its input, because a sum over one rank is its value. The list has the collectives of
relax_hpc.training, and those of megatron-core 0.16.1 during training. Sends between ranks are not
in it, because torch refuses a send from a rank to itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from cases import Cases, describe
from child import answer, note
from torch import Tensor
from torch.distributed.distributed_c10d import _coalescing_manager

Group = dist.ProcessGroup | None
"""Ranks of a collective. None: the default group."""
Collective = Callable[[Tensor, Group], Tensor]
"""Call a collective with an input, and return its output."""

TIMEOUT_S = 30.0
ELEMENTS = 8
BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
UINT8, INT64 = torch.uint8, torch.int64


def _all_reduce(operation: dist.ReduceOp.RedOpType, values: Tensor, group: Group) -> Tensor:
    output = values.clone()
    dist.all_reduce(output, operation, group=group)
    return output


def _all_reduce_async(values: Tensor, group: Group) -> Tensor:
    output = values.clone()
    dist.all_reduce(output, group=group, async_op=True).wait()
    return output


def _reduce(values: Tensor, group: Group) -> Tensor:
    output = values.clone()
    dist.reduce(output, 0, group=group)
    return output


def _broadcast(values: Tensor, group: Group) -> Tensor:
    output = values.clone()
    dist.broadcast(output, 0, group=group)
    return output


def _all_gather(values: Tensor, group: Group) -> Tensor:
    output = torch.zeros_like(values)
    dist.all_gather([output], values, group=group)
    return output


def _gather(values: Tensor, group: Group) -> Tensor:
    output = torch.zeros_like(values)
    dist.gather(values, [output], 0, group=group)
    return output


def _all_gather_into_tensor(values: Tensor, group: Group) -> Tensor:
    output = torch.zeros_like(values)
    dist.all_gather_into_tensor(output, values, group=group)
    return output


def _reduce_scatter_tensor(values: Tensor, group: Group) -> Tensor:
    output = torch.zeros_like(values)
    dist.reduce_scatter_tensor(output, values, group=group)
    return output


def _all_to_all_single(values: Tensor, group: Group) -> Tensor:
    output = torch.zeros_like(values)
    dist.all_to_all_single(output, values, [len(values)], [len(values)], group=group)
    return output


def _coalesced(collective: Collective, values: Tensor, group: Group) -> Tensor:
    """Two calls that are launched together, like those for the buckets of megatron-core."""
    with _coalescing_manager(group):
        collective(values.clone(), group)
        output = collective(values, group)
    return output


def _barrier(values: Tensor, group: Group) -> Tensor:
    dist.barrier(group=group)
    return values


def _all_gather_object(values: Tensor, group: Group) -> Tensor:
    outputs: list[Any] = [None]
    dist.all_gather_object(outputs, values.tolist(), group=group)
    return torch.tensor(outputs[0]).to(values)


def _gather_object(values: Tensor, group: Group) -> Tensor:
    outputs: list[Any] = [None]
    dist.gather_object(values.tolist(), outputs, 0, group=group)
    return torch.tensor(outputs[0]).to(values)


def _scatter_object_list(values: Tensor, group: Group) -> Tensor:
    outputs: list[Any] = [None]
    dist.scatter_object_list(outputs, [values.tolist()], 0, group=group)
    return torch.tensor(outputs[0]).to(values)


def _broadcast_object_list(values: Tensor, group: Group) -> Tensor:
    outputs = [values.tolist()]
    dist.broadcast_object_list(outputs, 0, group=group)
    return torch.tensor(outputs[0]).to(values)


SUM: Collective = partial(_all_reduce, dist.ReduceOp.SUM)
MAX: Collective = partial(_all_reduce, dist.ReduceOp.MAX)
MIN: Collective = partial(_all_reduce, dist.ReduceOp.MIN)

OF_DEVICE: Mapping[str, tuple[Collective, Sequence[torch.dtype]]] = {
    "all_reduce sum": (SUM, (F32, F64, BF16)),
    "all_reduce max": (MAX, (F32, F64)),
    "broadcast": (_broadcast, (F32, F64, BF16)),
    "all_gather": (_all_gather, (F32, BF16, INT64, UINT8)),
    "all_gather_into_tensor": (_all_gather_into_tensor, (F32, BF16, INT64)),
    "reduce_scatter_tensor": (_reduce_scatter_tensor, (F32, BF16)),
    "all_to_all_single": (_all_to_all_single, (F32, BF16)),
    "barrier": (_barrier, (F32,)),
    "coalesced all_reduce": (partial(_coalesced, SUM), (F32,)),
    "coalesced reduce_scatter_tensor": (partial(_coalesced, _reduce_scatter_tensor), (F32,)),
    "coalesced all_gather_into_tensor": (partial(_coalesced, _all_gather_into_tensor), (BF16,)),
    "asynchronous all_reduce": (_all_reduce_async, (F32, BF16)),
    "all_gather_object": (_all_gather_object, (F32,)),
    "broadcast_object_list": (_broadcast_object_list, (F32,)),
}
"""Collectives on the device, in the default group, and the types of their tensors."""
OF_HOST: Mapping[str, tuple[Collective, Sequence[torch.dtype]]] = {
    "all_reduce min": (MIN, (INT64,)),
    "broadcast": (_broadcast, (INT64, UINT8)),
    "all_gather": (_all_gather, (INT64,)),
    "gather": (_gather, (UINT8, F32)),
    "reduce": (_reduce, (F32,)),
    "barrier": (_barrier, (F32,)),
    "gather_object": (_gather_object, (F32,)),
    "scatter_object_list": (_scatter_object_list, (F32,)),
}
"""Collectives on the host in the gloo group of `RankChannel`, next to the group of NCCL."""


def measure(device: str) -> Mapping[str, Any]:
    """Number of collectives that `passed` and `failed`, and the messages; `start_s`: seconds until
    the first one of the default group is finished."""
    if device == "cuda":
        torch.cuda.set_device(0)
    started = time.perf_counter()
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        store=dist.HashStore(),
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    cases = Cases(device)
    try:
        cases.run("first barrier", lambda _: dist.barrier())
        cases.figures["start_s"] = time.perf_counter() - started
        _run(cases, "", OF_DEVICE, device, None)
        try:
            host_group = dist.new_group(backend="gloo", timeout=timedelta(seconds=TIMEOUT_S))
        except Exception as error:
            cases.figures["group of the host error"] = describe(error)
            cases.figures["failed"] += 1
        else:
            _run(cases, "host ", OF_HOST, "cpu", host_group)
        note(cases.figures)
    finally:
        dist.destroy_process_group()
    return cases.figures


def _run(
    cases: Cases,
    prefix: str,
    collectives: Mapping[str, tuple[Collective, Sequence[torch.dtype]]],
    device: str,
    group: Group,
) -> None:
    for name, (collective, dtypes) in collectives.items():
        for dtype in dtypes:
            case = partial(_check, collective, dtype, device, group)
            cases.run(f"{prefix}{name} {str(dtype).removeprefix('torch.')}", case)


def _check(
    collective: Collective, dtype: torch.dtype, device: str, group: Group, _: dict[str, float]
) -> None:
    """Call a collective. ValueError: its output is not its input."""
    values = torch.arange(1, ELEMENTS + 1, device=device).to(dtype)
    output = collective(values, group)
    if not torch.equal(output, values):
        raise ValueError(f"found {output.tolist()}, expected {values.tolist()}")


if __name__ == "__main__":
    answer(measure)
