"""Fused output layer and log-probabilities, one chunk of tokens at a time. The vocabulary is split
over tensor ranks.

Only the logits of one chunk exist at a time, and the backward pass computes them again. So their
memory is limited by the chunk, for any length of the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

SMALLEST_CHUNK, LARGEST_CHUNK = 2**22, 2**28
"""Logits of the smallest and of the largest chunk. Between these limits, a chunk has an eighth of
all logits. Each logit of a chunk needs at most 12 bytes (`PlainKernels` in bfloat16, with the
gradient of an entropy), so a chunk needs less memory than all logits in bfloat16."""


BANNED = -1e4
"""Logit of a token without probability. It is finite, because 0 times infinity is not a number."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Logits and targets of the n tokens of a chunk."""

    logits: Tensor
    """[n, v], this rank's columns. Kernels may overwrite them, and the padding between rows."""
    targets: Tensor
    """int64 [n, m]: columns in ``logits``; -1: another rank has the target. A token may have the
    same target twice."""
    temperature: float


@dataclass(frozen=True, slots=True)
class Upstream:
    """Inputs of the backward pass, each [n] by default. Their type is float32, or float64 for
    float64 logits."""

    log_total: Tensor
    """log sum exp z over all columns, where z = logits / temperature."""
    entropies: Tensor
    d_logprobs: Tensor
    """Gradient of the loss by each log-probability, [n, m]."""
    d_entropies: Tensor | None
    """Gradient of the loss by each entropy; None: the loss has none."""

    def chunk(self, tokens: slice) -> Upstream:
        """Inputs of the tokens ``tokens``."""
        return Upstream(
            self.log_total[tokens],
            self.entropies[tokens],
            self.d_logprobs[tokens],
            None if self.d_entropies is None else self.d_entropies[tokens],
        )


Terms = tuple[Tensor, Tensor, Tensor, Tensor]


class ChunkKernels(Protocol):
    """The two passes over the logits of a chunk. Values are float32, or float64 for float64
    logits."""

    entropy_is_free: bool
    """Whether entropies have no measurable cost in addition to log-probabilities."""
    row_multiple: int
    """The rows of logits are padded in memory to a multiple of so many elements. Kernels then
    access all rows at aligned addresses."""

    def terms(self, chunk: Chunk, entropy: bool) -> Terms:
        """Terms of z = logits / temperature.

        Each [n]: the maximum top, sum exp(z - top), and sum exp(z - top) (z - top), which is 0
        without ``entropy``. Then [n, m]: z of the targets, 0 for targets of other ranks.
        """

    def slopes(self, chunk: Chunk, upstream: Upstream) -> Tensor:
        """Gradient [n, v] of the loss with respect to the logits, in their type.

        With p = exp(z - log_total): d log p[t] / dz_k = 1[k = t] - p_k and dH / dz_k = -p_k (log
        p_k + H). The gradients of a token's log-probabilities are added.
        """


class PlainKernels:
    """`ChunkKernels` in torch, for every device.

    Entropies need one more tensor of the chunk's size, and a pass over it: 2 % of the output
    layer's time on a CPU, with a vocabulary of 151,936.
    """

    entropy_is_free = False
    row_multiple = 1

    def terms(self, chunk: Chunk, entropy: bool) -> Terms:
        """See `ChunkKernels`."""
        z, targets = _wide(chunk.logits).div_(chunk.temperature), chunk.targets
        chosen = z.gather(-1, targets.clamp(min=0)).masked_fill_(targets < 0, 0.0)
        top = z.amax(-1)
        z -= top[:, None]
        if not entropy:
            return top, z.exp_().sum(-1), torch.zeros_like(top), chosen
        p = z.exp()
        total = p.sum(-1)
        return top, total, p.mul_(z).sum(-1), chosen

    def slopes(self, chunk: Chunk, upstream: Upstream) -> Tensor:
        """See `ChunkKernels`."""
        z = _wide(chunk.logits).div_(chunk.temperature).sub_(upstream.log_total[:, None])
        targets, total = chunk.targets, upstream.d_logprobs.sum(-1, keepdim=True)
        if upstream.d_entropies is None:
            slope = z.exp_().mul_(-total)
        else:
            p = z.exp()
            slope = z.add_(upstream.entropies[:, None]).mul_(upstream.d_entropies[:, None])
            slope = slope.add_(total).mul_(p).neg_()
        d_targets = upstream.d_logprobs.masked_fill(targets < 0, 0.0)
        slope.scatter_add_(-1, targets.clamp(min=0), d_targets)
        return slope.div_(chunk.temperature).to(chunk.logits.dtype)


