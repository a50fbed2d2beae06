"""Input of a loss: values of every token by the names of their fields."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relax_hpc.base.fields import loss_fields

if TYPE_CHECKING:
    from torch import Tensor


class TokenBatch:
    """Aligned per-token values of b whole rows, [b, s] float32 (or float64): entry i belongs to
    token i.

    Beside the three below, every field that `relax_hpc.base.fields` declares for the loss is an
    attribute by its name, [b, s, *tail] of its declared type, or None where the rows lack it. Only
    entries with mask 1 are looked at; the others may hold anything, inf and NaN included.

    >>> import torch
    >>> batch = TokenBatch(logprobs=torch.zeros(1, 2), mask=torch.ones(1, 2),
    ...     advantages=torch.ones(1, 2))
    >>> batch.advantages.shape, batch.ref_logprobs
    (torch.Size([1, 2]), None)
    """

    __slots__ = ("entropy", "episode_tokens", "fields", "likeliest", "logprobs", "mask")

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
        """TypeError: one of ``fields`` is none that the loss takes."""
        if unknown := set(fields).difference(loss_fields()):
            raise TypeError(
                f"{min(unknown)}: no field that the loss takes; those are "
                f"{', '.join(loss_fields())}"
            )
        self.logprobs = logprobs
        """Log-probabilities of the tokens by the policy that is trained, with gradient; nats."""
        self.mask = mask
        """1 where the policy chose the token and is trained on it, else 0."""
        self.entropy = entropy
        """Entropy of the policy's distribution at each token, with gradient if it enters the loss;
        nats."""
        self.likeliest = likeliest
        """Log-probabilities of `teacher_top_ids` by the policy, [b, s, k] with gradient; nats."""
        self.episode_tokens = episode_tokens
        """[b, 1]: trained tokens of all rows of the row's episode, wherever those are; None: each
        row is an episode."""
        self.fields = fields
        """Values of the other fields of the loss by name; see `relax_hpc.base.fields`."""

    def __getattr__(self, name: str) -> Tensor | None:
        if name not in loss_fields():
            raise AttributeError(
                f"{name}: no field that the loss takes; those are {', '.join(loss_fields())}"
            )
        return self.fields.get(name)

    def replace(self, **changes: Tensor | None) -> TokenBatch:
        """A batch with other values by name."""
        own = {name: getattr(self, name) for name in self.__slots__ if name != "fields"}
        return TokenBatch(**{**own, **self.fields, **changes})

    def row_tokens(self) -> Tensor:
        """Trained tokens of each row, [b, 1] of the type of the log-probabilities."""
        return (self.mask > 0).to(self.logprobs.dtype).sum(dim=1, keepdim=True)

    def of_episode(self) -> Tensor:
        """Trained tokens of each row's whole episode, at least 1: [b, 1] of the type of the
        log-probabilities."""
        known = (
            self.row_tokens()
            if self.episode_tokens is None
            else self.episode_tokens.to(self.logprobs.dtype)
        )
        return known.clamp(min=1.0)

    def clean(self) -> TokenBatch:
        """Return a copy with zeros where the mask is 0. ValueError: a value is not of the mask's
        shape."""
        import torch

        keep, found = self.mask > 0, {}
        own = {"logprobs": self.logprobs, "entropy": self.entropy, "likeliest": self.likeliest}
        for name, value in (own | self.fields).items():
            if value is None:
                continue
            if value.shape[:2] != keep.shape:
                raise ValueError(
                    f"{name} has shape {tuple(value.shape)}, the mask {tuple(keep.shape)}"
                )
            inside = keep.reshape(*keep.shape, *(1,) * (value.dim() - 2))
            found[name] = torch.where(inside, value, torch.zeros_like(value))
        return TokenBatch(**found, mask=self.mask, episode_tokens=self.episode_tokens)
