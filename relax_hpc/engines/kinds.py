"""The kinds of engines: one entry each. It imports none of them, so that configurations may ask what there is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from relax_hpc.named import named

if TYPE_CHECKING:
    from relax_hpc.config.schema import Config

_KEY = "rollout.engine.kind"


@dataclass(frozen=True, slots=True)
class EngineKind:
    """Parts of one kind of engine, each as `package.module:name`."""

    engine: str
    """Class of the engine, see `relax_hpc.engines.make_engine`."""
    check: str = ""
    """Function of the configuration that gives its findings, one line each; empty: there is nothing to find."""


KINDS: dict[str, EngineKind] = {
    "sglang": EngineKind("relax_hpc.engines.sglang.engine:SglangEngine", "relax_hpc.engines.sglang.flags:check"),
    "transformers": EngineKind("relax_hpc.engines.transformers_engine:TransformersEngine"),
    "simulated": EngineKind("relax_hpc.engines.simulated_engine:SimulatedEngine"),
}


def engine_class(kind: str) -> Any:
    """The class of the engines that `rollout.engine.kind` names. ConfigError: there is none."""
    return named(_KEY, kind, {name: known.engine for name, known in KINDS.items()})


def findings_of(kind: str, config: Config) -> Iterable[str]:
    """Mistakes of ``config`` for engines of this kind, one line each. ConfigError: there is no such kind."""
    if kind not in KINDS:
        engine_class(kind)
        return ()
    where = KINDS[kind].check
    return named(_KEY, where, {})(config) if where else ()
