"""Output layer and log-probabilities in one, a chunk of tokens at a time, the vocabulary split over
tensor ranks.

The logits of a chunk are all that is ever there: the backward pass makes them again. So what they
cost is bounded by the chunk, however long the rows are.
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
"""Logits of the smallest and the largest chunk. Between these an eighth of all of them: at most 12
bytes of each are alive at once (`PlainKernels` under bfloat16, with the gradient of an entropy), in
sum less than bfloat16 logits of all tokens would take."""


BANNED = -1e4
"""Logit of a token that has no probability: finite, as 0 times infinity is not a number."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Logits and targets by which some tokens are scored."""

    logits: Tensor
    """[n, v], this rank's columns; kernels may overwrite them."""
    targets: Tensor
    """int64 [n, m]: columns of it, -1 where another rank has the target. A token may have the same
    one twice."""
    temperature: float


@dataclass(frozen=True, slots=True)
class Upstream:
    """Values that the backward pass begins with, each [n] if nothing else is said, float32 (float64
    of such)."""

    log_total: Tensor
    """log sum exp z over all columns, where z = logits / temperature."""
    entropies: Tensor
    d_logprobs: Tensor
    """Gradient of the loss by each log-probability, [n, m]."""
    d_entropies: Tensor | None
    """Gradient of the loss by each entropy; None: the loss has none."""

    def chunk(self, part: slice) -> Upstream:
        """Values of a chunk, the tokens ``part``."""
        d_entropies = None if self.d_entropies is None else self.d_entropies[part]
        return Upstream(
            self.log_total[part], self.entropies[part], self.d_logprobs[part], d_entropies
        )


Terms = tuple[Tensor, Tensor, Tensor, Tensor]


class ChunkKernels(Protocol):
    """The two passes over the logits of a chunk. Values are float32 (float64 of such)."""

    entropy_is_free: bool
    """Whether entropies come with the log-probabilities at no cost that could be measured."""

    def terms(self, chunk: Chunk, entropy: bool) -> Terms:
        """Terms of z = logits / temperature, each [n]: its maximum top, sum exp(z - top), sum exp(z
        - top) (z - top) if ``entropy`` or else 0; and [n, m] z of the targets or 0."""

    def slopes(self, chunk: Chunk, given: Upstream) -> Tensor:
        """Gradient [n, v] of the loss by the logits, in their type.

        With p = exp(z - log_total): d log p[t] / dz_k = 1[k = t] - p_k and dH / dz_k = -p_k (log
        p_k + H). The gradients by a token's log-probabilities add up.
        """


class PlainKernels:
    """`ChunkKernels` in torch, for every device. An entropy takes one more tensor of a chunk's
    size, and a pass over it: 2 % of the output layer's time on a CPU, with a vocabulary of
    151,936."""

    entropy_is_free = False

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

    def slopes(self, chunk: Chunk, given: Upstream) -> Tensor:
        """See `ChunkKernels`."""
        z = _wide(chunk.logits).div_(chunk.temperature).sub_(given.log_total[:, None])
        targets, total = chunk.targets, given.d_logprobs.sum(-1, keepdim=True)
        if given.d_entropies is None:
            slope = z.exp_().mul_(-total)
        else:
            p = z.exp()
            slope = (
                z.add_(given.entropies[:, None])
                .mul_(given.d_entropies[:, None])
                .add_(total)
                .mul_(p)
                .neg_()
            )
        slope.scatter_add_(-1, targets.clamp(min=0), given.d_logprobs.masked_fill(targets < 0, 0.0))
        return slope.div_(chunk.temperature).to(chunk.logits.dtype)


PLAIN = PlainKernels()


