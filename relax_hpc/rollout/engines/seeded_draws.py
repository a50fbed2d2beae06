"""Draws that depend on their key alone: a seeded engine gives the same response whatever it is
asked beside it."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

    from relax_hpc.rollout.engines.engine import Sampling


def keyed_uniform(seed: int, prompt_id: str, sample: int, position: int) -> float:
    """A uniform number in [0, 1) that depends on its key alone: 53 bits of BLAKE2b. `position` 0 is
    the first token after the prompt.
    """
    key = f"{seed}\0{prompt_id}\0{sample}\0{position}".encode()
    return (int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 11) * 2.0**-53


def sample_token(logits: torch.Tensor, sampling: Sampling, uniform: float) -> tuple[int, float]:
    """A token of `logits` [vocabulary] and its log-probability in nats.

    The inverse of the cumulative distribution, in float64 and in the order of token ids, at
    `uniform`. The log-probability is float32 log_softmax(logits / temperature), over what `top_k`,
    `top_p` and `min_p` leave. Temperature 0 takes the most probable token, with its log-probability
    at temperature 1.
    """
    logprobs = (logits.float() / (sampling.temperature or 1.0)).log_softmax(-1).cpu()
    if sampling.temperature == 0:
        token = int(logprobs.argmax())
        return token, float(logprobs[token])
    weights = logprobs.double().exp().numpy()
    if not sampling.is_cut:
        token = _inverse_cdf(weights, uniform)
        return token, float(logprobs[token])
    left = cut(weights, sampling)
    token = _inverse_cdf(left, uniform)
    return token, min(0.0, float(logprobs[token]) - math.log(left.sum()))


def cut(probabilities: np.ndarray, sampling: Sampling) -> np.ndarray:
    """``probabilities`` [vocabulary], 0 where one of three leaves a token out; of ties the smaller
    ids stay.

    `top_k`: it is none of the k most probable. `top_p`: those that are more probable have that mass
    already. `min_p`: it is less probable than that share of the most probable one. Each is of the
    whole, as in SGLang.
    """
    order = np.argsort(-probabilities, kind="stable")
    ordered = probabilities[order]
    kept = (np.cumsum(ordered) - ordered < sampling.top_p) & (
        ordered >= sampling.min_p * ordered[0]
    )
    kept[sampling.top_k or len(kept) :] = False
    kept[0] = True
    left = np.zeros_like(probabilities)
    left[order[kept]] = ordered[kept]
    return left


def _inverse_cdf(weights: np.ndarray, uniform: float) -> int:
    cumulative = np.cumsum(weights)
    token = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    # Rounding may put the point at the very end.
    return min(token, int(np.flatnonzero(weights)[-1]))
