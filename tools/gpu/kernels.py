"""Each Triton kernel of this code: seconds of the first call, deviation from float64, milliseconds,
and the share of the bandwidth of a device copy.

The kernels are limited by memory. `of_copy` is the time that a copy would take for the bytes that a
kernel must read and write, as a share of the kernel's time. The first call compiles, if no case
before it has compiled the same variant. The first case also includes the start of Triton itself. On
a CPU, Triton's interpreter runs the kernels; their times then mean nothing.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from cases import Cases, DeviceTimer, largest_deviation
from child import answer, sync
from requirements import has
from torch import Tensor

T = TypeVar("T")
Figures = dict[str, float]

TEMPERATURE = 0.9
NORM_EPS = 1e-6
BETAS, LR, WEIGHT_DECAY, ADAM_EPS = (0.9, 0.999), 0.1, 0.01, 1e-8
ADAM_STEP = 4
ROPE_BASE, LONGEST_POSITION = 1e6, 131072
_CHECKED_TOKENS = 16


class KernelCases(Cases):
    """Cases whose times are compared with a copy on the device."""

    def __init__(self, device: str, copied_bytes: int) -> None:
        """``copied_bytes``: size of the copy."""
        super().__init__(device)
        torch.manual_seed(0)
        self._timer = DeviceTimer(device)
        source = torch.ones(copied_bytes, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        copy_ms = self._timer.median_ms(partial(target.copy_, source))
        self._copied_bytes_per_ms = 2 * copied_bytes / copy_ms
        self.figures["copy_bytes_per_s"] = 1e3 * self._copied_bytes_per_ms

    def call_first(self, figures: Figures, name: str, act: Callable[[], T]) -> T:
        """Result of the first call of ``act``, whose seconds are added to ``figures``."""
        sync(self.device)
        started = time.perf_counter()
        result = act()
        sync(self.device)
        figures[f"{name} first_s"] = time.perf_counter() - started
        return result

    def time(
        self, figures: Figures, name: str, act: Callable[[], object], moved_bytes: int
    ) -> None:
        """Add the time of ``act``, which must read and write ``moved_bytes``."""
        milliseconds = self._timer.median_ms(act)
        figures[f"{name} ms"] = milliseconds
        figures[f"{name} of_copy"] = moved_bytes / self._copied_bytes_per_ms / milliseconds


# -- log-probabilities -----------------------------------------------------------------------------


def logprobs(
    device: str, vocabularies: Sequence[int], logits: int, copied_bytes: int
) -> Mapping[str, Any]:
    """Terms and slopes of a chunk of ``logits`` logits, for each size of the vocabulary, with and
    without entropies."""
    cases = KernelCases(device, copied_bytes)
    for vocab in vocabularies:
        for entropy in (True, False):
            name = f"{vocab}{' entropy' if entropy else ''}"
            cases.run(name, partial(_measure_logprobs, cases, logits // vocab, vocab, entropy))
    return cases.figures


def _measure_logprobs(
    cases: KernelCases, tokens: int, vocab: int, entropy: bool, figures: Figures
) -> None:
    from relax_hpc.training.logprobs import Chunk, Upstream, padded_rows
    from relax_hpc.training.triton_logprobs import TritonKernels

    kernels, device = TritonKernels(), cases.device
    like = torch.empty(0, dtype=torch.bfloat16, device=device)
    logits = padded_rows(like, tokens, vocab, kernels.row_multiple).normal_().mul_(2)
    targets = torch.randint(vocab, (tokens, 1), device=device)
    # Tokens that are computed in float64, from the first to the last.
    checked = torch.linspace(0, tokens - 1, min(tokens, _CHECKED_TOKENS)).long().to(device)
    exact_logits = logits[checked].double().requires_grad_()
    exact_all = (exact_logits / TEMPERATURE).log_softmax(-1)
    exact_logprobs = exact_all.gather(-1, targets[checked])
    exact_entropies = -(exact_all.exp() * exact_all).sum(-1)

    chunk = Chunk(logits, targets, TEMPERATURE)
    terms = partial(kernels.terms, chunk, entropy)
    top, total, mean, chosen = cases.call_first(figures, "terms", terms)
    log_total, entropies = total.log() + top, total.log() - mean / total
    chosen_logprobs = chosen - log_total[:, None]
    # All tokens are one dimension of the deviation: a token has one value.
    values, exact = [chosen_logprobs[checked].flatten()], [exact_logprobs.flatten()]
    if entropy:
        values.append(entropies[checked])
        exact.append(exact_entropies)
    figures["terms deviation"] = largest_deviation(values, exact)
    cases.time(figures, "terms", terms, logits.nbytes)

    d_logprobs = torch.randn(tokens, 1, device=device)
    d_entropies = torch.randn(tokens, device=device) if entropy else None
    loss = (exact_logprobs * d_logprobs[checked]).sum()
    if d_entropies is not None:
        loss = loss + (exact_entropies * d_entropies[checked]).sum()
    exact_slopes = torch.autograd.grad(loss, exact_logits)
    upstream = Upstream(log_total, entropies, d_logprobs, d_entropies)
    # Overwrites the logits. The time of later calls does not depend on their values.
    slopes = partial(kernels.slopes, chunk, upstream)
    values = [cases.call_first(figures, "slopes", slopes)[checked]]
    figures["slopes deviation"] = largest_deviation(values, exact_slopes)
    cases.time(figures, "slopes", slopes, 2 * logits.nbytes)


# -- layers ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Layer:
    """A differentiable layer, and its implementation in torch for float64."""

    kernel: Callable[..., Tensor]
    exact: Callable[..., Tensor]
    shapes: Sequence[Sequence[int]]
    """Shapes of the inputs, bfloat16."""
    forward_values: int
    """Values that the forward pass reads or writes, each 2 bytes."""
    backward_values: int


def norm(device: str, widths: Sequence[int], elements: int, copied_bytes: int) -> Mapping[str, Any]:
    """RMS norm of about ``elements`` elements, for rows of each width."""
    cases = KernelCases(device, copied_bytes)
    for width in widths:
        # Not a multiple of the rows of a block.
        shape = [elements // width // 16 * 16 + 16, width]
        cases.run(f"norm {width}", partial(_measure_norm, cases, shape))
    return cases.figures


def _measure_norm(cases: KernelCases, shape: list[int], figures: Figures) -> None:
    from relax_hpc.training.models.triton_layers import _RMSNorm

    def kernel(x: Tensor, weight: Tensor) -> Tensor:
        return _RMSNorm.apply(x, weight, NORM_EPS)

    def exact(x: Tensor, weight: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + NORM_EPS).rsqrt() * weight

    size = math.prod(shape)
    _measure_layer(cases, Layer(kernel, exact, (shape, shape[1:]), 2 * size, 3 * size), figures)


def swiglu(
    device: str, widths: Sequence[int], elements: int, copied_bytes: int
) -> Mapping[str, Any]:
    """SwiGLU with about ``elements`` results, for each width of the results."""
    cases = KernelCases(device, copied_bytes)
    for width in widths:
        tokens = elements // width + 1
        cases.run(f"swiglu {width}", partial(_measure_swiglu, cases, tokens, width))
    return cases.figures


def _measure_swiglu(cases: KernelCases, tokens: int, width: int, figures: Figures) -> None:
    from relax_hpc.training.models.triton_layers import swiglu as kernel

    def exact(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    results = tokens * width
    shape = (tokens, 1, 2 * width)
    _measure_layer(cases, Layer(kernel, exact, (shape,), 3 * results, 5 * results), figures)


def rotary(
    device: str, heads: Sequence[tuple[int, int]], tokens: int, copied_bytes: int
) -> Mapping[str, Any]:
    """Rotary embedding of ``tokens`` tokens at the last positions of 131,072, for each number and
    size of heads."""
    cases = KernelCases(device, copied_bytes)
    for count, size in heads:
        name = f"rotary {count} heads of {size}"
        cases.run(name, partial(_measure_rotary, cases, (tokens, 1, count, size)))
    return cases.figures


def _measure_rotary(cases: KernelCases, shape: tuple[int, int, int, int], figures: Figures) -> None:
    from relax_hpc.training.models.triton_layers import rotary as kernel

    tokens, _, _, head_size = shape
    positions = LONGEST_POSITION - tokens + torch.arange(tokens, device=cases.device)
    exponents = torch.arange(0, head_size, 2, device=cases.device) / head_size
    angles = positions[:, None] * ROPE_BASE**-exponents
    angles = torch.cat([angles, angles], -1)[:, None, None]

    def exact(values: Tensor) -> Tensor:
        first, second = values.chunk(2, -1)
        turned = torch.cat([-second, first], -1)
        return values * angles.double().cos() + turned * angles.double().sin()

    # Each pass reads and writes all values.
    moved_values = 2 * math.prod(shape)
    layer = Layer(
        lambda values: kernel(values, angles), exact, (shape,), moved_values, moved_values
    )
    _measure_layer(cases, layer, figures)


def _measure_layer(cases: KernelCases, layer: Layer, figures: Figures) -> None:
    inputs = []
    for shape in layer.shapes:
        values = torch.randn(*shape, dtype=torch.bfloat16, device=cases.device)
        inputs.append(values.requires_grad_())
    forward = partial(layer.kernel, *inputs)
    result = cases.call_first(figures, "forward", forward)
    slope = torch.randn_like(result)
    backward = partial(torch.autograd.grad, result, inputs, slope, retain_graph=True)
    gradients = cases.call_first(figures, "backward", backward)
    _compare_layer(layer, inputs, slope, (result, *gradients), figures)
    del gradients
    cases.time(figures, "forward", forward, 2 * layer.forward_values)
    cases.time(figures, "backward", backward, 2 * layer.backward_values)


def _compare_layer(
    layer: Layer, inputs: list[Tensor], slope: Tensor, results: Sequence[Tensor], figures: Figures
) -> None:
    """Add the deviations of ``results``: the layer's result and the gradients of its inputs."""
    exact_inputs = [values.detach().double().requires_grad_() for values in inputs]
    exact_result = layer.exact(*exact_inputs)
    exact_gradients = torch.autograd.grad(exact_result, exact_inputs, slope.double())
    figures["forward deviation"] = largest_deviation(results[:1], [exact_result])
    figures["backward deviation"] = largest_deviation(results[1:], exact_gradients)


