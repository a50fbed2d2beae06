"""Random numbers that depend only on a key: the responses of a seeded engine do not depend on its
other requests."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

    from relax_hpc.data.generation import Sampling


def keyed_uniform(seed: int, prompt_id: str, sample: int, position: int) -> float:
    """A uniform number in [0, 1) that depends only on its key: 53 bits of BLAKE2b. `position` 0 is
    the first token after the prompt.
    """
    key = f"{seed}\0{prompt_id}\0{sample}\0{position}".encode()
    return (int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 11) * 2.0**-53


def sample_token(logits: torch.Tensor, sampling: Sampling, uniform: float) -> tuple[int, float]:
    """A token of `logits` [vocabulary] and its log-probability in nats.

    The token is the inverse of the cumulative distribution at `uniform`, in float64 and in the
    order of token ids. The log-probability is float32 log_softmax(logits / temperature) over the
    tokens that `top_k`, `top_p` and `min_p` keep. Temperature 0 takes the most probable token, with
    its log-probability at temperature 1.
    """
    logprobs = (logits.float() / (sampling.temperature or 1.0)).log_softmax(-1).cpu()
    if sampling.temperature == 0:
        token = int(logprobs.argmax())
        return token, float(logprobs[token])
    weights = logprobs.double().exp().numpy()
    if not sampling.is_cut:
        token = _inverse_cdf(weights, uniform)
        return token, float(logprobs[token])
    kept_weights = cut(weights, sampling)
    token = _inverse_cdf(kept_weights, uniform)
    return token, min(0.0, float(logprobs[token]) - math.log(kept_weights.sum()))


def cut(probabilities: np.ndarray, sampling: Sampling) -> np.ndarray:
    """``probabilities`` [vocabulary] with 0 for the tokens that a setting excludes. Among equal
    probabilities the smaller ids are kept.

    `top_k` excludes all but the k most probable tokens. `top_p` excludes a token if the more
    probable ones have that mass together. `min_p` excludes a token below that share of the largest
    probability. As in SGLang, each setting is applied to the whole distribution.
    """
    order = np.argsort(-probabilities, kind="stable")
    ordered = probabilities[order]
    kept = (np.cumsum(ordered) - ordered < sampling.top_p) & (
        ordered >= sampling.min_p * ordered[0]
    )
    kept[sampling.top_k or len(kept) :] = False
    kept[0] = True
    kept_probabilities = np.zeros_like(probabilities)
    kept_probabilities[order[kept]] = ordered[kept]
    return kept_probabilities


def _inverse_cdf(weights: np.ndarray, uniform: float) -> int:
    cumulative = np.cumsum(weights)
    token = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    # Rounding may put the point behind the last token with a weight.
    return min(token, int(np.flatnonzero(weights)[-1]))