PLAIN = PlainKernels()


def scored_states(
    hidden: Tensor, numbers: Tensor, config: TransformerConfig, group: dist.ProcessGroup
) -> Tensor:
    """Hidden states [n, h] with the indices ``numbers`` [n] in the states of all tensor ranks.

    `hidden` [s, 1, h]: this rank's states. In the backward pass the ranks' gradients are summed.
    """
    from megatron.core.tensor_parallel import mappings

    if config.sequence_parallel:
        hidden = mappings.gather_from_sequence_parallel_region(hidden, group=group)
    states = hidden.flatten(0, 1).index_select(0, numbers)
    if config.sequence_parallel or group.size() == 1:
        return states
    return mappings.copy_to_tensor_model_parallel_region(states, group=group)


def token_logprobs(
    states: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab: int,
    temperature: float,
    group: dist.ProcessGroup,
    entropy: bool = False,
    kernels: ChunkKernels = PLAIN,
    banned: Sequence[int] = (),
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each target, in their shape, and the entropy of each distribution if
    requested, [n]: float32, in nats.

    `states` [n, h]: the hidden states that predict the targets. `weight` [v, h]: this rank's rows
    of the output layer. Rows from `vocab` on over all ranks are padding and get no probability.
    `targets` int64 [n], or [n, m] for m targets of each state. Columns `banned`, counted over all
    ranks, get no probability either.

    Differentiable with respect to `states` and `weight`. Each rank gets the part of the states'
    gradient that its columns contribute. The weight's gradient is summed over chunks in float32: in
    its `main_grad` if it has one, as in megatron-core's DistributedDataParallel.
    """
    target_table = targets if targets.dim() > 1 else targets[:, None]
    local_banned = _local_banned(banned, weight, group)
    logprobs, entropies = _OutputLogprobs.apply(
        states, weight, target_table, vocab, temperature, group, entropy, kernels, local_banned
    )
    return logprobs.reshape(targets.shape), entropies if entropy else None


@torch.no_grad()
def likeliest(
    states: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab: int,
    below: int,
    count: int,
    temperature: float,
    group: dist.ProcessGroup,
    kernels: ChunkKernels = PLAIN,
    banned: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:
    """The `count` most probable tokens of each state with ids below `below`.

    Returns their ids by falling probability, int64 [n, count], and the log-probabilities of the
    target and of these tokens, [n, 1 + count]. Arguments as in `token_logprobs`, `targets` [n];
    count <= below <= vocab. Each rank sends only its best `count` logits.
    """
    first, rows, local = _local_columns(weight, targets[:, None], vocab, group)
    columns = max(min(below - first, len(rows)), 0)
    local_count = min(count, columns)
    best = states.new_full((len(states), count), torch.finfo(states.dtype).min)
    ids = torch.zeros_like(best, dtype=torch.int64)

    def keep_best(tokens: slice, logits: Tensor) -> None:
        values, indices = logits[:, :columns].topk(local_count)
        best[tokens, :local_count], ids[tokens, :local_count] = values, indices

    local_banned = _local_banned(banned, weight, group)
    terms = _local_terms(states, rows, local, temperature, False, kernels, local_banned, keep_best)
    top, total, _, chosen = _combine_ranks(terms, group)
    ids += first
    if group.size() > 1:
        best, ids = _gather_columns(best, group), _gather_columns(ids, group)
        best, order = best.topk(count)
        ids = ids.gather(1, order)
    scores = torch.cat([chosen[:, None], _wide(best) / temperature], 1)
    return ids, scores - (total.log() + top)[:, None]


def _gather_columns(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``values`` [n, k] of all ranks in one table, [n, ranks * k]."""
    gathered = [torch.empty_like(values) for _ in range(group.size())]
    dist.all_gather(gathered, values.contiguous(), group=group)
    return torch.cat(gathered, 1)


class _OutputLogprobs(torch.autograd.Function):
    """log p[target] = z[target] - log sum exp z, and H = log sum exp z - E_p[z].

    The forward pass has two collectives for all chunks together, the backward pass has none: each
    rank has the whole loss and its own columns.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        targets: Tensor,
        vocab: int,
        temperature: float,
        group: Any,
        entropy: bool,
        kernels: ChunkKernels,
        banned: list[int],
    ) -> tuple[Tensor, Tensor]:
        _, rows, local = _local_columns(weight, targets, vocab, group)
        terms = _local_terms(states, rows, local, temperature, entropy, kernels, banned)
        terms = _combine_ranks(terms, group)
        top, total, expectation = terms[0], terms[1], terms[2]
        log_total = total.log()
        entropies = log_total - expectation / total
        log_total = log_total + top
        ctx.save_for_backward(states, weight, local, log_total, entropies)
        ctx.rows, ctx.temperature, ctx.kernels, ctx.banned = len(rows), temperature, kernels, banned
        # An entropy that is only measured has no gradient. By default autograd would pass zeros,
        # which cost as much as a real gradient.
        ctx.set_materialize_grads(False)
        return (terms[3:] - log_total).t(), entropies

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_logprobs: Tensor | None, d_entropies: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        states, weight, local, log_total, entropies = ctx.saved_tensors
        rows = weight[: ctx.rows]
        if d_logprobs is None:
            d_logprobs = log_total.new_zeros(local.shape)
        upstream = Upstream(log_total, entropies, d_logprobs, d_entropies)
        d_states = torch.zeros_like(states)
        total, d_weight = _weight_gradient(weight) if ctx.needs_input_grad[1] else (None, None)
        for tokens in _chunks(len(states), ctx.rows):
            logits = _logits(states[tokens], rows, ctx.banned, ctx.kernels.row_multiple)
            chunk = Chunk(logits, local[tokens], ctx.temperature)
            slope = ctx.kernels.slopes(chunk, upstream.chunk(tokens))
            torch.mm(slope, rows, out=d_states[tokens])
            if total is not None:
                _add_product(total[: ctx.rows], slope.t(), states[tokens])
            # Frees the logits before those of the next chunk are computed.
            del chunk, logits, slope
        if d_weight is None and total is not None:
            d_weight = total.to(weight.dtype)
        return d_states, d_weight, *[None] * 7


def _local_columns(
    weight: Tensor, targets: Tensor, vocab: int, group: Any
) -> tuple[int, Tensor, Tensor]:
    """Number of this rank's first column, its rows of the output layer without padding, and the
    targets' columns among them; -1: another rank has the target."""
    first = group.rank() * weight.shape[0]
    rows = weight[: max(vocab - first, 0)]
    local = targets - first
    return first, rows, local.masked_fill((local < 0) | (local >= len(rows)), -1)


def _local_banned(banned: Sequence[int], weight: Tensor, group: Any) -> list[int]:
    """This rank's columns of the ``banned`` ones, which are counted over all ranks."""
    first = group.rank() * weight.shape[0]
    return [column - first for column in banned if 0 <= column - first < weight.shape[0]]


def padded_rows(like: Tensor, tokens: int, columns: int, row_multiple: int) -> Tensor:
    """Uninitialized values [tokens, columns], whose stride of rows is a multiple of
    ``row_multiple``. Their type and device are those of ``like``."""
    stride = columns + -columns % row_multiple
    return like.new_empty((tokens, stride))[:, :columns]


def _logits(states: Tensor, rows: Tensor, banned: list[int], row_multiple: int) -> Tensor:
    """[n, v], with `BANNED` in the ``banned`` columns; see `padded_rows`."""
    columns = len(rows)
    if columns % row_multiple:
        # cuBLAS needs aligned rows for its fast kernels too.
        logits = padded_rows(states, len(states), columns, row_multiple)
        torch.mm(states, rows.t(), out=logits)
    else:
        logits = states @ rows.t()
    for column in banned:
        # Indexing by a Python number does not synchronize; a list would be uploaded.
        logits[:, column] = BANNED
    return logits


def _local_terms(
    states: Tensor,
    rows: Tensor,
    local: Tensor,
    temperature: float,
    entropy: bool,
    kernels: ChunkKernels,
    banned: list[int],
    inspect: Callable[[slice, Tensor], None] = lambda tokens, logits: None,
) -> Tensor:
    """`ChunkKernels.terms` of this rank's columns, [3 + m, n]: three terms of each state, and z of
    its m targets. ``inspect`` is called with the logits of each chunk first."""
    terms = states.new_zeros((3 + local.shape[1], len(states)), dtype=_wide_type(states.dtype))
    # Stays for a rank whose rows are all padding.
    terms[0] = torch.finfo(terms.dtype).min
    for tokens in _chunks(len(states), len(rows)):
        logits = _logits(states[tokens], rows, banned, kernels.row_multiple)
        chunk = Chunk(logits, local[tokens], temperature)
        inspect(tokens, chunk.logits)
        top, total, expectation, chosen = kernels.terms(chunk, entropy)
        terms[:3, tokens] = torch.stack([top, total, expectation])
        terms[3:, tokens] = chosen.t()
        # Frees the logits before those of the next chunk are computed.
        del chunk, logits
    return terms


def _chunks(tokens: int, columns: int) -> Iterator[slice]:
    """Chunks of ``tokens`` of about equal size, as slices."""
    if not tokens or not columns:
        return
    logits = min(max(tokens * columns // 8, SMALLEST_CHUNK), LARGEST_CHUNK)
    # Number of chunks rounded up, then tokens of a chunk rounded up.
    size = -(-tokens // -(-tokens * columns // logits))
    yield from (slice(start, start + size) for start in range(0, tokens, size))


def _combine_ranks(terms: Tensor, group: Any) -> Tensor:
    """`ChunkKernels.terms` of all columns from the terms of each rank's columns, [3 + m, n]."""
    if group.size() == 1:
        return terms
    # Each rank's sums are relative to its own maximum. They are rescaled to the common maximum
    # before they are added, which keeps the exponentials finite.
    top = terms[0].clone()
    dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
    lower = terms[0] - top
    scale = lower.exp()
    # A rank without columns has 0 for both sums. Its maximum is finite, because 0 times infinity
    # would not be a number.
    terms[2].add_(lower * terms[1]).mul_(scale)
    terms[1].mul_(scale)
    dist.all_reduce(terms[1:], group=group)
    terms[0] = top
    return terms


def _weight_gradient(weight: Tensor) -> tuple[Tensor, Tensor | None]:
    """Tensor in which to sum the gradient of ``weight``. If it is megatron-core's `main_grad`, also
    the zeros that autograd gets instead."""
    total = getattr(weight, "main_grad", None)
    if total is None:
        return torch.zeros_like(weight, dtype=_wide_type(weight.dtype)), None
    # Tells megatron-core's hooks not to add autograd's gradient, which is zero here. The hooks run
    # only if autograd returns a gradient.
    parameter: Any = weight
    parameter.grad_added_to_main_grad = True
    return total, weight.new_zeros(()).expand_as(weight)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, without rounding the product to the type of the factors."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    # `out_dtype` (torch 2.13) exists only on CUDA; a CPU converts the factors instead.
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


def _wide_type(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _wide(values: Tensor) -> Tensor:
    return values.to(_wide_type(values.dtype))
