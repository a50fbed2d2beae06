"""The loss of a critic, and a measure of how much its values say."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def clipped_value_loss(
    predicted: Tensor, values: Tensor, returns: Tensor, mask: Tensor, clip: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of ``predicted`` values, a scalar with gradient, and detached sums to log; [b, s]
    all.

    A token costs max((V - R)^2, (V_clipped - R)^2) / 2, V_clipped within ``clip`` (0: it is V) of
    the ``values`` that its advantage was made with: PPO's loss with the value clipped as the policy
    is, as in its reference implementation. Both are sums over tokens with mask 1; others may hold
    anything. The metrics without `value/` are as in `losses.policy_loss`; `value/error_square` is
    that of ``values``, before this step has learned.
    """
    keep = mask > 0
    predicted, values, returns = (one.where(keep, 0.0) for one in (predicted, values, returns))
    held = predicted.clamp(values - clip, values + clip) if clip else predicted
    free, cut = (predicted - returns).square(), (held - returns).square()
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
    """Share of the returns' variance that the values have said before: 1: all, 0: none, below:
    worse than their mean.

    ``means`` of `clipped_value_loss`'s sums.

    >>> explained_variance({"value/error_square": 0.5, "value/return": 1.0, "value/return_square":
    ...     3.0})
    0.75
    """
    variance = means["value/return_square"] - means["value/return"] ** 2
    return 1.0 - means["value/error_square"] / variance if variance > 0 else 0.0