def scored_states(
    hidden: Tensor, numbers: Tensor, config: TransformerConfig, group: dist.ProcessGroup
) -> Tensor:
    """Hidden states ``numbers`` [n] of all tensor ranks' together, of which `hidden` [s, 1, h] are
    this rank's: [n, h]. In the backward pass the ranks' gradients are summed."""
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
    """Log-probability of each target, in their shape, and the entropy of each distribution if asked
    for, [n]: float32, nats.

    `states` [n, h]: the hidden states that predict them. `weight` [v, h]: this rank's rows of the
    output layer, whose padded ones, from `vocab` on over all ranks, get no probability. `targets`
    int64 [n], or [n, m] of m a state. Differentiable by `states`, of which each rank gets its own
    columns' part, and by `weight`, whose gradient is summed over chunks in float32: in its
    `main_grad` if it has one, as under megatron-core's DistributedDataParallel. Columns `banned`,
    over all ranks, get no probability either.
    """
    asked = targets if targets.dim() > 1 else targets[:, None]
    mine = _own_banned(banned, weight, group)
    logprobs, entropies = _OutputLogprobs.apply(
        states, weight, asked, vocab, temperature, group, entropy, kernels, mine
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
    """Ids of the `count` tokens below `below` that each state finds most probable, in falling
    order, int64 [n, count]; and the log-probabilities of the target and of these, [n, 1 + count].

    Arguments as of `token_logprobs`, `targets` [n]; `count` is at most `below`, and that at most
    `vocab`. Each rank sends its own `count`, not its logits.
    """
    first, rows, local = _own_columns(weight, targets[:, None], vocab, group)
    columns = max(min(below - first, len(rows)), 0)
    most = min(count, columns)
    best = states.new_full((len(states), count), torch.finfo(states.dtype).min)
    ids = torch.zeros_like(best, dtype=torch.int64)

    def look(part: slice, logits: Tensor) -> None:
        best[part, :most], ids[part, :most] = logits[:, :columns].topk(most)

    mine = _own_banned(banned, weight, group)
    terms = _terms_of(states, rows, local, temperature, False, kernels, mine, look)
    top, total, _, chosen = _over_ranks(terms, group)
    ids += first
    if group.size() > 1:
        best, ids = _gathered(best, group), _gathered(ids, group)
        best, places = best.topk(count)
        ids = ids.gather(1, places)
    scores = torch.cat([chosen[:, None], _wide(best) / temperature], 1)
    return ids, scores - (total.log() + top)[:, None]


def _gathered(mine: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``mine`` [n, k] of all ranks beside each other, [n, ranks * k]."""
    parts = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(parts, mine.contiguous(), group=group)
    return torch.cat(parts, 1)


class _OutputLogprobs(torch.autograd.Function):
    """log p[target] = z[target] - log sum exp z, and H = log sum exp z - E_p[z]. Ranks meet twice
    in the forward pass, once for all chunks, and never in the backward pass: each has the whole
    loss and its own columns."""

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
        _, rows, local = _own_columns(weight, targets, vocab, group)
        terms = _terms_of(states, rows, local, temperature, entropy, kernels, banned)
        top, total, expectation, *_ = terms = _over_ranks(terms, group)
        log_total = total.log()
        entropies = log_total - expectation / total
        log_total = log_total + top
        ctx.save_for_backward(states, weight, local, log_total, entropies)
        ctx.rows, ctx.temperature, ctx.kernels, ctx.banned = len(rows), temperature, kernels, banned
        # An entropy that is only looked at has no gradient: zeros in its place would cost as much
        # as a real one.
        ctx.set_materialize_grads(False)
        return (terms[3:] - log_total).t(), entropies

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_logprobs: Tensor | None, d_entropies: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        states, weight, local, log_total, entropies = ctx.saved_tensors
        rows = weight[: ctx.rows]
        given = Upstream(
            log_total,
            entropies,
            log_total.new_zeros(local.shape) if d_logprobs is None else d_logprobs,
            d_entropies,
        )
        d_states = torch.zeros_like(states)
        total, d_weight = _weight_gradient(weight) if ctx.needs_input_grad[1] else (None, None)
        for part in _chunks(len(states), ctx.rows):
            chunk = Chunk(_logits(states[part], rows, ctx.banned), local[part], ctx.temperature)
            slope = ctx.kernels.slopes(chunk, given.chunk(part))
            torch.mm(slope, rows, out=d_states[part])
            if total is not None:
                _add_product(total[: ctx.rows], slope.t(), states[part])
            del chunk, slope
        d_weight = total.to(weight.dtype) if d_weight is None and total is not None else d_weight
        return d_states, d_weight, *[None] * 7


def _own_columns(
    weight: Tensor, targets: Tensor, vocab: int, group: Any
) -> tuple[int, Tensor, Tensor]:
    """Number of this rank's first column, its rows of the output layer without padding, and the
    targets' columns among them, -1 where another rank has one."""
    first = group.rank() * weight.shape[0]
    rows = weight[: max(vocab - first, 0)]
    local = targets - first
    return first, rows, local.masked_fill((local < 0) | (local >= len(rows)), -1)


def _own_banned(banned: Sequence[int], weight: Tensor, group: Any) -> list[int]:
    """Columns among this rank's own, out of ``banned`` ones over all ranks."""
    first = group.rank() * weight.shape[0]
    return [column - first for column in banned if 0 <= column - first < weight.shape[0]]


def _logits(states: Tensor, rows: Tensor, banned: list[int]) -> Tensor:
    """[n, v], with `BANNED` in the ``banned`` columns."""
    logits = states @ rows.t()
    for column in banned:
        # By a number of the host's, so that nobody waits for the device.
        logits[:, column] = BANNED
    return logits


def _terms_of(
    states: Tensor,
    rows: Tensor,
    local: Tensor,
    temperature: float,
    entropy: bool,
    kernels: ChunkKernels,
    banned: list[int],
    look: Callable[[slice, Tensor], None] = lambda part, logits: None,
) -> Tensor:
    """`ChunkKernels.terms` of this rank's columns, [3 + m, n]: three of each state, and its m
    targets'. ``look`` sees the logits of each chunk first."""
    terms = states.new_zeros((3 + local.shape[1], len(states)), dtype=_wide_type(states.dtype))
    # A rank that has nothing but padding.
    terms[0] = torch.finfo(terms.dtype).min
    for part in _chunks(len(states), len(rows)):
        chunk = Chunk(_logits(states[part], rows, banned), local[part], temperature)
        look(part, chunk.logits)
        *three, chosen = kernels.terms(chunk, entropy)
        terms[:3, part], terms[3:, part] = torch.stack(three), chosen.t()
        # Not beside the next one's.
        del chunk
    return terms


def _chunks(tokens: int, columns: int) -> Iterator[slice]:
    """Chunks of about equal size, as slices of ``tokens``."""
    if not tokens or not columns:
        return
    logits = min(max(tokens * columns // 8, SMALLEST_CHUNK), LARGEST_CHUNK)
    size = -(-tokens // -(-tokens * columns // logits))
    yield from (slice(start, start + size) for start in range(0, tokens, size))


def _over_ranks(terms: Tensor, group: Any) -> Tensor:
    """`ChunkKernels.terms` of all columns from those of each rank's, [3 + m, n]."""
    if group.size() == 1:
        return terms
    top = terms[0].clone()
    dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
    lower = terms[0] - top
    scale = lower.exp()
    # A rank without columns has 0 for both sums; its maximum is finite, lest this become not a
    # number.
    terms[2].add_(lower * terms[1]).mul_(scale)
    terms[1].mul_(scale)
    dist.all_reduce(terms[1:], group=group)
    terms[0] = top
    return terms


def _weight_gradient(weight: Tensor) -> tuple[Tensor, Tensor | None]:
    """Tensor in which to sum up the gradient of ``weight``, and the one that autograd gets instead
    if that is megatron-core's."""
    total = getattr(weight, "main_grad", None)
    if total is None:
        return torch.zeros_like(weight, dtype=_wide_type(weight.dtype)), None
    # So megatron-core knows that autograd's is zeros, which only its hooks wait for.
    weight.grad_added_to_main_grad = True
    return total, weight.new_zeros(()).expand_as(weight)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, without rounding to the type of these two on the way."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


def _wide_type(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _wide(values: Tensor) -> Tensor:
    return values.to(_wide_type(values.dtype))
