"""Algorithms, one file each: settings, the fields they need, advantages (numpy) and a loss (torch).

`algorithm: {name: gspo}` names one of `ALGORITHMS`, or `package.module:Class` of a user's own.
Nothing here imports torch, or `relax_hpc.config`, before a loss is asked for: the hub and the
launcher have neither use.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import MISSING, dataclass, fields
from types import MappingProxyType
from typing import Any, ClassVar

from relax_hpc.algorithms.base import Algorithm
from relax_hpc.algorithms.cispo import Cispo
from relax_hpc.algorithms.distill import Distill
from relax_hpc.algorithms.dpo import Dpo
from relax_hpc.algorithms.dr_grpo import DrGrpo
from relax_hpc.algorithms.dual_clip import DualClip
from relax_hpc.algorithms.grpo import Grpo
from relax_hpc.algorithms.gspo import Gspo
from relax_hpc.algorithms.m2po import M2po
from relax_hpc.algorithms.ppo import Ppo
from relax_hpc.algorithms.reinforce_pp import ReinforcePP, ReinforcePPBaseline
from relax_hpc.algorithms.rloo import Rloo
from relax_hpc.algorithms.sapo import Sapo
from relax_hpc.algorithms.sft import Sft
from relax_hpc.base.errors import ConfigError
from relax_hpc.base.plugins import named

ALGORITHMS: dict[str, type[Algorithm]] = {
    "grpo": Grpo,
    "dr_grpo": DrGrpo,
    "rloo": Rloo,
    "gspo": Gspo,
    "cispo": Cispo,
    "sapo": Sapo,
    "m2po": M2po,
    "reinforce_pp": ReinforcePP,
    "reinforce_pp_baseline": ReinforcePPBaseline,
    "dual_clip": DualClip,
    "ppo": Ppo,
    "distill": Distill,
    "sft": Sft,
    "dpo": Dpo,
}


_NOTHING: Mapping[str, Any] = MappingProxyType({})
_RECORDED: ContextVar[Mapping[str, Any]] = ContextVar("recorded", default=_NOTHING)


def record_of(algorithm: Algorithm) -> dict[str, Any]:
    """Properties of ``algorithm`` that the queue reads, as JSON, for processes that do not import
    its class."""
    return {
        "name": algorithm.name,
        "needs": list(algorithm.needs),
        "gives": list(algorithm.gives),
        "sequences": algorithm.sequences,
        "whole_step": algorithm.whole_step,
    }


RECORD_KINDS: Mapping[str, type] = {
    "name": str,
    "needs": list,
    "gives": list,
    "sequences": int,
    "whole_step": bool,
}
"""Types of the entries of `record_of`."""


@contextlib.contextmanager
def recorded(record: Mapping[str, Any]) -> Iterator[None]:
    """Give a class that is not imported within the block the properties in ``record``, see
    `record_of`."""
    token = _RECORDED.set(record)
    try:
        yield
    finally:
        _RECORDED.reset(token)


@dataclass(kw_only=True)
class Unavailable(Algorithm):
    """Stands for a user's own class that this process does not import, as `status` does not."""

    why: ClassVar[str] = ""
    uses_old: ClassVar[bool] = False
    record: ClassVar[Mapping[str, Any]] = _NOTHING

    @property
    def needs(self) -> tuple[str, ...]:
        """See `Algorithm`."""
        return tuple(self.record.get("needs", super().needs))

    @property
    def whole_step(self) -> bool:
        """See `Algorithm`."""
        return self.record.get("whole_step", super().whole_step)

    def loss_needs(self, stale: bool = False) -> tuple[str, ...]:
        """Empty: the fields are not known, and a run that exists has the groups that it needs."""
        return ()

    def findings(self) -> Iterator[str]:
        """Reason why the class cannot be imported, one line."""
        yield f"name: {self.why}"

    def token_advantages(self, *_: object) -> list:
        """ConfigError: the class cannot be imported."""
        raise ConfigError(f"algorithm.name: {self.why}")

    loss = token_advantages


def algorithm_class(name: str) -> type[Algorithm]:
    """The class called ``name``: built in, or imported from `package.module:Class`.

    ConfigError: no built-in one has this name. What is not imported is an `Unavailable`, whose
    findings say why.
    """
    if ":" not in name:
        return named("algorithm", name, ALGORITHMS)
    try:
        return _checked(name, named("algorithm", name, ALGORITHMS))
    except ConfigError as error:
        attributes: dict[str, Any] = {"why": str(error).partition(": ")[2]}
        record = _RECORDED.get()
        if record.get("name") == name:
            attributes |= {
                "record": record,
                "gives": tuple(record["gives"]),
                "sequences": record["sequences"],
            }
        return type("Unavailable", (Unavailable,), attributes)


_PARTS = ("advantages", "token_advantages", "given"), ("token_losses", "loss")
"""Methods of which an algorithm has to have one of each: what it makes of rewards, and what it
learns by."""


def _checked(name: str, found: object) -> type[Algorithm]:
    if not (isinstance(found, type) and issubclass(found, Algorithm)):
        raise ConfigError(
            f"algorithm: {name!r}: found no class derived from relax_hpc.algorithms.base.Algorithm"
        )
    if "__annotations__" in vars(found) and "__dataclass_fields__" not in vars(found):
        raise ConfigError(
            f"algorithm: {name!r}: a class with settings of its own, write "
            "@dataclass(kw_only=True) above it"
        )
    if bare := [
        each.name for each in fields(found) if each.default is MISSING is each.default_factory
    ]:
        raise ConfigError(
            f"algorithm: {name!r}: found no default of its setting {bare[0]}; give it one"
        )
    for part in _PARTS:
        if all(getattr(found, method) is getattr(Algorithm, method) for method in part):
            raise ConfigError(
                f"algorithm: {name!r}: found no {' or '.join(part)} of its own; define one of them"
            )
    return found
