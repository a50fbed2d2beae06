"""Base of algorithms that learn from the rows of a file: nothing is sampled, and there are no
rewards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar

import numpy as np

from relax_hpc.algorithms.base import Algorithm, Prompt, rows_of

_FOR_SAMPLED_ROWS = (
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
"""Settings that concern rewards or sampled tokens."""


@dataclass(kw_only=True)
class FromFile(Algorithm):
    """Algorithm whose rows the role `data` reads from files. It gives no advantages, because there
    are no rewards."""

    gives: ClassVar[tuple[str, ...]] = ()
    uses_old: ClassVar[bool] = False
    leaves_out: ClassVar[tuple[str, ...]] = _FOR_SAMPLED_ROWS
    """Settings of all algorithms that have no effect here and must keep their defaults."""

    @property
    def needs(self) -> tuple[str, ...]:
        return ()

    def findings(self) -> Iterator[str]:
        yield from super().findings()
        defaults = Algorithm()
        for name in self.leaves_out:
            differences = _differences(name, getattr(self, name), getattr(defaults, name))
            for key, value, default in differences:
                yield (
                    f"{key}: found {value}, allowed with {self.name}: {default}; the algorithm "
                    "does not use this setting"
                )

    def given(self, prompts: Sequence[Prompt]) -> list[dict[str, np.ndarray]]:
        return [{} for _ in rows_of(prompts)]


def _differences(name: str, value: Any, default: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield key, value and default of each setting at or below ``name`` that is not the default."""
    if not is_dataclass(value):
        if value != default:
            yield name, value, default
        return
    for field in fields(value):
        key = f"{name}.{field.name}"
        yield from _differences(key, getattr(value, field.name), getattr(default, field.name))
