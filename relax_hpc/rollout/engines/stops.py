"""Ends of a response that is drawn token by token."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from relax_hpc.rollout.engines.engine import Sampling


class Decoder(Protocol):
    """Decoder of token ids, such as `relax_hpc.data.tokenizer.Tokenizer`."""

    def decode(self, ids: list[int]) -> str: ...

    def name_of(self, number: int) -> str: ...


class Names(Protocol):
    """Tokenizer that knows its special tokens, such as `relax_hpc.data.tokenizer.Tokenizer`."""

    special_names: tuple[str, ...]

    def encode(
        self, text: str, special: bool = True, special_tokens: bool = False
    ) -> list[int]: ...


def with_stops(sampling: Sampling, texts: Sequence[str], tokenizer: Names) -> Sampling:
    """``sampling`` that also ends a response at each of ``texts``. The name of a special token
    means that token: responses are decoded without special tokens, so its text would never
    match."""
    special = [text for text in texts if text in tokenizer.special_names]
    ids = [tokenizer.encode(text, special=False, special_tokens=True)[0] for text in special]
    others = [text for text in texts if text not in special]
    return replace(
        sampling,
        stop_token_ids=tuple(dict.fromkeys((*sampling.stop_token_ids, *ids))),
        stop=(*sampling.stop, *others),
    )


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
        """Whether the last of the response's tokens so far ends its turn, which begins at
        ``turn``."""
        if token_ids[-1] in self.tokens:
            return True
        if not self.texts:
            return False
        if self.tokenizer.name_of(token_ids[-1]) in self.texts:
            return True
        # A token has at least a byte, so that no text is in more tokens than it has bytes.
        most = max(len(text.encode()) for text in self.texts)
        tail = self.tokenizer.decode(list(token_ids[max(turn, len(token_ids) - most) :]))
        return any(text in tail for text in self.texts)
