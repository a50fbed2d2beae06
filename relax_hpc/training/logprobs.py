"""Log-probabilities of tokens and entropies from logits whose vocabulary is split over tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def token_logprobs(
    logits: Tensor, tokens: Tensor, vocab: int, temperature: float, group: dist.ProcessGroup, entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of every token given those before it, and entropy of its distribution: [b, s] float32, nats.

    `logits` [b, s, v]: this rank's columns of the padded vocabulary; columns from `vocab` on get no probability.
    `tokens` [b, s] int64. Index i belongs to token i; index 0, which nothing predicts, is 0.
    """
    targets = tokens.roll(-1, dims=1)
    logprobs, entropies = _VocabParallel.apply(logits, targets, vocab, temperature, group, entropy)
    return _shift(logprobs), _shift(entropies) if entropy else None


def _shift(values: Tensor) -> Tensor:
    return torch.nn.functional.pad(values[:, :-1], (1, 0))


class _VocabParallel(torch.autograd.Function):
    """With z = logits / T, p = softmax(z): log p[target] = z[target] - log sum exp z, and H = log sum exp z - E_p[z].

    Gradients: d log p[t] / dz_k = 1[k = t] - p_k and dH / dz_k = -p_k (log p_k + H). Only p is kept for the backward
    pass, and it needs no communication: every rank has the whole loss and its own columns.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, vocab: int, temperature: float, group: Any, entropy: bool
    ) -> tuple[Tensor, Tensor]:
        columns, first = logits.shape[-1], group.rank() * logits.shape[-1]
        z = logits.float() / temperature
        z[..., max(vocab - first, 0) :] = -torch.inf
        top = _reduce(z.amax(-1), dist.ReduceOp.MAX, group)
        z -= top[..., None]
        local = targets - first
        mine = (local >= 0) & (local < columns)
        index = torch.where(mine, local, 0)[..., None]
        chosen = _reduce(z.gather(-1, index)[..., 0].masked_fill(~mine, 0.0), dist.ReduceOp.SUM, group)
        p = z.exp()
        total = _reduce(p.sum(-1), dist.ReduceOp.SUM, group)
        log_total = total.log()
        p /= total[..., None]
        expectation = torch.zeros_like(total)
        if entropy:
            expectation = _reduce(z.masked_fill_(p == 0, 0.0).mul_(p).sum(-1), dist.ReduceOp.SUM, group)
        entropies = log_total - expectation
        ctx.save_for_backward(p, index, mine, entropies)
        ctx.temperature = temperature
        ctx.dtype = logits.dtype
        # An entropy that is only looked at has no gradient: zeros in its place would cost as much as a real one.
        ctx.set_materialize_grads(False)
        return chosen - log_total, entropies

    @staticmethod
    def backward(ctx: Any, d_logprobs: Tensor | None, d_entropies: Tensor | None) -> tuple[Tensor | None, ...]:
        p, index, mine, entropies = ctx.saved_tensors
        if d_logprobs is None:
            slope = torch.zeros_like(p)
        else:
            slope = -d_logprobs[..., None] * p
            slope.scatter_add_(-1, index, torch.where(mine, d_logprobs, 0.0)[..., None])
        if d_entropies is not None:
            slope -= (torch.special.xlogy(p, p) + p * entropies[..., None]).mul_(d_entropies[..., None])
        return slope.div_(ctx.temperature).to(ctx.dtype), None, None, None, None, None


def _reduce(values: Tensor, op: Any, group: dist.ProcessGroup) -> Tensor:
    if group.size() > 1:
        dist.all_reduce(values, op=op, group=group)
    return values
