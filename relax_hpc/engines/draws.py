"""Draws that depend on their key alone: a seeded engine gives the same response whatever it is asked beside it."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


def keyed_uniform(seed: int, prompt_id: str, sample: int, position: int) -> float:
    """A uniform number in [0, 1) that depends on its key alone: 53 bits of BLAKE2b. `position` 0 is the first token
    after the prompt.
    """
    key = f"{seed}\0{prompt_id}\0{sample}\0{position}".encode()
    return (int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 11) * 2.0**-53


def sample_token(logits: torch.Tensor, temperature: float, top_p: float, uniform: float) -> tuple[int, float]:
    """A token of `logits` [vocabulary] and its log-probability in nats.

    The inverse of the cumulative distribution, in float64 and in the order of token ids, at `uniform`. `top_p` keeps
    the most probable tokens up to that mass. The log-probability is float32 log_softmax(logits / temperature), before
    top_p. Temperature 0 takes the most probable token, with its log-probability at temperature 1.
    """
    logprobs = (logits.float() / (temperature or 1.0)).log_softmax(-1).cpu()
    if temperature == 0:
        token = int(logprobs.argmax())
    else:
        token = _inverse_cdf(_top_p(logprobs.double().exp().numpy(), top_p), uniform)
    return token, float(logprobs[token])


def _top_p(probabilities: np.ndarray, top_p: float) -> np.ndarray:
    """Zero where the mass of strictly more probable tokens (ties: smaller ids first) reaches `top_p`."""
    if top_p >= 1:
        return probabilities
    order = np.argsort(-probabilities, kind="stable")
    before = np.cumsum(probabilities[order]) - probabilities[order]
    kept = np.where(before < top_p, probabilities[order], 0.0)
    kept[0] = probabilities[order[0]]
    return kept[np.argsort(order)]


def _inverse_cdf(weights: np.ndarray, uniform: float) -> int:
    cumulative = np.cumsum(weights)
    token = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    # Rounding may put the point at the very end.
    return min(token, int(np.flatnonzero(weights)[-1]))
