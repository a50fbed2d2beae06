"""Base of algorithms that learn from the rows of a file: nothing is drawn, and nothing is
rewarded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar

import numpy as np

from relax_hpc.algorithms.base import Algorithm, Prompt, Row

_OF_DRAWN_ROWS = (
    "entropy_coefficient",
    "log_entropy",
    "kl",
    "kl_in_reward",
    "whiten",
    "overlong",
    "correction",
    "mask_older_tokens",
    "mask_truncated",
    "shuffle_rewards",
)
"""Settings that speak of rewards, or of who drew a token."""


@dataclass(kw_only=True)
class FromFile(Algorithm):
    """Algorithm whose rows the role `data` reads from files. It gives no advantages: there are no
    rewards."""

    gives: ClassVar[tuple[str, ...]] = ()
    uses_old: ClassVar[bool] = False
    leaves_out: ClassVar[tuple[str, ...]] = _OF_DRAWN_ROWS
    """Settings of all algorithms that it has no use for."""

    @property
    def needs(self) -> tuple[str, ...]:
        return ()

    def findings(self) -> Iterator[str]:
        yield from super().findings()
        usual = Algorithm()
        for name in self.leaves_out:
            for key, found, allowed in _differing(name, getattr(self, name), getattr(usual, name)):
                yield (
                    f"{key}: found {found}, allowed with {self.name}: {allowed}; it has no use "
                    "for another"
                )

    def given(self, prompts: Sequence[Prompt]) -> list[dict[str, np.ndarray]]:
        return [{} for prompt in prompts for episode in prompt for _ in episode]

    def held_out(self, rows: Sequence[Row], logprobs: Sequence[np.ndarray]) -> dict[str, float]:
        """Metrics of held-out rows by the policy's ``logprobs`` of their trained tokens, [tokens]
        each, in nats."""
        raise NotImplementedError(f"{type(self).__name__} says nothing of held-out rows")


def _differing(name: str, found: Any, usual: Any) -> Iterator[tuple[str, Any, Any]]:
    """Settings that ``found`` has otherwise than ``usual``, with both values, by their keys below
    ``name``."""
    if not is_dataclass(found):
        if found != usual:
            yield name, found, usual
        return
    for field in fields(found):
        yield from _differing(
            f"{name}.{field.name}", getattr(found, field.name), getattr(usual, field.name)
        )
