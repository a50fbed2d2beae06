"""Algorithms, one file each: settings, the fields they need, advantages (numpy) and a loss (torch).

`algorithm: {name: gspo}` names an entry of `ALGORITHMS`; `package.module:Class` names a user's
class. This package imports torch only when a loss is computed, and never imports
`relax_hpc.config`: the hub and the launcher need neither.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import MISSING, dataclass, fields
from types import MappingProxyType
from typing import Any, ClassVar, NoReturn

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
from relax_hpc.base.plugins import load_plugin

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


def algorithm_record(algorithm: Algorithm) -> dict[str, Any]:
    """Return the properties of ``algorithm`` that the queue reads, as JSON, for processes that do
    not import its class."""
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
"""Types of the entries of `algorithm_record`."""


@contextlib.contextmanager
def with_algorithm_record(record: Mapping[str, Any]) -> Iterator[None]:
    """Give these properties, see `algorithm_record`, to a class that is not imported within the
    block."""
    token = _RECORDED.set(record)
    try:
        yield
    finally:
        _RECORDED.reset(token)


@dataclass(kw_only=True)
class UnavailableAlgorithm(Algorithm):
    """Placeholder for a user's class that this process does not import, for example in `status`."""

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
        """Return no fields: they are unknown, and an existing run already has the groups that it
        needs."""
        return ()

    def findings(self) -> Iterator[str]:
        """Reason why the class cannot be imported, in one line."""
        yield f"name: {self.why}"

    def token_advantages(self, prompts: object) -> NoReturn:
        """ConfigError: the class cannot be imported."""
        raise ConfigError(f"algorithm.name: {self.why}")

    def loss(self, batch: object) -> NoReturn:
        """ConfigError: the class cannot be imported."""
        raise ConfigError(f"algorithm.name: {self.why}")


def algorithm_class(name: str) -> type[Algorithm]:
    """Return the class named ``name``: built in, or imported from `package.module:Class`.

    If the import fails, an `UnavailableAlgorithm` is returned, whose findings name the reason.
    ConfigError: there is no built-in algorithm with this name.
    """
    if ":" not in name:
        return load_plugin("algorithm", name, ALGORITHMS)
    try:
        return _checked(name, load_plugin("algorithm", name, ALGORITHMS))
    except ConfigError as error:
        attributes: dict[str, Any] = {"why": str(error).partition(": ")[2]}
        record = _RECORDED.get()
        if record.get("name") == name:
            attributes |= {
                "record": record,
                "gives": tuple(record["gives"]),
                "sequences": record["sequences"],
            }
        return type("UnavailableAlgorithm", (UnavailableAlgorithm,), attributes)


_REQUIRED_METHODS = ("advantages", "token_advantages", "given"), ("token_losses", "loss")
"""An algorithm must define at least one method of each of these tuples."""


def _checked(name: str, plugin: object) -> type[Algorithm]:
    if not (isinstance(plugin, type) and issubclass(plugin, Algorithm)):
        raise ConfigError(
            f"algorithm: {name!r}: found no class derived from relax_hpc.algorithms.base.Algorithm"
        )
    if "__annotations__" in vars(plugin) and "__dataclass_fields__" not in vars(plugin):
        raise ConfigError(
            f"algorithm: {name!r} is a class that adds settings; write "
            "@dataclass(kw_only=True) above it"
        )
    for setting in fields(plugin):
        if setting.default is MISSING and setting.default_factory is MISSING:
            raise ConfigError(
                f"algorithm: {name!r}: the setting {setting.name} has no default; give it one"
            )
    for methods in _REQUIRED_METHODS:
        if all(getattr(plugin, method) is getattr(Algorithm, method) for method in methods):
            raise ConfigError(
                f"algorithm: {name!r} does not override {' or '.join(methods)}; define one of them"
            )
    return plugin
