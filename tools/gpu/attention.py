"""Our causal attention in packs: deviations of its methods from the formula in float32, and their
times.

On a GPU, `packed` is one call of torch's variable-length attention for all rows. On a CPU it is the
same as `by row`, which training uses on GPUs only if `model.long_row_attention` asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from cases import Cases, DeviceTimer
from child import answer, middle, timed
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from relax_hpc.training.models.attention import CausalAttention
from relax_hpc.training.models.packs import PackedRows, PackLayout, PackSplit

BACKWARD_OF_FORWARD = 2.5
"""Operations of the backward pass, which computes five products of matrices instead of two, as a
multiple of the forward pass."""
NEW_LENGTHS = 8


class Pack:
    """Rows of random queries, keys and values in bfloat16."""

    def __init__(self, device: str, lengths: Sequence[int], heads: int, groups: int, size: int):
        """``heads`` of the queries and ``groups`` of keys and values, of ``size`` elements."""
        self.rows: PackedRows = PackLayout.from_lengths(lengths, PackSplit()).rank_rows(0, device)
        shape = (sum(lengths), heads + 2 * groups, size)
        projected = torch.randn(shape, dtype=torch.bfloat16, device=device).requires_grad_()
        # Slices of one projection, with its strides, as values are in training.
        self.inputs: Sequence[Tensor] = projected.split([heads, groups, groups], dim=1)
        """Queries [t, heads, size], keys and values [t, groups, size]."""
        self.attention = CausalAttention(SimpleNamespace(context_parallel_size=1))

    def attend_packed(self) -> Tensor:
        """Attention in one call for all rows, if the device has it."""
        q, k, v = self.inputs
        method = self.attention._attend_packed if q.is_cuda else self.attention._attend_by_row
        return method(q, k, v, self.rows)

    def attend_by_row(self) -> Tensor:
        """Attention row by row, by the kernel that torch chooses."""
        q, k, v = self.inputs
        return self.attention._attend_by_row(q, k, v, self.rows)

    def attend_by_cudnn(self) -> Tensor:
        """Attention row by row, by cuDNN."""
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return self.attend_by_row()


# -- deviations ------------------------------------------------------------------------------------


def deviations(
    device: str,
    lengths: Sequence[int],
    heads: Sequence[tuple[int, int, int]],
    long_lengths: Sequence[int] = (),
) -> Mapping[str, Any]:
    """Deviations of a pack of rows of ``lengths``, for each number of heads, of groups, and size of
    a head.

    ``long_lengths``: rows of another pack, with the first of ``heads``, which are computed row by
    row as with `model.long_row_attention: by_row`.
    """
    torch.manual_seed(0)
    # The formula must not round to TF32.
    torch.set_float32_matmul_precision("highest")
    cases = Cases(device)
    for count, groups, size in heads:
        name = f"{count}/{groups} heads of {size}"
        pack = partial(Pack, device, lengths, count, groups, size)
        cases.run(name, partial(_measure_deviations, pack, Pack.attend_packed))
    if long_lengths:
        pack = partial(Pack, device, long_lengths, *heads[0])
        cases.run("long rows", partial(_measure_deviations, pack, Pack.attend_by_row))
    return cases.figures


def _measure_deviations(
    make_pack: Callable[[], Pack], method: Callable[[Pack], Tensor], figures: dict[str, float]
) -> None:
    pack = make_pack()
    result = method(pack)
    slope = torch.randn_like(result)
    gradients = torch.autograd.grad(result, pack.inputs, slope)
    exact_rows = []
    lengths = list(pack.rows.queries)
    pieces = (values.detach().split(lengths) for values in (*pack.inputs, slope))
    for row in zip(*pieces, strict=True):
        exact_rows.append(_exact_row(*(values.float() for values in row)))
    exact = [torch.cat(tensors) for tensors in zip(*exact_rows, strict=True)]
    figures["output deviation"] = _token_deviation([result], exact[:1])
    figures["gradients deviation"] = _token_deviation(gradients, exact[1:])


def _exact_row(q: Tensor, k: Tensor, v: Tensor, slope: Tensor) -> tuple[Tensor, ...]:
    """softmax(q k / sqrt(size)) v of the tokens that are not later, [t, heads, size], and the
    gradients of queries, keys and values."""
    inputs = [values.requires_grad_() for values in (q, k, v)]
    repeats = q.shape[1] // k.shape[1]
    queries = q.transpose(0, 1)
    keys, values = (x.repeat_interleave(repeats, dim=1).transpose(0, 1) for x in (k, v))
    scores = queries @ keys.transpose(1, 2) / q.shape[2] ** 0.5
    later = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1)
    probabilities = scores.masked_fill(later, -torch.inf).softmax(-1)
    result = (probabilities @ values).transpose(0, 1)
    return result.detach(), *torch.autograd.grad(result, inputs, slope)


def _token_deviation(values: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Largest deviation of a token: the norm of its difference from ``exact``, relative to the
    token's norm plus the mean norm of all tokens. NaN if a value is NaN."""
    largest = []
    for tensor, exact_tensor in zip(values, exact, strict=True):
        distances = (tensor.detach().float() - exact_tensor).flatten(1).norm(dim=1)
        norms = exact_tensor.flatten(1).norm(dim=1)
        largest.append((distances / (norms + norms.mean())).max())
    return float(torch.stack(largest).max())


