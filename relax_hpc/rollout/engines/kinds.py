"""Checks of settings by kind of engine. No engine is imported, so that a configuration can be
checked without the libraries of an engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from relax_hpc.base.engine_classes import ENGINE_CLASSES, KIND_KEY, engine_class
from relax_hpc.base.plugins import load_plugin

if TYPE_CHECKING:
    from relax_hpc.config.schema import Config

_CHECKS = {"sglang": "relax_hpc.rollout.engines.sglang.flags:check"}
"""Kind of a built-in engine -> function `package.module:name` that takes the configuration and
returns its findings, one line each. A kind that is not listed has no settings to check."""


def findings_of(kind: str, config: Config) -> Iterable[str]:
    """Mistakes in ``config`` for engines of ``kind``, one line each. ConfigError: the kind is
    unknown."""
    if kind not in ENGINE_CLASSES:
        engine_class(kind)
        return ()
    return load_plugin(KIND_KEY, _CHECKS[kind], {})(config) if kind in _CHECKS else ()
