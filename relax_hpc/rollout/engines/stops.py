"""Tokens and texts that end a response which is sampled token by token."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from relax_hpc.data.generation import Sampling


class Decoder(Protocol):
    """Decoder of token ids, such as `relax_hpc.data.tokenizer.Tokenizer`."""

    def decode(self, ids: list[int]) -> str: ...

    def name_of(self, number: int) -> str: ...


class Encoder(Protocol):
    """Tokenizer that knows its special tokens, such as `relax_hpc.data.tokenizer.Tokenizer`."""

    special_names: tuple[str, ...]

    def encode(
        self, text: str, special: bool = True, special_tokens: bool = False
    ) -> list[int]: ...


def with_stops(sampling: Sampling, texts: Sequence[str], tokenizer: Encoder) -> Sampling:
    """``sampling`` that also ends a response at each of ``texts``. The name of a special token
    stands for that token: responses are decoded without special tokens, so its text would never
    match."""
    special = [text for text in texts if text in tokenizer.special_names]
    ids = [tokenizer.encode(text, special=False, special_tokens=True)[0] for text in special]
    plain_texts = [text for text in texts if text not in special]
    return replace(
        sampling,
        stop_token_ids=tuple(dict.fromkeys((*sampling.stop_token_ids, *ids))),
        stop=(*sampling.stop, *plain_texts),
    )


@dataclass(frozen=True, slots=True)
class Stops:
    """Tokens that end one response, and texts that end it when its last tokens complete them."""

    tokens: frozenset[int]
    texts: tuple[str, ...]
    tokenizer: Decoder

    @classmethod
    def from_sampling(cls, sampling: Sampling, ends: Collection[int], tokenizer: Decoder) -> Stops:
        """Stops of a request: those of its ``sampling``, and the end tokens ``ends`` of the
        model."""
        return cls(frozenset({*sampling.stop_token_ids, *ends}), sampling.stop, tokenizer)

    def met(self, token_ids: Sequence[int], turn: int = 0) -> bool:
        """Whether the last of the ``token_ids`` ends the response. ``turn``: index of the first
        token of the present turn; texts of earlier turns do not count."""
        if token_ids[-1] in self.tokens:
            return True
        if not self.texts:
            return False
        if self.tokenizer.name_of(token_ids[-1]) in self.texts:
            return True
        # A token has at least one byte, so a text spans at most as many tokens as it has bytes.
        max_tokens = max(len(text.encode()) for text in self.texts)
        tail = self.tokenizer.decode(list(token_ids[max(turn, len(token_ids) - max_tokens) :]))
        return any(text in tail for text in self.texts)