# -- time ------------------------------------------------------------------------------------------


def speed(
    device: str, batches: Sequence[tuple[int, int]], heads: int, groups: int, size: int
) -> Mapping[str, Any]:
    """Milliseconds and TFLOP/s for each number and length of rows.

    Row by row with many rows, launches by the host may take longer than the kernels; then their
    time is included.
    """
    torch.manual_seed(0)
    cases, timer = Cases(device), DeviceTimer(device)
    methods = {"packed": Pack.attend_packed, "by row": Pack.attend_by_row}
    if device == "cuda":
        methods["cuDNN by row"] = Pack.attend_by_cudnn
    for count, length in batches:
        shape = ([length] * count, heads, groups, size)
        for name, method in methods.items():
            case = partial(_measure_speed, timer, method, shape)
            cases.run(f"{count} x {length} {name}", case)
    longest = max(length for _, length in batches)
    lengths = [longest - number for number in range(1, NEW_LENGTHS + 1)]
    for name, method in methods.items():
        packs = [partial(Pack, device, [length], heads, groups, size) for length in lengths]
        case = partial(_measure_new_lengths, device, method, packs)
        cases.run(f"new lengths {name}", case)
    return cases.figures


def _measure_new_lengths(
    device: str,
    method: Callable[[Pack], Tensor],
    packs: Sequence[Callable[[], Pack]],
    figures: dict[str, float],
) -> None:
    """Median seconds of the first and of the second forward and backward pass of each pack, whose
    lengths are new: a kernel may make a plan for each."""
    first, second = list[float](), list[float]()
    for make_pack in packs:
        pack = make_pack()
        act = partial(_run_passes, pack, method)
        first.append(timed(act, device))
        second.append(timed(act, device))
    figures["first_s"], figures["second_s"] = middle(first), middle(second)


def _run_passes(pack: Pack, method: Callable[[Pack], Tensor]) -> None:
    result = method(pack)
    torch.autograd.grad(result, pack.inputs, torch.ones_like(result))


def _measure_speed(
    timer: DeviceTimer,
    method: Callable[[Pack], Tensor],
    shape: tuple[Sequence[int], int, int, int],
    figures: dict[str, float],
) -> None:
    pack = Pack(timer.device, *shape)
    forward = partial(method, pack)
    result = forward()
    slope = torch.randn_like(result)
    backward = partial(torch.autograd.grad, result, pack.inputs, slope, retain_graph=True)
    lengths, heads, _, size = shape
    # Two products of matrices, each 2 operations for every query and its keys: half of the square.
    operations = sum(2 * length**2 * heads * size for length in lengths)
    for name, act, multiple in (
        ("forward", forward, 1.0),
        ("backward", backward, BACKWARD_OF_FORWARD),
    ):
        milliseconds = timer.median_ms(act)
        figures[f"{name} ms"] = milliseconds
        figures[f"{name} tflops"] = multiple * operations / milliseconds / 1e9


def measure(device: str, what: str, **arguments: Any) -> Mapping[str, Any]:
    """``what``: deviations or speed."""
    group = deviations if what == "deviations" else speed
    return group(device, **arguments)


if __name__ == "__main__":
    answer(measure)
