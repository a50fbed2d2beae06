"""Launches of Triton kernels with the shapes of real models, through the functions that training
calls, as Triton itself describes them: types, constants, divisibility and options of arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, create_function_from_signature

WARP_THREADS = 32


@dataclass(frozen=True)
class Variant:
    """What Triton compiles for a launch. Equal variants are compiled once."""

    kernel: str
    """Name of the function."""
    signature: tuple[tuple[str, str], ...]
    """Type of each argument; "constexpr" for constants."""
    constants: tuple[tuple[tuple[int, ...], Any], ...]
    """Value of each constant, by the path of its argument."""
    attributes: tuple[tuple[tuple[int, ...], tuple[tuple[str, int], ...]], ...]
    """Divisibility of arguments, by their path."""
    options: tuple[tuple[str, Any], ...]
    """Options of the launch, for example `num_warps`."""


def target(architecture: int) -> GPUTarget:
    """``architecture``: 90 for sm_90."""
    return GPUTarget("cuda", architecture, WARP_THREADS)


def describe_launch(
    function: JITFunction[Any], arguments: tuple[Any, ...], keywords: Mapping[str, Any]
) -> Variant:
    """Variant that a launch of ``function`` needs, by the steps of `JITFunction.run` (triton 3.6
    and 3.7). The result is the same for all architectures of one vendor."""
    backend = make_backend(target(90))
    bind = create_function_from_signature(function.signature, function.params, backend)
    bound, specialization, options = bind(*arguments, **keywords)
    _, signature, constants, attributes = function._pack_args(
        backend, dict(keywords), bound, specialization, options
    )
    divisibility = []
    for path, values in attributes.items():
        divisibility.append((path, tuple((name, value) for name, value in values)))
    return Variant(
        kernel=function.fn.__name__,
        signature=tuple(signature.items()),
        constants=tuple(constants.items()),
        attributes=tuple(divisibility),
        options=tuple(sorted(options.items())),
    )


@contextmanager
def record(run: bool) -> Iterator[dict[Variant, JITFunction[Any]]]:
    """Collect the variants of all launches in the context, each with its function.

    ``run``: whether the launches also run, in Triton's interpreter. If not, results have
    undefined values.
    """
    variants: dict[Variant, JITFunction[Any]] = {}
    compiled_run, interpreted_run = JITFunction.run, InterpretedFunction.run

    def run_compiled(self: Any, *arguments: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        variants.setdefault(describe_launch(self, arguments, keywords), self)

    def run_interpreted(
        self: Any, *arguments: Any, grid: Any, warmup: bool, **keywords: Any
    ) -> None:
        function = JITFunction(self.fn, **self.kwargs)
        variants.setdefault(describe_launch(function, arguments, keywords), function)
        if run:
            interpreted_run(self, *arguments, grid=grid, warmup=warmup, **keywords)

    JITFunction.run, InterpretedFunction.run = run_compiled, run_interpreted
    try:
        yield variants
    finally:
        JITFunction.run, InterpretedFunction.run = compiled_run, interpreted_run


# -- launches --------------------------------------------------------------------------------------

TOKENS = 4
"""Tokens of a launch. No variant depends on their number."""


def _tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Tensor whose values are not used."""
    return torch.empty(shape, dtype=dtype)


def _launch_logprobs(columns: int, targets: int, entropy: bool) -> None:
    from relax_hpc.training.logprobs import Chunk, Upstream, _logits
    from relax_hpc.training.triton_logprobs import TritonKernels

    kernels = TritonKernels()
    states, weight = _tensor(TOKENS, 16), _tensor(columns, 16)
    logits = _logits(states, weight, [], kernels.row_multiple)
    chunk = Chunk(logits, torch.zeros((TOKENS, targets), dtype=torch.int64), 0.9)
    kernels.terms(chunk, entropy)
    floats = _tensor(TOKENS, dtype=torch.float32)
    d_logprobs = _tensor(TOKENS, targets, dtype=torch.float32)
    kernels.slopes(chunk, Upstream(floats, floats, d_logprobs, floats if entropy else None))


def _launch_norm(width: int) -> None:
    from relax_hpc.training.models.triton_layers import _RMSNorm

    x, weight = _tensor(TOKENS, width), _tensor(width)
    y = _RMSNorm.apply(x.requires_grad_(), weight.requires_grad_(), 1e-6)
    y.backward(torch.empty_like(y))


def _launch_rotary(heads: int, size: int, columns: int) -> None:
    """``columns``: width of the tensor of queries, keys and values, of which heads are a view."""
    from relax_hpc.training.models.triton_layers import rotary

    fused = _tensor(TOKENS, 1, columns)
    t = fused[..., : heads * size].view(TOKENS, 1, heads, size).requires_grad_()
    y = rotary(t, _tensor(TOKENS, 1, 1, size, dtype=torch.float32))
    y.backward(torch.empty_like(y))


def _launch_swiglu(width: int) -> None:
    from relax_hpc.training.models.triton_layers import swiglu

    y = swiglu(_tensor(TOKENS, 1, 2 * width).requires_grad_())
    y.backward(torch.empty_like(y))


def _launch_adam(count: int, first: int) -> None:
    """``first``: index of the first element in tensors of all parameters."""
    from relax_hpc.training.adam import UpdatePiece
    from relax_hpc.training.triton_adam import update

    tensors = []
    for dtype in (torch.float32, torch.bfloat16, torch.bfloat16, torch.float32):
        tensors.append(_tensor(first + count, dtype=dtype)[first:])
    group = {"betas": (0.9, 0.999), "lr": 1e-6, "weight_decay": 0.01, "eps": 1e-8}
    piece = UpdatePiece(group, torch.tensor(3.0), tensors[0], tuple(tensors[1:]))
    update(piece, piece.states)


VOCABULARIES = (151936, 151669, 75829, 32000)
"""Columns of a rank's logits. The second and the third are not multiples of 16."""
WIDTHS = (64, 128, 256, 512, 1024, 2048, 4096, 5120, 12288, 16384)
HEADS = ((2, 128), (4, 128), (8, 128), (40, 128), (32, 64), (16, 256))
"""Number and size."""


def launches() -> Iterator[tuple[str, Callable[[], None]]]:
    """Name and call of each launch."""
    for columns in VOCABULARIES:
        yield f"{columns} logits", partial(_launch_logprobs, columns, 1, False)
        yield f"{columns} logits, entropies", partial(_launch_logprobs, columns, 1, True)
    yield "65 targets", partial(_launch_logprobs, VOCABULARIES[0], 65, False)
    for width in WIDTHS:
        yield f"width {width}", partial(_launch_norm, width)
    for heads, size in HEADS:
        columns = (heads + 16) * size
        yield f"{heads} heads of {size}", partial(_launch_rotary, heads, size, columns)
    yield "width 3072", partial(_launch_swiglu, 3072)
    for count in (2**24, 2**24 - 2047):
        yield f"{count} parameters", partial(_launch_adam, count, 0)
    yield "parameters from 24 on", partial(_launch_adam, 2**16, 24)
