"""The loss of a critic, and a measure of how well its values predict returns."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def clipped_value_loss(
    predicted: Tensor, values: Tensor, returns: Tensor, mask: Tensor, clip: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of ``predicted`` values, a scalar with gradient, and detached sums to log.
    All inputs are [b, s].

    A token's loss is max((V - R)^2, (V_clipped - R)^2) / 2. V_clipped is V limited to a distance of
    ``clip`` (0: no limit) from ``values``, which the token's advantage was computed from. The value
    is clipped as the policy is, as in the reference implementation of PPO. Loss and metrics are
    sums over tokens with mask 1; other tokens may contain anything. Metrics without `value/` are as
    in `losses.policy_loss`. `value/error_square` is the squared error of ``values``, before this
    step.
    """
    keep = mask > 0
    predicted = predicted.where(keep, 0.0)
    values = values.where(keep, 0.0)
    returns = returns.where(keep, 0.0)
    held = predicted.clamp(values - clip, values + clip) if clip else predicted
    free = (predicted - returns).square()
    cut = (held - returns).square()
    loss = 0.5 * free.maximum(cut).sum()
    tokens = keep.sum().to(loss.dtype)
    metrics = {"weight": tokens, "tokens": tokens, "loss/value": loss}
    sums = {
        "clip_fraction": (cut > free).to(loss.dtype),
        "value/mean": values,
        "value/error_square": (values - returns).square(),
        "value/return": returns,
        "value/return_square": returns.square(),
    }
    metrics |= {name: value.sum() for name, value in sums.items()}
    return loss, {name: value.detach() for name, value in metrics.items()}


def explained_variance(means: dict[str, float]) -> float:
    """Return the share of the returns' variance that the values explain: 1 for exact values, 0 for
    none, below 0 if the values are worse than the mean of the returns.

    ``means`` are means of the sums of `clipped_value_loss`.

    >>> means = {"value/error_square": 0.5, "value/return": 1.0, "value/return_square": 3.0}
    >>> explained_variance(means)
    0.75
    """
    variance = means["value/return_square"] - means["value/return"] ** 2
    if variance <= 0:
        return 0.0
    return 1.0 - means["value/error_square"] / variance