# -- Adam ------------------------------------------------------------------------------------------


def adam(device: str, counts: Sequence[int], copied_bytes: int) -> Mapping[str, Any]:
    """AdamW with moments in bfloat16, of each number of parameters."""
    cases = KernelCases(device, copied_bytes)
    for count in counts:
        cases.run(f"adam {count}", partial(_measure_adam, cases, count))
    return cases.figures


def _measure_adam(cases: KernelCases, count: int, figures: Figures) -> None:
    """`moments deviation` is at most 2^-7, because moments are rounded to either neighbour. A mean
    that rounding keeps has a `rounding bias` near 0; truncation would give -0.003."""
    from relax_hpc.training.adam import UpdatePiece
    from relax_hpc.training.triton_adam import update

    values, gradient, average, root = (torch.randn(count, device=cases.device) for _ in range(4))
    states = (average.bfloat16(), root.square().bfloat16(), values)
    settings = {"betas": BETAS, "lr": LR, "weight_decay": WEIGHT_DECAY, "eps": ADAM_EPS}
    # As in training, the step number is on the host, so that reading it does not synchronize.
    piece = UpdatePiece(settings, torch.tensor(float(ADAM_STEP - 1)), gradient, states)
    exact = _exact_adam(gradient, *states)
    act = partial(update, piece, states)
    cases.call_first(figures, "update", act)
    figures["parameters deviation"] = largest_deviation(states[2:], exact[2:])
    figures["moments deviation"] = largest_deviation(states[:2], exact[:2])
    bias = (states[1].double() - exact[1]).mean() / exact[1].mean()
    figures["rounding bias"] = float(bias)
    del exact
    # float32: parameter read and written, gradient read. bfloat16: two moments read and written.
    cases.time(figures, "update", act, (3 * 4 + 4 * 2) * count)


