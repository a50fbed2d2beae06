"""Ends of a response that is drawn token by token."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from relax_hpc.engines.engine import Sampling


class Decoder(Protocol):
    """Decoder of token ids, such as `relax_hpc.data.tokenizer.Tokenizer`."""

    def decode(self, ids: list[int]) -> str: ...


@dataclass(frozen=True, slots=True)
class Stops:
    """The ends of one response: tokens, or texts that the last tokens have completed."""

    tokens: frozenset[int]
    texts: tuple[str, ...]
    tokenizer: Decoder

    @classmethod
    def of(cls, sampling: Sampling, ends: Collection[int], tokenizer: Decoder) -> Stops:
        """Stops of a request: those that were asked for, and the model's own ``ends``."""
        return cls(frozenset({*sampling.stop_token_ids, *ends}), sampling.stop, tokenizer)

    def met(self, token_ids: Sequence[int], turn: int = 0) -> bool:
        """Whether the last of the response's tokens so far ends its turn, which begins at ``turn``."""
        if token_ids[-1] in self.tokens:
            return True
        if not self.texts:
            return False
        # A token has at least a byte, so that no text is in more tokens than it has bytes.
        most = max(len(text.encode()) for text in self.texts)
        tail = self.tokenizer.decode(list(token_ids[max(turn, len(token_ids) - most) :]))
        return any(text in tail for text in self.texts)
