"""Input of a loss: per-token values by the names of their fields."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relax_hpc.base.fields import loss_fields

if TYPE_CHECKING:
    from torch import Tensor


class TokenBatch:
    """Aligned per-token values of b whole rows, [b, s] float32 (or float64): entry i belongs to
    token i.

    In addition to the attributes that `__init__` sets, every field that `relax_hpc.base.fields`
    declares for the loss is an attribute, [b, s, *tail] of its declared type, or None if the rows
    lack it. Only entries with mask 1 count; the others may contain anything, inf and NaN included.

    >>> import torch
    >>> batch = TokenBatch(logprobs=torch.zeros(1, 2), mask=torch.ones(1, 2),
    ...     advantages=torch.ones(1, 2))
    >>> batch.advantages.shape, batch.ref_logprobs
    (torch.Size([1, 2]), None)
    """

    __slots__ = ("entropy", "episode_tokens", "fields", "likeliest", "logprobs", "mask")

    if TYPE_CHECKING:
        # Fields that losses of this package use. `__getattr__` looks them up in `fields`.
        advantages: Tensor
        old_logprobs: Tensor
        rollout_logprobs: Tensor

    def __init__(
        self,
        *,
        logprobs: Tensor,
        mask: Tensor,
        entropy: Tensor | None = None,
        likeliest: Tensor | None = None,
        episode_tokens: Tensor | None = None,
        **fields: Tensor | None,
    ) -> None:
        """TypeError: the loss does not take one of ``fields``."""
        unknown = set(fields).difference(loss_fields())
        if unknown:
            raise TypeError(
                f"{min(unknown)} is not a field that the loss takes; allowed: "
                f"{', '.join(loss_fields())}"
            )
        self.logprobs = logprobs
        """Log-probabilities of the tokens by the policy that is trained, with gradient; nats."""
        self.mask = mask
        """1 where the policy sampled the token and is trained on it, otherwise 0."""
        self.entropy = entropy
        """Entropy of the policy's distribution at each token, in nats; with gradient if the loss
        contains it."""
        self.likeliest = likeliest
        """Log-probabilities of `teacher_top_ids` by the policy, [b, s, k] with gradient; nats."""
        self.episode_tokens = episode_tokens
        """Trained tokens of all rows of the row's episode, in this batch or not: [b, 1]. None: each
        row is a whole episode."""
        self.fields = fields
        """Values of the other fields of the loss by name; see `relax_hpc.base.fields`."""

    def __getattr__(self, name: str) -> Tensor | None:
        if name not in loss_fields():
            raise AttributeError(
                f"{name} is not a field that the loss takes; allowed: {', '.join(loss_fields())}"
            )
        return self.fields.get(name)

    def replace(self, **changes: Tensor | None) -> TokenBatch:
        """Return a batch in which some values, given by name, are different."""
        slots = {name: getattr(self, name) for name in self.__slots__ if name != "fields"}
        return TokenBatch(**{**slots, **self.fields, **changes})

    def row_tokens(self) -> Tensor:
        """Return the number of trained tokens of each row, [b, 1] of the log-probabilities'
        type."""
        return (self.mask > 0).to(self.logprobs.dtype).sum(dim=1, keepdim=True)

    def episode_token_counts(self) -> Tensor:
        """Return the number of trained tokens of each row's whole episode, at least 1: [b, 1] of
        the log-probabilities' type."""
        if self.episode_tokens is None:
            return self.row_tokens().clamp(min=1.0)
        return self.episode_tokens.to(self.logprobs.dtype).clamp(min=1.0)

    of_episode = episode_token_counts  # Name in release 0.1.

    def clean(self) -> TokenBatch:
        """Return a copy with zeros where the mask is 0. ValueError: the first two dimensions of a
        value are not those of the mask."""
        import torch

        keep = self.mask > 0
        values = {"logprobs": self.logprobs, "entropy": self.entropy, "likeliest": self.likeliest}
        cleaned = {}
        for name, value in (values | self.fields).items():
            if value is None:
                continue
            if value.shape[:2] != keep.shape:
                raise ValueError(
                    f"{name} has shape {tuple(value.shape)}, the mask {tuple(keep.shape)}"
                )
            inside = keep.reshape(*keep.shape, *(1,) * (value.dim() - 2))
            cleaned[name] = torch.where(inside, value, torch.zeros_like(value))
        return TokenBatch(**cleaned, mask=self.mask, episode_tokens=self.episode_tokens)