def _exact_adam(
    gradient: Tensor, average: Tensor, square: Tensor, values: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Both moments and the parameters after the step `ADAM_STEP`, in float64 (Loshchilov and
    Hutter, arXiv 1711.05101)."""
    beta1, beta2 = BETAS
    slope = gradient.double()
    average = beta1 * average.double() + (1 - beta1) * slope
    square = beta2 * square.double() + (1 - beta2) * slope.square()
    step = average / (1 - beta1**ADAM_STEP)
    step /= (square / (1 - beta2**ADAM_STEP)).sqrt() + ADAM_EPS
    return average, square, (1 - LR * WEIGHT_DECAY) * values.double() - LR * step


GROUPS: Mapping[str, Callable[..., Mapping[str, Any]]] = {
    "logprobs": logprobs,
    "norm": norm,
    "swiglu": swiglu,
    "rotary": rotary,
    "adam": adam,
}


def measure(device: str, what: str, **arguments: Any) -> Mapping[str, Any]:
    """Figures of a group of kernels, ``what``: a key of `GROUPS`."""
    if not has("triton"):
        return {"error": "not measured: no triton"}
    # Triton reads both variables when it is imported or when it compiles.
    os.environ["TRITON_INTERPRET"] = "1" if device == "cpu" else "0"
    with tempfile.TemporaryDirectory() as cache:
        # An empty directory, because the first call is fast if another process compiled the kernel.
        os.environ["TRITON_CACHE_DIR"] = cache
        return GROUPS[what](device, **arguments)


if __name__ == "__main__":
    answer(measure)
